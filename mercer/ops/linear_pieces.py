"""Heads folded, cut into parts and pieces: what the operators of feature space share, forward and backward.

Heads are folded: N = B Hk heads of keys, each with the G = H / Hk query heads that share it, whose rows stand below
each other in one matrix product. The sums [N, m, W], W = Dv + 1, hold S and, as a last column, z: values get a column
of ones when a piece is worked.
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
    plan,
    tokens_of,
)
from mercer.ops.linear_logs import Logs


@dataclass(frozen=True)
class Part:
    """Some folded heads over a stretch of tokens that can be worked by itself; padded keys are gone.

    `rows` None: the log features of a row are the product that its key is made of.
    """

    rows: Logs | None
    keys: Logs
    values: Float[Tensor, "N S Dv"]
    sums: Float[Tensor, "N m W"]
    scale: Float[Tensor, "N m"]
    tokens: Tokens
    size: int

    @property
    def groups(self) -> int:
        """Rows that share a key, one of each query head."""
        return 1 if self.rows is None else self.rows.x.shape[1]

    @property
    def num_rows(self) -> int:
        """Tokens that have rows."""
        return self.keys.length if self.rows is None else self.rows.length

    def spans(self, length: int) -> Iterator[slice]:
        """Cut a number of tokens into chunks."""
        return (slice(start, start + self.size) for start in range(0, length, self.size))

    def real_rows(self, at: slice) -> Bool[Tensor, "N n"] | None:
        """Return which of these rows are real tokens; None where all are, or where rows and keys are not the same."""
        real = self.tokens.real
        return real[:, at] if real is not None and real.shape[1] == self.num_rows else None

    def values_at(self, at: slice) -> Float[Tensor, "N n W"]:
        """Return values and a column of ones, without what padded tokens hold."""
        values, real = self.values[:, at].to(self.sums.dtype), self.tokens.real
        if real is not None:
            values = values.masked_fill(~real[:, at, None], 0)
        return with_ones(values)

    def row_weights(
        self, at: slice, shift: Tensor, peak: Tensor | None = None, product: Tensor | None = None
    ) -> Float[Tensor, "N Gn m"]:
        """Return exp(log_q + shift), each row divided by its largest entry, whose log goes to `peak`; 0 if padded.

        `product`, if it is at hand already, is kept.
        """
        rows, shift = self.keys if self.rows is None else self.rows, shift[:, None]
        if product is None:
            product = rows.product(at)
            weights = rows.add(product, shift)
        else:
            weights = product + shift / rows.unit
        largest = weights.amax(-1, keepdim=True).clamp_min_(FLOOR)
        if peak is not None:
            torch.mul(largest.view(peak.shape), rows.unit, out=peak)
        rows.exp_(weights.sub_(largest))
        real = self.real_rows(at)
        if real is not None:  # whatever a padded row holds, NaN too, must not reach the keys through 0 * NaN
            weights.unflatten(1, (self.groups, -1)).masked_fill_(~real[:, None, :, None], 0)
        return weights

    def key_weights(self, at: slice, shift: Tensor, logs: Tensor | None = None) -> Float[Tensor, "N n m"]:
        """Return exp(log_k - shift); `logs`, if they are at hand already, are used up where they may be."""
        keys, shift = self.keys, -shift[:, None]
        if logs is None:
            logs = keys.finished(keys.product(at), at, keep=False)
        return keys.exp_(keys.add(logs, shift, keep=keys.tied and keys.factor is None and keys.offset is None))

    def with_logs(self, piece: Piece) -> Piece:
        """Return the piece with the log features of its keys at hand, and with their product where it is needed."""
        product = self.keys.product(piece.span)
        logs = self.keys.finished(product, piece.span, keep=self.keys.tied)
        return replace(piece, logs=logs, product=product if self.keys.tied else None)

    def piece_weights(self, piece: Piece, peak: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of keys and of rows, and those between them that look back, [N, G n, n]."""
        piece = self.with_logs(piece) if piece.logs is None else piece
        row_weights = self.row_weights(piece.span, piece.shift, peak, piece.product)
        key_weights = self.key_weights(piece.span, piece.shift, piece.logs)
        near = look_back_(torch.bmm(row_weights, key_weights.mT), self.groups, piece.parts)
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

    @classmethod
    def of(cls, rows: Logs | None, keys: Logs, v, sums, scale, mask, documents, last, causal, chunk_size) -> "Problem":
        """Fold the heads of the rest."""
        occupied = (scale > FLOOR).flatten(1).any(1)
        tokens = tokens_of(mask, documents, last, occupied, v.shape[1])
        values, sums, scale = (x.flatten(0, 1) for x in (v, sums, scale))
        size = chunk_length(v.device, chunk_size)
        return cls(rows, keys, values, sums, scale, tokens, last.shape[0], causal, size)

    def stretches(self) -> Iterator[Stretch]:
        """Yield a few heads at a time, so that a chunk of them stays in the cache; without causality, each document."""
        count, length = len(self.keys.x), self.keys.length
        if not count:
            return
        if self.causal or self.tokens.runs is None or not length:
            row_bytes = (1 if self.rows is None else self.rows.x.shape[1]) + 1
            row_bytes *= self.keys.features * self.scale.element_size()
            step = heads_at_once(self.scale.device, count, min(self.size, length) * row_bytes)
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
        """Cut a stretch out; its sums are a view of these."""
        heads, span, tokens = stretch.heads, stretch.span, stretch.tokens
        rows, keys = self.rows and self.rows.part(heads, span), self.keys.part(heads, span, tokens.real)
        sums, scale = self.sums[heads], self.scale[heads]
        if not stretch.opens:
            sums, scale = torch.zeros_like(sums), torch.full_like(scale, FLOOR)
        return Part(rows, keys, self.values[heads, span], sums, scale, tokens, self.size)


