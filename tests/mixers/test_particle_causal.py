"""Particles in language models: sums over the past alone, padding in none, gradients those of the definition."""

import math

import pytest
import torch
from torch.testing import assert_close

from mercer.mixers import build_mixer

MAPS = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2", "porf_softplus")
T, D, M = 11, 4, 6
REAL = {
    "left": torch.arange(T) >= 4,
    "right": torch.arange(T) < 7,
    "inside": torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0]).bool(),
}


def phi(name, features, x, omega):
    """Return the features of [B, H, T, D] by the table of the paper, without logs."""
    t = torch.einsum("hmd,bhtd->bhtm", omega, x)
    if name == "favor":
        return torch.exp(t - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(M)
    found = {
        "elu": lambda: torch.where(t > 0, 1 + t, t.exp()).clamp_min(1e-6),
        "softplus": lambda: (1 + t.exp()).log() + 1e-6,
        "porf_softplus": lambda: (1 + t.exp()).log() + 1e-6,
        "sigmoid2": lambda: (1 / (1 + torch.exp(-t))) ** 2,
        "softmaxfeat": lambda: t.exp(),
        "cos2": lambda: torch.cos(t + features.phase[:, None]) ** 2,
    }[name]()
    return math.sqrt(M) * found / found.sum(-1, keepdim=True)


def by_definition(phi_q, phi_k, v, real):
    """o_i = sum_{j <= i} w_ij v_j / sum_{j <= i} w_ij over real tokens, one output at a time; 0 for padding."""
    out = torch.zeros(*phi_q.shape[:3], v.shape[-1], dtype=v.dtype)
    for b in range(len(v)):
        for i in range(T):
            seen = [j for j in range(i + 1) if real[b, j]]
            if real[b, i]:
                w = torch.einsum("hm,hjm->hj", phi_q[b, :, i], phi_k[b][:, seen])
                out[b, :, i] = torch.einsum("hj,hjd->hd", w, v[b][:, seen]) / w.sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("shared", [True, False], ids=["q is k", "projections"])
@pytest.mark.parametrize("side", REAL)
@pytest.mark.parametrize("name", MAPS)
def test_causal_gradients_with_padding_are_those_of_the_definition(name, side, shared):
    mixer = build_mixer("particle", num_heads=2, head_dim=D, features=name, num_features=M).double()
    features, real = mixer.features, torch.stack([REAL[side], torch.ones(T, dtype=torch.bool)])
    q, k, v = torch.randn(3, 2, 2, T, D, dtype=torch.float64)
    q, v = q.requires_grad_(), v.requires_grad_()
    k = q if shared else k.requires_grad_()
    omega = features.omega.requires_grad_(True)
    root = D**-0.25 if name == "favor" else 1.0  # the root of the scale of softmax; the other maps have none
    expected = by_definition(phi(name, features, root * q, omega), phi(name, features, root * k, omega), v, real)
    o, _ = mixer(q, k, v, mask=real)
    assert_close(o, expected, rtol=1e-10, atol=1e-12)
    learned, probe = ([q, v] if shared else [q, k, v]) + [omega], torch.randn_like(o)
    got = torch.autograd.grad((o * probe).sum(), learned)
    for gradient, exact in zip(got, torch.autograd.grad((expected * probe).sum(), learned), strict=True):
        assert exact.abs().max() > 1e-6
        assert_close(gradient, exact, rtol=1e-9, atol=1e-11)
