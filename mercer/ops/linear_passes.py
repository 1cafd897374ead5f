"""The passes of linear attention over chunks, forward and backward, as one operator that compilers do not look into."""

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_chunks import FLOOR, exp_, plan
from mercer.ops.linear_pieces import (
    Part,
    Problem,
    advance_,
    far_sums,
    fold,
    lift_,
    pieces_backwards,
    row_gradients,
    weight_gradients_,
)


def _write(out: Float[Tensor, "N Gn W"], at: slice, o: Tensor, inverse: Tensor, log_total: Tensor) -> None:
    """Divide the sums of rows by their last column into o and inverse; 0 where nothing was seen.

    `log_total`, the log of the whole weight of a row, holds that of its unit before.
    """
    o, inverse, log_total = (x[:, :, at] for x in (o, inverse, log_total))
    out = out.view(*o.shape[:-1], -1)
    total, blind = out[..., -1:], out[..., -1:] == 0
    inverse.copy_(total.reciprocal().masked_fill_(blind, 0))
    log_total.add_(total.log()).masked_fill_(blind, FLOOR)
    torch.mul(out[..., :-1], inverse, out=o)


def _causal_forward(part: Part, o: Tensor, inverse: Tensor, log_total: Tensor) -> Tensor:
    """Write o, inverse and log_total; carry the sums on in place and return their scale after the last token."""
    sums, scale = part.sums, part.scale
    for chunk in plan(part.keys, scale, part.tokens, part.size):
        for piece in chunk:
            at, scale = slice(piece.start, piece.stop), piece.scale
            key_weights, row_weights, near = part.piece_weights(piece, log_total[:, :, at])
            out = far_sums(row_weights, sums.mul_(piece.decay), piece)
            _write(out.baddbmm_(near, part.values[:, at]), at, o, inverse, log_total)
            advance_(sums, key_weights, part.values[:, at], piece)
    return scale


def _causal_backward(part: Part, rows: tuple[Tensor, ...], grad_sums: Tensor, outs) -> Tensor:
    """Write the gradients of rows, keys and values into `outs`; return that of the sums that entered.

    `rows` are the gradient of o, o, inverse, and the gradient of log_total.
    """
    grad_rows, grad_keys, grad_values = outs
    for piece, before in pieces_backwards(part):
        at, weights = slice(piece.start, piece.stop), part.piece_weights(piece)
        grad = row_gradients(*(x[:, :, at] for x in rows))
        closing = lift_(grad_sums, weights[0], piece)
        grad_value = torch.bmm(weights[2].mT, grad).baddbmm_(closing, grad_sums)
        grad_values[:, at] = grad_value[..., :-1]
        weight_gradients_(part, piece, weights, before, grad, grad_sums, (grad_rows[:, :, at], grad_keys[:, at]))
    return grad_sums


def _full_sums_(part: Part, sums: Tensor) -> Tensor:
    """Add all keys to the sums of the state, in place; return their scale."""
    everything = slice(None)
    shift = torch.maximum(part.scale, part.keys.at(everything).amax(1)) if part.keys.length else part.scale
    sums.mul_(exp_(part.scale - shift)[..., None])
    for start in range(0, part.keys.length, part.size):
        at = slice(start, start + part.size)
        sums.baddbmm_(part.key_weights(at, shift).mT, part.values[:, at])
    return shift


def _full_forward(part: Part, o: Tensor, inverse: Tensor, log_total: Tensor) -> Tensor:
    """Do `_causal_forward` where every row sees every key."""
    shift = _full_sums_(part, part.sums)
    for start in range(0, part.rows.shape[2], part.size):
        at = slice(start, start + part.size)
        out = torch.bmm(part.row_weights(at, shift, log_total[:, :, at]), part.sums)
        _write(out, at, o, inverse, log_total)
    return shift


