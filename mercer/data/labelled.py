"""Labelled text for classifiers: sentences, or pairs of them, each with one of a few classes."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mercer.data.columns import Columns, choose_columns, class_names, class_numbers, column_texts
from mercer.data.docstrings import docstring_sentences
from mercer.data.labelled_sources import find_splits, hub_splits
from mercer.data.split import split_documents
from mercer.data.tables import Row, read_table, table_kind
from mercer.errors import DataError, unknown

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.1  # share of the examples of each split that is made by us


@dataclass(frozen=True, eq=False)
class LabelledSplit:
    """Examples of one split, in the order of their source.

    Args:
        texts: what is to be classified, or its first part [n].
        pairs: second parts [n], where every example is a pair of texts.
        labels: the class of each, a place in `Labelled.classes` [n], int64.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"LabelledSplit({len(self)} {'texts' if self.pairs is None else 'pairs'})"

    def take(self, places: np.ndarray) -> "LabelledSplit":
        """Return the examples at some places, in that order."""
        pairs = None if self.pairs is None else tuple(self.pairs[i] for i in places)
        return LabelledSplit(tuple(self.texts[i] for i in places), pairs, self.labels[places])

    def with_labels(self, labels: np.ndarray) -> "LabelledSplit":
        """Return the same texts with other labels."""
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class Labelled:
    """What `read_labelled` returns.

    Args:
        name: the source, as it was asked for.
        classes: names of the classes, in the order of their numbers.
        splits: examples by split: `train`, `validation` and, where the source has labels for it, `test`.
        note: what was unusual, in sentences; mostly empty.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, LabelledSplit]
    note: str = ""

    @property
    def train(self) -> LabelledSplit:
        """The examples to learn from."""
        return self.split("train")

    @property
    def validation(self) -> LabelledSplit:
        """The examples to choose by."""
        return self.split("validation")

    @property
    def test(self) -> LabelledSplit:
        """The examples to report on."""
        return self.split("test")

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def has_pairs(self) -> bool:
        """Whether an example is two texts."""
        return self.train.pairs is not None

    def split(self, name: str) -> LabelledSplit:
        """Return a split by name.

        Raises:
            ValueError: there is no such split; says which there are.
        """
        if name not in self.splits:
            raise unknown("split", name, self.splits)
        return self.splits[name]

    def majority(self, split: str = "validation") -> float:
        """Return the accuracy of always answering the commonest class of `train`."""
        common = np.bincount(self.train.labels).argmax()
        return float(np.mean(self.split(split).labels == common))


def read_labelled(
    source: str | Path, *, text: str | None = None, pair: str | None = None, label: str | None = None
) -> Labelled:
    """Read labelled texts or pairs of texts, with their splits.

    Args:
        source: `python-docstrings` (sentences of the standard library's docstrings, labelled by what their module is
            for); a .csv, .tsv, .jsonl or .parquet file; ready-made splits, as a folder with `train.tsv`,
            `validation.tsv`, `test.tsv` or as the common start `folder/name` of `name.train.tsv` and so on;
            or `hf:NAME[:CONFIG][@SPLIT]`, read through the package `datasets` (`hf:glue/sst2` for the GLUE tasks).
        text: the column with the text; by default guessed from its name (text, sentence, sentence1, question1, ...).
        pair: the column with the second text of a pair; by default guessed beside the first.
        label: the column with the class, numbers or names; by default guessed (label, class, target, ...).

    Returns:
        Classes in sorted order, or in the data set's own. What has no splits is divided 80 : 10 : 10 by a hash of the
        texts, equal ones together, so the division depends on nothing else; a source with `train` alone or without
        `validation` has that held out in the same way. A split whose labels are withheld (-1) is left out.

    Raises:
        ValueError: no such source, column or kind of file, or a package is missing.
        FileNotFoundError: no such file.
        DataError: the data cannot be used: no or one class, an empty text, a missing label, not UTF-8, ...

    >>> data = read_labelled("python-docstrings")
    >>> data.classes
    ('concurrency', 'files', 'interface', 'network', 'numbers', 'tooling')
    >>> data.majority() < 0.25
    True
    """
    name = str(source)
    found, named = _open(source, name)
    if "train" not in found:
        raise unknown(f"split of {name},", "train", found)
    columns = choose_columns(name, found["train"], text=text, pair=pair, label=label)
    names = named.get(columns.label)
    if name.startswith("hf:"):  # nobody can fill in an empty text there
        found = {split: [row for row in rows if columns.filled(row)] for split, rows in found.items()}
    # A benchmark's test labels are withheld as -1; the texts alone are of no use here.
    withheld = [split for split, rows in found.items() if _withheld(rows, columns)]
    if "train" in withheld:
        raise DataError(f"{name}: every label of train is -1, which stands for a withheld label; give one with labels")
    found = {split: rows for split, rows in found.items() if split not in withheld}
    notes = [f"labels of {split} are withheld (-1), so it is left out" for split in withheld]
    splits = {split: _examples(rows, columns) for split, rows in found.items()}
    splits, made = _with_held_out(name, splits)
    classes = names or class_names(name, splits["train"][2])
    numbered = {
        split: LabelledSplit(texts, pairs, class_numbers(f"{name}, {split}", labels, classes, named=names is not None))
        for split, (texts, pairs, labels) in ((split, splits[split]) for split in SPLITS if split in splits)
    }
    _check_classes(name, classes, numbered)
    return Labelled(name, classes, numbered, "; ".join([*notes, *made, *_repeats(numbered)]))


_Examples = tuple[tuple[str, ...], tuple[str, ...] | None, list[object]]


def _open(source: str | Path, name: str) -> tuple[dict[str, list[Row]], dict[str, tuple[str, ...]]]:
    """Return rows by split, "train" alone where the source has no splits, and named classes by column."""
    if name in BUILT_IN:
        pairs = BUILT_IN[name]()
        rows = [Row(f"{name}, sentence {i}", {"text": text, "label": its}) for i, (text, its) in enumerate(pairs)]
        return {"train": rows}, {}
    if name.startswith("hf:"):
        return hub_splits(name)
    path = Path(name).expanduser()
    if path.is_file():
        return {"train": read_table(path)}, {}
    if (files := find_splits(path)) is not None:
        return {split: read_table(file) for split, file in files.items()}, {}
    if isinstance(source, Path) or table_kind(path) or len(path.parts) != 1:
        raise FileNotFoundError(
            f"no such file or folder: {name}, nor {name}.train.tsv; give a path that exists, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    raise unknown("labelled source", name, BUILT_IN)


BUILT_IN = {"python-docstrings": docstring_sentences}


def _withheld(rows: list[Row], columns: Columns) -> bool:
    return all(row.cells.get(columns.label) in (-1, "-1") for row in rows)


def _examples(rows: list[Row], columns: Columns) -> _Examples:
    texts = column_texts(rows, columns.text)
    pairs = None if columns.pair is None else column_texts(rows, columns.pair)
    return texts, pairs, columns.labels(rows)


def _with_held_out(name: str, splits: dict[str, _Examples]) -> tuple[dict[str, _Examples], list[str]]:
    """Return the splits with those that are missing taken from train by hash, and a note on what was taken."""
    missing = [split for split in ("test", "validation") if split not in splits]
    if "validation" in splits:
        return splits, []  # a source that has made its own divisions is left as it is
    if len(splits) > 1:
        missing = ["validation"]
    total = len(splits["train"][0])
    made: list[str] = []
    for split in missing:
        texts, pairs, labels = splits["train"]
        digests = np.array([_digest(*parts) for parts in zip(texts, pairs or texts, strict=True)], np.uint64)
        ones = np.ones(len(texts), np.int64)
        chosen = split_documents(digests, ones, ones, fraction=HELD_OUT * total / len(texts), least=1)
        if chosen is None:
            raise DataError(f"{name} cannot be divided: it has {len(set(texts))} different texts; give at least 3")
        for side, places in zip(("train", split), chosen, strict=True):
            taken_pairs = None if pairs is None else tuple(pairs[i] for i in places)
            splits = splits | {side: (tuple(texts[i] for i in places), taken_pairs, [labels[i] for i in places])}
        made.append(f"{split} is {len(chosen[1])} examples held out by a hash of their texts")
    return splits, made


def _digest(text: str, pair: str) -> int:
    data = f"{len(text)}\0{text}\0{pair}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _check_classes(name: str, classes: tuple[str, ...], splits: dict[str, LabelledSplit]) -> None:
    trained = np.unique(splits["train"].labels)
    if len(trained) < 2:
        only = classes[int(trained[0])]
        raise DataError(f"{name}: every label of train is {only!r}; a classifier needs examples of two classes")
    for split, examples in splits.items():
        absent = sorted({classes[i] for i in np.setdiff1d(examples.labels, trained)})
        if absent:
            raise DataError(
                f"{name}: {split} has the label {absent[0]!r}, which train lacks; "
                "give train examples of it, or take it out"
            )


def _repeats(splits: dict[str, LabelledSplit]) -> list[str]:
    known = set(_keys(splits["train"]))
    counts = {split: sum(key in known for key in _keys(splits[split])) for split in splits if split != "train"}
    return [f"{count} examples of {split} stand in train too" for split, count in counts.items() if count]


def _keys(split: LabelledSplit) -> list[tuple[str, str]]:
    return list(zip(split.texts, split.pairs or split.texts, strict=True))
