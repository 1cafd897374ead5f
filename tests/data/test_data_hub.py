"""Data sets streamed through `datasets`, from a local folder: no network."""

import json

import datasets
import pytest

from mercer.data import build_tokenizer, prepare, read_documents
from mercer.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for split, texts in {"train": ["one", "", "two"], "test": ["three"]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def test_local_data_set_is_streamed(folder):
    assert list(read_documents(f"hf:{folder}")) == ["one", "two"]
    assert list(read_documents(f"hf:{folder}@test")) == ["three"]


def test_name_configuration_and_split_are_passed_on_and_nothing_is_read_ahead(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.IterableDataset.from_generator(lambda: ({"text": f"{n} words"} for n in range(10**12)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = read_documents("hf:owner/name:config@validation")
    assert [next(documents), next(documents)] == ["0 words", "1 words"]
    assert asked == [(("owner/name", "config"), {"split": "validation", "streaming": True})]


def test_part_of_an_endless_data_set_can_be_prepared(monkeypatch, tmp_path):
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, **__: datasets.IterableDataset.from_generator(lambda: ({"text": f"{n:10}"} for n in range(10**12))),
    )
    data = prepare("hf:endless", build_tokenizer("byte"), length=16, cache_dir=tmp_path, max_bytes=995)
    assert data.train.num_bytes + data.validation.num_bytes == 1000


def test_bad_data_sets_are_one_line(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"^hf:.*dev"):
        list(read_documents(f"hf:{folder}@dev"))
    with pytest.raises(DataError, match=r"no column 'body' \(only text\); pass text_field="):
        list(read_documents(f"hf:{folder}", text_field="body"))
    with pytest.raises(DataError, match=r"^hf:owner/absent cannot be read: .*check its name and the network") as caught:
        list(read_documents("hf:owner/absent"))
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package 'datasets'; pip install \"mercer\[data\]\""):
        list(read_documents("hf:owner/name"))
