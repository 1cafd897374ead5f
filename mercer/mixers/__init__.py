"""All mixers by name. To add one: write a file here, add one line to MIXERS."""

from typing import Any

from mercer.errors import check_kind, unknown
from mercer.mixers.base import Mixer, map_state
from mercer.mixers.constant import Constant
from mercer.mixers.cubit import Cubit
from mercer.mixers.deltaformer import DeltaFormer
from mercer.mixers.linear import Darkformer, Lfk, Particle, Performer
from mercer.mixers.linear_cubit import LinearCubit
from mercer.mixers.local_linear import LocalLinear
from mercer.mixers.random import Random
from mercer.mixers.softmax import Softmax
from mercer.mixers.window import Window

__all__ = ["MIXERS", "Mixer", "build_mixer", "map_state", "mixer_options"]

MIXERS: dict[str, type[Mixer]] = {
    "softmax": Softmax,
    "constant": Constant,
    "random": Random,
    "deltaformer": DeltaFormer,
    "cubit": Cubit,
    "local_linear": LocalLinear,
    "performer": Performer,
    "lfk": Lfk,
    "darkformer": Darkformer,
    "particle": Particle,
    "linear_cubit": LinearCubit,
    "window": Window,
}


def mixer_options(name: str, **chosen: Any) -> dict[str, Any]:
    """Return the options the mixer called `name` takes, with their default values.

    `chosen` are the options given: a mixer of a feature map takes those of the map that `features` names.

    >>> mixer_options("local_linear")
    {'ridge': 1.0, 'scale': None}
    """
    if name not in MIXERS:
        raise unknown("mixer", name, MIXERS)
    return MIXERS[name].options(**chosen)


def build_mixer(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    hidden_size: int | None = None,
    causal: bool = True,
    **options: Any,
) -> Mixer:
    """Make the mixer called `name`.

    Args:
        name: a key of MIXERS.
        num_heads: query heads.
        head_dim: width of a head.
        num_kv_heads: key and value heads; default `num_heads`, which must be a multiple.
        hidden_size: width of the hidden states x, for mixers that read them.
        causal: whether a token sees only itself and its past.
        **options: the mixer's own, see `mixer_options`.

    Returns:
        A module `(q, k, v, *, x, rotate, mask, segments, state) -> (o, state)`.

    Raises:
        ValueError: an unknown name or option, a value of another kind than the option's, sizes that do not divide.

    >>> build_mixer("cubit", num_heads=4, head_dim=8, hidden_size=32, share=True).num_kv_heads
    4
    """
    known = mixer_options(name, **options)
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"unknown option {option!r} for mixer {name!r}; it takes {', '.join(sorted(known))}")
        check_kind(option, value, known[option])
    return MIXERS[name](
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        hidden_size=hidden_size,
        causal=causal,
        **options,
    )
