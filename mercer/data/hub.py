"""Data sets streamed through the package `datasets`: from the hub, or from a local folder it understands."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mercer.data.packages import require
from mercer.errors import DataError


@dataclass(frozen=True)
class HubSource:
    """The parts of `hf:NAME[:CONFIG][@SPLIT]`."""

    name: str
    config: str | None
    split: str


def parse_hub(source: str) -> HubSource:
    """Take `hf:NAME[:CONFIG][@SPLIT]` apart.

    Raises:
        ValueError: the source is not of that form.

    >>> parse_hub("hf:Salesforce/wikitext:wikitext-2-raw-v1@test")
    HubSource(name='Salesforce/wikitext', config='wikitext-2-raw-v1', split='test')
    """
    match = re.fullmatch(r"hf:([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?", source)
    if match is None:
        raise ValueError(f"cannot read {source!r} as a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG@SPLIT")
    name, config, split = match.groups()
    return HubSource(name, config, split or "train")


def hub_documents(source: HubSource, *, text_field: str) -> Iterator[str]:
    """Stream the text column of a data set; nothing is downloaded but what is read.

    Args:
        source: which data set.
        text_field: its column of text.

    Raises:
        ValueError: `datasets` is missing, or the data set has no such configuration or split.
        DataError: the data set cannot be reached, or a row has no text.
    """
    datasets = require("datasets", extra="data", purpose="streaming an hf: source")
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
        yield from _texts(rows, source, text_field)
    except ValueError as error:
        raise ValueError(f"hf:{source.name}: {_first_line(error)}") from error
    except OSError as error:  # not found, not reachable, offline: `datasets` derives all three from OSError
        raise DataError(
            f"hf:{source.name} cannot be read: {_first_line(error)}; check its name and the network, or use local files"
        ) from error


def _texts(rows: Iterable[dict[str, object]], source: HubSource, text_field: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        if text_field not in row:
            raise DataError(
                f"hf:{source.name}: no column {text_field!r} (only {', '.join(row)}); pass text_field= with one of them"
            )
        value = row[text_field]
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"hf:{source.name}, row {number}: the column {text_field!r} is {type(value).__name__}; it must be text"
            )
        yield value or ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
