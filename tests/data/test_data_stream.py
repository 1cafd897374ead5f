"""The cache: used again, never trusted when damaged or half written."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from mercer.data import build_tokenizer
from mercer.data import stream as stream_module
from mercer.data.documents import open_source
from mercer.data.stream import COLUMNS, default_cache_dir, open_stream
from mercer.errors import DataError

TEXTS = ["first text", "second text é", "third"]


@pytest.fixture(scope="module")
def byte():
    return build_tokenizer("byte")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for n, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{n}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def test_stream_is_the_documents_between_their_marks(folder, byte, tmp_path):
    stream = open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    data = [text.encode() for text in TEXTS]
    assert stream.tokens.tolist() == [n for text in data for n in (256, *text, 257)]
    assert stream.token_bytes.tolist() == [n for text in data for n in (0, *[1] * len(text), 0)]
    assert stream.ends.tolist() == np.cumsum([len(text) + 2 for text in data]).tolist()
    assert stream.document_bytes.tolist() == [len(text) for text in data]
    assert len(set(stream.digests.tolist())) == 3
    assert stream.tokens.dtype == np.uint16
    assert isinstance(stream.tokens, np.memmap)


def test_second_call_reads_no_text(folder, byte, tmp_path, monkeypatch):
    source = open_source(folder)
    first = open_stream(source, byte, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(stream_module, "_build", None)
    again = open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in COLUMNS)


def test_other_text_tokenizer_or_settings_are_another_cache(folder, byte, tmp_path):
    cache = tmp_path / "cache"
    open_stream(open_source(folder), byte, cache_dir=cache)
    open_stream(open_source(folder), build_tokenizer("bpe:300", TEXTS), cache_dir=cache)
    open_stream(open_source(folder), byte, cache_dir=cache, max_bytes=5)
    assert len(list(cache.iterdir())) == 3
    (folder / "3.txt").write_text("more")
    assert len(open_stream(open_source(folder), byte, cache_dir=cache).ends) == 4
    (folder / "3.txt").write_text("less")
    os.utime(folder / "3.txt", ns=(1, 1))  # however coarse the clock of the file system
    assert bytes(open_stream(open_source(folder), byte, cache_dir=cache).tokens[-5:-1].astype(np.uint8)) == b"less"


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, flip, empty, os.remove])
@pytest.mark.parametrize("name", [*(f"{column}.npy" for column in COLUMNS), "columns.json"])
def test_damaged_cache_is_built_again_and_says_so(folder, byte, tmp_path, name, harm):
    whole = open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    expected = {column: getattr(whole, column).tolist() for column in COLUMNS}
    [cache] = (tmp_path / "cache").iterdir()
    harm(cache / name)
    with pytest.warns(UserWarning, match=r"the token cache .* is damaged \(.*\); building it again"):
        rebuilt = open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    assert {column: getattr(rebuilt, column).tolist() for column in COLUMNS} == expected


def test_failed_build_leaves_nothing(folder, byte, tmp_path):
    (folder / "3.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"3.txt: not UTF-8 at byte 0"):
        open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_full_disk_leaves_nothing(folder, byte, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_killed_build_is_never_opened(folder, byte, tmp_path):
    script = f"""
import os, signal
from mercer.data import build_tokenizer, stream
from mercer.data.documents import open_source
stream._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
stream.open_stream(open_source({str(folder)!r}), build_tokenizer("byte"), cache_dir={str(tmp_path / "cache")!r})
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    [left] = (tmp_path / "cache").iterdir()
    assert ".part-" in left.name
    assert len(open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache").ends) == 3


def test_two_builds_at_once_agree(folder, byte, tmp_path, monkeypatch):
    build, cache = stream_module._build, tmp_path / "cache"

    def slow_build(*arguments):
        monkeypatch.setattr(stream_module, "_build", build)
        open_stream(open_source(folder), byte, cache_dir=cache)  # the other process is faster
        build(*arguments)

    monkeypatch.setattr(stream_module, "_build", slow_build)
    assert len(open_stream(open_source(folder), byte, cache_dir=cache).ends) == 3
    assert len(list(cache.iterdir())) == 1


def test_place_that_cannot_be_written(folder, byte, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the token cache in .*/file .*; set MERCER_CACHE_DIR"):
        open_stream(open_source(folder), byte, cache_dir=tmp_path / "file")


def test_max_bytes_stops_behind_the_document_that_reaches_it(folder, byte, tmp_path):
    stream = open_stream(open_source(folder), byte, cache_dir=tmp_path / "cache", max_bytes=11)
    assert stream.document_bytes.tolist() == [10, 14]


def test_default_place_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("MERCER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "mercer"
