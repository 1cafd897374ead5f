"""One vector for a text: the mean over its real tokens, or one of them."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mercer.errors import unknown
from mercer.hf.binding import argument_names
from mercer.hf.observing import model_inputs

POOLINGS = ("mean", "first", "last")


def pool(hidden: Float[Tensor, "B T E"], mask: Tensor | None = None, pooling: str = "mean") -> Float[Tensor, "B E"]:
    """Return the mean of each text's real tokens, or its first or last real token; padding counts nowhere.

    Args:
        hidden: the states of the tokens.
        mask: [B, T], 1 or True on real tokens; None: all are.
        pooling: "mean", "first" or "last".

    Returns:
        A vector a text; the mean of none is 0.

    Raises:
        ValueError: unknown pooling.

    >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> [pool(hidden, torch.tensor([[1, 1, 0]]), kind).item() for kind in POOLINGS]
    [2.0, 1.0, 3.0]
    """
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    if mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, 0 if pooling == "first" else -1]
    real = mask.bool()
    if pooling == "mean":
        total = hidden.masked_fill(~real[..., None], 0).sum(1)
        return total / real.sum(1, keepdim=True).clamp_min(1)
    place = real.int().argmax(1) if pooling == "first" else real.shape[1] - 1 - real.int().flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]


def pooled_states(model: Any, batch: Any, pooling: str = "mean") -> Float[Tensor, "B E"]:
    """Return the pooled last hidden states of a model's body, encoder or decoder; its head is not run.

    Args:
        model: any transformers model.
        batch: arguments of the model (`input_ids`, `attention_mask`), see `mercer.hf.observing.model_inputs`.
        pooling: see `pool`.
    """
    body = model.base_model
    inputs = model_inputs(body, batch)
    return pool(body(**inputs).last_hidden_state, inputs.get("attention_mask"), pooling)


class Pooling(nn.Module):
    """Stand in for BERT's pooler: pool without a projection, so that a classifier reads the states themselves."""

    def __init__(self, pooling: str):
        super().__init__()
        if pooling not in POOLINGS:
            raise unknown("pooling", pooling, POOLINGS)
        self.pooling = pooling
        self.mask: Tensor | None = None  # of the call in progress

    def forward(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B E"]:
        """Pool with the mask that the body was called with."""
        mask, self.mask = self.mask, None
        return pool(hidden, mask, self.pooling)

    def extra_repr(self) -> str:
        return repr(self.pooling)


def set_pooling(model: Any, pooling: str) -> None:
    """Put a `Pooling` in the place of the pooler of a BERT-like model.

    Raises:
        ValueError: unknown pooling, or a model without a pooler.
    """
    body = model.base_model
    if not hasattr(body, "pooler"):
        raise ValueError(
            f"{type(model).__name__} has no pooler to replace (pooling={pooling!r}); use kind='classifier'"
        )
    body.pooler = Pooling(pooling)
    body.register_forward_pre_hook(_bring_mask, with_kwargs=True)


def _bring_mask(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**dict(zip(argument_names(body), args, strict=False)), **kwargs}
    body.pooler.mask = given.get("attention_mask")
