"""Decoding one token with attention that is exact near by: the same values as in general, in few calls.

With a single new token nothing has to be moved together, cut into blocks or planned. The exact keys and the features,
which stand for the far ones, are columns of one row, `[sinks, window, features]`, under one softmax; autograd does the
rest.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import compute_dtype, zero_padding
from mercer.ops.factored import dense
from mercer.ops.linear import LinearState
from mercer.ops.linear_chunks import FLOOR
from mercer.ops.linear_definition import Sums
from mercer.ops.linear_step import let_in
from mercer.ops.near_far_definition import Features, NearFarState


def near_far_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B Hk 1 D"],
    v: Float[Tensor, "B Hk 1 Dv"],
    features: tuple[Features, Features] | None,
    scale: float,
    mask: Bool[Tensor, "B 1"] | None,
    segments: Int[Tensor, "B 1"] | None,
    past: NearFarState,
) -> tuple[Float[Tensor, "B H 1 Dv"], NearFarState]:
    """Do what `near_far_attention` does, for one token after a past and a window of at least 1.

    Cost: O(B H ((window + sinks) (D + Dv) + m Dv)) time.
    """
    q, k, v = (zero_padding(x, mask) for x in (q, k, v))
    if segments is not None:
        past = _turn_over(past, segments, mask)
    window, sinks = past.k_window.shape[2], past.k_sinks.shape[2]
    dtype, position = compute_dtype(q, k, v), past.seen[:, None]
    grouped = (*k.shape[:2], -1)  # the query heads of a group below each other

    is_sink = (position == torch.arange(sinks, device=q.device))[:, None, :, None]
    keys = _append(past.k_sinks, past.k_window, k, is_sink)
    values = _append(past.v_sinks, past.v_window, v, is_sink)
    hidden = (position < _first_seen(window, sinks, q.device))[:, None, None]
    logits = torch.matmul(q.reshape(*grouped, q.shape[3]).to(dtype) * scale, keys.to(dtype).mT)
    logits.masked_fill_(hidden[..., :-1], float("-inf"))
    far = None
    if features is None:
        out = torch.matmul(logits.softmax(-1), values.to(dtype))
    else:
        k_leaving, v_leaving = past.k_window[:, :, :1].to(k.dtype), past.v_window[:, :, :1].to(v.dtype)
        stays = hidden[:, 0, :, -1:] if mask is None else hidden[:, 0, :, -1:] | ~mask[..., None]
        log_k = dense(features[1](k_leaving)).to(dtype)
        far = let_in(log_k, v_leaving, stays, Sums.of(past.far, log_k, v_leaving))
        far = LinearState(sums=far.sums, c=far.c, segment=far.segment)
        log_q = dense(features[0](q))
        log_q = log_q.reshape(*grouped, log_q.shape[3])
        weights = torch.cat([logits, log_q + far.c[:, :, None]], -1).softmax(-1)
        near, beyond = weights[..., : window + sinks], weights[..., window + sinks :]
        sums = torch.matmul(beyond, far.sums.to(weights.dtype))
        total = near.sum(-1, keepdim=True) + sums[..., -1:]
        out = (torch.matmul(near, values.to(weights.dtype)) + sums[..., :-1]) / total
    o = zero_padding(out.reshape(*q.shape[:3], v.shape[3]).to(v.dtype), mask)
    return o, _state_after(past, keys, values, far, mask)


def _append(
    sinks: Float[Tensor, "B Hk S d"],
    window: Float[Tensor, "B Hk W d"],
    new: Float[Tensor, "B Hk 1 d"],
    is_sink: Bool[Tensor, "B 1 S 1"],
) -> Float[Tensor, "B Hk C d"]:
    """Put the new token at the end of the window, whose first one leaves, and among the sinks where it is one."""
    sinks, window = sinks.to(new.dtype), window.to(new.dtype)
    return torch.cat([torch.where(is_sink, new, sinks), window[:, :, 1:], new], 2)


def _first_seen(window: int, sinks: int, device: torch.device) -> Int[Tensor, " C"]:
    """Return from which position on a row sees each of its columns, and, as a last one, a key enters the far field.

    The columns are the sinks, seen here once they have left the window, and the window.
    """
    late, near = (
        torch.arange(window, window + sinks + 1, device=device),
        torch.arange(window - 1, -1, -1, device=device),
    )
    return torch.cat([late[:-1], near, late[-1:]])


def _turn_over(past: NearFarState, segments: Tensor, mask: Tensor | None) -> NearFarState:
    """Return the state that the token continues: that at the start of a document, where it begins one."""
    document = segments[:, 0].to(past.segment.dtype)
    begins = document != past.segment
    if mask is not None:
        begins = begins & mask[:, 0]
    gone = begins[:, None, None, None]
    tokens = {name: getattr(past, name).masked_fill(gone, 0) for name in ("k_window", "v_window", "k_sinks", "v_sinks")}
    far = past.far and replace(
        past.far, sums=past.far.sums.masked_fill(gone, 0), c=past.far.c.masked_fill(gone[..., 0], FLOOR)
    )
    return replace(
        past, **tokens, far=far, seen=past.seen.masked_fill(begins, 0),
        segment=torch.where(begins, document, past.segment),
    )  # fmt: skip


def _state_after(
    past: NearFarState, keys: Tensor, values: Tensor, far: LinearState | None, mask: Tensor | None
) -> NearFarState:
    """Keep sinks and window: views of one tensor."""
    window, sinks = past.k_window.shape[2], past.k_sinks.shape[2]
    (k_sinks, k_window), (v_sinks, v_window) = (x.split([sinks, window], 2) for x in (keys, values))
    tokens = {"k_window": k_window, "v_window": v_window, "k_sinks": k_sinks, "v_sinks": v_sinks}
    if mask is None:
        return replace(past, **tokens, far=far, seen=past.seen + 1)
    real = mask[:, :, None, None]
    tokens = {name: torch.where(real, x, getattr(past, name).to(x.dtype)) for name, x in tokens.items()}
    return replace(past, **tokens, far=far, seen=past.seen + mask[:, 0])
