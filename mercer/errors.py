"""What can go wrong, by who can mend it."""

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any


class NumericalWarning(UserWarning):
    """A computation was repaired to stay well posed; the message gives the value and the repair."""


class DataError(RuntimeError):
    """The data exist but cannot be used: empty, binary, too short, or of another shape than promised."""


class CheckpointError(RuntimeError):
    """A checkpoint or run folder is damaged, half written or of another run."""


def unknown(kind: str, value: str, choices: Iterable[str]) -> ValueError:
    """Return the error for a name that is in no table, with the choices and the nearest one.

    >>> str(unknown("mixer", "cubitt", ["softmax", "cubit"]))
    "unknown mixer 'cubitt'; choose one of cubit, softmax (did you mean 'cubit'?)"
    """
    names = sorted(choices)
    near = difflib.get_close_matches(str(value), names, n=1)  # a file may hold a number where a name belongs
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ValueError(f"unknown {kind} {value!r}; choose one of {', '.join(names)}{hint}")


def check_kind(option: str, value: Any, default: Any) -> None:
    """Raise ValueError unless the value of an option is of its default's kind; numbers are finite.

    A default of None stands for a number that may be left out.

    >>> check_kind("ridge", 1, 0.1)
    >>> check_kind("share", "yes", False)
    Traceback (most recent call last):
    ...
    ValueError: share ('yes') must be true or false
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    finite = is_number and math.isfinite(value)
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = is_number and isinstance(value, numbers.Integral), "a whole number"
    elif isinstance(default, float):
        fits, wanted = finite, "a finite number"
    elif default is None:
        fits, wanted = value is None or finite, "a finite number, or left out"
    else:
        fits, wanted = isinstance(value, type(default)), "text" if isinstance(default, str) else type(default).__name__
    if not fits:
        raise ValueError(f"{option} ({value!r}) must be {wanted}")
