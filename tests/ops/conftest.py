"""Blocks of a few tokens, so that short sequences cross their edges too."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mercer.ops import linear_carry, linear_passes, linear_solve_passes

BLOCKS = {module: module.BLOCK for module in (linear_passes, linear_solve_passes)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(linear_carry, "SHORT", 1)
    for module in BLOCKS:
        monkeypatch.setattr(module, "BLOCK", 4)


@pytest.fixture
def whole_block(monkeypatch):
    """Undo `small_blocks`; returns the longer one."""
    for module, block in BLOCKS.items():
        monkeypatch.setattr(module, "BLOCK", block)
    return max(BLOCKS.values())


@pytest.fixture(params=itertools.product([False, True], repeat=2), ids=["plain", "packed", "padded", "both"])
def marks_over_blocks(request, whole_block):
    """Return the length of four blocks and a little more, and marks for it; a document begins inside a block."""
    padded, packed = request.param
    length, marks = 4 * whole_block + 9, {}
    if padded:
        marks["mask"] = torch.rand(1, length) > 0.2
    if packed:
        marks["segments"] = (torch.arange(length) >= 2 * whole_block + 5).long()[None]
    return length, marks


class Calls(TorchDispatchMode):
    """Counts the operators that PyTorch calls inside it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def calls():
    return Calls()
