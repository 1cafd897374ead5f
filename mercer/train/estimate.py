"""What a run will cost, before it runs: parameters, floating-point operations, memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mercer.mixers import mixer_options
from mercer.ops import linear_passes, linear_solve_passes
from mercer.train import setup
from mercer.train.recipe import Recipe


def _near(T: int, H: int, D: int, options: Mapping[str, Any]) -> int:
    """Return the operations of exact attention to a window and sinks."""
    return 4 * (options.get("window", 0) + options.get("sinks", 0)) * H * D


def _linear(T: int, H: int, D: int, options: Mapping[str, Any]) -> int:
    """Return those of linear attention: features of q and k, weights inside a block, sums in and out."""
    m, block = options["num_features"], linear_passes.BLOCK
    return H * (8 * m * D + 2 * block * (m + D)) + _near(T, H, D, options)


def _linear_cubit(T: int, H: int, D: int, options: Mapping[str, Any]) -> int:
    """Return those of smoothing and of the system; r is projected once, and not at all where it is k."""
    m, block = options["num_features"], linear_solve_passes.BLOCK
    projected = 0 if options["share"] else 2 * m * D
    return _linear(T, H, D, options) + H * (projected + 4 * m * D + 2 * block * m)


# Operations of mixing a token forward, in one layer, from (length T, heads H, head width D, options). A causal token
# sees T / 2 others on average; a product with them costs 2 * T/2 * D a head, attention takes two: q.k, weights times v.
_MIXING: dict[str, Callable[[int, int, int, Mapping[str, Any]], float]] = {
    "softmax": lambda T, H, D, _: 2 * T * H * D,
    "cubit": lambda T, H, D, _: 4 * T * H * D,  # solve and smooth
    "deltaformer": lambda T, H, D, _: 4 * T * H * D,
    "random": lambda T, H, D, _: T * H * D,
    "constant": lambda T, H, D, _: H * D,
    "local_linear": lambda T, H, D, _: 2 * T * H * D + T * H * (D + 1) * (2 * D + 1) + 2 / 3 * H * (D + 1) ** 3,
    "window": _near,
    "linear_cubit": _linear_cubit,
    **dict.fromkeys(("performer", "lfk", "darkformer", "particle"), _linear),
}
_PROCESS_BYTES = 500e6  # Python, torch and transformers themselves


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a run; `mixing` says whether the operations of the mixer are in `flops_per_token`."""

    parameters: int
    tokens: int
    steps: int
    flops_per_token: float
    mixing: bool
    memory_bytes: float

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole training."""
        return self.flops_per_token * self.tokens


def estimate(recipe: Recipe) -> Estimate:
    """Estimate the cost of a run, without weights and without data.

    Operations: 2 a weight and token forward, twice that backward (6 in all), and the mixer's likewise. Memory: 16 bytes
    a parameter (weight, gradient, two moments) and what a step keeps for its backward pass.
    """
    recipe = setup.resolve(recipe)
    tokenizer = setup.vocabulary(recipe.data)
    with torch.device("meta"):
        model = setup.build_model(recipe, tokenizer, torch.device("meta"))
    parameters = sum(p.numel() for p in model.parameters())
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    size, length = setup.model_size(recipe.model), recipe.data.length
    mixing, chosen = _MIXING.get(recipe.model.mixer), recipe.model.mixer_options
    options = mixer_options(recipe.model.mixer, **chosen) | dict(chosen)
    mixed = mixing(length, size.num_heads, size.hidden_size // size.num_heads, options) if mixing else 0.0
    kept = size.num_layers * (16 * size.hidden_size + 5 * size.intermediate_size) + 4 * len(tokenizer)
    return Estimate(
        parameters=parameters,
        tokens=recipe.train_tokens,
        steps=recipe.train.steps,
        flops_per_token=6.0 * weights + 3 * size.num_layers * mixed,
        mixing=mixing is not None,
        memory_bytes=_PROCESS_BYTES + 16 * parameters + 4 * kept * recipe.train.batch_size * length,
    )


def lines(found: Estimate) -> Iterator[str]:
    """Return the lines `--dry-run` prints."""
    note = "" if found.mixing else " (without the mixer's own)"
    yield f"parameters        {found.parameters:,}"
    yield f"steps             {found.steps:,}"
    yield f"training tokens   {found.tokens:,}"
    yield f"FLOPs per token   {found.flops_per_token:.3g}{note}"
    yield f"FLOPs in all      {found.flops:.3g}{note}"
    yield f"memory, about     {found.memory_bytes / 1e9:.2g} GB"
