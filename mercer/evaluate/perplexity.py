"""Validation loss, weighted exactly by tokens, and its split by position in the document."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

Sum = Callable[[Tensor], None]  # adds a tensor over all processes, in place


@runtime_checkable
class Tokens(Protocol):
    """What a batch must have; `mercer.data.Batch` has it."""

    @property
    def input_ids(self) -> Int[Tensor, "B L"]: ...
    @property
    def labels(self) -> Int[Tensor, "B L"]: ...
    @property
    def position_ids(self) -> Int[Tensor, "B L"]: ...
    @property
    def num_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model predicts of a text."""

    loss: float  # nats per token
    bits_per_byte: float
    perplexity: float
    accuracy: float  # share of tokens predicted first
    loss_by_position: list[tuple[int, int, float, int]]  # start, end (exclusive), mean loss, tokens
    num_tokens: int
    num_bytes: int


def token_losses(logits: Float[Tensor, "B L V"], labels: Int[Tensor, "B L"]) -> Float[Tensor, "B L-1"]:
    """Return the loss in nats of every predicted token, in float32; 0 where the label is -100.

    Position t predicts token t + 1, and `labels` stand where the tokens stand (the shift happens here).

    >>> token_losses(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))
    tensor([[0.6931, 0.0000]])
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)  # labels move and logits stay: a cut of them would be a copy
    flat = F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), reduction="none")
    return flat.view(labels.shape)[:, :-1]


def position_edges(length: int) -> list[int]:
    """Return the edges of the position buckets, two a doubling, the last one `length`.

    >>> position_edges(40)
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    """
    powers = [1 << i for i in range(length.bit_length())]
    between = {edge for power in powers for edge in (power, power + power // 2) if edge < length}
    return sorted({0, length} | between)


def forward(model: nn.Module, batch: Tokens) -> Tensor:
    """Return the logits of a packed batch: positions restart at each document, and no cache is kept."""
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": batch.input_ids.to(device), "position_ids": batch.position_ids.to(device)}
    return model(**inputs, use_cache=False).logits


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Tokens], *, reduce: Sum | None = None) -> Evaluation:
    """Measure a causal language model on batches: mean loss = (sum of losses) / (number of predicted tokens).

    Args:
        model: called as `model(input_ids=..., position_ids=..., use_cache=False).logits`; put in evaluation mode and
            back.
        batches: every batch once.
        reduce: adds the sums over processes, where each sees a share of the batches.

    Raises:
        ValueError: no batch has a token to predict.

    Cost:
        One forward pass.
    """
    was_training = model.training
    model.eval()
    try:
        totals, by_position = _sums(model, batches)
    finally:
        model.train(was_training)
    if reduce is not None:
        reduce(totals)
        reduce(by_position)
    loss_sum, correct, tokens, num_bytes = totals.tolist()
    if tokens == 0:
        raise ValueError("nothing to evaluate: no batch has a token to predict; use a longer text")
    loss = loss_sum / tokens
    return Evaluation(
        loss=loss,
        bits_per_byte=loss_sum / math.log(2) / num_bytes if num_bytes else math.nan,
        perplexity=math.exp(min(loss, 700.0)),
        accuracy=correct / tokens,
        loss_by_position=list(_buckets(by_position)),
        num_tokens=round(tokens),
        num_bytes=round(num_bytes),
    )


_LONGEST = 1 << 17  # positions beyond share the last bucket; a fixed size lets processes add their sums


def _sums(model: nn.Module, batches: Iterable[Tokens]) -> tuple[Tensor, Tensor]:
    """Return (loss, correct, tokens, bytes) and, for every position, (loss, tokens); all in float64."""
    totals, by_position = torch.zeros(4, dtype=torch.float64), torch.zeros(2, _LONGEST, dtype=torch.float64)
    for batch in batches:
        logits = forward(model, batch)
        labels = batch.labels.to(logits.device)
        losses, kept = token_losses(logits, labels), labels[:, 1:] != -100
        correct = (logits[:, :-1].argmax(-1) == labels[:, 1:])[kept].sum()
        chosen = losses[kept].double().cpu()
        position = batch.position_ids[:, :-1][kept.cpu()].clamp(max=_LONGEST - 1)
        totals += torch.tensor([chosen.sum(), correct, kept.sum(), batch.num_bytes], dtype=torch.float64)
        by_position[0].index_add_(0, position, chosen)
        by_position[1].index_add_(0, position, torch.ones_like(chosen))
    return totals, by_position


def _buckets(by_position: Float[Tensor, "2 P"]) -> Iterator[tuple[int, int, float, int]]:
    used = by_position[1].nonzero()
    edges = position_edges(int(used.max()) + 1)
    for start, end in itertools.pairwise(edges):
        loss, tokens = by_position[:, start:end].sum(1).tolist()
        if tokens:
            yield start, end, loss / tokens, round(tokens)
