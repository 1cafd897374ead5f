"""The passes of linear attention over chunks, forward and backward, as one operator that compilers do not look into."""

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
    kept_of,
    rooms_of,
    row_gradients,
    run,
    to_shift_,
    weight_gradients,
)
from mercer.ops.linear_chunks import FLOOR, plan
from mercer.ops.linear_logs import LogGradients, Logs, SharedGradients, exp_, fold, in_blocks
from mercer.ops.linear_pieces import Part, Problem, matmul

BLOCK = 64  # longer blocks only add work above the diagonal; of 32 the matrices are too small


def _write(out: Float[Tensor, "N b Gh W"], *rows: Float[Tensor, "N G n _"]) -> None:
    """Divide the sums of rows by their last column into o and inverse; 0 where nothing was seen.

    `rows` are o, inverse and log_total, which holds the log of the unit before and of the whole weight afterwards.
    """
    o, inverse, log_total = (in_blocks(x, out.shape[1]) for x in rows)
    out = out.view(*o.shape[:-1], -1)
    total, blind = out[..., -1:], out[..., -1:] == 0
    inverse.copy_(total.reciprocal().masked_fill_(blind, 0))
    log_total.add_(total.log()).masked_fill_(blind, FLOOR)
    torch.mul(out[..., :-1], inverse, out=o)


def causal_forward(
    part: Part, kept: Kept, after: Float[Tensor, "N m"], *rows: Float[Tensor, "N G T _"]
) -> Iterator[None]:
    """Write o, inverse and log_total, stopping after every chunk.

    Carries the sums on in place; their scale after the last token goes to `after`.
    """
    scale = part.scale
    for number, chunk in enumerate(plan(part.keys, scale, part.tokens, part.size)):
        kept.put(number, part.sums, scale)
        for piece in chunk:
            at, scale, values = piece.span, piece.scale, part.values_at(piece.span, part.blocks(piece))
            weights = part.weights(piece, rows[2][:, :, at])
            kept.put_near(part, piece, weights.near)
            out = matmul(weights.near, values)
            part.sums.mul_(piece.decay)
            for block in range(values.shape[1]):
                out[:, block] += far_sums(weights.rows[:, block], part.sums, piece.parts)
                advance_(part.sums, weights.keys[:, block], values[:, block], piece)
            _write(out, *(x[:, :, at] for x in rows))
        yield
    after.copy_(scale)


def causal_backward(
    part: Part, kept: Kept, results: tuple[Tensor, ...], grad_sums: Float[Tensor, "N W m"], outs: "KeyGradients"
) -> Iterator[None]:
    """Write the gradients of rows, keys and values into `outs`, stopping after every chunk, the last one first.

    Turns the gradient of the sums that left, in place, into that of those entering.
    `results` are the gradient of o, o, inverse, and the gradient of log_total.
    """
    assert part.rows is not None
    for chunk in chunks_backwards(part, kept):
        for piece, before in chunk:
            at, blocks = piece.span, part.blocks(piece)
            weights, values = part.weights(piece, near=kept.near_of(part, piece)), part.values_at(at, blocks)
            grad = row_gradients(*(in_blocks(x[:, :, at], blocks) for x in results)).flatten(2, 3)
            grad_values, grad_keys = matmul(weights.near.mT, grad[..., :-1]), weights.keys.new_empty(weights.keys.shape)
            to_shift_(grad_sums, piece)
            for block in reversed(range(blocks)):
                keys, value = (closing(x[:, block], piece.parts) for x in (weights.keys, values))
                grad_values[:, block] += torch.bmm(keys, grad_sums[:, :-1].mT)
                torch.bmm(value, grad_sums, out=grad_keys[:, block])
                hand_back_(grad_sums, weights.rows[:, block], grad[:, block], piece.parts)
            grad_sums.mul_(piece.decay)
            outs.values[:, at] = grad_values.flatten(1, 2)
            grad_rows, grad_keys = weight_gradients(weights, values, grad, grad_keys, before, piece)
            outs.rows.put(part.rows, at, grad_rows, blocks)
            outs.put_keys(part.keys, at, grad_keys)
        yield


def _full_sums_(part: Part, sums: Float[Tensor, "N W m"]) -> Tensor:
    """Add all keys to the sums of the state, in place; return their scale."""
    shift = part.scale
    for at in part.spans(part.keys.length):
        keys = part.keys.finished(part.keys.product(at), at)
        shift = torch.maximum(shift, keys.amax(1) * part.keys.unit)
    sums.mul_(exp_(part.scale - shift)[:, None])
    for at in part.spans(part.keys.length):
        sums.baddbmm_(part.values_at(at)[:, 0].mT, part.key_weights(at, shift)[:, 0])
    return shift


