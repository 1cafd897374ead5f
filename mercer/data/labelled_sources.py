"""Ready-made splits of labelled text: files side by side, or a data set on the hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mercer.data.hub import HubSource, parse_hub
from mercer.data.packages import require
from mercer.data.tables import TABLES, Row, table_kind
from mercer.errors import DataError

SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}
SPLIT_NAMES |= {"dev": "validation", "test": "test"}
SPLIT_NAMES |= {"validation_matched": "validation", "test_matched": "test"}  # of MNLI, from the genres of its train
GLUE = "nyu-mll/glue"  # where the hub keeps the tasks that everybody calls glue/TASK


def find_splits(path: Path) -> dict[str, Path] | None:
    """Return the files of ready-made splits by split, or None where a path leads to none.

    Args:
        path: a folder with `train.tsv` and so on, or with one `name.train.tsv`; or the common start `folder/name`.

    Raises:
        DataError: a folder holds two sets of splits, or a split twice.
    """
    folder, name = (path, None) if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir():
        return None
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        kind = table_kind(file)
        if kind is None or not file.is_file():
            continue
        stem, _, split = file.name[: -len(kind)].rpartition(".")
        split = SPLIT_NAMES.get(split)
        if split is None or (name is not None and stem != name):
            continue
        if split in found.setdefault(stem, {}):
            raise DataError(f"{folder} holds {split} twice: {found[stem][split].name} and {file.name}; take one out")
        found[stem][split] = file
    found = {stem: files for stem, files in found.items() if "train" in files}
    if len(found) > 1:
        named = ", ".join(str(folder / stem) for stem in sorted(found))
        raise DataError(f"{folder} holds {len(found)} sets of splits; name one of them: {named}")
    if not found and path.is_dir():
        raise DataError(f"{folder} holds no train split; put train{' or train'.join(TABLES)} into it")
    return next(iter(found.values()), None)


def hub_splits(source: str) -> tuple[dict[str, list[Row]], dict[str, tuple[str, ...]]]:
    """Read a data set through `datasets`: all its train, validation and test splits, or the one that is named.

    Args:
        source: `hf:NAME[:CONFIG][@SPLIT]`, where `hf:glue/TASK` stands for `hf:nyu-mll/glue:TASK`.

    Returns:
        Rows by split (a named split is "train"), and by column the names of its classes, where the data set gives them.

    Raises:
        ValueError: `datasets` is missing, or the data set has no such configuration or split.
        DataError: the data set cannot be reached.
    """
    asked = parse_hub(source)
    if asked.name.startswith("glue/") and not Path(asked.name).is_dir():
        asked = HubSource(GLUE, asked.name.removeprefix("glue/"), asked.split)
    split = asked.split if "@" in source else None
    datasets = require("datasets", extra="data", purpose="reading an hf: source")
    try:
        loaded = datasets.load_dataset(asked.name, asked.config, split=split, streaming=True)
        parts: dict[str, Any] = {"train": loaded} if split else dict(loaded)
        found = {SPLIT_NAMES[name]: _rows(source, name, part) for name, part in parts.items() if name in SPLIT_NAMES}
    except ValueError as error:
        raise ValueError(f"{source}: {_first_line(error)}") from error
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {_first_line(error)}; check its name and the network, or use local files"
        ) from error
    features = next(iter(parts.values())).features or {}
    named = {column: tuple(kind.names) for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    return found, named


def _rows(source: str, split: str, part: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row(f"{source}, {split}, row {number}", row) for number, row in enumerate(part)]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
