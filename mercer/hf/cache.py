"""What a mixer remembers between calls, as a layer of transformers' cache."""

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from mercer.mixers.base import map_state

# Layers of a model that reuse another layer's keys hold nothing; transformers marks them so since 5.2x.
_EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))

# Layers that attend and recur side by side keep both pasts in one place.
_SHARED_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)]))


class MixerCacheLayer(CacheLayerMixin):
    """Hold the state of one mixer: whatever its own law of splitting needs, a few sums or the keys and u.

    `update` hands the new keys and values straight on: the past is in the state, which the attention function reads
    and writes. Batches are reordered, repeated and selected through `map_state`.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.state: Any = None
        self.seen_tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return key_states, value_states

    def store(self, state: Any, new_tokens: int) -> None:
        """Keep the state after `new_tokens` more tokens."""
        self.state = state
        self.seen_tokens += new_tokens
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before 5.12

    def reset(self) -> None:
        self.state, self.seen_tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = map_state(self.state, lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(self.state, lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = map_state(self.state, lambda t: t[indices])

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"cannot crop the state of a mixer by {tokens_to_remove} tokens: it does not keep them apart; "
            "use greedy, sampled or beam decoding instead of assisted (speculative) or contrastive decoding"
        )

    def offload(self) -> None:
        """Keep the state on its device: a cache that offloads would send it away just before it is read."""

    def prefetch(self) -> None:
        """Do nothing, as nothing was sent away."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which this model's forward takes its cache: `cache` since 5.24, else `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def mixer_layer(cache: Cache, index: int) -> MixerCacheLayer:
    """Return the mixer's layer of a cache, putting one in place of transformers' own while that is empty.

    Raises:
        ValueError: the cache is static, was already filled by attention of another kind, or keeps more in this place.
    """
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    layer = cache.layers[index]
    if isinstance(layer, MixerCacheLayer):
        return layer
    if isinstance(layer, StaticLayer):
        raise ValueError(
            f"layer {index} carries a mixer, which cannot use a static cache ({type(cache).__name__}): its unwritten "
            "slots would be read as tokens; leave the cache to generate(), or pass model.new_cache()"
        )
    if isinstance(layer, _SHARED_LAYERS):
        raise ValueError(
            f"layer {index} carries a mixer, but its place in the cache also holds the state of a convolution or "
            f"recurrence ({type(layer).__name__}); leave this layer's softmax (layers=)"
        )
    empty = isinstance(layer, _EMPTY_LAYERS) or (isinstance(layer, DynamicLayer) and layer.get_seq_length() == 0)
    if not empty:
        raise ValueError(
            f"layer {index} carries a mixer, but its place in the cache is a {type(layer).__name__} that another "
            "attention has filled; start from model.new_cache()"
        )
    cache.layers[index] = ours = MixerCacheLayer()
    return ours


def new_cache(model: PreTrainedModel, indices: list[int]) -> DynamicCache:
    """Return an empty cache: mixers' layers at `indices`, the model's own kinds elsewhere."""
    cache = DynamicCache(config=model.config)
    for index in indices:
        mixer_layer(cache, index)
    return cache
