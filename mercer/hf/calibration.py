"""Fit the feature maps of a converted model to the queries and keys it really sees."""

import dataclasses
import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.errors import NumericalWarning, unknown
from mercer.features import FeatureMap
from mercer.hf.install import attached
from mercer.hf.observing import Batches, Seen, watch
from mercer.hf.spans import spans
from mercer.mixers.linear import centers, set_centers

_MODES = ("center", "whiten", "proposal")
_LIMIT = 0.5  # of Thm 3.2: an eigenvalue of Lambda at or above it has no proposal of finite variance
_FLOOR = 1e-6  # of the largest eigenvalue: directions below hold rounding only


@dataclasses.dataclass(frozen=True)
class HeadMoments:
    """The largest eigenvalue of Lambda, the covariance of what the features of one key head see; see `calibrate`."""

    layer: str
    head: int
    before: float
    after: float

    @property
    def holds(self) -> bool:
        """Return whether the condition of Thm 3.2, eigenvalues below 1/2, holds now."""
        return self.after < _LIMIT


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What `mercer.calibrate` found and left, head by head; print it to read it."""

    mode: str
    heads: tuple[HeadMoments, ...]
    tokens: int

    def __str__(self) -> str:
        outside = [row for row in self.heads if not row.holds]
        width = max(len(row.layer) for row in self.heads)
        lines = [
            f"{self.mode} on {self.tokens:,} tokens: the largest eigenvalue of Lambda is below 1/2 (Thm 3.2) in "
            f"{len(self.heads) - len(outside)} of {len(self.heads)} key heads",
            f"{'layer':<{width}}  head  {'before':>10}  {'after':>10}  below 1/2",
        ]
        lines += [
            f"{row.layer:<{width}}  {row.head:>4}  {row.before:>10.4g}  {row.after:>10.4g}  {word}"
            for row in self.heads
            for word in ["yes" if row.holds else "no"]
        ]
        return "\n".join(lines)


class Moments:
    """Count, sum and products of the scaled queries and of the scaled keys of each key head of one layer."""

    def __init__(self) -> None:
        self.counts = [0, 0]
        self.sums: list[Any] = [0, 0]
        self.products: list[Any] = [0, 0]

    def add(self, mixer: Any, seen: Seen) -> None:
        """Count one call; the query heads of a group count together."""
        real, root = seen.real(), abs(mixer.scale) ** 0.5
        for i, x in enumerate((seen.q, seen.k)):
            grouped = x.unflatten(1, (mixer.num_kv_heads, -1)).permute(1, 2, 0, 3, 4)  # [Hk, group, B, T, D]
            rows = root * grouped[:, :, real].flatten(1, 2).double()
            self.counts[i] += rows.shape[1]
            self.sums[i] = self.sums[i] + rows.sum(1)
            self.products[i] = self.products[i] + rows.mT @ rows

    @property
    def means(self) -> list[Float[Tensor, "Hk D"]]:
        """Return the mean query and the mean key."""
        return [total / count for total, count in zip(self.sums, self.counts, strict=True)]

    def covariance(self, centres: list[Any]) -> Float[Tensor, "Hk D D"]:
        """Return Lambda about two centres: the mean of the second moments of queries and of keys."""
        found = []
        for count, mean, products, centre in zip(self.counts, self.means, self.products, centres, strict=True):
            shift = mean - centre
            spread = products / count - mean[:, :, None] * mean[:, None, :]
            found.append(spread + shift[:, :, None] * shift[:, None, :])
        return (found[0] + found[1]) / 2


@torch.no_grad()
def calibrate(model: Any, batches: Batches, mode: str = "center", *, clip: float | None = None) -> CalibrationReport:
    """Fit the feature maps of a converted model to its own queries and keys, over a few batches.

    With q and k scaled so that q.k is the logit, and Lambda = (E[qq'] + E[kk']) / 2 of each key head, about the centres
    it carries:

    * "center": the means of all queries and of all keys become the centres of every head. Softmax does not notice, and
      features of what is left have less variance. Comes first, before another mode or a training.
    * "whiten": M = D^(-1/4) Lambda^(-1/2), so that M q and M k have covariance D^(-1/2) I. The kernel becomes
      exp(q' M'M k): another one, which alignment or finetuning must make up for.
    * "proposal": features are drawn from N(0, (I + 2 Lambda)(I - 2 Lambda)^-1) and reweighted. The kernel stays; only
      the error of its estimate changes.

    Args:
        model: a model whose mixers have features, changed in place; saved with it.
        batches: token numbers [B, T], what a tokenizer returns, or batches of `mercer.data`.
        mode: "center", "whiten" or "proposal".
        clip: for "proposal", lower eigenvalues of Lambda to this value (below 1/2) instead of refusing them.

    Returns:
        The largest eigenvalue of Lambda in every layer and head, before and after, with the condition of Thm 3.2.

    Raises:
        ValueError: unknown mode; a mixer that this mode cannot fit; eigenvalues not below 1/2 in "proposal", with the
            layers and heads: nothing is changed then.

    Warns:
        NumericalWarning: eigenvalues not below 1/2 afterwards, clipped eigenvalues, fewer directions than D.

    Cost: one forward pass, and D^2 numbers for every head.

    Source: DARKFormer (arXiv:2603.04127), Prop. C.1 and Thm 3.2.

    Example:
        >>> import mercer, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=1, n_head=4))
        >>> model = mercer.attach(model, "darkformer", num_features=16)
        >>> report = calibrate(model, [torch.arange(60)[None]], mode="whiten")
        >>> [round(head.after, 3) for head in report.heads]
        [0.25, 0.25, 0.25, 0.25]
    """
    if mode not in _MODES:
        raise unknown("mode", mode, _MODES)
    if clip is not None and not (mode == "proposal" and 0 < clip < _LIMIT):
        raise ValueError(f"clip ({clip}) belongs to mode='proposal' and must lie between 0 and 1/2")
    layers = dict(attached(model))
    for name, layer in layers.items():
        _check(name, layer.mixer, mode)
    moments = {name: Moments() for name in layers}
    watch(model, batches, lambda name, mixer, seen: moments[name].add(mixer, seen))
    lambdas = {name: moments[name].covariance(_centers(layer.mixer)) for name, layer in layers.items()}
    before = {name: _largest(layers[name], value) for name, value in lambdas.items()}
    if mode == "proposal":
        _check_proposals(before, clip)
        _carry_proposals(model)
    elif mode == "center":
        _carry_centers(model)
    for name, layer in layers.items():
        if mode == "center":
            _center(layer.mixer, moments[name])
            lambdas[name] = moments[name].covariance(_centers(layer.mixer))
        elif mode == "whiten":
            _whiten(layer.mixer.features, lambdas[name])
        else:
            _propose(layer.mixer.features, lambdas[name], clip)
    after = {name: _largest(layers[name], value) for name, value in lambdas.items()}
    rows = [
        HeadMoments(name, head, *pair)
        for name in layers
        for head, pair in enumerate(zip(before[name].tolist(), after[name].tolist(), strict=True))
    ]
    report = CalibrationReport(mode, tuple(rows), next(iter(moments.values())).counts[1])
    if mode == "whiten":
        _warn_outside(report)
    return report


def _largest(layer: Any, covariance: Float[Tensor, "Hk D D"]) -> Float[Tensor, " Hk"]:
    """Return the largest eigenvalue of M Lambda M' per key head, what the directions of the features meet."""
    metric = getattr(layer.mixer.features, "metric", None)
    if metric is not None:
        metric = metric.double().to(covariance.device)
        covariance = metric @ covariance @ metric.mT
    return torch.linalg.eigvalsh(covariance)[:, -1]


