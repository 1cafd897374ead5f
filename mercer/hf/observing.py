"""Watch what the attention layers of a model are given and what their mixers make of it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer import ops
from mercer.hf.binding import argument_names
from mercer.hf.install import attached

Batches: TypeAlias = Iterable[Any]


@dataclasses.dataclass(frozen=True)
class Seen:
    """One call of a mixer: its inputs, with norms and positions applied, and its output."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hk T D"]
    v: Float[Tensor, "B Hk T Dv"]
    o: Float[Tensor, "B H T Dv"]
    mask: Bool[Tensor, "B T"] | None
    segments: Int[Tensor, "B T"] | None
    x: Float[Tensor, "B T E"] | None
    rotate: Any

    causal: bool
    scaling: float  # the model's own factor on q.k, whatever the mixer's is

    def real(self) -> Bool[Tensor, "B T"]:
        """Return which tokens are real."""
        return torch.ones_like(self.q[:, 0, :, 0], dtype=torch.bool) if self.mask is None else self.mask

    def exact(self) -> Float[Tensor, "B H T Dv"]:
        """Return softmax attention, the model's own, on the same q, k, v."""
        return self._attend(self.q, self.mask, self.segments)

    def uniform(self) -> Float[Tensor, "B H T Dv"]:
        """Return the plain average of the values a query sees."""
        return self._attend(torch.zeros_like(self.q), self.mask, self.segments)

    def near(self, window: int, sinks: int) -> Float[Tensor, "B H T Dv"]:
        """Return softmax attention that drops every key but the `window` nearest and the first `sinks`.

        Positions count the real tokens of a document. Quadratic, by its definition.
        """
        real = self.real()
        segments = torch.zeros_like(real, dtype=torch.long) if self.segments is None else self.segments
        same = (segments[:, :, None] == segments[:, None, :]) & real[:, None, :]
        ordered = torch.arange(real.shape[1], device=real.device)
        earlier = ordered[None, :] <= ordered[:, None]
        position = (same & earlier).sum(-1)
        distance = position[:, :, None] - position[:, None, :]
        allowed = same & ((distance.abs() < window) | (position[:, None, :] <= sinks))
        allowed = allowed & earlier if self.causal else allowed
        blind = ~allowed.any(-1, keepdim=True)
        heads = self.q.shape[1]
        k, v = (ops.repeat_heads(ops.zero_padding(t, self.mask), heads) for t in (self.k, self.v))
        q = ops.zero_padding(self.q, self.mask, rows=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=(allowed | blind)[:, None], scale=self.scaling)

    def _attend(self, q: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        return ops.softmax_attention(
            q, self.k, self.v, causal=self.causal, scale=self.scaling, mask=mask, segments=segments
        )


def model_inputs(model: Any, batch: Any) -> dict[str, Any]:
    """Return the arguments for a call of the model, without a cache.

    Args:
        model: any transformers model.
        batch: token numbers [B, T], a mapping of arguments (as a tokenizer returns), or a packed batch with
            `input_ids` and `position_ids`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(batch, Tensor):
        inputs: dict[str, Any] = {model.main_input_name: batch}
    elif isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "use_cache")}
    elif hasattr(batch, "input_ids") and hasattr(batch, "position_ids"):
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    else:
        raise ValueError(
            f"a batch is a {type(batch).__name__}; give tensors of token numbers [batch, tokens], what a tokenizer "
            "returns, or batches of mercer.data"
        )
    inputs = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    names = argument_names(model)
    if "use_cache" in names:
        inputs["use_cache"] = False
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" in names and "position_ids" not in inputs and mask.dim() == 2:
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)  # as generate() counts them
    return inputs


def watch(model: Any, batches: Batches, visit: Callable[[str, Any, Seen], Tensor | None]) -> int:
    """Run a model over batches and show every call of a mixer to `visit`; what that returns replaces the output.

    Args:
        model: a model with mixers; watched in evaluation mode and put back.
        batches: see `model_inputs`.
        visit: called with the layer's name, its mixer and what was seen.

    Returns:
        How many batches there were.

    Raises:
        ValueError: the model carries no mixer, or there are no batches.
    """
    layers = list(attached(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} carries no mixer; call mercer.attach first, or load a converted model"
        )
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    handles = [layer.mixer.register_forward_hook(_hook(name, layer, visit), with_kwargs=True) for name, layer in layers]
    was_training, count = model.training, 0
    model.eval()
    try:
        for batch in batches:
            model(**model_inputs(model, batch))
            count += 1
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if not count:
        raise ValueError("there are no batches; give at least one")
    return count


def _hook(name: str, layer: Any, visit: Callable[[str, Any, Seen], Tensor | None]) -> Callable[..., Any]:
    def hook(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> Any:
        follows = layer.mercer_attachment.follows_scaling
        seen = Seen(
            *args,
            o=output[0],
            mask=kwargs.get("mask"),
            segments=kwargs.get("segments"),
            x=kwargs.get("x"),
            rotate=kwargs.get("rotate"),
            causal=mixer.causal,
            scaling=float(mixer.scale if follows else layer.scaling),
        )
        replaced = visit(name, mixer, seen)
        return None if replaced is None else (replaced, output[1])

    return hook
