"""What every mixer is: a module that maps (q, k, v, state) to (o, state)."""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Rotate = Callable[[Tensor], Tensor]
_SIZES = ("num_heads", "head_dim", "num_kv_heads", "hidden_size", "causal")


class Mixer(nn.Module, abc.ABC):
    """Mix values along time with the weights of a kernel regression.

    Law (tested for every registered mixer): splitting the sequence changes nothing,
    `mixer(cat(a, b)) == cat(mixer(a), mixer(b, state=state after a))`. So training is one call
    without state, prefill is the same call with the state kept, and decoding is a call on one token.

    Args:
        num_heads: query heads H.
        head_dim: width D of a head.
        num_kv_heads: key and value heads; H must be a multiple. Default: H.
        hidden_size: width E of the hidden states `x`; needed only by mixers with `needs_x`.
        causal: whether a token sees only itself and its past.
        scale: factor on the logits q.k; D^(-1/2) by default.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`, or `hidden_size` is missing where needed.
    """

    needs_x: bool = False  # whether `forward` reads the hidden states x
    scale: float  # factor on q.k; D^(-1/2) unless asked otherwise

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        hidden_size: int | None = None,
        causal: bool = True,
        scale: float | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", num_kv_heads)):
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        if self.needs_x and hidden_size is None:
            raise ValueError(f"mixer {type(self).__name__} reads the hidden states: pass hidden_size=")
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.hidden_size, self.causal = hidden_size, causal
        self.scale = head_dim**-0.5 if scale is None else scale

    @abc.abstractmethod
    def forward(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hk T D"],
        v: Float[Tensor, "B Hk T Dv"],
        *,
        x: Float[Tensor, "B T E"] | None = None,
        rotate: Rotate | None = None,
        mask: Bool[Tensor, "B S"] | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        state: Any = None,
    ) -> tuple[Float[Tensor, "B H T Dv"], Any]:
        """Mix the new tokens, continuing from `state`.

        Args:
            q: queries, with positions applied.
            k: keys, with positions applied.
            v: values.
            x: hidden states the projections were taken from; needed where `needs_x`.
            rotate: applies positions to a [B, H, T, D] tensor of the new tokens, as was done to q and k.
            mask: True = real token; over the new tokens, or over the past and the new ones.
            segments: equal = same packed document; over the new tokens, or over the past and the new ones.
            state: what an earlier call returned.

        Returns:
            The mixed values and the state after them.
        """

    @classmethod
    def options(cls, **chosen: Any) -> dict[str, Any]:
        """Return the options besides the sizes that the constructor takes, with their default values.

        Some mixers take options of what they are made of: `chosen` are the options given so far.
        """
        own = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY and p.name not in _SIZES} | {"scale": None}

    def initial_values(self) -> dict[str, Tensor]:
        """Return a fresh start value, on the CPU, for every parameter and buffer this module draws itself.

        A pure function of the constructor's options (seeds included): loading code calls it to fill tensors
        that a checkpoint does not have.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class Marks:
    """Which of the positions so far are real, and of which packed document; None: all real, all one document."""

    mask: Bool[Tensor, "B S"] | None = None
    segments: Int[Tensor, "B S"] | None = None

    def extend(
        self, length: int, new: int, mask: Bool[Tensor, "B N"] | None, segments: Int[Tensor, "B N"] | None
    ) -> "Marks":
        """Return the marks of the `length` past positions and `new` more, given over the new ones or over all.

        A past without marks is real and of document 0; new tokens without segments continue the last document.
        """
        _check_marks(new, length + new, mask=mask, segments=segments)
        new_mask, new_segments = mask, segments
        if new_mask is not None and new_mask.shape[1] == new:
            past = new_mask.new_ones(len(new_mask), length) if self.mask is None else self.mask
            new_mask = torch.cat([past, new_mask], 1)
        elif new_mask is None and self.mask is not None:
            new_mask = F.pad(self.mask, (0, new), value=True)
        if new_segments is not None and new_segments.shape[1] == new:
            past = new_segments.new_zeros(len(new_segments), length) if self.segments is None else self.segments
            new_segments = torch.cat([past, new_segments], 1)
        elif new_segments is None and self.segments is not None:
            last = F.pad(self.segments, (1, 0))[:, -1:]  # document 0 if the past is empty
            new_segments = torch.cat([self.segments, last.expand(-1, new)], 1)
        return Marks(new_mask, new_segments)


def _check_marks(new: int, total: int | None, **marks: Tensor | None) -> None:
    """Check that marks are over the new tokens or over all `total` of them (None: nobody counted), and the mask bool.

    Operators check too, but some mixers write zeros over padding before they call one.
    """
    for name, given in marks.items():
        if given is None:
            continue
        known = given.dim() == 2 and (given.shape[1] in (new, total) or (total is None and given.shape[1] > new))
        if not known:
            over_all = "" if total == new else f" or [batch, {total or 'all'}] over the past and the new ones"
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; it must be [batch, {new}] over the new tokens{over_all}"
            )
    mask = marks["mask"]
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be bool, True = real token: pass mask.bool()")


def marks_of_new(
    new: int, mask: Bool[Tensor, "B N"] | None, segments: Int[Tensor, "B N"] | None, state: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the marks of the last `new` tokens, for mixers whose state has summed up the past, uncounted."""
    _check_marks(new, new if state is None else None, mask=mask, segments=segments)
    mask, segments = (None if marks is None else marks[:, marks.shape[1] - new :] for marks in (mask, segments))
    return mask, segments


def append(past: Float[Tensor, "B H P D"] | None, new: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H S D"]:
    """Put the new positions after the past ones."""
    return new if past is None else torch.cat([past, new], 2)


def refuse_state(mixer: Mixer, state: Any) -> None:
    """Raise ValueError when a bidirectional mixer is given a state: it must see the whole sequence at once."""
    if state is not None and not mixer.causal:
        raise ValueError(f"{type(mixer).__name__} is bidirectional (causal=False) and has no state; pass state=None")


def map_state(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor of a state; the batch is always dimension 0."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return change(state)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = {f.name: map_state(getattr(state, f.name), change) for f in dataclasses.fields(state)}
        return dataclasses.replace(state, **fields)
    return state