def _check(name: str, mixer: Any, mode: str) -> None:
    features, kind = getattr(mixer, "features", None), type(mixer).__name__
    if not isinstance(features, FeatureMap):
        raise ValueError(f"{name} carries {kind}, which has no features to calibrate; attach darkformer or performer")
    if mode == "center" and not (features.exponential and hasattr(mixer, "center")):
        raise ValueError(f"{name} carries {kind}, which has no centres; attach performer, darkformer or lfk")
    if mode == "whiten" and not hasattr(features, "metric"):
        raise ValueError(f"{name} carries {kind}, which has no metric M to whiten with; attach darkformer")
    if mode == "proposal" and not hasattr(features, "set_proposal"):
        raise ValueError(
            f"{name} carries {kind}, whose features have no proposal; attach darkformer, or particle with features=oprf"
        )


def _centers(mixer: Any) -> list[Any]:
    """Return the centres of the scaled queries and keys that the features of a mixer see."""
    if not getattr(mixer, "center", False):
        return [0.0, 0.0]
    return [abs(mixer.scale) ** 0.5 * center.double() for center in (mixer.query_center, mixer.key_center)]


def _center(mixer: Any, moments: Moments) -> None:
    queries, keys = (mean / abs(mixer.scale) ** 0.5 for mean in moments.means)
    set_centers(mixer, keys, queries)


