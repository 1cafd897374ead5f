"""How far the attention of each converted layer is from the softmax it stands for."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

from mercer.errors import NumericalWarning
from mercer.hf.install import attached
from mercer.hf.observing import Batches, Seen, watch
from mercer.hf.spans import ranges

_ROUNDING = 1e-6  # a relative squared error below this is float32, not kernels


@dataclasses.dataclass(frozen=True)
class HeadError:
    """Relative squared errors ||o - exact||^2 / ||exact||^2 of one head, or of a whole layer (head None)."""

    layer: str
    head: int | None
    error: float  # of the mixer
    uniform: float  # of the plain average of the values
    window: float  # of exact softmax over the window and the sinks alone

    @property
    def is_useful(self) -> bool:
        """Return whether the mixer is nearer to softmax than both of the trivial ones."""
        return self.error <= min(self.uniform, self.window) + _ROUNDING


@dataclasses.dataclass(frozen=True)
class KernelErrors:
    """The table of `mercer.kernel_error`; print it to read it, iterate it for the layers."""

    layers: tuple[HeadError, ...]
    heads: tuple[HeadError, ...]
    window: int
    sinks: int

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __str__(self) -> str:
        width = max(len(row.layer) for row in self.layers)
        near = f"window {self.window}+{self.sinks}"
        lines = [f"{'layer':<{width}}  {'mixer':>9}  {'uniform':>9}  {near:>12}  worst head"]
        for row in self.layers:
            worst = max((h for h in self.heads if h.layer == row.layer), key=lambda h: h.error)
            mark = "" if row.is_useful else "  worse than a trivial one"
            lines.append(
                f"{row.layer:<{width}}  {row.error:>9.4g}  {row.uniform:>9.4g}  {row.window:>12.4g}  "
                f"{worst.head}: {worst.error:.4g}{mark}"
            )
        return "\n".join(lines)


class ErrorSums:
    """Sums of squares per layer and head: over batches, rows from `first` on."""

    def __init__(self, window: int, sinks: int, first: int):
        self.window, self.sinks, self.first = window, sinks, first
        self.sums: dict[str, Tensor] = {}

    def add(self, layer: str, seen: Seen, o: Tensor, exact: Tensor) -> None:
        """Count one call, in which the mixer gave `o`."""
        estimates = torch.stack([o, seen.uniform(), seen.near(self.window, self.sinks), torch.zeros_like(o)])
        squares = (estimates - exact).double().square().sum(-1)
        rows = seen.real() & (torch.arange(o.shape[2], device=o.device) >= self.first)
        found = (squares * rows[:, None]).sum((1, 3)).cpu()
        self.sums[layer] = self.sums.get(layer, 0) + found

    def table(self) -> KernelErrors:
        """Return the errors.

        Raises:
            ValueError: every output is zero, or no row was counted.
            FloatingPointError: the original attention is not finite.
        """
        layers, heads = [], []
        for name, sums in self.sums.items():
            if not bool(sums[3].isfinite().all()):
                raise FloatingPointError(f"{name}: softmax attention on its q, k, v is not finite; check the weights")
            if not bool(sums[3].sum() > 0):
                raise ValueError(
                    f"{name}: no attention output to compare with; give batches longer than first ({self.first})"
                )
            layers.append(HeadError(name, None, *(sums[:3].sum(1) / sums[3].sum()).tolist()))
            relative = (sums[:3] / sums[3].clamp_min(1e-300)).T.tolist()
            heads += [HeadError(name, head, *row) for head, row in enumerate(relative)]
        return KernelErrors(tuple(layers), tuple(heads), self.window, self.sinks)


@torch.no_grad()
def kernel_error(
    model: Any, batches: Batches, *, window: int | None = None, sinks: int | None = None, first: int = 0
) -> KernelErrors:
    """Compare every converted layer's attention with exact softmax on the same q, k and v.

    `sum ||o - softmax(q k') v||^2 / sum ||softmax(q k') v||^2`, per layer and per head, beside the same for two answers
    that cost nothing: the plain average of the values, and softmax over a window and the first tokens alone.
    A layer that is worse than either has no use for its features as they are.

    Args:
        model: a model with mixers.
        batches: token numbers [B, T], what a tokenizer returns, or batches of `mercer.data`.
        window: nearest keys of the window-alone column; the mixer's own window if it has one, else 64.
        sinks: first keys of that column; the mixer's own, else 4.
        first: leave out tokens before this one, for which window and softmax are the same.

    Returns:
        A table: `.layers`, `.heads`, `print` it.

    Raises:
        ValueError: the model carries no mixer, or there are no batches.

    Warns:
        NumericalWarning: layers worse than the plain average or the window alone.

    Cost: one forward pass, and three quadratic attentions for each converted layer.

    Example:
        >>> import mercer, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))
        >>> table = kernel_error(mercer.attach(model, "softmax"), [torch.arange(20)[None]], window=4, sinks=1)
        >>> [row.error < 1e-10 for row in table.layers], len(table.heads)
        ([True, True], 8)
    """
    own = window_of(model)
    sums = ErrorSums(own[0] if window is None else window, own[1] if sinks is None else sinks, first)
    watch(model, batches, lambda name, mixer, seen: sums.add(name, seen, seen.o, seen.exact()))
    table = sums.table()
    warn_if_useless(table, model)
    return table


def window_of(model: Any) -> tuple[int, int]:
    """Return the window and the sinks of a model's mixers, or 64 and 4 where they have none."""
    for _, layer in attached(model):
        if getattr(layer.mixer, "window", 0):
            return layer.mixer.window, layer.mixer.sinks
    return 64, 4


def warn_if_useless(table: KernelErrors, model: Any, *, aligned: bool = False) -> None:
    """Say in one line which layers are worse than a trivial answer, and what can be done that has not been."""
    found = []
    for column, words in (("uniform", "the plain average of the values"), ("window", "the window alone")):
        worse = [i for i, row in enumerate(table.layers) if row.error > getattr(row, column) + _ROUNDING]
        if worse:
            found.append(f"{len(worse)} of {len(table.layers)} converted layers ({ranges(worse)}) than {words}")
    if found:
        longer = "align them longer" if aligned else "align them (mercer align)"
        causal = any(layer.mixer.causal for _, layer in attached(model))
        window = ", give them a window," if causal else ""  # which bidirectional mixers do not have
        warnings.warn(
            f"further from softmax: {' and '.join(found)}; {longer}{window} or leave their softmax",
            NumericalWarning,
            stacklevel=3,
        )
