"""The table: where each model family's hook points are. One row a family, or a kind of its blocks.

A row names the class whose `forward` runs the blocks, the class whose `forward` is the block, and
the layout of that block: at which submodule's boundary each hook point passes. Rows were written
from, and are tested against, vLLM 0.32 (`tests/oracle`); 0.30 computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tllm.spec.hooks import HEAD_POINTS, HookPoint


@dataclass(frozen=True)
class Input:
    """An argument of a submodule of the block, by keyword or by position.

    path: the submodule, "" for the block itself.
    residual, private, width: as in `Site`.
    is_norm: the submodule is the `norm` of its own site.
    active: the attribute of the block that is the `item` of the site.
    """

    path: str
    stream: int | str = 0
    residual: int | str | None = None
    private: bool = False
    is_norm: bool = False
    width: int | None = None
    active: str | None = None


@dataclass(frozen=True)
class Output:
    """What a submodule of the block returns, or the first item of the tuple it returns.

    path: the submodule, "" for the block itself.
    residual: the item that carries the rest of the stream, where residuals are fused.
    partial: under tensor parallelism each rank holds only a term of the sum.
    next_norm: the submodule of the next block that is the `norm` of the site. After the last block
        it is the stack's final norm.
    width: as in `Site`.
    active: as in `Input`.
    """

    path: str
    residual: int | None = None
    partial: bool = False
    next_norm: str | None = None
    width: int | None = None
    active: str | None = None


@dataclass(frozen=True)
class Heads:
    """What the output projection of an attention reads. What its kernel reads is found with it.

    path: a submodule of the block that holds all three.
    """

    path: str


@dataclass(frozen=True)
class Written:
    """An argument that a submodule of the block writes its result into.

    stream: the argument's name.
    """

    path: str
    stream: str = "output"


Layout: TypeAlias = Mapping[HookPoint, Input | Output | Written | Heads | str]
"""Where each hook point of a block is, or the reason why the block has no such tensor."""


@dataclass(frozen=True)
class Family:
    """One row.

    stack, block: the classes that define the two `forward`s, as `forward_owner` writes them.
    layers, norm: the stack's attributes (dotted) that hold the blocks and the final norm; `norm`
        None where no module gives, once in a forward pass, what the LM head reads.
    stack_is, block_is: attributes (dotted) and the values they must have for the row to hold; a
        tuple holds those that they may have.
    linked: what leaves a block enters the next one unchanged.
    norm_adds: the final norm adds what the last block returns, where residuals are fused.
    one_stream: as in `ModelPoints`.
    """

    name: str
    stack: str
    block: str
    layout: Layout
    layers: str = "layers"
    norm: str | None = "norm"
    stack_is: Mapping[str, object] = field(default_factory=dict)
    block_is: Mapping[str, object] = field(default_factory=dict)
    linked: bool = True
    norm_adds: bool = True
    one_stream: bool = True


_BLOCK_POINTS = tuple(point for point in HookPoint if point.has_layer)
_BRANCH_POINTS = {
    "attention": (HookPoint.ATTN_IN, *HEAD_POINTS, HookPoint.ATTN_OUT),
    "MLP": (HookPoint.MLP_IN, HookPoint.MLP_OUT),
}


def _fused(
    *,
    first_norm: str | None = "input_layernorm",
    attn: str = "self_attn",
    post_attn: str = "post_attention_layernorm",
    mlp: str = "mlp",
    attn_out: str | Input | None = None,
    mlp_out: str | None = None,
) -> Layout:
    """A block that carries (branch, residual), whose norms add the one to the other."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states", residual="residual"),
        HookPoint.ATTN_IN: Input(attn, "hidden_states"),
        HookPoint.ATTN_HEADS: Heads(attn),
        HookPoint.ATTN_OUT: attn_out if isinstance(attn_out, Input) else Output(attn_out or attn),
        HookPoint.POST_ATTN: Input(post_attn, 0, residual=1, is_norm=True),
        HookPoint.MLP_IN: Input(mlp),
        HookPoint.MLP_OUT: Output(mlp if mlp_out is None else mlp_out),
        HookPoint.POST_BLOCK: Output("", residual=1, next_norm=first_norm),
    }


