"""A drop-in attention module for anyone's own PyTorch model: projections and rotary positions around a mixer."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mercer.mixers import build_mixer


@dataclass(frozen=True)
class AttentionState:
    """The mixer's state, and where each row stands: in which packed document, how many real tokens into it."""

    mixer: Any
    positions: Int[Tensor, " B"]
    segment: Int[Tensor, " B"]


def rotate_half(
    x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B T"], theta: float = 10_000.0
) -> Float[Tensor, "B H T D"]:
    """Apply rotary positions: turn the pair (x_d, x_{d + D/2}) by the angle position * theta^(-2d/D).

    Source:
        Su et al. 2021 (RoFormer), eq. (34), in the half-split order of Llama.

    >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> rotate_half(x, torch.tensor([[0]])).flatten().tolist()
    [1.0, 0.0]
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (positions[:, None, :, None].double() * frequency).to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MixerAttention(nn.Module):
    """Multi-head attention whose weights come from any mercer mixer.

    Args:
        hidden_size: width E of the input and output.
        num_heads: query heads; must divide `hidden_size`.
        mixer: a name in `mercer.mixers.MIXERS`.
        num_kv_heads: key and value heads; default `num_heads`.
        causal: whether a token sees only itself and its past.
        rotary: apply rotary positions to q, k (and r); they count real tokens, so padding does not shift them.
        **options: the mixer's own.

    Raises:
        ValueError: an unknown mixer or option, sizes that do not divide.

    >>> attention = MixerAttention(32, 4, mixer="cubit")
    >>> x = torch.randn(2, 10, 32)
    >>> y, _ = attention(x)
    >>> first, state = attention(x[:, :6])  # splitting the sequence changes nothing
    >>> second, _ = attention(x[:, 6:], state)
    >>> torch.allclose(torch.cat([first, second], 1), y, atol=1e-5)
    True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mixer: str = "cubit",
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        rotary: bool = True,
        **options: Any,
    ):
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size ({hidden_size}) must be a multiple of num_heads ({num_heads})")
        head_dim = hidden_size // num_heads
        if rotary and head_dim % 2:
            raise ValueError(f"head_dim ({head_dim}) must be even for rotary positions; pass rotary=False")
        self.mixer = build_mixer(
            mixer,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            hidden_size=hidden_size,
            causal=causal,
            **options,
        )
        self.rotary = rotary
        kv_size = self.mixer.num_kv_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, size) for size in (hidden_size, kv_size, kv_size)
        )
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        state: AttentionState | None = None,
        mask: Bool[Tensor, "B S"] | None = None,
        segments: Int[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], AttentionState | None]:
        """Attend over x, continuing from `state`.

        Args:
            x: hidden states of the new tokens.
            state: what an earlier call returned.
            mask: True = real token, over the new tokens or over the past and the new ones.
            segments: equal = same packed document, as `mask`; positions restart with each.

        Returns:
            The output and the state after it (None if bidirectional).
        """
        positions, after = _positions(x, state, mask, segments)
        rotate = partial(rotate_half, positions=positions) if self.rotary else None
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.mixer.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        o, mixer_state = self.mixer(
            q, k, v, x=x, rotate=rotate, mask=mask, segments=segments, state=None if state is None else state.mixer
        )
        y = self.o_proj(o.transpose(1, 2).flatten(2))
        return y, AttentionState(mixer_state, *after) if self.mixer.causal else None


def _positions(
    x: Float[Tensor, "B T E"], state: AttentionState | None, mask: Tensor | None, segments: Tensor | None
) -> tuple[Int[Tensor, "B T"], tuple[Int[Tensor, " B"], Int[Tensor, " B"]]]:
    """Count real tokens from the start of their document; return the positions, and where each row stands after them.

    As everywhere, tokens without segments go on in the last document, and a past without segments was document 0.
    """
    batch, length = x.shape[:2]
    nothing = torch.zeros(batch, dtype=torch.long, device=x.device)
    seen, segment = (nothing, nothing) if state is None else (state.positions, state.segment)
    real = torch.ones(batch, length, dtype=torch.long, device=x.device)
    if mask is not None:
        real = mask[:, mask.shape[1] - length :].long()
    positions = real.cumsum(1) - 1 + seen[:, None]
    if segments is None:
        return positions.clamp(min=0), (seen + real.sum(1), segment)
    segments = torch.cat([segment[:, None], segments[:, segments.shape[1] - length :].long()], 1)
    begins = segments[:, 1:] != segments[:, :-1]
    started = torch.where(begins, positions - real + 1, 0).cummax(1).values
    after = seen + real.sum(1) - torch.nn.functional.pad(started, (1, 0))[:, -1]
    return (positions - started).clamp(min=0), (after, segments[:, -1])
