"""Windows of packed documents, and batches that are a pure function of (seed, index)."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mercer.data.documents import open_source
from mercer.data.split import split_spans
from mercer.data.stream import TokenStream, open_stream

if TYPE_CHECKING:
    import transformers

IGNORED = -100  # the label that every loss in this field leaves out


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of packed documents.

    Args:
        input_ids: tokens [B, L].
        labels: `input_ids` where the token is predicted from an earlier one of the same document in the window,
            -100 elsewhere; not shifted, as transformers models do that themselves.
        position_ids: positions [B, L]; they restart at 0 where a document does.
        segments: which document of the window [B, L], from 0; padding is a document of its own.
        num_bytes: bytes of text that the labelled tokens stand for, for bits per byte.
    """

    input_ids: Int[Tensor, "B L"]
    labels: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    num_bytes: int

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.segments)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), num_bytes=self.num_bytes)


class PackedSplit:
    """Documents one after the other, cut into windows of `length` tokens.

    A window begins with the last token of the one before, so every token but the very first is predicted exactly
    once in a pass; where the windows end, the last one is padded. Attention must keep to `segments`.

    Args:
        stream: the tokens of all documents.
        spans: start and stop of this split's documents in the stream [documents, 2].
        length: tokens in a window.
        seed: draws the order of the windows, anew for each epoch.
        pad_id: fills the last window.

    Attributes:
        num_documents: documents in the split.
        num_tokens: tokens, begin and end tokens of documents included.
        num_bytes: UTF-8 bytes of the text.
        num_windows: windows in an epoch.
    """

    def __init__(self, stream: TokenStream, spans: np.ndarray, *, length: int, seed: int, pad_id: int):
        sizes = spans[:, 1] - spans[:, 0]
        self._stream, self._starts = stream, spans[:, 0]
        self._ends = np.cumsum(sizes)  # of the documents, in this split
        self._pad_id = pad_id
        self.length, self.seed = length, seed
        self.num_documents = len(spans)
        self.num_tokens = int(sizes.sum())
        self.num_bytes = _bytes_between(stream, spans)
        self.num_windows = max(1, math.ceil((self.num_tokens - 1) / (length - 1)))

    def __repr__(self) -> str:
        counts = f"{self.num_documents} documents, {self.num_tokens} tokens, {self.num_bytes} bytes"
        return f"PackedSplit({counts}, {self.num_windows} windows of {self.length})"

    def batch(self, index: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Batch:
        """Return batch number `index` of an endless stream: every window once an epoch, in a fresh order each.

        A pure function of the split's seed and these arguments: `index` is all the position there is to remember.
        A batch may reach over the end of an epoch.

        Args:
            index: number of the batch, from 0.
            batch_size: windows in the batch, over all ranks together.
            rank: which share of the batch to return.
            world_size: into how many shares it is divided, in the order of the ranks.

        Returns:
            `batch_size / world_size` windows.

        Raises:
            ValueError: an argument is out of range, or `batch_size` is no multiple of `world_size`.
        """
        return self._gather(drawn(self.seed, self.num_windows, index, batch_size, rank, world_size))

    def sequential(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Iterate once over all windows, in order.

        Args:
            batch_size: windows in a batch, over all ranks together; the last batch may have fewer.
            rank: which share of every batch to return.
            world_size: into how many shares a batch is divided. All ranks get as many batches of the same shape:
                where windows run out, a rank gets one of nothing but padding, without labels.

        Returns:
            Batches whose `num_bytes` add up, over all ranks, to those of the split that are predicted at all.

        Raises:
            ValueError: an argument is out of range, or `batch_size` is no multiple of `world_size`.
        """
        check_shares(batch_size, rank, world_size)
        return self._sequential(batch_size, rank, world_size)

    def _sequential(self, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        for start in range(0, self.num_windows, batch_size):
            share = math.ceil(min(batch_size, self.num_windows - start) / world_size)
            yield self._gather(start + rank * share + np.arange(share))

    def _gather(self, windows: np.ndarray) -> Batch:
        first = windows[:, None] * (self.length - 1)
        place = first + np.arange(self.length)
        real = place < self.num_tokens
        known = np.minimum(place, self.num_tokens - 1)
        document = np.searchsorted(self._ends, known, side="right")
        begin = np.where(document > 0, self._ends[document - 1], 0)
        source = self._starts[document] + known - begin
        # In the window, padding is one more document, beginning where the split ends.
        document = np.where(real, document, self.num_documents)
        position = place - np.maximum(np.where(real, begin, self.num_tokens), first)
        input_ids = np.where(real, self._stream.tokens[source].astype(np.int64), self._pad_id)
        predicted = real & (position > 0)
        labels = np.where(predicted, input_ids, IGNORED)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position),
            segments=torch.from_numpy(document - document[:, :1]),
            num_bytes=int(self._stream.token_bytes[source][predicted].sum(dtype=np.int64)),
        )


def drawn(seed: int, count: int, index: int, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """Return a rank's share of batch `index` of an endless stream: which of `count` items, in a fresh order each epoch.

    Raises:
        ValueError: an argument is out of range, or `batch_size` is no multiple of `world_size`.

    >>> sorted(drawn(0, 4, 0, 4, 0, 1).tolist())
    [0, 1, 2, 3]
    """
    if index < 0:
        raise ValueError(f"index ({index}) must be at least 0: it numbers batches from the start")
    check_shares(batch_size, rank, world_size)
    share = batch_size // world_size
    epochs, places = np.divmod(index * batch_size + rank * share + np.arange(share), count)
    items = np.empty(share, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        items[here] = epoch_order(seed, int(epoch), count)[places[here]]
    return items


def check_shares(batch_size: int, rank: int, world_size: int) -> None:
    """Raise ValueError unless a batch divides into equal shares, of which `rank` is one."""
    if batch_size < 1:
        raise ValueError(f"batch_size ({batch_size}) must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank ({rank}) must be at least 0 and below world_size ({world_size})")
    if batch_size % world_size:
        raise ValueError(f"batch_size ({batch_size}) must be a multiple of world_size ({world_size})")


def _bytes_between(stream: TokenStream, spans: np.ndarray) -> int:
    """Add up the bytes of spans: from the index for whole documents, token by token for the parts of a cut one."""
    whole = np.isin(spans[:, 1], stream.ends) & np.isin(spans[:, 0], np.concatenate([[0], stream.ends]))
    total = int(stream.document_bytes[np.searchsorted(stream.ends, spans[whole, 1])].sum())
    return total + sum(int(stream.token_bytes[start:stop].sum(dtype=np.int64)) for start, stop in spans[~whole])


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    """Return the order of the windows in an epoch: a permutation, the same on every machine and numpy.

    The raw stream of a bit generator is fixed for good where numpy's shuffles are not; sorting by it costs
    O(W log W) once an epoch.

    >>> sorted(epoch_order(0, 0, 5).tolist()) == list(range(5))
    True
    """
    order = np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(num_windows), kind="stable")
    order.flags.writeable = False  # one array serves every caller
    return order


@dataclass(frozen=True, eq=False)
class PackedData:
    """What `prepare` returns.

    Args:
        train: the documents to learn from.
        validation: documents held out whole.
        note: what was unusual about the split, in a sentence; mostly empty.
    """

    train: PackedSplit
    validation: PackedSplit
    note: str = ""


def prepare(
    source: str | Path,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    length: int,
    validation_fraction: float = 0.05,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    text_field: str = "text",
    max_bytes: int | None = None,
) -> PackedData:
    """Tokenize a source, hold documents out for validation, and pack both splits into windows.

    Each document is its begin token (where the tokenizer has one), its text and its end token. The split depends
    on the documents alone, so runs that differ in seed, mixer or length share it; equal documents fall on the
    same side. Where no whole document can be held out, the end of the largest one is, and `note` says so.

    Tokens are kept on disk and used again while the source's files (paths, sizes, times), the tokenizer and the
    settings are the same; a data set on the hub is known by its name alone, so empty the cache to read it anew.

    Args:
        source: as in `read_documents`.
        tokenizer: a fast transformers tokenizer, as `build_tokenizer` returns.
        length: tokens in a window.
        validation_fraction: share of the text to hold out.
        seed: draws the order of the training windows.
        cache_dir: where tokens are kept for the next call; default: `$MERCER_CACHE_DIR`, else `~/.cache/mercer`.
        text_field: the field or column with the text, where rows have fields.
        max_bytes: read no further document once this much text is read; the way to take part of a huge source.

    Returns:
        Both splits.

    Raises:
        ValueError: an argument is out of range, or the source is unknown.
        FileNotFoundError: no such path.
        DataError: the source holds no usable text, or too little of it for a window on each side.

    Cost: one pass over the text; then memory-mapped, so memory does not grow with the source.

    >>> import tempfile
    >>> from mercer.data import build_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = prepare("python-docs", build_tokenizer("byte"), length=128, cache_dir=folder)
    ...     data.train.batch(0, batch_size=4).input_ids.shape
    torch.Size([4, 128])
    """
    if length < 2:
        raise ValueError(f"length ({length}) must be at least 2: a window of one token predicts nothing")
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"validation_fraction ({validation_fraction}) must be above 0 and below 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed ({seed}) must be at least 0 and below 2**64")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes ({max_bytes}) must be at least 1; leave it out to read everything")
    opened = open_source(source, text_field=text_field)
    stream = open_stream(opened, tokenizer, cache_dir=cache_dir, max_bytes=max_bytes)
    train, validation, note = split_spans(opened.name, stream, fraction=validation_fraction, least=length)
    padding: list[Any] = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    pad_id = next(token for token in padding if token is not None)
    splits = [PackedSplit(stream, spans, length=length, seed=seed, pad_id=pad_id) for spans in (train, validation)]
    return PackedData(*splits, note=note)