def _sequential(
    *,
    attn: str = "self_attn",
    attn_out: str | None = None,
    post_attn: str = "post_attention_layernorm",
    mlp_in: str = "mlp",
    mlp_out: str | None = None,
) -> Layout:
    """A block that adds each branch to the stream itself, with a norm before each branch."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states"),
        HookPoint.ATTN_IN: Input(attn, "hidden_states"),
        HookPoint.ATTN_HEADS: Heads(attn),
        HookPoint.ATTN_OUT: Output(attn_out or attn),
        HookPoint.POST_ATTN: Input(post_attn),
        HookPoint.MLP_IN: Input(mlp_in),
        HookPoint.MLP_OUT: Output(mlp_out or mlp_in),
        HookPoint.POST_BLOCK: Output(""),
    }


def _parallel(
    *, attn: str = "self_attn", shared_norm: bool = True, partial: bool = False
) -> Layout:
    """A block whose attention and MLP read the same stream, and are added to it together."""
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states"),
        HookPoint.ATTN_IN: Input(attn, "hidden_states", private=shared_norm),
        HookPoint.ATTN_HEADS: Heads(attn),
        HookPoint.ATTN_OUT: Output(attn, partial=partial),
        HookPoint.POST_ATTN: "attention and MLP run in parallel and are added in one step",
        HookPoint.MLP_IN: Input("mlp", private=shared_norm),
        HookPoint.MLP_OUT: Output("mlp", partial=partial),
        HookPoint.POST_BLOCK: Output(""),
    }


def _one_mixer(
    kind: str,
    *,
    mixer: str = "mixer",
    out: Written | None = None,
    norm: str | None = "norm",
    fused: bool = True,
) -> Layout:
    """A block with one branch only, of this kind: attention (or what mixes tokens like it), or MLP.

    norm: the block's own, that adds branch and residual where these are fused.
    """
    other = "MLP" if kind == "attention" else "attention"
    reason = f"its one branch is of the kind {kind}, and it has no other"
    branch_in, *_, branch_out = _BRANCH_POINTS[kind]
    residual = ("residual", 1) if fused else (None, None)
    return {
        HookPoint.PRE_ATTN: Input("", "hidden_states", residual=residual[0]),
        branch_in: Input(mixer),
        branch_out: out or Output(mixer),
        HookPoint.ATTN_HEADS: Heads(mixer),
        **dict.fromkeys(_BRANCH_POINTS[other], reason),
        HookPoint.POST_ATTN: f"{reason}: the stream after it is post_block",
        HookPoint.POST_BLOCK: Output("", residual=residual[1], next_norm=norm if fused else None),
    }


def _without(layout: Layout, reason: str, *points: HookPoint) -> Layout:
    """`layout` where these tensors pass no module's boundary."""
    return {**layout, **dict.fromkeys(points, reason)}


def _without_branches(layout: Layout, reason: str) -> Layout:
    """`layout` where neither branch, as it is added to the stream, passes a module's boundary."""
    return _without(layout, reason, HookPoint.ATTN_OUT, HookPoint.MLP_OUT)


def _refused(reason: str) -> Layout:
    return dict.fromkeys(_BLOCK_POINTS, reason)


