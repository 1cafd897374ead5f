"""Rows of a table on disk: csv, tsv, jsonl or parquet, each row a dict of its columns."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mercer.data.packages import require
from mercer.errors import DataError, unknown


@dataclass(frozen=True)
class Row:
    """One row of a table: where it stands, for messages, and its columns."""

    where: str
    cells: dict[str, Any]


def table_kind(path: Path) -> str | None:
    """Return the ending by which a file is known to be a table, or None.

    >>> table_kind(Path("a/b.train.tsv"))
    '.tsv'
    """
    return next((ending for ending in TABLES if path.name.lower().endswith(ending)), None)


def read_table(path: Path) -> list[Row]:
    """Read a table whole.

    A .csv file is quoted as spreadsheets do it. A .tsv file is not quoted at all: one row a line, cells between tabs,
    and a quotation mark is a quotation mark, as the GLUE tasks are written.

    Args:
        path: a .csv, .tsv, .jsonl or .parquet file; the first two begin with a line of column names.

    Returns:
        Its rows in order; blank lines are skipped.

    Raises:
        ValueError: no such kind of file, or `pyarrow` is missing.
        FileNotFoundError: no such file.
        DataError: the file is empty, no UTF-8, or not what its name promises.
    """
    kind = table_kind(path)
    if kind is None:
        raise unknown("kind of file", "".join(path.suffixes) or path.name, TABLES)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}; give a path that exists")
    rows = list(TABLES[kind](path))
    if not rows:
        raise DataError(f"{path} is empty: it holds no row; give a file that has some")
    return rows


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start} ({error.reason}); save it as UTF-8 text") from error
    if "\0" in text:
        raise DataError(f"{path}: a NUL byte, so this is not text; give a UTF-8 text file")
    return text


def _separated(rows: Iterator[tuple[int, list[str]]], path: Path) -> Iterator[Row]:
    """Pair every row with the names in the first one."""
    _, names = next(rows, (0, []))
    names = [name.strip() for name in names]
    if len(set(names)) != len(names):
        raise DataError(f"{path}: two columns have one name ({', '.join(names)}); rename one")
    for line, cells in rows:
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {line}: {len(cells)} cells, where the first line names {len(names)} columns "
                f"({', '.join(names)}); every row needs as many"
            )
        yield Row(f"{path}, line {line}", dict(zip(names, cells, strict=True)))


def _read_csv(path: Path) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        yield from _separated(((reader.line_num, cells) for cells in reader if cells), path)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not csv ({error}); write the file again") from error


def _read_tsv(path: Path) -> Iterator[Row]:
    lines = ((number, line.removesuffix("\r")) for number, line in enumerate(_text(path).split("\n"), start=1))
    yield from _separated(((number, line.split("\t")) for number, line in lines if line.strip()), path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); write one object a line") from error
        if not isinstance(cells, dict):
            raise DataError(f"{path}, line {number}: {type(cells).__name__}, not an object; write one object a line")
        yield Row(f"{path}, line {number}", cells)


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow = require("pyarrow", extra="data", purpose="reading .parquet files")
    parquet = require("pyarrow.parquet", extra="data", purpose="reading .parquet files")
    try:
        cells = parquet.read_table(path).to_pylist()
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({str(error).splitlines()[0]}); write it again") from error
    yield from (Row(f"{path}, row {number}", row) for number, row in enumerate(cells))


TABLES: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
