"""DeltaFormer: the delta rule on softmax weights."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mercer import ops
from mercer.errors import unknown
from mercer.mixers.base import Marks, Mixer, append


@dataclass(frozen=True)
class DeltaFormerState:
    """Keys and the corrected values u of every position so far."""

    k: Float[Tensor, "B Hk S D"]
    u: Float[Tensor, "B H S Dv"]
    marks: Marks


class DeltaFormer(Mixer):
    """u_t = v_t - beta_t sum_{j<t} softmax_{j<t}(scale w_t . k_j) u_j, o = softmax(scale q k') u.

    beta = W_b x has no sigmoid. Every value is first corrected by what the past already says at w.

    Args:
        w: what reads the past: "q" (the queries), "k" (the keys) or "separate" (a projection of its own).
        **sizes: see `Mixer`; causal only.

    Raises:
        ValueError: an unknown `w`, `causal=False` (the delta rule is sequential), sizes that do not divide.

    Source:
        DeltaFormer (arXiv:2505.19488); "q" is the choice of its public implementation.

    >>> mixer = DeltaFormer(num_heads=2, head_dim=4, hidden_size=8)
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> o, state = mixer(q, k, v, x=torch.randn(1, 5, 8))
    """

    needs_x = True

    def __init__(self, *, w: Literal["q", "k", "separate"] = "q", **sizes: Any):
        super().__init__(**sizes)
        if w not in ("q", "k", "separate"):
            raise unknown("w", w, ["q", "k", "separate"])
        if not self.causal:
            raise ValueError("deltaformer corrects values in order and has no bidirectional form: use causal=True")
        assert self.hidden_size is not None  # needs_x
        self.w = w
        self.gate_proj = nn.Linear(self.hidden_size, self.num_heads)
        if w == "separate":
            self.w_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: DeltaFormerState | None = None):
        if x is None:
            raise ValueError("deltaformer reads the hidden states: pass x= [batch, time, hidden_size]")
        seen, marks = (0, Marks()) if state is None else (state.k.shape[2], state.marks)
        marks = marks.extend(seen, q.shape[2], mask, segments)
        w = {"q": q, "k": k}.get(self.w)
        if w is None:
            w = self.w_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            w = w if rotate is None else rotate(w)
        k = append(state and state.k, k)
        u = ops.kernel_solve(
            w, k, v.to(torch.promote_types(v.dtype, torch.float32)), ridge=1.0, gate=self.gate_proj(x).transpose(1, 2),
            strict=True, scale=self.scale, mask=marks.mask, segments=marks.segments, past=state and state.u,
        )  # fmt: skip
        u = append(state and state.u, u)
        o = ops.softmax_attention(q, k, u, scale=self.scale, mask=marks.mask, segments=marks.segments)
        return o.to(v.dtype), DeltaFormerState(k, u, marks)
