"""Labelled text as batches of token ids, each a pure function of (seed, index)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mercer.data.labelled import LabelledSplit
from mercer.data.packing import IGNORED, check_shares, drawn
from mercer.errors import DataError

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """Examples padded on the right to the longest of them.

    Args:
        input_ids: tokens [B, L].
        attention_mask: 1 on tokens, 0 on padding [B, L].
        token_type_ids: 0 on the first text and what surrounds it, 1 on the second [B, L]; None for single texts.
        labels: classes [B]; -100 for a row that only fills the batch.
    """

    input_ids: Int[Tensor, "B L"]
    attention_mask: Int[Tensor, "B L"]
    token_type_ids: Int[Tensor, "B L"] | None
    labels: Int[Tensor, " B"]

    def to(self, device: torch.device | str) -> "LabelledBatch":
        """Return the batch on another device."""
        moved = [None if t is None else t.to(device, non_blocking=True) for t in self._tensors()]
        return LabelledBatch(*moved)  # pyright: ignore[reportArgumentType]

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of a model, labels apart."""
        found = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return found if self.token_type_ids is None else found | {"token_type_ids": self.token_type_ids}

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.input_ids, self.attention_mask, self.token_type_ids, self.labels


class EncodedSplit:
    """The examples of a split as tokens.

    Args:
        ids: tokens of each example.
        types: which text each token belongs to, for pairs.
        labels: class of each example [n].
        seed: draws the order of the examples, anew for each epoch.
        pad_id: fills the shorter rows of a batch.

    Attributes:
        num_examples: examples in an epoch.
        num_tokens: tokens in an epoch, without padding.
        num_truncated: examples that were cut to fit.
    """

    def __init__(
        self,
        ids: list[list[int]],
        types: list[list[int]] | None,
        labels: np.ndarray,
        *,
        seed: int,
        pad_id: int,
        num_truncated: int = 0,
    ):
        self._ids, self._types, self._labels, self._pad_id = ids, types, labels, pad_id
        self.seed = seed
        self.num_examples = len(ids)
        self.num_tokens = sum(map(len, ids))
        self.num_truncated = num_truncated

    def __repr__(self) -> str:
        return f"EncodedSplit({self.num_examples} examples, {self.num_tokens} tokens, {self.num_truncated} truncated)"

    def num_batches(self, batch_size: int) -> int:
        """Return how many batches an epoch takes, the last one counted whole."""
        return math.ceil(self.num_examples / batch_size)

    def batch(self, index: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> LabelledBatch:
        """Return batch number `index` of an endless stream: every example once an epoch, in a fresh order each.

        A pure function of the split's seed and these arguments. A batch may reach over the end of an epoch.

        Args:
            index: number of the batch, from 0.
            batch_size: examples in the batch, over all ranks together.
            rank: which share of the batch to return.
            world_size: into how many shares it is divided, in the order of the ranks.

        Returns:
            `batch_size / world_size` examples.

        Raises:
            ValueError: an argument is out of range, or `batch_size` is no multiple of `world_size`.
        """
        return self._gather(drawn(self.seed, self.num_examples, index, batch_size, rank, world_size))

    def sequential(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[LabelledBatch]:
        """Iterate once over all examples, in order.

        Args:
            batch_size: examples in a batch, over all ranks together; the last batch may have fewer.
            rank: which share of every batch to return.
            world_size: into how many shares a batch is divided. All ranks get as many batches with as many rows; where
                examples run out, rows repeat the first one with the label -100.

        Raises:
            ValueError: an argument is out of range, or `batch_size` is no multiple of `world_size`.
        """
        check_shares(batch_size, rank, world_size)
        for start in range(0, self.num_examples, batch_size):
            share = math.ceil(min(batch_size, self.num_examples - start) / world_size)
            yield self._gather(start + rank * share + np.arange(share), stop=start + batch_size)

    def _gather(self, places: np.ndarray, stop: int | None = None) -> LabelledBatch:
        real = places < (self.num_examples if stop is None else min(stop, self.num_examples))
        known = np.where(real, places, 0)
        ids = [self._ids[place] for place in known]
        types = None if self._types is None else [self._types[place] for place in known]
        return LabelledBatch(
            input_ids=_padded(ids, self._pad_id),
            attention_mask=_padded([[1] * len(row) for row in ids], 0),
            token_type_ids=None if types is None else _padded(types, 0),
            labels=torch.from_numpy(np.where(real, self._labels[known], IGNORED)),
        )


def _padded(rows: list[list[int]], value: int) -> Tensor:
    padded = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)


def encode(
    split: LabelledSplit, tokenizer: "transformers.PreTrainedTokenizerFast", length: int, *, seed: int = 0
) -> EncodedSplit:
    """Tokenize the examples of a split, at most `length` tokens each, specials included.

    A tokenizer made for classifiers puts its own specials around the texts ([CLS] a [SEP] b [SEP]). Any other gives
    bos a, or bos a bos b: its begin token stands first and between the texts. What is too long is cut at its end;
    of a pair, the longer text first. A special token that is written out in a text stays text.

    Args:
        split: texts and labels.
        tokenizer: a fast transformers tokenizer, as `build_tokenizer` returns.
        length: tokens that an example may have.
        seed: draws the order of `EncodedSplit.batch`.

    Returns:
        Batches by number.

    Raises:
        ValueError: `length` leaves no room for a token of each text, or the tokenizer is a slow one.
        DataError: the split is empty, or the tokenizer leaves nothing of a text.

    >>> from mercer.data import build_tokenizer
    >>> split = LabelledSplit(("no", "well done"), None, np.array([0, 1]))
    >>> batch = encode(split, build_tokenizer("byte"), 8).batch(0, batch_size=2)
    >>> batch.input_ids.shape, sorted(batch.attention_mask.sum(1).tolist())
    (torch.Size([2, 8]), [3, 8])
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; save it as a fast one (tokenizer.json)")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed ({seed}) must be at least 0 and below 2**64")
    if not len(split):
        raise DataError("the split has no examples to encode; give one that has some")
    # A copy: the caller's tokenizer goes on reading specials, cutting and padding as it was told to.
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    own = tokenizer.cls_token_id is not None and backend.num_special_tokens_to_add(split.pairs is not None) > 0
    begin = None if own else _begin(tokenizer)
    parts = 1 if split.pairs is None else 2
    specials = backend.num_special_tokens_to_add(parts == 2) if own else parts * (begin is not None)
    if length < parts + specials:
        raise ValueError(
            f"length ({length}) must be at least {parts + specials}: {specials} specials and a token of each text"
        )
    if own:
        ids, types, truncated = _with_template(backend, split, length)
    else:
        ids, types, truncated = _with_begin(backend, split, length, begin)
    padding: list[Any] = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    pad_id = next(token for token in padding if token is not None)
    return EncodedSplit(
        ids, types if parts == 2 else None, split.labels, seed=seed, pad_id=pad_id, num_truncated=truncated
    )


def _begin(tokenizer: "transformers.PreTrainedTokenizerFast") -> int | None:
    names: list[Any] = [tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id]
    return next((token for token in names if token is not None), None)


_Tokens = tuple[list[list[int]], list[list[int]], int]


def _with_template(backend: Any, split: LabelledSplit, length: int) -> _Tokens:
    inputs: Any = split.texts if split.pairs is None else zip(split.texts, split.pairs, strict=True)
    backend.enable_truncation(length, strategy="longest_first")
    encodings = backend.encode_batch(list(inputs), add_special_tokens=True)
    _check_texts([len(encoding.ids) - sum(encoding.special_tokens_mask) for encoding in encodings], split)
    truncated = sum(bool(encoding.overflowing) for encoding in encodings)
    return [encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings], truncated


def _with_begin(backend: Any, split: LabelledSplit, length: int, begin: int | None) -> _Tokens:
    def tokens(texts: tuple[str, ...]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    mark = [] if begin is None else [begin]
    firsts = tokens(split.texts)
    _check_texts([len(first) for first in firsts], split)
    if split.pairs is None:
        cut = [first[: length - len(mark)] for first in firsts]
        truncated = sum(len(a) < len(b) for a, b in zip(cut, firsts, strict=True))
        return [mark + first for first in cut], [], truncated
    ids, types, truncated = [], [], 0
    for first, second in zip(firsts, tokens(split.pairs), strict=True):
        a, b = _longest_first(len(first), len(second), length - 2 * len(mark))
        truncated += a + b < len(first) + len(second)
        ids.append(mark + first[:a] + mark + second[:b])
        types.append([0] * (a + 2 * len(mark)) + [1] * b)
    return ids, types, truncated


def _longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Return the lengths two texts are cut to so that together they have `room`: the longer one gives first.

    >>> _longest_first(10, 3, 8), _longest_first(9, 9, 7), _longest_first(2, 3, 8)
    ((5, 3), (4, 3), (2, 3))
    """
    if a + b <= room:
        return a, b
    half = room // 2
    if b <= half:
        return room - b, b
    if a <= half:
        return a, room - a
    return room - half, half


def _check_texts(counts: list[int], split: LabelledSplit) -> None:
    if 0 in counts:
        text = split.texts[counts.index(0)]
        raise DataError(f"the tokenizer leaves no token of the text {text[:40]!r}; use another tokenizer")
