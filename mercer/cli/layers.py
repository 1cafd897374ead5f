"""`mercer layers`: which layers of a pretrained model can lose their softmax cheaply, and which are worth keeping."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mercer.cli.threads import set_threads


def layers(
    model: str,
    /,
    *,
    source: str,
    mixer: str = "window:window=64:sinks=4",
    keep: int = 4,
    recall: int = 256,
    trials: int = 8,
    length: int = 512,
    windows: int = 4,
    seed: int = 0,
    threads: int | None = None,
) -> int:
    """Convert each layer alone and see what it costs: `mercer layers MODEL --source TEXT`.

    **Examples**

    ```
    mercer layers my_llama_folder --source python-docs
    mercer convert my_llama_folder --mixer darkformer:window=64:sinks=4 --keep 18,20,23 -o hybrid
    ```

    A model reaches far back in few of its layers. Kept as they are, with the others converted, they hold most of what a
    full conversion loses, above all recall; only they still need a cache that grows. Prints, for every layer, how much
    its conversion adds to the loss on held-out text, and to the loss of a number read once and asked for later.

    Args:
        model: a folder of transformers, a GGUF file, or a hub name as owner/name.
        source: a corpus, a path or hf:NAME, whose validation documents are read.
        mixer: what a layer gets in place of its softmax.
        keep: how many layers to name as worth keeping; at most all but one.
        recall: how many tokens after reading it the number is asked for, beyond the mixer's window; 0: do not ask.
        trials: how many numbers.
        length: tokens in a window of text.
        windows: held-out windows to measure on.
        seed: of the numbers.
        threads: CPU threads to compute with.
    """
    from mercer.hf.source import find_source

    place = find_source(model)  # a missing path is said before torch is loaded
    if keep < 1 or trials < 1 or recall < 0:
        raise ValueError(f"keep ({keep}) and trials ({trials}) must be at least 1, recall ({recall}) at least 0")
    import torch

    from mercer.cli.models import check_decoder, check_positions
    from mercer.cli.training import with_mixer
    from mercer.evaluate.layer_costs import layer_costs
    from mercer.hf.source import read_model
    from mercer.train.loop import spaced
    from mercer.train.recipe import tiny

    set_threads(threads)
    chosen = with_mixer(tiny(), mixer).model
    original = read_model(place, torch.float32).eval()
    check_decoder(original)
    check_positions(original, length, "give a smaller --length")
    tokenizer, split = _text(place, source, length)
    asked = _questions(tokenizer, split, recall, trials, seed) if recall else []
    check_positions(original, max((len(question.ids) for question in asked), default=0), "give a smaller --recall")
    with _progress() as watch:
        found = layer_costs(
            original,
            spaced(split, 1, windows),
            asked,
            chosen.mixer,
            watch=watch,
            **chosen.mixer_options,
        )
    _print(found, found.dearest(min(keep, len(found.alone) - 1)), model, mixer, recall)
    return 0


def _text(place: Any, source: str, length: int) -> tuple[Any, Any]:
    """Return the model's tokenizer, and held-out text in windows."""
    from mercer.hf.source import read_tokenizer
    from mercer.train.recipe import DataConfig
    from mercer.train.setup import pack

    tokenizer = read_tokenizer(place)
    if tokenizer is None:
        raise ValueError(f"{place.place} has no tokenizer; layers are measured on text: save one beside the model")
    config = DataConfig(source=source, length=length, max_bytes=50_000_000)
    return tokenizer, pack(config, tokenizer, 0, None).validation


def _questions(tokenizer: Any, split: Any, distance: int, trials: int, seed: int) -> list[Any]:
    from mercer.evaluate.recall import filler_of, questions

    filler = filler_of(split.sequential(8), tokenizer, 4 * distance + 64)
    return list(questions(tokenizer, filler, distance, trials=trials, seed=seed))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many layers are measured, where there is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, layers: progress.update(task, completed=done, total=layers)


def _print(found: Any, kept: list[int], model: str, mixer: str, recall: int) -> None:
    from rich.console import Console
    from rich.table import Table

    original = found.original
    known = "" if original.recall is None else f"; recalled over {recall} tokens: {original.accuracy:.0%}"
    table = Table(title=f"{mixer} in one layer", caption=f"original: loss {original.loss:.4f} nats{known}")
    columns = (
        "layer",
        "adds to the loss",
        *(() if original.recall is None else ("to the number's", "recalled")),
        "share",
    )
    for words in columns:
        table.add_column(words, justify="right", no_wrap=words == "layer")
    for layer, share in found.shares().items():
        asked = found.alone[layer].accuracy
        of_recall = [] if asked is None else [f"{found.recall(layer):+.3f}", f"{asked:.0%}"]
        row = [str(layer), f"{found.loss(layer):+.4f}", *of_recall, f"{share:.1%}"]
        table.add_row(*row, style="bold" if layer in kept else None)
    Console().print(table, highlight=False)
    if not kept:
        print("no other layer can be converted, so nothing would be if this one were kept")
        return
    numbers = ",".join(map(str, kept))
    share = sum(found.shares()[layer] for layer in kept)
    print(f"{len(kept)} of {len(found.alone)} layers account for {share:.0%} of what is lost; to keep their softmax:")
    print(f"mercer convert {model} --mixer darkformer:window=64:sinks=4 --keep {numbers} -o DIR")
