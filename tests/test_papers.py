"""One literal transcription per paper: slow, obvious, in float64, and never imported by the package."""

import math

import pytest
import torch
from torch.testing import assert_close

from mercer import MixerAttention, build_mixer
from mercer.ops import kernel_solve, local_linear_attention

T, H, D, E = 11, 3, 4, 12


def turn(x, t, theta=10_000.0):
    """RoPE on one vector at position t, pair by pair."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = t * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def softmax(scores):
    w = torch.stack(scores).exp()
    return w / w.sum()


def projected(attention, x, name):
    return getattr(attention, name)(x).view(T, H, D)


def randomise(module):
    """Away from their start values, so that no parameter is left out of a check."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith(("gamma", "rescale_lower", "rescale_range")):
                p.copy_(0.5 + torch.rand_like(p))
            if name.endswith("log_ridge"):
                p.copy_(torch.randn_like(p) - 2)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("lrr", [False, True])
@pytest.mark.parametrize("gamma", ["raw", "softplus"])
def test_cubit_appendix_h(share, lrr, gamma):
    attention = MixerAttention(E, H, mixer="cubit", share=share, lrr=lrr, gamma=gamma).double()
    m = attention.mixer
    randomise(m)
    x = torch.randn(1, T, E, dtype=torch.float64)
    q, k, v = (projected(attention, x[0], f"{n}_proj") for n in "qkv")
    r = k if share else m.r_proj(x[0]).view(T, H, D)
    o = torch.zeros(T, H, D, dtype=torch.float64)
    for h in range(H):
        g = m.gamma[h] if gamma == "raw" else torch.log(1 + torch.exp(m.gamma[h]))
        r_hat = [turn(r[t, h], t) for t in range(T)]
        r_unit = [turn(g * r[t, h] / r[t, h].norm(), t) for t in range(T)]
        q_hat, k_hat = [turn(q[t, h], t) for t in range(T)], [turn(k[t, h], t) for t in range(T)]
        u = []
        for t in range(T):
            s = 1.0
            if lrr:
                z = m.rescale_proj.weight[h] @ x[0, t] + m.rescale_proj.bias[h]
                s = m.rescale_lower[h] + m.rescale_range[h] / (1 + torch.exp(-z))
            p = softmax([r_hat[t] @ r_unit[j] for j in range(t + 1)])
            rest = s * v[t, h]
            for j in range(t):
                rest = rest - p[j] * u[j]
            u.append(rest / (p[t] + torch.exp(m.log_ridge[h])))
            a = softmax([q_hat[t] @ k_hat[j] / math.sqrt(D) for j in range(t + 1)])
            o[t, h] = sum(a[j] * u[j] for j in range(t + 1))
    assert_close(attention(x)[0][0], attention.o_proj(o.view(T, E)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("w", ["q", "k", "separate"])
def test_deltaformer(w):
    attention = MixerAttention(E, H, mixer="deltaformer", w=w).double()
    m = attention.mixer
    x = torch.randn(1, T, E, dtype=torch.float64)
    q, k, v = (projected(attention, x[0], f"{n}_proj") for n in "qkv")
    reader = {"q": q, "k": k}.get(w)
    reader = m.w_proj(x[0]).view(T, H, D) if reader is None else reader
    o = torch.zeros(T, H, D, dtype=torch.float64)
    for h in range(H):
        u = []
        for t in range(T):
            beta = m.gate_proj.weight[h] @ x[0, t] + m.gate_proj.bias[h]
            value = v[t, h]
            if t:
                p = softmax([turn(reader[t, h], t) @ turn(k[j, h], j) / math.sqrt(D) for j in range(t)])
                for j in range(t):
                    value = value - beta * p[j] * u[j]
            u.append(value)
            a = softmax([turn(q[t, h], t) @ turn(k[j, h], j) / math.sqrt(D) for j in range(t + 1)])
            o[t, h] = sum(a[j] * u[j] for j in range(t + 1))
    assert_close(attention(x)[0][0], attention.o_proj(o.view(T, E)), rtol=1e-9, atol=1e-9)


def test_local_linear_regression_appendix_e():
    mixer = build_mixer("local_linear", num_heads=1, head_dim=D, ridge=0.3)
    q, k, v = torch.randn(3, 1, 1, T, D, dtype=torch.float64)
    o = mixer(q, k, v)[0]
    penalty = 0.3 * torch.diag(torch.tensor([0.0] + [1.0] * D, dtype=torch.float64))
    for t in range(T):
        w = softmax([q[0, 0, t] @ k[0, 0, j] / math.sqrt(D) for j in range(t + 1)])
        m = torch.cat([torch.ones(t + 1, 1, dtype=torch.float64), k[0, 0, : t + 1]], 1)
        h, g = m.T @ torch.diag(w) @ m + penalty, m.T @ torch.diag(w) @ v[0, 0, : t + 1]
        theta = torch.inverse(h) @ g
        assert_close(o[0, 0, t], theta[0] + q[0, 0, t] @ theta[1:], rtol=1e-8, atol=1e-8)
    assert_close(o, local_linear_attention(q, k, v, ridge=0.3))


def exponential_features(x, omega, metric):
    """phi(x) of one head: exp(omega.Mx - ||Mx||^2 / 2) / sqrt(m)."""
    mapped = metric @ x
    return torch.stack([torch.exp(w @ mapped - mapped @ mapped / 2) for w in omega]) / math.sqrt(len(omega))


def smooth(weights, values):
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("name", ["performer", "lfk", "darkformer"])
def test_random_features_of_the_softmax_kernel(name):
    attention = MixerAttention(E, H, mixer=name, num_features=6).double()
    features, x = attention.mixer.features, torch.randn(1, T, E, dtype=torch.float64)
    if name == "darkformer":
        torch.nn.init.normal_(features.metric)
    q, k, v = (projected(attention, x[0], f"{n}_proj") for n in "qkv")
    o = torch.zeros(T, H, D, dtype=torch.float64)
    for h in range(H):
        metric = features.metric[h] if name == "darkformer" else torch.eye(D, dtype=torch.float64)
        phi = lambda z, t, h=h, metric=metric: exponential_features(turn(z, t) / D**0.25, features.omega[h], metric)
        for t in range(T):
            o[t, h] = smooth([phi(q[t, h], t) @ phi(k[j, h], j) for j in range(t + 1)], v[: t + 1, h])
    assert_close(attention(x)[0][0], attention.o_proj(o.view(T, E)), rtol=1e-9, atol=1e-9)


def test_particles_smooth_with_features_of_the_unscaled_vectors():
    mixer = build_mixer("particle", num_heads=1, head_dim=D, features="sigmoid2", num_features=6).double()
    q, k, v = torch.randn(3, 1, 1, T, D, dtype=torch.float64)
    omega = mixer.features.omega[0]

    def phi(x):  # Coulomb, App. C: the features of a token are rescaled to sum sqrt(M)
        found = torch.stack([1 / (1 + torch.exp(-(w @ x))) ** 2 for w in omega])
        return math.sqrt(len(omega)) * found / found.sum()

    for t in range(T):
        weights = [phi(q[0, 0, t]) @ phi(k[0, 0, j]) for j in range(t + 1)]
        assert_close(mixer(q, k, v)[0][0, 0, t], smooth(weights, v[0, 0, : t + 1]))


@pytest.mark.parametrize("share", [False, True])
def test_linear_cubit(share):
    """u_t = (s_t v_t - sum_{j<t} P_tj u_j) / (P_tt + ridge), with the kernels of both steps through features."""
    attention = MixerAttention(E, H, mixer="linear_cubit", features="favor", num_features=6, share=share).double()
    m, x = attention.mixer, torch.randn(1, T, E, dtype=torch.float64)
    randomise(m)
    q, k, v = (projected(attention, x[0], f"{n}_proj") for n in "qkv")
    r = k if share else m.r_proj(x[0]).view(T, H, D)
    reference_features = m.features if share else m.reference_features
    o, eye = torch.zeros(T, H, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
    for h in range(H):
        kernel = lambda a, b, omega: exponential_features(a, omega, eye) @ exponential_features(b, omega, eye)
        rows = [turn(r[t, h], t) / D**0.25 for t in range(T)]
        units = [turn(D**0.25 * m.gamma[h] * r[t, h] / r[t, h].norm(), t) for t in range(T)]
        at = lambda z, h=h: [turn(z[t, h], t) / D**0.25 for t in range(T)]
        q_hat, k_hat = at(q), at(k)
        u = []
        for t in range(T):
            z = m.rescale_proj.weight[h] @ x[0, t] + m.rescale_proj.bias[h]
            s = m.rescale_lower[h] + m.rescale_range[h] / (1 + torch.exp(-z))
            p = [kernel(rows[t], units[j], reference_features.omega[h]) for j in range(t + 1)]
            total = sum(p)
            rest = s * v[t, h] - sum((w / total * value for w, value in zip(p[:-1], u, strict=True)), 0 * v[t, h])
            u.append(rest / (p[t] / total + torch.exp(m.log_ridge[h])))
            o[t, h] = smooth([kernel(q_hat[t], k_hat[j], m.features.omega[h]) for j in range(t + 1)], u)
    assert_close(attention(x)[0][0], attention.o_proj(o.view(T, E)), rtol=1e-8, atol=1e-8)


# The facts of the Cubit paper


def reference(length, gamma=1.0, norm=None, heads=2):
    r = torch.randn(1, heads, length, 16, dtype=torch.float64)
    r = r if norm is None else norm * r / r.norm(dim=-1, keepdim=True)
    return r, gamma * r / r.norm(dim=-1, keepdim=True)


def causal_kernel(r, unit):
    scores = r @ unit.mT
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf).softmax(-1)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 3.0])
def test_the_diagonal_is_the_row_maximum(gamma):
    p = causal_kernel(*reference(60, gamma))
    diagonal = p.diagonal(dim1=-2, dim2=-1)
    assert_close(diagonal, p.amax(-1))
    assert (diagonal >= 1 / torch.arange(1, 61, dtype=torch.float64) - 1e-12).all()


