"""`mercer train` and `mercer compare`."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from mercer.cli.runs import Job, Outcome, start_server, train_in_turn, train_side_by_side
from mercer.cli.threads import check_threads, set_threads
from mercer.train import config
from mercer.train.recipe import Recipe
from mercer.train.record import Run, command_line

Words = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
_OPTIONS = (
    "config",
    "size",
    "seed",
    "out",
    "resume",
    "overwrite",
    "threads",
    "dry_run",
    "mixers",
    "seeds",
    "jobs",
    "help",
)


def train(
    *words: Words,
    config: Path | None = None,
    size: str | None = None,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
) -> int:
    """Train one model: `mercer train RECIPE [--KEY VALUE ...]`.

    **Examples**

    ```
    mercer train tiny --data.source my_text.txt
    mercer train demo --model.mixer cubit --model.mixer-options.share true
    mercer train small --size 125m --optim.lr 6e-4 --train.steps 20000 --dry-run
    mercer train --config runs/demo-cubit-s0/config.yaml --seed 1
    mercer train demo --model.mixer cubit --resume
    torchrun --nproc-per-node 4 -m mercer.cli train cubit-125m --data.source my_folder
    ```

    **Settings** (`--KEY VALUE`; `mercer train RECIPE --dry-run` prints their values)

    * `data.source` a corpus, a path to text, jsonl or parquet, or hf:NAME; `data.tokenizer` byte, bpe:4096 or a folder;
      `data.length` tokens in a window; `data.validation-fraction`, `data.max-bytes` of the text to read
    * `model.size`, `model.mixer`, `model.mixer-options.NAME`; `model.hidden-size`, `model.num-layers`,
      `model.num-heads`, `model.intermediate-size` override the size
    * `optim.lr`, `optim.betas`, `optim.weight-decay`, `optim.warmup` as a share of the steps, `optim.min-lr-ratio`,
      `optim.clip`
    * `train.steps`, `train.batch-size` windows over all processes, `train.accumulate` batches in a step,
      `train.precision` float32 or bf16, `train.eval-every`, `train.eval-windows`, `train.final-eval-windows`,
      `train.checkpoint-every`, `train.keep` checkpoints, `train.shard` FSDP2 instead of DDP
    * `seed`

    Ctrl-C saves a checkpoint and prints the command to go on.

    Args:
        words: the recipe, and settings.
        config: a YAML file with settings, such as the config.yaml of another run.
        size: the one dial for beginners: the model's size, `mercer list sizes`.
        seed: of the weights and the order of the data.
        out: the run's folder; runs/RECIPE-MIXER-sSEED by default.
        resume: go on from the newest checkpoint in the folder.
        overwrite: delete the run in the folder first.
        threads: CPU threads to compute with.
        dry_run: print settings, parameters, FLOPs and memory, and train nothing.
    """
    recipe = read_recipe(words, config, size, seed)
    out = out or Path("runs", f"{recipe.name}-{variant_name(recipe)}-s{recipe.seed}")
    set_threads(threads)
    if dry_run:
        _print_estimate(recipe)
        return 0
    from mercer.train import loop

    run = loop.train(recipe, out, resume=resume, overwrite=overwrite)
    if run.status == "interrupted":
        return interrupted(run)
    if _is_main():
        print(f"{summary(run)}  {out}")
    return 0


def compare(
    *words: Words,
    mixers: str = "softmax,deltaformer,cubit",
    seeds: int = 3,
    jobs: int = 1,
    config: Path | None = None,
    size: str | None = None,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
) -> int:
    """Train several mixers by one recipe, alike but for the mixer, and compare them: `mercer compare RECIPE`.

    **Examples**

    ```
    mercer compare demo
    mercer compare tiny --data.source my_text.txt --mixers softmax,cubit --seeds 5
    mercer compare demo --mixers softmax,cubit,cubit:share=true,cubit:lrr=false --out runs/ablation
    mercer compare demo --jobs 2 --resume
    ```

    Prints a table with means and standard errors over the seeds, and writes report.html and table.md into the folder.
    A run that diverges is reported as failed and the others go on. All settings of `mercer train` can be given.

    Args:
        words: the recipe, and settings.
        mixers: names, separated by commas; options follow a name as NAME:OPTION=VALUE.
        seeds: how many seeds each mixer is trained with, from --seed on.
        jobs: runs side by side, each in a process of its own; small models gain more from this than from threads.
        config: a YAML file with settings.
        size: the model's size, `mercer list sizes`.
        seed: the first seed.
        out: the folder of all runs; runs/RECIPE by default.
        resume: skip what is finished, go on with what is not.
        overwrite: delete these runs first.
        threads: CPU threads of each run; with --jobs an equal share of the processors.
        dry_run: print parameters, FLOPs and memory of each mixer, and train nothing.
    """
    base = read_recipe(words, config, size, seed)
    for name, value in (("seeds", seeds), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if jobs > 1 and "RANK" in os.environ:
        raise ValueError(f"jobs ({jobs}) and torchrun exclude each other; leave out --jobs")
    variants = _variants(base, mixers)
    out = out or Path("runs", base.name)
    if dry_run:
        for variant in variants:
            _print_estimate(variant)
        return 0
    if jobs > 1:
        start_server()  # it imports torch while this process does the same
    for variant in variants:  # a wrong name must not come up after an hour
        _resolve(variant)
    recipes = [dataclasses.replace(variant, seed=base.seed + i) for i in range(seeds) for variant in variants]
    plan = [
        Job(recipe, out / f"{variant_name(recipe)}-s{recipe.seed}", resume=resume, overwrite=overwrite)
        for recipe in recipes
    ]
    return _compare(plan, processes=jobs, threads=threads, out=out)


def read_recipe(
    words: Sequence[str],
    file: Path | None,
    size: str | None,
    seed: int | None,
    start: Mapping[str, Any] | None = None,
) -> Recipe:
    """Put a recipe together: the named one, the file and `start` over it, settings over that."""
    names, settings = config.parse_overrides(words, _OPTIONS)
    if len(names) > 1:
        raise ValueError(f"unexpected argument {names[1]!r}; settings are written --key value, as --optim.lr 1e-3")
    values = config.read_yaml(file) if file else {}
    if names:
        values["name"] = config.named_recipe(names[0]).name
    if "name" not in values:
        raise ValueError("which recipe? give one (mercer list recipes), or --config FILE")
    recipe = config.merge(config.merge(config.from_dict(values), start or {}), settings)
    dials: dict[str, Any] = {} if seed is None else {"seed": seed}
    return config.merge(recipe, dials | ({} if size is None else {"model": {"size": size}}))


def with_mixer(recipe: Recipe, spec: str) -> Recipe:
    """Return the recipe with the mixer that `cubit:share=true:ridge=1e-6` describes.

    >>> from mercer.train.recipe import tiny
    >>> with_mixer(tiny(), "cubit:share=true").model.mixer_options
    {'share': True}
    """
    name, *options = spec.strip().split(":")
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"mixer {spec!r}: an option is written NAME:OPTION=VALUE, as cubit:share=true")
        settings[key] = value
    kept = recipe.model.mixer_options if name == recipe.model.mixer else {}
    bare = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, mixer=name, mixer_options=kept))
    return config.merge(bare, {"model": {"mixer_options": settings}})


def _variants(base: Recipe, mixers: str) -> list[Recipe]:
    """Return the recipe with each of the mixers; none, or one twice, would only be found out by a run's folder."""
    variants = [with_mixer(base, spec) for spec in mixers.split(",") if spec.strip()]
    if not variants:
        raise ValueError(f"mixers ({mixers!r}) names none; give some, as softmax,cubit")
    names = [variant_name(variant) for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"mixers ({mixers!r}) names {name} {names.count(name)} times; name each once")
    return variants


