"""What single mixers promise beyond the laws that hold for all of them."""

import pytest
import torch
from torch.testing import assert_close

from mercer import FEATURES, build_mixer, ops
from mercer.bench import peak_bytes
from mercer.features import build_features, feature_options
from mercer.mixers import mixer_options

SIZES = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "hidden_size": 32}


@pytest.mark.parametrize("mixer", ["particle", "linear_cubit"])
@pytest.mark.parametrize("features", sorted(FEATURES))
def test_options_are_those_of_the_feature_map_that_is_chosen(mixer, features):
    known = mixer_options(mixer, features=features)
    assert feature_options(features).keys() <= known.keys()
    for option, value in feature_options(features).items():
        build_mixer(mixer, **SIZES, features=features, num_features=8, **{option: value})
    foreign = "tau" if "tau" not in known else "rank"
    with pytest.raises(ValueError, match=f"unknown option '{foreign}' for mixer '{mixer}'; it takes "):
        build_mixer(mixer, **SIZES, features=features, **{foreign: 1})


@pytest.mark.parametrize("mixer", ["performer", "darkformer", "lfk", "particle", "linear_cubit"])
def test_a_scale_that_cannot_be_split_is_refused(mixer):
    made = build_mixer(mixer, **SIZES, num_features=8, scale=-1.0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"scale \(-1.0\) must not be negative"):
        made(q, k, v, x=torch.randn(1, 3, 32))


@pytest.mark.parametrize("share", [False, True])
def test_linear_cubit_starts_with_coefficients_as_large_as_the_values(share, monkeypatch):
    mixer, solved = build_mixer("linear_cubit", num_heads=2, head_dim=16, hidden_size=32, share=share, lrr=False), []

    def solve(log_q, log_k, rhs, *, log_rows, log_cols, ridge, **options):
        solved.append(ops.linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge)[0])
        return rhs, None

    monkeypatch.setattr(ops, "linear_kernel_regression", solve)
    q, k, v = torch.randn(3, 1, 2, 400, 16)
    mixer(q, k, v, x=torch.randn(1, 400, 32))
    assert 0.7 < solved[0].norm() / v.norm() < 1.3


def test_rows_that_are_keys_need_a_scale():
    mixer = build_mixer("linear_cubit", **SIZES, num_features=16, share=True, lrr=False, scale=0.0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"scale \(0\) must be positive with share=True"):
        mixer(q, k, v)


def test_shared_cubit_takes_the_norm_of_a_sixteen_bit_key_in_full():
    mixer = build_mixer("cubit", **SIZES, share=True, lrr=False)
    q, k, v = torch.randn(1, 4, 60, 8), 4 * torch.randn(1, 2, 60, 8), torch.randn(1, 2, 60, 8)
    low = [t.bfloat16() for t in (q, k, v)]
    exact, _ = mixer(*(t.float() for t in low))
    assert_close(mixer(*low)[0], exact.bfloat16(), rtol=0.01, atol=0.01)
    _, state = mixer(*(t[:, :, :59] for t in low))
    assert_close(mixer(*(t[:, :, 59:] for t in low), state=state)[0], exact[:, :, 59:].bfloat16(), rtol=0.01, atol=0.01)


def test_random_scores_have_unit_variance():
    mixer = build_mixer("random", num_heads=400, head_dim=4)
    position = torch.arange(40)[None]
    like = torch.zeros(1, 400, 40, 4)
    scores = mixer._wave(0, position, like) @ mixer._wave(1, position, like).mT * 2 / 16**0.5
    assert abs(scores.var() - 1) < 0.05
    assert abs(scores.mean()) < 0.05


def test_random_holds_no_matrix_of_all_pairs():
    mixer = build_mixer("random", num_heads=1, head_dim=4)
    q, k, v = torch.randn(3, 1, 1, 4096, 4)
    assert peak_bytes(lambda: mixer(q, k, v)) < 4096 * 4096


@pytest.mark.parametrize("seed", range(3))
def test_linear_cubit_on_one_map_is_nearer_to_cubit_than_on_two(seed):
    """Queries near earlier keys, whose values are to be found again."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(1, 2, *size, generator=generator)
    places = torch.randint(0, 16, (96,), generator=generator)
    keys, values = (draw(16, 16)[:, :, places] for _ in range(2))
    q, k = (4 * torch.nn.functional.normalize(keys, dim=-1) + 0.1 * draw(96, 16) for _ in range(2))
    options = {"num_heads": 2, "head_dim": 16, "hidden_size": 1, "share": True, "lrr": False, "ridge": 0.1}
    exact, _ = build_mixer("cubit", **options)(q, k, values)
    mixer = build_mixer("linear_cubit", features="favor", num_features=64, **options)
    error = lambda: ((mixer(q, k, values)[0] - exact).norm() / exact.norm()).item()
    one = error()
    mixer.reference_features = build_features("favor", 2, 16, 64, seed=1)
    assert one < 0.5
    assert 2 * one < error()
