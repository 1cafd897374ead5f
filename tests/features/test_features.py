"""Feature maps: the kernels they estimate, the formulas of the papers, directions, seeds, dtypes, refusals."""

import math

import numpy as np
import pytest
import torch

from mercer.features import FEATURES, build_features, draw_directions, feature_options, optimal_proposal, redraw
from mercer.ops import Rescaled
from mercer.ops.factored import dense

EXPONENTIAL = ["favor", "hyperbolic", "oprf", "darkformer", "lfk"]
OWN_KERNEL = sorted(set(FEATURES) - set(EXPONENTIAL))


def estimates(name, q, k, *, heads=4000, **options):
    """Return phi(q).phi(k) of many independent heads."""
    features = build_features(name, heads, q.shape[0], 8, **options).double()
    phi_q, phi_k = (features(x.expand(1, heads, 1, -1).contiguous()).exp() for x in (q, k))
    return (phi_q * phi_k).sum(-1).flatten()


def small_pair(dim=4):
    q, k = torch.randn(2, dim, dtype=torch.float64)
    return 0.8 * q / q.norm(), 0.6 * k / k.norm()


@pytest.mark.parametrize("name", EXPONENTIAL)
@pytest.mark.parametrize("directions", ["gaussian", "orthogonal", "simplex"])
def test_the_exponential_kernel_is_estimated_without_bias(name, directions):
    q, k = small_pair()
    got = estimates(name, q, k, directions=directions)
    assert abs(got.mean() - torch.exp(q @ k)) < 3 * got.std() / math.sqrt(len(got))


def test_orthogonal_and_simplex_directions_have_less_variance():
    q, k = small_pair()
    gaussian, orthogonal, simplex = (
        estimates("favor", q, k, directions=kind).var() for kind in ("gaussian", "orthogonal", "simplex")
    )
    assert orthogonal < 0.9 * gaussian
    assert simplex < 0.9 * gaussian
    assert estimates("hyperbolic", q, k, directions="gaussian").var() < 0.9 * gaussian


def test_a_metric_estimates_its_own_kernel_without_bias():
    q, k = small_pair()
    metric = torch.randn(3, 4, dtype=torch.float64) / 2
    for proposal in (False, True):
        features = build_features("darkformer", 4000, 4, 8, rank=3, proposal=proposal).double()
        with torch.no_grad():
            features.metric.copy_(metric.expand(4000, -1, -1))
        if proposal:
            features.set_proposal(torch.diag(torch.tensor([0.1, 0.05, 0.2, 0.0])).double().expand(4000, -1, -1))
        phi_q, phi_k = (features(x.expand(1, 4000, 1, -1).contiguous()).exp() for x in (q, k))
        got = (phi_q * phi_k).sum(-1)
        assert abs(got.mean() - torch.exp(q @ metric.mT @ metric @ k)) < 3 * got.std() / math.sqrt(4000)


