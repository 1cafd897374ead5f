"""Attention as kernel regression: token mixers that solve and smooth, on plain PyTorch."""

__version__ = "0.1.0"
