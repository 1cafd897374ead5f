"""What carries over between the blocks and pieces of a part: sums on the way there, their gradients on the way back.

Both are counted at the shift of a piece while they pass through it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mercer.ops.linear_chunks import Documents, Piece, chunk_length, plan, plan_backwards
from mercer.ops.linear_pieces import Part, Weights, add_matmul_, look_back_, matmul


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
    entering = before.new_empty(len(before), values.shape[1], *before.shape[1:])
    torch.mul(before, piece.decay, out=entering[:, 0])
    for block in range(values.shape[1] - 1):
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
    def into(cls, piece: Piece, blocks: int, grad_sums: Float[Tensor, "N W m"]) -> "Returned":
        """Bring the gradient to the last block."""
        leaving = grad_sums.new_empty(len(grad_sums), blocks, *grad_sums.shape[1:])
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
