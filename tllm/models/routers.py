"""Finds the router of a mixture of experts: the linear layer that gives each expert a logit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

#: By the class whose `forward` is a mixture of experts: its router. Of these it was read in vLLM,
#: and compared with `transformers`, that experts are chosen by what the router returns.
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
        if (owner := _forward_owner(module)) in ROUTERS
    ]
    if not found:
        raise ValueError("it has no mixture of experts, or none whose router is known")
    if len(found) > 1:
        raise ValueError(f"it has {len(found)} mixtures of experts")
    path, mixture, name = found[0]
    router = getattr(mixture, name)
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


def _forward_owner(module: nn.Module) -> str:
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return f"{owner.__module__.rpartition('.')[2]}.{owner.__qualname__}"