def test_with_a_negative_gamma_it_is_the_minimum():
    r, unit = reference(60, -1.0, norm=3.0)
    p = causal_kernel(r, unit)
    seen = p.masked_fill(p == 0, math.inf)
    assert_close(p.diagonal(dim1=-2, dim2=-1), seen.amin(-1))


@pytest.mark.parametrize("norm", [0.1, 1.0, 3.0, 10.0])
def test_the_inverse_is_bounded_by_twice_the_smallest_diagonal(norm):
    length = 256
    r, unit = reference(length, norm=norm)
    eye = torch.eye(length, dtype=torch.float64).expand(1, 2, -1, -1)
    inverse = kernel_solve(r, unit, eye, ridge=0.0)
    bound = 2 / causal_kernel(r, unit).diagonal(dim1=-2, dim2=-1).amin(-1)
    measured = torch.linalg.matrix_norm(inverse, 2)
    assert (measured <= bound).all()
    assert (bound <= 2 * length + 1e-9).all()


def test_interpolation_when_the_smoother_is_the_system():
    """A = P and ridge -> 0 gives o = s v exactly."""
    r, unit = reference(80)
    value = torch.randn(1, 2, 80, 5, dtype=torch.float64)
    u = kernel_solve(r, unit, value, ridge=0.0)
    assert_close(causal_kernel(r, unit) @ u, value, rtol=1e-9, atol=1e-9)


