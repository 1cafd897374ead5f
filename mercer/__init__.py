"""Attention as kernel regression: token mixers that solve and smooth, on plain PyTorch."""

from . import ops
from .attention import MixerAttention
from .errors import CheckpointError, DataError, NumericalWarning
from .mixers import MIXERS, Mixer, build_mixer

__version__ = "0.1.0"

__all__ = [
    "MIXERS",
    "CheckpointError",
    "DataError",
    "Mixer",
    "MixerAttention",
    "NumericalWarning",
    "build_mixer",
    "ops",
]
