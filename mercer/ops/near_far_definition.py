"""The quadratic definition of attention that is exact near by, one document after another, and its state."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import check_heads, check_mask, check_segments, compute_dtype, full_precision, repeat_heads
from mercer.ops.factored import LogFeatures, dense
from mercer.ops.linear import LinearState
from mercer.ops.linear_chunks import FLOOR
from mercer.ops.linear_definition import Sums

Features = Callable[[Tensor], LogFeatures]


@dataclass(frozen=True)
class NearFarState:
    """What attention that is exact near by remembers of the current document: its size does not depend on the length.

    Attributes:
        k_window: keys of the last `window` real tokens, the last one last; zeros where there are fewer.
        v_window: their values.
        k_sinks: keys of the first `sinks` real tokens; zeros where there are fewer.
        v_sinks: their values.
        far: sums over the tokens that have left the window; None without features.
        seen: how many real tokens the document has so far.
        segment: the document; 0 where no segments were given.
    """

    k_window: Float[Tensor, "B Hk W D"]
    v_window: Float[Tensor, "B Hk W Dv"]
    k_sinks: Float[Tensor, "B Hk S D"]
    v_sinks: Float[Tensor, "B Hk S Dv"]
    far: LinearState | None
    seen: Int[Tensor, " B"]
    segment: Int[Tensor, " B"]


def past_of(state: NearFarState | None, k: Tensor, v: Tensor, window: int, sinks: int) -> NearFarState:
    """Return a state, or that before any token."""
    if state is not None:
        return state
    empty = (x.new_zeros(*x.shape[:2], size, x.shape[3]) for size in (window, sinks) for x in (k, v))
    k_window, v_window, k_sinks, v_sinks = empty
    none = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
    return NearFarState(k_window, v_window, k_sinks, v_sinks, far=None, seen=none, segment=none)


def near_far_attention_naive(
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
) -> tuple[Float[Tensor, "B H T Dv"], NearFarState]:
    """Average values with exact weights near by and feature-space weights far away, by their definition.

    `w_ij = exp(scale q_i.k_j)` if `i - j < window` or `j < sinks`, else `w_ij = sum_f exp(log phi(q_i)_f + log
    psi(k_j)_f)`, for j <= i of the same document, and `o_i = sum_j w_ij v_j / sum_j w_ij`. Documents are worked one
    by one, padding taken out. Quadratic in time and memory, differentiable by autograd to any order. Arguments, returns
    and errors are those of `near_far_attention`.

    Cost: O(B H T^2 m) time and memory.

    >>> q = torch.zeros(1, 1, 4, 2)
    >>> near_far_attention_naive(q, q, torch.arange(4.0).view(1, 1, 4, 1), window=2)[0].flatten()
    tensor([0.0000, 0.5000, 1.5000, 2.5000])
    """
    features = None if q_features is None or k_features is None else (q_features, k_features)
    check_near_far(q, k, v, (q_features, k_features), (window, sinks), mask=mask, segments=segments, state=state)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    definition = _Definition(features, window, sinks, factor, compute_dtype(q, k, v))
    outs, states = [], []
    with full_precision(q.device):
        for row in range(q.shape[0]):
            cut = slice(row, row + 1)
            past = _row_of(past_of(state, k, v, window, sinks), cut)
            real = torch.arange(q.shape[2], device=q.device) if mask is None else mask[row].nonzero()[:, 0]
            o = v.new_zeros(1, q.shape[1], q.shape[2], v.shape[3], dtype=definition.dtype)
            for segment, tokens in _documents(real, None if segments is None else segments[row]):
                if segment is not None and segment != int(past.segment):
                    past = _forget(past_of(None, k[cut], v[cut], window, sinks), past, segment)
                q_, k_, v_ = (x[cut][:, :, tokens] for x in (q, k, v))
                out, past = definition.continue_document(q_, k_, v_, past)
                o = o.index_copy(2, tokens, out)
            outs.append(o)
            states.append(past)
        empty = features and Sums.of(None, dense(features[1](k[:1, :, :1])), v[:1], q)
    return torch.cat(outs).to(v.dtype), _stack(states, empty)


def _documents(real: Tensor, segments: Tensor | None):
    """Yield the runs of equal segments among the real tokens."""
    if not len(real):
        return
    if segments is None:
        yield None, real
        return
    ids, lengths = segments[real].unique_consecutive(return_counts=True)
    yield from zip(ids.tolist(), real.split(lengths.tolist()), strict=True)


_TOKENS = ("k_window", "v_window", "k_sinks", "v_sinks")


def _row_of(state: NearFarState, row: slice) -> NearFarState:
    far = state.far and LinearState(sums=state.far.sums[row], c=state.far.c[row], segment=state.far.segment[row])
    tokens = {name: getattr(state, name)[row] for name in _TOKENS}
    return replace(state, **tokens, far=far, seen=state.seen[row], segment=state.segment[row])


def _forget(empty: NearFarState, past: NearFarState, segment: int) -> NearFarState:
    """Return the state at the start of a document."""
    far = past.far and replace(past.far, sums=past.far.sums * 0, c=torch.full_like(past.far.c, FLOOR))
    return replace(empty, far=far, segment=torch.full_like(past.segment, segment))


def _stack(states: list[NearFarState], empty: Sums | None) -> NearFarState:
    """Put rows together; `empty` are the sums of those that had no token yet."""
    tokens = {name: torch.cat([getattr(s, name) for s in states]) for name in (*_TOKENS, "seen", "segment")}
    fars = [s.far or empty for s in states]
    far = {name: torch.cat([getattr(f, name) for f in fars]) for name in ("sums", "c", "segment") if empty is not None}
    return NearFarState(**tokens, far=LinearState(**far) if far else None)


@dataclass(frozen=True)
class _Definition:
    features: tuple[Features, Features] | None
    window: int
    sinks: int
    scale: float
    dtype: torch.dtype

    def continue_document(
        self, q: Tensor, k: Tensor, v: Tensor, past: NearFarState
    ) -> tuple[Float[Tensor, "1 H T Dv"], NearFarState]:
        """Return the averages of new tokens of a document, none of them padding, and the state after them."""
        seen, heads = int(past.seen), q.shape[1]
        held, kept = min(self.window, seen), min(self.sinks, max(seen - self.window, 0))
        keys = torch.cat([past.k_sinks[:, :, :kept], past.k_window[:, :, self.window - held :], k], 2)
        values = torch.cat([past.v_sinks[:, :, :kept], past.v_window[:, :, self.window - held :], v], 2)
        after = seen + k.shape[2]
        cols = torch.cat([torch.arange(kept), torch.arange(seen - held, after)]).to(q.device)
        back = torch.arange(seen, after, device=q.device)[:, None] - cols
        near = (back >= 0) & ((back < self.window) | (cols < self.sinks))
        logits = self.scale * q.to(self.dtype) @ repeat_heads(keys.to(self.dtype), heads).mT
        logits = logits.masked_fill(~near, -math.inf)
        values_ = repeat_heads(_with_ones(values.to(self.dtype)), heads)
        if self.features is None:
            out, sums = logits.softmax(-1) @ values_, None
        else:
            log_q, log_k = (dense(f(x)).to(self.dtype) for f, x in zip(self.features, (q, keys), strict=True))
            sums = Sums.of(past.far, log_k, v)
            pairs = log_q[..., :, None, :] + repeat_heads(log_k, heads)[..., None, :, :]
            logits = torch.where((back >= 0) & ~near, torch.logsumexp(pairs, -1), logits)
            before = log_q + repeat_heads(sums.c, heads)[:, :, None]
            logits = torch.cat([logits, before], -1)
            weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
            out = weights @ torch.cat([values_, repeat_heads(sums.sums, heads)], 2)
            left = (cols >= max(self.sinks, seen - self.window)) & (cols < after - self.window)
            sums = self._let_in(sums, log_k[:, :, left], values[:, :, left])
        return out[..., :-1] / out[..., -1:], self._state(keys, values, cols, after, replace(past, far=sums))

    def _let_in(self, sums: Sums, log_k: Tensor, values: Tensor) -> LinearState:
        """Add the keys that have left the window."""
        c = torch.cat([sums.c[:, :, None], log_k], 2).amax(2).detach()
        new = torch.exp(log_k - c[:, :, None]).mT @ _with_ones(values.to(self.dtype))
        return LinearState(sums=torch.exp(sums.c - c)[..., None] * sums.sums + new, c=c, segment=sums.segment)

    def _state(self, keys: Tensor, values: Tensor, cols: Tensor, after: int, past: NearFarState) -> NearFarState:
        """Keep the last tokens, right-aligned, and the first ones."""
        last, first = cols >= after - self.window, cols < self.sinks
        windows, heads = ([x[:, :, chosen] for x in (keys, values)] for chosen in (last, first))
        k_window, v_window = (F.pad(x, (0, 0, self.window - x.shape[2], 0)) for x in windows)
        k_sinks, v_sinks = (F.pad(x, (0, 0, 0, self.sinks - x.shape[2])) for x in heads)
        seen = torch.full_like(past.seen, after)
        return replace(past, k_window=k_window, v_window=v_window, k_sinks=k_sinks, v_sinks=v_sinks, seen=seen)


def _with_ones(values: Float[Tensor, "B H T Dv"]) -> Float[Tensor, "B H T W"]:
    return torch.cat([values, torch.ones_like(values[..., :1])], -1)


def check_near_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: tuple[Features | None, Features | None],
    sizes: tuple[int, int],
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    state: NearFarState | None,
    chunk: int = 1,
) -> None:
    """Refuse sizes and shapes that do not fit together."""
    window, sinks = sizes
    check_heads(q.shape[1], q=q, k=k, v=v)
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be of the same tokens, q and k of one "
            "width, k and v of the same heads: pass the past as state"
        )
    if (features[0] is None) != (features[1] is None):
        raise ValueError("q_features and k_features come together; pass both, or neither for the window alone")
    for name, size, least in (
        ("window", window, int(features[0] is None)),
        ("sinks", sinks, 0),
        ("chunk_size", chunk, 1),
    ):
        if size < least:
            why = ": without features a token must see itself" if name == "window" else ""
            raise ValueError(f"{name} ({size}) must be at least {least}{why}")
    check_mask(mask, k.shape[0], k.shape[2])
    check_segments(segments, k.shape[0], k.shape[2])
    if state is None:
        return
    have = (*state.k_window.shape, *state.k_sinks.shape[2:3], state.v_window.shape[3])
    need = (*k.shape[:2], window, k.shape[3], sinks, v.shape[3])
    if have != need or (state.far is None) != (features[0] is None):
        raise ValueError(
            f"state is of (batch, heads, window, width, sinks, width of values) {have}, "
            f"{'without' if state.far is None else 'with'} a far field; these inputs need {need}, "
            f"{'without' if features[0] is None else 'with'} one"
        )
