"""Constant attention: the plain average of the past values; what a learned mixer must beat."""

from mercer import ops
from mercer.mixers.base import Mixer, marks_of_new, refuse_state


class Constant(Mixer):
    """o_i = mean of v_j over j <= i: linear attention with one feature that is always 1.

    Source:
        DARKFormer (arXiv:2603.04127), baselines.

    >>> mixer = Constant(num_heads=1, head_dim=1)
    >>> q = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    >>> mixer(q, q, q)[0].flatten().tolist()
    [1.0, 1.5, 2.0]
    """

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.LinearState | None = None):
        refuse_state(self, state)
        mask, segments = marks_of_new(q.shape[2], mask, segments, state)
        ones = v.new_zeros(*v.shape[:3], 1)  # log phi = 0
        o, state = ops.linear_attention(ones, ones, v, causal=self.causal, mask=mask, segments=segments, state=state)
        return ops.repeat_heads(o, q.shape[1]), state if self.causal else None
