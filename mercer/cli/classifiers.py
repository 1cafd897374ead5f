"""`mercer align RECIPE` and `mercer finetune RECIPE`: classifiers whose random features are learned from labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mercer.cli.threads import set_threads
from mercer.cli.training import Words, interrupted
from mercer.train import config as recipes
from mercer.train.classifier_recipe import CLASSIFIERS, ClassifierRecipe
from mercer.train.record import Run

_OPTIONS = ("config", "seed", "out", "resume", "overwrite", "threads", "dry_run", "from", "help")
From = Annotated[Path | None, Parameter(name="--from")]


def is_classifier(word: str) -> bool:
    """Return whether a word names a recipe of this module's commands, and no folder.

    >>> is_classifier("text-classifier"), is_classifier("my_folder")
    (True, False)
    """
    return word in CLASSIFIERS


def align_recipe(
    *words: Words,
    config: Path | None = None,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
) -> int:
    """Let random features learn from labels, and nothing else: `mercer align RECIPE [--KEY VALUE ...]`.

    **Examples**

    ```
    mercer align text-classifier --data.source reviews.tsv
    mercer align text-classifier --data.source hf:glue/sst2 --align.kind centered --align.strength 0.01
    mercer finetune text-classifier --from runs/text-classifier-softplus-align-s0
    ```

    Phase A of a classifier. The directions of the features of each head are particles: Langevin steps move them up the
    alignment of the classifier's pooled outputs with the labels, and away from one another. All weights stay as
    initialised. Writes the model, config.yaml, and the energies of every step (metrics.jsonl) into the run's folder.

    **Settings** (`--KEY VALUE`; `mercer align RECIPE --dry-run` prints their values)

    * `data.source` python-docstrings, a .tsv, .csv, .jsonl or .parquet file, a folder with splits, or hf:NAME;
      `data.text`, `data.pair`, `data.label` its columns; `data.tokenizer` byte, bpe:8192 or a folder; `data.length`
    * `model.mixer`, `model.mixer-options.features` favor, elu, softplus, sigmoid2, softmaxfeat, cos2 or porf_softplus,
      `model.mixer-options.num-features`; `model.projections` value (queries and keys are the layer's input) or all;
      `model.pooling` mean or first; `model.hidden-size`, `num-layers`, `num-heads`, `intermediate-size`, `dropout`
    * `align.kind` within_class, centered or signed; `align.epochs`, `align.batch-size`, `align.step-size`,
      `align.inverse-temperature`, `align.strength` and `align.exponent` of the repulsion, `align.clip` of a head's
      drift, `align.radius` of a particle; `align.tolerance`, `align.check-every`, `align.check-batches`: when to stop
    * `optim.`..., `train.`... of phase B, see `mercer finetune`; `seed`

    Args:
        words: the recipe, and settings.
        config: a YAML file with settings, such as the config.yaml of another run.
        seed: of the weights, the particles, the noise and the order of the texts.
        out: the run's folder; runs/RECIPE-FEATURES-align-sSEED by default.
        resume: go on from the newest checkpoint in the folder.
        overwrite: delete the run in the folder first.
        threads: CPU threads to compute with.
        dry_run: print the settings and align nothing.
    """
    recipe = read_classifier(words, config, seed)
    out = out or default_folder(recipe, "align")
    if dry_run:
        print(recipes.write_yaml(recipe), end="")
        return 0
    set_threads(threads)
    from mercer.train.classifier import align_classifier

    run = align_classifier(recipe, out, resume=resume, overwrite=overwrite)
    if run.status == "interrupted":
        return interrupted(run)
    print(f"{aligned_summary(run)}  {out}")
    print(f"next: mercer finetune {recipe.name} --from {out}")
    return 0


def finetune_recipe(
    *words: Words,
    start: From = None,
    config: Path | None = None,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
) -> int:
    """Train a classifier with its random features held fixed: `mercer finetune RECIPE [--from RUN] [--KEY VALUE ...]`.

    **Examples**

    ```
    mercer finetune text-classifier --data.source reviews.tsv
    mercer finetune text-classifier --from runs/text-classifier-softplus-align-s0
    mercer finetune text-classifier --data.source reviews.tsv --model.mixer softmax
    ```

    Phase B of a classifier: everything learns by cross-entropy but the features' directions, which are those that
    `mercer align RECIPE` left in RUN, or random ones (the "vanilla" classifier to compare with). Prints the scores on
    the validation texts, and writes them with bootstrap intervals, and those of the test texts, into results.json.

    With `--from`, the settings are those of RUN where none are given; the model must stay as it is.

    **Settings** (`--KEY VALUE`; `mercer finetune RECIPE --dry-run` prints their values)

    * `data.`..., `model.`..., `seed` as in `mercer align`; `model.mixer` any mixer without `--from`
    * `optim.lr`, `optim.betas`, `optim.weight-decay`, `optim.warmup` as a share of the steps, `optim.min-lr-ratio`,
      `optim.clip`
    * `train.epochs`, `train.batch-size`, `train.precision` float32 or bf16, `train.eval-every` steps,
      `train.checkpoint-every`, `train.keep` checkpoints, `train.shard` FSDP2 instead of DDP

    Args:
        words: the recipe, and settings.
        start: the folder of a run of `mercer align RECIPE`.
        config: a YAML file with settings, such as the config.yaml of another run.
        seed: of the weights, the particles, the dropout and the order of the texts.
        out: the run's folder; runs/RECIPE-FEATURES-aligned-sSEED by default, -vanilla- without `--from`.
        resume: go on from the newest checkpoint in the folder.
        overwrite: delete the run in the folder first.
        threads: CPU threads to compute with.
        dry_run: print the settings and train nothing.
    """
    recipe = read_classifier(words, config, seed, start)
    out = out or default_folder(recipe, "aligned" if recipe.start else "vanilla")
    if dry_run:
        print(recipes.write_yaml(recipe), end="")
        return 0
    set_threads(threads)
    from mercer.train.classifier import finetune_classifier

    run = finetune_classifier(recipe, out, resume=resume, overwrite=overwrite)
    if run.status == "interrupted":
        return interrupted(run)
    print(f"{finetuned_summary(run)}  {out}")
    return 0


def read_classifier(
    words: Sequence[str], file: Path | None, seed: int | None, start: Path | None = None
) -> ClassifierRecipe:
    """Put a recipe together: the named one or that of the aligned run, the file over it, settings over that.

    Raises:
        ValueError: no or an unknown recipe, another than the run's, or an unknown setting.
        FileNotFoundError: no such file or run.
    """
    names, settings = recipes.parse_overrides(words, _OPTIONS, ClassifierRecipe)
    if len(names) > 1:
        raise ValueError(f"unexpected argument {names[1]!r}; settings are written --key value, as --optim.lr 1e-3")
    values = recipes.read_yaml(file) if file else {}
    if names:
        values["name"] = recipes.named_recipe(names[0], CLASSIFIERS).name
    recipe = None
    if start is not None:
        from mercer.train.classifier_setup import aligned_recipe

        recipe = aligned_recipe(start)
        if values.get("name", recipe.name) != recipe.name:
            raise ValueError(f"{start} is a run of {recipe.name}, not of {values['name']}; give that name, or align")
        settings = {**settings, "start": str(start)}
    elif "name" not in values:
        raise ValueError("which recipe? give one (mercer list recipes), or --config FILE")
    recipe = recipes.merge(recipe, values) if recipe else recipes.from_dict(values, CLASSIFIERS)
    return recipes.merge(recipe, settings | ({} if seed is None else {"seed": seed}))


def default_folder(recipe: ClassifierRecipe, phase: str) -> Path:
    """Return where a run goes that was given no folder.

    >>> default_folder(CLASSIFIERS["text-classifier"](), "align").name
    'text-classifier-softplus-align-s0'
    """
    mixer = recipe.model.mixer
    what = recipe.model.mixer_options.get("features", "softplus" if mixer == "particle" else mixer)
    return Path("runs", f"{recipe.name}-{what}-{phase}-s{recipe.seed}")


def aligned_summary(run: Run) -> str:
    """Return one line about a run of phase A."""
    before, after, held_out = (run.measures[name] for name in ("before", "after", "validation_alignment"))
    end = ", drift below tolerance" if run.measures["converged"] else ""
    return (
        f"alignment {_change(before['alignment'], after['alignment'])}"
        f" (validation {_change(held_out['before'], held_out['after'])})"
        f"  repulsion {_change(before['repulsion'], after['repulsion'])}"
        f"  least distance {_change(before['least_distance'], after['least_distance'])}"
        f"  {run.steps} steps{end}  {run.train_seconds:.1f} s"
    )


def finetuned_summary(run: Run) -> str:
    """Return one line about a run of phase B: the scores on the validation texts."""
    scores: dict[str, Any] = run.measures["validation"]
    names = {"accuracy": "accuracy", "matthews": "MCC", "log_loss": "log loss", "brier": "Brier", "auc": "AUC"}
    names["calibration_error"] = "ECE"
    told = [f"{word} {scores[name]['value']:.4f}" for name, word in names.items() if scores[name]["value"] is not None]
    return f"validation {'  '.join(told)}  {run.train_seconds:.1f} s"


def _change(before: float, after: float) -> str:
    return f"{before:.5g} -> {after:.5g}"
