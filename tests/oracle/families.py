"""Tiny random float32 models, one for each family, saved as ordinary Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tllm.verify.reference import kind_of

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

_SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_BY_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 32}
_GEMMA3N = (
    _BASE
    | _HEAD_DIM
    | _BY_LAYER
    | {
        "sliding_window": WINDOW,
        # The last layer has the keys and values of the one before.
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "tie_word_embeddings": True,
        "intermediate_size": [192] * LAYERS,
    }
)

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
    "gemma3n": ("gemma3n_text", _GEMMA3N),
}

REQUIRED = tuple(CONFIGS)[: tuple(CONFIGS).index("olmo")]
"""The families that the contract names; the rest are listed for free."""


_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_MULTIMODAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    }
}
_INTERLEAVED_ROPE = {
    "rope_parameters": {**_MULTIMODAL_ROPE["rope_parameters"], "mrope_interleaved": True}
}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    }
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GROUPED = {"n_group": 1, "topk_group": 1}
_LATENT = {
    # The sizes that vLLM's kernels take.
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": HEADS,
}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_FULL = {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_STATES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # As in every released one; vLLM's kernel for CPUs does not take 32.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "state_size": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 64,
}
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}

_LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 192,
    "intermediate_size": 64,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 0],
    "attention_chunk_size": 256,
}
_GEMMA4 = _BASE | _HEAD_DIM | _SLIDING | _BY_LAYER | {"per_layer_config": {}}

SURVEYED: dict[str, tuple[str, dict[str, Any]]] = {
    # Only the survey runs these.
    "gpt_oss": (
        "gpt_oss",
        _BASE
        | _HEAD_DIM
        | _YARN
        # As in every released one, which vLLM takes for granted.
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": ("llama4_text", _BASE | _HEAD_DIM | _LLAMA4),
    "deepseek_v2": (
        "deepseek_v2",
        _BASE
        | _LATENT
        | _EXPERTS
        | _GROUPED
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _BASE
        | _LATENT
        | _EXPERTS
        | _GROUPED
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "axk1": (
        "axk1",
        _BASE
        | _LATENT
        | _EXPERTS
        | _GROUPED
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "glm4_moe": (
        "glm4_moe",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _GROUPED
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _BASE
        | _LATENT
        | _EXPERTS
        | _GROUPED
        | _DENSE_FIRST
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "dots1": (
        "dots1",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _GROUPED
        | _FULL
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _BASE
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone_moe": (
        "exaone_moe",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _GROUPED
        | _SLIDING
        | _DENSE_FIRST
        | {"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        _BASE
        | _EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "sliding_window": None,
            "mlp_only_layers": [1],
            "layer_types": ["full_attention"] * LAYERS,
        },
    ),
    "flex_olmo": ("flex_olmo", _BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        _BASE | _HEAD_DIM | {"num_experts": 4, "moe_topk": 2},
    ),
    "mellum": (
        "mellum",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _FULL
        | {"num_local_experts": 4}
        | {"mlp_layer_types": ["sparse"] * LAYERS},
    ),
    "solar_open": (
        "solar_open",
        _BASE | _HEAD_DIM | _EXPERTS | _GROUPED | {"n_routed_experts": 4, "n_shared_experts": 1},
    ),
    "minimax_m2": (
        "minimax_m2",
        _BASE
        | _HEAD_DIM
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16}
        # As `rotary_dim` says, which older releases of transformers do not read.
        | {"rope_parameters": _ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}}
        # vLLM asks for these, which transformers does not write.
        | {"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "phimoe": (
        "phimoe",
        _BASE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        # As Microsoft's checkpoints name it; vLLM knows no other name.
        | {"architectures": ["PhiMoEForCausalLM"]}
        | {"attention_bias": True, "lm_head_bias": True},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _BASE
        | _EXPERTS
        | _GROUPED
        | _SLIDING
        | _DENSE_FIRST
        | {"head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4}
        # As vLLM names them.
        | {
            "hybrid_layer_pattern": [1, 1, 0],
            "moe_layer_freq": [0, 1, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": WINDOW,
            "swa_head_dim": 32,
            "swa_num_attention_heads": HEADS,
            # transformers has twice as many of them where attention slides.
            "swa_num_key_value_heads": 2 * KV_HEADS,
            "swa_v_head_dim": 32,
            "add_swa_attention_sink_bias": True,
            "swa_rope_theta": 10000.0,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                kind: _ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}
                for kind in ("sliding_attention", "full_attention")
            },
        },
    ),
    "laguna": (
        "laguna",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _SLIDING
        | _DENSE_FIRST
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "num_attention_heads_per_layer": [HEADS] * LAYERS,
        },
    ),
    "hy_v3": (
        "hy_v3",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | {"num_experts": 4, "num_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        | {"expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    ),
    "afmoe": (
        "afmoe",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _GROUPED
        | _SLIDING
        | {"num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1}
        | {"score_func": "sigmoid", "route_norm": True},
    ),
    "apertus": ("apertus", _BASE | _ROPE | {"hidden_act": "xielu"}),
    "cohere2_moe": (
        "cohere2_moe",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _SLIDING
        | {"num_experts": 4, "tie_word_embeddings": True, "logit_scale": 0.5},
    ),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": HIDDEN,
            },
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        _BASE
        | _LATENT
        | {
            "num_layers": LAYERS,
            "num_hidden_layers": 2 * LAYERS,
            "ffn_hidden_size": 192,
            "expert_ffn_hidden_size": 64,
            "n_routed_experts": 4,
            "moe_topk": 2,
            # transformers writes weights of experts that compute nothing, and vLLM has none.
            "zero_expert_num": 0,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        },
    ),
    "minicpm3": (
        "minicpm3",
        _BASE | _LATENT | {"dim_model_base": HIDDEN // 2, "scale_emb": 2, "head_dim": 32},
    ),
    "hyperclovax": (
        "hyperclovax",
        _BASE | _HEAD_DIM | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "granite_swa": (
        "granite_swa",
        _BASE | _SLIDING | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "granitemoe": (
        "granitemoe",
        _BASE
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        _BASE
        | _SLIDING
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        _BASE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _BASE
        | _STATES
        | _HYBRID
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.25},
    ),
    "falcon_h1": (
        "falcon_h1",
        _BASE | _HEAD_DIM | _STATES | {"mamba_d_ssm": 256, "ssm_out_multiplier": 0.5},
    ),
    "nemotron_h": (
        "nemotron_h",
        _BASE
        | _HEAD_DIM
        | {
            "num_hidden_layers": LAYERS,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "ssm_state_size": 16,
            # transformers keeps time steps above it, and vLLM does not.
            "time_step_min": 1e-30,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | {
            "num_hidden_layers": LAYERS,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "ssm_state_size": 16,
            # transformers keeps time steps above it, and vLLM does not.
            "time_step_min": 1e-30,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "mamba2": (
        "mamba2",
        _MAMBA | {"num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    ),
    "mamba": ("mamba", _MAMBA | {"time_step_rank": 8}),
    "falcon_mamba": ("falcon_mamba", _MAMBA | {"time_step_rank": 8}),
    "jamba": (
        "jamba",
        _BASE
        | {
            "num_experts": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("bamba", _BASE | _STATES | {"attn_layer_indices": [1]}),
    "zamba2": (
        "zamba2",
        _BASE
        | {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "hybrid_layer_ids": [1],
            "num_key_value_heads": HEADS,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "mamba_d_state": 16,
            "attention_hidden_size": 2 * HIDDEN,
            "attention_head_dim": 64,
            "adapter_rank": 16,
            "chunk_size": 16,
            # transformers keeps time steps above it, and vLLM does not.
            "time_step_min": 1e-30,
            # As in every released one, which vLLM takes for granted.
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "lfm2",
        _BASE
        | {
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            # vLLM asks for these, which transformers does not write.
            "block_dim": HIDDEN,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 32,
            "conv_dim": HIDDEN,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _BASE
        | _EXPERTS
        | {
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_dense_layers": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _HYBRID
        | _DELTA
        | {"num_experts": 4, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("qwen3_5_text", _BASE | _HEAD_DIM | _HYBRID | _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _BASE
        | _HEAD_DIM
        | _EXPERTS
        | _HYBRID
        | _DELTA
        | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        _BASE | _HYBRID | _DELTA | {"num_key_value_heads": HEADS, "linear_num_key_heads": 4},
    ),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_moe": (
        "gemma4_text",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 64},
    ),
    "gpt_neox": (
        "gpt_neox",
        _BASE | {"num_key_value_heads": HEADS, "use_parallel_residual": True},
    ),
    "gpt_neox_sequential": (
        "gpt_neox",
        _BASE | {"num_key_value_heads": HEADS, "use_parallel_residual": False},
    ),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "helium": ("helium", _BASE | _HEAD_DIM),
    "glm": ("glm", _BASE | _HEAD_DIM),
    "cwm": ("cwm", _BASE | _HEAD_DIM | _SLIDING | {"bos_token_id": 1, "eos_token_id": 1}),
    "bitnet": ("bitnet", _BASE),
    "diffllama": ("diffllama", _BASE | _HEAD_DIM),
    "jais2": ("jais2", _BASE | _HEAD_DIM),
    "ministral": ("ministral", _BASE | _HEAD_DIM | _SLIDING),
    "ministral3": ("ministral3", _BASE | _HEAD_DIM),
    "persimmon": ("persimmon", _BASE | {"num_key_value_heads": HEADS}),
    "vaultgemma": (
        "vaultgemma",
        _BASE | _HEAD_DIM | _SLIDING | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "youtu": ("youtu", _BASE | _LATENT),
    # With an image tower beside the language model.
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": _BASE | _MULTIMODAL_ROPE,
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": _BASE | _HEAD_DIM | _INTERLEAVED_ROPE,
            "vision_config": _QWEN3_VISION,
        },
    ),
    "gemma3_mm": (
        "gemma3",
        {
            "text_config": CONFIGS["gemma3"][1],
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 150,
            "boi_token_index": 151,
            "eoi_token_index": 152,
        },
    ),
    "llava": (
        "llava",
        {
            "text_config": _BASE | {"model_type": "llama"},
            "vision_config": _CLIP,
            "image_token_index": 150,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": _BASE | _MULTIMODAL_ROPE,
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": HIDDEN,
                "num_heads": 2,
                "mlp_ratio": 2,
            },
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": _BASE
            | _HEAD_DIM
            | _INTERLEAVED_ROPE
            | _EXPERTS
            | {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True}
            | {"moe_intermediate_size": 96},  # no square, which hides how they are saved
            "vision_config": _QWEN3_VISION,
        },
    ),
    "gemma4_mm": (
        "gemma4",
        {
            "text_config": {
                **_BASE,
                **_HEAD_DIM,
                **_SLIDING,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 32,
                "pad_token_id": 0,
                "per_layer_config": {},
            },
            "image_token_id": 150,
            "video_token_id": 151,
            "audio_token_id": 152,
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
            },
        },
    ),
    "llama4_mm": (
        "llama4",
        {
            "text_config": _BASE | _HEAD_DIM | _LLAMA4,
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        },
    ),
    "paligemma": (
        "paligemma",
        {
            "text_config": CONFIGS["gemma"][1] | {"model_type": "gemma"},
            "vision_config": _SIGLIP,
            "projection_dim": HIDDEN,
            "image_token_index": 150,
        },
    ),
    "llava_next": (
        "llava_next",
        {
            "text_config": _BASE | {"model_type": "llama"},
            "vision_config": _CLIP,
            "image_token_index": 150,
        },
    ),
    "llava_onevision": (
        "llava_onevision",
        {
            "text_config": _BASE | {"model_type": "qwen2"},
            "vision_config": _SIGLIP,
            "image_token_index": 150,
            "video_token_index": 151,
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": _BASE | _HEAD_DIM | {"model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 32,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 150,
        },
    ),
    "idefics3": (
        "idefics3",
        {
            "text_config": _BASE | {"model_type": "llama"},
            "vision_config": {key: value for key, value in _SIGLIP.items() if key != "model_type"},
            "scale_factor": 1,
            "image_token_id": 150,
        },
    ),
    "internvl": (
        "internvl",
        {
            "text_config": _BASE | {"model_type": "qwen2"},
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [28, 28],
                "patch_size": [14, 14],
            },
            "image_token_id": 150,
        },
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {
            "text_config": CONFIGS["cohere2"][1] | {"model_type": "cohere2"},
            "vision_config": _SIGLIP,
            "image_token_id": 150,
        },
    ),
    "qwen3_5_moe_mm": (
        "qwen3_5_moe",
        {
            "text_config": _BASE
            | _HEAD_DIM
            | _EXPERTS
            | _HYBRID
            | _DELTA
            | {"num_experts": 4, "shared_expert_intermediate_size": 64}
            | {"num_experts_per_tok": 4},  # which are chosen would hang on rounding
            "vision_config": _QWEN3_VISION,
        },
    ),
    "qwen3_5_mm": (
        "qwen3_5",
        {"text_config": _BASE | _HEAD_DIM | _HYBRID | _DELTA, "vision_config": _QWEN3_VISION},
    ),
    "kimi_linear": (
        "kimi_linear",
        _BASE
        | _LATENT
        | _EXPERTS
        | _HYBRID
        | {"num_experts": 4, "n_routed_experts": 4, "mla_use_nope": True},
    ),
}

_SERVED_AS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name -> (vLLM's architecture, the family whose checkpoint it is given, and what it asks for
    # besides). `transformers` has no class of these: they are the same model as the other, or
    # compute the same under the same names of weights.
    "llama_first": ("LLaMAForCausalLM", "llama", {}),
    "internlm3": ("InternLM3ForCausalLM", "llama", {}),
    "iquest_coder": ("IQuestCoderForCausalLM", "llama", {}),
    "telechat3": ("TeleChat3ForCausalLM", "llama", {}),
    "solar": (
        "SolarForCausalLM",
        "llama",
        {"bskcn_tv": [1.0, 1.0], "bskcn_1": [], "bskcn_2": [], "bskcn_3": [], "bskcn_4": []},
    ),
    "teleflm": ("TeleFLMForCausalLM", "llama", {"use_mup": False}),
    "pangu_embedded": ("PanguEmbeddedForCausalLM", "llama", {"bias": False}),
    "mimo": ("MiMoForCausalLM", "qwen2", {}),
    "rnj1": ("Rnj1ForCausalLM", "gemma3", {}),
    "orion": (
        "OrionForCausalLM",
        "stablelm",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": _ROPE["rope_parameters"] | {"partial_rotary_factor": 1.0},
        },
    ),
    "minicpm": (
        "MiniCPMForCausalLM",
        "granite",
        {
            "scale_emb": 2.0,
            "scale_depth": 0.5 * LAYERS**0.5,
            "attention_multiplier": (HIDDEN // HEADS) ** -0.5,
            "dim_model_base": HIDDEN,
            "num_experts": 0,
        },
    ),
    "exaone_moe_first": ("ExaoneMoEForCausalLM", "exaone_moe", {}),
    "nemotron_h_puzzle": ("NemotronHPuzzleForCausalLM", "nemotron_h", {}),
    "mimo_v2": ("MiMoV2ForCausalLM", "mimo_v2_flash", {}),
}
CHECKPOINT_OF = {name: like for name, (_, like, _) in _SERVED_AS.items()}
"""The family whose checkpoint it is given, where `transformers` has no class of its own."""
for _name, (_architecture, _like, _more) in _SERVED_AS.items():
    _kind, _values = (CONFIGS | SURVEYED)[_like]
    SURVEYED[_name] = _kind, _values | _more | {"architectures": [_architecture]}

LACKING = {
    "mimo": "lm_head_in",
    "minicpm": "lm_head_in",
    "minicpm3": "lm_head_in",
}
"""A hook point that `transformers` has and vLLM has not: the tensor passes no module of its own."""


_TOLERANCES = {
    # vLLM's Bloom has the exact GELU, transformers' has the approximation by tanh.
    "bloom": 1e-3,
    # vLLM keeps the two parameters of its activation in bfloat16, and sums with them: 2^-8.
    "apertus": 4e-3,
}


_ROTATED_BY_HEAD = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "minicpm3", "longcat_flash"),
    *("lfm2", "lfm2_moe", "kimi_linear"),
}


def tolerance(name: str) -> float:
    """The largest difference to accept, relative to the largest value of the reference tensor."""
    return _TOLERANCES.get(name, 2e-5)


def limits(name: str, points: Iterable[str]) -> dict[str, float]:
    """The same by hook point. A head's rows are means of values: smaller than what they are made
    of, while a softmax magnifies what scores are off by, and the projection that adds up the heads
    comes only after them."""
    return {point: tolerance(name) * (3 if point == "attn_heads" else 1) for point in points}


def served_dtype(name: str) -> torch.dtype:
    """What vLLM computes in, on a CPU."""
    # Its kernel of gated delta nets for CPUs has no other dtype.
    needs_bfloat16 = name.startswith(("qwen3_next", "qwen3_5"))
    return torch.bfloat16 if needs_bfloat16 else torch.float32


def engine_arguments(name: str) -> dict[str, Any]:
    """What vLLM must be told to compute what `transformers` computes."""
    if name in ("cohere2", "cohere2_moe"):
        # With the same window, vLLM's Cohere 2 sees one token more.
        return {"hf_overrides": {"sliding_window": WINDOW - 1}}
    if name == "cohere2_vision":
        return {
            "hf_overrides": {"text_config": {"sliding_window": WINDOW - 1}},
            "limit_mm_per_prompt": {"image": 0, "video": 0},
        }
    arguments: dict[str, Any] = {}
    if name in _ROTATED_BY_HEAD and not torch.cuda.is_available():
        # vLLM's rotary kernel for CPUs takes a row of heads [rows, heads, size] for one head.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if "kv_lora_rank" in (CONFIGS | SURVEYED)[name][1] and not torch.cuda.is_available():
        # Where the processor has AMX, vLLM takes its latent attention that multiplies 16 bits only.
        arguments["attention_backend"] = "CPU_MLA"
    if "text_config" in (CONFIGS | SURVEYED)[name][1]:
        arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    return arguments


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
        model_type, values = (CONFIGS | SURVEYED)[name]
        changed = {key: self._wider(values[key]) for key in _WIDTHS if key in values}
        if "swa_v_head_dim" in values:
            changed["v_head_dim"] = self._wider(values["v_head_dim"])
        if name == "minicpm":  # vLLM divides its scores by the root of a head's size
            changed["attention_multiplier"] = values["attention_multiplier"] * self.width**-0.5
        if self.dtype != torch.float32:
            # Every expert: which of two nearly equal ones is chosen would hang on rounding.
            changed |= dict.fromkeys(values.keys() & _CHOSEN_EXPERTS, 4)
        return model_type, values | changed

    def _wider(self, size: int | list[int]) -> int | list[int]:
        """Of all layers, or of each."""
        return [self.width * each for each in size] if isinstance(size, list) else self.width * size


_CHOSEN_EXPERTS = {"num_experts_per_tok", "moe_topk", "moe_k"}
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
    "intermediate_size_mlp",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "conv_dim",
    "block_dim",
    "mamba_d_head",
    "mamba_d_ssm",
    "mamba_head_dim",
    "mamba_headdim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "attention_hidden_size",
    "attention_head_dim",
    "dim_model_base",
    "swa_head_dim",
    "swa_v_head_dim",
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
    torch.manual_seed(_SEEDS.get(name, sum(name.encode())))
    config = AutoConfig.for_model(model_type, **values)
    model = kind_of(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter is model.get_input_embeddings().weight:
                parameter.normal_(std=0.05)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.15 / variant.width)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(variant.dtype))
        for path, tensor in model.state_dict().items():
            if path.endswith(_ZERO.get(name, "no such weight")):
                tensor.zero_()
            if name.startswith(_UNSCALED) and path.endswith("k_norm.weight"):
                tensor.mul_(0.125)
    model.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    if "architectures" in values:  # which transformers fills in itself
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | _named(values)))
    return folder


def _transpose_experts(file: Path) -> None:
    """As published checkpoints have them: vLLM takes no others, and `transformers` both."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, {"format": "pt"})


# What leaves a delta net is divided by its norm: where that is near zero for a row, every rounding
# of bfloat16 is magnified. With these seeds, chosen with `transformers` alone, none is.
_SEEDS = {"qwen3_5": 1, "qwen3_5_mm": 1, "qwen3_5_moe": 3, "qwen3_5_moe_mm": 3}
_ZERO = {
    # vLLM's router for CPUs leaves it out where experts are scored by a softmax.
    "ernie4_5_moe": "e_score_correction_bias",
    # vLLM does not load it: its parameter has another name than the checkpoint's.
    "laguna": "e_score_correction_bias",
    # vLLM loads it, and does not add it.
    "phimoe": "lm_head.bias",
    # vLLM adds its embeddings by layer in its multimodal class alone: nothing comes of them here.
    "gemma3n": "post_per_layer_input_norm.weight",
}

_UNSCALED = ("gemma4",)
"""Whose attention does not divide by the square root of the heads' size: trained weights of the
norm of keys do. Random ones near one would make the softmax magnify each rounding of bfloat16."""


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """What `transformers` would not write as it was given."""
    return {"architectures": values["architectures"]}
