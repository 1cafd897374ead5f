"""The passes of kernel systems in feature space, forward and backward, as one operator compilers do not look into.

They are those of linear attention over the values u that the solve itself makes: `y = P u = rhs - ridge u` is their
smoothing, so its gradient is attention's with o = y and grad_o = -g, g the solution of the transposed system.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_chunks import Keys, Piece, plan
from mercer.ops.linear_pieces import (
    Part,
    Problem,
    advance_,
    far_sums,
    lift_,
    pieces_backwards,
    row_gradients,
    weight_gradients_,
)


def _system_(near: Float[Tensor, "N n n"], inverse: Float[Tensor, "N n 1"], ridge: Float[Tensor, "N n"]) -> Tensor:
    """Turn, in place, weights into P + diag(ridge)."""
    near.mul_(inverse).diagonal(dim1=1, dim2=2).add_(ridge)
    return near


def _solve_piece_(part: Part, piece: Piece, right: Tensor, ridge: Tensor, u: Tensor, inverse: Tensor) -> None:
    """Write u and one over the weight of each row; carry the sums of `part` on in place."""
    at = slice(piece.start, piece.stop)
    key_weights, row_weights, near = part.piece_weights(piece)
    far = far_sums(row_weights, part.sums.mul_(piece.decay), piece)
    total = near.sum(-1, keepdim=True).add_(far[..., -1:])
    inverse.copy_(total.reciprocal().masked_fill_(total == 0, 0))
    right = torch.addcmul(right, far[..., :-1], inverse, value=-1)
    system = _system_(near, inverse, ridge)
    # from the right and transposed: the layout that reaches BLAS without a copy, 1.6 times as fast
    u.copy_(torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False).mT)
    part.values[:, at, :-1] = u
    advance_(part.sums, key_weights, part.values[:, at], piece)


def _forward(part: Part, right: Tensor, ridge: Tensor, u: Tensor, inverse: Tensor) -> Tensor:
    """Write u and inverse; carry the sums on in place and return their scale after the last token."""
    scale = part.scale
    for chunk in plan(part.keys, scale, part.tokens, part.size):
        for piece in chunk:
            at, scale = slice(piece.start, piece.stop), piece.scale
            _solve_piece_(part, piece, right[:, at], ridge[:, at], u[:, at], inverse[:, at])
    return scale


@dataclass(frozen=True)
class _Solved:
    """What the backward pass is given for each token: the forward pass's results and the gradient that reaches u."""

    ridge: Float[Tensor, "N T"]
    u: Float[Tensor, "N T Dv"]
    inverse: Float[Tensor, "N T 1"]
    grad_u: Float[Tensor, "N T Dv"]
    smooth: Float[Tensor, "N T Dv"]  # y = rhs - ridge u

    def of_heads(self, at: slice) -> "_Solved":
        """Return the same for some of the folded heads."""
        return _Solved(self.ridge[at], self.u[at], self.inverse[at], self.grad_u[at], self.smooth[at])


def _backward(part: Part, solved: _Solved, grad_sums: Tensor, outs) -> Tensor:
    """Write the gradients of rhs, ridge, rows and columns into `outs`; return that of the sums that entered.

    Columns that are the rows rescaled add theirs to the rows', and write those of factor and offset.
    """
    grad_right, grad_ridge, grad_rows, *grad_cols = outs
    rescaled = part.keys.factor is not None
    for piece, before in pieces_backwards(part):
        at, weights = slice(piece.start, piece.stop), part.piece_weights(piece)
        closing, inverse = lift_(grad_sums, weights[0], piece), solved.inverse[:, at]
        reaching = torch.bmm(closing, grad_sums)[..., :-1].add_(solved.grad_u[:, at])
        system = _system_(weights[2], inverse, solved.ridge[:, at])
        g = torch.linalg.solve_triangular(system, reaching.mT, upper=False, left=False).mT
        grad_right[:, at] = g
        grad_ridge[:, at] = -(g * solved.u[:, at]).sum(-1)
        grad = row_gradients(-g[:, None], solved.smooth[:, None, at], inverse[:, None])
        into = [x[:, at] for x in (grad_rows, *grad_cols)]
        column = torch.empty_like(weights[0]) if rescaled else into[1] if grad_cols else None
        weight_gradients_(part, piece, weights, before, grad, grad_sums, (into[0][:, None], column))
        if rescaled and column is not None:
            _rescaled_gradients_(part.keys, at, column, *into)
    return grad_sums


