"""Labelled sentences that need no download: docstrings of the standard library, by what the module is for."""

import ast
import functools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mercer.data.corpora import source_files
from mercer.errors import DataError

# Modules of every Python from 3.11 on, grouped by purpose; a name is a package or a file of the standard library.
FAMILIES: dict[str, tuple[str, ...]] = {
    "concurrency": (
        *("asyncio", "concurrent", "multiprocessing", "threading", "_threading_local", "queue", "sched", "selectors"),
        *("subprocess", "socketserver", "signal"),
    ),
    "files": (
        *("_pyio", "bz2", "configparser", "csv", "dbm", "filecmp", "fileinput", "fnmatch", "glob", "gzip", "lzma"),
        *("os", "pathlib", "pickle", "plistlib", "shelve", "shutil", "sqlite3", "tarfile", "tempfile", "xml"),
        *("zipfile", "json", "wave", "posixpath", "ntpath", "genericpath"),
    ),
    "interface": ("tkinter", "turtle", "turtledemo", "curses", "cmd"),
    "network": (
        *("email", "ftplib", "html", "http", "imaplib", "ipaddress", "mailbox", "mimetypes", "poplib", "smtplib"),
        *("socket", "ssl", "urllib", "webbrowser", "wsgiref", "xmlrpc"),
    ),
    "numbers": (
        *("_pydecimal", "calendar", "datetime", "_pydatetime", "_strptime", "fractions", "numbers", "random"),
        *("statistics", "colorsys", "bisect", "heapq", "collections", "_collections_abc", "graphlib", "operator"),
    ),
    "tooling": (
        *("ast", "bdb", "code", "codeop", "compileall", "cProfile", "dis", "doctest", "importlib", "inspect"),
        *("pdb", "pickletools", "pkgutil", "profile", "pstats", "py_compile", "pyclbr", "pydoc", "runpy", "symtable"),
        *("timeit", "tokenize", "trace", "traceback", "tracemalloc", "unittest", "zipimport"),
    ),
}
MOST_SENTENCES = 1000  # of one family: none is more than three tenths of all
FEWEST_WORDS, MOST_WORDS = 5, 60
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@functools.cache
def docstring_sentences() -> tuple[tuple[str, str], ...]:
    """Return pairs (sentence, family) from the docstrings of the running Python's standard library.

    Sources are parsed, never imported. A sentence that stands in two families, or that names a module of its own
    family, is left out, so the label must be told from what is said. Of a family with more than `MOST_SENTENCES`,
    evenly spaced ones are taken. Nothing is drawn: one version of Python gives one list.

    Returns:
        Pairs sorted by family, then in the order of modules and lines.

    Raises:
        DataError: this interpreter ships no source.

    Cost: 3 seconds, once in a process.

    >>> sentences = docstring_sentences()
    >>> sorted({family for _, family in sentences}) == sorted(FAMILIES)
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    family_of = {module: family for family, modules in FAMILIES.items() for module in modules}
    found: dict[str, str | None] = {}  # sentence -> its family, None where it has two
    for path in source_files():
        module = path.relative_to(root).parts[0].removesuffix(".py")
        family = family_of.get(module)
        if family is None:
            continue
        names = {part.lower() for name in FAMILIES[family] for part in (name, name.lstrip("_"))}
        for sentence in _sentences(path.read_text(encoding="utf-8-sig")):
            if not names & {word.lower() for word in _WORD.findall(sentence)}:
                found[sentence] = family if found.get(sentence, family) == family else None
    kept = {family: [text for text, its in found.items() if its == family] for family in sorted(FAMILIES)}
    empty = [family for family, texts in kept.items() if not texts]
    if empty:
        raise DataError(f"this Python ships no docstrings of {', '.join(empty)}; use a labelled file of yours")
    return tuple((text, family) for family, texts in kept.items() for text in _spaced(texts))


def _spaced(texts: list[str]) -> list[str]:
    if len(texts) <= MOST_SENTENCES:
        return texts
    return [texts[i * len(texts) // MOST_SENTENCES] for i in range(MOST_SENTENCES)]


def _sentences(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return  # a template or an example of bad syntax
    for docstring in _docstrings(tree):
        for paragraph in _paragraphs(docstring):
            yield from filter(_is_prose, _SENTENCE_END.split(paragraph))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the docstrings of a module, its functions, its classes and theirs, in the order of lines."""
    docstring = ast.get_docstring(node)
    if docstring is not None:
        yield docstring
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child)


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of prose, each as one line; examples, tables and indented code are left out."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.split("\n")
        if not any(line.startswith((" ", "\t", ">>>", "- ", "* ", "| ")) for line in lines):
            yield " ".join(" ".join(lines).split())


def _is_prose(text: str) -> bool:
    """Return whether a text reads as a sentence: it begins as one, ends as one, and is mostly words."""
    words = text.split()
    letters = sum(character.isalpha() or character == " " for character in text)
    return (
        FEWEST_WORDS <= len(words) <= MOST_WORDS
        and text[0].isupper()
        and text[-1] in ".!?"
        and letters >= 0.85 * len(text)
    )