def test_it_is_one_triangular_system_and_not_a_regression_per_prefix():
    r, unit = reference(30)
    value = torch.randn(1, 2, 30, 5, dtype=torch.float64)
    u = kernel_solve(r, unit, value, ridge=0.1)
    symmetric = (r @ unit.mT).softmax(-1)
    per_prefix = torch.linalg.solve(symmetric + 0.1 * torch.eye(30, dtype=torch.float64), value)
    assert_close(u[:, :, :12], kernel_solve(r[:, :, :12], unit[:, :, :12], value[:, :, :12], ridge=0.1))
    assert (u[:, :, -1] - per_prefix[:, :, -1]).abs().max() > 1e-3


@pytest.mark.parametrize(("share", "extra"), [(False, 7_198_416), (True, 111_312)])
def test_parameters_added_at_125m(share, extra):
    with torch.device("meta"):
        mixer = build_mixer("cubit", num_heads=12, head_dim=64, hidden_size=768, share=share)
    assert 12 * sum(p.numel() for p in mixer.parameters()) == extra


def test_start_values():
    m = build_mixer("cubit", num_heads=2, head_dim=4, hidden_size=8)
    assert m.gamma.tolist() == [1.0, 1.0]
    assert m.rescale_lower.tolist() == [0.5, 0.5]
    assert m.rescale_range.tolist() == [1.5, 1.5]
    assert_close(m.log_ridge.exp(), torch.full((2,), 1e-10))
    soft = build_mixer("cubit", num_heads=2, head_dim=4, hidden_size=8, gamma="softplus")
    assert_close(torch.nn.functional.softplus(soft.gamma), torch.ones(2))
