"""Read a pretrained model and its tokenizer from wherever they lie: a folder, a GGUF file, the model hub."""

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from mercer.errors import CheckpointError
from mercer.hf.quiet import no_progress_bars

_GGUF = ".gguf"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # what images need in place of a tokenizer


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a pretrained model lies: `place` is a folder or a hub name, `gguf_file` a file in that folder."""

    place: str
    gguf_file: str | None = None

    def __str__(self) -> str:
        return self.place if self.gguf_file is None else str(Path(self.place, self.gguf_file))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what `from_pretrained` takes besides the place."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_source(name: str | Path) -> Source:
    """Say what a name means, without reading any weights.

    Args:
        name: a folder with config.json and safetensors, a GGUF file (or a folder with just one), or a hub name as
            `owner/name`.

    Raises:
        FileNotFoundError: it looks like a path and nothing lies there, or the folder holds no model.

    >>> find_source("HuggingFaceTB/SmolLM2-135M")
    Source(place='HuggingFaceTB/SmolLM2-135M', gguf_file=None)
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != _GGUF:
            raise FileNotFoundError(f"{path} is a file, but no GGUF file; give a folder with config.json, or a .gguf")
        return Source(str(path.parent), path.name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source(str(path))
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() == _GGUF)
        if len(files) == 1:
            return Source(str(path), files[0])
        found = f"{len(files)} GGUF files, name one of them" if files else "no config.json and no GGUF file"
        raise FileNotFoundError(f"{path} holds no model: {found}")
    text = str(name)
    if text.count("/") > 1 or text.startswith((".", "~", "/")) or text.lower().endswith(_GGUF):
        raise FileNotFoundError(f"{text} does not exist; give a folder, a GGUF file or a hub name as owner/name")
    return Source(text)


def read_model(source: Source, dtype: torch.dtype | None = None) -> Any:
    """Load a model with the class its configuration names, in evaluation mode.

    Args:
        source: see `find_source`.
        dtype: of the weights; as stored by default (float32 for GGUF, whose blocks are unpacked).

    Raises:
        ValueError: the folder carries mixers already, transformers does not know the model, or the package gguf is
            missing.
        FileNotFoundError: the hub has no such model or cannot be reached, or there are no safetensors weights.
        CheckpointError: a file is damaged.
    """
    config = read_config(source)
    if getattr(config, "mercer", None):
        raise ValueError(
            f"{source} carries mixers already ({config.mercer['mixer']}); convert the model it was made from, or use "
            "mercer.load and mercer.detach"
        )
    if source.gguf_file is not None:
        return _read_gguf(source, dtype)
    try:
        with no_progress_bars():
            model = _model_class(config).from_pretrained(
                source.place, config=config, dtype=dtype or "auto", use_safetensors=True
            )
    except OSError as error:
        raise FileNotFoundError(f"cannot load {source}: {_first_line(error)}") from error
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the weights in {source} do not fit or are damaged: {_first_line(error)}") from error
    return model.eval()


def read_config(source: Source) -> PreTrainedConfig:
    """Load the configuration alone.

    Raises:
        ValueError: transformers does not know the model, or the package gguf is missing.
        FileNotFoundError: nothing lies there, or the hub cannot be reached.
    """
    try:
        with no_progress_bars():
            return AutoConfig.from_pretrained(source.place, **source.arguments)
    except OSError as error:
        raise FileNotFoundError(
            f"cannot read the configuration of {source}: {_first_line(error)} (a folder, a GGUF file, or a hub name "
            "that can be reached?)"
        ) from error
    except ImportError as error:
        raise ValueError(
            f"{source} needs the package gguf to be read: pip install gguf ({_first_line(error)})"
        ) from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"transformers cannot read the configuration of {source}: {_first_line(error)}") from error


def read_tokenizer(source: Source) -> Any | None:
    """Load the tokenizer beside a model; None where there is none (images)."""
    folder = Path(source.place)
    if source.gguf_file is None and folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZERS):
        return None  # transformers would make one up
    try:
        return AutoTokenizer.from_pretrained(source.place, **source.arguments)
    except (OSError, ValueError, KeyError):
        return None


def copy_processors(source: Source, folder: Path) -> None:
    """Copy what prepares the inputs of a model of images, where it has any."""
    for name in _PROCESSORS:
        file = Path(source.place, name)
        if file.is_file():
            shutil.copyfile(file, folder / name)


def _model_class(config: PreTrainedConfig) -> Any:
    for name in config.architectures or ():
        if isinstance(found := getattr(transformers, name, None), type):
            return found
    return AutoModelForCausalLM


def _read_gguf(source: Source, dtype: torch.dtype | None) -> Any:
    """Unpack a GGUF file into an ordinary model: what transformers returns counts as quantised and cannot be saved."""
    try:
        with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):  # its bar heeds no setting
            packed: Any = AutoModelForCausalLM.from_pretrained(
                source.place, gguf_file=source.gguf_file, dtype=dtype or torch.float32
            )
    except ImportError as error:
        raise ValueError(
            f"{source} needs the package gguf to be read: pip install gguf ({_first_line(error)})"
        ) from error
    except (OSError, RuntimeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{source} cannot be unpacked: {_first_line(error)}") from error
    config: Any = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(packed).__name__]
    model = type(packed)(config).to(packed.dtype)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.generation_config = packed.generation_config
    return model.eval()


def _needs_gguf(source: Source, error: ImportError) -> ValueError:
    return ValueError(f"{source} needs the package gguf to be read: pip install gguf ({_first_line(error)})")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
