"""Exact attention to the tokens near by and to the first ones, in blocks of rows, as one operator.

A block of n rows is worked against S + W + n columns: the sinks of the document its first row belongs to, the W tokens
before it, itself. A document that starts later has its sinks among the latter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_chunks import FLOOR
from mercer.ops.linear_logs import exp_

_WORK_BYTES = {"cpu": 1 << 20}  # scores worked together: a second-level cache; elsewhere enough to keep all units busy
_ELSEWHERE = 1 << 26


def block_length(device: torch.device) -> int:
    """Return how many rows make a block."""
    return 64 if device.type == "cpu" else 128


@dataclass(frozen=True)
class Group:
    """Blocks worked together: rows [first, first + count * size)."""

    first: int
    count: int
    size: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count * self.size)


@dataclass(frozen=True)
class Near:
    """The arguments of the operator; query heads are grouped by the key head they share."""

    q: Float[Tensor, "B Hk G T D"]
    k: Float[Tensor, "B Hk L D"]
    v: Float[Tensor, "B Hk L Dv"]
    k_sinks: Float[Tensor, "B Hk M D"]
    v_sinks: Float[Tensor, "B Hk M Dv"]
    start: Int[Tensor, "B T"]
    window: int
    sinks: int
    scale: float

    def groups(self) -> Iterator[Group]:
        """Yield all full blocks, some at a time, and then the rest."""
        size, length = block_length(self.q.device), self.q.shape[3]
        row_bytes = self.q[:, :, :, :1, 0].numel() * (self.sinks + self.window + size) * self.q.element_size()
        step = max(1, _WORK_BYTES.get(self.q.device.type, _ELSEWHERE) // max(1, size * row_bytes))
        full = length // size
        for block in range(0, full, step):
            yield Group(block * size, min(step, full - block), size)
        if full * size < length:
            yield Group(full * size, 1, length - full * size)

    def row_blocks(self, x: Float[Tensor, "B Hk G T d"], group: Group) -> Float[Tensor, "B Hk g n d"]:
        """Cut rows of blocks out, the query heads of a group below each other."""
        cut = x[:, :, :, group.rows].unflatten(3, (group.count, group.size))
        return cut.transpose(2, 3).flatten(3, 4)

    def col_blocks(self, x: Tensor, sinks: Tensor, group: Group) -> Float[Tensor, "B Hk g c d"]:
        """Cut the columns of blocks out: sinks, window, block."""
        whole = x[:, :, group.first : group.rows.stop + self.window]
        near = whole.unfold(2, self.window + group.size, group.size).mT
        if not self.sinks:
            return near
        return torch.cat([sinks[:, :, self.sink_rows(group)].unflatten(2, (group.count, self.sinks)), near], 3)

    def sink_rows(self, group: Group) -> slice:
        block = group.first // block_length(self.q.device)
        return slice(block * self.sinks, (block + group.count) * self.sinks)

    def allowed(self, group: Group) -> Bool[Tensor, "B g n c"]:
        """Return which columns rows see: near ones of their document, and its sinks, each once."""
        rows = torch.arange(group.rows.start, group.rows.stop, device=self.start.device)
        rows, start = (x.unflatten(-1, (group.count, group.size)) for x in (rows, self.start[:, group.rows]))
        opens, first = rows[:, 0, None], start[:, :, 0, None]
        cols = opens + torch.arange(-self.window, group.size, device=rows.device)
        back = rows[:, :, None] - cols[:, None]
        from_start = cols[:, None] - start[..., None]
        near = (back >= 0) & (from_start >= 0) & ((back < self.window) | (from_start < self.sinks))
        sinks = first + torch.arange(self.sinks, device=rows.device) < opens - self.window
        return torch.cat([(start == first)[..., None] & sinks[:, :, None], near], -1)

    def weights(self, rows: Tensor, cols: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(scale q.k - peak), its sum and the peak of every row; all zeros and FLOOR where a row is blind."""
        weights = torch.matmul(rows * self.scale, cols.mT)
        square = weights.unflatten(3, (-1, group.size))
        square.masked_fill_(~self.allowed(group)[:, None, :, None], float("-inf"))
        peak = weights.amax(-1, keepdim=True).clamp_min_(FLOOR)
        exp_(weights.sub_(peak))
        return weights, weights.sum(-1, keepdim=True), peak


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor k_sinks, Tensor v_sinks, Tensor start, "
    "int window, int sinks, float scale) -> "
)


