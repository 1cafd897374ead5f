"""Optional packages, imported when first needed and asked for by name when missing."""

import importlib
from types import ModuleType


def require(package: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which extra of mercer brings it.

    Args:
        package: import name.
        extra: the extra of mercer that declares it.
        purpose: what the package is needed for, as the subject of a sentence.

    Returns:
        The imported module.

    Raises:
        ValueError: the package is not installed.

    >>> require("json", extra="data", purpose="reading JSON").__name__
    'json'
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise  # the package is there; something it needs is not, and its own message names that
        raise ValueError(f'{purpose} needs the package {package!r}; pip install "mercer[{extra}]"') from error
