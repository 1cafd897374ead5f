"""Make transformers' Auto classes know mercer's models, whichever of the two packages is imported first.

Nothing here imports transformers. Every configuration `name` of transformers gets an entry `mercer_name` that costs
nothing until a folder of that type is read: only then are its classes generated (see `classes.py`).
"""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

PREFIX = "mercer_"
_AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class _Pending:
    """Stand in AutoConfig's table for a configuration class that has not been generated yet."""

    model_type = ""

    @classmethod
    def _generated(cls) -> Any:
        from mercer.hf.classes import generate_family

        return generate_family(cls.model_type.removeprefix(PREFIX))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._generated()(*args, **kwargs)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._generated().from_dict(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._generated().from_pretrained(*args, **kwargs)


def _register_families(module: ModuleType) -> None:
    for name in list(module.CONFIG_MAPPING.keys()):
        if not name.startswith(PREFIX) and PREFIX + name not in module.CONFIG_MAPPING:
            pending = type(f"_Pending_{name}", (_Pending,), {"model_type": PREFIX + name, "__module__": __name__})
            module.AutoConfig.register(PREFIX + name, pending)


class _Finder:
    """Wait for transformers' table of configurations to be imported, then add ours to it."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AUTO_CONFIG:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register_families(module)

        # On this one loader: an object of another type would take the source away from inspect and tracebacks.
        spec.loader.exec_module = load_and_register
        return spec


def register_with_transformers() -> None:
    """Let `AutoModel...from_pretrained` load mercer's folders, now or as soon as transformers is imported.

    Cost: none before transformers is imported; then a class of four lines for every configuration it knows.
    """
    module = sys.modules.get(_AUTO_CONFIG)
    if module is not None and hasattr(module, "AutoConfig"):
        _register_families(module)
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
