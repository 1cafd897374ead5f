"""Attention with feature-space weights: the quadratic definition, and the same in linear time with carried sums."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .checks import check_heads, check_mask, check_segments, compute_dtype, full_precision, repeat_heads, zero_padding
from .linear_chunks import FLOOR, document_ids
from .linear_passes import linear_attention_op


@dataclass(frozen=True)
class LinearState:
    """What causal linear attention remembers of the past: its size does not depend on the length.

    Per feature f, over the real tokens of the current document, `S = sum_j exp(log_k_jf - c_f) v_j` and
    `z = sum_j exp(log_k_jf - c_f)`. Gradients flow through S and z; c only fixes the unit they are counted in.

    Attributes:
        sums: S and, as a last column, z: W = Dv + 1.
        c: log scale of both, -1e30 where there is no key yet.
        segment: the document the sums belong to; 0 where no segments were given.
    """

    sums: Float[Tensor, "B Hk m W"]
    c: Float[Tensor, "B Hk m"]
    segment: Int[Tensor, " B"]

    @property
    def S(self) -> Float[Tensor, "B Hk m Dv"]:
        """Sums of weighted values."""
        return self.sums[..., :-1]

    @property
    def z(self) -> Float[Tensor, "B Hk m"]:
        """Sums of weights."""
        return self.sums[..., -1]


def linear_attention_naive(
    log_q: Float[Tensor, "B H T m"],
    log_k: Float[Tensor, "B Hk S m"],
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

    >>> q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.arange(3.0).view(1, 1, 3, 1)
    >>> linear_attention_naive(q, k, v)[0].flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    check_linear(log_q, log_k, v, causal=causal, mask=mask, segments=segments, state=state)
    with full_precision(log_q.device):
        dtype, past = compute_dtype(log_q, log_k, v), _past(log_q, log_k, v, state)
        real = torch.ones_like(log_k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        documents = document_ids(mask, segments, past.segment)
        keys = log_k.to(dtype).masked_fill(~real[:, None, :, None], FLOOR).clamp_min(FLOOR)
        values = zero_padding(v.to(dtype), mask)
        rows = log_q.to(dtype).clamp_min(FLOOR)
        if log_q.shape[2] == log_k.shape[2]:
            rows = zero_padding(rows, mask)

        visible, continues = _visible(real, documents, past.segment, causal, log_q.shape[2])
        c, S, z, k, values_ = (repeat_heads(x, log_q.shape[1]) for x in (past.c, past.S, past.z, keys, values))
        logits = torch.logsumexp(rows[..., :, None, :] + k[..., None, :, :], -1).masked_fill(~visible, -math.inf)
        before = (rows + c.detach()[:, :, None]).masked_fill(~continues, -math.inf)
        shift = torch.cat([logits, before], -1).detach().amax(-1, keepdim=True).clamp_min(FLOOR)
        weights, before = (torch.exp(x - shift).masked_fill(x < FLOOR / 2, 0) for x in (logits, before))
        total = weights.sum(-1, keepdim=True) + before @ z[..., None]
        o = (weights @ values_ + before @ S) / total.masked_fill(total == 0, 1)
        return o.to(v.dtype), _state_after(keys, values, real, documents, past)


def _visible(
    real: Tensor, documents: Tensor | None, segment: Tensor, causal: bool, rows: int
) -> tuple[Bool[Tensor, "B 1 T S"], Bool[Tensor, "B 1 T 1"]]:
    """Return which new keys, and whether the state's, a row sees."""
    visible = real[:, None, :].expand(-1, rows, -1)
    continues = torch.ones_like(visible[..., :1])
    if causal:
        visible = visible.tril()
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])
        continues = (documents == segment[:, None])[..., None]
    return visible[:, None], continues[:, None]


def _state_after(
    keys: Tensor, values: Tensor, real: Tensor, documents: Tensor | None, past: LinearState
) -> LinearState:
    """Add the keys of the last document to the sums, by definition."""
    segment = past.segment if documents is None or not documents.shape[1] else documents[:, -1].to(past.segment.dtype)
    kept = real if documents is None else real & (documents == segment[:, None])
    goes_on = (segment == past.segment)[:, None, None]
    keys = keys.masked_fill(~kept[:, None, :, None], FLOOR)
    before = torch.where(goes_on, past.c, FLOOR)
    c = torch.cat([before[:, :, None], keys], 2).amax(2).detach()
    weights = torch.exp(keys - c[:, :, None]).masked_fill(keys <= FLOOR, 0)
    decay = torch.exp(before - c) * goes_on
    sums = decay[..., None] * past.sums + weights.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1)
    return LinearState(sums=sums, c=c, segment=segment)


def linear_attention(
    log_q: Float[Tensor, "B H T m"],
    log_k: Float[Tensor, "B Hk S m"],
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
    `linear_attention_naive`. Inside a chunk weights are formed; what lies before it enters through carried sums. Every
    feature is counted relative to a running maximum that cancels exactly, so nothing is added to any weight.

    Args:
        log_q: log features of the queries, H a multiple of Hk.
        log_k: log features of the keys.
        v: values.
        causal: whether token i sees only j <= i. Otherwise the lengths T and S may differ.
        mask: True = real token, over the new tokens; the keys of others are not there, whatever they hold.
        segments: equal = same packed document; a document is one run of tokens. Continues the state's if it starts so.
        state: what an earlier call returned.
        chunk_size: tokens worked together.

    Returns:
        The averages, in the dtype of v, and the state after the last token.

    Raises:
        ValueError: shapes do not fit together, or a segment comes back after another one.

    Cost: O(B H T m (Dv + chunk_size)) time; the backward pass, which is written by hand, recomputes everything from
    inputs, outputs and one number a row, and cannot itself be differentiated.

    Source: DARKFormer (arXiv:2603.04127), phi(q) (phi(k)' v) / (phi(q) (phi(k)' 1)); log_q = log phi(q), m = features.

    >>> q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.arange(3.0).view(1, 1, 3, 1)
    >>> o, state = linear_attention(q, k, v)
    >>> o.flatten(), state.z.flatten()
    (tensor([0.0000, 0.5000, 1.0000]), tensor([3., 3.]))
    """
    check_linear(log_q, log_k, v, causal=causal, mask=mask, segments=segments, state=state, chunk_size=chunk_size)
    past = _past(log_q, log_k, v, state)
    documents = document_ids(mask, segments, past.segment)
    o, _, sums, c = linear_attention_op(
        log_q, log_k, v, past.sums, past.c.detach(), mask, documents, past.segment, causal, chunk_size
    )
    segment = past.segment if documents is None or not documents.shape[1] else documents[:, -1].to(past.segment.dtype)
    return o.to(v.dtype), LinearState(sums=sums, c=c, segment=segment)


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


def _past(log_q: Tensor, log_k: Tensor, v: Tensor, state: LinearState | None) -> LinearState:
    """Return the state in the dtype of the arithmetic, an empty one if there is none."""
    dtype = compute_dtype(log_q, log_k, v)
    if state is not None:
        return LinearState(sums=state.sums.to(dtype), c=state.c.to(dtype), segment=state.segment)
    batch, heads, _, features = log_k.shape
    sums = log_k.new_zeros(batch, heads, features, v.shape[3] + 1, dtype=dtype)
    segment = torch.zeros(batch, dtype=torch.long, device=log_k.device)
    return LinearState(sums=sums, c=torch.full_like(sums[..., 0], FLOOR), segment=segment)
