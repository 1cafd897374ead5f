"""What carries over between the blocks and pieces of a part: sums on the way there, their gradients on the way back.

Both are counted at the shift of a piece while they pass through it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mercer.ops.linear_chunks import Documents, Piece, chunk_length, plan, plan_backwards
from mercer.ops.linear_pieces import Part, Weights, add_matmul_, look_back_, matmul

SHORT = 64  # of shorter chunks, the sums that enter them would take more room than queries, keys and values


def keep_rows_(x: Float[Tensor, "N Gn d"], keep: Bool[Tensor, "N n 1"]) -> Float[Tensor, "N Gn d"]:
    """Zero, in place, the rows that are not to be kept."""
    x.view(x.shape[0], -1, keep.shape[1], x.shape[2]).masked_fill_(~keep[:, None], 0)
    return x


def far_sums(
    rows: Float[Tensor, "N Gh m"], entering: Float[Tensor, "N W m"], parts: Documents | None
) -> Float[Tensor, "N Gh W"]:
    """Return what the rows of a block see of the sums that enter it."""
    out = torch.bmm(rows, entering.mT)
    return out if parts is None else keep_rows_(out, parts.opening)


def advance_(
    sums: Float[Tensor, "N W m"], keys: Float[Tensor, "N h m"], values: Float[Tensor, "N h W"], piece: Piece
) -> None:
    """Add the keys of a block, in place, to sums that stand at the shift of its piece."""
    if piece.parts is None:
        sums.baddbmm_(values.mT, keys)
    else:
        sums.mul_(piece.parts.through).baddbmm_((values * piece.parts.closing).mT, keys).mul_(piece.lift)


def closing(x: Float[Tensor, "N h d"], parts: Documents | None) -> Float[Tensor, "N h d"]:
    """Return what belongs to keys, of those keys that reach the sums that leave: elsewhere 0."""
    return x if parts is None else x * parts.closing


def to_shift_(grad_sums: Float[Tensor, "N W m"], piece: Piece) -> None:
    """Bring the gradient of the sums that leave a piece, in place, to its shift."""
    if piece.parts is not None:
        grad_sums.mul_(piece.lift)


def hand_back_(
    grad_sums: Float[Tensor, "N W m"],
    rows: Float[Tensor, "N Gh m"],
    grad: Float[Tensor, "N Gh W"],
    parts: Documents | None,
) -> None:
    """Take the gradient of the sums, in place, back through a block; `grad` is that of its undivided sums of rows."""
    if parts is not None:
        grad_sums.mul_(parts.through)
        grad = keep_rows_(grad.clone(), parts.opening)
    grad_sums.baddbmm_(grad.mT, rows)


def _after(part: Part, sums: Tensor, piece: Piece) -> Float[Tensor, "N W m"]:
    """Return the sums after a piece."""
    keys, values, sums = part.key_weights(piece.span, piece.shift), part.values_at(piece.span), sums * piece.decay
    advance_(sums, keys[:, 0], values[:, 0], piece)
    return sums


@dataclass(frozen=True)
class Kept:
    """What the forward pass leaves to the backward pass.

    Attributes:
        room: sums as they entered each chunk, and below them their scale: with these it can begin at the end.
        near: weights inside blocks, those of a token's rows beside each other; of no tokens if they are not kept.
    """

    room: Float[Tensor, "N chunks W1 m"]
    near: Float[Tensor, "N tokens Gh"]

    @classmethod
    def of(cls, rooms: Sequence[Tensor]) -> "Kept":
        """Fold the heads of `rooms_of`."""
        return cls(*(room.flatten(0, 1) for room in rooms))

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

    def near_of(self, part: Part, piece: Piece) -> Float[Tensor, "N b Gh h"] | None:
        """Return where the weights inside the blocks of a piece are kept; None where they are not."""
        blocks, block = part.blocks(piece), part.block
        if not self.near.shape[1] or block is None or blocks * block != piece.stop - piece.start:
            return None
        return self.near[:, piece.span].unflatten(1, (blocks, -1)).flatten(2).unflatten(2, (-1, block))

    def put_near(self, part: Part, piece: Piece, near: Float[Tensor, "N b Gh h"]) -> None:
        """Write the weights inside the blocks of a piece, if there is room; 0 where they do not fit into it."""
        room = self.near_of(part, piece)
        if room is not None:
            room.copy_(near)
        elif self.near.shape[1]:
            self.near[:, piece.span].zero_()

    def of_heads(self, heads: slice) -> "Kept":
        """Return the same for some of the folded heads."""
        return Kept(self.room[heads], self.near[heads])


def rooms_of(
    sums: Float[Tensor, "B Hk m W"], rows: Float[Tensor, "B H T _"], chunk_size: int, block: int, *, keep: bool
) -> tuple[Float[Tensor, "B Hk chunks W1 m"], Float[Tensor, "B Hk tokens Gh"]]:
    """Return room for `Kept`; none unless `keep`, nor for chunks so short that it would be large.

    None for weights inside blocks on an accelerator, where a chunk is one block.
    """
    size, (_, heads, length, _) = chunk_length(sums.device, chunk_size), rows.shape
    keep = keep and size >= SHORT
    near = keep and sums.device.type == "cpu" and not size % block
    return (
        _room(sums.mT, length if keep else 0, size),
        sums.new_empty(*sums.shape[:2], length if near else 0, heads // max(sums.shape[1], 1) * block),
    )


def _room(sums: Float[Tensor, "*N W m"], length: Any, size: int) -> Float[Tensor, "*N chunks W1 m"]:
    """Return room for sums and scales as they enter chunks; `length` may be symbolic."""
    return sums.new_empty(*sums.shape[:-2], (length + size - 1) // size, sums.shape[-2] + 1, sums.shape[-1])


def kept_of(part: Part, rooms: Sequence[Tensor], heads: slice) -> Kept:
    """Return what the forward pass kept of a part, in `rooms_of`.

    If it kept nothing, as chunks were short or no gradient was in sight, the sums are worked out again, which carries
    those of `part` on in place.
    """
    kept = Kept.of(rooms).of_heads(heads)
    if kept.room.shape[1]:
        return kept
    kept, scale = replace(kept, room=_room(part.sums, part.keys.length, part.size)), part.scale
    for number, pieces in enumerate(plan(part.keys, scale, part.tokens, part.size)):
        kept.put(number, part.sums, scale)
        for piece in pieces:
            part.sums.copy_(_after(part, part.sums, piece))
        scale = pieces[-1].scale
    return kept


def chunks_backwards(part: Part, kept: Kept) -> Iterator[Iterator[tuple[Piece, Tensor]]]:
    """Yield the chunks from the last to the first, and of each its pieces likewise, with the sums that enter them."""
    for number, pieces in plan_backwards(part.keys, kept.scales, part.tokens, part.size):
        inside = [kept.sums[:, number]]
        for piece in pieces[:-1]:
            inside.append(_after(part, inside[-1], piece))
        yield zip(reversed(pieces), reversed(inside), strict=True)


def run(passes: Iterator[Any]) -> None:
    """Let passes go over all their chunks."""
    deque(passes, maxlen=0)


def row_gradients(
    grad_o: Float[Tensor, "*N Dv"],
    o: Float[Tensor, "*N Dv"],
    inverse: Float[Tensor, "*N 1"],
    grad_log_total: Float[Tensor, "*N 1"] | None = None,
    *,
    out: Float[Tensor, "*N W"] | None = None,
) -> Float[Tensor, "*N W"]:
    """Return the gradient of the undivided sums of rows."""
    grad = grad_o.new_empty(*grad_o.shape[:-1], grad_o.shape[-1] + 1) if out is None else out
    torch.mul(grad_o, inverse, out=grad[..., :-1])
    torch.sum(grad[..., :-1] * o, -1, keepdim=True, out=grad[..., -1:]).neg_()
    if grad_log_total is not None:
        grad[..., -1:].addcmul_(grad_log_total, inverse)
    return grad


def _far_row_gradients(
    weights: Weights, values: Tensor, grad: Tensor, before: Float[Tensor, "N W m"], piece: Piece
) -> Float[Tensor, "N b Gh m"]:
    """Return the gradients of the weights of rows that come from the sums that enter their blocks."""
    sums, grad_rows = before * piece.decay, weights.rows.new_empty(weights.rows.shape)
    for block in range(values.shape[1]):
        if block:
            sums.baddbmm_(values[:, block - 1].mT, weights.keys[:, block - 1])
        torch.bmm(grad[:, block], sums, out=grad_rows[:, block])
    if piece.parts is not None:
        keep_rows_(grad_rows.flatten(0, 1), piece.parts.opening)  # there is one block
    return grad_rows


def weight_gradients(
    weights: Weights,
    values: Float[Tensor, "N b h W"],
    grad: Float[Tensor, "N b Gh W"],
    grad_keys: Float[Tensor, "N b h m"],
    before: Float[Tensor, "N W m"],
    piece: Piece,
) -> tuple[Float[Tensor, "N Gn m"], Float[Tensor, "N n m"]]:
    """Return the gradients of log_q and log_k in one piece.

    Args:
        weights: those of the piece.
        values: with a column of ones.
        grad: gradient of the undivided sums of rows.
        grad_keys: what the weights of keys get from the sums that leave their blocks; used up.
        before: sums that enter the piece.
        piece: the piece.
    """
    groups = weights.rows.shape[2] // weights.keys.shape[2]
    grad_rows = _far_row_gradients(weights, values, grad, before, piece)
    grad_near = look_back_(matmul(grad, values.mT), groups, piece.parts)
    add_matmul_(grad_rows, grad_near, weights.keys).mul_(weights.rows)
    add_matmul_(grad_keys, grad_near.mT, weights.rows).mul_(weights.keys)
    return grad_rows.flatten(1, 2), grad_keys.flatten(1, 2)
