"""How an engine's model is spread over GPUs."""

from __future__ import annotations

from typing import Any

# FlashInfer's fusion of sums over ranks with norms uses NVLink multicast where the machine has it,
# which a rented machine may forbid; not with VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm.
_SUMS_ALONE = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2, **_SUMS_ALONE},
    "tp2-fused": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True, **_SUMS_ALONE},
}
"""Arguments of an engine, by the name of the layout: one GPU, two tensor-parallel ranks, the same
with vLLM's own fusion of their sums with norms, two pipeline stages, two replicas, and two
tensor-parallel ranks of which each has half of the experts."""
