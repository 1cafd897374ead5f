"""Ctrl-C and SIGTERM become a flag that the loop reads between two steps."""

import signal
import threading
from types import FrameType


class Interruption:
    """Catch the first SIGINT or SIGTERM inside a `with` block; a second one stops at once.

    Args:
        at_once: the first one stops at once too: there is nothing yet that could be saved.

    >>> with Interruption() as interruption:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interruption.requested
    True
    """

    def __init__(self, *, at_once: bool = False):
        self.requested = at_once
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