def _whiten(features: Any, covariance: Float[Tensor, "Hk D D"]) -> None:
    values, vectors = torch.linalg.eigh(covariance)
    floor = _FLOOR * values[:, -1:]
    rank, width = features.metric.shape[1:]
    if bool((values[:, -rank:] < floor).any()):
        warnings.warn(
            f"the queries and keys seen span fewer than {rank} directions; give more text, or a lower rank",
            NumericalWarning,
            stacklevel=4,
        )
    inverse = values.clamp_min(floor).rsqrt() * width**-0.25
    metric = inverse[:, :, None] * vectors.mT
    if rank == width:
        metric = vectors @ metric  # the symmetric root: M stays as near to a multiple of I as it can
    features.metric.copy_(metric[:, -rank:])


def _propose(features: Any, covariance: Float[Tensor, "Hk D D"], clip: float | None) -> None:
    if clip is not None:
        metric = getattr(features, "metric", None)
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        metric = eye.expand_as(covariance) if metric is None else metric.to(covariance)
        values, vectors = torch.linalg.eigh(metric @ covariance @ metric.mT)
        clipped = (vectors * values.clamp(max=clip)[:, None, :]) @ vectors.mT
        back = torch.linalg.pinv(metric)
        covariance = back @ clipped @ back.mT
    features.set_proposal(covariance)


def _outside(largest: dict[str, Tensor], limit: float) -> tuple[int, int, str]:
    """Return how many heads reach the limit, of how many, and which is the worst, in words."""
    found = {name: values for name, values in largest.items() if bool((values >= limit).any())}
    count, total = sum(int((v >= limit).sum()) for v in found.values()), sum(v.numel() for v in largest.values())
    if not count:
        return 0, total, ""
    worst = max(found, key=lambda name: found[name].max().item())
    value, head = found[worst].max(0)
    return count, total, f"{spans(found)}; the largest is {value.item():.4g}, head {head.item()} of {worst}"


def _check_proposals(largest: dict[str, Tensor], clip: float | None) -> None:
    count, total, words = _outside(largest, _LIMIT if clip is None else clip)
    if not count:
        return
    if clip is None:
        raise ValueError(
            f"Lambda has eigenvalues that are not below 1/2 in {count} of {total} key heads ({words}): Thm 3.2 has no "
            "proposal of finite variance there; center or whiten first, or pass clip=0.45 to lower them in the proposal"
        )
    warnings.warn(
        f"eigenvalues of Lambda were lowered to {clip} in the proposals of {count} of {total} key heads ({words}): the "
        "estimates stay unbiased, but their variance is not bounded",
        NumericalWarning,
        stacklevel=3,
    )


def _warn_outside(report: CalibrationReport) -> None:
    largest: dict[str, Tensor] = {}
    for row in report.heads:
        largest[row.layer] = torch.cat([largest.get(row.layer, torch.empty(0)), torch.tensor([row.after])])
    count, total, words = _outside(largest, _LIMIT)
    if count:
        warnings.warn(
            f"after {report.mode}, Lambda still has eigenvalues that are not below 1/2 in {count} of {total} key heads "
            f"({words}): random features estimate their kernel with unbounded variance; whiten, or align",
            NumericalWarning,
            stacklevel=3,
        )


def _carry_proposals(model: Any) -> None:
    """Give DARKFormer's maps their buffers for a proposal, and the configuration the option that makes them."""
    for _, layer in attached(model):
        features = layer.mixer.features
        if getattr(features, "carries_proposal", True):
            continue
        features.carries_proposal = True
        values = features.initial_values()
        for name in ("proposal", "bias"):
            delattr(features, name)
            features.register_buffer(name, values[name].to(features.omega))
        _set_option(model, "proposal")


def _carry_centers(model: Any) -> None:
    """Give mixers their buffers for centres, and the configuration the option that makes them."""
    for _, layer in attached(model):
        mixer = layer.mixer
        if mixer.center:
            continue
        mixer.center = True
        for name, value in centers(mixer).items():
            mixer.register_buffer(name, value.to(mixer.features.omega))
        _set_option(model, "center")


def _set_option(model: Any, name: str) -> None:
    """Let a saved model be built with an option it was not attached with."""
    spec = model.config.mercer
    others = {
        index: {**own, "options": {**own["options"], name: True}} for index, own in spec.get("by_layer", {}).items()
    }
    model.config.mercer = {**spec, "options": {**spec["options"], name: True}}
    if others:
        model.config.mercer["by_layer"] = others
    model.mercer_description = dataclasses.replace(model.mercer_description, options=model.config.mercer["options"])
