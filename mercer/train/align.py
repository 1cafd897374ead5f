"""Attention transfer: every converted layer learns to give the attention output its softmax would have given."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.hf.install import Rival, attached, exchange_mixers, new_mixer
from mercer.hf.kernel_errors import HeadError, KernelErrors, window_of
from mercer.hf.layers import output_projection
from mercer.hf.observing import Seen, watch
from mercer.mixers.linear import set_centers
from mercer.train.keeping import Keeper, Parts

OWN = ""  # the mixer a layer has, among its rivals
Kind = tuple[str, Mapping[str, Any]]  # a mixer's name and options
Report = Callable[[int, float], None]  # after a step: its number from 1, and the mean loss of the layers


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Errors on held-out text before and after, on the inputs that the original model gives each layer."""

    before: KernelErrors
    after: KernelErrors
    kept: tuple[str, ...]  # layers that stayed as they were, as nothing bettered them on held-out text
    exchanged: dict[str, str]  # layers that have another mixer now, and its name
    steps: int
    tokens: int

    def rows(self) -> list[tuple[str, float, float, float, float]]:
        """Return layer, error before, error after, and that of the window and of the plain average."""
        pairs = zip(self.before.layers, self.after.layers, strict=True)
        return [(old.layer, old.error, new.error, new.window, new.uniform) for old, new in pairs]


