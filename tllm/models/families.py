"""The table: where each model family's hook points are. One row a family.

A row names the class whose `forward` runs the blocks, the class whose `forward` is the block, and
the layout of that block: at which submodule's boundary each hook point passes. Rows were written
from, and are tested against, vLLM 0.32 (`tests/oracle`); 0.30 computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tllm.spec.hooks import HookPoint


@dataclass(frozen=True)
class Input:
    """An argument of a submodule of the block, by keyword or by position.

    path: the submodule, "" for the block itself.
    residual, private: as in `Site`.
    is_norm: the submodule is the `norm` of its own site.
    """

    path: str
    stream: int | str = 0
    residual: int | str | None = None
    private: bool = False
    is_norm: bool = False


@dataclass(frozen=True)
class Output:
    """What a submodule of the block returns, or the first item of the tuple it returns.

    path: the submodule, "" for the block itself.
    residual: the item that carries the rest of the stream, where residuals are fused.
    partial: under tensor parallelism each rank holds only a term of the sum.
    next_norm: the submodule of the next block that is the `norm` of the site. After the last block
        it is the stack's final norm.
    """

    path: str
    residual: int | None = None
    partial: bool = False
    next_norm: str | None = None


Layout: TypeAlias = Mapping[HookPoint, Input | Output | str]
"""Where each hook point of a block is, or the reason why the block has no such tensor."""


@dataclass(frozen=True)
class Family:
    """One row.

    stack, block: `module.Class` of the classes that define the two `forward`s.
    layers, norm: the stack's attributes that hold the blocks and the final norm.
    stack_is, block_is: attributes (dotted) and the values they must have for the row to hold.
    """

    name: str
    stack: str
    block: str
    layout: Layout
    layers: str = "layers"
    norm: str = "norm"
    stack_is: Mapping[str, object] = field(default_factory=dict)
    block_is: Mapping[str, object] = field(default_factory=dict)


def _fused(
    *,
    post_attn: str = "post_attention_layernorm",
    mlp: str = "mlp",
    attn_out: str = "self_attn",
    mlp_out: str | None = None,
) -> Layout:
    """A block that carries (branch, residual), whose norms add the one to the other."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states", residual="residual"),
        HookPoint.ATTN_IN: Input("self_attn", "hidden_states"),
        HookPoint.ATTN_OUT: Output(attn_out),
        HookPoint.POST_ATTN: Input(post_attn, 0, residual=1, is_norm=True),
        HookPoint.MLP_IN: Input(mlp),
        HookPoint.MLP_OUT: Output(mlp_out or mlp),
        HookPoint.POST_BLOCK: Output("", residual=1, next_norm="input_layernorm"),
    }


def _sequential(
    *,
    attn: str = "self_attn",
    post_attn: str = "post_attention_layernorm",
    mlp_in: str = "mlp",
    mlp_out: str = "mlp",
) -> Layout:
    """A block that adds each branch to the stream itself, with a norm before each branch."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states"),
        HookPoint.ATTN_IN: Input(attn, "hidden_states"),
        HookPoint.ATTN_OUT: Output(attn),
        HookPoint.POST_ATTN: Input(post_attn),
        HookPoint.MLP_IN: Input(mlp_in),
        HookPoint.MLP_OUT: Output(mlp_out),
        HookPoint.POST_BLOCK: Output(""),
    }


def _parallel(
    *, attn: str = "self_attn", shared_norm: bool = True, partial: bool = False
) -> Layout:
    """A block whose attention and MLP read the same stream, and are added to it together."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states"),
        HookPoint.ATTN_IN: Input(attn, "hidden_states", private=shared_norm),
        HookPoint.ATTN_OUT: Output(attn, partial=partial),
        HookPoint.POST_ATTN: "attention and MLP run in parallel and are added in one step",
        HookPoint.MLP_IN: Input("mlp", private=shared_norm),
        HookPoint.MLP_OUT: Output("mlp", partial=partial),
        HookPoint.POST_BLOCK: Output(""),
    }


