"""Load a folder that `save_pretrained` wrote."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mercer.errors import CheckpointError
from mercer.hf.classes import generated
from mercer.hf.quiet import no_progress_bars


def load(path: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Load a model with mixers from a folder, ready to evaluate.

    Args:
        path: a folder written by `model.save_pretrained(path)`.
        device: where to put it; default: the CPU.
        dtype: type of its weights; default: as saved.

    Returns:
        The model, bit-equal to the one saved, in evaluation mode.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no configuration.
        ValueError: the folder holds a model without mixers.
        CheckpointError: a file is damaged, or weights are missing.

    Example:
        >>> import tempfile
        >>> from mercer.hf.scratch import from_scratch
        >>> model = from_scratch("tiny", "softmax", vocab_size=64, max_length=32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     same = load(folder)
        >>> bool((same.lm_head.weight == model.lm_head.weight).all())
        True
    """
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; give the folder that save_pretrained wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        name = config["architectures"][0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); save the model again") from None
    if not config.get("mercer"):
        raise ValueError(
            f"{folder} holds {name} without a mixer; load it with transformers' AutoModel classes and use mercer.attach"
        )
    if not any((folder / weights).is_file() for weights in ("model.safetensors", "model.safetensors.index.json")):
        raise CheckpointError(f"{folder} holds no model.safetensors; the save was interrupted, save the model again")
    _, model_class = generated(name)
    try:
        with no_progress_bars():
            model, report = model_class.from_pretrained(
                folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
            )
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"the weights in {folder} are damaged ({reason}); save the model again") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors of {name}, among them {missing[0]}")
    return (model if device is None else model.to(device)).eval()
