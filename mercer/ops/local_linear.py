"""Local linear regression: every output is the value at q_i of a line fitted with softmax weights around it."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import (
    check_heads,
    check_mask,
    check_segments,
    compute_dtype,
    full_precision,
    refuse_tangents,
    repeat_heads,
    visible,
    zero_padding,
)
from mercer.ops.softmax import softmax_rows

_ROWS = 64  # queries whose D x D moment matrices are held at a time
_TILE_ELEMENTS = 1 << 21  # products k k' held at a time on a CPU: 16 MiB


def local_linear_attention_naive(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk S D"],
    v: Float[Tensor, "B Hv S Dv"],
    *,
    ridge: float | Tensor = 1.0,
    causal: bool = True,
    scale: float | None = None,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Fit theta_i = (M' W_i M + ridge diag(0, 1, .., 1))^-1 M' W_i v, M = [1, k], and return theta_i . [1, q_i].

    The normal equations as the paper writes them, O(T S D^2) memory; see `local_linear_attention`.
    """
    with full_precision(q.device):
        q_, k_, v_ = _prepare(q, k, v, mask, segments)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        allowed = visible(q.shape[2], k.shape[2], q.device, causal=causal, mask=mask, segments=segments)
        weights = softmax_rows(factor * q_ @ k_.mT, allowed)
        m = torch.cat([torch.ones_like(k_[..., :1]), k_], -1)
        penalty = torch.diag_embed(torch.cat([q_.new_zeros(1), q_.new_ones(q_.shape[-1])]))
        # a row that sees nothing has no equations: give it the identity, its right-hand side is 0
        blind = (weights.sum(-1) == 0)[..., None, None]
        h = torch.einsum("bhts,bhsd,bhse->bhtde", weights, m, m) + ridge * penalty
        h = torch.where(blind, torch.eye(m.shape[-1], dtype=h.dtype, device=h.device), h)
        g = torch.einsum("bhts,bhsd,bhsv->bhtdv", weights, m, v_)
        theta = torch.linalg.solve(h, g)
        return (theta[..., 0, :] + torch.einsum("bhtd,bhtdv->bhtv", q_, theta[..., 1:, :])).to(v.dtype)


