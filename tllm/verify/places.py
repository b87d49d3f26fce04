"""Where hook points are in the models of `transformers`: a table by `model_type`.

It is written independently of `tllm/models`, which says where they are in vLLM's: the one is
checked against the other. Import rules keep them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

POINTS = (
    "embed",
    "pre_attn",
    "attn_in",
    "q",
    "k",
    "v",
    "attn_heads",
    "attn_out",
    "post_attn",
    "mlp_in",
    "router",
    "mlp_out",
    "post_block",
    "lm_head_in",
)
"""In the order they are computed."""
WITHOUT_LAYER = ("embed", "lm_head_in")


@dataclass(frozen=True)
class BlockPlace:
    """A tensor at the boundary of one of the block's modules.

    path: "" is the block; "a|b" is whichever of the two a block has.
    side: "product": what the module's first product with a matrix gives, before it works on that.
        "query", "key", "value": what the module gives `eager_attention_forward`, by which
        `transformers` compares queries with keys.
    """

    path: str
    side: Literal["input", "output", "product", "query", "key", "value"]
    in_place: bool = False
    """A write changes the tensor for whoever holds it, as the stream at `post_attn` must be."""
    item: int | None = None
    """Which of several streams `[streams, 1, tokens, hidden]` it is."""

    def module(self, block: nn.Module) -> nn.Module | None:
        """The module of this block; None where it has none of them."""
        for path in self.path.split("|"):
            with suppress(AttributeError):
                return block.get_submodule(path)
        return None


def _into(path: str) -> BlockPlace:
    return BlockPlace(path, "input")


def _out_of(path: str) -> BlockPlace:
    return BlockPlace(path, "output")


def _stream_at(path: str) -> BlockPlace:
    return BlockPlace(path, "input", in_place=True)


_HEADS = _into(
    "self_attn.o_proj|self_attn.out_proj|self_attn.dense|self_attention.dense|attention.dense|"
    "attn.c_proj|attn.out_proj|mixer.o_proj|norm_attn_norm.attn.out_proj"
)
_LLAMA = {
    "attn_in": _into("self_attn"),
    "attn_heads": _HEADS,
    "attn_out": _out_of("self_attn"),
    "post_attn": _stream_at("post_attention_layernorm"),
    "mlp_in": _into("mlp"),
    "mlp_out": _out_of("mlp"),
}
_SANDWICH = _LLAMA | {
    "attn_out": _out_of("post_attention_layernorm"),
    "post_attn": _stream_at("pre_feedforward_layernorm"),
    "mlp_out": _out_of("post_feedforward_layernorm"),
}
_POST_NORM = _LLAMA | {
    "attn_out": _out_of("post_attention_layernorm"),
    "post_attn": _stream_at("mlp"),
    "mlp_out": _out_of("post_feedforward_layernorm"),
}


def _without(places: Mapping[str, BlockPlace], missing: str) -> dict[str, BlockPlace]:
    return {point: place for point, place in places.items() if point != missing}


_NO_POST_ATTN = _without(_LLAMA, "post_attn")
_GPT2 = _LLAMA | {
    "attn_in": _into("attn"),
    "attn_out": _out_of("attn"),
    "post_attn": _stream_at("ln_2"),
}
_ONLY_INPUTS = {point: place for point, place in _LLAMA.items() if not point.endswith("_out")}
_FALCON = _NO_POST_ATTN | {
    "attn_in": _into("self_attention"),
    "attn_out": _out_of("self_attention"),
}


_ROUTER = BlockPlace(
    "mlp.gate|mlp.router|block_sparse_moe.gate|block_sparse_moe.router|feed_forward.gate|"
    "feed_forward.router|mixer.gate|router",
    "product",
)
ROUTED = frozenset(
    {
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoeshared", "phimoe"),
        *("granitemoehybrid", "granitemoe_swa", "lfm2_moe", "exaone_moe", "hy_v3", "ernie4_5_moe"),
        *("llama4_text", "afmoe", "cohere2_moe", "mimo_v2_flash", "qwen3_next", "qwen3_5_moe_text"),
        *("gemma4_text", "dots1", "flex_olmo", "hunyuan_v1_moe", "mellum", "solar_open"),
        *("minimax_m2", "nemotron_h", "qwen3_vl_moe_text"),
    }
)
"""Kinds of models whose mixtures of experts have a router at that place."""

_ATTENTION = "self_attn|attn|attention|self_attention|mixer"
_COMPARED = {
    "q": BlockPlace(_ATTENTION, "query"),
    "k": BlockPlace(_ATTENTION, "key"),
    "v": BlockPlace(_ATTENTION, "value"),
}
COMPARING = frozenset(
    {
        *("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt2", "phi3"),
        *("stablelm", "cohere", "glm4", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma", "granite"),
        *("cohere2", "ernie4_5", "exaone4", "nemotron", "olmoe", "afmoe", "apertus", "cohere2_moe"),
        *("ernie4_5_moe", "exaone_moe", "falcon_h1", "gemma4_text", "glm4_moe", "granite_swa"),
        *(
            "gemma3n_text",
            "granitemoe",
            "granitemoe_swa",
            "granitemoehybrid",
            "granitemoeshared",
            "hy_v3",
        ),
        *("hyperclovax", "lfm2", "lfm2_moe", "mimo_v2_flash", "ministral3"),
        *("phimoe", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text", "qwen3_next"),
        *("qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "minimax_m2"),
        "qwen3_vl_moe_text",
    }
)
"""Kinds of models whose attentions are given queries and keys as vLLM's own are. Others scale them
before (OPT), have their numbers in another order (Llama 4), or do not go through that function."""
TURNED = frozenset({"paligemma"})
"""Models with a language model inside whose positions `transformers` counts from 1, and vLLM from
0: its queries and keys are turned by another angle, and their products are the same."""

Places = Mapping[str, BlockPlace]

_STREAM_ONLY: Places = {}
_MIXER = {"attn_in": _into("mixer"), "attn_heads": _HEADS, "attn_out": _out_of("mixer")}
_EXPERTS_AND_MORE = _ONLY_INPUTS | {
    "attn_in": _into("self_attn|mamba"),
    "mlp_in": _out_of("post_attention_layernorm"),
}
_LFM2 = {
    "attn_in": _into("self_attn|conv"),
    "attn_heads": _HEADS,
    "attn_out": _out_of("self_attn|conv"),
    "post_attn": _stream_at("ffn_norm"),
    "mlp_in": _into("feed_forward"),
    "mlp_out": _out_of("feed_forward"),
}
_JAMBA = _LFM2 | {
    "attn_in": _into("self_attn|mamba"),
    "attn_out": _out_of("self_attn|mamba"),
    "post_attn": _stream_at("pre_ff_layernorm"),
}
_LINEAR = _LLAMA | {
    "attn_in": _into("self_attn|linear_attn"),
    "attn_out": _out_of("self_attn|linear_attn"),
}
_ZAMBA2 = {
    "attn_in": _into("mamba|mamba_decoder.mamba"),
    "attn_out": _out_of("mamba|mamba_decoder.mamba"),
}


def _nemotron_h(block: nn.Module) -> Places:
    if block.block_type in ("linear_attention", "full_attention"):
        return _MIXER
    return {"mlp_in": _into("mixer"), "mlp_out": _out_of("mixer")}


def _gemma4(block: nn.Module) -> Places:
    # Beside experts, the MLP is not all that reads the stream.
    return _SANDWICH if not block.enable_moe_block else _without(_SANDWICH, "mlp_in")


def _gemma3n(block: nn.Module) -> Places:
    config: Any = block.config
    active = config.altup_active_idx
    return {
        "pre_attn": BlockPlace("", "input", item=active),
        **_SANDWICH,
        "post_block": BlockPlace("", "output", item=active),
    }


def _olmo_hybrid(block: nn.Module) -> Places:
    return _LINEAR if hasattr(block, "linear_attn") else _POST_NORM


def _falcon(block: nn.Module) -> Places:
    if block.config.new_decoder_architecture or block.config.parallel_attn:
        return _FALCON
    return _ONLY_INPUTS | {"attn_in": _into("self_attention")}


def _gpt_neox(block: nn.Module) -> Places:
    layout = _NO_POST_ATTN if block.use_parallel_residual else _LLAMA
    return layout | {"attn_in": _into("attention"), "attn_out": _out_of("attention")}


PLACES: dict[str, Places | Callable[[nn.Module], Places]] = {
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo", "exaone4"), _POST_NORM),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "phi"), _NO_POST_ATTN),
    **dict.fromkeys(("granite", "granite_swa", "minicpm3", "hyperclovax"), _ONLY_INPUTS),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid"), _EXPERTS_AND_MORE
    ),
    **dict.fromkeys(("jamba", "bamba"), _JAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _MIXER),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "glm4": _LLAMA
    | {"attn_out": _out_of("post_self_attn_layernorm"), "mlp_out": _out_of("post_mlp_layernorm")},
    "opt": _LLAMA
    | {
        "post_attn": _stream_at("final_layer_norm"),
        "mlp_in": _into("fc1"),
        "mlp_out": _out_of("fc2"),
    },
    "falcon": _falcon,
    "gptj": _NO_POST_ATTN | {"attn_in": _into("attn"), "attn_out": _out_of("attn")},
    "gpt_neox": _gpt_neox,
    "bloom": _LLAMA
    | {
        # Hugging Face adds the stream inside these two modules; their last layer is the branch.
        "attn_in": _into("self_attention"),
        "attn_out": _out_of("self_attention.dense"),
        "mlp_out": _out_of("mlp.dense_4h_to_h"),
    },
    "afmoe": _LLAMA
    | {
        "attn_out": _out_of("post_attention_layernorm"),
        "post_attn": _stream_at("pre_mlp_layernorm"),
        "mlp_out": _out_of("post_mlp_layernorm"),
    },
    "apertus": _LLAMA | {"post_attn": _stream_at("feedforward_layernorm")},
    "vaultgemma": _LLAMA | {"post_attn": _stream_at("pre_feedforward_layernorm")},
    "llama4_text": _LLAMA | {"mlp_in": _into("feed_forward"), "mlp_out": _out_of("feed_forward")},
    "longcat_flash": _STREAM_ONLY,
    "dbrx": {
        "attn_in": _into("norm_attn_norm.attn"),
        "attn_heads": _HEADS,
        "attn_out": _out_of("norm_attn_norm.attn"),
        "post_attn": _stream_at("norm_attn_norm.norm_2"),
        "mlp_in": _into("ffn"),
        "mlp_out": _out_of("ffn"),
    },
    "falcon_h1": {
        "attn_heads": _HEADS,
        "post_attn": _stream_at("pre_ff_layernorm"),
        "mlp_in": _into("feed_forward"),
        "mlp_out": _out_of("feed_forward"),
    },
    "nemotron_h": _nemotron_h,
    "zamba2": _ZAMBA2,
    "olmo_hybrid": _olmo_hybrid,
}
"""Those that differ from Llama; `embed`, `pre_attn`, `post_block` and `lm_head_in` are alike
in all that have one stream."""

AS_LLAMA = frozenset(
    {
        *("arcee", "axk1", "bitnet", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1"),
        *("ernie4_5", "ernie4_5_moe", "exaone_moe", "gemma", "glm", "glm4_moe", "glm4_moe_lite"),
        *("gpt_oss", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "laguna"),
        *("llama", "mellum", "mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral"),
        *("mixtral", "nemotron", "olmo", "olmoe", "persimmon", "phi3", "phimoe", "qwen2"),
        *("qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "seed_oss"),
        *("qwen3_vl_moe_text", "smollm3", "solar_open", "stablelm", "starcoder2", "youtu"),
    }
)
"""Those that were seen to be as Llama."""


def is_known(model_type: str) -> bool:
    """Whether this kind of model was looked at. Any other is taken to be as Llama."""
    return model_type in PLACES or model_type in AS_LLAMA


def places_of(model_type: str, block: nn.Module, hidden: int, whole: str) -> Places:
    """Where this block's hook points are, in the order it computes them.

    What the heads give is one only where it is as wide as the stream, `hidden`.

    Args:
        whole: the kind of the model that this language model is a part of.
    """
    listed = PLACES.get(model_type, _LLAMA)
    named = listed(block) if callable(listed) else listed
    everywhere = {"pre_attn": _into(""), **named}
    everywhere["post_block"] = everywhere.pop("post_block", _out_of(""))
    if model_type in ROUTED:
        everywhere["router"] = _ROUTER
    if model_type in COMPARING and whole not in TURNED:
        everywhere |= _COMPARED
    found = {point: place.module(block) for point, place in everywhere.items()}
    return {
        point: everywhere[point]
        for point, module in found.items()
        if module is not None
        and (point != "attn_heads" or _width(module) == hidden)
        and (point not in _COMPARED or 0 < _heads(point, module) <= hidden)
    }


def _heads(point: str, attention: nn.Module) -> int:
    """How many numbers the queries, or keys or values, of all heads have; 0 of another mixer, and
    where keys and values are another layer's."""
    if not type(attention).__name__.endswith("Attention"):
        return 0
    if point != "q" and getattr(attention, "is_kv_shared_layer", False):
        return 0
    config: Any = attention.config
    count = config.num_attention_heads
    if point != "q":
        count = getattr(config, "num_key_value_heads", None) or count
    dim = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(count * dim)


def _width(linear: nn.Module) -> int:
    """How many numbers a linear layer reads."""
    return int(linear.nx if type(linear).__name__ == "Conv1D" else linear.in_features)
