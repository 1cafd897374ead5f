"""Decoding one token in feature space: the same values as the chunked operators give, in few calls.

With a single new token nothing has to be cut into pieces or planned; autograd does the rest.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.linear_chunks import FLOOR
from mercer.ops.linear_definition import Sums


def attention_step(
    log_q: Float[Tensor, "B H 1 m"],
    log_k: Float[Tensor, "B Hk 1 m"],
    v: Float[Tensor, "B Hk 1 Dv"],
    mask: Bool[Tensor, "B 1"] | None,
    segments: Int[Tensor, "B 1"] | None,
    past: Sums,
) -> tuple[Float[Tensor, "B H 1 Dv"], Sums]:
    """Do what `linear_attention` does, for one token. Cost: O(B H m Dv) time."""
    past = of_document(past, segments, mask)
    after = let_in(log_k, v, None if mask is None else ~mask[..., None], past)
    weights = row_weights(log_q.reshape(*log_k.shape[:2], -1, log_k.shape[3]), after.c)
    out = torch.matmul(weights, after.sums)
    o = _divided(out[..., :-1], out[..., -1:]).reshape(*log_q.shape[:3], v.shape[3])
    return o if mask is None else o.masked_fill(~mask[:, None, :, None], 0), after


def solve_step(
    log_rows: Float[Tensor, "B H 1 m"],
    log_cols: Float[Tensor, "B H 1 m"],
    rhs: Float[Tensor, "B H 1 Dv"],
    ridge: Float[Tensor, "B H 1"],
    mask: Bool[Tensor, "B 1"] | None,
    segments: Int[Tensor, "B 1"] | None,
    past: Sums,
) -> tuple[Float[Tensor, "B H 1 Dv"], Sums]:
    """Do what `linear_kernel_solve` does, for one token: u = (rhs - phi(row)' S / n) / (P_tt + ridge).

    Right-hand sides are 0 and ridges 1 where padded. Cost: O(B H m Dv) time.
    """
    past = of_document(past, segments, mask)
    sums, weight, c = _rescaled(log_cols, None if mask is None else ~mask[..., None], past)
    weights = row_weights(log_rows, c)
    far, near = torch.matmul(weights, sums), torch.matmul(weights, weight[..., None])
    total = far[..., -1:] + near
    u = (rhs - _divided(far[..., :-1], total)) / (_divided(near, total) + ridge[..., None])
    u = u if mask is None else u.masked_fill(~mask[:, None, :, None], 0)
    return u, Sums(sums=_with(sums, weight, u), c=c, segment=past.segment)


def row_weights(log_rows: Float[Tensor, "B H G m"], c: Float[Tensor, "B H m"]) -> Float[Tensor, "B H G m"]:
    """Return what a row counts sums at scale c with, up to a factor."""
    return (log_rows + c[:, :, None]).softmax(-1)


def let_in(
    log_k: Float[Tensor, "B Hk 1 m"],
    v: Float[Tensor, "B Hk 1 Dv"],
    stays: Bool[Tensor, "B 1 1"] | None,
    past: Sums,
) -> Sums:
    """Return the sums with one more key, except where it stays outside."""
    sums, weight, c = _rescaled(log_k, stays, past)
    return Sums(sums=_with(sums, weight, v), c=c, segment=past.segment)


def of_document(past: Sums, segments: Int[Tensor, "B 1"] | None, mask: Bool[Tensor, "B 1"] | None) -> Sums:
    """Return the sums that a token continues: none where it begins a document."""
    if segments is None:
        return past
    document = segments[:, 0].to(past.segment.dtype)
    begins = document != past.segment
    if mask is not None:
        begins = begins & mask[:, 0]
    sums, c = past.sums.masked_fill(begins[:, None, None, None], 0), past.c.masked_fill(begins[:, None, None], FLOOR)
    return Sums(sums=sums, c=c, segment=torch.where(begins, document, past.segment))


def _rescaled(
    log_k: Float[Tensor, "B H 1 m"], stays: Bool[Tensor, "B 1 1"] | None, past: Sums
) -> tuple[Float[Tensor, "B H m W"], Float[Tensor, "B H m"], Float[Tensor, "B H m"]]:
    """Return the sums at a scale that holds the key too, the weights of its features, and that scale."""
    log_k = log_k.to(past.sums.dtype).squeeze(2)
    if stays is not None:
        log_k = log_k.masked_fill(stays, float("-inf"))
    c = torch.maximum(past.c, log_k.detach())
    return past.sums * torch.exp(past.c - c)[..., None], torch.exp(log_k - c), c


def _with(sums: Tensor, weight: Tensor, v: Float[Tensor, "B H 1 Dv"]) -> Float[Tensor, "B H m W"]:
    return torch.addcmul(sums, weight[..., None], F.pad(v.to(sums.dtype), (0, 1), value=1.0))


def _divided(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, and 0 where the total is."""
    return x / total.masked_fill(total == 0, 1)
