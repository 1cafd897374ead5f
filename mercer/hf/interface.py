"""The attention function and the mask function that transformers calls for a model with mixers.

A mask is made once a forward for all layers of one kind, so it must serve both the layers with a mixer and those
that keep softmax. It is two-dimensional: bool [B, past + new], True = real token; or, for a packed batch, int [B, T],
equal = same document. Layers that keep softmax spread it to four dimensions; layers with a mixer read it as it is.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from mercer.hf.binding import Attachment, take_call

SDPA, EAGER = "mercer", "mercer_eager"  # what layers without a mixer go on using
logger = logging.getLogger(__name__)


def attention(
    module: Any,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hk S D"],
    value: Float[Tensor, "B Hk S Dv"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B T H Dv"], Tensor | None]:
    """Mix with `module.mixer`, or with softmax where the layer has none.

    Args:
        module: the attention module.
        query: [B, H, T, D], with positions applied.
        key: [B, Hk, T, D] of the new tokens (of all tokens in layers without a mixer).
        value: [B, Hk, T, Dv], likewise.
        attention_mask: what `mask` returned, or a layer's own 4-D mask.
        dropout: probability for attention weights; only softmax has weights to drop.
        scaling: the model's factor on q.k.
        is_causal: overrules the module's own flag, in layers without a mixer.
        **kwargs: what else the family passes.

    Returns:
        [B, T, H, Dv], and the weights where softmax layers compute them.

    Raises:
        ValueError: the call asks for what no mixer has: an N x N mask, soft-cap, sinks, a position bias, foreign keys.
    """
    if getattr(module, "mixer", None) is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        return softmax(module, query, key, value, attention_mask, dropout, scaling, causal, **kwargs)
    call, attachment, mixer = take_call(module), module.mercer_attachment, module.mixer
    if getattr(module, "mercer_shares_input", False):  # equal, and now one tensor: mixers need not work it out twice
        key = query
    _refuse(module, attachment, query, key, attention_mask, kwargs)
    if dropout and attachment.is_softmax and call.layer is None:
        return softmax(module, query, key, value, attention_mask, dropout, scaling, mixer.causal, **kwargs)
    if dropout and not torch.compiler.is_compiling():
        _announce_dropout(type(module).__name__, dropout)
    if attachment.follows_scaling and scaling is not None and scaling != mixer.scale:
        mixer.scale = float(scaling)
    new = query.shape[2]
    packed = attention_mask is not None and attention_mask.dtype != torch.bool
    o, state = mixer(
        query,
        key,
        value,
        x=call.x,
        rotate=call.rotate,
        mask=None if attention_mask is None or packed else attention_mask[:, -new:],
        segments=attention_mask if packed else None,
        state=None if call.layer is None else call.layer.state,
    )
    if call.layer is not None:
        call.layer.store(state, new)
    return o.transpose(1, 2).contiguous(), None


def _refuse(
    module: Any,
    attachment: Attachment,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"{name} carries a mixer and got an attention mask of shape {tuple(attention_mask.shape)}; mixers read "
            "padding [batch, tokens] only: pass a 2-D attention_mask, or keep this layer's softmax (layers=)"
        )
    if kwargs.get("softcap") is not None and not attachment.drop_softcap:
        raise ValueError(f"{name} caps its logits at {kwargs['softcap']}, which mixers cannot; see drop_softcap=True")
    for extra, words in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if kwargs.get(extra) is not None:
            raise ValueError(f"{name} uses {words}, which mixers do not have; keep this layer's softmax (layers=)")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name} carries a mixer and got {key.shape[2]} keys for {query.shape[2]} new tokens; the past belongs in "
            "the mixer's own state: pass cache=model.new_cache(), and no prefix"
        )


@functools.lru_cache(maxsize=64)
def _announce_dropout(name: str, dropout: float) -> None:
    logger.warning("attention dropout %g of %s is not applied: its mixer has no weights to drop", dropout, name)


def softmax(
    module: Any,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hk S D"],
    value: Float[Tensor, "B Hk S Dv"],
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B T H Dv"], Tensor | None]:
    """Compute the softmax attention a layer had before its model was converted.

    Raises:
        ValueError: the keys are not as many as the mask says (a layer that reads another layer's keys).
    """
    eager = module.config._attn_implementation == EAGER
    new, total = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 2:
        if attention_mask.shape[1] != total:
            raise ValueError(
                f"{type(module).__name__} keeps its softmax and got {total} keys under a mask of "
                f"{attention_mask.shape[1]} tokens; convert this layer too, or none that shares its keys"
            )
        attention_mask = _spread(attention_mask, new, total, causal)
    elif attention_mask is None and causal and new > 1 and (eager or new != total):
        ones = torch.ones(query.shape[0], total, dtype=torch.bool, device=query.device)
        attention_mask = _spread(ones, new, total, causal)
    kwargs.pop("is_causal", None)
    if not eager:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attention_mask = torch.where(attention_mask, zero, torch.finfo(query.dtype).min)
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _spread(
    mask: Bool[Tensor, "B S"] | Int[Tensor, "B S"], new: int, total: int, causal: bool
) -> Bool[Tensor, "B 1 T S"]:
    """Return the 4-D mask [B, 1, new, total] that a 2-D mask of tokens or documents stands for."""
    if mask.dtype == torch.bool:
        allowed = mask[:, None, None, :].expand(-1, 1, new, total)
    else:
        allowed = (mask[:, :, None] == mask[:, None, :])[:, None]
    if causal:
        last = torch.arange(total - new, total, device=mask.device)
        allowed = allowed & (torch.arange(total, device=mask.device) <= last[:, None])
    return allowed


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Bool[Tensor, "B S"] | Int[Tensor, "B T"] | Bool[Tensor, "B 1 T S"] | Float[Tensor, "B 1 T S"] | None:
    """Return the 2-D mask of the module's docstring; a sliding or chunked layer gets the 4-D mask it always had.

    Raises:
        ValueError: the pattern is none that mixers have (N x N), a static cache, or a mask of other length.
    """
    if kwargs.get("local_size") is not None:
        own = eager_mask if getattr(kwargs.get("config"), "_attn_implementation", SDPA) == EAGER else sdpa_mask
        return own(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if kwargs.get("use_vmap") or (attention_mask is not None and not plain):
        raise ValueError(_PATTERN)
    if mask_function is not bidirectional_mask_function and (
        isinstance(q_offset, Tensor) or kv_length != q_length + q_offset - kv_offset
    ):
        raise ValueError(
            f"{kv_length} keys for {q_length} new tokens after {q_offset}: a static cache or a prefix cannot serve a "
            "model with mixers, as slots without a token would be read; leave the cache to generate(), or pass "
            "model.new_cache()"
        )
    if attention_mask is not None:
        return _padding(attention_mask, kv_length, kv_offset)
    return None if plain else _documents(batch_size, q_length, mask_function, kwargs.get("device", "cpu"))


_PATTERN = (
    "this call asks for an attention pattern (N x N mask) beyond padding, packed documents and causality, which mixers "
    "do not have; keep the softmax of these layers (layers=), or leave out what asks for it"
)


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Bool[Tensor, "B S"] | None:
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if real.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} of {kv_offset + kv_length} tokens; it must cover the "
            "past in the cache as well as the new tokens"
        )
    return None if not torch.compiler.is_compiling() and bool(real.all()) else real


def _documents(batch_size: int, length: int, sees: Callable[..., Any], device: Any) -> Int[Tensor, "B T"]:
    """Number the packed documents: a token that does not see its left neighbour starts one.

    The pattern is asked about neighbours only, 2 T questions instead of T x T.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros(1, 1, dtype=torch.long, device=device)
    left = torch.arange(length - 1, device=device)[None]
    if not torch.compiler.is_compiling() and bool(sees(rows, head, left, left + 1).any()):
        raise ValueError(_PATTERN)
    starts = ~sees(rows, head, left + 1, left).expand(batch_size, -1)
    return torch.nn.functional.pad(starts.long().cumsum(-1), (1, 0))


AttentionInterface.register(SDPA, attention)
AttentionInterface.register(EAGER, attention)
AttentionMaskInterface.register(SDPA, mask)
AttentionMaskInterface.register(EAGER, mask)
