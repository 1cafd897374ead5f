"""The attention block of the Coulomb paper: queries and keys are the layer's input itself, only values are projected.

What a model differs in from its transformers class beside the mixer stands in its configuration, beside the mixer's
name, so that a folder loads as it was saved.
"""

from typing import Any

from torch import nn

from mercer.errors import unknown
from mercer.hf.install import attached
from mercer.hf.pooling import set_pooling

PROJECTIONS = ("all", "value")
_PAIRS = (("query", "key"), ("q_proj", "k_proj"))  # what families call the projections of queries and keys


def arrange(model: Any, *, projections: str = "all", pooling: str | None = None) -> Any:
    """Give a model with mixers the paper's block and its pooling, and note both in its configuration.

    Args:
        model: a model with mixers, changed in place.
        projections: "all" leaves the layers as they are; "value": q = k = reshape(x), positions applied where the
            model rotates; only values (and the output) are projected.
        pooling: what a classifier reads: "mean" over real tokens, "first" or "last" of them, without a projection; None
            leaves the model's own.

    Returns:
        The same model.

    Raises:
        ValueError: unknown projections or pooling, layers whose queries and keys are not of the input's width each, or
            no pooler.

    Source:
        Coulomb particles (arXiv:2607.23869), sec. 3: q = k = reshape(x), v = x W_v.

    >>> from mercer.hf.scratch import from_scratch
    >>> model = from_scratch("tiny", "particle", kind="classifier", vocab_size=64, max_length=32)
    >>> layer = next(layer for _, layer in attached(arrange(model, projections="value", pooling="mean")))
    >>> layer.query, layer.value, model.base_model.pooler
    (Identity(), Linear(in_features=128, out_features=128, bias=True), Pooling('mean'))
    """
    if projections not in PROJECTIONS:
        raise unknown("projections", projections, PROJECTIONS)
    if projections == "value":
        for name, layer in attached(model):
            _share_input(name, layer)
    if pooling is not None:
        set_pooling(model, pooling)
    kept = {} if projections == "all" else {"projections": projections}
    model.config.mercer = {**model.config.mercer, **kept, **({} if pooling is None else {"pooling": pooling})}
    return model


def arrangement(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what `arrange` noted in a configuration's `mercer`; empty for a model that was left as it is."""
    return {key: spec[key] for key in ("projections", "pooling") if key in spec}


def _share_input(name: str, layer: Any) -> None:
    """Let queries and keys be the layer's input; nothing is left of the two projections."""
    pair = next((names for names in _PAIRS if all(isinstance(getattr(layer, n, None), nn.Module) for n in names)), None)
    mixer, width = layer.mixer, layer.config.hidden_size
    sizes = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim)
    if pair is None or sizes != (width, width):
        raise ValueError(
            f"{name} cannot take its input (width {width}) as queries and keys (widths {sizes[0]} and {sizes[1]}); "
            "both must be as wide as the input, in projections of their own; choose projections='all'"
        )
    for projection in pair:
        setattr(layer, projection, nn.Identity())
    layer.mercer_shares_input = True
