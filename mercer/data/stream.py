"""The tokens of a source on disk: memory-mapped columns, built aside, then renamed, then checked when opened."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mercer.data.documents import Source
from mercer.data.encoding import Encoder
from mercer.errors import DataError

if TYPE_CHECKING:
    import transformers

LAYOUT = 1  # part of the key: a cache of another layout is another cache
COLUMNS = ("tokens", "token_bytes", "ends", "document_bytes", "digests")
GROUP_CHARACTERS = 2**22  # a call of the tokenizer: enough to keep every core busy, little enough to hold
CHECKED_BYTES = 2**30  # checksums cover this much of a column, so that opening a huge one stays a matter of seconds


@dataclass(frozen=True, eq=False, repr=False)
class TokenStream:
    """All documents of a source as one row of tokens, in the order they were read.

    Args:
        tokens: token ids [N]; a document is its begin token (where the tokenizer has one), text, end token.
        token_bytes: how many bytes of text each token stands for [N]; specials stand for none.
        ends: where each document ends in `tokens` [documents].
        document_bytes: UTF-8 bytes of each document [documents].
        digests: 64 bits of a hash of each document's text [documents].
    """

    tokens: np.ndarray
    token_bytes: np.ndarray
    ends: np.ndarray
    document_bytes: np.ndarray
    digests: np.ndarray

    def spans(self) -> np.ndarray:
        """Return start and stop of each document in `tokens` [documents, 2]."""
        return np.stack([np.concatenate([[0], self.ends[:-1]]), self.ends], axis=1)


def default_cache_dir() -> Path:
    """Return `$MERCER_CACHE_DIR`, or `mercer` in the user's cache folder."""
    chosen = os.environ.get("MERCER_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercer"


def open_stream(
    source: Source,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    cache_dir: str | Path | None = None,
    max_bytes: int | None = None,
) -> TokenStream:
    """Tokenize a source, or open what an earlier call tokenized.

    The cache is a folder named by a hash of source (paths, sizes and times of its files), tokenizer and settings.
    It is written under another name and renamed when complete, so what a killed process leaves is never opened.

    Args:
        source: what to read.
        tokenizer: turns text into ids.
        cache_dir: where the folder stands; default: `default_cache_dir()`.
        max_bytes: read no further document once this much text is read.

    Returns:
        Memory-mapped columns.

    Raises:
        DataError: the source holds no text, or the cache folder cannot be written.
    """
    encoder = Encoder(tokenizer)
    settings = json.dumps([LAYOUT, source.fingerprint, encoder.fingerprint, max_bytes])
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = root / f"tokens-{hashlib.sha256(settings.encode()).hexdigest()[:20]}"
    if folder.exists():
        damage = _damage(folder)
        if damage is None:
            return _open(folder)
        warnings.warn(f"the token cache {folder} is damaged ({damage}); building it again", stacklevel=3)
        shutil.rmtree(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = root / f"{folder.name}.part-{uuid.uuid4().hex[:8]}"
        aside.mkdir()
    except OSError as error:
        raise DataError(
            f"cannot write the token cache in {root} ({error.strerror}); set MERCER_CACHE_DIR to a writable folder"
        ) from error
    try:
        _build(source, encoder, aside, max_bytes)
        _publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _open(folder)


def _publish(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        # Another process finished the same work first; by the key, its tokens are ours.


class _Column:
    """A one-dimensional .npy file that grows; its header is rewritten when the length is known."""

    def __init__(self, path: Path, dtype: type[np.generic]):
        self._file = path.open("wb")
        self._dtype, self._length, self._checked, self._checksum = np.dtype(dtype), 0, 0, 0
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)  # padded by numpy: any length takes the same room

    def append(self, values: np.ndarray | list[int]) -> None:
        data = np.asarray(values, self._dtype).tobytes()
        self._file.write(data)
        counted = data[: CHECKED_BYTES - self._checked]
        self._checksum = zlib.crc32(counted, self._checksum)
        self._checked += len(counted)
        self._length += len(data) // self._dtype.itemsize

    def finish(self) -> dict[str, Any]:
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"length": self._length, "dtype": self._dtype.str, "crc32": self._checksum}

    def __enter__(self) -> "_Column":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _build(source: Source, encoder: Encoder, folder: Path, max_bytes: int | None) -> None:
    narrow = np.uint16 if encoder.vocab_size <= 2**16 else np.uint32
    dtypes = [narrow, np.uint32, np.int64, np.int64, np.uint64]
    begin = [] if encoder.bos is None else [encoder.bos]
    end = [] if encoder.eos is None else [encoder.eos]
    total = 0
    with contextlib.ExitStack() as stack:
        columns = [
            stack.enter_context(_Column(folder / f"{name}.npy", dtype))
            for name, dtype in zip(COLUMNS, dtypes, strict=True)
        ]
        for documents in _groups(source.read(), max_bytes):
            for document, (ids, counts) in zip(documents, encoder.encode(documents), strict=True):
                if not len(ids):
                    continue  # nothing but what this tokenizer drops
                total += len(begin) + len(ids) + len(end)
                data = document.encode()
                digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
                marked = np.concatenate([begin, ids, end]), np.pad(counts, (len(begin), len(end)))
                for column, values in zip(columns, (*marked, [total], [len(data)], [digest]), strict=True):
                    column.append(values)
        if not total:
            raise DataError(f"{source.name}: the tokenizer leaves no token of its text; use another tokenizer")
        written = {name: column.finish() for name, column in zip(COLUMNS, columns, strict=True)}
    (folder / "columns.json").write_text(json.dumps({"source": source.name, "columns": written}, indent=1))


def _groups(documents: Iterator[str], max_bytes: int | None) -> Iterator[list[str]]:
    """Gather documents for one call of the tokenizer, and stop behind the one that reaches `max_bytes`."""
    group: list[str] = []
    gathered = read = 0
    for document in documents:
        group.append(document)
        gathered += len(document)
        if max_bytes is not None:
            read += len(document.encode())
            if read >= max_bytes:
                break
        if gathered >= GROUP_CHARACTERS:
            yield group
            group, gathered = [], 0
    if group:
        yield group


def _load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def _open(folder: Path) -> TokenStream:
    return TokenStream(*(_load(folder, name) for name in COLUMNS))


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a cache folder, or None where it is as it was written."""
    try:
        columns = json.loads((folder / "columns.json").read_bytes())["columns"]
        for name in COLUMNS:
            column = _load(folder, name)
            checksum = zlib.crc32(column[: CHECKED_BYTES // column.itemsize].data if len(column) else b"")
            found = {"length": len(column), "dtype": column.dtype.str, "crc32": checksum}
            if found != columns[name]:
                return f"{name}.npy is not what was written"
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
