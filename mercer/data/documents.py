"""Read documents from named corpora, files, folders and streamed data sets."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mercer.data.corpora import CORPORA
from mercer.data.hub import hub_documents, parse_hub
from mercer.data.packages import require
from mercer.errors import DataError, unknown


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Args:
        name: as the user wrote it; messages start with it.
        fingerprint: changes when the text does.
        read: starts a new pass over the documents that have text in them.
    """

    name: str
    fingerprint: list[str]
    read: Callable[[], Iterator[str]]


def read_documents(source: str | Path, *, text_field: str = "text") -> Iterator[str]:
    """Iterate over the documents of a source; documents without text are left out.

    Args:
        source: a corpus name (see `CORPORA`), a .txt, .md, .jsonl, .jsonl.gz or .parquet file, a folder of such
            files (searched through, in the order of their names), or `hf:NAME[:CONFIG][@SPLIT]`, streamed through
            the package `datasets`. A text file is one document; the other kinds hold one a row.
        text_field: the field or column with the text, where rows have fields.

    Returns:
        A new pass over the documents.

    Raises:
        ValueError: no such corpus or kind of file, or a package is missing.
        FileNotFoundError: no such path.
        DataError: raised while iterating, when a file is empty, binary or not what its name promises.

    >>> next(read_documents("python-docs")).startswith("The")
    True
    """
    return open_source(source, text_field=text_field).read()


def open_source(source: str | Path, *, text_field: str = "text") -> Source:
    """Resolve what `read_documents` reads, without reading it yet (same arguments and errors)."""
    name = str(source)
    if name in CORPORA:
        corpus = CORPORA[name]
        return Source(name, [name, *corpus.fingerprint()], lambda: _with_text(name, corpus.load()))
    if name.startswith("hf:"):
        spec = parse_hub(name)
        local = _fingerprint(_walk(Path(spec.name))) if Path(spec.name).is_dir() else []
        return Source(
            name, [name, text_field, *local], lambda: _with_text(name, hub_documents(spec, text_field=text_field))
        )
    path = Path(name).expanduser()
    if not path.exists():
        if isinstance(source, Path) or path.suffix or len(path.parts) != 1:
            raise FileNotFoundError(f"no such file or folder: {name}; give a path that exists or a corpus name")
        raise unknown("corpus", name, CORPORA)
    files = _files(path)
    return Source(name, [text_field, *_fingerprint(files)], lambda: _with_text(name, _rows(files, text_field)))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if _kind(path) is None:
            raise unknown("kind of file", "".join(path.suffixes) or path.name, READERS)
        return [path]
    files = [file for file in _walk(path) if _kind(file)]
    if not files:
        raise DataError(f"{path} holds no text files; put files ending in {', '.join(READERS)} into it")
    return files


def _walk(folder: Path) -> list[Path]:
    """List the visible files under a folder, in an order that no file system decides."""
    found = (file for file in folder.rglob("*") if file.is_file())
    visible = [file for file in found if not any(p.startswith(".") for p in file.relative_to(folder).parts)]
    return sorted(visible, key=lambda file: file.relative_to(folder).parts)


def _fingerprint(files: list[Path]) -> list[str]:
    return [f"{file.resolve()}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]


def _kind(path: Path) -> str | None:
    return next((ending for ending in READERS if path.name.lower().endswith(ending)), None)


def _rows(files: list[Path], text_field: str) -> Iterator[str]:
    for file in files:
        yield from READERS[_kind(file) or ""](file, text_field)


def _with_text(name: str, documents: Iterator[str]) -> Iterator[str]:
    empty = True
    for document in documents:
        if document and not document.isspace():
            empty = False
            yield document
    if empty:
        raise DataError(f"{name} is empty: it holds no document with text; give a source that has some")


def _decode(data: bytes, path: Path, *, offset: int = 0, line: int | None = None) -> str:
    """Decode UTF-8 strictly; the message gives the byte of the file where it stops being text."""
    where = f"{path}" if line is None else f"{path}, line {line}"
    if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{where}: the text is UTF-16; save it as UTF-8")
    binary = data.find(b"\0")
    if binary >= 0:
        raise DataError(f"{where}: a NUL byte at byte {offset + binary}, so this is not text; give a UTF-8 text file")
    try:
        return data.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start + (3 if offset == 0 and data.startswith(b"\xef\xbb\xbf") else 0)
        raise DataError(f"{where}: not UTF-8 at byte {at} ({error.reason}); save it as UTF-8 text") from error


def _read_text(path: Path, text_field: str) -> Iterator[str]:
    # How lines end is how the file was stored, not what the author wrote.
    yield _decode(path.read_bytes(), path).replace("\r\n", "\n")


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as file:
        yield from _json_rows(file, path, text_field)


def _read_jsonl_gz(path: Path, text_field: str) -> Iterator[str]:
    if path.stat().st_size == 0:
        return
    try:
        with gzip.open(path, "rb") as file:
            yield from _json_rows(file, path, text_field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: a damaged gzip file ({error}); fetch or compress it again") from error


def _json_rows(file: Any, path: Path, text_field: str) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(file, start=1):
        line = _decode(raw, path, offset=offset, line=number)
        offset += len(raw)
        if line.isspace():
            continue
        try:
            row = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f'{path}, line {number}: not JSON ({what}); write one object a line, such as {{"{text_field}": "..."}}'
            ) from error
        if not isinstance(row, dict) or text_field not in row:
            holds = f"only {', '.join(map(str, row)) or 'nothing'}" if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{path}, line {number}: no field {text_field!r} ({holds}); rename the field or pass text_field="
            )
        yield _text(row[text_field], f"{path}, line {number}", text_field)


def _text(value: object, where: str, text_field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {text_field!r} is {type(value).__name__}; it must be text")
    if _SURROGATE.search(value):
        raise DataError(f"{where}: half of a surrogate pair, which is no character; escape the text again as UTF-8")
    return value


_SURROGATE = re.compile("[\ud800-\udfff]")


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    if path.stat().st_size == 0:
        return
    arrow = require("pyarrow", extra="data", purpose="reading .parquet files")
    parquet = require("pyarrow.parquet", extra="data", purpose="reading .parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise DataError(
                    f"{path}: no column {text_field!r} (only {', '.join(file.schema_arrow.names)}); "
                    "rename the column or pass text_field="
                )
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    yield _text(value, f"{path}, row {row}", text_field)
                    row += 1
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({str(error).splitlines()[0]}); write it again") from error


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl_gz,
    ".parquet": _read_parquet,
}
