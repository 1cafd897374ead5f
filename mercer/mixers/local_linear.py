"""Local linear regression: a line instead of a constant around every query."""

from typing import Any

from mercer import ops
from mercer.mixers.base import Marks, Mixer, append, refuse_state
from mercer.mixers.softmax import KeyValueState


class LocalLinear(Mixer):
    """o_i = theta_i . [1, q_i], theta_i the ridge-penalised line fitted to (k, v) with weights softmax(scale q_i k').

    Args:
        ridge: penalty on the slopes; towards infinity this is softmax attention.
        **sizes: see `Mixer`.

    Raises:
        ValueError: a ridge that is not positive, sizes that do not divide.

    Source:
        Cubit (arXiv:2605.06501), App. E.

    >>> mixer = LocalLinear(num_heads=2, head_dim=4)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(self, *, ridge: float = 1.0, **sizes: Any):
        super().__init__(**sizes)
        if not ridge > 0:
            raise ValueError(f"ridge ({ridge}) must be positive: the slopes need a penalty")
        self.ridge = ridge

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: KeyValueState | None = None):
        refuse_state(self, state)
        seen, marks = (0, Marks()) if state is None else (state.k.shape[2], state.marks)
        marks = marks.extend(seen, q.shape[2], mask, segments)
        k, v = append(state and state.k, k), append(state and state.v, v)
        o = ops.local_linear_attention(
            q, k, v, ridge=self.ridge, causal=self.causal, scale=self.scale, mask=marks.mask, segments=marks.segments
        )
        return o, KeyValueState(k, v, marks) if self.causal else None