def variant_name(recipe: Recipe) -> str:
    """Return the mixer and its options as part of a folder's name."""
    options = (f"{key}={value}" for key, value in sorted(recipe.model.mixer_options.items()))
    return "-".join([recipe.model.mixer, *options]).replace("/", "_")


def summary(run: Run) -> str:
    """Return one line about a run."""
    name = f"{run.mixer} seed {run.seed}"
    if run.valid_loss is None:
        return f"{name}  {run.status}"
    return (
        f"{name}  valid loss {run.valid_loss:.4f}  bits/byte {run.bits_per_byte:.4f}  perplexity {run.perplexity:.2f}  "
        f"{run.tokens_per_second:,.0f} tokens/s  {run.train_seconds:.1f} s"
    )


def _compare(plan: list[Job], *, processes: int, threads: int | None, out: Path) -> int:
    done = []

    def report(outcome: Outcome) -> None:
        done.append(outcome)
        if _is_main():
            print(f"[{len(done)}/{len(plan)}] {summary(outcome.run)}", flush=True)

    if processes == 1:
        set_threads(threads)
        outcomes = train_in_turn(plan, report)
    else:
        check_threads(threads)
        threads = threads or max(1, (os.cpu_count() or 1) // processes)
        outcomes = train_side_by_side(plan, report, processes=processes, threads=threads)
    stopped = [outcome.run for outcome in outcomes if outcome.run.status == "interrupted"]
    if stopped or len(outcomes) < len(plan):
        return interrupted(stopped[0] if stopped else None)
    if _is_main():
        _write_comparison([outcome.run for outcome in outcomes], out)
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if failures:
        raise FloatingPointError(f"{len(failures)} of {len(plan)} runs failed; the first: {failures[0]}")
    return 0


def _write_comparison(runs: list[Run], out: Path) -> None:
    from mercer.report import comparison_table, format_table, write_report

    Console().print(format_table(comparison_table(runs)))
    print(write_report(runs, out, title=f"{runs[0].recipe}: attention mixers compared"))


def interrupted(run: Run | None) -> int:
    words = [word for word in shlex.split(command_line()) if word != "--overwrite"]
    command = shlex.join(words if "--resume" in words else [*words, "--resume"])
    where = f"after step {run.steps}; a checkpoint is saved" if run else "before the next run began"
    if _is_main():
        print(f"stopped {where}. To go on:\n  {command}")
    return 130


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _resolve(recipe: Recipe) -> Recipe:
    from mercer.train import setup

    return setup.resolve(recipe)


def _print_estimate(recipe: Recipe) -> None:
    from mercer.train import estimate

    recipe = _resolve(recipe)
    print(config.write_yaml(recipe))
    for line in estimate.lines(estimate.estimate(recipe)):
        print(line)
