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
    plan,
    plan_backwards,
    tokens_of,
)
from mercer.ops.linear_logs import Logs, in_blocks


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
    """

    rows: Logs | None
    keys: Logs
    values: Float[Tensor, "N S Dv"]
    sums: Float[Tensor, "N W m"]
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
            logs = keys.finished(keys.product(at), at, keep=False)
        weights = keys.exp_(keys.add(logs, shift, keep=keys.tied and keys.factor is None and keys.offset is None))
        return weights.unflatten(1, (blocks, -1))

    def with_logs(self, piece: Piece) -> Piece:
        """Return the piece with the log features of its keys at hand, and with their product where it is needed."""
        if piece.logs is not None:
            return piece
        product = self.keys.product(piece.span)
        logs = self.keys.finished(product, piece.span, keep=self.keys.tied)
        return replace(piece, logs=logs, product=product if self.keys.tied else None)

    def weights(self, piece: Piece, peak: Tensor | None = None) -> Weights:
        """Return all weights of a piece; those between rows and keys look back."""
        piece, blocks = self.with_logs(piece), piece.blocks
        rows = self.row_weights(piece.span, piece.shift, peak, piece.product, blocks)
        keys = self.key_weights(piece.span, piece.shift, piece.logs, blocks)
        return Weights(keys, rows, look_back_(matmul(rows, keys.mT), self.groups, piece.parts))


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
        """Cut a stretch out, with a copy of the sums."""
        heads, span, tokens = stretch.heads, stretch.span, stretch.tokens
        rows, keys = self.rows and self.rows.part(heads, span), self.keys.part(heads, span, tokens.real)
        sums, scale = self.sums[heads].mT.contiguous(), self.scale[heads]
        if not stretch.opens:
            sums, scale = torch.zeros_like(sums), torch.full_like(scale, FLOOR)
        return Part(rows, keys, self.values[heads, span], sums, scale, tokens, self.size)


def with_ones(values: Float[Tensor, "N n Dv"]) -> Float[Tensor, "N n W"]:
    """Append a column of ones."""
    return torch.cat([values, values.new_ones(*values.shape[:2], 1)], -1)


def matmul(x: Float[Tensor, "N b k l"], y: Float[Tensor, "N b l n"]) -> Float[Tensor, "N b k n"]:
    """Multiply the matrices of all blocks of all heads in one call."""
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).view(*x.shape[:3], y.shape[3])


def add_matmul_(sum: Float[Tensor, "N b k n"], x: Float[Tensor, "N b k l"], y: Float[Tensor, "N b l n"]) -> Tensor:
    """Add the products of the matrices of all blocks, in place."""
    sum.view(-1, *sum.shape[2:]).baddbmm_(x.flatten(0, 1), y.flatten(0, 1))
    return sum


def look_back_(weights: Float[Tensor, "N b Gh h"], groups: int, parts: Documents | None) -> Tensor:
    """Keep, in place, the weights that look back, within one document."""
    square = weights.view(*weights.shape[:2], groups, -1, weights.shape[3]).tril_()
    if parts is not None:
        square.masked_fill_(~parts.same[:, None, None], 0)
    return weights


def keep_rows_(x: Float[Tensor, "N 1 Gh d"], keep: Bool[Tensor, "N n 1"]) -> Float[Tensor, "N 1 Gh d"]:
    """Zero, in place, the rows that are not to be kept."""
    x.view(x.shape[0], -1, keep.shape[1], x.shape[3]).masked_fill_(~keep[:, None], 0)
    return x


def far_sums(
    rows: Float[Tensor, "N Gh m"], entering: Float[Tensor, "N W m"], parts: Documents | None
) -> Float[Tensor, "N Gh W"]:
    """Return what the rows of a block see of the sums that enter it."""
    out = torch.bmm(rows, entering.mT)
    return out if parts is None else keep_rows_(out[:, None], parts.opening)[:, 0]


def advance_(
    sums: Float[Tensor, "N W m"], keys: Float[Tensor, "N h m"], values: Float[Tensor, "N h W"], piece: Piece
) -> None:
    """Add the keys of a block, in place, to sums that stand at the shift of its piece."""
    if piece.parts is None:
        sums.baddbmm_(values.mT, keys)
    else:
        sums.mul_(piece.parts.through).baddbmm_((values * piece.parts.closing).mT, keys).mul_(piece.lift)


def entering_sums(
    weights: Weights, values: Float[Tensor, "N b h W"], before: Float[Tensor, "N W m"], piece: Piece
) -> Float[Tensor, "N b W m"]:
    """Return the sums that enter each block of a piece, at its shift, given those that enter the piece."""
    entering = before.new_empty(len(before), piece.blocks, *before.shape[1:])
    torch.mul(before, piece.decay, out=entering[:, 0])
    for block in range(piece.blocks - 1):
        keys, value = weights.keys[:, block], values[:, block]
        torch.baddbmm(entering[:, block], value.mT, keys, out=entering[:, block + 1])
    return entering


@dataclass(frozen=True)
class Returned:
    """Gradients of sums on their way back through the blocks of a piece.

    Attributes:
        leaving: the gradients of the sums that leave each block, at the shift of the piece.
        grad_sums: the part's: of the sums that leave the piece at first, of those that enter it at last.
        piece: the piece.
    """

    leaving: Float[Tensor, "N b W m"]
    grad_sums: Float[Tensor, "N W m"]
    piece: Piece

    @classmethod
    def into(cls, piece: Piece, grad_sums: Float[Tensor, "N W m"]) -> "Returned":
        """Bring the gradient to the last block."""
        leaving = grad_sums.new_empty(len(grad_sums), piece.blocks, *grad_sums.shape[1:])
        if piece.parts is None:
            leaving[:, -1] = grad_sums
        else:
            torch.mul(grad_sums, piece.lift, out=leaving[:, -1])
        return cls(leaving, grad_sums, piece)

    def through(self, block: int, rows: Float[Tensor, "N Gh m"], grad: Float[Tensor, "N Gh W"]) -> None:
        """Add what the rows of one block, whose undivided sums have the gradient `grad`, hand back."""
        after, parts = self.leaving[:, block], self.piece.parts
        if parts is not None:
            after, grad = after * parts.through, keep_rows_(grad[:, None].clone(), parts.opening)[:, 0]
        before = self.leaving[:, block - 1] if block else self.grad_sums
        torch.baddbmm(after, grad.mT, rows, out=before)
        if not block:
            self.grad_sums.mul_(self.piece.decay)

    def closing(self, x: Float[Tensor, "N b h d"]) -> Float[Tensor, "N b h d"]:
        """Return what belongs to keys, of those keys that reach the sums that leave: elsewhere 0."""
        return x if self.piece.parts is None else x * self.piece.parts.closing[:, None]


def _after(part: Part, sums: Tensor, piece: Piece) -> Float[Tensor, "N W m"]:
    """Return the sums after a piece."""
    keys, values, sums = part.key_weights(piece.span, piece.shift), part.values_at(piece.span), sums * piece.decay
    advance_(sums, keys[:, 0], values[:, 0], piece)
    return sums


@dataclass(frozen=True)
class Kept:
    """Sums and their scales as they entered each chunk: what lets the backward pass begin at the end."""

    room: Float[Tensor, "N chunks W1 m"]  # the scale is a last row below the sums

    @property
    def sums(self) -> Float[Tensor, "N chunks W m"]:
        """The sums that entered."""
        return self.room[:, :, :-1]

    @property
    def scales(self) -> Float[Tensor, "N chunks m"]:
        """Their log scales."""
        return self.room[:, :, -1]

    def put(self, chunk: int, sums: Float[Tensor, "N W m"], scale: Float[Tensor, "N m"]) -> None:
        """Write what enters a chunk, if there is room."""
        if self.room.shape[1]:
            self.sums[:, chunk], self.scales[:, chunk] = sums, scale

    def of_heads(self, heads: slice) -> "Kept":
        """Return the same for some of the folded heads."""
        return Kept(self.room[heads])


def kept_room(
    sums: Float[Tensor, "B Hk m W"], values: Float[Tensor, "B Hk S Dv"], chunk_size: int, *, keep: bool
) -> Float[Tensor, "B Hk chunks W1 m"]:
    """Return room for what enters each chunk, or, unless `keep`, none."""
    size = chunk_length(sums.device, chunk_size)
    count = (values.shape[2] + size - 1) // size if keep else 0
    return sums.new_empty(*sums.shape[:2], count, sums.shape[3] + 1, sums.shape[2])


def kept_of(part: Part, room: Float[Tensor, "B Hk chunks W1 m"], heads: slice) -> Kept:
    """Return what the forward pass kept of a part, or, if it was not asked to, that again; it uses up the sums then."""
    if room.shape[2]:
        return Kept(room.flatten(0, 1)[heads])
    count = -(-part.keys.length // part.size)
    kept = Kept(part.sums.new_empty(len(part.sums), count, part.sums.shape[1] + 1, part.sums.shape[2]))
    scale = part.scale
    for number, pieces in enumerate(plan(part.keys, scale, part.tokens, part.size)):
        kept.put(number, part.sums, scale)
        for piece in pieces:
            part.sums.copy_(_after(part, part.sums, piece))
        scale = pieces[-1].scale
    return kept


def pieces_backwards(part: Part, kept: Kept) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the pieces from the last to the first, each with the sums that enter it."""
    for number, pieces in plan_backwards(part.keys, kept.scales, part.tokens, part.size):
        inside = [kept.sums[:, number]]
        for piece in pieces[:-1]:
            inside.append(_after(part, inside[-1], piece))
        yield from zip(reversed(pieces), reversed(inside), strict=True)


