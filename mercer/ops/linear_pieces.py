"""Heads folded, cut into parts, pieces and blocks: what the operators of feature space share, forward and backward.

Heads are folded: N = B Hk heads of keys, each with the G = H / Hk query heads that share it. The tokens of a piece
share a shift of the features, and so one elementwise pass; they make b blocks of h, inside which weights are formed,
while sums carry what lies before. A block's G h rows stand below each other in one matrix product.
The sums are kept transposed here, [N, W, m], W = Dv + 1, the faster way round to add to; they hold S and, as a last
row, z: values get a column of ones when a piece is worked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mercer.ops.linear_chunks import (
    FLOOR,
    Documents,
    Piece,
    Tokens,
    chunk_length,
    heads_at_once,
    tokens_of,
)
from mercer.ops.linear_logs import Logs, Shared, in_blocks


@dataclass(frozen=True)
class Weights:
    """The weights of a piece: of the features of its keys and rows, and of its keys in its rows, block by block."""

    keys: Float[Tensor, "N b h m"]
    rows: Float[Tensor, "N b Gh m"]
    near: Float[Tensor, "N b Gh h"]


@dataclass(frozen=True)
class Part:
    """Some folded heads over a stretch of tokens that can be worked by itself; padded keys are gone.

    `rows` None: the log features of a row are the product that its key is made of. `sums` are carried on in place.
    `block` None: pieces are not divided into blocks.
    """

    rows: Logs | None
    keys: Logs
    values: Float[Tensor, "N S Dv"]
    sums: Float[Tensor, "N W m"]
    scale: Float[Tensor, "N m"]
    tokens: Tokens
    size: int
    block: int | None

    @property
    def groups(self) -> int:
        """Rows that share a key, one of each query head."""
        return 1 if self.rows is None else self.rows.x.shape[1]

    @property
    def num_rows(self) -> int:
        """Tokens that have rows."""
        return self.keys.length if self.rows is None else self.rows.length

    def sharing(self, shared: Shared) -> "Part":
        """Return the same, whose keys read their product where others read it too."""
        return replace(self, keys=self.keys.sharing(shared))

    def blocks(self, piece: Piece) -> int:
        """Return into how many blocks a piece is divided.

        One on an accelerator, where documents begin inside, and where its length is no multiple of a block.
        """
        length = piece.stop - piece.start
        if self.block is None or piece.parts is not None or length % self.block:
            return 1
        return length // self.block

    def spans(self, length: int) -> Iterator[slice]:
        """Cut a number of tokens into chunks."""
        return (slice(start, start + self.size) for start in range(0, length, self.size))

    def real_rows(self, at: slice) -> Bool[Tensor, "N n"] | None:
        """Return which of these rows are real tokens; None where all are, or where rows and keys are not the same."""
        real = self.tokens.real
        return real[:, at] if real is not None and real.shape[1] == self.num_rows else None

    def values_at(self, at: slice, blocks: int = 1) -> Float[Tensor, "N b h W"]:
        """Return values and a column of ones, without what padded tokens hold."""
        values, real = self.values[:, at].to(self.sums.dtype), self.tokens.real
        if real is not None:
            values = values.masked_fill(~real[:, at, None], 0)
        return with_ones(values).unflatten(1, (blocks, -1))

    def row_weights(
        self,
        at: slice,
        shift: Tensor,
        peak: Float[Tensor, "N G n 1"] | None = None,
        product: Tensor | None = None,
        blocks: int = 1,
    ) -> Float[Tensor, "N b Gh m"]:
        """Return exp(log_q + shift), each row divided by its largest entry, whose log goes to `peak`; 0 if padded.

        `product`, if it is at hand already, is kept.
        """
        rows, shift = self.keys if self.rows is None else self.rows, shift[:, None]
        if product is None:
            product = rows.product(at, blocks)
            weights = rows.add(product, shift)
        else:
            weights = product + shift / rows.unit
        largest = weights.amax(-1, keepdim=True).clamp_min_(FLOOR)
        if peak is not None:
            peak = in_blocks(peak, blocks)
            torch.mul(largest.view(peak.shape), rows.unit, out=peak)
        rows.exp_(weights.sub_(largest))
        real = self.real_rows(at)
        if real is not None:  # whatever a padded row holds, NaN too, must not reach the keys through 0 * NaN
            hidden = ~real.unflatten(1, (blocks, 1, -1))
            weights.unflatten(1, (blocks, self.groups, -1)).masked_fill_(hidden[..., None], 0)
        return weights.unflatten(1, (blocks, -1))

    def key_weights(
        self, at: slice, shift: Tensor, logs: Tensor | None = None, blocks: int = 1
    ) -> Float[Tensor, "N b h m"]:
        """Return exp(log_k - shift); `logs`, if they are at hand already, are used up where they may be."""
        keys, shift = self.keys, -shift[:, None]
        if logs is None:
            logs = keys.finished(keys.product(at), at)
        weights = keys.exp_(keys.add(logs, shift, keep=keys.lends and keys.plain))
        return weights.unflatten(1, (blocks, -1))

    def with_logs(self, piece: Piece) -> Piece:
        """Return the piece with the log features of its keys at hand, and with their product where it is needed."""
        if piece.logs is not None:
            return piece
        product = self.keys.product(piece.span)
        logs = self.keys.finished(product, piece.span)
        return replace(piece, logs=logs, product=product if self.keys.tied else None)

    def weights(self, piece: Piece, peak: Tensor | None = None, near: Tensor | None = None) -> Weights:
        """Return all weights of a piece; those between rows and keys look back, and are `near` if that is at hand."""
        piece, blocks = self.with_logs(piece), self.blocks(piece)
        rows = self.row_weights(piece.span, piece.shift, peak, piece.product, blocks)
        keys = self.key_weights(piece.span, piece.shift, piece.logs, blocks)
        near = look_back_(matmul(rows, keys.mT), self.groups, piece.parts) if near is None else near
        return Weights(keys, rows, near)


@dataclass(frozen=True)
class Stretch:
    """Which heads and tokens make a part."""

    heads: slice
    span: slice
    tokens: Tokens
    opens: bool  # the sums of the state enter here
    closes: bool  # the sums after it are the new state's


@dataclass(frozen=True)
class Problem:
    """The arguments of an operator with the heads folded; see `Part`."""

    rows: Logs | None
    keys: Logs
    values: Float[Tensor, "N S Dv"]
    sums: Float[Tensor, "N m W"]
    scale: Float[Tensor, "N m"]
    tokens: Tokens
    batch: int
    causal: bool
    size: int
    block: int | None
    threads: int

    @classmethod
    def of(
        cls, rows: Logs | None, keys: Logs, v, sums, scale, mask, documents, last, causal, chunk_size, threads, block
    ) -> "Problem":
        """Fold the heads of the rest."""
        occupied = (scale > FLOOR).flatten(1).any(1)
        tokens = tokens_of(mask, documents, last, occupied, v.shape[1])
        values, sums, scale = (x.flatten(0, 1) for x in (v, sums, scale))
        size = chunk_length(v.device, chunk_size)
        blocks = block if v.device.type == "cpu" else None
        return cls(rows, keys, values, sums, scale, tokens, last.shape[0], causal, size, blocks, threads)

    def stretches(self) -> Iterator[Stretch]:
        """Yield a few heads at a time, so that a chunk of them stays in the cache; without causality, each document."""
        count, length = len(self.keys.x), self.keys.length
        if not count:
            return
        if self.causal or self.tokens.runs is None or not length:
            row_bytes = (1 if self.rows is None else self.rows.x.shape[1]) + 1
            row_bytes *= self.keys.features * self.scale.element_size()
            step = heads_at_once(self.scale.device, count, min(self.size, length) * row_bytes, self.threads)
            for start in range(0, count, step):
                heads = slice(start, min(start + step, count))
                yield Stretch(heads, slice(None), self.tokens.of_heads(heads.start, heads.stop), True, True)
            return
        for first in range(0, count, count // self.batch):
            heads = slice(first, first + count // self.batch)
            runs, lengths = self.tokens.runs[first].unique_consecutive(return_counts=True)
            stop = 0
            for run, run_length in zip(runs.tolist(), lengths.tolist(), strict=True):
                start, stop = stop, stop + run_length
                real = None if self.tokens.real is None else self.tokens.real[heads, start:stop]
                yield Stretch(heads, slice(start, stop), Tokens(real=real), run == 0, stop == length)

    def part(self, stretch: Stretch) -> Part:
        """Cut a stretch out, with a copy of the sums."""
        heads, span, tokens = stretch.heads, stretch.span, stretch.tokens
        rows, keys = self.rows and self.rows.part(heads, span), self.keys.part(heads, span, tokens.real)
        sums, scale = self.sums[heads].mT.clone(memory_format=torch.contiguous_format), self.scale[heads]
        if not stretch.opens:
            sums, scale = torch.zeros_like(sums), torch.full_like(scale, FLOOR)
        return Part(rows, keys, self.values[heads, span], sums, scale, tokens, self.size, self.block)


def with_ones(values: Float[Tensor, "N n Dv"]) -> Float[Tensor, "N n W"]:
    """Append a column of ones."""
    return torch.cat([values, values.new_ones(*values.shape[:2], 1)], -1)


def matmul(x: Float[Tensor, "N b k l"], y: Float[Tensor, "N b l n"]) -> Float[Tensor, "N b k n"]:
    """Multiply the matrices of all blocks of all heads in one call."""
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).view(*x.shape[:3], y.shape[3])


def add_matmul_(out: Float[Tensor, "N b k n"], x: Float[Tensor, "N b k l"], y: Float[Tensor, "N b l n"]) -> Tensor:
    """Add the products of the matrices of all blocks, in place."""
    out.view(-1, *out.shape[2:]).baddbmm_(x.flatten(0, 1), y.flatten(0, 1))
    return out


def look_back_(weights: Float[Tensor, "N b Gh h"], groups: int, parts: Documents | None) -> Tensor:
    """Keep, in place, the weights that look back, within one document."""
    square = weights.view(*weights.shape[:2], groups, -1, weights.shape[3]).tril_()
    if parts is not None:
        square.masked_fill_(~parts.same[:, None, None], 0)
    return weights