def _rescaled_gradients_(
    keys: Keys, at: slice, grad_key: Tensor, grad_rows: Tensor, grad_factor: Tensor, grad_offset: Tensor
) -> None:
    """Pass the gradient of columns on to rows, to which it is added, factor and offset; `grad_key` is used up."""
    assert keys.factor is not None
    grad_rows.addcmul_(keys.factor[:, at], grad_key)
    torch.sum(grad_key, -1, out=grad_offset)
    logs = keys.logs[:, at]
    if keys.real is not None:
        logs = logs.masked_fill(~keys.real[:, at, None], 0)  # they may be NaN, and 0 * NaN is NaN
    torch.sum(grad_key.mul_(logs), -1, out=grad_factor)


_ARGUMENTS = (
    "Tensor log_rows, Tensor? log_cols, Tensor? factor, Tensor? offset, Tensor rhs, "
    "Tensor ridge, Tensor sums, Tensor scale, Tensor? mask, Tensor? documents, Tensor last, int chunk_size"
)


@torch.library.custom_op(
    "mercer::linear_kernel_solve", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def linear_kernel_solve_op(
    log_rows, log_cols, factor, offset, rhs, ridge, sums, scale, mask, documents, last, chunk_size
):
    """Return u, one over the weight of each row, and the sums and their scale after the last token.

    `log_cols` None: those of the rows, or with factor and offset, factor log_rows + offset.
    """
    log_cols = log_rows if log_cols is None else log_cols
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    with full_precision(rhs.device):
        marks = (mask, documents, last, True, chunk_size, factor, offset)
        problem = Problem.of(log_rows, log_cols, rhs, new_sums, scale, *marks)
        right, ridges, us, inverses, scales = (x.flatten(0, 1) for x in (rhs, ridge, u, inverse, new_scale))
        for stretch in problem.stretches():
            at, part = stretch.heads, problem.part(stretch)
            scales[at] = _forward(part, right[at], ridges[at], us[at], inverses[at])
    return u, inverse, new_sums, new_scale


@torch.library.custom_op(
    "mercer::linear_kernel_solve_backward",
    mutates_args=(),
    schema=f"(Tensor grad_u, Tensor grad_sums, Tensor u, Tensor inverse, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(
    grad_u, grad_sums, u, inverse, log_rows, log_cols, factor, offset, rhs, ridge, sums, scale, mask, documents, last,
    chunk_size,
):  # fmt: skip
    """Return the gradients of rhs, ridge, the entering sums, log_rows and, where given, log_cols, factor, offset."""
    cols = [x for x in (log_cols, factor, offset) if x is not None]
    grads = [x.new_empty(x.shape) for x in (rhs, ridge, sums, log_rows, *cols)]
    if mask is not None:
        grad_u = grad_u.masked_fill(~mask[:, None, :, None], 0)
    with full_precision(rhs.device):
        keys = log_rows if log_cols is None else log_cols
        marks = (mask, documents, last, True, chunk_size, factor, offset)
        problem = Problem.of(log_rows, keys, u, sums, scale, *marks)
        smooth = torch.addcmul(rhs, ridge[..., None], u, value=-1)
        solved = _Solved(*(x.flatten(0, 1) for x in (ridge, u, inverse, grad_u, smooth)))
        leaving, right, ridges, entering, *logs = (x.flatten(0, 1) for x in (grad_sums, *grads))
        for stretch in problem.stretches():
            at = stretch.heads
            outs = (right[at], ridges[at], *(x[at] for x in logs))
            entering[at] = _backward(problem.part(stretch), solved.of_heads(at), leaving[at].clone(), outs)
    return grads


@linear_kernel_solve_op.register_fake
def _(log_rows, log_cols, factor, offset, rhs, ridge, sums, scale, *others):
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    return u, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape)


@_backward_op.register_fake
def _(grad_u, grad_sums, u, inverse, log_rows, log_cols, factor, offset, rhs, ridge, sums, *others):
    return [x.new_empty(x.shape) for x in (rhs, ridge, sums, log_rows, log_cols, factor, offset) if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(output[0], output[1], *tensors)


def _differentiate(ctx, grad_u, grad_inverse, grad_sums, grad_scale):
    right, ridge, sums, rows, *cols = _backward_op(grad_u, grad_sums, *ctx.saved_tensors, ctx.size)
    cols = {0: [None] * 3, 1: [*cols, None, None], 2: [None, *cols]}[len(cols)]
    return rows, *cols, right, ridge, sums, None, None, None, None, None


linear_kernel_solve_op.register_autograd(_differentiate, setup_context=_save)
