"""Every test starts from the same seed, one thread, and no network."""

import os
import tempfile

import jaxtyping
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["MERCER_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"mercer-tests-{os.getuid()}")


@pytest.fixture(autouse=True)
def seeded_and_single_threaded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def without_shape_checks():
    """Let wrong shapes and dtypes through the import hook, so that our own error texts are what is tested."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
