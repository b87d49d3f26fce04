"""vLLM's CPU platform as Ray can place it: devices are what the cluster says it has.

Plain vLLM 0.32 refuses Ray on a CPU, only because its platform names no device to count. This one
is a plugin of vLLM's (`vllm.platform_plugins`), in every process of the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
    ray_noset_device_env_vars: ClassVar = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]


def register() -> str:
    return f"{__name__}.RayCpuPlatform"


def install(folder: Path) -> None:
    """Make the plugin known to processes that have `folder` on their path."""
    info = folder / "ray_platform-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_platform = capture.ray_platform:register\n"
    )
