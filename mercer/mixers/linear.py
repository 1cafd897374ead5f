"""Linear-time attention: the exponential kernel replaced by the product of positive features.

One function mixes; the mixers differ in their feature map alone.
"""

from typing import Any

from .. import ops
from ..features import FeatureMap, build_features, feature_options
from .base import Mixer, marks_of_new, refuse_state


def mix(mixer: Mixer, features: FeatureMap, q, k, v, mask, segments, state: ops.LinearState | None):
    """Return o_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j); the scale is split between q and k."""
    refuse_state(mixer, state)
    root = root_scale(mixer)
    mask, segments = marks_of_new(q.shape[2], mask, segments, state)
    q, k = (ops.zero_padding(t, mask) for t in (q, k))  # a NaN there would reach the map's own gradients
    o, state = ops.linear_attention(
        features(root * q), features(root * k), v, causal=mixer.causal, mask=mask, segments=segments, state=state
    )
    return o, state if mixer.causal else None


def root_scale(mixer: Mixer) -> float:
    """Return the factor on q and on k whose square is the factor on their product."""
    if mixer.scale < 0:
        raise ValueError(f"scale ({mixer.scale}) must not be negative: {type(mixer).__name__} splits it over q and k")
    return mixer.scale**0.5


def own_features(mixer: Mixer, name: str, num_features: int, options: dict[str, Any]) -> FeatureMap:
    """Build the map of a mixer, one set of directions a key head; an unknown option fails by name."""
    return build_features(name, mixer.num_kv_heads, mixer.head_dim, num_features, **options)


def split_options(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into a feature map's and the mixer's sizes."""
    known = feature_options(name)
    own = {key: value for key, value in options.items() if key in known}
    return own, {key: value for key, value in options.items() if key not in known}


class Performer(Mixer):
    """Attention through fixed positive random features of exp(q.k), phi(x) = exp(w.x - ||x||^2 / 2) / sqrt(m).

    Args:
        num_features: features m of a head.
        **options: of the feature map (`seed`, `directions`, `redraw_steps`) and sizes, see `Mixer`.

    Source:
        Performer (arXiv:2009.14794), FAVOR+; here exactly causal, with no floor added to any feature.

    >>> mixer = Performer(num_heads=2, head_dim=4, num_features=16)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(self, *, num_features: int = 256, **options: Any):
        own, sizes = split_options("favor", options)
        super().__init__(**sizes)
        self.features = own_features(self, "favor", num_features, own)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("favor")

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.LinearState | None = None):
        return mix(self, self.features, q, k, v, mask, segments, state)


class Lfk(Mixer):
    """Performer with trained directions w: the kernel itself is learned.

    Args:
        num_features: features m of a head.
        **options: of the feature map and sizes, see `Mixer`.

    Source:
        LFK, a baseline of DARKFormer (arXiv:2603.04127).

    >>> mixer = Lfk(num_heads=2, head_dim=4, num_features=16)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(self, *, num_features: int = 256, **options: Any):
        own, sizes = split_options("lfk", options)
        super().__init__(**sizes)
        self.features = own_features(self, "lfk", num_features, own)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("lfk")

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.LinearState | None = None):
        return mix(self, self.features, q, k, v, mask, segments, state)


class Darkformer(Mixer):
    """Positive random features of exp(q' M'M k) with a learned metric M; at M = I exactly Performer.

    Args:
        num_features: features m of a head.
        **options: of the feature map (`rank` besides those of Performer) and sizes, see `Mixer`.

    Source:
        DARKFormer (arXiv:2603.04127), sec. 3: Sigma = M'M.

    >>> mixer = Darkformer(num_heads=2, head_dim=4, num_features=16, rank=3)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(self, *, num_features: int = 256, **options: Any):
        own, sizes = split_options("darkformer", options)
        super().__init__(**sizes)
        self.features = own_features(self, "darkformer", num_features, own)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("darkformer")

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.LinearState | None = None):
        return mix(self, self.features, q, k, v, mask, segments, state)


class Particle(Mixer):
    """Linear attention with any positive feature map; its directions are the particles of the Coulomb model.

    Args:
        features: a name in `mercer.FEATURES`.
        num_features: features m of a head.
        scale: factor on q.k; by default D^(-1/2) for maps of the exponential kernel, 1 for the others.
        **options: of the feature map and sizes, see `Mixer`.

    Source:
        Coulomb particles (arXiv:2607.23869), sec. 3 and App. D.

    >>> mixer = Particle(num_heads=2, head_dim=4, num_features=16, features="sigmoid2")
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(
        self, *, features: str = "softplus", num_features: int = 256, scale: float | None = None, **options: Any
    ):
        own, sizes = split_options(features, options)
        super().__init__(scale=scale, **sizes)
        self.features = own_features(self, features, num_features, own)
        if scale is None and not self.features.exponential:
            self.scale = 1.0

    @classmethod
    def options(cls, *, features="softplus", **chosen):
        return super().options() | feature_options(features)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: ops.LinearState | None = None):
        return mix(self, self.features, q, k, v, mask, segments, state)
