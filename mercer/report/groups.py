"""Sort runs into comparable groups: same recipe and settings, so that only the mixer and the seed differ."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mercer.mixers import mixer_options
from mercer.report.statistics import usable
from mercer.train.record import Run

BASELINE = "softmax"
# Keys of a config that may differ within one comparison: what is compared, the seed, and what changes no number.
_FREE_KEYS = frozenset({"mixer", "mixer_options", "seed", "checkpoint_every", "keep"})


@dataclass(frozen=True)
class Variant:
    """One mixer with its options: its finished runs, one a seed, and those that did not finish."""

    label: str
    mixer: str
    done: list[Run]
    unfinished: list[Run] = field(
        default_factory=list
    )  # failed, interrupted, or finished with a loss that is no number

    @property
    def runs(self) -> list[Run]:
        """Return all runs, by seed."""
        return sorted([*self.done, *self.unfinished], key=lambda run: (run.seed, run.created))

    def by_seed(self, name: str) -> dict[int, float]:
        """Return a figure of the finished runs by seed, where it is there and finite."""
        values = {run.seed: getattr(run, name) for run in self.done}
        return {seed: float(value) for seed, value in values.items() if usable(value)}


@dataclass(frozen=True)
class Group:
    """Runs that may be compared; `notes` say what a reader of the figures must know."""

    title: str
    variants: list[Variant]
    notes: list[str]

    @property
    def baseline(self) -> Variant | None:
        """Return the softmax variant that finished, with the fewest options where there are several."""
        return next((variant for variant in self.variants if variant.mixer == BASELINE and variant.done), None)

    @property
    def runs(self) -> list[Run]:
        """Return the runs of all variants."""
        return [run for variant in self.variants for run in variant.runs]


def status_of(run: Run) -> str:
    """Return the run's status, or "diverged" where it finished with a validation loss that is no number.

    A phase that has other measures and no validation loss, such as the alignment of particles, is simply done.
    """
    other = run.valid_loss is None and bool(run.measures) and "validation" not in run.measures
    return "diverged" if run.status == "done" and not usable(run.valid_loss) and not other else str(run.status)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the groups in order of their titles; runs of different recipes, sizes or settings are never mixed.

    >>> group_runs([])
    []
    """
    buckets: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.recipe, run.size, _settings(run.config)], sort_keys=True, default=str)
        buckets.setdefault(key, []).append(run)
    titles = _titles(list(buckets.values()))
    groups = [_group(title, members) for title, members in zip(titles, buckets.values(), strict=True)]
    return sorted(groups, key=lambda group: group.title)


def _settings(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(key): _settings(value) for key, value in config.items() if key not in _FREE_KEYS}
    return config


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    return {
        name: leaf
        for key, value in config.items()
        for name, leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _titles(buckets: list[list[Run]]) -> list[str]:
    """Name each bucket by recipe and size, and by the settings that tell it from others of that name."""
    titles = []
    for bucket in buckets:
        first = bucket[0]
        title = f"{first.recipe}, size {first.size}" if first.size else str(first.recipe)
        mine = _flat(_settings(first.config))
        twins = [b[0] for b in buckets if (b[0].recipe, b[0].size) == (first.recipe, first.size)]
        others = [_flat(_settings(run.config)) for run in twins]
        telling = sorted(name for name in mine if any(other.get(name) != mine[name] for other in others))
        titles.append(title + "".join(f", {name}={mine[name]}" for name in telling))
    return titles


def _group(title: str, runs: list[Run]) -> Group:
    buckets: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        options = json.dumps(run.mixer_options, sort_keys=True, default=str)
        buckets.setdefault((run.mixer, options), []).append(run)
    repeats: list[str] = []
    variants = []
    for (mixer, _), members in buckets.items():
        siblings = [bucket[0].mixer_options for (name, _), bucket in buckets.items() if name == mixer]
        variants.append(_variant(_label(mixer, members[0].mixer_options, siblings), members, repeats))
    variants.sort(key=_rank)
    return Group(title, variants, repeats + _notes(variants))


def _label(mixer: str, options: dict[str, Any], siblings: list[dict[str, Any]]) -> str:
    """Return the mixer's name, with the options that tell it from others of that name, in the group or by default."""
    try:
        known = mixer_options(mixer, **options)
    except ValueError:  # a run of another version, whose mixer or map is not here
        known = {}
    telling = {key for key, value in options.items() if value != known.get(key)}
    telling |= {key for other in siblings for key in {*options, *other} if options.get(key) != other.get(key)}
    shown = ", ".join(f"{key}={options[key]}" for key in sorted(telling) if key in options)
    return f"{mixer} ({shown})" if shown else mixer


def _variant(label: str, runs: list[Run], repeats: list[str]) -> Variant:
    """Keep the newest finished run of each seed: the same seed again is no new evidence."""
    newest: dict[int, Run] = {}
    finished = sorted((run for run in runs if status_of(run) == "done"), key=lambda run: run.created)
    for run in finished:
        newest[run.seed] = run
    if len(finished) > len(newest):
        repeats.append(
            f"{label}: of {len(finished)} finished runs only the newest of each seed counts ({len(newest)})."
        )
    return Variant(
        label,
        runs[0].mixer,
        [newest[seed] for seed in sorted(newest)],
        [run for run in runs if status_of(run) != "done"],
    )


def _rank(variant: Variant) -> tuple[bool, int, float, str]:
    """Order: the baseline, then by validation loss, then what never finished."""
    losses = list(variant.by_seed("valid_loss").values())
    mean = sum(losses) / len(losses) if losses else float("inf")
    options = len(variant.runs[0].mixer_options)
    return variant.mixer != BASELINE, options if variant.mixer == BASELINE else 0, mean, variant.label


def _notes(variants: list[Variant]) -> list[str]:
    done = [run for variant in variants for run in variant.done]
    notes = []
    for variant in variants:
        for status in sorted({status_of(run) for run in variant.unfinished}):
            count = sum(status_of(run) == status for run in variant.unfinished)
            noun = "run" if count == 1 else "runs"
            notes.append(f"{variant.label}: {count} {noun} {status}, not counted in any mean.")
    seeds = {tuple(run.seed for run in variant.done) for variant in variants if variant.done}
    if len(seeds) > 1:
        notes.append(
            "The mixers did not finish the same seeds: a gap is over the seeds that both finished, or unpaired."
        )
    if done and not any(variant.mixer == BASELINE and variant.done for variant in variants):
        notes.append(f"No finished {BASELINE} run is here, so there is no gap to give.")
    tokens = {run.train_tokens for run in done}
    if len(tokens) > 1:
        notes.append(f"The runs saw different amounts of text: {min(tokens):,} to {max(tokens):,} tokens.")
    if len({(run.device, run.num_threads) for run in done}) > 1:
        notes.append("The runs were made on different devices or thread counts; do not compare their speed or memory.")
    if len({run.commit for run in done}) > 1 or len({json.dumps(run.versions, sort_keys=True) for run in done}) > 1:
        notes.append("The runs were made with different versions of the code or of its libraries.")
    return notes
