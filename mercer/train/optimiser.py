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


def parameter_groups(model: nn.Module, config: OptimConfig, mixer_lr_factor: float = 1.0) -> list[dict]:
    """Split the trained parameters into those that decay and those that do not; each once, tied ones too.

    With a `mixer_lr_factor`, both are split again: the mixers' own step that much further (`lr_factor` of a group).
    """
    modules = dict(model.named_modules())
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {(True, False): [], (False, False): []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            fast = mixer_lr_factor != 1.0 and "mixer" in name.split(".")
            groups.setdefault((decays(name, p, modules[name.rpartition(".")[0]]), fast), []).append(p)
    return [
        {
            "params": params,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "lr_factor": mixer_lr_factor if fast else 1.0,
        }
        for (decayed, fast), params in groups.items()
    ]


def build_optimiser(model: nn.Module, config: OptimConfig, mixer_lr_factor: float = 1.0) -> torch.optim.AdamW:
    """Return AdamW over these groups; the learning rate is set at every step."""
    assert config.lr is not None
    groups = parameter_groups(model, config, mixer_lr_factor)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


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
