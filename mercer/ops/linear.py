"""Attention with feature-space weights: the quadratic definition, and the same in linear time with carried sums."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import (
    any_grad,
    check_heads,
    check_mask,
    check_segments,
    full_precision,
    refuse_tangents,
    repeat_heads,
    zero_padding,
)
from mercer.ops.factored import Factored, LogFeatures, added_of, arguments_of, dense, outline
from mercer.ops.linear_chunks import document_ids, num_threads
from mercer.ops.linear_definition import Definition, Sums, segment_after
from mercer.ops.linear_passes import linear_attention_op
from mercer.ops.linear_step import attention_step


@dataclass(frozen=True)
class LinearState(Sums):
    """What causal linear attention remembers of the past: its size does not depend on the length.

    Per feature f, over the real tokens of the current document, `S = sum_j exp(log_k_jf - c_f) v_j` and
    `z = sum_j exp(log_k_jf - c_f)`. Gradients flow through S and z; c only fixes the unit they are counted in.
    """


def linear_attention_naive(
    log_q: Float[Tensor, "B H T m"] | Factored,
    log_k: Float[Tensor, "B Hk S m"] | Factored,
    v: Float[Tensor, "B Hk S Dv"],
    *,
    causal: bool = True,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
    state: LinearState | None = None,
) -> tuple[Float[Tensor, "B H T Dv"], LinearState]:
    """Average values with the weights w_ij = sum_f exp(log_q_if + log_k_jf), by their definition.

    `o_i = sum_j w_ij v_j / sum_j w_ij` over the tokens j that i sees, and 0 where it sees none. Quadratic in time and
    memory, differentiable by autograd to any order. Arguments, returns and errors are those of `linear_attention`.

    Cost: O(B H T S m) time and memory.

    >>> import torch
    >>> q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.arange(3.0).view(1, 1, 3, 1)
    >>> linear_attention_naive(q, k, v)[0].flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    check_linear(outline(log_q), outline(log_k), v, causal=causal, mask=mask, segments=segments, state=state)
    with full_precision(v.device):
        log_q, log_k = dense(log_q), dense(log_k)
        past, heads = Sums.of(state, log_k, v, log_q), log_q.shape[1]
        same = log_q.shape[2] == log_k.shape[2]
        definition = Definition.of(log_k, mask, segments, past, same=same, causal=causal)
        values = zero_padding(v.to(past.sums.dtype), mask)
        weights, before, total = definition.weights(log_q)
        o = (weights @ repeat_heads(values, heads) + before @ repeat_heads(past.S, heads)) / total
        after = definition.sums_after(values)
        return o.to(v.dtype), LinearState(sums=after.sums, c=after.c, segment=after.segment)


