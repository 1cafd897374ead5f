"""Validation is whole documents, never shared with training, and neither side is ever empty."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.data.split import split_documents, split_spans
from mercer.data.stream import TokenStream
from mercer.errors import DataError

documents = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3000)), min_size=1, max_size=60)


def arrays(drawn):
    sizes = dict(drawn)  # documents of equal hash are equal
    digests = np.array([digest for digest, _ in drawn], np.uint64)
    return digests, np.array([sizes[digest] for digest, _ in drawn])


def make_stream(digests, sizes):
    ends = np.cumsum(sizes)
    nothing = np.empty(0, np.uint16)
    return TokenStream(nothing, nothing, ends, np.asarray(sizes), np.asarray(digests, np.uint64))


@settings(max_examples=300, deadline=None)
@given(drawn=documents, fraction=st.floats(0.01, 0.9), least=st.integers(2, 500))
def test_sides_share_nothing_lose_nothing_and_are_large_enough(drawn, fraction, least):
    digests, sizes = arrays(drawn)
    chosen = split_documents(digests, sizes, sizes, fraction=fraction, least=least)
    if chosen is None:
        return
    train, validation = chosen
    assert sorted([*train, *validation]) == list(range(len(sizes)))
    assert not set(digests[train]) & set(digests[validation])
    assert min(sizes[train].sum(), sizes[validation].sum()) >= least


@settings(max_examples=100, deadline=None)
@given(drawn=documents, seed=st.integers(0, 99))
def test_order_of_the_documents_does_not_matter(drawn, seed):
    digests, sizes = arrays(drawn)
    order = np.random.default_rng(seed).permutation(len(sizes))
    held_out = []
    for places in (np.arange(len(sizes)), order):
        chosen = split_documents(digests[places], sizes[places], sizes[places], fraction=0.2, least=5)
        held_out.append(None if chosen is None else set(digests[places][chosen[1]]))
    assert held_out[0] == held_out[1]


def test_share_is_near_the_one_asked_for():
    rng = np.random.default_rng(0)
    digests, sizes = rng.integers(0, 2**63, 5000).astype(np.uint64), rng.integers(1, 1000, 5000)
    _, validation = split_documents(digests, sizes, sizes, fraction=0.05, least=2)
    assert 0 <= sizes[validation].sum() / sizes.sum() - 0.05 < 0.001


def test_a_book_is_not_held_out_where_a_letter_will_do():
    sizes = np.array([10_000, 300, 9_000])
    _, validation = split_documents(np.array([1, 2, 3], np.uint64), sizes, sizes, fraction=0.02, least=200)
    assert validation.tolist() == [1]


def test_smallest_book_is_held_out_of_books():
    sizes = np.array([10_000, 7_000, 9_000])
    train, validation = split_documents(np.array([1, 2, 3], np.uint64), sizes, sizes, fraction=0.05, least=200)
    assert (train.tolist(), validation.tolist()) == ([0, 2], [1])


@settings(max_examples=200, deadline=None)
@given(drawn=documents, fraction=st.floats(0.01, 0.9), least=st.integers(2, 500))
def test_spans_cover_the_stream_once_or_an_error_says_what_to_do(drawn, fraction, least):
    digests, sizes = arrays(drawn)
    try:
        train, validation, note = split_spans("x", make_stream(digests, sizes), fraction=fraction, least=least)
    except DataError as error:
        text = str(error)
        assert "give more text, or windows of at most" in text or "give more documents, or shorter windows" in text
        return
    covered = np.zeros(sizes.sum(), int)
    for start, stop in [*train, *validation]:
        covered[start:stop] += 1
    assert (covered == 1).all()
    for spans in (train, validation):
        assert (spans[:, 1] - spans[:, 0]).sum() >= least
    assert bool(note) == (len(train) + len(validation) > len(sizes))


def test_a_single_book_is_cut_and_the_note_says_so():
    train, validation, note = split_spans("x", make_stream([5], [1000]), fraction=0.05, least=20)
    assert (train.tolist(), validation.tolist()) == ([[0, 950]], [[950, 1000]])
    assert note == "no whole document could be held out: the validation split is the last 50 tokens of the largest one"


def test_one_text_many_times_cannot_be_split():
    with pytest.raises(DataError, match=r"x cannot be split: among its 3 documents .* give more documents"):
        split_spans("x", make_stream([5, 5, 5], [1000, 1000, 1000]), fraction=0.05, least=20)
