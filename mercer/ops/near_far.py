"""Attention that is exact near by and through features far away: the definition, and the same in linear time."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import any_grad, compute_dtype, full_precision, refuse_tangents, zero_padding
from mercer.ops.factored import LogFeatures, offset_of, outline
from mercer.ops.linear import LinearState, log_arguments
from mercer.ops.linear_chunks import FLOOR, document_ids, num_threads
from mercer.ops.linear_definition import Sums
from mercer.ops.linear_passes import linear_attention_op
from mercer.ops.near_far_blocks import block_length, near_attention_op
from mercer.ops.near_far_definition import Features, NearFarState, check_near_far, past_of
from mercer.ops.near_far_layout import Layout, gather_sinks, take_last
from mercer.ops.near_far_step import near_far_step


def near_far_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hk T D"],
    v: Float[Tensor, "B Hk T Dv"],
    q_features: Features | None = None,
    k_features: Features | None = None,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    segments: Int[Tensor, "B T"] | None = None,
    state: NearFarState | None = None,
    chunk_size: int = 128,
) -> tuple[Float[Tensor, "B H T Dv"], NearFarState]:
    """Average values with exact weights near by and feature-space weights far away, under one normaliser.

    `o_i = sum_j w_ij v_j / sum_j w_ij` over j <= i, with `w_ij = exp(scale q_i.k_j)` if `i - j < window` or
    `j < sinks`, else `w_ij = sum_f exp(log phi(q_i)_f + log psi(k_j)_f)`. i and j count the real tokens of a document.
    Equal to `near_far_attention_naive`. Features that estimate the exponential make this softmax attention whose
    error comes from far keys alone. The far field is linear attention to keys that arrive `window` tokens late; the two
    parts, each normalised, are averaged by the logs of their weights, so nothing under- or overflows.

    Args:
        q: queries, H a multiple of Hk.
        k: keys.
        v: values.
        q_features: log phi, from queries [B, H, N, D] to [B, H, N, m], `Factored` or not, token by token; it includes
            any scale. None: near keys alone.
        k_features: log psi, from keys [B, Hk, N, D] to [B, Hk, N, m]. It is asked for the keys that leave the window,
            so the state need not hold the features of those inside.
        window: how many keys, the query's own included, are exact. At least 1 without features.
        sinks: how many keys at the start of a document are exact for good.
        scale: factor on the logits of exact keys; D^(-1/2) by default.
        mask: True = real token, over the new tokens; padded tokens are seen by none, and give 0.
        segments: equal = same packed document; a document is one run of tokens. Continues the state's if it starts so.
        state: what an earlier call returned.
        chunk_size: tokens worked together in the far field.

    Returns:
        The averages, in the dtype of v, and the state after the last token: sums over what has left the window, keys
        and values of the window and of the sinks.

    Raises:
        ValueError: shapes do not fit together, or a segment comes back after another one.

    Cost: O(B H T ((window + sinks) (D + Dv) + m (Dv + chunk_size))) time, O(B H T (D + Dv + m Dv / chunk_size)) memory
    with m more a token where features are not `Factored`. The backward passes are written by hand and cannot themselves
    be differentiated.

    Source: ours; for far keys Performer (arXiv:2009.14794) or DARKFormer (arXiv:2603.04127).

    >>> import torch
    >>> q = torch.zeros(1, 1, 4, 2)  # equal weights: means of the two last values
    >>> near_far_attention(q, q, torch.arange(4.0).view(1, 1, 4, 1), window=2)[0].flatten()
    tensor([0.0000, 0.5000, 1.5000, 2.5000])
    """
    check_near_far(
        q, k, v, (q_features, k_features), (window, sinks), mask=mask, segments=segments, state=state, chunk=chunk_size
    )
    past = past_of(state, k, v, window, sinks)
    if not q.shape[2]:
        if state is not None:
            return v.new_zeros(*q.shape[:3], v.shape[3]), state
        mask = segments = None  # there is no last document
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(q.device):
        if q.shape[2] == 1 and state is not None and window:
            features = None if q_features is None or k_features is None else (q_features, k_features)
            return near_far_step(q, k, v, features, factor, mask, segments, state)
        layout = Layout.of(q.shape[2], mask, segments, past.seen, past.segment)
        q, k, v = (layout.compact(zero_padding(x, mask)) for x in (q, k, v))
        known = [
            torch.cat([old.to(new.dtype), inside.to(new.dtype), new], 2)
            for old, inside, new in ((past.k_sinks, past.k_window, k), (past.v_sinks, past.v_window, v))
        ]
        o, log_near = _near(q, known, layout, window, sinks, factor)
        far = past.far
        if q_features is not None and k_features is not None:
            lead, all_far = 0, False  # rows before `lead` have no key far from them
            if state is None and mask is None and segments is None:
                lead = min(window + sinks, max(q.shape[2] - 1, 0))
                all_far = lead == window + sinks
            rows = None if all_far else layout.far_rows(window + sinks)[:, lead:]
            keys = [x[:, :, sinks + lead : sinks + q.shape[2]] for x in known]
            log_q, log_k = q_features(q[:, :, lead:]), k_features(keys[0])
            o_far, log_far, far = _far(log_q, log_k, keys[1], rows, layout.run, past.far, chunk_size)
            share = torch.sigmoid(log_near[:, :, lead:] - log_far)
            mixed = torch.lerp(o_far.to(o.dtype), o[:, :, lead:], share.to(o.dtype))
            o = torch.cat([o[:, :, :lead], mixed], 2) if lead else mixed
        o = zero_padding(layout.spread(o.to(v.dtype)), mask)
        return o, _state_after(known, layout, far, window, sinks)


def _near(
    q: Tensor, known: list[Tensor], layout: Layout, window: int, sinks: int, scale: float
) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B H T 1"]]:
    """Attend to the window and the sinks: the averages and the logs of their weights."""
    length, dtype = q.shape[2], compute_dtype(q, *known)
    start = torch.where(layout.real, layout.start, length)
    first = start[:, :: block_length(q.device)]
    columns = [gather_sinks(x, first, window, sinks).to(dtype) for x in known]
    k, v = (x[:, :, sinks:].to(dtype) for x in known)
    refuse_tangents(q, k, v)
    return near_attention_op(q.to(dtype), k, v, *columns, start, window, sinks, scale)


def _far(
    log_q: LogFeatures,
    log_k: LogFeatures,
    v: Tensor,
    rows: Bool[Tensor, "B T"] | None,
    run: Int[Tensor, "B T"] | None,
    past: LinearState | None,
    chunk_size: int,
) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B H T 1"], LinearState]:
    """Attend to keys that have left the window, each given beside the row it has just become far from.

    Where that key does not count, because it is of another document or a sink, the row sees none at all: it stands too
    near to the start of its document. So one mask, `rows`, serves both.
    """
    past_sums = Sums.of(past, outline(log_k), v, outline(log_q))
    entering = torch.zeros_like(past_sums.segment)  # documents are numbered anew in each call
    documents = None if run is None or rows is None else document_ids(rows, run, entering)
    *logs, square, constant = log_arguments(log_q, log_k, v, past_sums, rows)
    refuse_tangents(*logs, v)
    o, _, sums, c, log_total, *_ = linear_attention_op(
        *logs, v, past_sums.sums, past_sums.c, rows, documents, entering, square, constant, True, chunk_size,
        num_threads(), any_grad(*logs, v, past_sums.sums),
    )  # fmt: skip
    row_offset = offset_of(log_q, log_total.dtype)  # which the operator left out
    if row_offset is not None:
        log_total = log_total + row_offset[..., None]
    if documents is not None and run is not None:  # sums of a document that has ended are forgotten
        ended = (documents[:, -1] != run[:, -1])[:, None, None]
        sums, c = sums.masked_fill(ended[..., None], 0), c.masked_fill(ended, FLOOR)
    return o, log_total, LinearState(sums=sums, c=c, segment=entering)


def _state_after(known: list[Tensor], layout: Layout, far: LinearState | None, window: int, sinks: int) -> NearFarState:
    """Keep the last tokens and the first ones of the last document; zeros for those it does not have yet."""
    slots, device = layout.seen[:, None], layout.seen.device
    first = (layout.count - layout.seen)[:, None]
    no_key = torch.arange(window, device=device) < window - slots
    no_sink = torch.arange(sinks, device=device) >= slots
    k_window, v_window = (zero_padding(take_last(x, layout, sinks, window), ~no_key) for x in known)
    k_sinks, v_sinks = (zero_padding(gather_sinks(x, first, window, sinks), ~no_sink) for x in known)
    return NearFarState(
        k_window=k_window, v_window=v_window, k_sinks=k_sinks, v_sinks=v_sinks,
        far=far, seen=layout.seen, segment=layout.segment,
    )  # fmt: skip
