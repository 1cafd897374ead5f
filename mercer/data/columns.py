"""Which columns of a table are texts and labels, and what stands in them."""

import math
from dataclasses import dataclass

import numpy as np

from mercer.data.tables import Row
from mercer.errors import DataError, unknown

# First match wins; names of pairs before those of single texts.
TEXT_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "pair"),
    ("text", "text_pair"),
    ("text1", "text2"),
    *((name, None) for name in ("text", "sentence", "content", "review", "question", "document")),
)
LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "sentiment", "y")


@dataclass(frozen=True)
class Columns:
    """The names of the columns."""

    text: str
    pair: str | None
    label: str

    def filled(self, row: Row) -> bool:
        """Return whether the texts of a row have something in them."""
        texts = (row.cells.get(column) for column in (self.text, self.pair) if column is not None)
        return all(isinstance(text, str) and text.strip() for text in texts)

    def labels(self, rows: list[Row]) -> list[object]:
        """Return the label of every row as a whole number or as text.

        Raises:
            DataError: a label is missing, not a number (NaN), or a fraction.
        """
        return [_label(row, self.label) for row in rows]


def choose_columns(name: str, rows: list[Row], *, text: str | None, pair: str | None, label: str | None) -> Columns:
    """Return the columns asked for, and the others by their usual names.

    Args:
        name: the source, for messages.
        rows: its rows; the first tells which columns there are.
        text: name of the text column, or None to guess.
        pair: name of the second text column, or None to guess.
        label: name of the label column, or None to guess.

    Raises:
        ValueError: a column asked for is not there.
        DataError: none of the usual names is there; says which are.

    >>> choose_columns("x", [Row("x, line 2", {"label": 1, "sentence": "so"})], text=None, pair=None, label=None)
    Columns(text='sentence', pair=None, label='label')
    """
    listed = ", ".join(map(str, rows[0].cells))
    there = {column.lower(): column for column in rows[0].cells} | {column: column for column in rows[0].cells}
    for asked in (text, pair, label):
        if asked is not None and asked not in rows[0].cells:
            raise unknown(f"column of {name},", asked, rows[0].cells)
    if text is None:
        fitting = [t for t, p in TEXT_COLUMNS if t in there and (p is None or p in there)]
        if not fitting:
            raise DataError(f"{name} has no text column: its columns are {listed}; pass text= with one")
        text = there[fitting[0]]
    if pair is None:
        beside = [p for t, p in TEXT_COLUMNS if t == text.lower() and p in there]
        pair = there[beside[0]] if beside and beside[0] else None
    if label is None:
        named = [column for column in LABEL_COLUMNS if column in there]
        if not named:
            raise DataError(f"{name} has no label column: its columns are {listed}; pass label= with one")
        label = there[named[0]]
    if len({text, pair, label}) < 3:
        raise ValueError(f"text ({text!r}), pair ({pair!r}) and label ({label!r}) must be different columns")
    return Columns(text, pair, label)


def column_texts(rows: list[Row], column: str) -> tuple[str, ...]:
    """Return a column of text.

    Raises:
        DataError: a text is missing, empty or not text; says where.
    """
    return tuple(_text(row, column) for row in rows)


def _text(row: Row, column: str) -> str:
    if column not in row.cells:
        raise DataError(
            f"{row.where}: no column {column!r} (only {', '.join(map(str, row.cells))}); every row needs it"
        )
    value = row.cells[column]
    if value is None or (isinstance(value, float) and math.isnan(value)) or value == "":
        raise DataError(f"{row.where}: the text in column {column!r} is missing; fill it in, or take the row out")
    if not isinstance(value, str):
        raise DataError(f"{row.where}: the column {column!r} is {type(value).__name__}; it must be text")
    if value.isspace():
        raise DataError(f"{row.where}: the text in column {column!r} is empty; fill it in, or take the row out")
    return value


def _label(row: Row, column: str) -> int | str:
    if column not in row.cells:
        raise DataError(
            f"{row.where}: no column {column!r} (only {', '.join(map(str, row.cells))}); every row needs it"
        )
    value = row.cells[column]
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "" or str(value).lower() == "nan":
        raise DataError(f"{row.where}: no label (missing or NaN) in column {column!r}; fill it in or take the row out")
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
    elif isinstance(value, int | float):
        number = float(value)
    else:
        raise DataError(f"{row.where}: the label in column {column!r} is {type(value).__name__}; it must be one class")
    if not number.is_integer():
        raise DataError(f"{row.where}: the label in column {column!r} is {value}; classes are whole numbers or names")
    return int(number)


def class_names(name: str, labels: list[object]) -> tuple[str, ...]:
    """Return the classes in order: by number where all are numbers, by name otherwise.

    >>> class_names("x", [10, 9, 10]), class_names("x", ["b", "a"])
    (('9', '10'), ('a', 'b'))
    """
    if all(isinstance(label, int) for label in labels):
        return tuple(map(str, sorted({label for label in labels if isinstance(label, int)})))
    return tuple(sorted({str(label) for label in labels}))


def class_numbers(where: str, labels: list[object], classes: tuple[str, ...], *, named: bool) -> np.ndarray:
    """Return the place of every label in `classes`; with `named`, labels that are numbers are places already.

    Raises:
        DataError: a label is none of the classes.
    """
    places = {name: place for place, name in enumerate(classes)}
    if named:
        places |= {str(place): place for place in range(len(classes))}
    for label in labels:
        if str(label) not in places:
            raise DataError(
                f"{where}: the label {str(label)!r} is none of train's ({', '.join(classes)}); "
                "give train examples of it, or take it out"
            )
    return np.array([places[str(label)] for label in labels], np.int64)
