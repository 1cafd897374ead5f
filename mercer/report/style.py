"""One look for every figure: a mixer has the same colour, dash and marker wherever it appears, on light and dark."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Theme:
    """The colours of a figure apart from its data."""

    name: str
    ink: str
    faint: str
    grid: str
    paper: str


@dataclass(frozen=True)
class Line:
    """How one mixer is drawn; dash and marker tell mixers apart without colour."""

    color: str
    dash: Any
    marker: str


LIGHT = Theme("light", ink="#1c1f24", faint="#5c6470", grid="#dfe3e8", paper="#ffffff")
DARK = Theme("dark", ink="#e8eaed", faint="#a3abb5", grid="#343a42", paper="#14171b")

# Hues after Okabe and Ito, told apart under the common colour-vision deficiencies; the second of a pair is for dark
# paper. The baseline and the controls are greys, so that what is compared stands out. Contrast >= 3 on their paper.
_COLORS = {
    "softmax": ("#3d434b", "#d5d9de"),
    "cubit": ("#c8500a", "#ff8a4c"),
    "linear_cubit": ("#a36f00", "#edb230"),
    "deltaformer": ("#0068ad", "#5db3f0"),
    "darkformer": ("#00795a", "#2cc39a"),
    "performer": ("#2f86b8", "#8fd0f2"),
    "lfk": ("#b0558c", "#e79bc8"),
    "particle": ("#6a4fc4", "#ab98f5"),
    "local_linear": ("#80691a", "#cbb763"),
    "window": ("#6f7782", "#a3abb5"),
    "constant": ("#858c96", "#8b939d"),
    "random": ("#858c96", "#8b939d"),
}
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)))
_MARKERS = "osD^vPX*<>hd"


def line_for(mixer: str, theme: Theme, sibling: int = 0) -> Line:
    """Return how a mixer is drawn; `sibling` counts variants of the same mixer, told apart by dash and marker.

    >>> line_for("cubit", LIGHT) == line_for("cubit", LIGHT)
    True
    """
    names = list(_COLORS)
    place = names.index(mixer) if mixer in names else sum(mixer.encode()) % len(names)
    color = _COLORS[mixer if mixer in names else "window"][theme is DARK]
    dash = 0 if mixer == "softmax" else (place - 1) % 3 + 1
    return Line(color, _DASHES[(dash + sibling) % len(_DASHES)], _MARKERS[(place + 5 * sibling) % len(_MARKERS)])


def lines_for(variants: list[tuple[str, str]], theme: Theme) -> dict[str, Line]:
    """Return the line of each (label, mixer), siblings of one mixer told apart."""
    seen: dict[str, int] = {}
    lines = {}
    for label, mixer in variants:
        lines[label] = line_for(mixer, theme, seen.get(mixer, 0))
        seen[mixer] = seen.get(mixer, 0) + 1
    return lines


def literal(text: str) -> str:
    """Return text that matplotlib draws as it stands: no mathematics, no name hidden by a leading underscore."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def pyplot() -> Any:
    """Return matplotlib's pyplot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to install it.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        message = "figures need matplotlib, which is not installed; run: pip install 'mercer[plots]'"
        raise ModuleNotFoundError(message) from error
    return plt


@contextmanager
def themed(theme: Theme) -> Iterator[Any]:
    """Give pyplot with a theme's settings in force, drawn in memory whatever the display; put back afterwards."""
    plt = pyplot()
    settings = {
        "font.size": 10.5,
        "font.family": "sans-serif",
        "axes.facecolor": "none",
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "axes.grid": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "svg.hashsalt": "mercer",  # the same ids every time: the same runs give the same page
        "svg.fonttype": "path",
    }
    with plt.rc_context(settings):
        yield plt
