"""Random attention: softmax of scores that depend on positions alone; what a mixer must beat."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mercer import ops
from mercer.mixers.base import Marks, Mixer, append, refuse_state
from mercer.mixers.softmax import KeyValueState

_WAVES = 16


class Random(Mixer):
    """o = softmax(S) v with fixed random scores S_ij of unit variance, whatever q and k are.

    S_ij = 2 / sqrt(16) sum_w cos(f_w i + a_w) cos(g_w j + b_w) with random frequencies and phases a head: random scores
    for any length without a table. i and j count the real tokens of a document.

    Args:
        seed: of the frequencies and phases, which are saved with the weights.
        **sizes: see `Mixer`.

    Source:
        DARKFormer (arXiv:2603.04127), baselines.

    >>> mixer = Random(num_heads=2, head_dim=4)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    waves: Float[Tensor, "2 2 H W"]  # (query or key, frequency or phase, head, wave)

    def __init__(self, *, seed: int = 0, **sizes: Any):
        super().__init__(**sizes)
        self.seed = seed
        self.register_buffer("waves", self.initial_values()["waves"].to(torch.get_default_device()))

    def initial_values(self):
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (2, 2, self.num_kv_heads, _WAVES)
        waves = 2 * math.pi * torch.rand(shape, generator=generator, device="cpu")
        return {"waves": waves.bfloat16().float()}  # the same scores whatever precision the model is cast to

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: KeyValueState | None = None):
        refuse_state(self, state)
        seen, marks = (0, Marks()) if state is None else (state.k.shape[2], state.marks)
        marks = marks.extend(seen, q.shape[2], mask, segments)
        position = _positions(seen, q.shape[2], marks, q.device)
        k = append(state and state.k, self._wave(1, position, v))
        v = append(state and state.v, v)
        o = ops.softmax_attention(
            ops.repeat_heads(self._wave(0, position, v), q.shape[1]), k, v,
            causal=self.causal, scale=2 / math.sqrt(_WAVES), mask=marks.mask, segments=marks.segments,
        )  # fmt: skip
        return o, KeyValueState(k, v, marks) if self.causal else None

    def _wave(self, side: int, position: Int[Tensor, "#B T"], like: Tensor) -> Float[Tensor, "B Hk T W"]:
        frequency, phase = self.waves[side].double()[..., None, :]
        wave = torch.cos(position.double()[:, None, :, None] * frequency + phase)
        return wave.to(torch.promote_types(like.dtype, torch.float32)).expand(like.shape[0], -1, -1, -1)


def _positions(seen: int, new: int, marks: Marks, device: torch.device) -> Int[Tensor, "#B T"]:
    """Count the real tokens of the same document before each new one."""
    if marks.segments is not None:
        return ops.visible(new, seen + new, device, mask=marks.mask, segments=marks.segments).sum(-1) - 1
    if marks.mask is not None:
        return marks.mask.cumsum(1)[:, seen:] - 1
    return torch.arange(seen, seen + new, device=device)[None]