def local_linear_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk S D"],
    v: Float[Tensor, "B Hv S Dv"],
    *,
    ridge: float | Tensor = 1.0,
    causal: bool = True,
    scale: float | None = None,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Predict with a ridge-penalised line fitted around every query, o_i = theta_i0 + theta_i1.. . q_i.

    theta_i minimises sum_j W_ij ||theta_0 + theta_1' k_j - v_j||^2 + ridge ||theta_1||^2 with W = softmax(scale q k').
    Equal to `local_linear_attention_naive` by eliminating the intercept: with kbar_i = sum_j W_ij k_j and
    C_i = sum_j W_ij (k_j - kbar_i)(k_j - kbar_i)' + ridge I, the output is attention with the weights
    W_ij (1 + (q_i - kbar_i)' C_i^-1 (k_j - kbar_i)). ridge -> infinity gives softmax attention.

    Args:
        q: queries; they enter the line unscaled.
        k: keys; H must be a multiple of their heads.
        v: values.
        ridge: penalty on the slopes, not on the intercept; a float or a 0-d tensor.
        causal: whether position i sees only j <= i.
        scale: factor on the logits of W; D^(-1/2) by default.
        mask: True = real token.
        segments: equal = same packed document.

    Returns:
        The predictions, in the dtype of `v`. A query that sees no key gives 0.

    Raises:
        ValueError: ridge <= 0, heads that do not divide, a mask that is not a padding mask.

    Cost:
        O(B H T S D^2) time; the D x D moments of 64 queries at a time are held, in float64, and recomputed backward.

    Source:
        Cubit (arXiv:2605.06501), App. E; eps there is `ridge`.

    >>> k = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)  # values on a line are continued along it
    >>> local_linear_attention(k, k, 2 * k, ridge=1e-9, scale=0.0).flatten().round(decimals=3).tolist()
    [2.0, 4.0, 6.0]
    """
    with full_precision(q.device):
        q_, k_, v_ = _prepare(q, k, v, mask, segments)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        penalty = torch.as_tensor(ridge, device=q.device, dtype=torch.float64)
        if not (torch.compiler.is_compiling() or penalty.is_meta) and not bool((penalty > 0).all()):
            raise ValueError(f"ridge ({float(penalty.detach().min())}) must be positive: the slopes need a penalty")
        refuse_tangents(q_, k_, v_, penalty)
        return _fit(q_, k_, v_, penalty, mask, segments, causal, factor).to(v.dtype)


class _Pieces:
    """The queries and heads worked on together, their weights, and the solver of their moment matrices.

    Float64 throughout: the moments cancel to rounding where keys are large and alike.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        ridge: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        causal: bool,
        factor: float,
    ):
        self.q, self.k, self.ridge, self.factor = q.double(), k.double(), ridge, factor
        self.mask, self.segments, self.causal = mask, segments, causal

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        for batch in range(self.q.shape[0]):
            for start in range(0, self.q.shape[2], _ROWS):
                yield batch, slice(start, min(start + _ROWS, self.q.shape[2]))

    def weights(self, batch: int, rows: slice) -> Float[Tensor, "H c S"]:
        scores = self.factor * self.q[batch, :, rows] @ self.k[batch].mT
        return softmax_rows(scores[None], self.allowed(batch, rows))[0]

    def allowed(self, batch: int, rows: slice) -> Bool[Tensor, "1 c S"]:
        """Which keys the queries `rows` of one batch row see."""
        size, length = rows.stop - rows.start, self.k.shape[2]
        end = length - self.q.shape[2] + rows.stop if self.causal else length
        mask, segments = (None if t is None else t[batch : batch + 1] for t in (self.mask, self.segments))
        causal = visible(size, end, self.k.device, causal=self.causal)
        seen = torch.nn.functional.pad(causal, (0, length - end))
        if mask is not None:
            seen = seen & mask[:, None]
        if segments is not None:
            own = segments[:, length - self.q.shape[2] :][:, rows]
            seen = seen & (own[..., None] == segments[:, None])
        return seen

    def moments(self, batch: int, w: Float[Tensor, "H c S"]) -> tuple[Float[Tensor, "H c D"], Float[Tensor, "H c D D"]]:
        """Return kbar_i and C_i, a tile of keys at a time."""
        k = self.k[batch]
        heads, _, width = k.shape
        tile = max(1, (_TILE_ELEMENTS if k.device.type == "cpu" else 32 * _TILE_ELEMENTS) // (heads * width * width))
        mean = w @ k
        total = w.new_zeros(heads, w.shape[1], width * width)
        for k_tile, w_tile in zip(k.split(tile, 1), w.split(tile, 2), strict=True):
            total.baddbmm_(w_tile, (k_tile[..., :, None] * k_tile[..., None, :]).flatten(-2))
        spread = total.unflatten(-1, (width, width)).sub_(mean[..., :, None] * mean[..., None, :])
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return mean, spread


def _normal_solve(
    spread: Float[Tensor, "H c D D"], mean: Float[Tensor, "H c D"], right: Float[Tensor, "H c E"]
) -> Float[Tensor, "H c E"]:
    """Solve H_i y = right_i, E = 1 + D, where H_i = [[1, kbar'], [kbar, C + kbar kbar']]."""
    slope = torch.linalg.solve(spread, (right[..., 1:] - mean * right[..., :1])[..., None])[..., 0]
    return torch.cat([right[..., :1] - (mean * slope).sum(-1, keepdim=True), slope], -1)


def _with_one(x: Float[Tensor, "H T D"]) -> Float[Tensor, "H T E"]:
    return torch.cat([torch.ones_like(x[..., :1]), x], -1)


@torch.library.custom_op(
    "mercer::local_linear",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor ridge, Tensor? mask, Tensor? segments, bool causal, float factor) "
    "-> Tensor",
)
def _fit(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H S D"],
    v: Float[Tensor, "B H S Dv"],
    ridge: Float[Tensor, ""],
    mask: Bool[Tensor, "B S"] | None,
    segments: Int[Tensor, "B S"] | None,
    causal: bool,
    factor: float,
) -> Float[Tensor, "B H T Dv"]:
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    with full_precision(q.device):
        pieces = _Pieces(q, k, ridge, mask, segments, causal, factor)
        for batch, rows in pieces:
            w = pieces.weights(batch, rows)
            mean, spread = pieces.moments(batch, w)
            a = _normal_solve(spread, mean, _with_one(pieces.q[batch, :, rows]))
            o[batch, :, rows] = (w * (a @ _with_one(pieces.k[batch]).mT)) @ v[batch].double()
    return o


