"""`mercer convert`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from mercer.cli.benches import whole_numbers
from mercer.cli.threads import set_threads


def convert(
    model: str,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    mixer: str = "darkformer",
    layers: str = "all",
    keep: str = "",
    check: bool = False,
    drop_softcap: bool = False,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    threads: int | None = None,
) -> int:
    """Exchange the attention of a pretrained model: `mercer convert MODEL --mixer darkformer -o DIR`.

    **Examples**

    ```
    mercer convert my_llama_folder --mixer darkformer --check -o converted
    mercer convert SmolLM2-135M-Instruct.Q4_1.gguf --mixer darkformer:num_features=128 -o converted
    mercer convert HuggingFaceTB/SmolLM2-135M --mixer performer --layers 3,5,7 -o converted
    mercer convert my_llama_folder --mixer darkformer:window=64:sinks=4 --keep 18,20,23 -o hybrid
    ```

    Layers with a sliding window keep their softmax: they are linear in time already. Writes safetensors, tokenizer and
    a card; `mercer eval`, `mercer generate` and transformers' Auto classes read the folder.

    Args:
        model: a folder of transformers, a GGUF file, or a hub name as owner/name.
        out: the folder to write.
        mixer: `mercer list mixers`; options follow as NAME:OPTION=VALUE.
        layers: all or global (every layer with full attention), or numbers as 3,5,7.
        keep: numbers of layers that keep their softmax all the same; `mercer layers` finds those that reach far back.
        check: first put the softmax mixer in and compare the logits with the original's, left-padded batch included.
        drop_softcap: convert a model that caps its attention logits (Gemma 2) without its cap.
        dtype: of the weights; auto keeps what is stored.
        threads: CPU threads to compute with.
    """
    from mercer.hf.source import find_source

    find_source(model)  # a missing path is said before torch is loaded
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty; give another --out, or remove it first")
    import torch

    from mercer.cli.training import with_mixer
    from mercer.hf import conversion
    from mercer.train.recipe import tiny

    set_threads(threads)
    chosen = with_mixer(tiny(), mixer).model
    found = conversion.convert(
        model,
        chosen.mixer,
        layers=layers,
        keep=whole_numbers("keep", keep) if keep else (),
        check=check,
        drop_softcap=drop_softcap,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        **chosen.mixer_options,
    )
    if found.exactness is not None:
        print(found.exactness)
    _print_summary(found.summary)
    conversion.save(found, out)
    print(f"{_size(out)} in {out}" + ("" if found.tokenizer is not None else " (the source has no tokenizer)"))
    return 0


def _print_summary(summary: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from mercer.hf.spans import spans

    table = Table(
        "attention layer", "now", caption=f"{summary.added_parameters:,} parameters added", title=summary.model
    )
    converted = f"[bold]{summary.mixer}[/bold]"
    table.add_row(spans(summary.converted), converted)
    for reason in dict.fromkeys(reason for _, reason in summary.left):
        table.add_row(spans([name for name, why in summary.left if why == reason]), f"as it was: {reason}")
    console = Console()
    console.print(table, highlight=False)
    for note in summary.notes:
        console.print(f"note: {note}", highlight=False)


def _size(folder: Path) -> str:
    total = sum(file.stat().st_size for file in folder.iterdir())
    return f"{total / 1e6:.1f} MB"
