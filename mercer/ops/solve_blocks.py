"""The block solver under `kernel_solve`: forward substitution and its adjoint, a block of rows of P at a time.

Heads of all batch rows are flattened to N = B H; a block of rows is worked on for as many heads at a time as stay in
the cache. Everything here runs without autograd, inside two operators that torch.compile does not look into.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import full_precision, visible

_SMALL = 64  # below this a triangular system goes to LAPACK whole
_CACHE_ELEMENTS = 1 << 19  # block of weights worked on at a time on a CPU: 2 MiB of float32
_DEVICE_ELEMENTS = 1 << 27  # and on an accelerator


class _Blocks:
    """The blocks of P: which rows, which heads, and their softmax weights in a buffer that is used again."""

    def __init__(
        self,
        rows: Float[Tensor, "B H T D"],
        cols: Float[Tensor, "B H S D"],
        mask: Bool[Tensor, "B S"] | None,
        segments: Int[Tensor, "B S"] | None,
        strict: bool,
        block_size: int,
    ):
        self.rows, self.cols = rows.flatten(0, 1), cols.flatten(0, 1)
        self.heads, self.mask, self.segments, self.strict = rows.shape[1], mask, segments, strict
        self.block, self.seen = max(1, min(block_size, rows.shape[2])), cols.shape[2] - rows.shape[2]
        self.limit = _CACHE_ELEMENTS if rows.device.type == "cpu" else _DEVICE_ELEMENTS
        corner = torch.full((self.block, self.block), -math.inf, dtype=rows.dtype, device=rows.device)
        self.future = corner.triu(0 if strict else 1)
        self.weights_buffer = rows.new_empty(
            max((end * (stop - start) * (g.stop - g.start) for start, stop, end, g in self), default=0)
        )

    def __iter__(self) -> Iterator[tuple[int, int, int, slice]]:
        """Yield (first row, row after the last, columns they may see, heads) from the first block to the last."""
        for start in range(0, self.rows.shape[1], self.block):
            stop = min(start + self.block, self.rows.shape[1])
            end = self.seen + stop
            group = max(1, min(self.rows.shape[0], self.limit // (self.block * end)))
            for first in range(0, self.rows.shape[0], group):
                yield start, stop, end, slice(first, min(first + group, self.rows.shape[0]))

    def weights(self, start: int, stop: int, end: int, heads: slice) -> Float[Tensor, "G c e"]:
        """Return P for these rows, heads and columns; valid until the next call."""
        count, size = heads.stop - heads.start, stop - start
        p = self.weights_buffer[: count * size * end].view(count, size, end)
        torch.bmm(self.rows[heads, start:stop], self.cols[heads, :end].mT, out=p)
        p[..., end - size :].add_(self.future[:size, :size])
        if self.mask is None and self.segments is None:
            torch.softmax(p, -1, out=p)
            if self.strict and end == size:
                p[:, 0] = 0.0  # the very first row sees nothing
            return p
        mask, segments = (None if t is None else t[:, :end] for t in (self.mask, self.segments))
        hidden = ~visible(size, end, p.device, mask=mask, segments=segments)
        batch_row = torch.arange(heads.start, heads.stop, device=p.device) // self.heads
        p.masked_fill_(hidden[batch_row], -math.inf)
        blind = p.amax(-1, keepdim=True) == -math.inf
        torch.softmax(p.masked_fill_(blind, 0.0), -1, out=p)
        return p.masked_fill_(blind, 0.0)


def _solve_lower(system: Float[Tensor, "G c c"], right: Float[Tensor, "G c Dv"]) -> Float[Tensor, "G c Dv"]:
    """Solve system x = right for a lower triangular system, halving it down to what LAPACK does well."""
    size = system.shape[-1]
    if size <= _SMALL:  # handed over as x' system' = right': the layout LAPACK takes without a copy
        return torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False).mT
    half = size // 2
    first = _solve_lower(system[:, :half, :half], right[:, :half])
    rest = torch.baddbmm(right[:, half:], system[:, half:, :half], first, alpha=-1)
    return torch.cat([first, _solve_lower(system[:, half:, half:], rest)], 1)


def _solve_upper(system: Float[Tensor, "G c c"], right: Float[Tensor, "G Dv c"]) -> Float[Tensor, "G Dv c"]:
    """Solve x system = right for a lower triangular system: the transposed problem, from the last column back."""
    size = system.shape[-1]
    if size <= _SMALL:
        return torch.linalg.solve_triangular(system, right, upper=False, left=False)
    half = size // 2
    last = _solve_upper(system[:, half:, half:], right[..., half:])
    rest = torch.baddbmm(right[..., :half], last, system[:, half:, :half], alpha=-1)
    return torch.cat([_solve_upper(system[:, :half, :half], rest), last], 2)


@torch.library.custom_op(
    "mercer::kernel_solve",
    mutates_args=(),
    schema="(Tensor rows, Tensor cols, Tensor rhs, Tensor ridge, Tensor? gate, Tensor past, Tensor? mask, "
    "Tensor? segments, bool strict, int block_size) -> Tensor",
)
def solve_blocks(
    rows: Float[Tensor, "B H T D"],
    cols: Float[Tensor, "B H S D"],
    rhs: Float[Tensor, "B H T Dv"],
    ridge: Float[Tensor, "B H T"],
    gate: Float[Tensor, "B H T"] | None,
    past: Float[Tensor, "B H P Dv"],
    mask: Bool[Tensor, "B S"] | None,
    segments: Int[Tensor, "B S"] | None,
    strict: bool,
    block_size: int,
) -> Float[Tensor, "B H T Dv"]:
    with full_precision(rows.device):
        blocks = _Blocks(rows, cols, mask, segments, strict, block_size)
        seen = blocks.seen
        earlier, u = past.flatten(0, 1), torch.empty_like(rhs, memory_format=torch.contiguous_format).flatten(0, 1)
        right, diagonal = rhs.flatten(0, 1), ridge.flatten(0, 1)
        factor = None if gate is None else gate.flatten(0, 1)[..., None]
        for start, stop, end, g in blocks:
            p = blocks.weights(start, stop, end, g)
            if factor is not None:
                p.mul_(factor[g, start:stop])
            rest = right[g, start:stop]
            if seen:
                rest = torch.baddbmm(rest, p[..., :seen], earlier[g], alpha=-1)
            if start:
                rest = torch.baddbmm(rest, p[..., seen : seen + start], u[g, :start], alpha=-1)
            system = p[..., seen + start :]
            system.diagonal(dim1=1, dim2=2).add_(diagonal[g, start:stop])
            u[g, start:stop] = _solve_lower(system, rest)
        return u.unflatten(0, rows.shape[:2])


@solve_blocks.register_fake
def _(rows, cols, rhs, ridge, gate, past, mask, segments, strict, block_size):
    return torch.empty_like(rhs, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "mercer::kernel_solve_backward",
    mutates_args=(),
    schema="(Tensor du, Tensor u, Tensor rows, Tensor cols, Tensor ridge, Tensor? gate, Tensor past, Tensor? mask, "
    "Tensor? segments, bool strict, int block_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def solve_blocks_backward(
    du: Float[Tensor, "B H T Dv"],
    u: Float[Tensor, "B H T Dv"],
    rows: Float[Tensor, "B H T D"],
    cols: Float[Tensor, "B H S D"],
    ridge: Float[Tensor, "B H T"],
    gate: Float[Tensor, "B H T"] | None,
    past: Float[Tensor, "B H P Dv"],
    mask: Bool[Tensor, "B S"] | None,
    segments: Int[Tensor, "B S"] | None,
    strict: bool,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, cols, rhs, ridge, gate, past, from L' g = du solved block by block from the end.

    With h = gate g: d rhs = g, d ridge_i = -g_i . u_i, d gate_i = -g_i . (P u)_i, dP = -h u', and P' h runs back to
    earlier positions. Sums over rows are kept transposed, [N, Dv, S] and [N, D, S]: row-major products then.
    """
    with full_precision(rows.device):
        blocks = _Blocks(rows, cols, mask, segments, strict, block_size)
        seen = blocks.seen
        full = (torch.cat([past, u], 2) if seen else u).flatten(0, 1)
        back = torch.cat([torch.zeros_like(past).mT, du.mT], 3).flatten(0, 1)  # becomes g'
        d_rows, d_cols = (
            torch.empty_like(blocks.rows),
            torch.zeros_like(blocks.cols.mT, memory_format=torch.contiguous_format),
        )
        diagonal = ridge.flatten(0, 1)
        factor = None if gate is None else gate.flatten(0, 1)
        d_gate = torch.zeros_like(diagonal)
        scores = torch.empty_like(blocks.weights_buffer)
        for start, stop, end, g in reversed(list(blocks)):
            p = blocks.weights(start, stop, end, g)
            before, here = seen + start, slice(start, stop)
            system = p[..., before:].clone()
            if factor is not None:
                system.mul_(factor[g, here, None])
            system.diagonal(dim1=1, dim2=2).add_(diagonal[g, here])
            h = _solve_upper(system, back[g, :, before:end])
            back[g, :, before:end] = h
            if factor is not None:
                smoothed = torch.bmm(p, full[g, :end])
                d_gate[g, here] = -(h.mT * smoothed).sum(-1)
                h = h * factor[g, None, here]
            if before:
                back[g, :, :before].baddbmm_(h, p[..., :before], alpha=-1)
            # minus dP, then minus the gradient of the scores; the sign is put back at the end
            d_p = torch.bmm(h.mT, full[g, :end].mT, out=scores[: p.numel()].view_as(p))
            torch.ops.aten._softmax_backward_data.out(d_p, p, -1, p.dtype, grad_input=d_p)
            d_rows[g, here] = torch.bmm(d_p, blocks.cols[g, :end])
            d_cols[g, :, :end].baddbmm_(blocks.rows[g, here].mT, d_p)
        shape = rows.shape[:2]
        d_past, d_rhs = (t.mT.clone(memory_format=torch.contiguous_format) for t in back.split([seen, u.shape[2]], 2))
        del back, full, scores, blocks  # their memory serves the copies to come
        d_ridge = -(d_rhs * u.flatten(0, 1)).sum(-1)
        d_cols = d_cols.neg_().mT.clone(memory_format=torch.contiguous_format)
        d_rows, d_cols, d_rhs, d_ridge, d_gate, d_past = (
            t.unflatten(0, shape) for t in (d_rows.neg_(), d_cols, d_rhs, d_ridge, d_gate, d_past)
        )
        return d_rows, d_cols, d_rhs, d_ridge, d_gate, d_past


@solve_blocks_backward.register_fake
def _(du, u, rows, cols, ridge, gate, past, mask, segments, strict, block_size):
    like = (rows, cols, u, ridge, ridge, past)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in like)


def _save(ctx, inputs, output) -> None:
    rows, cols, _, ridge, gate, past, mask, segments, ctx.strict, ctx.block_size = inputs
    ctx.save_for_backward(output, rows, cols, ridge, gate, past, mask, segments)


def _backward(ctx, du):
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
    rows, cols, rhs, ridge, d_gate, past = solve_blocks_backward(du, *saved, ctx.strict, ctx.block_size)
    return rows, cols, rhs, ridge, None if saved[4] is None else d_gate, past, None, None, None, None


solve_blocks.register_autograd(_backward, setup_context=_save)
