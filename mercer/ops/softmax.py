"""Nadaraya-Watson smoother: every output is a softmax-weighted mean of the values."""

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import (
    check_heads,
    check_mask,
    check_segments,
    compute_dtype,
    full_precision,
    repeat_heads,
    visible,
    zero_padding,
)


def softmax_rows(scores: Float[Tensor, "B H T S"], allowed: Bool[Tensor, "#B T S"]) -> Float[Tensor, "B H T S"]:
    """Softmax over the columns a row may see; a row that sees none is all zeros."""
    hidden = ~allowed[:, None]
    blind = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(hidden & ~blind, float("-inf")).softmax(-1)
    return weights.masked_fill(hidden, 0.0)


def softmax_attention_naive(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk S D"],
    v: Float[Tensor, "B Hv S Dv"],
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Compute softmax attention by its definition, o_i = sum_j softmax_j(scale * q_i . k_j) v_j.

    Quadratic in time and memory; see `softmax_attention` for the arguments.
    """
    _check(q, k, v, mask, segments)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(q.device):
        dtype, heads = compute_dtype(q, k, v), q.shape[1]
        q_, k_, v_ = (t.to(dtype) for t in (q, k, v))
        q_ = zero_padding(q_, mask, rows=True)
        k_, v_ = (repeat_heads(zero_padding(t, mask), heads) for t in (k_, v_))
        allowed = visible(q.shape[2], k.shape[2], q.device, causal=causal, mask=mask, segments=segments)
        return (softmax_rows(factor * q_ @ k_.mT, allowed) @ v_).to(v.dtype)


def softmax_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk S D"],
    v: Float[Tensor, "B Hv S Dv"],
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Smooth the values with softmax weights, o_i = sum_j softmax_j(scale * q_i . k_j) v_j.

    Equal to `softmax_attention_naive`, through PyTorch's fused `scaled_dot_product_attention`. The T queries are
    the last T of the S positions, so decoding passes one query and all keys. A query that sees no key gives 0.

    Args:
        q: queries.
        k: keys; H must be a multiple of their heads.
        v: values; H must be a multiple of their heads. Any width, any float dtype.
        causal: whether position i sees only j <= i.
        scale: factor on the logits; D^(-1/2) by default.
        mask: True = real token. Padded keys are never seen, whatever they hold.
        segments: equal = same packed document; a query sees only its own.

    Returns:
        The smoothed values, in the dtype of `v`; computed in float32 at least (on accelerators, 16-bit inputs go
        to the fused kernel as they are: it accumulates in float32).

    Raises:
        ValueError: heads that do not divide, a mask that is not a padding mask, segments of another shape.

    Cost:
        O(B H T S D) time, O(B H T D) memory; with `mask`, `segments` or more keys than queries, a mask of one bool (and
        in the fused kernel one float) per pair of a batch row besides, shared by the heads.

    Source:
        Vaswani et al. 2017, eq. (1); Nadaraya-Watson regression with the kernel exp(scale * q . k).

    >>> q = torch.zeros(1, 1, 3, 2)  # equal weights: the running mean of the values
    >>> softmax_attention(q, q, torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)).flatten().tolist()
    [1.0, 1.5, 2.0]
    """
    _check(q, k, v, mask, segments)
    with full_precision(q.device):
        half = q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2 and q.device.type != "cpu"
        dtype = q.dtype if half else compute_dtype(q, k, v)
        return _attend(q.to(dtype), k.to(dtype), v.to(dtype), causal, scale, mask, segments).to(v.dtype)


def _attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk S D"],
    v: Float[Tensor, "B Hv S Dv"],
    causal: bool,
    scale: float | None,
    mask: Bool[Tensor, "B S"] | None,
    segments: Int[Tensor, "B S"] | None,
) -> Float[Tensor, "B H T Dv"]:
    shape, cols, width = (*q.shape[:3], v.shape[3]), k.shape[2], max(q.shape[3], v.shape[3])
    heads, rows = shape[1:3]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # the fused kernels want one width of all three; with two PyTorch falls back to a T x S matrix
    q, k, v = (t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])) for t in (q, k, v))
    if rows == 1:
        causal = False  # one query is the last position and sees them all
    q = zero_padding(q, mask, rows=True)
    k, v = (zero_padding(t, mask) for t in (k, v))
    if rows == 1 and k.shape[1] == v.shape[1]:  # decoding: a group's queries become rows, and no key is copied for them
        q = q.reshape(shape[0], k.shape[1], heads // k.shape[1], q.shape[3])
    else:
        k, v = (repeat_heads(t, heads) for t in (k, v))
    if mask is None and segments is None and (not causal or rows == cols):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return o[..., : shape[3]].reshape(shape)
    allowed = visible(rows, cols, q.device, causal=causal, mask=mask, segments=segments)[:, None]
    blind = ~allowed.any(-1, keepdim=True)  # a row of -inf alone would be NaN: let it see all, then drop it
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | blind, scale=scale)
    return o[..., : shape[3]].masked_fill(blind, 0.0).reshape(shape)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor | None) -> None:
    check_heads(q.shape[1], q=q, k=k, v=v)
    if k.shape[2] != v.shape[2] or k.shape[2] < q.shape[2]:
        raise ValueError(
            f"q, k, v have {q.shape[2]}, {k.shape[2]}, {v.shape[2]} positions; k and v must have as many as each other "
            "and no fewer than q, whose rows are the last ones"
        )
    check_mask(mask, k.shape[0], k.shape[2])
    check_segments(segments, k.shape[0], k.shape[2])
