"""Every test starts from the same seed, one thread, and no network."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")


@pytest.fixture(autouse=True)
def seeded_and_single_threaded():
    torch.manual_seed(0)
    torch.set_num_threads(1)
