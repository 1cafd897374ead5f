"""Models to pretrain from nothing: an ordinary skeleton of transformers whose attention layers carry a mixer."""

import dataclasses
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from mercer import mixers
from mercer.errors import unknown
from mercer.hf.block import PROJECTIONS, arrange
from mercer.hf.exchange import attach
from mercer.hf.pooling import POOLINGS


@dataclasses.dataclass(frozen=True)
class Size:
    """A row of `SIZES`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    learning_rate: float


# 125m and 350m: layers, widths, heads and learning rates of the Cubit paper (arXiv:2605.06501). The paper names 1.3b
# without a size; its row, the three small ones, and every feed-forward width (8/3 E, up to a multiple of 64) are ours.
SIZES: dict[str, Size] = {
    "tiny": Size(128, 4, 4, 384, 2e-3),
    "small": Size(256, 6, 4, 704, 1e-3),
    "base": Size(512, 8, 8, 1408, 8e-4),
    "125m": Size(768, 12, 12, 2048, 6e-4),
    "350m": Size(1024, 24, 16, 2752, 3e-4),
    "1.3b": Size(2048, 24, 16, 5504, 2e-4),
}


def from_scratch(
    size: str | Size,
    mixer: str,
    *,
    vocab_size: int,
    max_length: int,
    seed: int = 0,
    kind: str = "language",
    num_labels: int = 2,
    mixer_options: dict[str, Any] | None = None,
    projections: str = "all",
    pooling: str | None = None,
    dropout: float = 0.0,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Any:
    """Build a model with fresh weights: a Llama skeleton for language, a BERT skeleton for classifying text.

    RMSNorm, SwiGLU, RoPE and tied embeddings as in Llama, post-LN, GELU and learned positions as in BERT; the
    projections have biases as in the Cubit paper. mixer="softmax" goes through the same path as the others, so that
    only the mixer differs between runs, and what mixers share starts from the same weights for the same seed.

    Args:
        size: a name of `SIZES`, whose feed-forward widths are SwiGLU's, so a classifier has 4 E in their place; or a
            `Size` of your own, taken at its word.
        mixer: a name of `mercer.MIXERS`.
        vocab_size: number of tokens.
        max_length: longest input; RoPE itself has no limit, BERT's learned positions do.
        seed: of the weights, and of the mixer's own draws unless its options name one.
        kind: "language" or "classifier".
        num_labels: classes of a classifier.
        mixer_options: options of the mixer.
        projections: "all", or "value": queries and keys are the layer's input itself, see `mercer.hf.block.arrange`.
        pooling: what a classifier reads: "mean" over real tokens or the "first" of them; None: BERT's own pooler, a
            projection of the first token.
        dropout: of a classifier's hidden states in training; mixers have no weights to drop.
        pad_token_id: number of the padding token.
        bos_token_id: number of the token that starts a text.
        eos_token_id: number of the token that ends one.

    Returns:
        A `PreTrainedModel` in training mode; it saves, loads and generates as any of transformers.

    Raises:
        ValueError: unknown size, mixer, option, kind, projections or pooling; a language model with pooling or dropout.

    Example:
        >>> model = from_scratch("tiny", "cubit", vocab_size=256, max_length=128)
        >>> type(model).__name__, model.config.mercer["mixer"]
        ('MercerLlamaForCausalLM', 'cubit')
    """
    row = _row(size)
    for name, value, choices in (
        ("kind", kind, ["language", "classifier"]),
        ("projections", projections, PROJECTIONS),
        ("pooling", pooling, POOLINGS),
    ):
        if value is not None and value not in choices:
            raise unknown(name, value, choices)
    if kind == "language" and (pooling is not None or dropout):
        raise ValueError(f"pooling ({pooling}) and dropout ({dropout}) are a classifier's; pass kind='classifier'")
    options = dict(mixer_options or {})
    if "seed" in mixers.mixer_options(mixer):
        options.setdefault("seed", seed)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": row.hidden_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "max_position_embeddings": max_length,
        "pad_token_id": pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "classifier":
            feed_forward = row.intermediate_size if isinstance(size, Size) else 4 * row.hidden_size
            model = _bert(feed_forward, dropout, {**sizes, "num_labels": num_labels})
        else:
            model = _llama(row, {**sizes, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id})
        return arrange(attach(model, mixer, **options), projections=projections, pooling=pooling)


def _row(size: str | Size) -> Size:
    if isinstance(size, Size):
        return size
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return SIZES[size]


def _llama(row: Size, sizes: dict[str, Any]) -> LlamaForCausalLM:
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=row.num_heads,
        intermediate_size=row.intermediate_size,
        attention_bias=True,
        attention_dropout=0.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _bert(intermediate_size: int, dropout: float, sizes: dict[str, Any]) -> BertForSequenceClassification:
    config = BertConfig(
        **sizes,
        intermediate_size=intermediate_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)