def _full_backward(part: Part, rows: tuple[Tensor, ...], grad_sums: Tensor, outs) -> Tensor:
    """Do `_causal_backward` where every row sees every key."""
    grad_rows, grad_keys, grad_values = outs
    sums = part.sums.clone()
    shift = _full_sums_(part, sums)
    for start in range(0, part.rows.shape[2], part.size):
        at = slice(start, start + part.size)
        grad = row_gradients(*(x[:, :, at] for x in rows))
        weights = part.row_weights(at, shift)
        out = grad_rows[:, :, at]
        torch.mul(torch.bmm(grad, sums.mT).view_as(out), weights.view_as(out), out=out)
        grad_sums.baddbmm_(weights.mT, grad)
    for start in range(0, part.keys.length, part.size):
        at = slice(start, start + part.size)
        weights = part.key_weights(at, shift)
        torch.mul(torch.bmm(part.values[:, at], grad_sums.mT), weights, out=grad_keys[:, at])
        grad_values[:, at] = torch.bmm(weights, grad_sums)[..., :-1]
    return grad_sums.mul_(exp_(part.scale - shift)[..., None])


_ARGUMENTS = (
    "Tensor log_q, Tensor log_k, Tensor v, Tensor sums, Tensor scale, Tensor? mask, Tensor? documents, Tensor last, "
    "bool causal, int chunk_size) -> "
)


@torch.library.custom_op(
    "mercer::linear_attention", mutates_args=(), schema=f"({_ARGUMENTS}(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_attention_op(log_q, log_k, v, sums, scale, mask, documents, last, causal, chunk_size):
    """Return o, one over the weight of each row, the sums and their scale after the last token, and log weights.

    A row's weight is counted in a unit of its own in the second output; its log, in the last one, is not: FLOOR where a
    row sees nothing.
    """
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    with full_precision(log_q.device):
        problem = Problem.of(log_q, log_k, v, new_sums, scale, mask, documents, last, causal, chunk_size)
        folded = [fold(x, problem.keys.logs) for x in (o, inverse, log_total)]
        for stretch in problem.stretches():
            part, forward = problem.part(stretch), _causal_forward if causal else _full_forward
            new_scale.flatten(0, 1)[stretch.heads] = forward(part, *(x[stretch.heads, :, stretch.span] for x in folded))
            if not stretch.opens:  # a document after the first had sums of its own
                problem.sums[stretch.heads] = part.sums
    return o, inverse, new_sums, new_scale, log_total


@torch.library.custom_op(
    "mercer::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor grad_sums, Tensor grad_log_total, Tensor o, Tensor inverse, "
    f"{_ARGUMENTS}(Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    grad_o, grad_sums, grad_log_total, o, inverse, log_q, log_k, v, sums, scale, mask, documents, last, causal, size
):
    """Return the gradients of log_q, log_k, v and the sums that entered."""
    grads = [x.new_empty(x.shape) for x in (log_q, log_k, v)]
    grad_before = sums.new_zeros(sums.shape)
    with full_precision(log_q.device):
        problem = Problem.of(log_q, log_k, v, sums, scale, mask, documents, last, causal, size)
        folded = [fold(x, problem.keys.logs) for x in (grads[0], grad_o, o, inverse, grad_log_total)]
        after = grad_sums.flatten(0, 1)
        for stretch in problem.stretches():
            heads, span = stretch.heads, stretch.span
            grad_rows, *rows = (x[heads, :, span] for x in folded)
            outs = (grad_rows, *(x.flatten(0, 1)[heads, span] for x in grads[1:]))
            leaving = after[heads].clone() if stretch.closes else torch.zeros_like(after[heads])
            backward = _causal_backward if causal else _full_backward
            entering = backward(problem.part(stretch), tuple(rows), leaving, outs)
            if stretch.opens:
                grad_before.flatten(0, 1)[heads] = entering
    return *grads, grad_before


@linear_attention_op.register_fake
def _(log_q, log_k, v, sums, scale, mask, documents, last, causal, chunk_size):
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    return o, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape), log_total


@_backward_op.register_fake
def _(grad_o, grad_sums, grad_log_total, o, inverse, log_q, log_k, v, sums, scale, *others):
    return *(x.new_empty(x.shape) for x in (log_q, log_k, v)), sums.new_empty(sums.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.causal, ctx.size = inputs
    ctx.save_for_backward(output[0], output[1], *tensors)


def _differentiate(ctx, grad_o, grad_inverse, grad_sums, grad_scale, grad_log_total):
    grads = _backward_op(grad_o, grad_sums, grad_log_total, *ctx.saved_tensors, ctx.causal, ctx.size)
    return *grads, None, None, None, None, None, None


linear_attention_op.register_autograd(_differentiate, setup_context=_save)
