"""The passes of kernel systems in feature space, forward and backward, as one operator compilers do not look into.

They are those of linear attention over the values u that the solve itself makes: `y = P u = rhs - ridge u` is their
smoothing, so its gradient is attention's with o = y and grad_o = -g, g the solution of the transposed system.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_carry import (
    Kept,
    advance_,
    chunks_backwards,
    closing,
    far_sums,
    hand_back_,
    keep_rows_,
    kept_of,
    rooms_of,
    row_gradients,
    run,
    to_shift_,
    weight_gradients,
)
from mercer.ops.linear_chunks import Documents, Piece, plan
from mercer.ops.linear_logs import LogGradients, Logs, SharedGradients
from mercer.ops.linear_pieces import Part, Problem, Weights, matmul

BLOCK = 32  # inside a block the system is solved token by token, which costs more than the products between blocks


def _systems(
    near: Float[Tensor, "N b h h"], inverse: Float[Tensor, "N b h 1"], ridge: Float[Tensor, "N b h"]
) -> Float[Tensor, "N b h h"]:
    """Return P + diag(ridge) of blocks from the weights inside them."""
    systems = near * inverse
    systems.diagonal(dim1=2, dim2=3).add_(ridge)
    return systems


def _totals(weights: Weights, z: Float[Tensor, "N m"], parts: Documents | None) -> Float[Tensor, "N b h 1"]:
    """Return the weight of all keys that each row sees, given the sum z that enters the piece."""
    before = torch.cat([z[:, None], weights.keys[:, :-1].sum(2)], 1).cumsum(1)
    far = matmul(before[:, :, None], weights.rows.mT).mT  # this way round BLAS takes two thirds of the time
    far = far if parts is None else keep_rows_(far[:, 0], parts.opening)[:, None]
    return far.add_(weights.near.sum(-1, keepdim=True))


def _blocks(*of_piece: Float[Tensor, "N b ..."]) -> Iterator[tuple[Tensor, ...]]:
    """Take the blocks of a piece in their order."""
    return zip(*(x.unbind(1) for x in of_piece), strict=True)


def _solve_piece_(
    part: Part, kept: Kept, piece: Piece, right: Tensor, ridge: Tensor, u: Tensor, inverse: Tensor
) -> None:
    """Write u and one over the weight of each row, [N, b, h, _]; carry the sums of `part` on in place."""
    weights, sums = part.weights(piece), part.sums.mul_(piece.decay)
    kept.put_near(part, piece, weights.near)
    total = _totals(weights, sums[:, -1], piece.parts)
    over = total.reciprocal().masked_fill_(total == 0, 0)
    inverse.copy_(over)
    systems = _systems(weights.near, over, ridge)
    values = total.new_ones(*u.shape[:3], sums.shape[1])
    for block in _blocks(weights.rows, weights.keys, systems, over, right, values):
        rows, keys, system, inverse_, right_, value = block
        rest = torch.addcmul(right_, far_sums(rows, sums[:, :-1], piece.parts), inverse_, value=-1)
        # from the right and transposed: the layout that reaches BLAS without a copy, 1.6 times as fast
        value[..., :-1] = torch.linalg.solve_triangular(system.mT, rest.mT, upper=True, left=False).mT
        advance_(sums, keys, value, piece)
    u.copy_(values[..., :-1])


def solve_forward(
    part: Part, kept: Kept, after: Float[Tensor, "N m"], *of_tokens: Float[Tensor, "N T ..."]
) -> Iterator[None]:
    """Write u and inverse, after right-hand sides and ridge, stopping after every chunk.

    Carries the sums on in place; their scale after the last token goes to `after`.
    """
    scale = part.scale
    for number, chunk in enumerate(plan(part.keys, scale, part.tokens, part.size)):
        kept.put(number, part.sums, scale)
        for piece in chunk:
            scale = piece.scale
            of_piece = (x[:, piece.span].unflatten(1, (part.blocks(piece), -1)) for x in of_tokens)
            _solve_piece_(part, kept, piece, *of_piece)
        yield
    after.copy_(scale)


@dataclass(frozen=True)
class Solved:
    """What the backward pass is given for each token: the forward pass's results and the gradient that reaches u."""

    ridge: Float[Tensor, "N ..."]
    u: Float[Tensor, "N ... Dv"]
    inverse: Float[Tensor, "N ... 1"]
    grad_u: Float[Tensor, "N ... Dv"]
    right: Float[Tensor, "N ... Dv"]

    def of_heads(self, at: slice) -> "Solved":
        """Return the same for some of the folded heads."""
        return Solved(self.ridge[at], self.u[at], self.inverse[at], self.grad_u[at], self.right[at])

    def of_piece(self, at: slice, blocks: int) -> "Solved":
        """Return the same for the blocks of a piece."""
        of_tokens = (self.ridge, self.u, self.inverse, self.grad_u, self.right)
        return Solved(*(x[:, at].unflatten(1, (blocks, -1)) for x in of_tokens))

    @property
    def smooth(self) -> Float[Tensor, "N ... Dv"]:
        """Return y = P u = rhs - ridge u."""
        return torch.addcmul(self.right, self.ridge[..., None], self.u, value=-1)