def with_ones(values: Float[Tensor, "N n Dv"]) -> Float[Tensor, "N n W"]:
    """Append a column of ones."""
    return torch.cat([values, values.new_ones(*values.shape[:2], 1)], -1)


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


def _after(part: Part, sums: Tensor, pieces: list[Piece]) -> Float[Tensor, "N m W"]:
    """Return the sums after some pieces."""
    sums = sums.clone()
    for piece in pieces:
        key_weights = part.key_weights(piece.span, piece.shift, piece.logs)
        advance_(sums.mul_(piece.decay), key_weights, part.values_at(piece.span), piece)
    return sums


def pieces_backwards(part: Part) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the pieces from the last to the first, each with the sums that enter it, recomputed.

    Those entering the chunks are kept, and, of one chunk at a time, those entering its pieces.
    """
    chunks, entering, sums, before = [], [], part.sums, []
    for pieces in plan(part.keys, part.scale, part.tokens, part.size):
        sums = _after(part, sums, before) if before else sums
        entering.append(sums)
        chunks.append([piece.without_logs() for piece in pieces])
        before = pieces
    for pieces in reversed(chunks):
        inside = [entering.pop()]
        for piece in pieces[:-1]:
            inside.append(_after(part, inside[-1], [piece]))
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


def weight_gradients_(
    part: Part, piece: Piece, weights, values: Tensor, before: Tensor, grad: Tensor, grad_sums: Tensor
) -> tuple[Float[Tensor, "N Gn m"], Float[Tensor, "N n m"]]:
    """Return the gradients of log_q and log_k in one piece.

    In place, `grad_sums` goes from the leaving sums, at the shift of the piece, to the entering ones; `grad`, of the
    undivided sums of rows, is used up.
    """
    parts, (key_weights, row_weights, _) = piece.parts, weights
    grad_near = look_back_(torch.bmm(grad, values.mT), part.groups, parts)
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
    return grad_row.mul_(row_weights), grad_key.mul_(key_weights)
