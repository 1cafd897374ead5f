"""Keep libraries from talking on the screen: our own messages are the ones that matter."""

import os
import sys
import warnings

from mercer.errors import NumericalWarning


def silence_libraries() -> None:
    """Turn off the progress bars and log lines of transformers and tokenizers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if transformers := sys.modules.get("transformers"):  # imported already: it has read its environment
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def filter_warnings() -> None:
    """Show our own warnings, one line each, and nobody else's; all of them with MERCER_DEBUG=1."""
    if os.environ.get("MERCER_DEBUG") == "1":
        return
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=r"mercer(\.|$)")
    warnings.filterwarnings("default", category=NumericalWarning)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
