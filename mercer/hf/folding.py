"""Absorb a learned metric M into the query and key projections, where that is exact."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mercer.hf.install import attached
from mercer.hf.rotary import rotation_problem
from mercer.hf.spans import spans

_PAIRS = (("q_proj", "k_proj"), ("query", "key"))  # names of the two projections
_FUSED = "c_attn"  # one projection to q | k | v


@torch.no_grad()
def fold(model: Any) -> Any:
    """Absorb the metric M of DARKFormer's features into the projections: M q = (M W_q) x, and M becomes the identity.

    exp(q' M'M k) is exp(q'k) of the projections M W_q and M W_k: on what M follows directly, DARKFormer is Performer.
    Logits stay as they are, to rounding. The model's own softmax does not: `detach` would now give exp(q' M'M k).

    Args:
        model: a model whose mixers have a `metric`, changed in place.

    Returns:
        The same model. Layers that could not be folded keep M; `print(model.mercer_summary())` says why.

    Raises:
        ValueError: no layer can be folded, with the reasons: positions or norms come between the projections and M,
            exact near keys read q and k without M, or there is no M.

    Cost: a product D x D x E for every head, once.

    Example:
        >>> import mercer
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))
        >>> model = fold(mercer.attach(model, "darkformer", num_features=16))
        >>> print(model.mercer_summary().notes[-1])
        the metric is folded into the projections of transformer.h.{0-1}.attn
    """
    layers = list(attached(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} carries no mixer; there is nothing to fold")
    problems = {name: problem for name, layer in layers if (problem := _problem(layer)) is not None}
    if len(problems) == len(layers):
        raise ValueError(f"cannot fold the metric of {type(model).__name__}: {_reasons(problems)}")
    folded = [name for name, _ in layers if name not in problems]
    for name, layer in layers:
        if name in folded:
            _fold(layer)
    notes = [f"the metric is folded into the projections of {spans(folded)}"]
    notes += [f"the metric is not folded: {_reasons(problems)}"] if problems else []
    description = model.mercer_description
    model.mercer_description = dataclasses.replace(description, notes=(*description.notes, *notes))
    return model


def _reasons(problems: dict[str, str]) -> str:
    grouped: dict[str, list[str]] = {}
    for name, problem in problems.items():
        grouped.setdefault(problem, []).append(name)
    return "; ".join(f"{spans(names)}: {problem}" for problem, names in grouped.items())


def _problem(layer: Any) -> str | None:
    """Return why M cannot be absorbed in this layer, or None."""
    features = getattr(layer.mixer, "features", None)
    if not isinstance(getattr(features, "metric", None), nn.Parameter):
        return f"the mixer {type(layer.mixer).__name__} has no metric"
    if layer.mercer_attachment.rotary is not None or rotation_problem(layer) is not None:
        return "rotary positions come between the projections and M, which does not commute with the rotations"
    if any("Norm" in type(child).__name__ for child in layer.children() if child is not layer.mixer):
        return "q and k are normalised between the projections and M"
    if getattr(layer.config, "clip_qkv", None):
        return "q and k are clipped between the projections and M"
    if getattr(layer.mixer, "window", None) or getattr(layer.mixer, "sinks", None):
        return "the exact near keys read q and k without M"
    if getattr(layer.mixer, "center", False) and bool(layer.mixer.query_center.any() or layer.mixer.key_center.any()):
        return "centring reads the keys without M"
    kinds = {type(projection) for projection in _projections(layer)}
    if not kinds or not kinds <= {nn.Linear, Conv1D}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none of a known name"
        return f"its projections of q and k are not plain linear layers (found {found}); merge adapters first"
    return None


def _projections(layer: Any) -> tuple[nn.Module, ...]:
    """Return the projections of q and of k, or the one that makes both."""
    if isinstance(fused := getattr(layer, _FUSED, None), nn.Module):
        return (fused,)
    for names in _PAIRS:
        if all(isinstance(getattr(layer, name, None), nn.Module) for name in names):
            return tuple(getattr(layer, name) for name in names)
    return ()


def _fold(layer: Any) -> None:
    mixer = layer.mixer
    metric = mixer.features.metric
    rank, width = metric.shape[1:]
    square = torch.cat([metric, metric.new_zeros(metric.shape[0], width - rank, width)], 1)  # of a lower rank: M over 0
    projections, heads = _projections(layer), (mixer.num_heads, mixer.num_kv_heads)
    start = 0
    for part, count in enumerate(heads):
        projection: Any = projections[min(part, len(projections) - 1)]
        start = start if len(projections) == 1 else 0
        rows = slice(start, start + count * width)
        weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight  # both: [outputs, inputs]
        matrices = square.repeat_interleave(count // metric.shape[0], 0)
        weight[rows] = _absorb(matrices, weight[rows])
        if projection.bias is not None:
            projection.bias[rows] = _absorb(matrices, projection.bias[rows][:, None])[:, 0]
        start += count * width
    metric.copy_(torch.eye(rank, width, device=metric.device))


def _absorb(matrices: Float[Tensor, "H D D"], weight: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """Return M W head by head, computed in float64."""
    heads = weight.view(matrices.shape[0], matrices.shape[1], -1).double()
    return (matrices.double() @ heads).reshape(weight.shape).to(weight.dtype)
