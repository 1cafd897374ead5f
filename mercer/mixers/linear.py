"""Linear-time attention: the exponential kernel replaced by the product of positive features.

One function mixes; the mixers differ in their feature map alone. All of the exponential kernel take three options:

* `window`: keys at a distance below it count exactly, exp(scale q.k), and the others through features. 0: none do.
* `sinks`: so do the first keys of a document, for good.
* `center`: carry a vector c of all keys and b of all queries of a head, zero until `set_centers`. Features of k - c and
  q - b have less variance; the kernel stays. They are buffers, `key_center` and `query_center`, saved with the weights.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mercer import ops
from mercer.features import FeatureMap, build_features, feature_options
from mercer.mixers.base import Mixer, marks_of_new, refuse_state
from mercer.ops.checks import compute_dtype, full_precision

State = ops.LinearState | ops.NearFarState | None


def mix(mixer: Any, q, k, v, mask, segments, state: Any):
    """Return o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = phi(q_i).phi(k_j), or exp(scale q_i.k_j) in the near field.

    The scale is split between q and k. Centring moves keys by c everywhere, which divides a row's weights by one
    number, and queries by b in the features alone, where the key takes the factor back:
    exp(scale q.k) = exp(scale (q - b).k) exp(scale b.k).
    """
    refuse_state(mixer, state)
    root = root_scale(mixer)
    mask, segments = marks_of_new(q.shape[2], mask, segments, state)
    key_map = mixer.features if mixer.key_features is None else mixer.key_features
    same = q is k and not mixer.center and key_map is mixer.features  # queries that are keys have their features
    q, k = (ops.zero_padding(t, mask) for t in (q, k))  # a NaN there would reach the map's own gradients
    if mixer.center:
        k = k - mixer.key_center[:, None].to(k.dtype)

    def q_features(q):
        if mixer.center:
            q = q - ops.repeat_heads(mixer.query_center[None, :, None].to(q.dtype), q.shape[1])
        return mixer.features.factored(q, root)

    def k_features(k):
        log_phi = key_map.factored(k, root)
        if not mixer.center:
            return log_phi
        b, k = (t.to(compute_dtype(k)) for t in (mixer.query_center, k))
        with full_precision(k.device):
            offset = mixer.scale * k @ b[..., None]
        return log_phi.plus(offset) if isinstance(log_phi, ops.Factored) else log_phi + offset

    if mixer.window or mixer.sinks:
        return ops.near_far_attention(
            q, k, v, q_features, k_features, window=mixer.window, sinks=mixer.sinks, scale=mixer.scale,
            mask=mask, segments=segments, state=state,
        )  # fmt: skip
    log_q = q_features(q)
    log_k = log_q if same else k_features(k)
    o, state = ops.linear_attention(log_q, log_k, v, causal=mixer.causal, mask=mask, segments=segments, state=state)
    return o, state if mixer.causal else None


def add_near_field(mixer: Any, window: int, sinks: int, center: bool, key_features: FeatureMap | None = None) -> None:
    """Give a mixer of features its near field, its centres and, if keys have one of their own, their map."""
    for name, size in (("window", window), ("sinks", sinks)):
        if size < 0:
            raise ValueError(f"{name} ({size}) must be at least 0")
    if (window or sinks or center) and not mixer.features.exponential:
        asked = ", ".join(f"{n}={x}" for n, x in (("window", window), ("sinks", sinks), ("center", center)) if x)
        raise ValueError(
            f"{asked}: exact weights exp(q.k) and features {type(mixer.features).__name__} are of two kernels; "
            "use features of the exponential kernel (favor, hyperbolic, oprf, darkformer, lfk)"
        )
    if (window or sinks) and not mixer.causal:
        raise ValueError(
            f"window ({window}) and sinks ({sinks}) must be 0 with causal=False: the near field is counted back in time"
        )
    mixer.window, mixer.sinks, mixer.center = window, sinks, center
    mixer.key_features = key_features
    for name, value in centers(mixer).items():
        mixer.register_buffer(name, value.to(torch.get_default_device()))


def centers(mixer: Any) -> dict[str, Tensor]:
    """Return where the centres start: at zero, which changes nothing."""
    names = ("key_center", "query_center") if mixer.center else ()
    return {name: torch.zeros(mixer.num_kv_heads, mixer.head_dim, device="cpu") for name in names}


def set_centers(mixer: Any, keys: Float[Tensor, "Hk D"], queries: Float[Tensor, "Hk D"]) -> None:
    """Set the centres c of all keys and b of all queries of each key head, in place; the exact kernel stays.

    Args:
        mixer: performer, lfk, darkformer or particle, built with `center=True`.
        keys: c, for instance the mean of the keys as the mixer gets them.
        queries: b.

    Raises:
        ValueError: a mixer without centres.

    >>> mixer = Performer(num_heads=2, head_dim=4, num_features=16, center=True)
    >>> set_centers(mixer, torch.ones(2, 4), torch.zeros(2, 4))
    """
    if not getattr(mixer, "center", False):
        raise ValueError(f"{type(mixer).__name__} has no centres; build it with center=True")
    with torch.no_grad():
        mixer.key_center.copy_(keys)
        mixer.query_center.copy_(queries)


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
        window: keys at a distance below it count exactly.
        sinks: so do the first keys of a document.
        center: carry centres of keys and queries, zero until `set_centers`.
        **options: of the feature map (`seed`, `directions`, `redraw_steps`) and sizes, see `Mixer`.

    Source:
        Performer (arXiv:2009.14794), FAVOR+; here exactly causal, with no floor added to any feature.

    >>> mixer = Performer(num_heads=2, head_dim=4, num_features=16)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(
        self, *, num_features: int = 256, window: int = 0, sinks: int = 0, center: bool = False, **options: Any
    ):
        own, sizes = split_options("favor", options)
        super().__init__(**sizes)
        self.features = own_features(self, "favor", num_features, own)
        add_near_field(self, window, sinks, center)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("favor")

    def initial_values(self):
        return centers(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: State = None):
        return mix(self, q, k, v, mask, segments, state)


class Lfk(Mixer):
    """Performer with trained directions w: the kernel itself is learned.

    Args:
        num_features: features m of a head.
        separate: give keys directions of their own, which start where those of queries do: a kernel need not treat the
            two alike, and their vectors seldom look alike.
        window: keys at a distance below it count exactly.
        sinks: so do the first keys of a document.
        center: carry centres of keys and queries, zero until `set_centers`.
        **options: of the feature map and sizes, see `Mixer`.

    Source:
        LFK, a baseline of DARKFormer (arXiv:2603.04127).

    >>> mixer = Lfk(num_heads=2, head_dim=4, num_features=16)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(
        self,
        *,
        num_features: int = 256,
        separate: bool = False,
        window: int = 0,
        sinks: int = 0,
        center: bool = False,
        **options: Any,
    ):
        own, sizes = split_options("lfk", options)
        super().__init__(**sizes)
        self.features = own_features(self, "lfk", num_features, own)
        keys = own_features(self, "lfk", num_features, own) if separate else None
        add_near_field(self, window, sinks, center, keys)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("lfk")

    def initial_values(self):
        return centers(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: State = None):
        return mix(self, q, k, v, mask, segments, state)


