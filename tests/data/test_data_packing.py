"""Windows and batches: every token once, documents kept apart, the position in the data one integer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.data import PackedSplit, build_tokenizer, prepare
from mercer.data.packing import epoch_order
from mercer.data.stream import TokenStream
from mercer.errors import DataError

PAD = 99


def make_split(sizes, length, *, seed=0, spans=None):
    """Tokens 0, 1, 2, ... stand for 1, 2, 3, 1, 2, 3, ... bytes."""
    ends = np.cumsum(sizes)
    token_bytes = (np.arange(ends[-1]) % 3 + 1).astype(np.uint32)
    document_bytes = np.array([part.sum() for part in np.split(token_bytes, ends[:-1])])
    stream = TokenStream(
        np.arange(ends[-1]).astype(np.uint16), token_bytes, ends, document_bytes, np.arange(len(sizes), dtype=np.uint64)
    )
    spans = stream.spans() if spans is None else np.array(spans)
    return PackedSplit(stream, spans, length=length, seed=seed, pad_id=PAD)


def test_a_window_by_hand():
    split = make_split([3, 4, 1, 2], length=6)
    first, second = split.sequential(1)
    assert first.input_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert first.segments.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert first.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert first.labels.tolist() == [[-100, 1, 2, -100, 4, 5]]
    assert first.num_bytes == 2 + 3 + 2 + 3
    assert second.input_ids.tolist() == [[5, 6, 7, 8, 9, PAD]]
    assert second.segments.tolist() == [[0, 0, 1, 2, 2, 3]]
    assert second.position_ids.tolist() == [[0, 1, 0, 0, 1, 0]]
    assert second.labels.tolist() == [[-100, 6, -100, -100, 9, -100]]
    assert second.num_bytes == 1 + 1
    assert {tensor.dtype for tensor in (first.input_ids, first.labels, first.position_ids, first.segments)} == {
        torch.int64
    }


def test_documents_that_lie_apart_are_packed_together():
    split = make_split([3, 4, 1, 2], length=6, spans=[[0, 3], [7, 8], [8, 10]])
    [batch] = split.sequential(9)
    assert batch.input_ids.tolist() == [[0, 1, 2, 7, 8, 9]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert (split.num_documents, split.num_tokens, split.num_bytes) == (3, 6, 6 + 2 + 4)


sizes_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes_of_documents, length=st.integers(2, 9), batch_size=st.integers(1, 5))
def test_windows_hold_all_tokens_and_predict_each_but_first_ones_once(sizes, length, batch_size):
    split = make_split(sizes, length)
    batches = list(split.sequential(batch_size))
    windows = torch.cat([batch.input_ids for batch in batches])
    assert len(windows) == split.num_windows
    tokens = torch.cat([windows[0, :1], windows[:, 1:].flatten()])
    assert tokens[: split.num_tokens].tolist() == list(range(sum(sizes)))
    assert (tokens[split.num_tokens :] == PAD).all()
    assert len(tokens) - split.num_tokens < length - 1 or split.num_windows == 1
    labels = torch.cat([batch.labels for batch in batches]).flatten()
    firsts = {0, *np.cumsum(sizes)[:-1].tolist()}
    assert labels[labels != -100].tolist() == [n for n in range(sum(sizes)) if n not in firsts]
    assert sum(batch.num_bytes for batch in batches) == split.num_bytes - sum(n % 3 + 1 for n in firsts)


@settings(max_examples=100, deadline=None)
@given(sizes=sizes_of_documents, length=st.integers(2, 9))
def test_positions_restart_exactly_where_segments_change(sizes, length):
    for batch in make_split(sizes, length).sequential(3):
        change = batch.segments[:, 1:] - batch.segments[:, :-1]
        assert (batch.segments[:, 0] == 0).all()
        assert ((change == 0) | (change == 1)).all()
        assert (batch.position_ids[:, 0] == 0).all()
        expected = torch.where(change == 1, 0, batch.position_ids[:, :-1] + 1)
        assert torch.equal(batch.position_ids[:, 1:], expected)


def same(a, b):
    return (
        all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("input_ids", "labels", "position_ids", "segments"))
        and a.num_bytes == b.num_bytes
    )


def test_batch_is_a_pure_function_of_seed_and_index():
    split = make_split([20] * 20, length=8)
    forward = [split.batch(index, 3) for index in range(60)]
    epoch_order.cache_clear()
    fresh = make_split([20] * 20, length=8)
    for index in (59, 0, 31, 7, 59):
        assert same(fresh.batch(index, 3), forward[index])
    assert not same(make_split([20] * 20, length=8, seed=1).batch(0, 3), forward[0])


def test_every_epoch_has_all_windows_in_an_order_of_its_own():
    split = make_split([20] * 5, length=8)  # 15 windows
    firsts = torch.cat([split.batch(index, 4).input_ids[:, 0] for index in range(15)]).view(4, 15)
    for epoch in firsts:
        assert sorted(epoch.tolist()) == [7 * n for n in range(15)]
    assert len({tuple(epoch.tolist()) for epoch in firsts}) == 4


def test_batch_size_only_cuts_the_same_stream_otherwise():
    split = make_split([20] * 5, length=8)
    one = torch.cat([split.batch(index, 6).input_ids for index in range(5)])
    other = torch.cat([split.batch(index, 10).input_ids for index in range(3)])
    assert torch.equal(one, other)


def test_batch_larger_than_the_data_goes_round_them():
    split = make_split([5], length=5)
    assert split.num_windows == 1
    assert torch.equal(split.batch(3, 4).input_ids, torch.arange(5).expand(4, 5))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shares_of_the_ranks_make_up_the_batch(world_size):
    split = make_split([20] * 5, length=8)
    whole = split.batch(3, 6)
    shares = [split.batch(3, 6, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([share.input_ids for share in shares]), whole.input_ids)
    assert sum(share.num_bytes for share in shares) == whole.num_bytes


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_ranks_walk_through_an_evaluation_in_step(world_size):
    split = make_split([19] * 5, length=8)
    walks = [list(split.sequential(12, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({tuple(batch.input_ids.shape for batch in walk) for walk in walks}) == 1
    labels = torch.cat([batch.labels.flatten() for walk in walks for batch in walk])
    everything = torch.cat([batch.labels.flatten() for batch in split.sequential(12)])
    assert torch.equal(labels[labels != -100].sort()[0], everything[everything != -100])
    assert sum(batch.num_bytes for walk in walks for batch in walk) == sum(b.num_bytes for b in split.sequential(12))


def test_order_of_windows_never_changes():
    # Stored checkpoints remember one integer: it must mean the same windows under every numpy to come.
    assert epoch_order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"index": -1, "batch_size": 2}, r"index \(-1\) must be at least 0"),
        ({"index": 0, "batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ({"index": 0, "batch_size": 3, "world_size": 2}, r"batch_size \(3\) must be a multiple of world_size \(2\)"),
        ({"index": 0, "batch_size": 4, "rank": 2, "world_size": 2}, r"rank \(2\) must be at least 0 and below"),
    ],
)
def test_batches_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_split([9], length=4).batch(**arguments)


def test_sequential_checks_its_arguments_before_the_first_batch():
    with pytest.raises(ValueError, match="batch_size"):
        make_split([9], length=4).sequential(0)


def test_batch_moves_to_a_device():
    batch = make_split([9], length=4).batch(0, 2)
    assert same(batch.to("cpu"), batch)
    assert batch.to("meta").labels.device.type == "meta"


@pytest.fixture(scope="module")
def byte():
    return build_tokenizer("byte")


def test_prepared_text_is_begin_text_end(byte, tmp_path):
    texts = ["alpha one", "beta two!", "gamma thr", "delta for", "αβγ"]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text(text, encoding="utf-8")
    data = prepare(tmp_path, byte, length=8, cache_dir=tmp_path / "cache")
    assert data.note == ""
    found = []
    for split in (data.train, data.validation):
        ids = torch.cat([batch.input_ids for batch in split.sequential(4)])
        tokens = torch.cat([ids[0, :1], ids[:, 1:].flatten()])[: split.num_tokens].tolist()
        text = byte.decode(tokens)
        found += text.removeprefix("<|bos|>").removesuffix("<|eos|>").split("<|eos|><|bos|>")
        assert sum(batch.num_bytes for batch in split.sequential(4)) == split.num_bytes
    assert sorted(found) == sorted(texts)
    assert data.train.num_bytes + data.validation.num_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, r"length \(1\) must be at least 2"),
        ({"length": 8, "validation_fraction": 0.0}, r"validation_fraction \(0.0\) must be above 0 and below 1"),
        ({"length": 8, "seed": -1}, r"seed \(-1\) must be at least 0"),
        ({"length": 8, "max_bytes": 0}, r"max_bytes \(0\) must be at least 1"),
    ],
)
def test_prepare_checks_its_arguments(byte, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare("python-docs", byte, cache_dir=tmp_path, **options)


def test_text_shorter_than_a_window_is_said_in_words(byte, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 50)
    message = (
        r"a.txt is too short: 52 tokens, where .* one window of 256; give more text, or windows of at most 26 tokens"
    )
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "a.txt", byte, length=256, cache_dir=tmp_path)


def test_seed_length_and_tokenizer_leave_the_split_alone(byte, tmp_path):
    bpe = build_tokenizer("bpe:300", ["some words"])
    sizes = {
        (data.train.num_bytes, data.validation.num_bytes)
        for data in (
            prepare("python-docs", byte, length=64, cache_dir=tmp_path),
            prepare("python-docs", byte, length=100, seed=5, cache_dir=tmp_path),
            prepare("python-docs", bpe, length=64, cache_dir=tmp_path),
        )
    }
    assert len(sizes) == 1
    [(train, validation)] = sizes
    assert 0.04 < validation / (train + validation) < 0.16
