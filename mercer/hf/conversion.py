"""Convert a pretrained model: read it, check it, exchange its attention, write it."""

import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mercer import __version__
from mercer.hf.exact import Exactness, check_exact
from mercer.hf.exchange import attach
from mercer.hf.layers import Summary, kept_numbers
from mercer.hf.source import Source, copy_processors, find_source, read_model, read_tokenizer
from mercer.hf.spans import spans


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A converted model, not written yet."""

    source: Source
    model: Any
    tokenizer: Any | None
    exactness: Exactness | None  # None: not checked

    @property
    def summary(self) -> Summary:
        """Return which layers carry the mixer, and which were left and why."""
        return self.model.mercer_summary()


def convert(
    source: str | Path,
    mixer: str = "darkformer",
    *,
    layers: str | Iterable[int] = "all",
    keep: Iterable[int] = (),
    check: bool = False,
    out: str | Path | None = None,
    drop_softcap: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Conversion:
    """Load a pretrained model, let its attention layers mix with `mixer`, and write it.

    Weights are those of the model, untouched. Mixers of random features are not good at once: `mercer align`, then
    `mercer finetune`, or a window of exact attention (options of the mixer) come next.

    Args:
        source: a folder of transformers, a GGUF file, or a hub name.
        mixer: a name of `mercer.MIXERS`.
        layers: "all" or "global" (every layer with full attention), "3,5,7", or numbers.
        keep: numbers of layers that keep their softmax all the same; `mercer layers` finds those that reach far back.
        check: first compare the model with itself under the softmax mixer, see `check_exact`.
        out: a folder to write model, tokenizer and card to; default: nothing is written.
        drop_softcap: convert although the model caps its attention logits (Gemma 2), without the cap.
        dtype: of the weights; as stored by default.
        **options: of the mixer.

    Returns:
        The converted model with its tokenizer and the outcome of the check.

    Raises:
        FileNotFoundError: there is no such model.
        FileExistsError: `out` exists and holds something.
        ValueError: no layer can be converted, or see `mercer.attach`.
        CheckpointError: a file is damaged, or the check failed.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     found = convert(folder, "darkformer", check=True, num_features=32)
        >>> type(found.model).__name__, len(found.summary.converted), found.exactness.difference < 1e-5
        ('MercerGPT2LMHeadModel', 2, True)
    """
    place = find_source(source)
    if out is not None:
        _refuse_filled(Path(out))
    if check and drop_softcap:
        raise ValueError("check and drop_softcap exclude each other: without its cap the model is not what it was")
    layers = layers if isinstance(layers, str) else [int(layer) for layer in layers]
    keep = kept_numbers(keep)
    model = read_model(place, dtype)
    exactness = check_exact(model, layers=layers, keep=keep) if check else None
    attach(model, mixer, layers=layers, keep=keep, drop_softcap=drop_softcap, **options)
    found = Conversion(place, model, read_tokenizer(place), exactness)
    if out is not None:
        save(found, Path(out))
    return found


def save(found: Conversion, folder: Path) -> None:
    """Write model, tokenizer and card aside, and rename: the folder is whole or not there.

    Raises:
        FileExistsError: the folder holds something.
    """
    _refuse_filled(folder)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    found.model.save_pretrained(aside)
    if found.tokenizer is not None:
        found.tokenizer.save_pretrained(aside)
    copy_processors(found.source, aside)
    (aside / "README.md").write_text(card(found), encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    os.replace(aside, folder)


def card(found: Conversion) -> str:
    """Return the text of a model card: what was converted, into what, and how to load it."""
    summary = found.summary
    options = ", ".join(f"{key}={value}" for key, value in summary.options.items()) or "defaults"
    checked = "not checked" if found.exactness is None else str(found.exactness)
    return f"""---
library_name: transformers
tags: [mercer, {summary.mixer}]
---
# {Path(str(found.source)).stem} with {summary.mixer}

Converted by mercer {__version__} from `{Path(str(found.source)).name}`: token mixer `{summary.mixer}` ({options}).
Before any alignment or finetuning; {checked}.

{_layers(summary)}

```python
import mercer
from transformers import AutoTokenizer

model = mercer.load("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""


def _layers(summary: Summary) -> str:
    rows = [(summary.mixer, summary.converted)]
    for reason in dict.fromkeys(reason for _, reason in summary.left):
        rows.append((f"as it was ({reason})", tuple(name for name, why in summary.left if why == reason)))
    return "\n".join(f"* {what}: {spans(names)}" for what, names in rows)


def _refuse_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; give another folder, or remove it first")