def row_gradients(
    grad_o: Float[Tensor, "*N Dv"], o: Float[Tensor, "*N Dv"], inverse: Tensor, grad_log_total: Tensor | None = None
) -> Float[Tensor, "*N W"]:
    """Return the gradient of the undivided sums of rows."""
    grad = grad_o.new_empty(*grad_o.shape[:-1], grad_o.shape[-1] + 1)
    torch.mul(grad_o, inverse, out=grad[..., :-1])
    torch.sum(grad[..., :-1] * o, -1, keepdim=True, out=grad[..., -1:]).neg_()
    if grad_log_total is not None:
        grad[..., -1:].addcmul_(grad_log_total, inverse)
    return grad


def weight_gradients(
    weights: Weights,
    values: Float[Tensor, "N b h W"],
    grad: Float[Tensor, "N b Gh W"],
    entering: Float[Tensor, "N b W m"],
    returned: Returned,
) -> tuple[Float[Tensor, "N Gn m"], Float[Tensor, "N n m"]]:
    """Return the gradients of log_q and log_k in one piece; `grad`, of the undivided sums of rows, is used up."""
    parts, groups = returned.piece.parts, weights.rows.shape[2] // weights.keys.shape[2]
    grad_near = look_back_(matmul(grad, values.mT), groups, parts)
    grad_rows, grad_keys = matmul(grad_near, weights.keys), matmul(grad_near.mT, weights.rows)
    if parts is not None:
        keep_rows_(grad, parts.opening)
    add_matmul_(grad_rows, grad, entering)
    add_matmul_(grad_keys, returned.closing(values), returned.leaving)
    return grad_rows.mul_(weights.rows).flatten(1, 2), grad_keys.mul_(weights.keys).flatten(1, 2)