def align(
    model: Any,
    train: Callable[[int], Any],
    heldout: Iterable[Any],
    *,
    rivals: Sequence[Kind] = (),
    steps: int = 120,
    learning_rate: float = 1e-2,
    first: int = 0,
    report: Report | None = None,
    keeper: Keeper | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Alignment:
    """Train the mixers of a converted model, and nothing else, to reproduce softmax attention.

    `||(o - o*) W_o||^2 / ||o* W_o||^2`, o = mixer(q, k, v), o* = softmax(q k') v, is minimised in every layer at once,
    each on the q, k and v it has when all layers are exact: the original model runs, and hands every layer its own
    lesson. W_o is the layer's output projection, so that heads count as much as the model hears of them. With rivals,
    every layer tries these mixers too and takes the best on held-out text; one that nothing betters keeps what it had.

    Args:
        model: a converted model, changed in place.
        train: batch number i, see `mercer.hf.observing.model_inputs`.
        heldout: batches to measure on.
        rivals: names and options of other mixers to try in each layer; options not given are those of the layer's own.
        steps: batches to train on.
        learning_rate: of Adam at the start; it falls to a tenth along a cosine.
        first: leave out tokens before this one when measuring.
        report: called after each step.
        keeper: keeps how far the mixers have come, and what it holds is taken up.
        should_stop: asked after each step.

    Returns:
        The errors of every layer before and after.

    Raises:
        ValueError: no mixer, or mixers without parameters; steps or learning_rate out of range.
        FloatingPointError: a loss that is not finite.
        KeyboardInterrupt: it was to stop; the keeper holds the last step, and the model has been changed.

    Cost: a forward pass of the original model and a forward and backward pass of each mixer, a step.

    Source: attention transfer as in LoLCATs (arXiv:2410.10254); here with a relative error behind W_o.
    """
    if steps < 1 or not learning_rate > 0:
        raise ValueError(f"steps ({steps}) must be at least 1 and learning_rate ({learning_rate}) above 0")
    heldout, lessons = list(heldout), {name: _Lesson(model, name, layer, rivals) for name, layer in attached(model)}
    if lessons and not any(lesson.optimisers for lesson in lessons.values()):
        kind = type(next(layer for _, layer in attached(model)).mixer).__name__
        raise ValueError(f"{kind} has no parameters to align; convert to darkformer or lfk")
    before = measure(model, heldout, first)
    frozen = {id(p): p.requires_grad for p in model.parameters()}
    parts = [part for lesson in lessons.values() for part in lesson.parts()]
    begun = keeper.restore(parts) if keeper else 0
    tokens = sum(_tokens(train(step)) for step in range(begun))
    try:
        model.requires_grad_(False)
        for lesson in lessons.values():
            lesson.own.requires_grad_(True)
        for step in range(begun, steps):
            rate = learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            losses: list[float] = []
            teach = functools.partial(_teach, lessons, rate, losses)
            watch(model, [batch := train(step)], teach)
            tokens += _tokens(batch)
            if report is not None:
                report(step + 1, sum(losses) / max(1, len(losses)))
            _keep(keeper, step + 1, parts, stop=should_stop())
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(frozen.get(id(parameter), True))
    kept, exchanged = _choose(model, heldout, first, lessons, before)
    return Alignment(before, measure(model, heldout, first), kept, exchanged, steps, tokens)


def _keep(keeper: Keeper | None, step: int, parts: Parts, *, stop: bool) -> None:
    if keeper and stop:
        keeper.save(step, parts)
    elif keeper:
        keeper.save_if_due(step, parts)
    if stop:
        raise KeyboardInterrupt


def measure(model: Any, batches: Iterable[Any], first: int = 0) -> KernelErrors:
    """Return the errors behind W_o with every layer on the inputs that the original model gives it."""
    near, layers = window_of(model), []
    for name, found in _errors(model, batches, first, {}).items():
        layers.append(HeadError(name, None, found[OWN], found["uniform"], found["window"]))
    return KernelErrors(tuple(layers), (), *near)


def _teach(
    lessons: Mapping[str, "_Lesson"], rate: float, losses: list[float], name: str, mixer: Any, seen: Seen
) -> Tensor:
    return lessons[name].learn(seen, rate, losses)


def _choose(model: Any, heldout: list[Any], first: int, lessons: Mapping[str, "_Lesson"], before: KernelErrors) -> Any:
    """Let every layer have the best of what it had and what was trained; return which kept theirs, and which not."""
    start = {row.layer: row.error for row in before.layers}
    found = _errors(model, heldout, first, {name: lesson.rivals for name, lesson in lessons.items()})
    kept, exchanged = [], {}
    for name, lesson in lessons.items():
        best = min((OWN, *lesson.rivals), key=lambda rival: _finite(found[name][rival]))
        if not found[name][best] < start[name]:
            lesson.restore()
            kept.append(name)
        elif best != OWN:
            exchanged[name] = best
    exchange_mixers(model, {name: lessons[name].rivals[best] for name, best in exchanged.items()})
    return tuple(kept), exchanged


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


@torch.no_grad()
def _errors(
    model: Any, batches: Iterable[Any], first: int, rivals: Mapping[str, Mapping[str, Rival]]
) -> dict[str, dict[str, float]]:
    """Return, for every layer, the relative error of its mixer, its rivals, the window and the plain average."""
    near, sums = window_of(model), {}
    layers = dict(attached(model))

    def visit(name: str, mixer: Any, seen: Seen) -> Tensor:
        exact = seen.exact()
        found = {OWN: seen.o, "window": seen.near(*near), "uniform": seen.uniform(), "zero": torch.zeros_like(exact)}
        found |= {key: _mixed(rival.mixer, seen) for key, rival in rivals.get(name, {}).items()}
        rows = seen.real() & (torch.arange(exact.shape[2], device=exact.device) >= first)
        for key, o in found.items():
            square = _heard(layers[name], o - exact).double().square().sum(-1)[rows].sum().item()
            sums.setdefault(name, {}).setdefault(key, []).append(square)
        return exact

    watch(model, batches, visit)
    totals = {name: {key: math.fsum(squares) for key, squares in own.items()} for name, own in sums.items()}
    for name, own in totals.items():
        if not math.isfinite(own["zero"]):
            raise FloatingPointError(f"{name}: softmax attention on its q, k, v is not finite; check the weights")
        if not own["zero"] > 0:
            raise ValueError(f"{name}: no attention output to compare with; give batches longer than first ({first})")
    return {name: {key: value / own["zero"] for key, value in own.items()} for name, own in totals.items()}


def _heard(layer: Any, o: Float[Tensor, "B H T Dv"]) -> Float[Tensor, "B T E"]:
    """Return what the model hears of an attention output: `o W_o`, or the heads side by side where W_o is elsewhere."""
    flat = o.transpose(1, 2).flatten(2)
    after = output_projection(layer)
    if after is None or flat.shape[-1] not in after.weight.shape:
        return flat
    weight = after.weight.detach().to(flat.dtype)
    return flat @ (weight if type(after).__name__ == "Conv1D" else weight.T)


def _mixed(mixer: Any, seen: Seen) -> Tensor:
    """Return what another mixer makes of the same inputs."""
    inputs = {"x": seen.x, "rotate": seen.rotate, "mask": seen.mask, "segments": seen.segments}
    return mixer(seen.q, seen.k, seen.v, **inputs)[0]


class _Lesson:
    """One layer: its mixer, the rivals, and an optimiser for each that can learn."""

    def __init__(self, model: Any, name: str, layer: Any, kinds: Sequence[Kind]):
        self.name, self.layer, self.own = name, layer, layer.mixer
        self.rivals = {_spell(kind): new_mixer(model, name, *kind) for kind in kinds}
        for rival in self.rivals.values():
            _take_centers(rival.mixer, self.own)
        mixers = {OWN: self.own} | {key: rival.mixer for key, rival in self.rivals.items()}
        self.saved = {key: value.detach().clone() for key, value in self.own.state_dict().items()}
        self.mixers = mixers
        self.optimisers = {
            key: torch.optim.Adam(mixer.parameters(), betas=(0.9, 0.95))
            for key, mixer in mixers.items()
            if any(True for _ in mixer.parameters())
        }

    def learn(self, seen: Seen, rate: float, losses: list[float]) -> Tensor:
        """Teach every mixer from one call, and return what softmax would have given."""
        with torch.no_grad():
            exact = seen.exact()
            real = seen.real()[:, None, :, None]
            size = _heard(self.layer, exact * real).float().square().sum().clamp_min(1e-30)
        for key, optimiser in self.optimisers.items():
            o = seen.o if key == OWN else _mixed(self.mixers[key], seen)
            loss = _heard(self.layer, (o - exact) * real).float().square().sum() / size
            if not torch.isfinite(loss):
                raise FloatingPointError(f"{self.name}: the loss is {loss.item()}; lower the learning rate ({rate:g})")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            group = optimiser.param_groups[0]
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = rate
            optimiser.step()
            losses.append(loss.item())
        return exact

    def parts(self) -> Parts:
        """Return the mixers that learn, with their optimisers."""
        return [(self.mixers[key], optimiser) for key, optimiser in self.optimisers.items()]

    def restore(self) -> None:
        """Give the layer's own mixer back what it had."""
        self.own.load_state_dict(self.saved)


def _spell(kind: Kind) -> str:
    name, options = kind
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def _take_centers(mixer: Any, other: Any) -> None:
    if getattr(mixer, "center", False) and getattr(other, "center", False):
        set_centers(mixer, other.key_center, other.query_center)


def _tokens(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    return ids.numel() if isinstance(ids, Tensor) else 0
