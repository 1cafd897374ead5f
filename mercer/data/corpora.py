"""Corpora that need no download: the interpreter's own documentation and source."""

import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mercer.errors import DataError

# Test suites, other people's packages, and files written by one build of the interpreter.
EXCLUDED_FOLDERS = {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class CorpusInfo:
    """A corpus known by name.

    Args:
        name: what `read_documents` and the command line call it.
        description: one line.
        licence: SPDX identifier.
        approx_bytes: size of its text, to the nearest figure worth printing; it varies with the Python version.
        load: starts a new pass over the documents, always in the same order.
        fingerprint: identifies the text without reading it; a cache built from another text has another one.
    """

    name: str
    description: str
    licence: str
    approx_bytes: int
    load: Callable[[], Iterator[str]]
    fingerprint: Callable[[], list[str]]


def _docs_documents() -> Iterator[str]:
    from pydoc_data.topics import topics  # half a megabyte: only when asked for

    for name in sorted(topics):
        yield topics[name]


def _docs_fingerprint() -> list[str]:
    return [sys.version]


def source_files() -> list[Path]:
    """List the modules of the standard library that ship as source, in a fixed order.

    Left out by rule: test suites, installed packages, files of one particular build, symbolic links, files this
    user may not read, and files that declare an encoding other than UTF-8.

    Returns:
        Paths sorted by their place in the library.

    Raises:
        DataError: this interpreter ships no source.

    >>> "json/decoder.py" in [path.as_posix()[-15:] for path in source_files()]
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in EXCLUDED_FOLDERS and not name.startswith(EXCLUDED_PREFIXES)
        ]
        wanted = [name for name in names if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIXES)]
        found += [Path(folder, name) for name in wanted]
    found = [path for path in found if not path.is_symlink() and os.access(path, os.R_OK) and _is_utf8(path)]
    if not found:
        raise DataError(f"this Python has no source files in {root}; use the corpus python-docs or a path of yours")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _is_utf8(path: Path) -> bool:
    with path.open("rb") as file:
        declared, _ = tokenize.detect_encoding(file.readline)
    return declared in ("utf-8", "utf-8-sig")


def _source_documents() -> Iterator[str]:
    for path in source_files():
        yield path.read_text(encoding="utf-8-sig")


def _source_fingerprint() -> list[str]:
    return [sys.version, *(f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in source_files())]


CORPORA: dict[str, CorpusInfo] = {
    corpus.name: corpus
    for corpus in (
        CorpusInfo(
            name="python-docs",
            description="the Python language reference, as in help(): one document a topic",
            licence="PSF-2.0",
            approx_bytes=470_000,
            load=_docs_documents,
            fingerprint=_docs_fingerprint,
        ),
        CorpusInfo(
            name="python-source",
            description="the standard library, sources and docstrings: one document a module",
            licence="PSF-2.0",
            approx_bytes=12_000_000,
            load=_source_documents,
            fingerprint=_source_fingerprint,
        ),
    )
}