class Darkformer(Mixer):
    """Positive random features of exp(q' M'M k) with a learned metric M; at M = I exactly Performer.

    Args:
        num_features: features m of a head.
        window: keys at a distance below it count exactly.
        sinks: so do the first keys of a document.
        center: carry centres of keys and queries, zero until `set_centers`.
        **options: of the feature map (`rank` besides those of Performer) and sizes, see `Mixer`.

    Source:
        DARKFormer (arXiv:2603.04127), sec. 3: Sigma = M'M.

    >>> mixer = Darkformer(num_heads=2, head_dim=4, num_features=16, rank=3)
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(
        self, *, num_features: int = 256, window: int = 0, sinks: int = 0, center: bool = False, **options: Any
    ):
        own, sizes = split_options("darkformer", options)
        super().__init__(**sizes)
        self.features = own_features(self, "darkformer", num_features, own)
        add_near_field(self, window, sinks, center)

    @classmethod
    def options(cls, **chosen):
        return super().options() | feature_options("darkformer")

    def initial_values(self):
        return centers(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: State = None):
        return mix(self, q, k, v, mask, segments, state)


class Particle(Mixer):
    """Linear attention with any positive feature map; its directions are the particles of the Coulomb model.

    Args:
        features: a name in `mercer.FEATURES`.
        num_features: features m of a head.
        scale: factor on q.k; by default D^(-1/2) for maps of the exponential kernel, 1 for the others.
        window: keys at a distance below it count exactly; like the next two, only with the exponential kernel.
        sinks: so do the first keys of a document.
        center: carry centres of keys and queries, zero until `set_centers`.
        **options: of the feature map and sizes, see `Mixer`.

    Source:
        Coulomb particles (arXiv:2607.23869), sec. 3 and App. D.

    >>> mixer = Particle(num_heads=2, head_dim=4, num_features=16, features="sigmoid2")
    >>> o, state = mixer(*torch.randn(3, 1, 2, 5, 4))
    """

    def __init__(
        self,
        *,
        features: str = "softplus",
        num_features: int = 256,
        scale: float | None = None,
        window: int = 0,
        sinks: int = 0,
        center: bool = False,
        **options: Any,
    ):
        own, sizes = split_options(features, options)
        super().__init__(scale=scale, **sizes)
        self.features = own_features(self, features, num_features, own)
        add_near_field(self, window, sinks, center)
        if scale is None and not self.features.exponential:
            self.scale = 1.0

    @classmethod
    def options(cls, *, features="softplus", **chosen):
        return super().options() | feature_options(features)

    def initial_values(self):
        return centers(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: State = None):
        return mix(self, q, k, v, mask, segments, state)
