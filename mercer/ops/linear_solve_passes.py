"""The passes of kernel systems in feature space, forward and backward, as one operator compilers do not look into.

They are those of linear attention over the values u that the solve itself makes: `y = P u = rhs - ridge u` is their
smoothing, so its gradient is attention's with o = y and grad_o = -g, g the solution of the transposed system.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_chunks import Piece, plan
from mercer.ops.linear_logs import LogGradients, Logs
from mercer.ops.linear_pieces import (
    Part,
    Problem,
    advance_,
    far_sums,
    lift_,
    pieces_backwards,
    row_gradients,
    weight_gradients_,
    with_ones,
)


def _system_(near: Float[Tensor, "N n n"], inverse: Float[Tensor, "N n 1"], ridge: Float[Tensor, "N n"]) -> Tensor:
    """Turn, in place, weights into P + diag(ridge)."""
    near.mul_(inverse).diagonal(dim1=1, dim2=2).add_(ridge)
    return near


def _solve_piece_(part: Part, piece: Piece, right: Tensor, ridge: Tensor, u: Tensor, inverse: Tensor) -> None:
    """Write u and one over the weight of each row; carry the sums of `part` on in place."""
    key_weights, row_weights, near = part.piece_weights(piece)
    far = far_sums(row_weights, part.sums.mul_(piece.decay), piece)
    total = near.sum(-1, keepdim=True).add_(far[..., -1:])
    inverse.copy_(total.reciprocal().masked_fill_(total == 0, 0))
    right = torch.addcmul(right, far[..., :-1], inverse, value=-1)
    system = _system_(near, inverse, ridge)
    # from the right and transposed: the layout that reaches BLAS without a copy, 1.6 times as fast
    u.copy_(torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False).mT)
    advance_(part.sums, key_weights, with_ones(u), piece)


def _forward(part: Part, right: Tensor, ridge: Tensor, u: Tensor, inverse: Tensor) -> Tensor:
    """Write u and inverse; carry the sums on in place and return their scale after the last token."""
    scale = part.scale
    for chunk in plan(part.keys, scale, part.tokens, part.size):
        for piece in chunk:
            at, scale = piece.span, piece.scale
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


@dataclass(frozen=True)
class _Gradients:
    """Where the gradients of some heads go; `cols` None: those of columns are added to those of the rows."""

    rhs: Float[Tensor, "N T Dv"]
    ridge: Float[Tensor, "N T"]
    rows: LogGradients
    cols: LogGradients | None
    factor: Float[Tensor, "N T 1"] | None
    offset: Float[Tensor, "N T 1"] | None

    def of_heads(self, at: slice) -> "_Gradients":
        """Return the same for some of the folded heads."""
        cols = self.cols and self.cols.part(at, slice(None))
        factor, offset = (None if x is None else x[at] for x in (self.factor, self.offset))
        return _Gradients(self.rhs[at], self.ridge[at], self.rows.part(at, slice(None)), cols, factor, offset)


def _backward(part: Part, solved: _Solved, grad_sums: Tensor, outs: _Gradients) -> Tensor:
    """Write the gradients of right-hand sides, ridge, rows and columns; return that of the sums that entered."""
    for piece, before in pieces_backwards(part):
        at, piece = piece.span, part.with_logs(piece)
        weights = part.piece_weights(piece)
        closing, inverse = lift_(grad_sums, weights[0], piece), solved.inverse[:, at]
        reaching = torch.bmm(closing, grad_sums)[..., :-1].add_(solved.grad_u[:, at])
        system = _system_(weights[2], inverse, solved.ridge[:, at])
        g = torch.linalg.solve_triangular(system, reaching.mT, upper=False, left=False).mT
        outs.rhs[:, at] = g
        outs.ridge[:, at] = -(g * solved.u[:, at]).sum(-1)
        grad = row_gradients(-g[:, None], solved.smooth[:, None, at], inverse[:, None])
        grad_row, grad_col = weight_gradients_(part, piece, weights, part.values_at(at), before, grad, grad_sums)
        grad_col = _of_product(part.keys, piece, grad_col, outs)
        if outs.cols is not None and part.rows is not None:
            outs.rows.put(part.rows, at, grad_row)
            outs.cols.put(part.keys, at, grad_col)
        else:
            outs.rows.put(part.keys, at, grad_row.add_(grad_col))
    return grad_sums


def _of_product(keys: Logs, piece: Piece, grad: Tensor, outs: _Gradients) -> Float[Tensor, "N n m"]:
    """Write the gradients of factor and offset, if there are any; return that of what they are applied to, in place."""
    at, product = piece.span, piece.product
    if outs.offset is not None:
        torch.sum(grad, -1, keepdim=True, out=outs.offset[:, at])
    if keys.factor is None or outs.factor is None or product is None:
        return grad
    if keys.real is not None:
        product = product.masked_fill(~keys.real[:, at, None], 0)  # it may be NaN, and 0 * NaN is NaN
    torch.sum(product * grad, -1, keepdim=True, out=outs.factor[:, at])
    outs.factor[:, at] *= keys.unit
    return grad.mul_(keys.factor[:, at])


_ARGUMENTS = (
    "Tensor log_rows, Tensor? rows_weight, Tensor? log_cols, Tensor? cols_weight, Tensor? factor, Tensor? offset, "
    "Tensor rhs, Tensor ridge, Tensor sums, Tensor scale, Tensor? mask, Tensor? documents, Tensor last, int chunk_size"
)


def _problem(rows, rows_weight, cols, cols_weight, factor, offset, rhs, sums, scale, mask, documents, last, size):
    count = rhs.shape[0] * rhs.shape[1]
    rows_of = None if cols is None else Logs.of(rows, rows_weight, count)
    keys = (rows, rows_weight) if cols is None else (cols, cols_weight)
    keys = Logs.of(*keys, count, factor, offset, tied=cols is None)
    return Problem.of(rows_of, keys, rhs, sums, scale, mask, documents, last, True, size)


@torch.library.custom_op(
    "mercer::linear_kernel_solve", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def linear_kernel_solve_op(
    log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs, ridge, sums, scale, mask, documents, last,
    chunk_size,
):  # fmt: skip
    """Return u, one over the weight of each row, and the sums and their scale after the last token.

    With a weight, log features are log_rows rows_weight'. `log_cols` None: those of the rows, or with factor and
    offset, those of factor log_rows + offset.
    """
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    with full_precision(rhs.device):
        logs = (log_rows, rows_weight, log_cols, cols_weight, factor, offset)
        problem = _problem(*logs, rhs, new_sums, scale, mask, documents, last, chunk_size)
        right, ridges, us, inverses, scales = (x.flatten(0, 1) for x in (rhs, ridge, u, inverse, new_scale))
        for stretch in problem.stretches():
            at, part = stretch.heads, problem.part(stretch)
            scales[at] = _forward(part, right[at], ridges[at], us[at], inverses[at])
    return u, inverse, new_sums, new_scale


@torch.library.custom_op(
    "mercer::linear_kernel_solve_backward",
    mutates_args=(),
    schema=f"(Tensor grad_u, Tensor grad_sums, Tensor u, Tensor inverse, bool[] weigh, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(
    grad_u, grad_sums, u, inverse, weigh, log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs, ridge,
    sums, scale, mask, documents, last, chunk_size,
):  # fmt: skip
    """Return the gradients of the arguments up to sums that are given; zeros for weights that do not `weigh`."""
    right, ridges, entering = (x.new_empty(x.shape) for x in (rhs, ridge, sums))
    if mask is not None:
        grad_u = grad_u.masked_fill(~mask[:, None, :, None], 0)
    with full_precision(rhs.device):
        logs = (log_rows, rows_weight, log_cols, cols_weight, factor, offset)
        problem = _problem(*logs, u, sums, scale, mask, documents, last, chunk_size)
        smooth = torch.addcmul(rhs, ridge[..., None], u, value=-1)
        solved = _Solved(*(x.flatten(0, 1) for x in (ridge, u, inverse, grad_u, smooth)))
        count = len(solved.u)
        rows = LogGradients.like(log_rows, rows_weight, count, weigh=weigh[0])
        cols = None if log_cols is None else LogGradients.like(log_cols, cols_weight, count, weigh=weigh[1])
        scales = [None if x is None else x.new_empty(count, x.shape[2], 1) for x in (factor, offset)]
        outs = _Gradients(right.flatten(0, 1), ridges.flatten(0, 1), rows, cols, *scales)
        for stretch in problem.stretches():
            at = stretch.heads
            leaving = grad_sums.flatten(0, 1)[at].clone()
            of_part = (problem.part(stretch), solved.of_heads(at), leaving, outs.of_heads(at))
            entering.flatten(0, 1)[at] = _backward(*of_part)
    of_cols = [] if cols is None or log_cols is None else cols.results(log_cols, cols_weight)
    scales = [x.view_as(like) for x, like in zip(scales, (factor, offset), strict=True) if x is not None]
    return [*rows.results(log_rows, rows_weight), *of_cols, *scales, right, ridges, entering]


@linear_kernel_solve_op.register_fake
def _(log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs, ridge, sums, scale, *others):
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    return u, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape)


@_backward_op.register_fake
def _(grad_u, grad_sums, u, inverse, weigh, *arguments):
    return [x.new_empty(x.shape) for x in arguments[:9] if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(output[0], output[1], *tensors)


def _differentiate(ctx, grad_u, grad_inverse, grad_sums, grad_scale):
    u, inverse, *arguments = ctx.saved_tensors
    weigh = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    grads = iter(_backward_op(grad_u, grad_sums, u, inverse, weigh, *arguments, ctx.size))
    return *(None if x is None else next(grads) for x in arguments[:9]), *[None] * 5


linear_kernel_solve_op.register_autograd(_differentiate, setup_context=_save)