def _full_forward(part: Part, *rows: Float[Tensor, "N G T _"]) -> Tensor:
    """Do `causal_forward` where every row sees every key."""
    shift = _full_sums_(part, part.sums)
    for at in part.spans(part.num_rows):
        cut = [x[:, :, at] for x in rows]
        _write(matmul(part.row_weights(at, shift, cut[2]), part.sums.mT[:, None]), *cut)
    return shift


def _full_backward(
    part: Part, results: tuple[Tensor, ...], grad_sums: Float[Tensor, "N W m"], outs: "KeyGradients"
) -> None:
    """Do `causal_backward` where every row sees every key."""
    assert part.rows is not None
    shift = _full_sums_(part, part.sums)
    for at in part.spans(part.num_rows):
        grad = row_gradients(*(x[:, :, at] for x in results)).flatten(1, 2)
        weights = part.row_weights(at, shift)[:, 0]
        outs.rows.put(part.rows, at, torch.bmm(grad, part.sums).mul_(weights))
        grad_sums.baddbmm_(grad.mT, weights)
    for at in part.spans(part.keys.length):
        weights = part.key_weights(at, shift)[:, 0]
        outs.put_keys(part.keys, at, torch.bmm(part.values_at(at)[:, 0], grad_sums).mul_(weights))
        outs.values[:, at] = torch.bmm(weights, grad_sums[:, :-1].mT)
    grad_sums.mul_(exp_(part.scale - shift)[:, None])


@dataclass(frozen=True)
class KeyGradients:
    """Where the gradients of some heads over a stretch go."""

    rows: LogGradients
    keys: LogGradients | SharedGradients
    offset: Float[Tensor, "N S 1"] | None
    values: Float[Tensor, "N S Dv"]

    def part(self, heads: slice, span: slice) -> "KeyGradients":
        """Return the same for some of the folded heads over a stretch."""
        offset = None if self.offset is None else self.offset[heads, span]
        return KeyGradients(self.rows.part(heads, span), self.keys.part(heads, span), offset, self.values[heads, span])

    def put_keys(self, keys: Logs, at: slice, grad: Float[Tensor, "N n m"]) -> None:
        """Take the gradient of the log features of some keys."""
        if self.offset is not None:
            torch.sum(grad, -1, keepdim=True, out=self.offset[:, at])
        self.keys.put(keys, at, grad)


_ARGUMENTS = (
    "Tensor log_q, Tensor? q_weight, Tensor log_k, Tensor? k_weight, Tensor? k_offset, Tensor v, Tensor sums, "
    "Tensor scale, Tensor? mask, Tensor? documents, Tensor last, float k_square, float k_constant, bool causal, "
    "int chunk_size, int threads"
)


def attention_problem(
    log_q,
    q_weight,
    log_k,
    k_weight,
    k_offset,
    v,
    sums,
    scale,
    mask,
    documents,
    last,
    square,
    constant,
    causal,
    size,
    threads,
) -> Problem:
    count = v.shape[0] * v.shape[1]
    rows, keys = Logs.of(log_q, q_weight, count), Logs.of(log_k, k_weight, count, offset=k_offset)
    keys = replace(keys, square=square, constant=constant)
    return Problem.of(rows, keys, v, sums, scale, mask, documents, last, causal, size, threads, BLOCK)


@torch.library.custom_op(
    "mercer::linear_attention",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool keep) -> ({', '.join(['Tensor'] * 7)})",
)
def linear_attention_op(
    log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale, mask, documents, last, k_square, k_constant, causal,
    chunk_size, threads, keep,
):  # fmt: skip
    """Return o, one over the weight of each row, sums and their scale after the last token, log weights, and `Kept`.

    With a weight, log features are log_q q_weight', and for keys log_k k_weight' + k_square ||log_k||^2 + k_constant;
    k_offset is added to either. A row's weight is counted in a unit of its own in the second output; its log, in the
    fifth one, is not: FLOOR where a row sees nothing. `keep`: whether a backward pass will come, which is faster with
    what the last two outputs hold.
    """
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    new_sums, new_scale = (x.clone(memory_format=torch.contiguous_format) for x in (sums, scale))
    rooms = rooms_of(sums, log_q, chunk_size, BLOCK, keep=keep and causal)
    with full_precision(log_q.device):
        others = (new_sums, scale, mask, documents, last, k_square, k_constant, causal, chunk_size, threads)
        problem = attention_problem(log_q, q_weight, log_k, k_weight, k_offset, v, *others)
        folded, kept = [fold(x, len(problem.values)) for x in (o, inverse, log_total)], Kept.of(rooms)
        for stretch in problem.stretches():
            heads, part = stretch.heads, problem.part(stretch)
            rows, after = [x[heads, :, stretch.span] for x in folded], new_scale.flatten(0, 1)[heads]
            if causal:
                run(causal_forward(part, kept.of_heads(heads), after, *rows))
            else:
                after.copy_(_full_forward(part, *rows))
            problem.sums[heads] = part.sums.mT
    return o, inverse, new_sums, new_scale, log_total, *rooms


