"""Cubit: kernel ridge regression in place of Nadaraya-Watson. Project, solve, smooth.

Fit the dual coefficients u of (P + ridge I) u = s v over the past, P the softmax kernel of the reference embedding r;
then predict o = A u with A ordinary softmax attention (arXiv:2605.06501, eqs. 6-13 and App. H).
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mercer import ops
from mercer.errors import NumericalWarning, unknown
from mercer.mixers.base import Marks, Mixer, Rotate, append, refuse_state

_MIN_NORM = 1e-6  # ours: the paper's listing divides by ||r|| as it is


@dataclass(frozen=True)
class CubitState:
    """What forward substitution reads again; rows are never revised, so u is final and v is not kept."""

    k: Float[Tensor, "B Hk S D"]
    r_unit: Float[Tensor, "B Hk S D"] | None  # None with share=True: it is gamma k / ||k||
    u: Float[Tensor, "B Hk S Dv"]
    marks: Marks


class Cubit(Mixer):
    """u = (P + exp(log_ridge) I)^-1 (s v), o = softmax(scale q k') u, with P_ij = softmax_j(r_i . gamma r_j / ||r_j||).

    s = lower + range sigmoid(W_s x) is the bounded rescale of the values (LRR). The system is one triangular solve, not
    one ridge regression a prefix. It lives at the key-value heads.

    Args:
        share: use r = k instead of a projection of its own.
        lrr: rescale the values; False gives s = 1.
        gamma: "raw" learns gamma as it is; "softplus" keeps it positive, which keeps the diagonal the row's maximum.
        ridge: start value of exp(log_ridge).
        **sizes: see `Mixer`.

    Raises:
        ValueError: an unknown `gamma`, a ridge that is not positive, sizes that do not divide.

    Warns:
        NumericalWarning: bidirectional with a ridge below 1e-3, which is raised to it.

    Source:
        Cubit (arXiv:2605.06501), App. H: beta, alpha there are rescale_lower, rescale_range; s-hat multiplies, as in
        the listing (eqs. 11-12 would divide).

    >>> mixer = Cubit(num_heads=2, head_dim=4, hidden_size=8)
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> o, state = mixer(q, k, v, x=torch.randn(1, 5, 8))
    """

    needs_x = True
    gamma: Float[Tensor, " Hk"]
    log_ridge: Float[Tensor, " Hk"]
    rescale_lower: Float[Tensor, " Hk"]
    rescale_range: Float[Tensor, " Hk"]

    def __init__(
        self,
        *,
        share: bool = False,
        lrr: bool = True,
        gamma: Literal["raw", "softplus"] = "raw",
        ridge: float = 1e-10,
        **sizes: Any,
    ):
        super().__init__(**sizes)
        if gamma not in ("raw", "softplus"):
            raise unknown("gamma", gamma, ["raw", "softplus"])
        if not ridge > 0:
            raise ValueError(f"ridge ({ridge}) must be positive; it is learned as exp(log_ridge)")
        if not self.causal and ridge < ops.BIDIRECTIONAL_RIDGE:
            warnings.warn(
                f"a bidirectional Cubit system is not always invertible: ridge {ridge:g} raised to "
                f"{ops.BIDIRECTIONAL_RIDGE:g}, its floor there",
                NumericalWarning,
                stacklevel=2,
            )
            ridge = ops.BIDIRECTIONAL_RIDGE
        self.share, self.lrr, self.gamma_form, self.ridge = share, lrr, gamma, ridge
        add_parameters(self, share=share, lrr=lrr)

    def initial_values(self):
        return start_values(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: CubitState | None = None):
        refuse_state(self, state)
        seen, marks = (0, Marks()) if state is None else (state.k.shape[2], state.marks)
        marks = marks.extend(seen, q.shape[2], mask, segments)
        k, v = (ops.zero_padding(t, marks.mask, rows=True) for t in (k, v))
        r, norm = reference(self, k, x, rotate)
        k = append(state and state.k, k)
        r_unit = r * (gamma(self, r.dtype) / norm)
        if self.share and state is not None:  # the past's r is its k
            past = state.k.to(r.dtype)
            r_unit = torch.cat([past * (gamma(self, r.dtype) / norm_of(past)), r_unit], 2)
        else:
            r_unit = append(state and state.r_unit, r_unit)
        u = ops.kernel_solve(
            r, r_unit, rescaled(self, v, x), ridge=self._ridge(r.dtype), causal=self.causal,
            mask=marks.mask, segments=marks.segments, past=state and state.u,
        )  # fmt: skip
        u = append(state and state.u, u)
        o = ops.softmax_attention(
            q, k, u, causal=self.causal, scale=self.scale, mask=marks.mask, segments=marks.segments
        )
        new_state = CubitState(k, None if self.share else r_unit, u, marks) if self.causal else None
        return o.to(v.dtype), new_state

    def _ridge(self, dtype: torch.dtype) -> Float[Tensor, " Hk"]:
        ridge = self.log_ridge.to(dtype).exp()
        return ridge if self.causal else ridge.clamp(min=ops.BIDIRECTIONAL_RIDGE)


# What the exact and the linear Cubit share: r, its norm, gamma and the rescaled values, from the parameters of either.


def add_parameters(mixer: Any, *, share: bool, lrr: bool) -> None:
    """Give a mixer its projections, and parameters for its initial values."""
    if not share:
        mixer.r_proj = nn.Linear(mixer.hidden_size, mixer.num_kv_heads * mixer.head_dim)
    if lrr:
        mixer.rescale_proj = nn.Linear(mixer.hidden_size, mixer.num_kv_heads)
    for name, value in mixer.initial_values().items():
        mixer.register_parameter(name, nn.Parameter(value.to(torch.get_default_device())))


def start_values(mixer: Any) -> dict[str, Tensor]:
    """Return where gamma, the ridge and the rescale start."""
    start = {
        "gamma": 1.0 if mixer.gamma_form == "raw" else math.log(math.e - 1),  # softplus(log(e - 1)) = 1
        "log_ridge": math.log(mixer.ridge),
    }
    if mixer.lrr:
        start |= {"rescale_lower": 0.5, "rescale_range": 1.5}
    return {name: torch.full((mixer.num_kv_heads,), value, device="cpu") for name, value in start.items()}


def reference(mixer: Any, k: Tensor, x: Tensor | None, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """Return r with positions and its norm without; in float32 at least, as u can grow with T."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    if mixer.share:
        return k.to(dtype), norm_of(k.to(dtype))
    r = mixer.r_proj(_required(x)).unflatten(-1, (mixer.num_kv_heads, mixer.head_dim)).transpose(1, 2).to(dtype)
    return (r if rotate is None else rotate(r)), norm_of(r)


def rescaled(mixer: Any, v: Tensor, x: Tensor | None) -> Float[Tensor, "B Hk T Dv"]:
    """Return s v with s = lower + range sigmoid(W_s x), or v without LRR; in float32 at least."""
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if not mixer.lrr:
        return v
    weight = mixer.rescale_proj(_required(x)).to(v.dtype).sigmoid()
    s = mixer.rescale_lower.to(v.dtype) + mixer.rescale_range.to(v.dtype) * weight
    return s.transpose(1, 2)[..., None] * v


def gamma(mixer: Any, dtype: torch.dtype) -> Float[Tensor, "Hk 1 1"]:
    """Return gamma, positive under its softplus form."""
    raw = mixer.gamma.to(dtype)
    return (F.softplus(raw) if mixer.gamma_form == "softplus" else raw)[:, None, None]


def norm_of(r: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T 1"]:
    """Return ||r||, at least 1e-6."""
    return torch.linalg.vector_norm(r, dim=-1, keepdim=True).clamp(min=_MIN_NORM)


def _required(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("cubit reads the hidden states: pass x= [batch, time, hidden_size]")
    return x