def _near(q, k, *others) -> Near:
    return Near(q.unflatten(1, (k.shape[1], -1)), k, *others)


@torch.library.custom_op("mercer::near_attention", mutates_args=(), schema=f"({_ARGUMENTS}(Tensor, Tensor)")
def near_attention_op(q, k, v, k_sinks, v_sinks, start, window, sinks, scale):
    """Return softmax attention to near keys and sinks, and the log of the weight of each row, FLOOR where it is blind.

    All in one dtype. k, v hold `window` tokens before those of q; `start` is that of `Layout`, the length where a row
    is padding; k_sinks, v_sinks are the sinks of the document of every block's first row.
    """
    o, log_total = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], 1)
    with full_precision(q.device):
        near = _near(q, k, v, k_sinks, v_sinks, start, window, sinks, scale)
        o_, log_ = (x.unflatten(1, (k.shape[1], -1)) for x in (o, log_total))
        for group in near.groups():
            rows, cols = near.row_blocks(near.q, group), near.col_blocks(k, k_sinks, group)
            weights, total, peak = near.weights(rows, cols, group)
            blind = total == 0
            out = torch.matmul(weights, near.col_blocks(v, v_sinks, group)).div_(total.masked_fill(blind, 1))
            _put(o_, out, group)
            _put(log_, peak.add_(total.log_().masked_fill_(blind, 0)), group)
    return o, log_total


def _put(x: Float[Tensor, "B Hk G T d"], blocks: Float[Tensor, "B Hk g _ d"], group: Group) -> None:
    """Undo `Near.row_blocks`."""
    x[:, :, :, group.rows].unflatten(3, (group.count, group.size)).copy_(
        blocks.unflatten(3, (-1, group.size)).transpose(2, 3)
    )


@torch.library.custom_op(
    "mercer::near_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_o, Tensor grad_log, Tensor o, {_ARGUMENTS}(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(grad_o, grad_log, o, q, k, v, k_sinks, v_sinks, start, window, sinks, scale):
    """Return the gradients of q, k, v, k_sinks and v_sinks; weights are made again."""
    grad_q, *grads = (x.new_zeros(x.shape) for x in (q, k, v, k_sinks, v_sinks))
    with full_precision(q.device):
        near = _near(q, k, v, k_sinks, v_sinks, start, window, sinks, scale)
        grad_q_, grad_o, grad_log, o = (x.unflatten(1, (k.shape[1], -1)) for x in (grad_q, grad_o, grad_log, o))
        for group in near.groups():
            rows, cols = near.row_blocks(near.q, group), near.col_blocks(k, k_sinks, group)
            weights, total, _ = near.weights(rows, cols, group)
            weights.div_(total.masked_fill_(total == 0, 1))
            grad, out = (near.row_blocks(x, group) for x in (grad_o, o))
            along = near.row_blocks(grad_log, group) - (grad * out).sum(-1, keepdim=True)
            grad_values = torch.matmul(weights.mT, grad)
            scores = torch.matmul(grad, near.col_blocks(v, v_sinks, group).mT).add_(along).mul_(weights).mul_(scale)
            _put(grad_q_, torch.matmul(scores, cols), group)
            _add(near, torch.matmul(scores.mT, rows), grads[0], grads[2], group)
            _add(near, grad_values, grads[1], grads[3], group)
    return grad_q, *grads


def _add(near: Near, blocks: Float[Tensor, "B Hk g c d"], x: Tensor, sinks: Tensor, group: Group) -> None:
    """Add the gradients of columns, which overlap, to those of tokens."""
    if near.sinks:
        sinks[:, :, near.sink_rows(group)] = blocks[:, :, :, : near.sinks].flatten(2, 3)
    for block in range(group.count):
        first = group.first + block * group.size
        x[:, :, first : first + near.window + group.size] += blocks[:, :, block, near.sinks :]


@near_attention_op.register_fake
def _(q, k, v, k_sinks, v_sinks, start, window, sinks, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], 1)


@_backward_op.register_fake
def _(grad_o, grad_log, o, q, k, v, k_sinks, v_sinks, start, window, sinks, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, k_sinks, v_sinks))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.sinks, ctx.scale = inputs
    ctx.save_for_backward(output[0], *tensors)


def _differentiate(ctx, grad_o, grad_log):
    grads = _backward_op(grad_o, grad_log, *ctx.saved_tensors, ctx.window, ctx.sinks, ctx.scale)
    return *grads, None, None, None, None


near_attention_op.register_autograd(_differentiate, setup_context=_save)