FUSED = _fused()
# Gemma 2 and 3 norm each branch before it is added.
FUSED_SANDWICH = _fused(
    post_attn="pre_feedforward_layernorm",
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
)
# AFMoE and openPangu do so too, under other names.
FUSED_MLP_SANDWICH = _fused(
    attn_out="post_attention_layernorm",
    post_attn="pre_mlp_layernorm",
    mlp_out="post_mlp_layernorm",
)
SEQUENTIAL = _sequential()
# OLMo 2 has no norm before a branch: the branch reads the stream itself, and its output is normed.
POST_NORM: Layout = {
    HookPoint.PRE_ATTN: Input("", "hidden_states"),
    HookPoint.ATTN_IN: Input("self_attn", "hidden_states", private=True),
    HookPoint.ATTN_HEADS: Heads("self_attn"),
    HookPoint.ATTN_OUT: Output("post_attention_layernorm"),
    HookPoint.POST_ATTN: Input("mlp"),
    HookPoint.MLP_IN: Input("mlp", private=True),
    HookPoint.MLP_OUT: Output("post_feedforward_layernorm"),
    HookPoint.POST_BLOCK: Output(""),
}
# Its norms are between the branch and the sum, as in OLMo 2, and before the branch, too.
SEQUENTIAL_SANDWICH = _sequential(
    attn_out="post_attention_layernorm",
    post_attn="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
# Gemma 3n carries several streams. Its blocks compute with the active one, and mix it into the
# others before and after.
ALTERNATING: Layout = {
    **SEQUENTIAL_SANDWICH,
    HookPoint.PRE_ATTN: Input("", "hidden_states", active="altup_active_idx"),
    HookPoint.POST_BLOCK: Output("", active="altup_active_idx"),
}
# Whatever is done to the attention branch, the next norm gets it as it is added.
_ADDED = Input("post_attention_layernorm", 0)
_SCALED = (
    "the branch is scaled while it is added to the stream, so the added tensor passes no module"
)
_LATE_BIAS = "the bias is added after the module returns, so the added tensor passes no module"
_TWO_MIXERS = "the block has two mixers side by side, scaled and added in one step"
_TWO_PAIRS = "the block has two pairs of attention and MLP, and a mixture of experts across them"
_TWO_MLPS = "the MLP and the experts read different tensors"
SCALED = _without_branches(SEQUENTIAL, _SCALED)
# Experts, and what may stand beside them, read what the norm returns.
SCALED_EXPERTS: Layout = {**SCALED, HookPoint.MLP_IN: Output("post_attention_layernorm")}
# An encoder: bidirectional, with a norm after each sum, which is the stream then.
BERT: Layout = {
    HookPoint.PRE_ATTN: Input("", "hidden_states"),
    HookPoint.ATTN_IN: Input("attention.self", "hidden_states", private=True),
    HookPoint.ATTN_HEADS: Heads("attention"),
    HookPoint.ATTN_OUT: Output("attention.output.dense"),
    HookPoint.POST_ATTN: Output("attention"),
    HookPoint.MLP_IN: Input("intermediate", "hidden_states", private=True),
    HookPoint.MLP_OUT: Output("output.dense"),
    HookPoint.POST_BLOCK: Output(""),
}
PARALLEL_HYBRID = _without(
    _sequential(post_attn="pre_ff_layernorm", mlp_in="feed_forward"),
    _TWO_MIXERS,
    HookPoint.ATTN_IN,
    HookPoint.ATTN_OUT,
)
# vLLM scales the stream in float16 to keep it in range, and shards its rows over experts.
_UNSCALED = {"input_layernorm.weight.dtype": (torch.bfloat16, torch.float32)}
_NOT_SHARDED = {"use_sequence_parallel_moe": False}
_DEEPSEEK_IS = {**_UNSCALED, **_NOT_SHARDED}
_PARTIAL_SUMS = (
    "its blocks hand over sums that tensor parallel ranks have yet to add up, and its norms add "
    "them without passing a module's boundary"
)
_STREAMS = "it keeps several residual streams, and no one of them is the residual stream"
_LOOPS = "it runs the same blocks several times in one forward pass"


_GPT = {"layers": "h", "norm": "ln_f"}


def _of(
    module: str,
    prefix: str,
    layout: Layout = FUSED,
    *,
    name: str | None = None,
    stack: str = "Model",
    block: str = "DecoderLayer",
    **given: Any,
) -> Family:
    """A row whose classes are in one module, and begin alike. `modeling_` ones are Hugging Face's
    own, through vLLM's Transformers backend."""
    name = name or module.removeprefix("modeling_")
    return Family(name, f"{module}.{prefix}{stack}", f"{module}.{prefix}{block}", layout, **given)


FAMILIES = (
    _of("llama", "Llama"),
    _of("mistral", "Mistral"),
    _of("qwen2", "Qwen2"),
    Family("qwen3", "qwen2.Qwen2Model", "qwen3.Qwen3DecoderLayer", FUSED),
    _of("qwen3_moe", "Qwen3Moe"),
    _of("mixtral", "Mixtral", _fused(mlp="block_sparse_moe")),
    _of("olmoe", "Olmoe"),
    _of("nemotron", "Nemotron"),
    _of("gemma", "Gemma"),
    _of("gemma2", "Gemma2", FUSED_SANDWICH),
    _of("gemma3", "Gemma3", FUSED_SANDWICH),
    Family(
        "glm4",
        "llama.LlamaModel",
        "glm4.Glm4DecoderLayer",
        _fused(attn_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
    ),
    Family("stablelm", "stablelm.StableLMEpochModel", "stablelm.StablelmDecoderLayer", SEQUENTIAL),
    _of("granite", "Granite", SCALED),
    _of("gpt2", "GPT2", _sequential(attn="attn", post_attn="ln_2"), **_GPT, block="Block"),
    _of(
        "opt",
        "OPT",
        _sequential(post_attn="final_layer_norm", mlp_in="fc1", mlp_out="fc2"),
        norm="final_layer_norm",
        stack_is={"project_out": None},
        block_is={"do_layer_norm_before": True},
        stack="Decoder",
    ),
    _of(
        "bloom",
        "Bloom",
        _sequential(attn="self_attention"),
        **_GPT,
        block_is={"apply_residual_connection_post_layernorm": False},
        block="Block",
    ),
    _of("exaone4", "Exaone4", POST_NORM),
    # Cohere reduces both branches across ranks in one go, as do the parallel Falcons.
    _of("commandr", "Cohere", _parallel(partial=True), name="cohere"),
    _of("gpt_j", "GPTJ", _parallel(attn="attn"), **_GPT, name="gptj", block="Block"),
    *(
        _of(
            "falcon",
            "Falcon",
            _parallel(attn="self_attention", shared_norm=norms != 2, partial=True),
            name=name,
            **_GPT,
            block_is={
                "config.parallel_attn": True,
                "config.num_ln_in_parallel_attn": norms,
                "config.bias": False,
            },
        )
        for name, norms in (
            ("falcon", 2),
            ("falcon, one norm a block", 1),
            ("falcon, first architecture", None),
        )
    ),
    _of(
        "falcon",
        "Falcon",
        _without_branches(_sequential(attn="self_attention"), _LATE_BIAS),
        **_GPT,
        block_is={"config.new_decoder_architecture": False, "config.parallel_attn": False},
        name="falcon, sequential",
    ),
    # vLLM's own until 0.30, through its Transformers backend since.
    _of("phi", "Phi", _parallel(), norm="final_layernorm", block="Layer"),
    # Fused residuals under other names.
    Family("gpt_oss", "gpt_oss.GptOssModel", "gpt_oss.TransformerBlock", _fused(attn="attn")),
    Family("llama4", "llama.LlamaModel", "llama4.Llama4DecoderLayer", _fused(mlp="feed_forward")),
    _of(
        "apertus",
        "Apertus",
        _fused(first_norm="attention_layernorm", post_attn="feedforward_layernorm"),
    ),
    _of("afmoe", "Afmoe", FUSED_MLP_SANDWICH),
    _of("bailing_moe", "BailingMoe", _fused(attn="attention"), block="Block"),
    _of("exaone", "Exaone", _fused(first_norm="ln_1", attn="attn", post_attn="ln_2"), **_GPT),
    _of("rnj1", "Rnj1", FUSED_SANDWICH),
    _of(
        "internlm2",
        "InternLM",
        _fused(
            first_norm="attention_norm", attn="attention", post_attn="ffn_norm", mlp="feed_forward"
        ),
        stack="2Model",
    ),
    _of("minimax_m2", "MiniMaxM2", _fused(mlp="block_sparse_moe")),
    _of(
        "plamo3",
        "Plamo3",
        _fused(
            first_norm="pre_mixer_norm",
            attn="mixer",
            attn_out="post_mixer_norm",
            post_attn="pre_mlp_norm",
            mlp_out="post_mlp_norm",
        ),
        layers="layers.layers",
    ),
    _of("hy_v3", "HYV3", norm_adds=False),
    # Its final norm is called later, with the rows that are sampled from.
    Family("mimo", "mimo.MiMoModel", "qwen2.Qwen2DecoderLayer", FUSED, norm=None),
    # Streams of two blocks back are mixed in between some blocks.
    _of("solar", "Solar", linked=False),
    # As are the features of an image, in Qwen 3 VL.
    Family("qwen3_vl", "qwen3_vl.Qwen3LLMModel", "qwen3.Qwen3DecoderLayer", FUSED, linked=False),
    Family(
        "qwen3_vl_moe",
        "qwen3_vl_moe.Qwen3MoeLLMModel",
        "qwen3_moe.Qwen3MoeDecoderLayer",
        FUSED,
        linked=False,
    ),
    *(
        _of(
            "step3_text",
            "Step3Text",
            {**_fused(mlp_out=""), HookPoint.MLP_IN: mlp_in},
            block_is={"use_moe": use_moe},
        )
        for use_moe, mlp_in in ((False, Input("mlp")), (True, Output("post_attention_layernorm")))
    ),
    # Latent attention, first layers without experts.
    _of("deepseek_v2", "DeepseekV2", block_is=_DEEPSEEK_IS),
    _of("AXK1", "AXK1", _fused(mlp_out=""), block_is=_UNSCALED),
    _of("glm4_moe_lite", "Glm4MoeLite"),
    *(
        _of("openpangu", "OpenPangu", layout, block_is={"sandwich_norm": sandwich, **_UNSCALED})
        for sandwich, layout in ((False, FUSED), (True, FUSED_MLP_SANDWICH))
    ),
    # Layers of several kinds. A state-space or linear mixer stands where attention stands.
    *(
        _of(
            "qwen3_next",
            "Qwen3Next",
            _fused(attn=attn, attn_out=_ADDED, mlp_out=""),
            stack_is={"use_sequence_parallel": False},
            block_is={"layer_type": kind, "use_attn_reduce_scatter_for_moe": False},
        )
        for kind, attn in (("linear_attention", "linear_attn"), ("full_attention", "self_attn"))
    ),
    *(
        _of(
            "jamba",
            "Jamba",
            {
                **_fused(post_attn="pre_ff_layernorm", mlp="feed_forward"),
                HookPoint.ATTN_IN: Output("input_layernorm"),
                HookPoint.ATTN_HEADS: Heads(""),
                HookPoint.ATTN_OUT: Input("pre_ff_layernorm", 0),
            },
            norm="final_layernorm",
            block=f"{kind}DecoderLayer",
        )
        for kind in ("Mamba", "Attention")
    ),
    *(
        _of(
            name,
            prefix,
            _fused(
                first_norm="operator_norm",
                attn=attn,
                attn_out=Input("ffn_norm", 0),
                post_attn="ffn_norm",
                mlp="feed_forward",
            ),
            norm="embedding_norm",
            block=f"{kind}DecoderLayer",
        )
        for name, prefix in (("lfm2", "Lfm2"), ("lfm2_moe", "Lfm2Moe"))
        for kind, attn in (("Attention", "self_attn"), ("ShortConv", "short_conv"))
    ),
    *(
        _of(module, f"BailingMoe{kind}", _fused(attn_out=_ADDED), name=f"bailing_moe {kind}")
        for kind, module in (("V25", "bailing_moe_linear"), ("V3", "bailing_moe_v3"))
    ),
    *(
        _of(
            "nemotron_h",
            "NemotronH",
            _one_mixer(branch),
            norm="norm_f",
            block=f"{kind}DecoderLayer",
        )
        for branch, kinds in (("attention", ("Mamba", "Attention")), ("MLP", ("MLP", "MoE")))
        for kind in kinds
    ),
    _of("mamba2", "Mamba2", _one_mixer("attention"), norm="norm_f"),
    _of("mamba", "Mamba", _one_mixer("attention", out=Written("mixer")), norm="norm_f"),
    *(
        _of(
            "zamba2",
            "Zamba2",
            _one_mixer("attention", mixer=mixer, fused=False),
            norm="final_layernorm",
            block=block,
        )
        for block, mixer in (("MambaDecoderLayer", "mamba"), ("HybridLayer", "mamba_decoder.mamba"))
    ),
    *(
        _of(
            "nemotron_nas",
            "Deci",
            layout,
            block_is={"_is_no_op_attention": no_attention, "_is_no_op_ffn": no_mlp},
            block="LMDecoderLayer",
        )
        for no_attention, no_mlp, layout in (
            (False, False, _fused(first_norm=None)),
            (True, False, _one_mixer("MLP", mixer="mlp", norm=None)),
            (False, True, _one_mixer("attention", mixer="self_attn", norm=None)),
        )
    ),
    *(
        _of(
            "granitemoehybrid",
            "GraniteMoeHybrid",
            {**SCALED_EXPERTS, HookPoint.ATTN_IN: attn_in},
            block=f"{kind}DecoderLayer",
        )
        for kind, attn_in in (
            ("Mamba", Input("mamba")),
            ("Attention", Input("self_attn", "hidden_states")),
        )
    ),
    _of("falcon_h1", "FalconH1", PARALLEL_HYBRID, norm="final_layernorm", block="ParallelHybrid"),
    _of(
        "olmo_hybrid",
        "OlmoHybrid",
        {**_sequential(attn="linear_attn"), HookPoint.ATTN_OUT: Written("linear_attn")},
        block_is={"layer_type": "linear_attention"},
    ),
    _of("olmo_hybrid", "OlmoHybrid", POST_NORM, block_is={"layer_type": "full_attention"}),
    # Sequential.
    _of("orion", "Orion", SEQUENTIAL),
    _of("phimoe", "PhiMoE", _sequential(mlp_in="block_sparse_moe")),
    _of("muse_glimmer", "MuseGlimmer", SEQUENTIAL_SANDWICH),
    _of(
        "chatglm",
        "GLM",
        _sequential(attn="self_attention"),
        norm="final_layernorm",
        stack_is={"post_layer_norm": True},
        block_is={"apply_residual_connection_post_layernorm": False},
        stack="Transformer",
        block="Block",
    ),
    _of(
        "dbrx",
        "Dbrx",
        _sequential(attn="norm_attn_norm.attn", post_attn="norm_attn_norm.norm_2", mlp_in="ffn"),
        layers="blocks",
        norm="norm_f",
        block="Block",
    ),
    *(
        _of("step3p5", "Step3p5", _sequential(mlp_in=mlp), norm=None, block_is={"use_moe": use_moe})
        for use_moe, mlp in ((False, "mlp"), (True, "moe"))
    ),
    *(
        _of(
            "gemma4",
            "Gemma4",
            layout,
            stack_is={"fast_prefill_enabled": False},
            block_is={"enable_moe_block": has_experts},
        )
        for has_experts, layout in (
            (False, SEQUENTIAL_SANDWICH),
            (True, _without(SEQUENTIAL_SANDWICH, _TWO_MLPS, HookPoint.MLP_IN)),
        )
    ),
    _of(
        "gemma3n",
        "Gemma3n",
        ALTERNATING,
        stack_is={"fast_prefill_enabled": False},
        one_stream=False,
        stack="TextModel",
    ),
    # What leaves its final norm is divided before the LM head reads it.
    _of("minicpm", "MiniCPM", SCALED, norm=None),
    _of("hyperclovax", "HyperCLOVAX", SCALED),
    _of("granitemoe", "GraniteMoe", SCALED_EXPERTS),
    _of("granitemoeshared", "GraniteMoeShared", SCALED_EXPERTS),
    _of("cohere2_moe", "Cohere2Moe", _parallel()),
    _of(
        "longcat_flash",
        "Flash",
        _without(
            _fused(first_norm=None),
            _TWO_PAIRS,
            *_BRANCH_POINTS["attention"],
            HookPoint.POST_ATTN,
            *_BRANCH_POINTS["MLP"],
        ),
    ),
    # BERT and RoBERTa, which have no LM head where they embed or classify.
    _of("bert", "Bert", BERT, layers="layer", norm=None, stack="Encoder", block="Layer"),
    # Understood, and without a residual stream that can be tapped.
    *(
        Family(stack.partition(".")[0], stack, block, _refused(reason), norm=None)
        for stack, block, reason in (
            ("hrm_text.HrmTextStack", "hrm_text.HrmTextDecoderLayer", _LOOPS),
            (
                "iquest_loopcoder.IQuestLoopCoderModel",
                "iquest_loopcoder.LoopCoderDecoderLayer",
                _LOOPS,
            ),
        )
    ),
    # These are in vLLM's new place of models, each in a file of this name.
    *(
        _of("model", prefix, _refused(reason), name=name, norm=None)
        for name, prefix, reason in (
            ("deepseek_v32", "DeepseekV32", _PARTIAL_SUMS),
            ("minimax_m3", "MiniMaxM3", _PARTIAL_SUMS),
            ("deepseek_v4", "DeepseekV4", _STREAMS),
            ("qwen4_exp", "Qwen4Exp", _STREAMS),
            ("glm5next", "Glm5Next", _STREAMS),
            ("hy_v4", "HYV4", _STREAMS),
            ("inkling", "Inkling", "short convolutions stand in its residual stream"),
        )
    ),
    # Through vLLM's Transformers backend.
    *(
        _of(f"modeling_{name}", prefix, SEQUENTIAL)
        for name, prefix in (
            *(("arcee", "Arcee"), ("bitnet", "BitNet"), ("cwm", "Cwm"), ("diffllama", "DiffLlama")),
            *(("dots1", "Dots1"), ("glm", "Glm"), ("helium", "Helium")),
            *(("hunyuan_v1_dense", "HunYuanDenseV1"), ("hunyuan_v1_moe", "HunYuanMoEV1")),
            *(
                ("jais2", "Jais2"),
                ("mellum", "Mellum"),
                ("ministral", "Ministral"),
                ("olmo", "Olmo"),
            ),
            *(("seed_oss", "SeedOss"), ("smollm3", "SmolLM3"), ("solar_open", "SolarOpen")),
            *(("starcoder2", "Starcoder2"), ("youtu", "Youtu")),
        )
    ),
    *(
        _of(f"modeling_{name}", prefix, POST_NORM)
        for name, prefix in (("olmo2", "Olmo2"), ("olmo3", "Olmo3"), ("flex_olmo", "FlexOlmo"))
    ),
    _of("modeling_persimmon", "Persimmon", SEQUENTIAL, norm="final_layernorm"),
    _of("modeling_phi", "Phi", _parallel(), norm="final_layernorm"),
    _of("modeling_vaultgemma", "VaultGemma", _sequential(post_attn="pre_feedforward_layernorm")),
    _of(
        "modeling_gpt_bigcode",
        "GPTBigCode",
        _sequential(attn="attn", post_attn="ln_2"),
        **_GPT,
        block="Block",
    ),
    *(
        _of(
            "modeling_gpt_neox",
            "GPTNeoX",
            layout,
            norm="final_layer_norm",
            block_is={"use_parallel_residual": parallel},
            block="Layer",
        )
        for parallel, layout in (
            (True, _parallel(attn="attention", shared_norm=False)),
            (False, _sequential(attn="attention")),
        )
    ),
)
