"""Generated classes: for each model class of transformers, one whose attention layers carry mixers.

`LlamaForCausalLM` becomes `MercerLlamaForCausalLM` with `MercerLlamaConfig` (`model_type` "mercer_llama", field
`mercer`). The same class pretrains from a configuration, carries a converted model, saves and loads.
"""

import inspect
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from mercer.hf.block import arrange, arrangement
from mercer.hf.cache import cache_argument, new_cache
from mercer.hf.install import attached, fill_initial_values, install
from mercer.hf.layers import Summary
from mercer.hf.quiet import no_progress_bars
from mercer.hf.registration import PREFIX

logger = logging.getLogger(__name__)

STUB = "modeling_mercer"
_STUB_TEXT = '''"""Lets transformers load this folder with trust_remote_code=True; needs the package mercer."""

from mercer.hf import generated

{config}, {model} = generated("{base}")
'''

_Base: Any = PreTrainedModel if TYPE_CHECKING else object


class MercerModel(_Base):
    """What a generated class adds to its transformers class."""

    _supports_attention_backend = False  # serving back ends would put their own softmax in place of the mixers
    _supports_context_parallel = False  # it shards the sequence and never exchanges a state
    supports_context_parallel = False
    _can_compile_fullgraph = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if is_ours(getattr(config, "auto_map", None)):
            del config.auto_map  # written anew at every save
        if config.mercer is not None:
            install(self, config.mercer)
            arrange(self, **arrangement(config.mercer))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        fill_initial_values(self)
        super().initialize_weights()

    def mercer_summary(self) -> Summary:
        """Return which layers carry the mixer, and which were left and why; print it to read it."""
        return self.mercer_description

    def new_cache(self) -> Any:
        """Return an empty cache for this model; pass it as `cache=` (`past_key_values=` before transformers 5.24).

        Raises:
            ValueError: the model does not decode, so it has no past to keep.
        """
        indices = [m.mercer_attachment.cache_index for _, m in attached(self) if m.mixer.causal]
        if not indices or None in indices:
            raise ValueError(f"{type(self).__name__} is bidirectional: it has no cache")
        return new_cache(self, indices)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse: it would put softmax back while the mixers stay in the checkpoint.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"attn_implementation {attn_implementation!r} would replace the mixers of {type(self).__name__}; "
            "use mercer.detach(model) to go back to softmax"
        )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        # Some checkpoints ask for a static cache by default; the state of a mixer is better than what they want.
        kind = generation_config.cache_implementation
        if model_kwargs.get(cache_argument(self)) is None and kind not in (None, "dynamic"):
            logger.warning("cache_implementation %r is set aside: mixers keep states of their own", kind)
            generation_config.cache_implementation = None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save weights (safetensors), configuration, and a stub that loads them with trust_remote_code=True."""
        if "save_original_format" in inspect.signature(super().save_pretrained).parameters:
            kwargs.setdefault("save_original_format", False)  # a generated class has no renaming to read it back
        self.config.auto_map = _auto_map(type(self))
        try:
            with no_progress_bars():
                super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            del self.config.auto_map
        if kwargs.get("is_main_process", True):
            base = base_class(type(self))
            names = {"config": type(self.config).__name__, "model": type(self).__name__, "base": base.__name__}
            Path(save_directory, f"{STUB}.py").write_text(_STUB_TEXT.format(**names), encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: transformers would copy mercer's source into every checkpoint loaded as remote code."""


def is_ours(auto_map: Any) -> bool:
    """Return whether an `auto_map` was written by `save_pretrained` above."""
    return bool(auto_map) and all(str(ref).startswith(f"{STUB}.") for ref in auto_map.values())


def base_class(model_class: type) -> type[PreTrainedModel]:
    """Return the transformers class a generated class was made from."""
    return model_class.__mro__[2]


def generated(base: str | type) -> tuple[Any, Any]:
    """Return the configuration class and the model class that carry mixers, for a transformers model class.

    Args:
        base: `LlamaForCausalLM`, or its name; the generated class or its name too.

    Raises:
        ValueError: transformers has no such class.

    Example:
        >>> config_class, model_class = generated("LlamaForCausalLM")
        >>> model_class.__name__, config_class.model_type
        ('MercerLlamaForCausalLM', 'mercer_llama')
    """
    if isinstance(base, str):
        name = base.removeprefix("Mercer")
        found = getattr(transformers, name, None)
        if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
            raise ValueError(f"transformers {transformers.__version__} has no model class {name!r}")
        base = found
    if issubclass(base, MercerModel):
        return base.config_class, base
    config_class = _family(base.config_class)
    return config_class, _model_class(base, config_class)


def generate_family(model_type: str) -> Any:
    """Generate and register every class of a model type ("llama"); returns the configuration class."""
    return _family(transformers.CONFIG_MAPPING[model_type])


def _family(base_config: Any) -> Any:
    """Return the configuration class made from `base_config`, once the Auto classes know all its heads."""
    made = vars(sys.modules[__name__]).get(f"Mercer{base_config.__name__}")
    if made is not None and issubclass(made, base_config):
        return made
    body = {
        "model_type": PREFIX + base_config.model_type,
        "mercer": None,
        "__annotations__": {"mercer": dict | None},
        "__module__": __name__,
        "register_for_auto_class": classmethod(lambda cls, auto_class=None: None),
    }
    made = _publish(type(f"Mercer{base_config.__name__}", (base_config,), body))
    AutoConfig.register(made.model_type, made, exist_ok=True)
    for auto_class in _auto_classes():
        for base in _mapped(auto_class, base_config):
            if isinstance(base, type) and issubclass(base, PreTrainedModel) and base.config_class is base_config:
                auto_class.register(made, _model_class(base, made), exist_ok=True)
    return made


def _model_class(base: Any, config_class: Any) -> Any:
    made = vars(sys.modules[__name__]).get(f"Mercer{base.__name__}")
    if made is None or base_class(made) is not base:
        body = {"config_class": config_class, "__module__": __name__}
        made = _publish(type(f"Mercer{base.__name__}", (MercerModel, base), body))
    return made


def _publish(made: Any) -> Any:
    setattr(sys.modules[__name__], made.__name__, made)  # where pickle looks
    return made


def _auto_classes() -> list[Any]:
    """Return AutoModel, AutoModelForCausalLM and their kind."""
    return [
        c
        for c in vars(modeling_auto).values()
        if isinstance(c, type) and getattr(c, "_model_mapping", None) is not None
    ]


def _mapped(auto_class: Any, config_class: Any) -> tuple[type, ...]:
    found = auto_class._model_mapping.get(config_class, ())
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _auto_map(model_class: type) -> dict[str, str]:
    base = base_class(model_class)
    names = [c.__name__ for c in _auto_classes() if base in _mapped(c, base.config_class)]
    return {
        "AutoConfig": f"{STUB}.{model_class.config_class.__name__}",
        **dict.fromkeys(names, f"{STUB}.{model_class.__name__}"),
    }


def check_options(options: dict[str, Any]) -> None:
    """Raise ValueError unless the options can stand in config.json."""
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"mixer options {options} must be JSON values, as they are saved: {error}") from None


def __getattr__(name: str) -> Any:
    """Generate classes that a pickle of another process names."""
    if name.startswith("Mercer") and hasattr(transformers, name.removeprefix("Mercer")):
        base = getattr(transformers, name.removeprefix("Mercer"))
        return _family(base) if issubclass(base, PreTrainedConfig) else generated(base)[1]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
