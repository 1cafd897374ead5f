"""What can go wrong, by who can mend it."""

import difflib
from collections.abc import Iterable


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
    near = difflib.get_close_matches(value, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ValueError(f"unknown {kind} {value!r}; choose one of {', '.join(names)}{hint}")
