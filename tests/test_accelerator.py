"""Every mixer on an accelerator gives what it gives on the CPU: `make test-gpu`, or on another device of PyTorch's.

`MERCER_TEST_DEVICE` names the device, cuda by default.
"""

import os

import pytest
import torch
from torch.testing import assert_close

from mercer import MIXERS, build_mixer
from mercer.mixers import map_state

DEVICE = os.environ.get("MERCER_TEST_DEVICE", "cuda")
VARIANTS = {
    "darkformer near": ("darkformer", {"window": 5, "sinks": 2, "center": True}),
    "linear_cubit share": ("linear_cubit", {"share": True}),
}
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 32}
LENGTH = 300  # more than a chunk, and no multiple of one

pytestmark = pytest.mark.gpu


def build(name):
    torch.manual_seed(0)
    name, options = VARIANTS.get(name, (name, {}))
    return build_mixer(name, **SIZES, **options)


def inputs(heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    made = {
        n: torch.randn(2, h, LENGTH, 16, generator=generator)
        for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    return made | {"x": torch.randn(2, LENGTH, 32, generator=generator)}


MARKS = {
    "plain": {},
    "padded": {"mask": torch.stack([torch.arange(LENGTH) >= 40, torch.arange(LENGTH) < 250])},
    "packed": {"segments": (torch.arange(LENGTH) // 110).expand(2, -1)},
}


def run(mixer, given, marks, device, dtype):
    """Return o and the gradients of what is given."""
    mixer = mixer.to(device, dtype)
    given = {name: x.to(device, dtype).requires_grad_() for name, x in given.items()}
    marks = {name: x.to(device) for name, x in marks.items()}
    o, _ = mixer(given["q"], given["k"], given["v"], x=given["x"], **marks)
    weight = torch.cos(torch.arange(o.numel(), device=device, dtype=torch.float64)).view_as(o)
    grads = torch.autograd.grad((o.double() * weight).sum(), list(given.values()), allow_unused=True)
    return [o, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, given.values(), strict=True))]


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", sorted(MIXERS) + sorted(VARIANTS))
def test_value_and_gradients_are_those_of_the_cpu(name, marks):
    exact = run(build(name), inputs(), MARKS[marks], "cpu", torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 2e-3), (torch.bfloat16, 0.15)):
        for value, expected in zip(run(build(name), inputs(), MARKS[marks], DEVICE, dtype), exact, strict=True):
            error = (value.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-12)
            assert error < tolerance, f"{dtype}: {error:.2g}"


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(MIXERS) + sorted(VARIANTS))
def test_decoding_equals_the_whole(name):
    mixer = build(name).to(DEVICE).eval()
    given = {name: x.to(DEVICE) for name, x in inputs().items()}

    def part(start, stop, state):
        q, k, v = (given[n][:, :, start:stop] for n in "qkv")
        return mixer(q, k, v, x=given["x"][:, start:stop], state=state)

    whole, _ = part(0, LENGTH, None)
    o, state = part(0, LENGTH - 3, None)
    pieces = [o]
    for at in range(LENGTH - 3, LENGTH):
        o, state = part(at, at + 1, map_state(state, torch.clone))
        pieces.append(o)
    assert_close(torch.cat(pieces, 2), whole, rtol=1e-3, atol=1e-3)
