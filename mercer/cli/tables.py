"""`mercer list` and `mercer report`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Kind = Literal["recipes", "corpora", "mixers", "sizes", "features"]


def list_names(kind: Kind | None = None, /) -> int:
    """Show what there is: `mercer list`, or one kind of it, `mercer list corpora`.

    Args:
        kind: recipes, corpora, mixers, sizes or features; all by default.
    """
    console = Console()
    for name, fill in _TABLES.items():
        if kind in (None, name):
            console.print(fill(), highlight=False)
    return 0


def report(folder: Path, /, *, out: Path | None = None, title: str = "Attention mixers compared") -> int:
    """Write the comparison of all runs under a folder: `mercer report runs/demo`.

    Args:
        folder: searched for results.json.
        out: where report.html, table.md and figures/ go; the folder itself by default.
        title: of the page.
    """
    from mercer.report import comparison_table, format_table, write_report
    from mercer.train.record import read_runs

    runs = read_runs(folder)
    Console().print(format_table(comparison_table(runs)))
    print(write_report(runs, out or folder, title=title))
    return 0


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _recipes() -> Table:
    from mercer.train.classifier_recipe import CLASSIFIERS
    from mercer.train.recipe import RECIPES

    table = Table("recipe", "what it does", title="recipes: mercer train RECIPE; classifiers: mercer finetune RECIPE")
    for name, recipe in RECIPES.items():
        table.add_row(name, _first_line(recipe))
    table.add_section()
    for name, recipe in CLASSIFIERS.items():
        table.add_row(name, _first_line(recipe))
    return table


def _corpora() -> Table:
    from mercer.data import CORPORA

    table = Table("corpus", "what it is", "size", "licence", title="corpora: --data.source CORPUS")
    for name, corpus in CORPORA.items():
        table.add_row(name, corpus.description, f"{corpus.approx_bytes / 1e6:.1f} MB", corpus.licence)
    return table


def _mixers() -> Table:
    from mercer.mixers import MIXERS, mixer_options

    table = Table(
        "mixer", "what it does", "options", title="mixers: --model.mixer MIXER --model.mixer-options.OPTION VALUE"
    )
    for name, mixer in MIXERS.items():
        table.add_row(name, _first_line(mixer), ", ".join(sorted(mixer_options(name))))
    return table


def _sizes() -> Table:
    from mercer.hf import SIZES

    table = Table("size", "layers", "hidden", "heads", "learning rate", title="sizes: --size SIZE")
    for name, size in SIZES.items():
        cells = (size.num_layers, size.hidden_size, size.num_heads, f"{size.learning_rate:g}")
        table.add_row(name, *map(str, cells))
    return table


def _features() -> Table:
    from mercer.features import FEATURES

    table = Table("feature map", "what it does", title="feature maps")
    for name, features in FEATURES.items():
        table.add_row(name, _first_line(features))
    return table


_TABLES: dict[str, Callable[[], Table]] = {
    "recipes": _recipes,
    "corpora": _corpora,
    "mixers": _mixers,
    "sizes": _sizes,
    "features": _features,
}