def _without_branches(layout: Layout, reason: str) -> Layout:
    """`layout` where neither branch, as it is added to the stream, passes a module's boundary."""
    return {**layout, HookPoint.ATTN_OUT: reason, HookPoint.MLP_OUT: reason}


FUSED = _fused()
# Gemma 2 and 3 norm each branch before it is added.
FUSED_SANDWICH = _fused(
    post_attn="pre_feedforward_layernorm",
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
)
SEQUENTIAL = _sequential()
# OLMo 2 has no norm before a branch: the branch reads the stream itself, and its output is normed.
POST_NORM: Layout = {
    HookPoint.PRE_ATTN: Input("", "hidden_states"),
    HookPoint.ATTN_IN: Input("self_attn", "hidden_states", private=True),
    HookPoint.ATTN_OUT: Output("post_attention_layernorm"),
    HookPoint.POST_ATTN: Input("mlp"),
    HookPoint.MLP_IN: Input("mlp", private=True),
    HookPoint.MLP_OUT: Output("post_feedforward_layernorm"),
    HookPoint.POST_BLOCK: Output(""),
}
_SCALED = (
    "the branch is scaled while it is added to the stream, so the added tensor passes no module"
)
_LATE_BIAS = "the bias is added after the module returns, so the added tensor passes no module"