@torch.library.custom_op(
    "mercer::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor grad_sums, Tensor grad_log_total, Tensor o, Tensor inverse, Tensor[] rooms, "
    f"bool[] weigh, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(
    grad_o, grad_sums, grad_log_total, o, inverse, rooms, weigh, log_q, q_weight, log_k, k_weight, k_offset, v, sums,
    scale, mask, documents, last, k_square, k_constant, causal, size, threads,
):  # fmt: skip
    """Return the gradients of the arguments up to sums that are given; zeros for weights that do not `weigh`."""
    grad_v, grad_before = v.new_empty(v.shape), sums.new_zeros(sums.shape)
    grad_offset = None if k_offset is None else torch.empty_like(k_offset, memory_format=torch.contiguous_format)
    with full_precision(log_q.device):
        logs = (log_q, q_weight, log_k, k_weight, k_offset)
        problem = attention_problem(
            *logs, v, sums, scale, mask, documents, last, k_square, k_constant, causal, size, threads
        )
        count = len(problem.values)
        folded = [fold(x, count) for x in (grad_o, o, inverse, grad_log_total)]
        rows = LogGradients.like(log_q, q_weight, count, weigh=weigh[0])
        keys = LogGradients.like(log_k, k_weight, count, weigh=weigh[1])
        offset = None if grad_offset is None else grad_offset.flatten(0, 1)[..., None]
        outs, after = KeyGradients(rows, keys, offset, grad_v.flatten(0, 1)), grad_sums.flatten(0, 1)
        for stretch in problem.stretches():
            heads, span, part = stretch.heads, stretch.span, problem.part(stretch)
            results = tuple(x[heads, :, span] for x in folded)
            grad = after[heads].mT.clone(memory_format=torch.contiguous_format)
            grad = grad if stretch.closes else grad.zero_()
            if causal:
                run(causal_backward(part, kept_of(part, rooms, heads), results, grad, outs.part(heads, span)))
            else:
                _full_backward(part, results, grad, outs.part(heads, span))
            if stretch.opens:
                grad_before.flatten(0, 1)[heads] = grad.mT
    of_logs = [*rows.results(log_q, q_weight), *keys.results(log_k, k_weight)]
    return [*of_logs, *([] if grad_offset is None else [grad_offset]), grad_v, grad_before]


@linear_attention_op.register_fake
def _(log_q, q_weight, log_k, k_weight, k_offset, v, sums, scale, *others):
    o, inverse, log_total = (sums.new_empty(*log_q.shape[:3], width) for width in (v.shape[3], 1, 1))
    causal, chunk_size, _, keep = others[-4:]
    rooms = rooms_of(sums, log_q, chunk_size, BLOCK, keep=keep and causal)
    return o, inverse, sums.new_empty(sums.shape), scale.new_empty(scale.shape), log_total, *rooms


@_backward_op.register_fake
def _(grad_o, grad_sums, grad_log_total, o, inverse, rooms, weigh, *arguments):
    return [x.new_empty(x.shape) for x in arguments[:7] if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.square, ctx.constant, ctx.causal, ctx.size, ctx.threads, _ = inputs
    ctx.save_for_backward(output[0], output[1], *output[5:], *tensors)
    ctx.set_materialize_grads(False)  # those of the last two outputs would be larger than the rest together


def _differentiate(ctx, grad_o, grad_inverse, grad_sums, grad_scale, grad_log_total, *unused):
    o, inverse, *arguments = ctx.saved_tensors
    rooms, arguments = arguments[:2], arguments[2:]
    given = ((grad_o, o), (grad_sums, arguments[6]), (grad_log_total, inverse))
    grad_o, grad_sums, grad_log_total = (torch.zeros_like(like) if grad is None else grad for grad, like in given)
    weigh = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    others = (*arguments, ctx.square, ctx.constant, ctx.causal, ctx.size, ctx.threads)
    grads = iter(_backward_op(grad_o, grad_sums, grad_log_total, o, inverse, rooms, weigh, *others))
    return *(None if x is None else next(grads) for x in arguments[:7]), *[None] * 10


linear_attention_op.register_autograd(_differentiate, setup_context=_save)
