"""The self-check of a conversion: through softmax mixers a model must give the logits it always gave."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mercer.errors import CheckpointError
from mercer.hf.binding import argument_names
from mercer.hf.exchange import attach, detach

TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Exactness:
    """How far the softmax mixer was from the model itself; `largest` is the largest logit."""

    difference: float
    padded_difference: float | None  # of a left-padded batch; None for models that take no mask
    largest: float

    def __str__(self) -> str:
        padded = "" if self.padded_difference is None else f", left-padded {self.padded_difference:.1e}"
        return (
            f"exact mode differs from the original by {self.difference:.1e}{padded} (largest logit {self.largest:.1f})"
        )


@torch.no_grad()
def check_exact(
    model: Any, *, layers: Any = "all", keep: Iterable[int] = (), length: int = 96, seed: int = 0
) -> Exactness:
    """Compare a model with itself under mixer="softmax": plain, and in a left-padded batch.

    Computed in float32 whatever the weights are; the model is left as it was.

    Args:
        model: a transformers model without mixers.
        layers: which layers will be converted, see `mercer.attach`.
        keep: which will not all the same.
        length: tokens of the inputs, which are drawn at random.
        seed: of the inputs.

    Returns:
        The largest differences of any logit.

    Raises:
        ValueError: see `mercer.attach`; or the model takes neither tokens nor images.
        CheckpointError: a difference above 1e-5 (relative to the largest logit where that is above 1): transformers
            hands this model's attention something that mixers do not see.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)).eval()
        >>> check_exact(model).difference < 1e-5
        True
    """
    was_training = model.training
    twin = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    twin.eval()
    calls = _calls(twin, length, torch.Generator().manual_seed(seed))
    before = [_logits(twin, call) for call in calls]
    attach(twin, "softmax", layers=layers, keep=keep)
    try:
        after = [_logits(twin, call) for call in calls]
    finally:
        detach(twin)
        twin.train(was_training)
    differences = [_difference(call, *pair) for call, *pair in zip(calls, before, after, strict=True)]
    found = Exactness(differences[0], differences[1] if len(differences) > 1 else None, before[0].abs().max().item())
    if not max(differences) <= TOLERANCE * max(1.0, found.largest):
        raise CheckpointError(
            f"{type(model).__name__}: {found}; above {TOLERANCE:g}, so its attention uses something that mixers do not "
            "see; convert other layers (layers=) or another model"
        )
    return found


def _calls(model: Any, length: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    config, name = model.config.get_text_config(), model.main_input_name
    if name == "pixel_values":
        size = config.image_size
        shape = (2, config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))
        return [{name: torch.randn(shape, generator=generator).to(model.device)}]
    if name != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {name}; the check knows tokens and images; leave out --check")
    length = min(length, getattr(config, "max_position_embeddings", length))
    ids = torch.randint(config.vocab_size, (2, length), generator=generator)
    mask = (torch.arange(length) >= torch.tensor([[0], [length // 3]])).long()
    padded = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in argument_names(model):
        padded["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return [{key: value.to(model.device) for key, value in call.items()} for call in ({"input_ids": ids}, padded)]


def _logits(model: Any, call: dict[str, Tensor]) -> Tensor:
    cached = {"use_cache": False} if "use_cache" in argument_names(model) else {}
    return model(**call, **cached)[0].detach()  # the logits, or the hidden states of a model without a head


def _difference(call: dict[str, Tensor], before: Tensor, after: Tensor) -> float:
    gaps = (after - before).abs()
    mask = call.get("attention_mask")
    if mask is not None and gaps.dim() == 3:  # padded tokens have no right answer
        gaps = gaps[mask.bool()]
    return gaps.max().item()
