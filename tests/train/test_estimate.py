"""What a run is said to cost: mixing in linear time does not grow with the length, and a window adds its own share."""

from dataclasses import replace

import pytest

from mercer.train.estimate import estimate, lines
from mercer.train.recipe import tiny

H, D, LAYERS = 4, 32, 4  # of the size "tiny"


def mixing(mixer, length=256, **options):
    """Return the operations of mixing a token forward in one layer."""
    recipe = tiny()
    recipe = replace(recipe, data=replace(recipe.data, length=length))
    given = ((mixer, options), ("constant", {}))
    models = [replace(recipe.model, mixer=name, mixer_options=own) for name, own in given]
    found, constant = (estimate(replace(recipe, model=model)) for model in models)
    return (found.flops_per_token - constant.flops_per_token) / (3 * LAYERS) + H * D


def test_operations_of_mixing():
    assert mixing("softmax") == 2 * 256 * H * D
    assert mixing("softmax", 512) == 2 * 512 * H * D
    m = 16
    linear = H * (4 * m * D + 2 * 64 * m + 2 * 64 * D + 4 * m * D)  # features, a block, its values, sums in and out
    for length in (256, 512):
        assert mixing("performer", length, num_features=m) == linear
    assert mixing("darkformer", num_features=m, window=8, sinks=2) == linear + 4 * 10 * H * D
    system = H * (2 * 32 * m + 4 * m * D)  # a block, sums in and out
    assert mixing("linear_cubit", num_features=m, share=True, lrr=False) == linear + system
    own = H * (2 * m * D + 2 * D * D * H)  # features of r, and r
    assert mixing("linear_cubit", num_features=m, lrr=False) == linear + system + own
    assert mixing("window", window=8, sinks=2) == 4 * 10 * H * D


@pytest.mark.parametrize("mixer", ["softmax", "linear_cubit", "particle", "lfk"])
def test_the_lines_leave_nothing_out(mixer):
    said = "\n".join(lines(estimate(replace(tiny(), model=replace(tiny().model, mixer=mixer)))))
    assert "without the mixer's own" not in said
