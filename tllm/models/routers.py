"""Finds the router of a mixture of experts: the linear layer that gives each expert a logit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tllm.models.sites import forward_owner

#: By the class whose `forward` is a mixture of experts, or chooses among them: its router. Of these
#: it was read in vLLM, and compared with `transformers`, that experts are chosen by what the router
#: returns.
ROUTERS: Mapping[str, str] = {
    "mixtral.MixtralMoE": "gate",
    "qwen2_moe.Qwen2MoeSparseMoeBlock": "gate",
    "qwen3_moe.Qwen3MoeSparseMoeBlock": "gate",
    "olmoe.OlmoeMoE": "gate",
    "gpt_oss.MLPBlock": "router",
    "deepseek_v2.DeepseekV2MoE": "gate",
    "glm4_moe.Glm4MoE": "gate",
    "granitemoe.GraniteMoeMoE": "gate",
    "phimoe.PhiMoE": "gate",
    "lfm2_moe.Lfm2MoeSparseMoeBlock": "gate",
    "exaone_moe.ExaoneMoe": "gate",
    "hy_v3.HYV3MoEFused": "gate",
    "ernie45_moe.Ernie4_5_MoeMoE": "gate",
    "llama4.Llama4MoE": "router",
    "afmoe.AfmoeMoE": "gate",
    "cohere2_moe.Cohere2Moe": "gate",
    "mimo_v2.MiMoV2MoE": "gate",
    "qwen3_next.Qwen3NextSparseMoeBlock": "gate",
    "gemma4.Gemma4Router": "proj",
    # Through vLLM's Transformers backend.
    "modeling_dots1.Dots1MoE": "gate",
    "modeling_flex_olmo.FlexOlmoSparseMoeBlock": "gate",
    "modeling_hunyuan_v1_moe.HunYuanMoEV1Gate": "wg",
    "modeling_mellum.MellumSparseMoeBlock": "gate",
    "modeling_solar_open.SolarOpenMoE": "gate",
    # Read, and not yet compared: vLLM serves these on GPUs alone.
    "minimax_m2.MiniMaxM2MoE": "gate",
    "nemotron_h.NemotronHMoE": "gate",
}


def find_router(block: nn.Module, hidden: int) -> tuple[str, int]:
    """The path in `block` of its router, and the number of its experts.

    Raises `ValueError` with the reason where there is none, or none that can be tapped.

    Args:
        hidden: the width of the residual stream.
    """
    found = [
        (path, module, ROUTERS[owner])
        for path, module in block.named_modules()
        if (owner := forward_owner(module)) in ROUTERS
    ]
    if not found:
        raise ValueError("it has no mixture of experts, or none whose router is known")
    if len(found) > 1:
        raise ValueError(f"it has {len(found)} mixtures of experts")
    path, mixture, name = found[0]
    router = getattr(mixture, name)
    if not hasattr(router, "output_size"):
        raise ValueError(
            f"its experts are chosen inside its router ({type(router).__name__}), which returns "
            "the logits too late to change that"
        )
    experts = int(router.output_size)  # its weight may be packed, with no shape left
    if experts > hidden:
        raise ValueError(
            f"it has {experts} experts, and what is tapped may not be wider than the residual "
            f"stream, {hidden}"
        )
    if getattr(mixture, "is_sequence_parallel", False):
        raise ValueError("the rows that it routes are divided over tensor parallel ranks")
    if any(getattr(module, "_fse_fuse_gate", False) for module in mixture.modules()):
        raise ValueError("its router is computed together with the gate of its shared experts")
    return f"{path}.{name}".lstrip("."), experts
