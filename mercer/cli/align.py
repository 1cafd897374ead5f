"""`mercer align` and `mercer kernel-error`: what a converted model needs before it is finetuned."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

from mercer.cli.models import model_folder
from mercer.cli.threads import set_threads

Calibrate = Literal["center", "whiten", "proposal", "none"]
PARTIAL = ".align"  # where a model's folder keeps how far an alignment has come


def align(
    folder: Path,
    /,
    *,
    source: str,
    rivals: str = "",
    steps: int = 120,
    learning_rate: float = 1e-2,
    length: int = 512,
    batch_size: int = 1,
    windows: int = 4,
    first: int | None = None,
    calibrate: Calibrate = "center",
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
) -> int:
    """Teach the mixers of a converted model to attend as its softmax did: `mercer align DIR --source TEXT`.

    With the name of a classifier's recipe in place of DIR, let its features learn from labels:
    `mercer align text-classifier --help`.

    **Examples**

    ```
    mercer convert my_llama --mixer darkformer:window=64:sinks=4 -o converted
    mercer align converted --source my_text.jsonl --steps 200 --rivals lfk,lfk:separate=true
    mercer eval converted --source my_text.jsonl
    ```

    Every converted layer learns, from the queries, keys and values of the original model, to reproduce its attention
    output behind the output projection; all other weights are frozen. Prints the error of every layer on held-out text
    before and after, beside that of a window alone, which costs nothing. A layer that did not get better stays as it
    was; with --rivals, which map is best is decided for each layer. Ctrl-C keeps what has been learned and prints the
    command to go on.

    Args:
        folder: what `mercer convert` wrote.
        source: text to align on: a corpus, a path or hf:NAME; its validation documents are held out.
        rivals: mixers that every layer tries too, separated by commas, options as NAME:OPTION=VALUE; it takes the best.
        steps: batches to train on.
        learning_rate: of Adam at the start; it falls to a tenth.
        length: tokens in a window of text.
        batch_size: windows in a batch.
        windows: held-out windows to measure on.
        first: leave out tokens before this one when measuring; by default as many as the mixers' own window and sinks.
        calibrate: what to fit before: center moves queries and keys to their means, once; none; see mercer.calibrate.
        seed: of the order of the text.
        out: where to write the aligned model; in the folder itself by default.
        resume: go on after an interruption.
        overwrite: forget an alignment that was interrupted.
        threads: CPU threads to compute with.
    """
    path = model_folder(folder)
    if out is not None and out.exists():
        raise FileExistsError(f"{out} exists; give another --out, or leave it out to align the folder itself")
    kinds = _kinds(rivals)
    from mercer.train.keeping import Keeper

    settings = {
        "source": source, "rivals": rivals, "steps": steps, "learning_rate": learning_rate, "length": length,
        "batch_size": batch_size, "calibrate": calibrate, "seed": seed,
    }  # fmt: skip
    keeper = Keeper(path / PARTIAL, settings, resume=resume, overwrite=overwrite)
    data = _data(path, source, length, seed)
    from rich.console import Console

    from mercer.hf import calibrate as fit
    from mercer.hf import load
    from mercer.hf.kernel_errors import warn_if_useless, window_of
    from mercer.train import align as aligning
    from mercer.train.interrupt import Interruption
    from mercer.train.loop import spaced
    from mercer.train.record import command_line, resume_line

    set_threads(threads)
    model = load(path)
    if calibrate != "none" and not _is_fitted(model, calibrate):
        fit(model, [data.train.batch(index, batch_size) for index in range(4)], mode=calibrate)
    console = Console()

    def report(step: int, loss: float) -> None:
        if step == 1 or step == steps or step % max(1, steps // 10) == 0:
            print(f"step {step} of {steps}  mean error on its batch {loss:.4f}", flush=True)

    with Interruption() as interruption:
        try:
            found = aligning.align(
                model,
                lambda index: data.train.batch(index, batch_size),
                spaced(data.validation, batch_size, windows),
                rivals=kinds,
                steps=steps,
                learning_rate=learning_rate,
                first=min(sum(window_of(model)), length // 2) if first is None else first,
                report=report,
                keeper=keeper,
                should_stop=lambda: interruption.requested,
            )
        except KeyboardInterrupt:
            if keeper.folder.is_dir():
                print(f"stopped; go on with: {resume_line(command_line())}")
            raise
    console.print(_table(found), highlight=False)
    warn_if_useless(found.after, model, aligned=True)
    rewrite(path, model, path if out is None else out)
    keeper.forget()
    print(f"aligned on {found.tokens:,} tokens; the model is in {path if out is None else out}")
    return 0


def kernel_error(
    folder: Path,
    /,
    *,
    source: str,
    length: int = 512,
    windows: int = 4,
    batch_size: int = 1,
    first: int = 0,
    threads: int | None = None,
) -> int:
    """Show how far each converted layer is from softmax on its own q, k, v: `mercer kernel-error DIR --source TEXT`.

    Args:
        folder: what `mercer convert` or `mercer align` wrote.
        source: a corpus, a path or hf:NAME, whose validation documents are read.
        length: tokens in a window of text.
        windows: how many windows, evenly spaced.
        batch_size: windows at a time.
        first: leave out tokens before this one.
        threads: CPU threads to compute with.
    """
    path = model_folder(folder)
    data = _data(path, source, length, 0)

    from mercer.hf import kernel_error as measure
    from mercer.hf import load
    from mercer.train.loop import spaced

    set_threads(threads)
    print(measure(load(path), spaced(data.validation, batch_size, windows), first=first))
    return 0


def rewrite(folder: Path, model: Any, out: Path) -> None:
    """Write a model with all other files of its folder aside, and rename: `out` is the old or the new one, whole."""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", PARTIAL))
    model.save_pretrained(aside)
    if out.exists():
        before = out.with_name(f".{out.name}.before")
        os.replace(out, before)
        os.replace(aside, out)
        shutil.rmtree(before)
    else:
        os.replace(aside, out)


def _data(path: Path, source: str, length: int, seed: int) -> Any:
    from mercer.train import setup
    from mercer.train.recipe import DataConfig

    config = DataConfig(source=source, tokenizer=str(path), length=length, max_bytes=50_000_000)
    return setup.load_data(config, seed, None)[1]


def _kinds(rivals: str) -> list[tuple[str, dict[str, Any]]]:
    """Read mixers as `mercer convert --mixer` does."""
    from mercer.cli.training import with_mixer
    from mercer.mixers import mixer_options
    from mercer.train.recipe import tiny

    chosen = [with_mixer(tiny(), spec).model for spec in rivals.split(",") if spec.strip()]
    for model in chosen:
        mixer_options(model.mixer)  # an unknown name is said before the model is loaded
    return [(model.mixer, dict(model.mixer_options)) for model in chosen]


def _is_fitted(model: Any, mode: str) -> bool:
    """Return whether a folder that is aligned again has its centres already, or could have none."""
    from mercer.hf.install import attached

    mixers = [layer.mixer for _, layer in attached(model)]
    able = all(hasattr(mixer, "center") and mixer.features.exponential for mixer in mixers)
    return mode == "center" and (not able or any(bool(mixer.center and mixer.key_center.any()) for mixer in mixers))


def _table(found: Any) -> Any:
    from rich.table import Table

    near = f"window {found.after.window}+{found.after.sinks} alone"
    table = Table(title="relative squared error to softmax, held out")
    table.add_column("layer", no_wrap=True)
    for words in ("before", "after", near, "plain average"):
        table.add_column(words)
    for layer, before, after, window, uniform in found.rows():
        word = " (kept)" if layer in found.kept else f" {found.exchanged[layer]}" if layer in found.exchanged else ""
        shown = [f"{value:.4g}" for value in (before, after, window, uniform)]
        better = f"[bold]{shown[1]}[/bold]" if after <= window else shown[1]
        table.add_row(layer, shown[0], better + word, *shown[2:])
    return table
