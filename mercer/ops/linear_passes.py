"""The passes of linear attention over chunks, forward and backward, as one operator that compilers do not look into."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.ops.checks import full_precision
from mercer.ops.linear_chunks import FLOOR, plan
from mercer.ops.linear_logs import LogGradients, Logs, exp_, fold
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
            at, scale, values = piece.span, piece.scale, part.values_at(piece.span)
            key_weights, row_weights, near = part.piece_weights(piece, log_total[:, :, at])
            out = far_sums(row_weights, sums.mul_(piece.decay), piece)
            _write(out.baddbmm_(near, values), at, o, inverse, log_total)
            advance_(sums, key_weights, values, piece)
    return scale


def _causal_backward(part: Part, results: tuple[Tensor, ...], grad_sums: Tensor, outs: "_Gradients") -> Tensor:
    """Write the gradients of rows, keys and values into `outs`; return that of the sums that entered.

    `results` are the gradient of o, o, inverse, and the gradient of log_total.
    """
    assert part.rows is not None
    for piece, before in pieces_backwards(part):
        at, weights, values = piece.span, part.piece_weights(piece), part.values_at(piece.span)
        grad = row_gradients(*(x[:, :, at] for x in results))
        closing = lift_(grad_sums, weights[0], piece)
        grad_value = torch.bmm(weights[2].mT, grad).baddbmm_(closing, grad_sums)
        outs.values[:, at] = grad_value[..., :-1]
        grad_row, grad_key = weight_gradients_(part, piece, weights, values, before, grad, grad_sums)
        outs.rows.put(part.rows, at, grad_row)
        outs.put_keys(part.keys, at, grad_key)
    return grad_sums


def _full_sums_(part: Part, sums: Tensor) -> Tensor:
    """Add all keys to the sums of the state, in place; return their scale."""
    shift = part.scale
    for at in part.spans(part.keys.length):
        keys = part.keys.finished(part.keys.product(at), at)
        shift = torch.maximum(shift, keys.amax(1) * part.keys.unit)
    sums.mul_(exp_(part.scale - shift)[..., None])
    for at in part.spans(part.keys.length):
        sums.baddbmm_(part.key_weights(at, shift).mT, part.values_at(at))
    return shift


def _full_forward(part: Part, o: Tensor, inverse: Tensor, log_total: Tensor) -> Tensor:
    """Do `_causal_forward` where every row sees every key."""
    shift = _full_sums_(part, part.sums)
    for at in part.spans(part.num_rows):
        out = torch.bmm(part.row_weights(at, shift, log_total[:, :, at]), part.sums)
        _write(out, at, o, inverse, log_total)
    return shift


def _full_backward(part: Part, results: tuple[Tensor, ...], grad_sums: Tensor, outs: "_Gradients") -> Tensor:
    """Do `_causal_backward` where every row sees every key."""
    assert part.rows is not None
    sums = part.sums.clone()
    shift = _full_sums_(part, sums)
    for at in part.spans(part.num_rows):
        grad = row_gradients(*(x[:, :, at] for x in results))
        weights = part.row_weights(at, shift)
        outs.rows.put(part.rows, at, torch.bmm(grad, sums.mT).mul_(weights))
        grad_sums.baddbmm_(weights.mT, grad)
    for at in part.spans(part.keys.length):
        weights = part.key_weights(at, shift)
        outs.put_keys(part.keys, at, torch.bmm(part.values_at(at), grad_sums.mT).mul_(weights))
        outs.values[:, at] = torch.bmm(weights, grad_sums)[..., :-1]
    return grad_sums.mul_(exp_(part.scale - shift)[..., None])


@dataclass(frozen=True)
class _Gradients:
    """Where the gradients of some heads over a stretch go."""

    rows: LogGradients
    keys: LogGradients
    offset: Float[Tensor, "N S 1"] | None
    values: Float[Tensor, "N S Dv"]

    def part(self, heads: slice, span: slice) -> "_Gradients":
        offset = None if self.offset is None else self.offset[heads, span]
        return _Gradients(self.rows.part(heads, span), self.keys.part(heads, span), offset, self.values[heads, span])

    def put_keys(self, keys: Logs, at: slice, grad: Float[Tensor, "N n m"]) -> None:
        """Take the gradient of the log features of some keys."""
        if self.offset is not None:
            torch.sum(grad, -1, keepdim=True, out=self.offset[:, at])
        self.keys.put(keys, at, grad)


_ARGUMENTS = (
    "Tensor log_q, Tensor? q_weight, Tensor log_k, Tensor? k_weight, Tensor? k_offset, Tensor v, Tensor sums, "
    "Tensor scale, Tensor? mask, Tensor? documents, Tensor last, float k_square, float k_constant, bool causal, "
    "int chunk_size) -> "
)


def _problem(
    log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale, mask, documents, last, square, constant, causal, size
) -> Problem:
    count = v.shape[0] * v.shape[1]
    rows, keys = Logs.of(log_q, q_weight, count), Logs.of(log_k, k_weight, count, offset=k_offset)
    keys = replace(keys, square=square, constant=constant)
    return Problem.of(rows, keys, v, sums, scale, mask, documents, last, causal, size)


@torch.library.custom_op(
    "mercer::linear_attention", mutates_args=(), schema=f"({_ARGUMENTS}(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_attention_op(
    log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale, mask, documents, last, k_square, k_constant, causal,
    chunk_size,
):  # fmt: skip
    """Return o, one over the weight of each row, the sums and their scale after the last token, and log weights.

    With a weight, log features are log_q q_weight', and for keys log_k k_weight' + k_square ||log_k||^2 + k_constant;
    k_offset is added to either. A row's weight is counted in a unit of its own in the second output; its log, in the
    last one, is not: FLOOR where a row sees nothing.
    """
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    with full_precision(log_q.device):
        others = (new_sums, scale, mask, documents, last, k_square, k_constant, causal, chunk_size)
        problem = _problem(log_q, q_weight, log_k, k_weight, k_offset, v, *others)
        folded = [fold(x, len(problem.values)) for x in (o, inverse, log_total)]
        for stretch in problem.stretches():
            part, forward = problem.part(stretch), _causal_forward if causal else _full_forward
            new_scale.flatten(0, 1)[stretch.heads] = forward(part, *(x[stretch.heads, :, stretch.span] for x in folded))
            if not stretch.opens:  # a document after the first had sums of its own
                problem.sums[stretch.heads] = part.sums
    return o, inverse, new_sums, new_scale, log_total


@torch.library.custom_op(
    "mercer::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor grad_sums, Tensor grad_log_total, Tensor o, Tensor inverse, bool[] weigh, "
    f"{_ARGUMENTS}Tensor[]",
)
def _backward_op(
    grad_o, grad_sums, grad_log_total, o, inverse, weigh, log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale,
    mask, documents, last, k_square, k_constant, causal, size,
):  # fmt: skip
    """Return the gradients of the arguments up to sums that are given; zeros for weights that do not `weigh`."""
    grad_v, grad_before = v.new_empty(v.shape), sums.new_zeros(sums.shape)
    grad_offset = None if k_offset is None else torch.empty_like(k_offset, memory_format=torch.contiguous_format)
    with full_precision(log_q.device):
        logs = (log_q, q_weight, log_k, k_weight, k_offset)
        problem = _problem(*logs, v, sums, scale, mask, documents, last, k_square, k_constant, causal, size)
        count = len(problem.values)
        folded = [fold(x, count) for x in (grad_o, o, inverse, grad_log_total)]
        rows = LogGradients.like(log_q, q_weight, count, weigh=weigh[0])
        keys = LogGradients.like(log_k, k_weight, count, weigh=weigh[1])
        offset = None if grad_offset is None else grad_offset.flatten(0, 1)[..., None]
        outs, after = _Gradients(rows, keys, offset, grad_v.flatten(0, 1)), grad_sums.flatten(0, 1)
        for stretch in problem.stretches():
            heads, span = stretch.heads, stretch.span
            results = tuple(x[heads, :, span] for x in folded)
            leaving = after[heads].clone() if stretch.closes else torch.zeros_like(after[heads])
            backward = _causal_backward if causal else _full_backward
            entering = backward(problem.part(stretch), results, leaving, outs.part(heads, span))
            if stretch.opens:
                grad_before.flatten(0, 1)[heads] = entering
    of_logs = [*rows.results(log_q, q_weight), *keys.results(log_k, k_weight)]
    return [*of_logs, *([] if grad_offset is None else [grad_offset]), grad_v, grad_before]


@linear_attention_op.register_fake
def _(log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale, *others):
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    return o, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape), log_total


@_backward_op.register_fake
def _(grad_o, grad_sums, grad_log_total, o, inverse, weigh, *arguments):
    return [x.new_empty(x.shape) for x in arguments[:7] if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.square, ctx.constant, ctx.causal, ctx.size = inputs
    ctx.save_for_backward(output[0], output[1], *tensors)


def _differentiate(ctx, grad_o, grad_inverse, grad_sums, grad_scale, grad_log_total):
    o, inverse, *arguments = ctx.saved_tensors
    weigh = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    grads = _backward_op(
        grad_o, grad_sums, grad_log_total, o, inverse, weigh, *arguments, ctx.square, ctx.constant, ctx.causal, ctx.size
    )
    grads = iter(grads)
    return *(None if x is None else next(grads) for x in arguments[:7]), *[None] * 8


linear_attention_op.register_autograd(_differentiate, setup_context=_save)
