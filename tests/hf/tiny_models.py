"""One tiny random model for every supported family of transformers."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY, WIDTH = 64, 32
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = {"head_dim": 8}
GEMMA = {**SIZES, **HEADS, **NARROW, "query_pre_attn_scalar": 16}
ALTERNATING = ["sliding_attention", "full_attention"]

# family: model class, arguments of its configuration. Sliding windows are shorter than the inputs of the tests.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, **HEADS}),
    "gemma": ("GemmaForCausalLM", {**SIZES, **HEADS, **NARROW}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "sliding_window": 4, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window": 4, "layer_types": ALTERNATING}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **SIZES,
            **HEADS,
            **NARROW,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 4,
            "layer_types": ALTERNATING * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "mistral": ("MistralForCausalLM", {**SIZES, **HEADS, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, **HEADS}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, **HEADS, **NARROW}),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, **HEADS, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {**SIZES, **HEADS}),
    "nanochat": ("NanoChatForCausalLM", {**SIZES, **HEADS}),
    "phi3": ("Phi3ForCausalLM", {**SIZES, **HEADS, "pad_token_id": 0}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "num_attention_heads": 4}),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": WIDTH,
            "max_position_embeddings": 64,
        },
    ),
    "cohere2": ("Cohere2ForCausalLM", {**SIZES, **HEADS, "sliding_window": 4, "layer_types": ALTERNATING}),
    "exaone4": ("Exaone4ForCausalLM", {**SIZES, **HEADS, "sliding_window": 4, "layer_types": ALTERNATING}),
    "stablelm": ("StableLmForCausalLM", {**SIZES, **HEADS}),
    "glm": ("GlmForCausalLM", {**SIZES, **HEADS, **NARROW, "pad_token_id": 0}),
}


def build(class_name: str, **arguments: Any) -> Any:
    """Return a random model in evaluation mode, its weights large enough for attention to matter."""
    model_class = getattr(transformers, class_name)
    arguments = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None, **arguments}
    model = model_class(model_class.config_class(**arguments)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def decoder(family: str, **arguments: Any) -> Any:
    """Return a tiny decoder of a family."""
    class_name, own = DECODERS[family]
    return build(class_name, **{**own, **arguments})


def llama(**arguments: Any) -> Any:
    """Return a tiny Llama."""
    return decoder("llama", **arguments)


def tokens(*shape: int, low: int = 3) -> Tensor:
    """Return random token numbers."""
    return torch.randint(low, VOCABULARY, shape)


def left_padded(ids: Tensor, padding: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids with the first `padding[i]` tokens of row i replaced by padding, the mask and the position ids."""
    mask = torch.arange(ids.shape[1])[None] >= torch.tensor(padding)[:, None]
    return ids.masked_fill(~mask, 0), mask.long(), (mask.long().cumsum(-1) - 1).clamp(min=0)


def clone(model: Any) -> Any:
    """Return an independent copy."""
    return copy.deepcopy(model)
