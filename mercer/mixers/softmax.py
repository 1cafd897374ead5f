"""Softmax attention: the Nadaraya-Watson baseline."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mercer import ops
from mercer.mixers.base import Marks, Mixer, append, refuse_state


@dataclass(frozen=True)
class KeyValueState:
    """Keys and values of every position so far."""

    k: Float[Tensor, "B Hk S D"]
    v: Float[Tensor, "B Hk S Dv"]
    marks: Marks


class Softmax(Mixer):
    """o = softmax(scale q k') v, the exact kernel smoother every other mixer is compared with.

    Source:
        Vaswani et al. 2017, eq. (1).

    >>> mixer = Softmax(num_heads=2, head_dim=4)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: KeyValueState | None = None):
        refuse_state(self, state)
        seen, marks = (0, Marks()) if state is None else (state.k.shape[2], state.marks)
        marks = marks.extend(seen, q.shape[2], mask, segments)
        k, v = append(state and state.k, k), append(state and state.v, v)
        o = ops.softmax_attention(
            q, k, v, causal=self.causal, scale=self.scale, mask=marks.mask, segments=marks.segments
        )
        return o, KeyValueState(k, v, marks) if self.causal else None
