"""What does not work together with interventions is refused when the engine starts."""

from __future__ import annotations

from typing import Any

from tllm.engine import versions


def check(vllm_config: Any) -> None:
    """Raise `ValueError` for a configuration under which rows could be misread."""
    refusals = []
    if vllm_config.speculative_config is not None:
        refusals.append(
            "speculative decoding (how many drafted tokens are accepted is known on the device "
            "only): leave out speculative_config"
        )
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        refusals.append("dual batch overlap splits a batch in two: leave out enable_dbo")
    context = ("decode_context_parallel_size", "prefill_context_parallel_size")
    for name in context:
        if getattr(parallel, name) > 1:
            refusals.append(f"context parallelism splits a sequence over ranks: set {name}=1")
    if versions.sequence_parallel(vllm_config.compilation_config.pass_config):
        refusals.append(
            "sequence parallelism gives each rank a part of the rows: set "
            "compilation_config.pass_config.enable_sp=False"
        )
    if parallel.use_ray and versions.bypasses_worker(vllm_config):
        refusals.append(
            "vLLM's older Ray executor (it runs the model behind the worker's back): set "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"
        )
    if refusals:
        raise ValueError("tLLM does not run with " + "; nor with ".join(refusals))
