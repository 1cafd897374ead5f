"""`mercer study darkformer`: a pretrained model whose attention is exchanged and finetuned, method against method.

`design` says what is varied, `trial` what is done once, `tables` what came out.

Source: DARKFormer (arXiv:2603.04127), sec. 5.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mercer.report.figures import Figure
from mercer.study.curves import curve_figure, curves_of
from mercer.study.darkformer import tables
from mercer.study.darkformer.design import LOOKS, Settings, check, conditions
from mercer.study.darkformer.trial import trial
from mercer.study.page import publish
from mercer.study.results import Trial
from mercer.study.run import Study, run_study

LEAD = (
    "A pretrained model is given each method in place of its softmax attention and finetuned for the same steps on the "
    "same text. How far does it stay from the model with its softmax, in perplexity and in recall of a fact that lies "
    "beyond the window?"
)
NOTES = (
    "All methods see the same windows in the same order; the learning rate is one for all, the mixers' own parameters "
    "take steps 30 times as long.",
    "Without taught, the loss is that of the text, so methods adapt to it; with softmax this is the first row.",
    "M can be absorbed by projections that learn: with q, k and v free DARKFormer differs from Performer as a class of "
    "functions only because M follows the rotation.",
)


def run_darkformer(
    settings: Settings,
    out: str | Path,
    *,
    seeds: Sequence[int] = range(1),
    budget_minutes: float | int | None = 40,
    jobs: int = 1,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Run the study, print its tables and write its page.

    Args:
        settings: what is varied; `model` a folder, a GGUF file or a hub name.
        out: the folder; the original model is kept in it, as transformers has it.
        seeds: each draws features and the order of the text anew.
        budget_minutes: see `run_study`.
        jobs: processes; each holds the model, its teacher and what is finetuned.
        threads: of each.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
        console: where tables are printed.

    Returns:
        The page.

    Raises:
        ValueError: a method, a part or a number is none.
        FileNotFoundError: there is no such model.
    """
    check(settings, seeds)
    folder = _original(settings.model, Path(out))
    _check_layers(settings, folder)
    settings = replace(settings, model=str(folder))
    study = Study("darkformer", trial, conditions(settings), seeds, ("numpy", "transformers"))
    done = run_study(
        study, out, resume=resume, overwrite=overwrite, budget_minutes=budget_minutes, jobs=jobs, threads=threads
    )
    trials = done.trials
    shown = [
        tables.methods_table(trials, settings),
        tables.methods_table(trials, settings, "all"),
        tables.errors_table(trials, settings),
        tables.features_table(trials, settings),
        tables.rates_table(trials, settings),
    ]
    return publish(
        done,
        title="A pretrained model with other attention",
        lead=LEAD,
        findings=tables.findings(trials, settings),
        tables=[table for table in shown if table.rows],
        figures=figures(trials, settings),
        notes=NOTES,
        console=console,
    )


def figures(trials: Sequence[Trial], settings: Settings) -> list[Figure]:
    """Return loss, accuracy and recall by method, and the loss by learning rate, as far as there are data."""
    steps, made = tables.steps_of(settings), []
    for parameters, words in (("attention", "q, k, v and the mixers learn"), ("all", "all parameters learn")):
        for name, label in (("loss", "loss (nats per token)"), ("accuracy", "next-token accuracy")):
            given = {"parameters": parameters}
            found = {
                method: {
                    step: tables.values(trials, f"{name}@{step}", settings, method=method, **given) for step in steps
                }
                for method in settings.compared
            }
            title = f"Held-out {name} against steps; {words}"
            caption = "Mean over the seeds; band: one standard error."
            labels = ("steps", label)
            made.append(curve_figure(f"{name}-{parameters}", title, caption, curves_of(found), labels, LOOKS))
    recalled = {
        method: {d: tables.values(trials, f"recall@{d}", settings, method=method) for d in settings.distances}
        for method in settings.compared
    }
    caption = f"Share of {settings.questions} questions; the window reaches 64 tokens back in each layer."
    labels = ("distance (tokens)", "recalled")
    made.append(curve_figure("recall", "Recall of a number", caption, curves_of(recalled), labels, LOOKS))
    last = f"loss@{settings.steps}"
    by_rate = {
        method: {
            rate: tables.values(trials, last, settings, method=method, parameters="all", learning_rate=rate)
            for rate in settings.rates
        }
        for method in settings.compared
    }
    made.append(
        curve_figure(
            "rates",
            "Loss by learning rate, full finetuning",
            "Mean over the seeds; band: one standard error.",
            curves_of(by_rate),
            ("learning rate", "loss (nats per token)"),
            LOOKS,
            dress=lambda axes: axes.set_xscale("log"),
        )
    )
    return [figure for figure in made if figure is not None]


def _check_layers(settings: Settings, folder: Path) -> None:
    """Refuse, before the first trial starts, layers that the model does not have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mercer.hf.layers import choose_layers

    with torch.device("meta"):
        choose_layers(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), settings.layers, settings.keep
        )


def _original(model: str, out: Path) -> Path:
    """Write the original model and its tokenizer as a folder every trial can read quickly."""
    from mercer.errors import DataError
    from mercer.hf.quiet import no_progress_bars
    from mercer.hf.source import find_source, read_model, read_tokenizer

    folder = out / "original"
    if (folder / "config.json").is_file():
        return folder
    source = find_source(model)
    tokenizer = read_tokenizer(source)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer; put its files into the model's folder")
    with no_progress_bars():
        read_model(source).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


__all__ = ["Settings", "run_darkformer"]
