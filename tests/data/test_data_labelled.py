"""Labelled text: sources, columns, splits, and one line for whatever is wrong with them."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mercer.data import read_labelled
from mercer.errors import DataError

ROWS = [(f"text number {n}", n % 2) for n in range(40)]


def write(path, rows, header=("label", "text")):
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]))
    return path


@pytest.fixture
def triple(tmp_path):
    """Ready-made splits a.train.tsv, a.dev.tsv, a.test.tsv."""
    for split, rows in {"train": ROWS[:8], "dev": ROWS[8:12], "test": ROWS[12:15]}.items():
        write(tmp_path / f"a.{split}.tsv", [(label, text) for text, label in rows])
    return tmp_path


def write_kind(folder, kind):
    path = folder / f"rows{kind}"
    if kind == ".csv":
        path.write_text("sentence,label\n" + "".join(f'"{text}, ""so""\nto say",{label}\n' for text, label in ROWS))
    elif kind == ".tsv":
        write(path, [(f'"{text}, so to say', label) for text, label in ROWS], ("sentence", "label"))
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps({"sentence": text, "label": label}) + "\n" for text, label in ROWS))
    else:
        pq.write_table(pa.table({"sentence": [t for t, _ in ROWS], "label": [label for _, label in ROWS]}), path)
    return path


@pytest.mark.parametrize(
    ("kind", "ending"), [(".csv", ', "so"\nto say'), (".tsv", ", so to say"), (".jsonl", ""), (".parquet", "")]
)
def test_every_kind_of_file_keeps_every_example_with_its_label(tmp_path, kind, ending):
    data = read_labelled(write_kind(tmp_path, kind))
    read = {t: int(y) for split in data.splits.values() for t, y in zip(split.texts, split.labels, strict=True)}
    start = '"' if kind == ".tsv" else ""
    assert read == {start + text + ending: label for text, label in ROWS}
    assert data.classes == ("0", "1")
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [32, 4, 4]


def test_ready_made_splits_are_kept_in_order(triple):
    for source in (triple, triple / "a", str(triple / "a")):
        data = read_labelled(source)
        assert data.train.texts == tuple(text for text, _ in ROWS[:8])
        assert data.validation.labels.tolist() == [0, 1, 0, 1]
        assert data.test.texts == tuple(text for text, _ in ROWS[12:15])
        assert data.note == ""


def test_a_folder_with_two_sets_of_splits_asks_which(triple):
    write(triple / "b.train.tsv", [(label, text) for text, label in ROWS])
    with pytest.raises(DataError, match=r"holds 2 sets of splits; name one of them: .*/a, .*/b"):
        read_labelled(triple)
    data = read_labelled(triple / "b")  # which has train alone
    assert (len(data.train), len(data.validation), len(data.test)) == (32, 4, 4)
    assert "validation is 4 examples held out by a hash" in data.note


def test_the_division_depends_on_the_texts_alone_and_keeps_equal_ones_together(tmp_path):
    rows = [(label, text) for text, label in ROWS] * 3
    data = read_labelled(write(tmp_path / "a.tsv", rows))
    again = read_labelled(write(tmp_path / "b.tsv", rows[::-1]))
    for split in ("train", "validation", "test"):
        assert sorted(data.split(split).texts) == sorted(again.split(split).texts)
    assert not set(data.train.texts) & set(data.validation.texts)
    assert not (set(data.train.texts) | set(data.validation.texts)) & set(data.test.texts)


def test_pairs_and_named_classes(tmp_path):
    rows = [("spam" if n % 3 else "ham", f"question {n}", f"answer {n}") for n in range(30)]
    data = read_labelled(write(tmp_path / "pairs.tsv", rows, ("class", "sentence1", "sentence2")))
    assert data.has_pairs
    assert data.classes == ("ham", "spam")
    numbers = [int(text.split()[1]) for text in data.train.texts]
    assert data.train.pairs == tuple(f"answer {n}" for n in numbers)
    assert data.train.labels.tolist() == [int(n % 3 > 0) for n in numbers]
    assert data.majority("train") == np.mean([n % 3 > 0 for n in numbers])
    chosen = read_labelled(tmp_path / "pairs.tsv", text="sentence2", label="class")
    assert not chosen.has_pairs
    assert chosen.train.texts[0].startswith("answer")


def test_classes_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    rows = [(n % 11 + 1, f"text {n}") for n in range(200)]
    assert read_labelled(write(tmp_path / "a.tsv", rows)).classes == tuple(str(n) for n in range(1, 12))


def test_withheld_test_labels_leave_the_split_out(triple):
    write(triple / "a.test.tsv", [(-1, "unknown to us"), (-1, "nor this")])
    data = read_labelled(triple)
    assert data.note == "labels of test are withheld (-1), so it is left out"
    with pytest.raises(ValueError, match=r"^unknown split 'test'; choose one of train, validation$"):
        _ = data.test


def test_an_example_that_stands_in_train_and_test_is_noted(triple):
    write(triple / "a.test.tsv", [(0, ROWS[0][0]), (1, "new")])
    assert read_labelled(triple).note == "1 examples of test stand in train too"


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (("text", "mood"), [("a", "b")], r"^{path} has no label column: its columns are text, mood; pass label= with"),
        (("body", "label"), [("a", 1)], r"^{path} has no text column: its columns are body, label; pass text= with"),
        (("label", "text"), [(1, f"t{n}") for n in range(9)], r"^{path}: every label of train is '1'; a classifier"),
        (("label", "text"), [(1, "a"), (0, "  ")], r"^{path}, line 3: the text in column 'text' is empty; fill it in"),
        (("label", "text"), [(1, "a"), (0, "")], r"^{path}, line 3: the text in column 'text' is missing; fill it in"),
        (
            ("label", "text"),
            [(1, "a"), ("NaN", "b")],
            r"^{path}, line 3: no label \(missing or NaN\) in column 'label'",
        ),
        (("label", "text"), [(1, "a"), ("", "b")], r"^{path}, line 3: no label \(missing or NaN\) in column 'label'"),
        (
            ("label", "text"),
            [(0.5, "a"), (1, "b")],
            r"^{path}, line 2: the label in column 'label' is 0.5; classes are",
        ),
        (("label", "text"), [(0, "a", "b")], r"^{path}, line 2: 3 cells, where the first line names 2 columns"),
        (("label", "label"), [(0, "a")], r"^{path}: two columns have one name \(label, label\); rename one"),
        (
            ("label", "text"),
            [(0, "a"), (1, "b"), (1, "b")],
            r"^{path} cannot be divided: it has 1 different texts; give at least",
        ),
        (("label", "text"), [], r"^{path} is empty: it holds no row"),
    ],
)
def test_bad_tables_are_one_line(tmp_path, header, rows, message):
    path = write(tmp_path / "bad.tsv", rows, header)
    with pytest.raises(DataError, match=message.replace("{path}", str(path))) as caught:
        read_labelled(path)
    assert "\n" not in str(caught.value)


def test_bad_bytes_and_bad_names_are_one_line(tmp_path, triple):
    path = tmp_path / "latin.csv"
    path.write_bytes(b"label,text\n0,caf\xe9\n")
    with pytest.raises(DataError, match=r"latin.csv: not UTF-8 at byte 16 \(.*\); save it as UTF-8 text"):
        read_labelled(path)
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: absent.csv, nor absent.csv.train.tsv"):
        read_labelled("absent.csv")
    with pytest.raises(ValueError, match=r"unknown labelled source 'python-docs'; .*did you mean 'python-docstrings'"):
        read_labelled("python-docs")
    with pytest.raises(ValueError, match=r"unknown column of .*, 'words'; choose one of label, text"):
        read_labelled(triple, text="words")
    with pytest.raises(ValueError, match=r"must be different columns"):
        read_labelled(triple, text="text", label="text")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"unknown kind of file '.txt'"):
        read_labelled(tmp_path / "a.txt")
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": NaN}\n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 1: no label \(missing or NaN\)"):
        read_labelled(tmp_path / "bad.jsonl")
    write(triple / "a.dev.tsv", [(0, "known"), (7, "not known")])
    with pytest.raises(
        DataError, match=r"a, validation: the label '7' is none of train's \(0, 1\); give train examples"
    ):
        read_labelled(triple / "a")


def test_hub_names_splits_and_classes_are_passed_on(monkeypatch):
    asked = []
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        rows = {"sentence": ["a", " ", "b", "c"], "label": [1, 1, 0, 1]}
        part = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset()
        withheld = datasets.Dataset.from_dict({"sentence": ["d"], "label": [-1]}, features=features)
        return datasets.IterableDatasetDict(
            {"train": part, "validation": part, "test": withheld.to_iterable_dataset(), "other": part}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = read_labelled("hf:glue/sst2")
    assert asked == [(("nyu-mll/glue", "sst2"), {"split": None, "streaming": True})]
    assert data.classes == ("bad", "good")
    assert sorted(data.splits) == ["train", "validation"]
    assert data.train.texts == ("a", "b", "c")
    assert data.train.labels.tolist() == [1, 0, 1]


def test_a_data_set_that_cannot_be_reached_is_one_line():
    with pytest.raises(DataError, match=r"^hf:owner/absent cannot be read: .*check its name and the network") as caught:
        read_labelled("hf:owner/absent")
    assert "\n" not in str(caught.value)


def test_docstrings_are_balanced_and_do_not_name_their_family():
    data = read_labelled("python-docstrings")
    texts = [text for split in data.splits.values() for text in split.texts]
    assert len(texts) == len(set(texts)) > 4000
    assert data.num_classes == 6
    for split in data.splits.values():
        shares = np.bincount(split.labels, minlength=6) / len(split)
        assert shares.max() < 0.4
        assert shares.min() > 0.05
    network = [t for t, y in zip(data.train.texts, data.train.labels, strict=True) if data.classes[y] == "network"]
    assert not any("email" in text.lower().split() for text in network)
