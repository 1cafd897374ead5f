"""Every line that knows transformers: mixers inside its models, their caches, classes, sizes and files.

Importing this package does not import transformers; using any of its names does.
"""

import importlib
from typing import Any

_HOMES = {
    "attach": "exchange",
    "detach": "exchange",
    "CalibrationReport": "calibration",
    "calibrate": "calibration",
    "fold": "folding",
    "Conversion": "conversion",
    "convert": "conversion",
    "Exactness": "exact",
    "check_exact": "exact",
    "HeadError": "kernel_errors",
    "KernelErrors": "kernel_errors",
    "kernel_error": "kernel_errors",
    "Source": "source",
    "find_source": "source",
    "Summary": "layers",
    "MercerModel": "classes",
    "generated": "classes",
    "MixerCacheLayer": "cache",
    "cache_argument": "cache",
    "new_cache": "cache",
    "load": "loading",
    "SIZES": "scratch",
    "Size": "scratch",
    "from_scratch": "scratch",
    "register_with_transformers": "registration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
