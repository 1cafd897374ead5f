"""Reading: every kind of file gives the same documents, and bad input one line that says what to do."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from mercer.data import read_documents
from mercer.errors import DataError

TEXTS = ["first\nline", "naïve ☃ \N{GRINNING FACE}", "third"]


def write(path, texts):
    rows = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    if path.suffix == ".jsonl":
        path.write_text(rows)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(rows.encode()))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path)
    else:
        path.mkdir()
        for n, text in enumerate(texts):
            (path / f"{n}.txt").write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "folder"])
def test_every_kind_of_source_gives_the_same_documents(tmp_path, name):
    assert list(read_documents(write(tmp_path / name, TEXTS))) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "folder"])
def test_documents_without_text_are_left_out(tmp_path, name):
    assert list(read_documents(str(write(tmp_path / name, ["", "one", " \n\t", "two"])))) == ["one", "two"]


def test_missing_values_count_as_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": "one"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "a.parquet")
    assert list(read_documents(tmp_path / "a.jsonl")) == list(read_documents(tmp_path / "a.parquet")) == ["one"]


def test_folder_is_searched_in_the_order_of_names_and_skips_what_is_hidden(tmp_path):
    for name in ("b/2.txt", "a.md", "b/1.txt", ".git/x.txt", "b/.hidden.txt", "picture.png", "c.JSONL"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("JSONL") else name)
    assert list(read_documents(tmp_path)) == ["a.md", "b/1.txt", "b/2.txt", "c.JSONL"]


def test_byte_order_mark_and_line_ends_are_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\rthree\r\n".encode())
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "one\\r\\n"}\r\n{"text": "two"}\r\n'.encode())
    assert list(read_documents(tmp_path / "a.txt")) == ["one\ntwo\rthree\n"]
    assert list(read_documents(tmp_path / "a.jsonl")) == ["one\r\n", "two"]


def test_text_field_can_have_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert list(read_documents(tmp_path / name, text_field="body")) == ["one"]


BAD_FILES = {
    "empty.txt": (b"", "empty.txt is empty: it holds no document with text; give a source that has some"),
    "blank.md": (b" \n\n", "blank.md is empty"),
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "empty.jsonl.gz": (b"", "empty.jsonl.gz is empty"),
    "empty.parquet": (b"", "empty.parquet is empty"),
    "binary.txt": (b"\x89PNG\r\n\x1a\n\0\0", "binary.txt: a NUL byte at byte 8, so this is not text"),
    "latin.txt": (
        b"caf\xe9 au lait",
        r"latin.txt: not UTF-8 at byte 3 \(invalid continuation byte\); save it as UTF-8",
    ),
    "marked.txt": (b"\xef\xbb\xbfab\xff", "marked.txt: not UTF-8 at byte 5"),
    "wide.txt": ("hello".encode("utf-16"), "wide.txt: the text is UTF-16; save it as UTF-8"),
    "late.jsonl": ('{"text": "é"}\n'.encode() + b'{"text": "\xff"}\n', "late.jsonl, line 2: not UTF-8 at byte 25 "),
    "cut.jsonl": (
        b'{"text": "a"}\n\n{"text": \n',
        r"cut.jsonl, line 3: not JSON \(Expecting value, column 9\); write",
    ),
    "digits.jsonl": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", "digits.jsonl, line 1: not JSON"),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl, line 1: not JSON"),
    "other.jsonl": (
        b'{"body": "a", "id": 1}\n',
        r"line 1: no field 'text' \(only body, id\); rename the field or pass",
    ),
    "list.jsonl": (b'["a"]\n', r"line 1: no field 'text' \(list\)"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: the field 'text' is int; it must be text"),
    "half.jsonl": (b'{"text": "\\ud83d"}\n', "line 1: half of a surrogate pair"),
    "torn.jsonl.gz": (gzip.compress(b'{"text": "abc"}\n' * 99)[:-20], "torn.jsonl.gz: a damaged gzip file"),
    "plain.jsonl.gz": (b'{"text": "abc"}\n', "plain.jsonl.gz: a damaged gzip file"),
    "not.parquet": (b"PAR0 and so on", "not.parquet: not a parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_line_that_says_where(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_documents(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_bad_parquet_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: no column 'text' \(only body, n\)"):
        list(read_documents(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a.parquet, row 0: the field 'n' is int"):
        list(read_documents(tmp_path / "a.parquet", text_field="n"))


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("python-doc", ValueError, r"unknown corpus 'python-doc'; choose one of .*\(did you mean 'python-docs'\?\)"),
        ("missing.txt", FileNotFoundError, "no such file or folder: missing.txt; give a path that exists"),
        ("some/folder", FileNotFoundError, "no such file or folder: some/folder"),
        ("hf:", ValueError, "cannot read 'hf:' as a data set; write hf:NAME"),
        ("hf:a@b@c", ValueError, "cannot read 'hf:a@b@c' as a data set"),
    ],
)
def test_unknown_source_fails_before_reading(source, kind, message):
    with pytest.raises(kind, match=message):
        read_documents(source)


def test_unknown_kind_of_file_and_folder_without_text(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"unknown kind of file '.csv'; choose one of .jsonl, .jsonl.gz, .md"):
        read_documents(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"holds no text files; put files ending in .txt, .md"):
        read_documents(tmp_path)


def test_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"reading .parquet files needs the package 'pyarrow'; pip install \"mercer\[data\]"
    ):
        list(read_documents(write(tmp_path / "a.parquet", TEXTS)))
