"""AdamW: which parameters decay, and the learning rate of every step."""

import math

import torch
from torch import nn

from mercer.train.recipe import OptimConfig

# Decay pulls a parameter towards zero. For a matrix that multiplies activations this is a mild prior. For these it
# changes what they mean: zero gain (norm), a kernel without width (gamma, metric, omega), ridge 1 (log_ridge = 0),
# values scaled away (rescale_*).
_KEEPS = ("gamma", "log_ridge", "metric", "omega")


def decays(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Say whether weight decay applies: to matrices that multiply activations, and to nothing else.

    Embeddings do not decay: a row that no token of the batch reads has no gradient, so decay alone would drive rare
    tokens to zero.

    Args:
        name: the parameter's dotted name.
        parameter: the parameter.
        module: the module that holds it.
    """
    parts = name.split(".")
    own = parts[-1] in _KEEPS or any(part.startswith("rescale_") for part in parts)
    return parameter.ndim >= 2 and not own and not isinstance(module, nn.Embedding)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Split the trained parameters into those that decay and those that do not; each once, tied ones too."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    modules = dict(model.named_modules())
    holder = {name: modules[name.rpartition(".")[0]] for name, _ in named}
    decayed = {name for name, p in named if decays(name, p, holder[name])}
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def build_optimiser(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over the two groups; the learning rate is set at every step."""
    assert config.lr is not None
    return torch.optim.AdamW(parameter_groups(model, config), lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step: a line up to `lr`, then half a cosine down to `min_lr_ratio * lr`.

    `step` counts from 0; a step of the warm-up of w steps has (step + 1) / w of the full rate, so that none has rate 0.

    >>> config = OptimConfig(lr=1.0, warmup=0.2, min_lr_ratio=0.1)
    >>> [round(learning_rate(step, 10, config), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.134]
    """
    assert config.lr is not None
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)
