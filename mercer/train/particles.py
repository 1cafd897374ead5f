"""Phase A: the directions of a model's features learn from labels, as particles that repel one another."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mercer.errors import NumericalWarning
from mercer.hf.install import attached
from mercer.hf.pooling import pooled_states
from mercer.particles import kernel_alignment, langevin_step, project_ball, riesz_repulsion
from mercer.train.classifier_recipe import AlignConfig

DEFAULT = AlignConfig()


@dataclasses.dataclass(frozen=True)
class Aligned:
    """The particles of a model at one moment, measured without noise.

    Attributes:
        step: Langevin steps taken so far.
        energy: -alignment + strength * repulsion.
        alignment: of the pooled outputs with the labels, a mean over the batches measured.
        repulsion: W_{N,s}, added up over layers and heads.
        least_distance: of two particles of one head.
        drift: root mean square over particles of the noise-free, projected move, divided by the step size.
    """

    step: int
    energy: float
    alignment: float
    repulsion: float
    least_distance: float
    drift: float


Report = Callable[[Aligned], None]


def align_particles(
    model: Any,
    batch: Callable[[int], Any],
    *,
    steps: int,
    config: AlignConfig = DEFAULT,
    pooling: str = "mean",
    check: Iterable[Any] = (),
    seed: int = 0,
    report: Report | None = None,
) -> list[Aligned]:
    """Let the particles of every layer and head follow projected Langevin dynamics, and nothing else.

    With P the pooled outputs of a batch, in evaluation mode, and W the repulsion of the N particles of one head,

    `H = -alignment(P, y) + strength sum_heads W`,
    `omega <- project(omega - step_size clip(N grad H) + sqrt(2 step_size / inverse_temperature) xi)`.

    The clip is on the norm of a head's drift, the projection on the norm of each particle. Encoders and decoders are
    one: a causal mixer sums over the past where a bidirectional one sums over all real tokens.

    Args:
        model: a model whose mixers have `features` (particle, performer, ...), changed in place.
        batch: batch number i: `inputs()`, the arguments of the model, and `labels`, one a text.
        steps: most steps taken.
        config: see `AlignConfig`; `epochs` and `batch_size` are the caller's business.
        pooling: "mean" over real tokens, the "first" or the "last" of them.
        check: batches on which the noise-free drift is measured every `check_every` steps (0: at the end); the phase
            stops when it falls to `tolerance`.
        seed: of the noise.
        report: called after each step.

    Returns:
        The state before the first step and at every check, on the batches of `check`; empty without any.

    Raises:
        ValueError: the model has no features to align, or redraws them, or the labels do not fit the kind of alignment.
        FloatingPointError: a gradient that is not finite.

    Cost: a step is a forward pass and a backward pass that ends at the lowest layer's features and takes no gradient
    of a weight; and O(N^2 D) a head.

    Source: Coulomb particles (arXiv:2607.23869), sec. 3, App. C.4 and D, Phase A; N, s, beta there are `num_features`,
    `exponent`, `inverse_temperature`.

    In a language model, whose last token has seen the text (`freeze_particles` then keeps them through its training):
    `align_particles(language_model, batch, steps=100, pooling="last")`.

    >>> from types import SimpleNamespace
    >>> from mercer.hf import from_scratch
    >>> model = from_scratch("tiny", "particle", kind="classifier", vocab_size=64, max_length=8, pooling="mean")
    >>> ids, labels = torch.randint(64, (8, 8)), torch.tensor([0, 1] * 4)
    >>> batch = SimpleNamespace(inputs=lambda: {"input_ids": ids}, labels=labels)
    >>> history = align_particles(model, lambda i: batch, steps=2, check=[batch])
    >>> [state.step for state in history]
    [0, 2]
    """
    batches = list(check)
    with ParticleSystem(model, config, pooling=pooling, seed=seed) as system:
        history = [system.measure(batches)] if batches else []
        for step in range(steps):
            state = system.step(batch(step))
            if report is not None:
                report(state)
            due = (step + 1) % config.check_every == 0 if config.check_every else False
            if batches and (due or step + 1 == steps):
                history.append(system.measure(batches))
                if history[-1].drift <= config.tolerance:
                    break
    return history


class ParticleSystem:
    """The particles of a model: the directions of its features, a system of its own in each layer and head.

    While it is open (a context), all parameters of the model are frozen and it is in evaluation mode.

    Args:
        model: a model with mixers that have `features`.
        config: of the dynamics.
        pooling: see `mercer.hf.pooling.pool`.
        seed: of the noise, which is a function of it and the step alone.
        steps: taken so far, of a phase that goes on.

    Raises:
        ValueError: the model has no features, or redraws them.
    """

    def __init__(
        self, model: Any, config: AlignConfig = DEFAULT, *, pooling: str = "mean", seed: int = 0, steps: int = 0
    ):
        self.model, self.config, self.pooling, self.seed, self.steps = model, config, pooling, seed, steps
        self.omegas = particles(model)
        self._before: tuple[bool, list[tuple[Any, bool]]] | None = None

    def __enter__(self) -> "ParticleSystem":
        learned = [(p, p.requires_grad) for p in self.model.parameters()]
        self._before = self.model.training, learned
        self.model.eval().requires_grad_(False)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self.model.train(self._before[0])
        for parameter, learned in self._before[1]:
            parameter.requires_grad_(learned)

    def step(self, batch: Any) -> Aligned:
        """Take one step on one batch; return the state before it, its drift from this batch.

        Warns, before the first one, where most particles lie outside the ball: it puts each of them on the sphere.
        """
        if self.steps == 0:
            warn_outside(self.omegas, self.config.radius)
        state, drifts = self._drifts([batch])
        config, noise = self.config, self._noise()
        with torch.no_grad():
            for omega, drift in zip(self.omegas, drifts, strict=True):
                moved = langevin_step(
                    omega,
                    drift / omega.shape[1],
                    step_size=config.step_size,
                    inverse_temperature=config.inverse_temperature,
                    radius=config.radius,
                    generator=noise,
                )
                omega.copy_(moved)
        self.steps += 1
        return dataclasses.replace(state, step=self.steps)

    def measure(self, batches: Iterable[Any]) -> Aligned:
        """Measure energies and the drift on some batches, without moving."""
        return self._drifts(batches)[0]

    @torch.no_grad()
    def alignment_of(self, batches: Iterable[Any]) -> float:
        """Return the mean alignment over batches that have a pair of texts, without any gradient."""
        values = []
        for batch in batches:
            if int((batch.labels >= 0).sum()) >= 2:
                values.append(self._alignment(batch).item())
        return sum(values) / max(1, len(values))

    def _drifts(self, batches: Iterable[Any]) -> tuple[Aligned, list[Float[Tensor, "H N D"]]]:
        """Return the state, and of every layer the clipped N grad H."""
        config, alignment, count = self.config, 0.0, 0
        gradients = [torch.zeros_like(omega) for omega in self.omegas]
        for batch in batches:
            value, found = self._alignment_gradients(batch)
            alignment, count = alignment + value, count + 1
            for total, gradient in zip(gradients, found, strict=True):
                total += gradient
        if not math.isfinite(alignment):
            raise FloatingPointError(f"the alignment is {alignment} at step {self.steps}; use float32 weights")
        alignment /= max(1, count)
        pushes = [[riesz_repulsion(head, s=config.exponent) for head in omega] for omega in self.omegas]
        drifts, pull, number = [], 0.0, 0
        for omega, gradient, push in zip(self.omegas, gradients, pushes, strict=True):
            repulsion = torch.stack([head.gradient for head in push]).to(omega.dtype)
            drift = -omega.shape[1] / max(1, count) * gradient + config.strength * repulsion
            drifts.append(project_ball(drift.flatten(1), config.clip).view_as(omega))
            target = project_ball(omega - config.step_size * drifts[-1], config.radius)
            pull += (target - omega).double().square().sum().item()
            number += omega.shape[0] * omega.shape[1]
        heads = [head for push in pushes for head in push]
        repulsion = sum(head.energy.item() for head in heads)
        state = Aligned(
            step=self.steps,
            energy=config.strength * repulsion - alignment,
            alignment=alignment,
            repulsion=repulsion,
            least_distance=min(head.least_distance.item() for head in heads),
            drift=math.sqrt(pull / number) / config.step_size,
        )
        return state, drifts

    def _alignment_gradients(self, batch: Any) -> tuple[float, list[Tensor]]:
        """Return the alignment of a batch and its gradient in the particles of every layer."""
        for omega in self.omegas:
            omega.requires_grad_(True)
        try:
            with torch.enable_grad():
                value = self._alignment(batch)
                gradients = torch.autograd.grad(value, self.omegas)
        finally:
            for omega in self.omegas:
                omega.requires_grad_(False)
        return value.item(), list(gradients)

    def _alignment(self, batch: Any) -> Float[Tensor, ""]:
        pooled = pooled_states(self.model, batch.inputs(), self.pooling)
        pooled = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        return label_alignment(pooled, batch.labels.to(pooled.device), self.config.kind)

    def _noise(self) -> torch.Generator:
        """Return the noise of a step: resuming at a step continues the same draws."""
        mixed = (self.seed * 1_000_003 + self.steps) % 2**63
        return torch.Generator(self.omegas[0].device).manual_seed(mixed)


def particles(model: Any) -> list[Float[Tensor, "H N D"]]:
    """Return the particles of every layer that carries a mixer with features, in order; views, not copies.

    Raises:
        ValueError: there are none, or the features are redrawn in training.
    """
    found = [layer.mixer.features for _, layer in attached(model) if hasattr(layer.mixer, "features")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no random features to align; choose the mixer particle (or performer, lfk, "
            "darkformer)"
        )
    if any(features.redraw_steps is not None for features in found):
        raise ValueError("redraw_steps would replace the particles by random directions; leave it out")
    return [features.omega for features in found]


def warn_outside(omegas: list[Float[Tensor, "H N D"]], radius: float) -> None:
    """Warn where more than half of all particles lie outside the ball of this radius."""
    norms = torch.cat([omega.norm(dim=-1).flatten() for omega in omegas])
    outside = int((norms > radius).sum())
    if 2 * outside > len(norms):
        warnings.warn(
            f"{outside} of {len(norms)} particles lie outside the radius {radius:g}, their median norm is "
            f"{norms.median():.3g}: the first step puts each of them on the sphere; raise --align.radius",
            NumericalWarning,
            stacklevel=3,
        )


def label_alignment(pooled: Float[Tensor, "B E"], labels: Int[Tensor, " B"], kind: str) -> Float[Tensor, ""]:
    """Return `mercer.particles.kernel_alignment` of pooled outputs with classes 0, 1, ...; signed: 0 and 1 are -1, +1.

    Rows with a negative label, which only fill a batch, do not count.

    Raises:
        ValueError: `signed` with more than two classes, an unknown kind, or fewer than two texts.

    >>> label_alignment(torch.ones(2, 1), torch.tensor([0, 1]), "signed").item()
    -1.0
    """
    kept = labels >= 0
    pooled, labels = pooled[kept], labels[kept]
    if kind == "signed":
        if int(labels.max()) > 1:
            raise ValueError(f"signed alignment is for two classes, and there is a class {int(labels.max())}; "
                             "choose within_class or centered")  # fmt: skip
        labels = 2 * labels - 1
    return kernel_alignment(pooled, labels, kind)