@dataclass(frozen=True)
class SolveGradients:
    """Where the gradients of some heads go; `cols` None: those of columns are added to those of the rows."""

    rhs: Float[Tensor, "N T Dv"]
    ridge: Float[Tensor, "N T"]
    rows: LogGradients | SharedGradients
    cols: LogGradients | None
    factor: Float[Tensor, "N T 1"] | None
    offset: Float[Tensor, "N T 1"] | None

    def of_heads(self, at: slice) -> "SolveGradients":
        """Return the same for some of the folded heads."""
        cols = self.cols and self.cols.part(at, slice(None))
        factor, offset = (None if x is None else x[at] for x in (self.factor, self.offset))
        return SolveGradients(self.rhs[at], self.ridge[at], self.rows.part(at, slice(None)), cols, factor, offset)


def _adjoint_(
    weights: Weights, values: Float[Tensor, "N b h W"], solved: Solved, grad_sums: Float[Tensor, "N W m"], piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the transposed system of a piece, from its last block to the first.

    Returns the solution g, the gradient of the undivided sums of rows, and what the weights of keys get from the sums
    that leave their blocks; `grad_sums` goes back through the piece in place.
    """
    g, grad_keys = (x.new_empty(x.shape) for x in (solved.grad_u, weights.keys))
    grad = g.new_empty(*g.shape[:3], g.shape[3] + 1)
    systems = _systems(weights.near, solved.inverse, solved.ridge)
    to_shift_(grad_sums, piece)
    given = (weights.keys, values, solved.grad_u, systems, solved.smooth, -solved.inverse, weights.rows)
    for block in reversed(list(_blocks(*given, g, grad, grad_keys))):
        keys, value, grad_u, system, smooth, minus, rows, g_, grad_, grad_keys_ = block
        reaching = torch.baddbmm(grad_u, closing(keys, piece.parts), grad_sums[:, :-1].mT)
        g_.copy_(torch.linalg.solve_triangular(system, reaching.mT, upper=False, left=False).mT)
        row_gradients(g_, smooth, minus, out=grad_)
        torch.bmm(closing(value, piece.parts), grad_sums, out=grad_keys_)
        hand_back_(grad_sums, rows, grad_, piece.parts)
    grad_sums.mul_(piece.decay)
    return g, grad, grad_keys


def solve_backward(
    part: Part, kept: Kept, solved: Solved, grad_sums: Float[Tensor, "N W m"], outs: "SolveGradients"
) -> Iterator[None]:
    """Write the gradients of right-hand sides, ridge, rows and columns, stopping after every chunk, the last one first.

    Turns the gradient of the sums that left, in place, into that of those entering.
    """
    for chunk in chunks_backwards(part, kept):
        for piece, before in chunk:
            at, piece = piece.span, part.with_logs(piece)
            weights, blocks = part.weights(piece, near=kept.near_of(part, piece)), part.blocks(piece)
            values, of_piece = part.values_at(at, blocks), solved.of_piece(at, blocks)
            g, grad, grad_col = _adjoint_(weights, values, of_piece, grad_sums, piece)
            outs.rhs[:, at] = g.flatten(1, 2)
            outs.ridge[:, at] = -(g * of_piece.u).sum(-1).flatten(1, 2)
            grad_row, grad_col = weight_gradients(weights, values, grad, grad_col, before, piece)
            grad_col, of_square = _of_product(part.keys, piece, grad_col, outs)
            if outs.cols is not None and part.rows is not None:
                outs.rows.put(part.rows, at, grad_row, blocks)
                outs.cols.put(part.keys, at, grad_col, of_square=of_square)
            else:
                outs.rows.put(part.keys, at, grad_row.add_(grad_col), of_square=of_square)
        yield


def _of_product(keys: Logs, piece: Piece, grad: Tensor, outs: SolveGradients) -> tuple[Tensor, Tensor | None]:
    """Write the gradients of factor and offset; return those of the product, in place, and of the square of its x."""
    at, product, of_square = piece.span, piece.product, None
    if outs.offset is not None or keys.square:
        total = grad.sum(-1, keepdim=True)
        of_square = total * keys.square if keys.square else None
        if outs.offset is not None:
            outs.offset[:, at] = total
    if keys.factor is None or outs.factor is None or product is None:
        return grad, of_square
    used = None if keys.weight is None else product  # nobody reads it after this, unless it is the caller's
    if keys.real is not None:
        product = product.masked_fill(~keys.real[:, at, None], 0)  # it may be NaN, and 0 * NaN is NaN
    of_factor = torch.mul(product, grad, out=used).sum(-1, keepdim=True).mul_(keys.unit)
    factor = keys.factor[:, at]
    if of_square is not None:
        of_square *= factor
        of_factor.addcmul_(of_square, keys.squares(at), value=2)
        of_square *= factor
    outs.factor[:, at] = of_factor
    return grad.mul_(factor), of_square


_ARGUMENTS = (
    "Tensor log_rows, Tensor? rows_weight, Tensor? log_cols, Tensor? cols_weight, Tensor? factor, Tensor? offset, "
    "Tensor rhs, Tensor ridge, Tensor sums, Tensor scale, Tensor? mask, Tensor? documents, Tensor last, float square, "
    "float constant, int chunk_size, int threads"
)


def solve_problem(
    rows, rows_weight, cols, cols_weight, factor, offset, rhs, sums, scale, mask, documents, last, square, constant,
    size, threads,
) -> Problem:  # fmt: skip
    """Fold the heads of the arguments; square and constant are those of columns."""
    count = rhs.shape[0] * rhs.shape[1]
    rows_of = None if cols is None else Logs.of(rows, rows_weight, count)
    keys = (rows, rows_weight) if cols is None else (cols, cols_weight)
    keys = replace(Logs.of(*keys, count, factor, offset, tied=cols is None), square=square, constant=constant)
    return Problem.of(rows_of, keys, rhs, sums, scale, mask, documents, last, True, size, threads, BLOCK)


@torch.library.custom_op(
    "mercer::linear_kernel_solve",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool keep) -> ({', '.join(['Tensor'] * 6)})",
)
def linear_kernel_solve_op(
    log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs, ridge, sums, scale, mask, documents, last,
    square, constant, chunk_size, threads, keep,
):  # fmt: skip
    """Return u, one over the weight of each row, the sums and their scale after the last token, and `Kept`.

    With a weight, log features are x weight', x = log_rows, to which columns add square ||x||^2 + constant; to either
    of those they add offset. `log_cols` None: they have the x of the rows, or with a factor, factor x: given features
    are multiplied themselves. `keep` is that of linear attention.
    """
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    rooms = rooms_of(sums, rhs, chunk_size, BLOCK, keep=keep)
    with full_precision(rhs.device):
        logs = (log_rows, rows_weight, log_cols, cols_weight, factor, offset)
        problem = solve_problem(
            *logs, rhs, new_sums, scale, mask, documents, last, square, constant, chunk_size, threads
        )
        kept = Kept.of(rooms)
        scales, *of_tokens = (x.flatten(0, 1) for x in (new_scale, rhs, ridge, u, inverse))
        for stretch in problem.stretches():
            at, part = stretch.heads, problem.part(stretch)
            run(solve_forward(part, kept.of_heads(at), scales[at], *(x[at] for x in of_tokens)))
            problem.sums[at] = part.sums.mT
    return u, inverse, new_sums, new_scale, *rooms


@torch.library.custom_op(
    "mercer::linear_kernel_solve_backward",
    mutates_args=(),
    schema="(Tensor grad_u, Tensor grad_sums, Tensor u, Tensor inverse, Tensor[] rooms, bool[] weigh, "
    f"{_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(
    grad_u, grad_sums, u, inverse, rooms, weigh, log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs,
    ridge, sums, scale, mask, documents, last, square, constant, chunk_size, threads,
):  # fmt: skip
    """Return the gradients of the arguments up to sums that are given; zeros for weights that do not `weigh`."""
    right, ridges, entering = (x.new_empty(x.shape) for x in (rhs, ridge, sums))
    if mask is not None:
        grad_u = grad_u.masked_fill(~mask[:, None, :, None], 0)
    with full_precision(rhs.device):
        logs = (log_rows, rows_weight, log_cols, cols_weight, factor, offset)
        problem = solve_problem(*logs, u, sums, scale, mask, documents, last, square, constant, chunk_size, threads)
        solved = Solved(*(x.flatten(0, 1) for x in (ridge, u, inverse, grad_u, rhs)))
        count = len(solved.u)
        rows = LogGradients.like(log_rows, rows_weight, count, weigh=weigh[0])
        cols = None if log_cols is None else LogGradients.like(log_cols, cols_weight, count, weigh=weigh[1])
        scales = [None if x is None else x.new_empty(count, x.shape[2], 1) for x in (factor, offset)]
        outs = SolveGradients(right.flatten(0, 1), ridges.flatten(0, 1), rows, cols, *scales)
        for stretch in problem.stretches():
            at, part = stretch.heads, problem.part(stretch)
            grad = grad_sums.flatten(0, 1)[at].mT.clone(memory_format=torch.contiguous_format)
            run(solve_backward(part, kept_of(part, rooms, at), solved.of_heads(at), grad, outs.of_heads(at)))
            entering.flatten(0, 1)[at] = grad.mT
    of_cols = [] if cols is None or log_cols is None else cols.results(log_cols, cols_weight)
    scales = [x.view_as(like) for x, like in zip(scales, (factor, offset), strict=True) if x is not None]
    return [*rows.results(log_rows, rows_weight), *of_cols, *scales, right, ridges, entering]


@linear_kernel_solve_op.register_fake
def _(log_rows, rows_weight, log_cols, cols_weight, factor, offset, rhs, ridge, sums, scale, *others):
    u, inverse = sums.new_empty(rhs.shape), sums.new_empty(*rhs.shape[:3], 1)
    rooms = rooms_of(sums, rhs, others[-3], BLOCK, keep=others[-1])
    return u, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape), *rooms


@_backward_op.register_fake
def _(grad_u, grad_sums, u, inverse, rooms, weigh, *arguments):
    return [x.new_empty(x.shape) for x in arguments[:9] if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.square, ctx.constant, ctx.size, ctx.threads, _ = inputs
    ctx.save_for_backward(output[0], output[1], *output[4:], *tensors)
    ctx.set_materialize_grads(False)  # those of the last two outputs would be larger than the rest together


def _differentiate(ctx, grad_u, grad_inverse, grad_sums, grad_scale, *unused):
    u, inverse, *arguments = ctx.saved_tensors
    rooms, arguments = arguments[:2], arguments[2:]
    grad_u = torch.zeros_like(u) if grad_u is None else grad_u
    grad_sums = torch.zeros_like(arguments[8]) if grad_sums is None else grad_sums
    weigh = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    others = (*arguments, ctx.square, ctx.constant, ctx.size, ctx.threads)
    grads = iter(_backward_op(grad_u, grad_sums, u, inverse, rooms, weigh, *others))
    return *(None if x is None else next(grads) for x in arguments[:9]), *[None] * 9


linear_kernel_solve_op.register_autograd(_differentiate, setup_context=_save)
