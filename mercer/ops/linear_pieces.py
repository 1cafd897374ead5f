"""Heads folded, cut into parts and pieces: what the operators of feature space share, forward and backward.

Heads are folded: N = B Hk heads of keys, each with the G = H / Hk query heads that share it, whose rows stand below
each other in one matrix product. The sums [N, m, W], W = Dv + 1, hold S and, as a last column, z: values have
a column of ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mercer.ops.linear_chunks import (
    FLOOR,
    Documents,
    Keys,
    Piece,
    Tokens,
    chunk_length,
    exp_,
    heads_at_once,
    plan,
    tokens_of,
)


@dataclass(frozen=True)
class Part:
    """Some folded heads over a stretch of tokens that can be worked by itself; padded keys and values are gone."""

    rows: Float[Tensor, "N G T m"]
    keys: Keys
    values: Float[Tensor, "N S W"]
    sums: Float[Tensor, "N m W"]
    scale: Float[Tensor, "N m"]
    tokens: Tokens
    size: int

    def real(self, at: slice) -> Bool[Tensor, "N n"] | None:
        """Return which of these rows are real tokens; None where all are, or where rows and keys are not the same."""
        real = self.tokens.real
        return real[:, at] if real is not None and real.shape[1] == self.rows.shape[2] else None

    def row_weights(self, at: slice, shift: Tensor, peak: Tensor | None = None) -> Float[Tensor, "N Gn m"]:
        """Return exp(log_q + shift), each row divided by its largest entry, whose log goes to `peak`; 0 if padded."""
        weights, real = self.rows[:, :, at] + shift[:, None, None], self.real(at)
        largest = weights.amax(-1, keepdim=True).clamp_min_(FLOOR)
        weights -= largest
        if peak is not None:
            peak.copy_(largest)
        exp_(weights)
        if real is not None:  # whatever a padded row holds, NaN too, must not reach the keys through 0 * NaN
            weights.masked_fill_(~real[:, None, :, None], 0)
        return weights.flatten(1, 2)

    def key_weights(self, at: slice, shift: Tensor) -> Float[Tensor, "N n m"]:
        """Return exp(log_k - shift)."""
        return exp_(self.keys.at(at) - shift[:, None])

    def piece_weights(self, piece: Piece, peak: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of keys and of rows, and those between them that look back, [N, G n, n]."""
        at = slice(piece.start, piece.stop)
        key_weights, row_weights = self.key_weights(at, piece.shift), self.row_weights(at, piece.shift, peak)
        near = look_back_(torch.bmm(row_weights, key_weights.mT), self.rows.shape[1], piece.parts)
        return key_weights, row_weights, near


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
    """The arguments of the operator with the heads folded."""

    rows: Float[Tensor, "N G T m"]
    keys: Keys
    values: Float[Tensor, "N S Dv"]
    sums: Float[Tensor, "N m W"]
    scale: Float[Tensor, "N m"]
    tokens: Tokens
    batch: int
    causal: bool
    size: int

    @classmethod
    def of(
        cls, log_q, log_k, v, sums, scale, mask, documents, last, causal, chunk_size, factor=None, offset=None
    ) -> "Problem":
        """Fold the heads; with `factor` and `offset` [B, Hk, T], the keys' log features are factor log_k + offset."""
        occupied = (scale > FLOOR).flatten(1).any(1)
        tokens = tokens_of(mask, documents, last, occupied, log_k.shape[1])
        keys, values, sums, scale = (x.flatten(0, 1) for x in (log_k, v, sums, scale))
        scales = (None if x is None else x.flatten(0, 1)[..., None] for x in (factor, offset))
        size = chunk_length(log_k.device, chunk_size)
        return cls(fold(log_q, keys), Keys(keys, *scales), values, sums, scale, tokens, last.shape[0], causal, size)

    def stretches(self) -> Iterator[Stretch]:
        """Yield a few heads at a time, so that a chunk of them stays in the cache; without causality, each document."""
        count, length, features = self.keys.logs.shape
        if not count:
            return
        if self.causal or self.tokens.runs is None:
            row_bytes = features * self.scale.element_size()
            step = heads_at_once(
                self.scale.device, count, (self.rows.shape[1] + 1) * min(self.size, length) * row_bytes
            )
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
        """Cut a stretch out, without what padded tokens hold; its sums are a view of these."""
        heads, span, real = stretch.heads, stretch.span, stretch.tokens.real
        keys, given = self.keys.part(heads, span, real), self.values[heads, span]
        if real is not None:
            given = given.masked_fill(~real[..., None], 0)
        values = self.sums.new_ones(*given.shape[:2], given.shape[2] + 1)
        values[..., :-1] = given
        sums, scale = self.sums[heads], self.scale[heads]
        if not stretch.opens:
            sums, scale = torch.zeros_like(sums), torch.full_like(scale, FLOOR)
        return Part(self.rows[heads, :, span], keys, values, sums, scale, stretch.tokens, self.size)


def fold(x: Tensor, keys: Tensor) -> Float[Tensor, "N G T d"]:
    groups = x.shape[0] * x.shape[1] // max(keys.shape[0], 1)
    return x.reshape(keys.shape[0], groups, *x.shape[2:])


