"""A kernel system and the smoothing of its solution in one pass: what the keys of both are made of is made once.

The passes are those of the two operators, which take turns at every chunk: the solution of a chunk is smoothed while it
is in the cache, and what both hand back of a chunk's product goes through the weight together.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mercer.ops import linear_passes, linear_solve_passes
from mercer.ops.checks import full_precision
from mercer.ops.linear_carry import Kept, kept_of, rooms_of, run
from mercer.ops.linear_logs import LogGradients, Shared, SharedGradients, fold
from mercer.ops.linear_passes import KeyGradients, attention_problem, causal_backward, causal_forward
from mercer.ops.linear_pieces import Part, Problem
from mercer.ops.linear_solve_passes import Solved, SolveGradients, solve_backward, solve_forward, solve_problem


def _parts(system: Problem, smoother: Problem) -> Iterator[tuple[slice, Part, Part]]:
    """Yield a few heads at a time, and their parts, which read one product."""
    for stretch in smoother.stretches():
        heads, shared = stretch.heads, Shared()
        of_system = replace(stretch, tokens=system.tokens.of_heads(heads.start, heads.stop))
        yield heads, system.part(of_system).sharing(shared), smoother.part(stretch).sharing(shared)


_ARGUMENTS = (
    "Tensor log_q, Tensor? q_weight, Tensor k, Tensor k_weight, Tensor factor, Tensor rhs, "
    "Tensor ridge, Tensor u_sums, Tensor o_sums, Tensor u_scale, Tensor o_scale, Tensor? mask, Tensor? documents, "
    "Tensor last, float square, float constant, int chunk_size, int threads"
)


def _problems(
    log_q, q_weight, k, k_weight, factor, rhs, u, u_sums, o_sums, u_scale, o_scale, *tokens_and_sizes
) -> tuple[Problem, Problem]:  # fmt: skip
    """Fold the heads of the arguments for the system, whose values are `rhs`, and for the smoother of u."""
    mask, documents, last, square, constant, size, threads = tokens_and_sizes
    rows, others = (k, k_weight, None, None, factor, None), (mask, documents, last, square, constant)
    system = solve_problem(*rows, rhs, u_sums, u_scale, *others, size, threads)
    logs = (log_q, q_weight, k, k_weight, None)
    return system, attention_problem(*logs, u, o_sums, o_scale, *others, True, size, threads)


def _rooms(log_q, rhs, u_sums, o_sums, size: int, keep: bool) -> tuple[Tensor, ...]:
    """Return room for o, u, one over the weight of each row of either, and what either keeps."""
    rows = [u_sums.new_empty(*log_q.shape[:3], width) for width in (rhs.shape[3], 1)]
    tokens = [u_sums.new_empty(*rhs.shape[:3], width) for width in (rhs.shape[3], 1)]
    of_system = rooms_of(u_sums, rhs, size, linear_solve_passes.BLOCK, keep=keep)
    of_smoother = rooms_of(o_sums, log_q, size, linear_passes.BLOCK, keep=keep)
    return rows[0], tokens[0], rows[1], tokens[1], *of_system, *of_smoother


@torch.library.custom_op(
    "mercer::linear_kernel_regression",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool keep) -> ({', '.join(['Tensor'] * 12)})",
)
def linear_kernel_regression_op(
    log_q, q_weight, k, k_weight, factor, rhs, ridge, u_sums, o_sums, u_scale, o_scale, mask, documents, last,
    square, constant, chunk_size, threads, keep,
):  # fmt: skip
    """Return o; sums and their scales after the last token, of system and smoother; then `_rooms` without o.

    The rows of the system have log features k k_weight', the keys of the smoother those and square ||k||^2 + constant,
    the columns of the system those of factor k in place of k. The rest is as in the two operators.
    """
    o, u, o_inverse, u_inverse, *rooms = _rooms(log_q, rhs, u_sums, o_sums, chunk_size, keep)
    after = [x.clone(memory_format=torch.contiguous_format) for x in (u_sums, o_sums, u_scale, o_scale)]
    with full_precision(rhs.device):
        logs, sums = (log_q, q_weight, k, k_weight, factor), (*after[:2], u_scale, o_scale)
        others = (mask, documents, last, square, constant, chunk_size, threads)
        system, smoother = _problems(*logs, rhs, u, *sums, *others)
        tokens, scales = ([x.flatten(0, 1) for x in given] for given in ((rhs, ridge, u, u_inverse), after[2:]))
        rows = [fold(x, len(tokens[0])) for x in (o, o_inverse, torch.empty_like(o_inverse))]
        of_u, of_o = Kept.of(rooms[:2]), Kept.of(rooms[2:])
        for at, solved, smoothed in _parts(system, smoother):
            solving = solve_forward(solved, of_u.of_heads(at), scales[0][at], *(x[at] for x in tokens))
            smoothing = causal_forward(smoothed, of_o.of_heads(at), scales[1][at], *(x[at] for x in rows))
            run(zip(solving, smoothing, strict=True))  # strict: both are to reach their end
            system.sums[at], smoother.sums[at] = solved.sums.mT, smoothed.sums.mT
    return o, *after, u, o_inverse, u_inverse, *rooms


@torch.library.custom_op(
    "mercer::linear_kernel_regression_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor grad_u_sums, Tensor grad_o_sums, Tensor o, Tensor u, Tensor o_inverse, "
    f"Tensor u_inverse, Tensor[] rooms, bool[] weigh, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(
    grad_o, grad_u_sums, grad_o_sums, o, u, o_inverse, u_inverse, rooms, weigh, log_q, q_weight, k, k_weight, factor,
    rhs, ridge, u_sums, o_sums, u_scale, o_scale, mask, documents, last, square, constant, chunk_size, threads,
):  # fmt: skip
    """Return the gradients of the arguments up to sums that are given; zeros for weights that do not `weigh`."""
    right, ridges, grad_u, *entering = (x.new_empty(x.shape) for x in (rhs, ridge, u, u_sums, o_sums))
    with full_precision(rhs.device):
        logs, sums = (log_q, q_weight, k, k_weight, factor), (u_sums, o_sums, u_scale, o_scale)
        others = (mask, documents, last, square, constant, chunk_size, threads)
        system, smoother = _problems(*logs, u, u, *sums, *others)
        solved = Solved(*(x.flatten(0, 1) for x in (ridge, u, u_inverse, grad_u, rhs)))
        count = len(solved.u)
        results = [fold(x, count) for x in (grad_o, o, o_inverse)]
        of_q = LogGradients.like(log_q, q_weight, count, weigh=weigh[0])
        of_k = LogGradients.like(k, k_weight, count, weigh=weigh[1])
        of_factor = factor.new_empty(count, factor.shape[2], 1)
        whole = slice(None)
        for at, of_u, of_o in _parts(system, smoother):
            of_keys = SharedGradients(of_k).part(at, whole)
            grads = [
                x.flatten(0, 1)[at].mT.clone(memory_format=torch.contiguous_format) for x in (grad_u_sums, grad_o_sums)
            ]
            to_rows = KeyGradients(of_q.part(at, whole), of_keys, None, solved.grad_u[at])
            to_tokens = SolveGradients(
                right.flatten(0, 1)[at], ridges.flatten(0, 1)[at], of_keys, None, of_factor[at], None
            )
            kept_u, kept_o = kept_of(of_u, rooms[:2], at), kept_of(of_o, rooms[2:], at)
            smoothing = causal_backward(of_o, kept_o, tuple(x[at] for x in results), grads[1], to_rows)
            solving = solve_backward(of_u, kept_u, solved.of_heads(at), grads[0], to_tokens)
            for _ in zip(smoothing, solving, strict=True):
                of_keys.hand_on(of_u.keys)
            for room, grad in zip(entering, grads, strict=True):
                room.flatten(0, 1)[at] = grad.mT
    of_logs = [*of_q.results(log_q, q_weight), *of_k.results(k, k_weight), of_factor.view_as(factor)]
    return [*of_logs, right, ridges, *entering]


@linear_kernel_regression_op.register_fake
def _(log_q, q_weight, k, k_weight, factor, rhs, ridge, *others):
    sums, size, keep = others[:4], others[-3], others[-1]
    o, *rooms = _rooms(log_q, rhs, sums[0], sums[1], size, keep)
    return o, *(x.new_empty(x.shape) for x in sums), *rooms


@_backward_op.register_fake
def _(grad_o, grad_u_sums, grad_o_sums, o, u, o_inverse, u_inverse, rooms, weigh, *arguments):
    return [x.new_empty(x.shape) for x in arguments[:9] if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.square, ctx.constant, ctx.size, ctx.threads, _ = inputs
    ctx.save_for_backward(output[0], *output[5:], *tensors)
    ctx.set_materialize_grads(False)  # those of what is kept would be larger than the rest together


def _differentiate(ctx, grad_o, grad_u_sums, grad_o_sums, *unused):
    results, rooms, arguments = (ctx.saved_tensors[at] for at in (slice(4), slice(4, 8), slice(8, None)))
    given = ((grad_o, results[0]), (grad_u_sums, arguments[7]), (grad_o_sums, arguments[8]))
    grads = [torch.zeros_like(like) if grad is None else grad for grad, like in given]
    weigh = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    others = (*arguments, ctx.square, ctx.constant, ctx.size, ctx.threads)
    found = iter(_backward_op(*grads, *results, rooms, weigh, *others))
    return *(None if x is None else next(found) for x in arguments[:9]), *[None] * 10


linear_kernel_regression_op.register_autograd(_differentiate, setup_context=_save)
