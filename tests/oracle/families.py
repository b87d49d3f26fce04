"""Tiny random float32 models, one for each family, saved as ordinary Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 160
LAYERS = 3
HIDDEN = 128
HEADS = 4  # head_dim 32, the least that vLLM's CPU attention takes
KV_HEADS = 2
WINDOW = 40

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HEAD_DIM = {"head_dim": HIDDEN // HEADS}
# GPT-2, GPT-J and Bloom spell the sizes in their own way and have no grouped heads.
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "bias": False,
    "alibi": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Families of the contract: name -> (transformers' model_type, its config).
    "llama": ("llama", _BASE),
    "mistral": ("mistral", _BASE | {"sliding_window": None}),
    "qwen2": ("qwen2", _BASE),
    "qwen3": ("qwen3", _BASE | _HEAD_DIM),
    "gemma2": (
        "gemma2",
        _BASE
        | _HEAD_DIM
        | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": WINDOW},
    ),
    "gemma3": (
        "gemma3_text",
        # As in every released Gemma 3, layers of both kinds: they differ in their rotary base too.
        # Were all of them sliding, plain vLLM 0.32 would be wrong on Hopper, under full CUDA graphs
        # and while no sequence is longer than the window: FlashAttention 3's schedule is then
        # computed as if there were no window, for a graph that was captured with one.
        _BASE
        | _HEAD_DIM
        | {
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", _BASE | {"original_max_position_embeddings": 256}),
    "olmo2": ("olmo2", _BASE),
    "starcoder2": ("starcoder2", _BASE | {"sliding_window": None}),
    "gpt2": ("gpt2", _GPT),
    "opt": (
        "opt",
        _BASE
        | {
            "ffn_dim": 192,
            "word_embed_proj_dim": HIDDEN,
            "do_layer_norm_before": True,
            "pad_token_id": 1,
        },
    ),
    "falcon": ("falcon", _FALCON | {"new_decoder_architecture": True}),
    "falcon_one_norm": (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_first": ("falcon", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon_sequential": (
        "falcon",
        _FALCON
        | {"multi_query": False, "num_kv_heads": HEADS, "parallel_attn": False, "bias": True},
    ),
    "stablelm": ("stablelm", _BASE),
    "glm4": ("glm4", _BASE | _HEAD_DIM),
    "cohere": ("cohere", _BASE | {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "cohere2": (
        "cohere2",
        _BASE | {"tie_word_embeddings": True, "logit_scale": 0.5, "sliding_window": WINDOW},
    ),
    "mixtral": (
        "mixtral",
        _BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        _BASE
        | _HEAD_DIM
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    # More that vLLM serves and the table lists.
    "olmo": ("olmo", _BASE),
    "olmo3": ("olmo3", _BASE | {"sliding_window": WINDOW}),
    "olmoe": ("olmoe", _BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    # vLLM 0.30's own Phi has neither grouped heads nor another width of the MLP.
    "phi": ("phi", _BASE | {"num_key_value_heads": HEADS, "intermediate_size": 4 * HIDDEN}),
    "smollm3": ("smollm3", _BASE),
    "seed_oss": ("seed_oss", _BASE | _HEAD_DIM),
    "arcee": ("arcee", _BASE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _BASE | _HEAD_DIM),
    "granite": (
        "granite",
        # Its default multiplier, 1, makes attention so sharp that it magnifies rounding errors.
        _BASE
        | {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.25},
    ),
    "nemotron": ("nemotron", _BASE | _HEAD_DIM),
    "gemma": ("gemma", _BASE | _HEAD_DIM | {"tie_word_embeddings": True}),
    "exaone4": ("exaone4", _BASE | {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "ernie4_5": ("ernie4_5", _BASE | _HEAD_DIM),
    "gptj": ("gptj", _GPT | {"rotary_dim": 16, "tie_word_embeddings": False}),
    "bloom": (
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
        | {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True},
    ),
}

REQUIRED = tuple(CONFIGS)[: tuple(CONFIGS).index("olmo")]
"""The families that the contract names; the rest are listed for free."""


# vLLM's Bloom has the exact GELU, transformers' has the approximation by tanh.
_TOLERANCES = {"bloom": 1e-3}


def tolerance(name: str) -> float:
    """The largest difference to accept, relative to the largest value of the reference tensor."""
    return _TOLERANCES.get(name, 2e-5)


def engine_arguments(name: str) -> dict[str, Any]:
    """What vLLM must be told to compute what `transformers` computes."""
    # With the same window, vLLM's Cohere 2 sees one token more.
    return {"hf_overrides": {"sliding_window": WINDOW - 1}} if name == "cohere2" else {}


@dataclass(frozen=True)
class Variant:
    """Another size of the same models.

    width: how many times wider than the sizes above.
    dtype: every weight is rounded to it, and saved as float32.
    """

    width: int = 1
    dtype: torch.dtype = torch.float32

    def config(self, name: str) -> tuple[str, dict[str, Any]]:
        """transformers' model_type, and its config."""
        model_type, values = CONFIGS[name]
        changed = {key: self.width * values[key] for key in _WIDTHS if key in values}
        if self.dtype != torch.float32 and "num_experts_per_tok" in values:
            # Every expert: which of two nearly equal ones is chosen would hang on rounding.
            changed["num_experts_per_tok"] = 4
        return model_type, values | changed


_WIDTHS = (
    "hidden_size",
    "n_embd",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "query_pre_attn_scalar",
    "rotary_dim",
)


def save(name: str, root: Path, variant: Variant = Variant()) -> Path:
    """The checkpoint of family `name` under `root`, made on the first call with fixed weights.

    Weights have a standard deviation of 0.15 (less in wider models) and norms and biases are random
    too, so that no branch is negligible and no two layers agree. Embeddings are smaller, else a
    model whose LM head is tied to them only repeats its last token.
    """
    folder = root / name
    if (folder / "config.json").exists():
        return folder
    model_type, values = variant.config(name)
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **values), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter is model.get_input_embeddings().weight:
                parameter.normal_(std=0.05)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.15 / variant.width)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(variant.dtype))
    model.save_pretrained(folder)
    return folder
