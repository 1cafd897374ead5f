"""Reading order is import order: nothing imports upwards."""

import ast
from pathlib import Path

import pytest

import mercer

PACKAGE = Path(mercer.__file__).parent
LEVELS = [
    {"errors"},
    {"ops"},
    {"features"},
    {"particles", "mixers"},
    {"attention", "hf"},
    {"data", "train", "evaluate"},
    {"bench", "report"},
    {"study"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_parts(tree: ast.AST, file: Path) -> set[str]:
    """The parts of mercer a module imports anywhere, in functions and for type checkers too."""
    package = ("mercer", *file.relative_to(PACKAGE).with_suffix("").parts[:-1])
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("mercer.")}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_nothing_imports_upwards(file):
    part = file.relative_to(PACKAGE).with_suffix("").parts[0]
    if part == "__init__":
        return  # the package's own front: it names every part, on first use
    found = imported_parts(ast.parse(file.read_text()), file) & LEVEL.keys()
    upwards = {other for other in found if LEVEL[other] > LEVEL[part]}
    assert not upwards, f"{file.name} (level {LEVEL[part]}) imports {upwards}"


def test_the_check_sees_every_form_of_import():
    lines = ["import mercer.cli", "def f():", "  from ..report import page", "  from .. import bench"]
    source = "\n".join([*lines, "  from mercer import train"])
    assert imported_parts(ast.parse(source), PACKAGE / "ops" / "x.py") == {"cli", "report", "bench", "train"}


def test_every_part_has_a_level():
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_stay_small_and_free_of_what_we_ban(file):
    source = file.read_text()
    assert source.count("\n") <= 400
    for banned in ("from __future__ import annotations", "import pickle", "torch.load(", "except Exception", "except:"):
        assert banned not in source
    assert file.stem not in ("utils", "helpers", "common")
