"""Window attention: the near field of the feature mixers, and nothing beyond; what a far field must beat."""

from typing import Any

from mercer import ops
from mercer.mixers.base import Mixer, marks_of_new, refuse_state


class Window(Mixer):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(scale q_i.k_j) over i - j < window and over j < sinks, j <= i.

    i and j count the real tokens of a document. The state is constant in the length.

    Args:
        window: keys a query sees, its own included.
        sinks: keys at the start of a document that are seen for good.
        **sizes: see `Mixer`; causal only.

    Raises:
        ValueError: a window below 1, `causal=False`, sizes that do not divide.

    Source:
        Sinks: StreamingLLM (arXiv:2309.17453); here positions stay what they were.

    >>> mixer = Window(num_heads=2, head_dim=4, window=3, sinks=1)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(self, *, window: int = 64, sinks: int = 4, **sizes: Any):
        super().__init__(**sizes)
        for name, size, least in (("window", window, 1), ("sinks", sinks, 0)):
            if size < least:
                raise ValueError(f"{name} ({size}) must be at least {least}")
        if not self.causal:
            raise ValueError("window counts back in time and has no bidirectional form: use causal=True")
        self.window, self.sinks = window, sinks

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.NearFarState | None = None):
        refuse_state(self, state)
        mask, segments = marks_of_new(q.shape[2], mask, segments, state)
        return ops.near_far_attention(
            q, k, v, window=self.window, sinks=self.sinks, scale=self.scale,
            mask=mask, segments=segments, state=state,
        )  # fmt: skip