FAMILIES = (
    Family("llama", "llama.LlamaModel", "llama.LlamaDecoderLayer", FUSED),
    Family("mistral", "mistral.MistralModel", "mistral.MistralDecoderLayer", FUSED),
    Family("qwen2", "qwen2.Qwen2Model", "qwen2.Qwen2DecoderLayer", FUSED),
    Family("qwen3", "qwen2.Qwen2Model", "qwen3.Qwen3DecoderLayer", FUSED),
    Family("qwen3_moe", "qwen3_moe.Qwen3MoeModel", "qwen3_moe.Qwen3MoeDecoderLayer", FUSED),
    Family(
        "mixtral",
        "mixtral.MixtralModel",
        "mixtral.MixtralDecoderLayer",
        _fused(mlp="block_sparse_moe"),
    ),
    Family("olmoe", "olmoe.OlmoeModel", "olmoe.OlmoeDecoderLayer", FUSED),
    Family("nemotron", "nemotron.NemotronModel", "nemotron.NemotronDecoderLayer", FUSED),
    Family("gemma", "gemma.GemmaModel", "gemma.GemmaDecoderLayer", FUSED),
    Family("gemma2", "gemma2.Gemma2Model", "gemma2.Gemma2DecoderLayer", FUSED_SANDWICH),
    Family("gemma3", "gemma3.Gemma3Model", "gemma3.Gemma3DecoderLayer", FUSED_SANDWICH),
    Family(
        "glm4",
        "llama.LlamaModel",
        "glm4.Glm4DecoderLayer",
        _fused(attn_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
    ),
    Family("stablelm", "stablelm.StableLMEpochModel", "stablelm.StablelmDecoderLayer", SEQUENTIAL),
    Family(
        "granite",
        "granite.GraniteModel",
        "granite.GraniteDecoderLayer",
        _without_branches(SEQUENTIAL, _SCALED),
    ),
    Family(
        "gpt2",
        "gpt2.GPT2Model",
        "gpt2.GPT2Block",
        _sequential(attn="attn", post_attn="ln_2"),
        layers="h",
        norm="ln_f",
    ),
    Family(
        "opt",
        "opt.OPTDecoder",
        "opt.OPTDecoderLayer",
        _sequential(post_attn="final_layer_norm", mlp_in="fc1", mlp_out="fc2"),
        norm="final_layer_norm",
        stack_is={"project_out": None},
        block_is={"do_layer_norm_before": True},
    ),
    Family(
        "bloom",
        "bloom.BloomModel",
        "bloom.BloomBlock",
        _sequential(attn="self_attention"),
        layers="h",
        norm="ln_f",
        block_is={"apply_residual_connection_post_layernorm": False},
    ),
    Family("exaone4", "exaone4.Exaone4Model", "exaone4.Exaone4DecoderLayer", POST_NORM),
    # Cohere reduces both branches across ranks in one go, as do the parallel Falcons.
    Family(
        "cohere", "commandr.CohereModel", "commandr.CohereDecoderLayer", _parallel(partial=True)
    ),
    Family(
        "gptj",
        "gpt_j.GPTJModel",
        "gpt_j.GPTJBlock",
        _parallel(attn="attn"),
        layers="h",
        norm="ln_f",
    ),
    Family(
        "falcon",
        "falcon.FalconModel",
        "falcon.FalconDecoderLayer",
        _parallel(attn="self_attention", shared_norm=False, partial=True),
        layers="h",
        norm="ln_f",
        block_is={
            "config.parallel_attn": True,
            "config.num_ln_in_parallel_attn": 2,
            "config.bias": False,
        },
    ),
    Family(
        "falcon, one norm a block",
        "falcon.FalconModel",
        "falcon.FalconDecoderLayer",
        _parallel(attn="self_attention", partial=True),
        layers="h",
        norm="ln_f",
        block_is={
            "config.parallel_attn": True,
            "config.num_ln_in_parallel_attn": 1,
            "config.bias": False,
        },
    ),
    Family(
        "falcon, first architecture",
        "falcon.FalconModel",
        "falcon.FalconDecoderLayer",
        _parallel(attn="self_attention", partial=True),
        layers="h",
        norm="ln_f",
        block_is={
            "config.parallel_attn": True,
            "config.num_ln_in_parallel_attn": None,
            "config.bias": False,
        },
    ),
    Family(
        "falcon, sequential",
        "falcon.FalconModel",
        "falcon.FalconDecoderLayer",
        _without_branches(_sequential(attn="self_attention"), _LATE_BIAS),
        layers="h",
        norm="ln_f",
        block_is={"config.new_decoder_architecture": False, "config.parallel_attn": False},
    ),
    # vLLM's own until 0.30, through its Transformers backend since.
    Family("phi", "phi.PhiModel", "phi.PhiLayer", _parallel(), norm="final_layernorm"),
    # Through vLLM's Transformers backend: Hugging Face's own modules.
    Family("olmo", "modeling_olmo.OlmoModel", "modeling_olmo.OlmoDecoderLayer", SEQUENTIAL),
    Family("olmo2", "modeling_olmo2.Olmo2Model", "modeling_olmo2.Olmo2DecoderLayer", POST_NORM),
    Family("olmo3", "modeling_olmo3.Olmo3Model", "modeling_olmo3.Olmo3DecoderLayer", POST_NORM),
    Family(
        "phi",
        "modeling_phi.PhiModel",
        "modeling_phi.PhiDecoderLayer",
        _parallel(),
        norm="final_layernorm",
    ),
    Family(
        "starcoder2",
        "modeling_starcoder2.Starcoder2Model",
        "modeling_starcoder2.Starcoder2DecoderLayer",
        SEQUENTIAL,
    ),
    Family(
        "smollm3",
        "modeling_smollm3.SmolLM3Model",
        "modeling_smollm3.SmolLM3DecoderLayer",
        SEQUENTIAL,
    ),
    Family(
        "seed_oss",
        "modeling_seed_oss.SeedOssModel",
        "modeling_seed_oss.SeedOssDecoderLayer",
        SEQUENTIAL,
    ),
    Family("arcee", "modeling_arcee.ArceeModel", "modeling_arcee.ArceeDecoderLayer", SEQUENTIAL),
    Family(
        "hunyuan_v1_dense",
        "modeling_hunyuan_v1_dense.HunYuanDenseV1Model",
        "modeling_hunyuan_v1_dense.HunYuanDenseV1DecoderLayer",
        SEQUENTIAL,
    ),
)
