"""Read and write files without transformers' progress bars, which our own output would drown in."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off for a while, and on again if they were on."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