def linear_attention(
    log_q: Float[Tensor, "B H T m"] | Factored,
    log_k: Float[Tensor, "B Hk S m"] | Factored,
    v: Float[Tensor, "B Hk S Dv"],
    *,
    causal: bool = True,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
    state: LinearState | None = None,
    chunk_size: int = 128,
) -> tuple[Float[Tensor, "B H T Dv"], LinearState]:
    """Average values with the weights w_ij = sum_f exp(log_q_if + log_k_jf), in linear time.

    `o_i = sum_j w_ij v_j / sum_j w_ij` over the tokens j that i sees, and 0 where it sees none: equal to
    `linear_attention_naive`. Inside a block of tokens weights are formed; what lies before it enters through carried
    sums. Every feature is counted relative to a running maximum that cancels exactly: nothing is added to any weight.

    Args:
        log_q: log features of the queries, H a multiple of Hk; `Factored` ones are not written to memory on a CPU.
        log_k: log features of the keys.
        v: values.
        causal: whether token i sees only j <= i. Otherwise the lengths T and S may differ.
        mask: True = real token, over the new tokens; padded tokens are seen by none, and give 0.
        segments: equal = same packed document; a document is one run of tokens. Continues the state's if it starts so.
        state: what an earlier call returned.
        chunk_size: tokens that share a scale, at most; on a CPU no more than 256 do.

    Returns:
        The averages, in the dtype of v, and the state after the last token.

    Raises:
        ValueError: shapes do not fit together, or a segment comes back after another one.

    Cost: O(B H T m (Dv + chunk_size)) time. The backward pass, which is written by hand and cannot itself be
    differentiated, recomputes weights from inputs, outputs, one number a row and the sums that entered each chunk of
    at least 64 tokens: m (Dv + 2) numbers a chunk and key head.

    Source: DARKFormer (arXiv:2603.04127), phi(q) (phi(k)' v) / (phi(q) (phi(k)' 1)); log_q = log phi(q), m = features.

    >>> import torch
    >>> q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.arange(3.0).view(1, 1, 3, 1)
    >>> o, state = linear_attention(q, k, v)
    >>> o.flatten(), state.z.flatten()
    (tensor([0.0000, 0.5000, 1.0000]), tensor([3., 3.]))
    """
    shapes = outline(log_q), outline(log_k)
    check_linear(*shapes, v, causal=causal, mask=mask, segments=segments, state=state, chunk_size=chunk_size)
    past = Sums.of(state, shapes[1], v, shapes[0])
    if causal and v.shape[2] == 1:
        with full_precision(v.device):
            log_q, log_k, v = (dense(x, mask) for x in (log_q, log_k, v))
            o, past = attention_step(log_q, log_k, v, mask, segments, past)
        return o.to(v.dtype), LinearState(sums=past.sums, c=past.c, segment=past.segment)
    documents = document_ids(mask, segments, past.segment)
    *logs, square, constant = log_arguments(log_q, log_k, v, past, mask)
    refuse_tangents(*logs, v, past.sums)
    o, _, sums, c, *_ = linear_attention_op(
        *logs, v, past.sums, past.c, mask, documents, past.segment, square, constant, causal, chunk_size,
        num_threads(), any_grad(*logs, v, past.sums),
    )  # fmt: skip
    return o.to(v.dtype), LinearState(sums=sums, c=c, segment=segment_after(documents, past))


def log_arguments(
    log_q: LogFeatures, log_k: LogFeatures, v: Tensor, past: Sums, mask: Bool[Tensor, "B S"] | None
) -> tuple[Any, ...]:
    """Return the log features of queries and keys as the operator takes them; of queries, up to a number a row.

    Those are x and weight of both, and of the keys their offset, square and constant: the last two are left to the
    operator where it has x.
    """
    dtype, of_rows = past.sums.dtype, mask if outline(log_q).shape[2] == v.shape[2] else None
    with full_precision(v.device):
        rows, keys = (arguments_of(x, v.shape[1], dtype, m) for x, m in ((log_q, of_rows), (log_k, mask)))
        return *rows, *keys, *added_of(log_k, keys[1], dtype, mask)


def check_linear(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    segments: Tensor | None,
    state: LinearState | None,
    chunk_size: int = 1,
) -> None:
    """Refuse shapes that do not fit together."""
    check_heads(log_q.shape[1], log_q=log_q, log_k=log_k, v=v)
    (batch, _, rows, features), (_, kv_heads, length, _) = log_q.shape, log_k.shape
    if log_k.shape[0] != batch or log_k.shape[3] != features:
        raise ValueError(f"log_k {tuple(log_k.shape)} must have the batch and features of log_q {tuple(log_q.shape)}")
    if v.shape[:3] != log_k.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and tokens of log_k {tuple(log_k.shape)}")
    if (causal or segments is not None) and rows != length:
        raise ValueError(
            f"log_q has {rows} tokens and log_k {length}; with causal=True or segments they must be the same tokens: "
            "pass the past as state"
        )
    check_mask(mask, batch, length)
    check_segments(segments, batch, length)
    needed = (batch, kv_heads, features, v.shape[3])
    if state is not None and tuple(state.S.shape) != needed:
        raise ValueError(f"state holds sums S {tuple(state.S.shape)}; these inputs need {needed}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1")
