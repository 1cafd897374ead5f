"""The corpora every Python has."""

import subprocess
import sys

import pytest

from mercer.data import CORPORA, read_documents
from mercer.data.corpora import source_files


@pytest.mark.parametrize("name", ["python-docs", "python-source"])
def test_corpus_is_text_of_about_the_size_it_says(name):
    documents = list(read_documents(name))
    size = sum(len(document.encode()) for document in documents)
    assert len(documents) > 50
    assert 0.5 < size / CORPORA[name].approx_bytes < 2.0
    assert CORPORA[name].licence == "PSF-2.0"
    assert documents == list(CORPORA[name].load()) or name == "python-source"  # that one has empty modules
    assert list(read_documents(name)) == documents


def test_source_leaves_out_tests_packages_and_what_one_build_wrote():
    parts = {part for path in source_files() for part in path.parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [path for path in source_files() if "sysconfigdata" in path.name]
    assert source_files() == sorted(source_files())


def test_source_skips_other_encodings_and_links(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "a.py").write_text("y = 'é'\n", encoding="utf-8")
    (tmp_path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\nz = '\xe9'\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "a.py")
    assert [path.name for path in source_files()] == ["a.py", "b.py"]


def test_interpreter_without_source_is_said_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"has no source files in .*; use the corpus python-docs or a path"):
        list(read_documents("python-source"))


def test_importing_the_package_imports_no_optional_package():
    check = (
        "import sys, mercer.data\n"
        "assert not {'transformers', 'tokenizers', 'datasets', 'pyarrow', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
