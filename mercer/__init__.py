"""Attention as kernel regression: token mixers that solve and smooth, on plain PyTorch.

Importing mercer imports neither torch nor transformers: every name below is fetched on first use, so the command line
answers at once. It does tell transformers' Auto classes, now or once they are imported, about mercer's model folders.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mercer.hf.registration import register_with_transformers

if TYPE_CHECKING:
    from mercer import ops as ops
    from mercer import particles as particles
    from mercer.attention import MixerAttention as MixerAttention
    from mercer.errors import CheckpointError as CheckpointError
    from mercer.errors import DataError as DataError
    from mercer.errors import NumericalWarning as NumericalWarning
    from mercer.features import FEATURES as FEATURES
    from mercer.features import FeatureMap as FeatureMap
    from mercer.features import build_features as build_features
    from mercer.hf import attach as attach
    from mercer.hf import calibrate as calibrate
    from mercer.hf import convert as convert
    from mercer.hf import detach as detach
    from mercer.hf import fold as fold
    from mercer.hf import kernel_error as kernel_error
    from mercer.hf import load as load
    from mercer.mixers import MIXERS as MIXERS
    from mercer.mixers import Mixer as Mixer
    from mercer.mixers import build_mixer as build_mixer

__version__ = "0.1.0"

_HOMES = {
    "ops": "mercer",
    "particles": "mercer",
    "FEATURES": "mercer.features",
    "FeatureMap": "mercer.features",
    "build_features": "mercer.features",
    "MIXERS": "mercer.mixers",
    "Mixer": "mercer.mixers",
    "build_mixer": "mercer.mixers",
    "MixerAttention": "mercer.attention",
    "attach": "mercer.hf",
    "calibrate": "mercer.hf",
    "convert": "mercer.hf",
    "detach": "mercer.hf",
    "fold": "mercer.hf",
    "kernel_error": "mercer.hf",
    "load": "mercer.hf",
    "CheckpointError": "mercer.errors",
    "DataError": "mercer.errors",
    "NumericalWarning": "mercer.errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mercer' has no attribute {name!r}")
    value = (
        importlib.import_module(f"mercer.{name}") if home == "mercer" else getattr(importlib.import_module(home), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))


register_with_transformers()
