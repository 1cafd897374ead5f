"""Tokenizers give the text back; encoding is the tokenizer's own and accounts for every byte."""

import json
import random
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.data import build_tokenizer, read_documents
from mercer.data import tokenizer as tokenizer_module
from mercer.data.encoding import Encoder
from mercer.errors import DataError

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
SPACES = " \t\n\r\f\v\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000"
LETTERS = "ab'sdtmrevl019_.=(é☃²٣" + SPACES
code_like = st.text(st.sampled_from(LETTERS), max_size=60)


@pytest.fixture(scope="module")
def byte():
    return build_tokenizer("byte")


@pytest.fixture(scope="module")
def bpe():
    return build_tokenizer("bpe:700", read_documents("python-docs"))


@pytest.fixture(scope="module")
def dense():
    """A BPE whose merges join everything the pre-tokenizer lets them: a word cut elsewhere shows in its ids."""
    rng = random.Random(0)
    return build_tokenizer("bpe:2000", ["".join(rng.choices(LETTERS, k=60)) for _ in range(300)])


@pytest.fixture(scope="module")
def wordpiece():
    """A tokenizer that drops, lowers and strips: nothing in it is byte-level."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789'._"
    words = ["[UNK]", "[PAD]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), "##ab", "the", "##the"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[SEP]")


def decode(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids)


@settings(max_examples=100, deadline=None)
@given(text=any_text | code_like)
def test_byte_tokenizer_is_exact(byte, text):
    ids = byte(text).input_ids
    assert ids == list(text.encode())
    assert byte.decode(ids) == text
    assert byte.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=100, deadline=None)
@given(text=any_text | code_like)
def test_bpe_gives_the_text_back(bpe, text):
    assert decode(bpe, text) == text


@pytest.mark.parametrize("spec", ["byte", "bpe:700"])
def test_saved_tokenizer_loads_the_same(request, tmp_path, spec):
    saved = request.getfixturevalue(spec.split(":")[0])
    saved.save_pretrained(tmp_path)
    for loaded in (build_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)):
        text = "def naïve(x):\n    return '☃'  # <|eos|>"
        assert loaded(text).input_ids == saved(text).input_ids
        assert decode(loaded, text) == text
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (
            saved.bos_token_id,
            saved.eos_token_id,
            saved.pad_token_id,
        )
        assert len(loaded) == len(saved)


def test_specials_follow_the_bytes_or_come_first(byte, bpe):
    assert (byte.bos_token_id, byte.eos_token_id, byte.pad_token_id, len(byte)) == (256, 257, 258, 259)
    assert (bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id, len(bpe)) == (0, 1, 2, 700)


@settings(max_examples=100, deadline=None)
@given(text=any_text | code_like)
@pytest.mark.parametrize("name", ["byte", "bpe", "dense", "wordpiece"])
def test_encoder_is_the_tokenizer_and_accounts_for_every_byte(request, name, text):
    tokenizer = request.getfixturevalue(name)
    [(ids, counts)] = Encoder(tokenizer).encode([text])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    assert (counts >= 0).all()
    assert counts.sum() == (len(text.encode()) if len(ids) else 0)


def test_bytes_of_tokens_are_those_they_spell(bpe, wordpiece):
    text = "the ☃ is a snowman"
    [(ids, counts)] = Encoder(bpe).encode([text])
    spelled = [len(bpe.convert_ids_to_tokens(int(number))) for number in ids]
    assert counts.tolist() == spelled
    [(ids, counts)] = Encoder(wordpiece).encode(["  The é ab "])
    assert wordpiece.convert_ids_to_tokens(ids.tolist()) == ["the", "e", "a", "##b"]
    assert counts.tolist() == [5, 3, 2, 2]


def test_bytes_are_those_of_the_text_where_the_tokenizer_normalizes_it(bpe):
    backend = tokenizers.Tokenizer.from_str(bpe.backend_tokenizer.to_str())
    backend.normalizer = tokenizers.normalizers.NFD()
    [(ids, counts)] = Encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=backend)).encode(["é("])
    assert backend.decode(ids.tolist()) == "e\u0301("
    assert (counts[:-1].sum(), counts[-1]) == (2, 1)


def test_written_specials_stay_text_and_the_tokenizer_stays_as_it_was(bpe):
    encoder = Encoder(bpe)
    [(ids, counts)] = encoder.encode(["a<|eos|>é"])
    assert bpe.eos_token_id not in ids
    assert bpe.decode(ids.tolist()) == "a<|eos|>é"
    assert counts.sum() == 10
    assert bpe("<|eos|>").input_ids == [bpe.eos_token_id]


def test_long_documents_are_encoded_in_pieces_without_loss(bpe, monkeypatch):
    text = "\n".join(f"line {n} é" for n in range(400)) + "x" * 700 + "\n"
    [(whole, _)] = Encoder(bpe).encode([text])
    monkeypatch.setattr("mercer.data.encoding.PIECE_CHARACTERS", 300)
    monkeypatch.setattr("mercer.data.encoding.WORD_CHARACTERS", 100)
    [(ids, counts)] = Encoder(bpe).encode([text])
    assert bpe.decode(ids.tolist()) == text
    assert counts.sum() == len(text.encode())
    assert len(ids) < 1.05 * len(whole)


def test_training_is_the_same_in_every_process(bpe):
    script = (
        "from mercer.data import build_tokenizer, read_documents\n"
        "print(build_tokenizer('bpe:700', read_documents('python-docs')).backend_tokenizer.to_str())"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == bpe.backend_tokenizer.to_str()


def test_sample_is_bounded_and_spread_over_the_documents(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(tokenizer_module, "READ_BYTES", 100_000)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 100)
    read = []

    def documents():
        for n in range(10_000):
            read.append(n)
            yield f"{n:04} é " * 50

    sample = tokenizer_module._sample(documents())
    size = sum(len(piece.encode()) for piece in sample)
    assert 9_000 < size <= 10_000
    assert len(read) < 300
    drawn = {int(piece.split()[0]) for piece in sample if piece[:4].isdigit()}
    assert min(drawn) < 0.2 * len(read) < 0.8 * len(read) < max(drawn)


def test_trained_tokenizer_is_kept_and_a_damaged_one_trained_again(tmp_path, monkeypatch):
    documents = ["some words, some more words"] * 9
    first = build_tokenizer("bpe:270", documents, tmp_path).backend_tokenizer.to_str()
    [kept] = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers.Tokenizer, "train_from_iterator", None)
        assert build_tokenizer("bpe:270", documents, tmp_path).backend_tokenizer.to_str() == first
    whole = kept.read_text()
    for damaged in (whole[:-9], "", "[]", '{"tokenizer": 3}', json.dumps({**json.loads(whole), "sha256": "0"})):
        kept.write_text(damaged)
        with pytest.warns(UserWarning, match="the cached tokenizer .* is damaged; training it again"):
            assert build_tokenizer("bpe:270", documents, tmp_path).backend_tokenizer.to_str() == first
        assert kept.read_text() == whole
    build_tokenizer("bpe:270", [*documents, "other words"], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bytes", "unknown tokenizer 'bytes'; choose byte, bpe:SIZE, or a folder that exists"),
        ("bpe:", "SIZE in bpe:SIZE must be a number of at least 259, such as bpe:4096"),
        ("bpe:4k", "tokenizer 'bpe:4k'"),
        ("bpe:258", "tokenizer 'bpe:258'"),
    ],
)
def test_unknown_specification(spec, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(spec, ["text"])


def test_nothing_to_train_on_and_damaged_folders(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="tokenizer 'bpe:300' has no text to train on"):
        build_tokenizer("bpe:300", [])
    with pytest.raises(DataError, match=r"has no tokenizer\.json; save a fast tokenizer there"):
        build_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version":')
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
        build_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
        build_tokenizer(str(tmp_path))
    build_tokenizer("byte").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"backend":')
    with pytest.raises(DataError, match=r"the tokenizer in .* is damaged \(Expecting value"):
        build_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package 'tokenizers'; pip install \"mercer\[hf\]\""):
        build_tokenizer("byte")
