"""What a run will cost, before it runs: parameters, floating-point operations, memory."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from mercer.train import setup
from mercer.train.recipe import Recipe

# Operations of mixing a token forward, in one layer, from (length T, heads H, head width D). A causal token sees T / 2
# others on average; a product with them costs 2 * T/2 * D a head, and attention takes two: q.k, and weights times v.
_MIXING: dict[str, Callable[[int, int, int], float]] = {
    "softmax": lambda T, H, D: 2 * T * H * D,
    "cubit": lambda T, H, D: 4 * T * H * D,  # solve and smooth
    "deltaformer": lambda T, H, D: 4 * T * H * D,
    "random": lambda T, H, D: T * H * D,
    "constant": lambda T, H, D: H * D,
    "local_linear": lambda T, H, D: 2 * T * H * D + T * H * (D + 1) * (2 * D + 1) + 2 / 3 * H * (D + 1) ** 3,
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
    mixing = _MIXING.get(recipe.model.mixer)
    mixed = mixing(length, size.num_heads, size.hidden_size // size.num_heads) if mixing else 0.0
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
