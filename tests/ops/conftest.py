"""Blocks of a few tokens, so that short sequences cross their edges too."""

import pytest

from mercer.ops import linear_chunks

BLOCK = linear_chunks.CPU_BLOCK


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(linear_chunks, "CPU_BLOCK", 4)


@pytest.fixture
def whole_blocks(monkeypatch):
    monkeypatch.setattr(linear_chunks, "CPU_BLOCK", BLOCK)
    return BLOCK
