"""`mercer finetune`: train a converted model, on a text or after its own softmax."""

from pathlib import Path
from typing import Any, Literal

from mercer.cli.models import model_folder
from mercer.cli.threads import set_threads
from mercer.cli.training import Words

Part = Literal["all", "attention", "mixers", "lora"]


def finetune(
    folder: Path,
    /,
    *words: Words,
    source: str | None = None,
    parameters: Part | None = None,
    steps: int | None = None,
    out: Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
) -> int:
    """Finetune a converted model: `mercer finetune DIR --source TEXT`.

    With the name of a classifier's recipe in place of DIR, train that, after `mercer align RECIPE` with `--from RUN`:
    `mercer finetune text-classifier --help`.

    **Examples**

    ```
    mercer convert my_llama --mixer darkformer:window=64:sinks=4 -o converted
    mercer align converted --source my_text.jsonl
    mercer finetune converted --source my_text.jsonl --steps 500
    mercer finetune converted --source my_text.jsonl --parameters lora --tune.rank 8 --optim.lr 2e-4
    mercer finetune converted --source my_text.jsonl --parameters all --tune.teacher 0
    ```

    By default the model learns to predict what it predicted with its own softmax (`tune.teacher` 1: the loss is the
    divergence between the two), which keeps what it knows whatever the text; `--tune.teacher 0` learns the text itself.
    Prints the perplexity beside that of the model before and of the original on the same held-out windows. All settings
    of `mercer train` can be given, and:

    * `tune.parameters` attention: q, k, v and the mixers' own; mixers: these alone; lora: updates to q, k and v of rank
      `tune.rank`, merged at the end; all
    * `tune.teacher` share of the loss that follows the softmax; `tune.mixer-lr-factor` how much faster than the rest
      the mixers' own parameters learn; `tune.folder` is DIR

    Ctrl-C saves a checkpoint and prints the command to go on.

    Args:
        folder: what `mercer convert`, `mercer align` or `mercer finetune` wrote.
        words: settings.
        source: text to train on: a corpus, a path or hf:NAME; its validation documents are held out.
        parameters: what learns.
        steps: steps to take, of `train.batch-size` windows each.
        out: the run's folder, its model in model/; DIR-finetuned by default.
        seed: of the order of the text.
        resume: go on from the newest checkpoint in the folder.
        overwrite: delete the run in the folder first.
        threads: CPU threads to compute with.
    """
    from mercer.cli.training import interrupted, read_recipe, summary
    from mercer.train import loop

    path = model_folder(folder)
    given = {"source": source, "parameters": parameters, "steps": steps}
    keys = {"source": "data.source", "parameters": "tune.parameters", "steps": "train.steps"}
    settings = [word for name, value in given.items() if value is not None for word in (f"--{keys[name]}", str(value))]
    start = _start(path)
    recipe = read_recipe(["finetune", *words, *settings], None, None, seed, start=start)
    fixed = read_recipe(["finetune"], None, None, None, start=start)
    decided = (fixed.model, fixed.data.tokenizer, fixed.tune.folder)
    if (recipe.model, recipe.data.tokenizer, recipe.tune.folder) != decided:
        raise ValueError(f"model, data.tokenizer and tune.folder are those of {path}; leave their settings out")
    out = out or folder.with_name(f"{folder.name}-finetuned")
    set_threads(threads)
    run = loop.train(recipe, out, resume=resume, overwrite=overwrite)
    if run.status == "interrupted":
        return interrupted(run)
    print(f"{summary(run)}  {out}")
    print(f"perplexity  original {_of(run, 'original')}  before {_of(run, 'before')}  now {run.perplexity:.2f}")
    return 0


def _start(path: Path) -> dict[str, Any]:
    """Return what a model's folder decides of the recipe."""
    import json

    from mercer.errors import CheckpointError

    try:
        spec = json.loads((path / "config.json").read_text(encoding="utf-8")).get("mercer")
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'} is damaged ({error}); convert the model again") from None
    if not spec:
        raise ValueError(f"{path} holds a model without a mixer; convert it first: mercer convert {path} -o DIR")
    return {
        "data": {"tokenizer": str(path)},
        "model": {"mixer": spec["mixer"], "mixer_options": spec.get("options") or {}},
        "tune": {"folder": str(path)},
    }


def _of(run: Any, when: str) -> str:
    return f"{run.measures[f'perplexity_{when}']:.2f}"