@_fit.register_fake
def _(q, k, v, ridge, mask, segments, causal, factor):
    return v.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op(
    "mercer::local_linear_backward",
    mutates_args=(),
    schema="(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor ridge, Tensor? mask, Tensor? segments, bool causal, "
    "float factor) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fit_backward(
    d_o: Float[Tensor, "B H T Dv"],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B H S D"],
    v: Float[Tensor, "B H S Dv"],
    ridge: Float[Tensor, ""],
    mask: Bool[Tensor, "B S"] | None,
    segments: Int[Tensor, "B S"] | None,
    causal: bool,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, ridge, from o_i = sum_j W_ij (a_i . m_j) v_j with a_i = H_i^-1 [1, q_i], m_j = [1, k_j].

    With z_ij = do_i . v_j and b_i = H_i^-1 sum_j W_ij z_ij m_j: dW_ij = (z_ij - b_i . m_j)(a_i . m_j),
    dm_j = sum_i W_ij ((z_ij - b_i . m_j) a_i - (a_i . m_j) b_i), d[1, q_i] = b_i, dridge = -sum_i b_i1.. . a_i1.. .
    """
    d_q, d_k, d_v = (torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v))
    d_ridge = torch.zeros_like(ridge)
    with full_precision(q.device):
        pieces = _Pieces(q, k, ridge, mask, segments, causal, factor)
        for batch, rows in pieces:
            w = pieces.weights(batch, rows)
            mean, spread = pieces.moments(batch, w)
            m, values, d_out = _with_one(pieces.k[batch]), v[batch].double(), d_o[batch, :, rows].double()
            a = _normal_solve(spread, mean, _with_one(pieces.q[batch, :, rows]))
            tilt, z = a @ m.mT, d_out @ values.mT
            b = _normal_solve(spread, mean, (w * z) @ m)
            rest = z - b @ m.mT
            d_scores = torch.ops.aten._softmax_backward_data(rest * tilt, w, -1, w.dtype) * factor
            d_v[batch] += (w * tilt).mT @ d_out
            d_q[batch, :, rows] = b[..., 1:] + d_scores @ pieces.k[batch]
            d_k[batch] += d_scores.mT @ pieces.q[batch, :, rows]
            d_k[batch] += (w * rest).mT @ a[..., 1:] - (w * tilt).mT @ b[..., 1:]
            d_ridge -= (b[..., 1:] * a[..., 1:]).sum()
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_ridge


@_fit_backward.register_fake
def _(d_o, q, k, v, ridge, mask, segments, causal, factor):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, ridge))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.causal, ctx.factor = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_o):
    return *_fit_backward(d_o, *ctx.saved_tensors, ctx.causal, ctx.factor), None, None, None, None


_fit.register_autograd(_backward, setup_context=_save)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the boundary and bring everything to one dtype and H heads."""
    check_heads(q.shape[1], q=q, k=k, v=v)
    if k.shape[2] != v.shape[2] or k.shape[2] < q.shape[2]:
        raise ValueError(
            f"q, k, v have {q.shape[2]}, {k.shape[2]}, {v.shape[2]} positions; k and v must match and cover q"
        )
    check_mask(mask, k.shape[0], k.shape[2])
    check_segments(segments, k.shape[0], k.shape[2])
    dtype, heads = compute_dtype(q, k, v), q.shape[1]
    q = zero_padding(q.to(dtype), mask, rows=True)
    k, v = (repeat_heads(zero_padding(t.to(dtype), mask), heads) for t in (k, v))
    return q, k, v