def look_back_(weights: Float[Tensor, "N Gn n"], groups: int, parts: Documents | None) -> Float[Tensor, "N Gn n"]:
    """Keep, in place, the weights that look back, within one document."""
    square = weights.view(weights.shape[0], groups, -1, weights.shape[2]).tril_()
    if parts is not None:
        square.masked_fill_(~parts.same[:, None], 0)
    return weights


def keep_rows_(x: Float[Tensor, "N Gn d"], keep: Bool[Tensor, "N n 1"]) -> Float[Tensor, "N Gn d"]:
    """Zero, in place, the rows that are not to be kept."""
    x.view(x.shape[0], -1, keep.shape[1], x.shape[2]).masked_fill_(~keep[:, None], 0)
    return x


def far_sums(row_weights: Tensor, sums: Tensor, piece: Piece) -> Float[Tensor, "N Gn W"]:
    """Return what rows see of the sums that enter the piece."""
    out = torch.bmm(row_weights, sums)
    return out if piece.parts is None else keep_rows_(out, piece.parts.opening)


def advance_(sums: Tensor, key_weights: Tensor, values: Tensor, piece: Piece) -> Float[Tensor, "N m W"]:
    """Add the keys of a piece, in place, to sums that stand at its shift already."""
    if piece.parts is None:
        return sums.baddbmm_(key_weights.mT, values)
    sums.mul_(piece.parts.through)
    return sums.baddbmm_(key_weights.mT, values * piece.parts.closing).mul_(piece.lift)


def entering_sums(part: Part, sums: Tensor, groups: list[list[Piece]]) -> list[Tensor]:
    """Return the sums that enter each of these consecutive groups of pieces, `sums` entering the first."""
    entering = [sums]
    for pieces in groups[:-1]:
        sums = sums.clone()
        for piece in pieces:
            at = slice(piece.start, piece.stop)
            advance_(sums.mul_(piece.decay), part.key_weights(at, piece.shift), part.values[:, at], piece)
        entering.append(sums)
    return entering


def pieces_backwards(part: Part) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the pieces from the last to the first, each with the sums that enter it, recomputed.

    Those entering the chunks are kept, and, of one chunk at a time, those entering its pieces.
    """
    chunks = list(plan(part.keys, part.scale, part.tokens, part.size))
    entering = entering_sums(part, part.sums, chunks) if chunks else []
    for pieces in reversed(chunks):
        inside = entering_sums(part, entering.pop(), [[piece] for piece in pieces])
        yield from zip(reversed(pieces), reversed(inside), strict=True)


def lift_(grad_sums: Tensor, key_weights: Tensor, piece: Piece) -> Float[Tensor, "N n m"]:
    """Count, in place, the gradient of the leaving sums at the shift of the piece; return the keys that reach them."""
    if piece.parts is None:
        return key_weights
    grad_sums.mul_(piece.lift)
    return key_weights * piece.parts.closing


def row_gradients(
    grad_o: Tensor, o: Tensor, inverse: Tensor, grad_log_total: Tensor | None = None
) -> Float[Tensor, "N Gn W"]:
    """Return the gradient of the undivided sums of rows."""
    grad = grad_o.new_empty(*grad_o.shape[:-1], grad_o.shape[-1] + 1)
    torch.mul(grad_o, inverse, out=grad[..., :-1])
    torch.sum(grad[..., :-1] * o, -1, keepdim=True, out=grad[..., -1:]).neg_()
    if grad_log_total is not None:
        grad[..., -1:].addcmul_(grad_log_total, inverse)
    return grad.flatten(1, 2)


def weight_gradients_(part: Part, piece: Piece, weights, before: Tensor, grad: Tensor, grad_sums: Tensor, outs) -> None:
    """Write the gradients of log_q and log_k in one piece into `outs`; added up if they are one tensor.

    In place, `grad_sums` goes from the leaving sums, at the shift of the piece, to the entering ones; `grad`, of the
    undivided sums of rows, is used up.
    """
    at, parts, (key_weights, row_weights, _) = slice(piece.start, piece.stop), piece.parts, weights
    grad_rows, grad_keys = outs
    values = part.values[:, at]
    grad_near = look_back_(torch.bmm(grad, values.mT), part.rows.shape[1], parts)
    grad_row = torch.bmm(grad_near, key_weights)
    grad_key = torch.bmm(grad_near.mT, row_weights)
    if parts is not None:
        keep_rows_(grad, parts.opening)
        values = values * parts.closing
    grad_row.baddbmm_(grad, (before * piece.decay).mT)
    grad_key.baddbmm_(values, grad_sums.mT)
    if parts is not None:
        grad_sums.mul_(parts.through)
    grad_sums.baddbmm_(row_weights.mT, grad).mul_(piece.decay)
    torch.mul(grad_row.view_as(grad_rows), row_weights.view_as(grad_rows), out=grad_rows)
    if grad_keys is None:
        grad_rows.addcmul_(grad_key.view_as(grad_rows), key_weights.view_as(grad_rows))
    else:
        torch.mul(grad_key, key_weights, out=grad_keys)
