"""Attention transfer: every converted layer learns to give the attention output its softmax would have given."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mercer.hf.install import attached
from mercer.hf.kernel_errors import ErrorSums, KernelErrors, window_of
from mercer.hf.observing import Seen, watch


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Errors on held-out text before and after, on the inputs that the original model gives each layer."""

    before: KernelErrors
    after: KernelErrors
    kept: tuple[str, ...]  # layers that stayed as they were, as training did not better them on held-out text
    steps: int
    tokens: int

    def rows(self) -> list[tuple[str, float, float, float, float]]:
        """Return layer, error before, error after, and that of the window and of the plain average."""
        pairs = zip(self.before.layers, self.after.layers, strict=True)
        return [(old.layer, old.error, new.error, new.window, new.uniform) for old, new in pairs]


Report = Callable[[int, float], None]  # after a step: its number from 1, and the mean loss of the layers


def align(
    model: Any,
    train: Callable[[int], Any],
    heldout: Iterable[Any],
    *,
    steps: int = 120,
    learning_rate: float = 1e-2,
    first: int = 0,
    report: Report | None = None,
) -> Alignment:
    """Train the mixers of a converted model, and nothing else, to reproduce softmax attention.

    `||mixer(q, k, v) - softmax(q k') v||^2 / ||softmax(q k') v||^2` is minimised in every layer at once, each on the
    q, k and v it has when all layers are exact: the original model runs, and hands every layer its own lesson. A layer
    that is no better on held-out text afterwards keeps what it had.

    Args:
        model: a converted model, changed in place.
        train: batch number i, see `mercer.hf.observing.model_inputs`.
        heldout: batches to measure on.
        steps: batches to train on.
        learning_rate: of Adam at the start; it falls to a tenth along a cosine.
        first: leave out tokens before this one when measuring.
        report: called after each step.

    Returns:
        The errors of every layer before and after.

    Raises:
        ValueError: no mixer, or mixers without parameters; steps or learning_rate out of range.
        FloatingPointError: a loss that is not finite.

    Cost: a forward pass of the original model and a forward and backward pass of each mixer, a step.

    Source: attention transfer as in LoLCATs (arXiv:2410.10254); here with a relative error.
    """
    if steps < 1 or not learning_rate > 0:
        raise ValueError(f"steps ({steps}) must be at least 1 and learning_rate ({learning_rate}) above 0")
    heldout = list(heldout)
    learners = {name: list(layer.mixer.parameters()) for name, layer in attached(model)}
    if learners and not any(learners.values()):
        kind = type(next(layer for _, layer in attached(model)).mixer).__name__
        raise ValueError(f"{kind} has no parameters to align; convert to darkformer or lfk")
    before = measure(model, heldout, first)
    saved = {name: [p.detach().clone() for p in own] for name, own in learners.items()}
    frozen = {id(p): p.requires_grad for p in model.parameters()}
    lessons = _Lessons(learners, learning_rate)
    try:
        model.requires_grad_(False)
        for own in learners.values():
            for parameter in own:
                parameter.requires_grad_(True)
        tokens = 0
        for step in range(steps):
            lessons.learning_rate = learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            lessons.losses.clear()
            watch(model, [batch := train(step)], lessons)
            tokens += _tokens(batch)
            if report is not None:
                report(step + 1, sum(lessons.losses) / max(1, len(lessons.losses)))
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(frozen[id(parameter)])
    after = measure(model, heldout, first)
    kept = [old.layer for old, new in zip(before.layers, after.layers, strict=True) if not new.error < old.error]
    if kept:
        with torch.no_grad():
            for name in kept:
                for parameter, value in zip(learners[name], saved[name], strict=True):
                    parameter.copy_(value)
        after = measure(model, heldout, first)
    return Alignment(before, after, tuple(kept), steps, tokens)


@torch.no_grad()
def measure(model: Any, batches: Iterable[Any], first: int = 0) -> KernelErrors:
    """Return the kernel errors with every layer on the inputs that the original model gives it."""
    sums = ErrorSums(*window_of(model), first)

    def visit(name: str, mixer: Any, seen: Seen) -> Tensor:
        exact = seen.exact()
        sums.add(name, seen, seen.o, exact)
        return exact

    watch(model, batches, visit)
    return sums.table()


class _Lessons:
    """Teach the mixer of each call, and pass on what softmax would have given."""

    def __init__(self, learners: dict[str, list[Any]], learning_rate: float):
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self.optimisers = {name: torch.optim.Adam(own, betas=(0.9, 0.95)) for name, own in learners.items() if own}

    def __call__(self, name: str, mixer: Any, seen: Seen) -> Tensor:
        with torch.no_grad():
            exact = seen.exact()
        optimiser = self.optimisers.get(name)
        if optimiser is None:
            return exact
        real = seen.real()[:, None, :, None]
        loss = ((seen.o - exact) * real).float().square().sum() / (exact * real).float().square().sum().clamp_min(1e-30)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"{name}: the loss is {loss.item()}; lower the learning rate ({self.learning_rate:g})"
            )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        own = optimiser.param_groups[0]
        torch.nn.utils.clip_grad_norm_(own["params"], 1.0)
        own["lr"] = self.learning_rate
        optimiser.step()
        self.losses.append(loss.item())
        return exact


def _tokens(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    return ids.numel() if isinstance(ids, Tensor) else 0