def second_moment(features, variance):
    """Return E[(phi(q) phi(k) / kernel-free)^2] over q, k ~ N(0, variance) and the one direction, by quadrature."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(64))
    weights = weights / weights.sum()
    x = math.sqrt(variance) * nodes.double()
    log_phi = features(x.view(1, 1, -1, 1).expand(1, 64, -1, -1).contiguous())[0, :, :, 0]  # [direction, x]
    return torch.einsum("w,q,k,wq,wk->", weights, weights, weights, (2 * log_phi).exp(), (2 * log_phi).exp()).item()


def test_second_moments_of_the_theorem():
    nodes = torch.from_numpy(np.polynomial.hermite_e.hermegauss(64)[0])
    isotropic = build_features("favor", 64, 1, 1).double()
    isotropic.omega.copy_(nodes.view(64, 1, 1))
    assert second_moment(isotropic, 0.1) == pytest.approx(1.4434, abs=5e-5)

    best = build_features("oprf", 64, 1, 1).double()
    best.draw = lambda number=0: nodes.view(64, 1, 1).float()
    best.set_proposal(torch.full((64, 1, 1), 0.1, dtype=torch.float64))
    assert best.proposal.square().flatten()[0].item() == pytest.approx(1.5)
    assert second_moment(best, 0.1) == pytest.approx(1.25, abs=5e-5)


def test_the_best_proposal_beats_isotropic_draws_on_anisotropic_data():
    covariance = torch.diag(torch.tensor([0.2, 0.05, 0.01, 0.0])).double()
    q, k = torch.randn(2, 400, 4, dtype=torch.float64) @ covariance.sqrt()
    favor, oprf = (build_features(name, 400, 4, 16).double() for name in ("favor", "oprf"))
    oprf.set_proposal(covariance.expand(400, -1, -1))
    errors = []
    for features in (favor, oprf):
        phi_q, phi_k = (features(x.view(1, 400, 1, 4)).exp() for x in (q, k))
        errors.append(((phi_q * phi_k).sum(-1).flatten() - (q * k).sum(-1).exp()).square().mean())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("eigenvalue", [0.5, 0.7, -0.1, math.nan])
def test_a_covariance_without_a_best_proposal_is_refused(eigenvalue):
    with pytest.raises((ValueError, torch.linalg.LinAlgError), match=r"scale queries and keys down|linalg.eigh"):
        optimal_proposal(torch.diag(torch.tensor([0.1, eigenvalue])))


def test_the_mean_square_sets_the_width_of_oprf():
    S, D = 3.0, 4
    rho = (math.sqrt((2 * S + D) ** 2 + 8 * D * S) - 2 * S - D) / (4 * S)
    A = (1 - 1 / rho) / 8
    B = math.sqrt(1 - 4 * A)
    features = build_features("oprf", 1, D, 8, mean_square=S).double()
    x = torch.randn(1, 1, 1, D, dtype=torch.float64)
    w = build_features("favor", 1, D, 8).double().omega[0]
    D0 = (1 - 4 * A) ** (D / 4)
    expected = D0 * torch.exp(A * w.square().sum(-1) + B * (w @ x.flatten()) - x.square().sum() / 2) / math.sqrt(8)
    assert A <= 0
    torch.testing.assert_close(features(x).exp().flatten(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rank", [4, 2])
def test_darkformer_is_performer_of_the_mapped_vectors(rank):
    dark = build_features("darkformer", 2, 4, 16, rank=rank, seed=3)
    performer = build_features("favor", 2, rank, 16, seed=3)
    x = torch.randn(1, 4, 5, 4)
    assert torch.equal(dark.metric[0] @ dark.metric[0].mT, torch.eye(rank)), "orthonormal rows at the start"
    with torch.no_grad():
        dark.metric.normal_()
    mapped = (x.view(1, 2, 10, 4) @ dark.metric.mT).view(1, 4, 5, rank)
    torch.testing.assert_close(dark(x), performer(mapped))


def test_darkformer_starts_at_performer():
    x = torch.randn(1, 2, 5, 4)
    assert torch.equal(build_features("darkformer", 2, 4, 16)(x), build_features("favor", 2, 4, 16)(x))
    assert torch.equal(build_features("lfk", 2, 4, 16)(x), build_features("favor", 2, 4, 16)(x))


def by_the_paper(name, features, x):
    """Transcribe the table of the paper, one token and head at a time."""
    out = []
    for j in range(features.num_features):
        t = sum(features.omega[0, j, d].item() * x[d].item() for d in range(len(x)))
        if name == "elu":
            out.append(max(1 + (t if t > 0 else math.exp(t) - 1), 1e-6))
        elif name in ("softplus", "porf_softplus"):
            out.append(math.log(1 + math.exp(t)) + 1e-6)
        elif name == "sigmoid2":
            out.append((1 / (1 + math.exp(-t))) ** 2)
        elif name == "softmaxfeat":
            out.append(math.exp(t))
        elif name == "cos2":
            out.append(math.cos(t + features.phase[0, j].item()) ** 2)
    return torch.tensor([math.sqrt(len(out)) * phi / sum(out) for phi in out], dtype=torch.float64)


@pytest.mark.parametrize("name", OWN_KERNEL)
def test_maps_follow_the_table_of_the_paper_and_sum_to_the_root_of_m(name):
    features = build_features(name, 1, 3, 6).double()
    for scale in (0.1, 1.0, 5.0):
        x = scale * torch.randn(3, dtype=torch.float64)
        got = features(x.view(1, 1, 1, 3)).exp().flatten()
        torch.testing.assert_close(got, by_the_paper(name, features, x), rtol=1e-9, atol=1e-12)
        assert got.sum().item() == pytest.approx(math.sqrt(6))


@pytest.mark.parametrize("name", EXPONENTIAL)
def test_narrow_weights_give_one_token_the_features_it_has_among_many(name):
    features = build_features(name, 2, 8, 32)
    for weight in features.parameters():
        weight.data += torch.randn_like(weight)
    features, x = features.bfloat16(), 3 * torch.randn(1, 2, 5, 8).bfloat16()
    alone = torch.cat([features.factored(x[:, :, t : t + 1], 0.7) for t in range(5)], 2)
    torch.testing.assert_close(dense(features.factored(x, 0.7)), alone, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logs_are_float32_at_least_whatever_comes_in(name, dtype):
    features = build_features(name, 2, 4, 8)
    x = torch.randn(1, 4, 3, 4).to(dtype)
    log_phi = features(x)
    assert log_phi.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert log_phi.shape == (1, 4, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(features(x), log_phi)
    torch.testing.assert_close(features.bfloat16()(x), log_phi, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", FEATURES)
def test_extreme_vectors_give_finite_gradients(name):
    features = build_features(name, 1, 4, 8)
    x = torch.stack([torch.zeros(4), 1e3 * torch.randn(4), -1e3 * torch.ones(4), 1e-30 * torch.ones(4)])
    x = x.view(1, 1, 4, 4).requires_grad_()
    log_phi = features(x)
    assert log_phi.isfinite().all()
    assert torch.autograd.grad(log_phi.clamp(-1e3, 1e3).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", FEATURES)
def test_query_heads_of_a_group_share_their_directions(name):
    features = build_features(name, 2, 4, 8)
    x = torch.randn(3, 2, 5, 4)
    grouped = features(x.repeat_interleave(3, 1))
    torch.testing.assert_close(grouped, features(x).repeat_interleave(3, 1))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(features(turned), features(x))


@pytest.mark.parametrize("name", FEATURES)
def test_draws_depend_on_the_seed_alone_and_are_saved(name):
    state = torch.get_rng_state()
    first, again, other = (build_features(name, 2, 4, 8, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    assert set(first.state_dict()) == set(first.initial_values())
    assert torch.equal(first.omega, again.omega)
    assert not torch.equal(first.omega, other.omega)
    assert not torch.equal(first.omega[0], first.omega[1])
    other.load_state_dict(first.state_dict())
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(other(x), first(x))
    for key, value in first.initial_values().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, first.state_dict()[key])
    with torch.device("meta"):
        empty = build_features(name, 2, 4, 8)
    assert empty.omega.is_meta
    assert torch.equal(empty.initial_values()["omega"], first.omega)


def test_which_values_are_learned():
    learned = {name: {key for key, _ in build_features(name, 1, 4, 8).named_parameters()} for name in FEATURES}
    assert learned == {**{name: set() for name in FEATURES}, "darkformer": {"metric"}, "lfk": {"omega"}}
    for name, key in (("darkformer", "metric"), ("lfk", "omega")):
        features = build_features(name, 1, 4, 8)
        features(torch.randn(1, 1, 3, 4)).exp().sum().backward()
        assert features.get_parameter(key).grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["favor", "oprf", "darkformer", "cos2"])
def test_redrawing_is_due_by_the_step_and_never_in_evaluation(name):
    model = torch.nn.Sequential(build_features(name, 2, 4, 8, redraw_steps=10), build_features(name, 2, 4, 8))
    start = [features.omega.clone() for features in model]
    assert [redraw(model, step) for step in (0, 5, 11)] == [0, 0, 0]
    assert redraw(model.eval(), 10) == 0
    assert redraw(model.train(), 10) == 1
    assert not torch.equal(model[0].omega, start[0])
    assert torch.equal(model[1].omega, start[1])
    second = model[0].omega.clone()
    redraw(model, 20)
    assert not torch.equal(model[0].omega, second)
    redraw(model, 10)
    assert torch.equal(model[0].omega, second), "a pure function of the step"
    q, k = torch.zeros(2, 1, 2, 1, 4)
    assert (model[0](q) + model[0](k)).isfinite().all()


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "simplex"])
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_each_direction_is_standard_normal(kind, dim):
    w = draw_directions(kind, 6000, dim + 1, dim).double()
    for row in (0, dim - 1, dim):
        sample = w[:, row]
        assert (sample.mean(0).abs() < 4 / math.sqrt(6000)).all()
        assert ((sample.mT @ sample / 6000 - torch.eye(dim)).abs() < 4 * math.sqrt(2 / 6000)).all()
        squares = sample.square().sum(-1)
        assert abs(squares.var() - 2 * dim) < 4 * math.sqrt((8 * dim**2 + 48 * dim) / 6000)  # chi-squared(dim)


def test_rotations_prefer_no_direction():
    """Without fixed signs the first entries of QR's factor have one sign, and their mean is far from 0."""
    w = draw_directions("orthogonal", 4000, 3, 3)
    unit = w / w.norm(dim=-1, keepdim=True)
    trace, determinant = unit.diagonal(dim1=1, dim2=2).sum(-1), torch.linalg.det(unit.double())
    assert abs(trace.mean()) < 4 / math.sqrt(4000)  # Haar: E tr = 0, E tr^2 = 1
    assert abs(trace.square().mean() - 1) < 0.2
    assert abs((determinant > 0).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(4000)


def test_blocks_are_orthogonal_or_simplices_and_lengths_independent():
    for kind, cosine in (("orthogonal", 0.0), ("simplex", -1 / 4)):
        w = draw_directions(kind, 2, 10, 5)
        unit = w / w.norm(dim=-1, keepdim=True)
        for block in (unit[:, :5], unit[:, 5:]):
            pairs = (block @ block.mT)[:, *torch.triu_indices(5, 5, 1)]
            torch.testing.assert_close(pairs, torch.full_like(pairs, cosine), rtol=0, atol=1e-5)
        assert w.norm(dim=-1).std() > 0.1


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("favour", 1, 4), {}, r"unknown feature map 'favour'.*did you mean 'favor'"),
        (("favor", 1, 4), {"rnak": 3}, "unknown option of feature map favor 'rnak'"),
        (("lfk", 1, 4), {"redraw_steps": 3}, "unknown option of feature map lfk 'redraw_steps'"),
        (("favor", 0, 4), {}, r"num_heads \(0\) must be at least 1"),
        (("favor", 1, 4, 0), {}, r"num_features \(0\) must be at least 1"),
        (("favor", 1, 4), {"directions": "haar"}, "unknown directions 'haar'"),
        (("favor", 1, 1), {"directions": "simplex"}, "simplex directions need a width of at least 2"),
        (("hyperbolic", 1, 4, 7), {}, r"num_features \(7\) must be a multiple of 2"),
        (("darkformer", 1, 4), {"rank": 5}, r"rank \(5\) must be between 1 and head_dim \(4\)"),
        (("oprf", 1, 4), {"mean_square": 0.0}, r"mean_square \(0.0\) must be positive"),
        (("elu", 1, 4), {"tau": 0.0}, r"tau \(0.0\) must be positive"),
        (("elu", 1, 4), {"tau": "one"}, r"tau \('one'\) must be a finite number"),
    ],
)
def test_wrong_use_is_refused_in_words(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        build_features(*arguments, **options)


def test_wrong_vectors_are_refused_in_words():
    features = build_features("favor", 2, 4, 8)
    with pytest.raises(ValueError, match=r"x has 3 heads; they must be a multiple of num_heads \(2\)"):
        features(torch.zeros(1, 3, 5, 4))
    with pytest.raises(ValueError, match="x has width 5; this map was made for head_dim 4"):
        features(torch.zeros(1, 2, 5, 5))
    with pytest.raises(ValueError, match="carries no proposal; build it with proposal=True"):
        build_features("darkformer", 1, 4).set_proposal(torch.zeros(1, 4, 4))


def test_options_are_listed_with_their_defaults():
    for name in FEATURES:
        options = feature_options(name)
        assert options["seed"] == 0
        build_features(name, 1, 4, 8, **options)


@pytest.mark.parametrize("name", FEATURES)
def test_one_projection_at_two_lengths_equals_two_maps(name):
    features = build_features(name, 2, 6, 24, seed=3).double()
    for parameter in features.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    second = torch.rand(1, 2, 5, 1, dtype=torch.float64) + 0.5
    rows, columns = features.two_lengths(x, 0.7, second)
    columns = columns.of(rows) if isinstance(columns, Rescaled) else columns
    torch.testing.assert_close(dense(rows), features(0.7 * x))
    torch.testing.assert_close(dense(columns), features(second * x))
