"""Positive feature maps by name. To add one: a class in a file here, a line in FEATURES."""

import inspect
from typing import Any

from mercer.errors import check_kind, unknown
from mercer.features.base import FeatureMap, redraw
from mercer.features.directions import DIRECTIONS, draw_directions
from mercer.features.exponential import Darkformer, Favor, Hyperbolic, Lfk, Oprf
from mercer.features.positive import Cos2, Elu, PorfSoftplus, Sigmoid2, SoftmaxFeat, Softplus
from mercer.features.proposal import optimal_proposal

__all__ = [
    "DIRECTIONS",
    "FEATURES",
    "FeatureMap",
    "build_features",
    "draw_directions",
    "feature_options",
    "optimal_proposal",
    "redraw",
]

FEATURES: dict[str, type[FeatureMap]] = {
    "favor": Favor,
    "hyperbolic": Hyperbolic,
    "oprf": Oprf,
    "darkformer": Darkformer,
    "lfk": Lfk,
    "elu": Elu,
    "softplus": Softplus,
    "sigmoid2": Sigmoid2,
    "softmaxfeat": SoftmaxFeat,
    "cos2": Cos2,
    "porf_softplus": PorfSoftplus,
}
_SIZES = ("num_heads", "head_dim", "num_features")


def feature_options(name: str) -> dict[str, Any]:
    """Return the options the feature map called `name` takes besides its sizes, with their default values.

    >>> feature_options("sigmoid2")
    {'seed': 0, 'directions': 'gaussian', 'redraw_steps': None, 'tau': 1.0}
    """
    if name not in FEATURES:
        raise unknown("feature map", name, FEATURES)
    own = inspect.signature(FEATURES[name]).parameters
    inherited = inspect.signature(FeatureMap).parameters if "options" in own else {}
    return {
        parameter.name: parameter.default
        for parameter in ({**inherited, **own}).values()
        if parameter.name not in (*_SIZES, "sizes", "options")
    }


def build_features(
    name: str, num_heads: int, head_dim: int, num_features: int = 256, *, seed: int = 0, **options: Any
) -> FeatureMap:
    """Make the feature map called `name`.

    Args:
        name: a key of FEATURES.
        num_heads: key heads; query heads of a group share their directions.
        head_dim: width of a head.
        num_features: features of a head.
        seed: of the map's own draws.
        **options: of that map, see `feature_options`.

    Returns:
        A module from [B, H, T, D] to log features [B, H, T, M].

    Raises:
        ValueError: unknown name or option, or a value the map refuses.

    >>> build_features("darkformer", num_heads=2, head_dim=4, num_features=8, rank=3).metric.shape
    torch.Size([2, 3, 4])
    """
    known = feature_options(name)
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of feature map {name}", option, known)
        check_kind(option, value, known[option])
    return FEATURES[name](num_heads, head_dim, num_features, seed=seed, **options)
