"""What the documents say is true: examples run, the file map is the tree, commands exist."""

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch

import mercer
from mercer.cli import main
from mercer.train.config import KEYS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(mercer.__file__).parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "mercer.") if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    parser = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in parser.find(module, name, globs=vars(module) | {"torch": torch, "mercer": mercer}):
        output = io.StringIO()
        result = runner.run(test, out=output.write)
        assert result.failed == 0, output.getvalue()


def public_functions():
    yield from ((f"mercer.ops.{n}", getattr(mercer.ops, n)) for n in mercer.ops.__all__ if n[0].islower())
    yield from ((f"mixer {n}", cls) for n, cls in mercer.MIXERS.items())
    yield from ((f"mercer.{n}", getattr(mercer, n)) for n in ("build_mixer", "build_features", "MixerAttention"))
    yield from ((f"mercer.{n}", getattr(mercer, n)) for n in ("attach", "detach", "load"))


PUBLIC = {name: f for name, f in public_functions() if not name.endswith("_naive")}
INTERNAL = {
    "mercer.ops.repeat_heads",
    "mercer.ops.visible",
    "mercer.ops.zero_padding",
}  # shared by mixers, not an interface


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - INTERNAL))
def test_public_docstrings_are_whole(name):
    f = PUBLIC[name]
    text = inspect.getdoc(f) or ""
    assert ">>>" in text, "a runnable example"
    parameters = [p for p in inspect.signature(f).parameters if p not in ("sizes", "options")]
    if inspect.isfunction(f):
        assert "Returns:" in text
    if name.startswith("mercer.ops."):
        assert "Source:" in text
        assert "Cost:" in text
    if "Args:" in text:
        missing = [p for p in parameters if not re.search(rf"^\s*\*?\*?{p}\b.*:", text, re.MULTILINE)]
        assert not missing, f"arguments without a line: {missing}"


def test_the_file_map_is_the_tree():
    block = re.search(r"```text\n(mercer/\n.*?)```", README, re.DOTALL)
    assert block, "README.md has no file map"
    listed = {line.split()[0].rstrip("/") for line in block[1].splitlines()[1:] if line.strip()}
    tree = {p.name for p in PACKAGE.iterdir() if p.name not in ("__pycache__", "__init__.py", "py.typed")}
    assert listed == tree


def shell_lines():
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", document.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield document.name, words


@pytest.mark.parametrize(
    ("document", "words"), sorted(shell_lines()), ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_commands_in_documents_exist(document, words):
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] == "mercer":
        commands = list(command_of(words[1:]))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*commands, "--help"]) == 0
        page = out.getvalue()
        for word in words:
            if re.fullmatch(r"--[a-z-]+", word) and word not in ("--help",):
                assert word in page, f"{word} is not an option of mercer {' '.join(commands)}"
            if re.fullmatch(r"--[a-z-]+\.[a-z.-]+", word) and not word.startswith("--model.mixer-options."):
                assert word.removeprefix("--").replace("-", "_") in KEYS, f"{word} is no key of a recipe"
    else:
        assert words[0] in ("git", "cd", "pip", "python", "torchrun", "source"), f"unknown command {words[0]}"


def command_of(words):
    """The command and its sub-command: the words before the first argument."""
    yield words[0]
    if words[0] in ("bench", "study") and len(words) > 1 and words[1].isalpha():
        yield words[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
