"""The benchmark of states: sizes are those of the tensors a mixer returns."""

import io
import json

import pytest
import torch
from rich.console import Console

from mercer.bench import DEFAULT_STATES, bench_states, run_states, state_bytes
from mercer.bench.states import STATES
from mercer.mixers import build_mixer, map_state

FEATURES = 256
CONSTANT = {"constant", "performer", "darkformer", "lfk", "particle", "window", "near_far", "linear_cubit"}


@pytest.mark.parametrize("name", sorted(STATES))
def test_sizes_are_those_of_a_real_state(name):
    mixer, options = STATES[name]
    module = build_mixer(mixer, num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=32, **options)
    q, k, v = (torch.randn(1, heads, 70, 8) for heads in (4, 2, 2))
    sizes = []
    state = module(q, k, v, x=torch.randn(1, 70, 32), rotate=lambda t: t)[1]
    map_state(state, lambda t: sizes.append(t.nbytes) or t)
    assert state_bytes(name, 70, heads=4, kv_heads=2, head_dim=8) == sum(sizes) > 0


@pytest.mark.parametrize("name", sorted(STATES))
def test_states_grow_with_the_context_or_not_at_all(name):
    found = [state_bytes(name, length, heads=2, head_dim=8) for length in (1000, 2000, 1_000_000)]
    if name in CONSTANT:
        assert found[0] == found[1] == found[2]
    else:
        assert found[2] - found[1] == 998 * (found[1] - found[0]) > 0


def test_softmax_keeps_keys_and_values_and_performer_one_sum_a_feature():
    assert state_bytes("softmax", 100, batch=3, heads=4, kv_heads=2, head_dim=8) == 3 * 2 * 100 * 2 * 8 * 4
    sums = 2 * FEATURES * (8 + 1 + 1) * 4  # S and z, and the log of their unit
    assert state_bytes("performer", 100, heads=2, head_dim=8) == sums + 8  # and the number of the document


def test_what_is_printed_and_written(tmp_path):
    out = io.StringIO()
    run_states(lengths=[64, 128], heads=2, head_dim=8, out=tmp_path / "new", console=Console(file=out, width=90))
    text = out.getvalue()
    assert all(name in text for name in DEFAULT_STATES)
    assert "128 bytes" in text
    assert "constant" in text
    record = json.loads((tmp_path / "new" / "states.json").read_text())
    assert {"mixer": "softmax", "length": 64, "state_bytes": 8192} in record["measurements"]


def test_wrong_requests_are_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown mixer 'near'.*near_far"):
        bench_states(["near"])
    with pytest.raises(ValueError, match=r"length \(0\) must be at least 1"):
        bench_states(lengths=[0])
    with pytest.raises(ValueError, match=r"kv_heads \(0\) must be at least 1"):
        bench_states(kv_heads=0)
