"""What of a converted model learns in a finetuning, and what from: a text, or the model with its softmax."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mercer.errors import unknown
from mercer.evaluate.perplexity import Evaluation, token_losses
from mercer.hf import detach, load
from mercer.hf.install import attached
from mercer.hf.layers import output_projection
from mercer.train.recipe import TuneConfig

PARTS = ("all", "attention", "mixers", "lora")


def start(tune: TuneConfig, device: torch.device) -> Any:
    """Load the model a finetuning starts from, with only the chosen part of it free to learn.

    Args:
        tune: where it lies and which part learns.
        device: where to put it.

    Raises:
        ValueError: an unknown part, or nothing in the model belongs to it.
        FileNotFoundError: there is no such model.
        ModuleNotFoundError: "lora" without peft.
    """
    assert tune.folder is not None
    model = load(tune.folder, device=device)
    free(model, tune.parameters, rank=tune.rank)
    return model


def free(model: Any, part: str, *, rank: int = 16) -> None:
    """Let one part of a converted model learn and freeze the rest, in place.

    Args:
        model: a model with mixers.
        part: `all`; `attention`: the projections before the mixers, and the mixers' own parameters (the paper's partial
            finetuning: q, k, v and M); `mixers`: these alone; `lora`: updates of low rank to those projections, and the
            mixers.
        rank: of the updates.

    Raises:
        ValueError: an unknown part, or nothing in the model belongs to it.
    """
    if part not in PARTS:
        raise unknown("parameters", part, PARTS)
    model.requires_grad_(part == "all")
    if part == "attention":
        for _, projection in _projections(model):
            projection.requires_grad_(True)
    if part == "lora":
        _inject(model, rank)
    for _, layer in attached(model):
        layer.mixer.requires_grad_(True)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"parameters ({part}): the mixers of this model have none that learn; use attention or all")


def _projections(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear maps of the converted layers that come before the mixer, by name."""
    for name, layer in attached(model):
        after = output_projection(layer)
        for part, module in layer.named_children():
            weight = getattr(module, "weight", None)
            if module not in (after, layer.mixer) and isinstance(weight, Tensor) and weight.ndim == 2:
                yield f"{name}.{part}", module


def _inject(model: Any, rank: int) -> None:
    """Add low-rank updates, zero at the start, to the projections before the mixers."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = [name for name, _ in _projections(model)]
    fan_in_fan_out = any(type(module).__name__ == "Conv1D" for _, module in _projections(model))
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=fan_in_fan_out)
    inject_adapter_in_model(config, model)


@torch.no_grad()
def merge(model: Any) -> None:
    """Add low-rank updates to the weights they belong to, and take them out, in place; without them, do nothing."""
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_base_layer")]
    for name, module in adapted:
        module.merge()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module.get_base_layer())
    vars(model).pop("peft_config", None)


def losses(
    logits: Float[Tensor, "B L V"], teacher: Float[Tensor, "B L V"] | None, labels: Int[Tensor, "B L"], share: float
) -> Float[Tensor, "B L-1"]:
    """Return, for every predicted token, `share` of the divergence from the teacher and the rest of the text's loss."""
    found = torch.zeros((), device=logits.device)
    if share < 1:
        found = found + (1 - share) * token_losses(logits, labels)
    if teacher is not None and share > 0:
        found = found + share * divergences(logits, teacher, labels)
    return found


def beside(tune: TuneConfig, device: torch.device, evaluate: Callable[[Any], Evaluation]) -> dict[str, float]:
    """Measure what a finetuned model is to be held against: itself before, and with its own softmax before."""
    assert tune.folder is not None
    model = load(tune.folder, device=device)
    before, original = evaluate(model), evaluate(detach(model))
    return {
        "perplexity_before": before.perplexity,
        "perplexity_original": original.perplexity,
        "accuracy_before": before.accuracy,
        "accuracy_original": original.accuracy,
    }


def teacher_of(model: Any) -> Any:
    """Return a frozen copy of a converted model with its own softmax attention in place of the mixers."""
    teacher = detach(copy.deepcopy(model))
    return teacher.requires_grad_(False).eval()


def divergences(
    logits: Float[Tensor, "B L V"], teacher: Float[Tensor, "B L V"], labels: Int[Tensor, "B L"]
) -> Float[Tensor, "B L-1"]:
    """Return KL(teacher || model) of every predicted token in nats; 0 where the label is -100, as in `token_losses`.

    >>> same = torch.randn(1, 3, 5)
    >>> divergences(same, same, torch.tensor([[0, 1, 2]])).abs().amax() < 1e-6
    tensor(True)
    """
    kept = F.pad(labels[:, 1:] != -100, (0, 1))  # logits stay whole: a cut of them would be a copy
    with torch.no_grad():
        log_target = F.log_softmax(teacher.flatten(0, 1).float(), -1)
        target = log_target.exp()
        negative_entropy = torch.linalg.vecdot(target, log_target)
    found = negative_entropy + F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="none")
    return found.view(labels.shape).masked_fill(~kept, 0)[:, :-1]
