"""Batches of labelled text: specials, cutting, padding, order."""

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mercer.data import LabelledSplit, build_tokenizer, encode
from mercer.data.labelled_batches import _longest_first
from mercer.errors import DataError

BYTE = build_tokenizer("byte")
BOS, PAD = BYTE.bos_token_id, BYTE.pad_token_id
WORDS = ["[PAD]", "[CLS]", "[SEP]", "a", "b", "c", "d"]


@pytest.fixture
def bert():
    """A tokenizer of whole words that surrounds texts as BERT's does."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="d"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(WORDS[:3])
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def split(texts, pairs=None):
    return LabelledSplit(tuple(texts), None if pairs is None else tuple(pairs), np.arange(len(texts)))


def rows(batch):
    lengths = batch.attention_mask.sum(1).tolist()
    return [row[:n].tolist() for row, n in zip(batch.input_ids, lengths, strict=True)]


def test_our_own_tokenizers_begin_with_bos_and_pad_to_the_longest():
    (batch,) = encode(split(["no", "naïve!", "cut off here"]), BYTE, 9).sequential(3)
    expected = [[BOS, *text.encode()][:9] for text in ("no", "naïve!", "cut off here")]
    assert rows(batch) == expected
    assert batch.input_ids.shape == (3, 9)
    assert (batch.input_ids[batch.attention_mask == 0] == PAD).all()
    assert batch.token_type_ids is None
    assert batch.inputs().keys() == {"input_ids", "attention_mask"}
    assert batch.labels.tolist() == [0, 1, 2]


def test_our_own_pairs_have_bos_between_and_the_longer_gives_first():
    encoded = encode(split(["ab", "abcdef"], ["xyz", "x"]), BYTE, 7)
    (batch,) = encoded.sequential(2)
    assert rows(batch) == [[BOS, *b"ab", BOS, *b"xyz"], [BOS, *b"abcd", BOS, *b"x"]]
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert encoded.num_truncated == 1


def test_a_classifiers_tokenizer_keeps_its_own_specials(bert):
    (single,) = encode(split(["a b", "a b c d a"]), bert, 5).sequential(2)
    assert rows(single) == [[1, 3, 4, 2], [1, 3, 4, 5, 2]]
    encoded = encode(split(["a", "a b c d"], ["b c", "b"]), bert, 6)
    (pair,) = encoded.sequential(2)
    assert rows(pair) == [[1, 3, 2, 4, 5, 2], [1, 3, 4, 2, 4, 2]]
    assert pair.token_type_ids.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert encoded.num_truncated == 1
    assert bert.backend_tokenizer.truncation is None


def test_specials_that_are_written_out_stay_text(bert):
    (batch,) = encode(split(["<|bos|>"]), BYTE, 20).sequential(1)
    assert rows(batch) == [[BOS, *b"<|bos|>"]]
    (batch,) = encode(split(["a [SEP] b"]), bert, 20).sequential(1)
    assert rows(batch) == [[1, 3, 6, 6, 6, 4, 2]]


@given(a=st.integers(1, 30), b=st.integers(1, 30), room=st.integers(2, 40))
def test_cutting_is_that_of_the_tokenizers_library(a, b, room):
    found = _longest_first(a, b, room)
    assert sum(found) == min(a + b, room)
    while a + b > room:  # one token at a time from the longer one; of two equal ones, the second
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert found == (a, b)


def test_batches_are_a_function_of_seed_and_number():
    texts = [str(n) * (n % 7 + 1) for n in range(10)]
    one, other = (encode(split(texts), BYTE, 16, seed=seed) for seed in (0, 1))
    epoch = [label for i in range(5) for label in one.batch(i, 2).labels.tolist()]
    assert sorted(epoch) == list(range(10))
    assert epoch != [label for i in range(5) for label in other.batch(i, 2).labels.tolist()]
    assert epoch != [label for i in range(5, 10) for label in one.batch(i, 2).labels.tolist()]
    assert one.batch(3, 4).labels.tolist() == encode(split(texts), BYTE, 16).batch(3, 4).labels.tolist()
    shares = [one.batch(1, 4, rank=rank, world_size=2).labels.tolist() for rank in (0, 1)]
    assert shares[0] + shares[1] == one.batch(1, 4).labels.tolist()
    batch = one.batch(2, 4)
    assert rows(batch) == [[BOS, *texts[label].encode()] for label in batch.labels]


def test_ranks_see_every_example_once_and_fill_up_with_ignored_rows():
    encoded = encode(split([str(n) for n in range(7)]), BYTE, 8)
    parts = [list(encoded.sequential(4, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [[b.labels.tolist() for b in part] for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, -100]]]
    assert all((b.attention_mask.sum(1) > 0).all() for part in parts for b in part)
    assert encoded.num_batches(4) == 2


def test_what_cannot_be_encoded_is_one_line(bert):
    with pytest.raises(ValueError, match=r"length \(1\) must be at least 2: 1 specials and a token of each text"):
        encode(split(["a"]), BYTE, 1)
    with pytest.raises(ValueError, match=r"length \(4\) must be at least 5: 3 specials"):
        encode(split(["a"], ["b"]), bert, 4)
    with pytest.raises(DataError, match="the split has no examples"):
        encode(split([]), BYTE, 8)
    with pytest.raises(ValueError, match=r"batch_size \(3\) must be a multiple of world_size \(2\)"):
        encode(split(["a"]), BYTE, 8).batch(0, 3, world_size=2)
    with pytest.raises(ValueError, match="is a slow tokenizer"):
        encode(split(["a"]), object(), 8)
