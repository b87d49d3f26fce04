"""What the engine is started with, and how the workers are told, through vLLM's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from tllm.runtime.ring import Overflow
from tllm.spec.hooks import HookPoint

CONFIG_KEY = "tllm"
"""Key of `VllmConfig.additional_config` under which the options travel."""

DEFAULT_HOOK_POINTS = ("pre_attn", "post_block", "lm_head_in")


@dataclass(frozen=True)
class EngineOptions:
    """Options of tLLM that are fixed when the engine starts.

    Attributes:
        hook_points: the points that get a tap in every layer, or `"all"`. A tap that nobody uses
            costs at most one empty kernel launch (see `fuse_norms`); a point without a tap cannot
            be used later.
        capture_mib: memory the capture ring begins with, in MiB.
        max_capture_mib: the most it grows to.
        overflow: what happens when consumers are slower than the model and the ring is full:
            `block` waits for them, `drop` gives up rows and counts them.
        max_steering_configs: how many distinct ways of steering run at once; requests that would
            need more wait. 0 turns steering off.
        max_steering_mib: the most memory that steering vectors take on the device, in MiB.
        fuse_norms: whether a tap before an RMSNorm is computed together with it, by one kernel of
            ours. It sums squares in another order than vLLM's: of half a million normed values in
            bfloat16 one or none was seen to differ, by a rounding.
    """

    hook_points: tuple[str, ...] | str = DEFAULT_HOOK_POINTS
    capture_mib: int = 64
    max_capture_mib: int = 2048
    overflow: Overflow = "block"
    max_steering_configs: int = 512
    max_steering_mib: int = 1024
    fuse_norms: bool = True

    def __post_init__(self) -> None:
        if self.hook_points != "all":
            given = (self.hook_points,) if isinstance(self.hook_points, str) else self.hook_points
            points = tuple(HookPoint.parse(name).value for name in given)
            object.__setattr__(self, "hook_points", points)
        if self.overflow not in get_args(Overflow):
            raise ValueError(
                f"overflow={self.overflow!r} is not known; choose one of "
                f"{', '.join(get_args(Overflow))}"
            )
        if not isinstance(self.fuse_norms, bool):
            raise ValueError(f"fuse_norms={self.fuse_norms!r} must be True or False")
        for name in ("capture_mib", "max_capture_mib", "max_steering_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.max_steering_configs < 0:
            raise ValueError(
                f"max_steering_configs={self.max_steering_configs} must be 0 (no steering) or more"
            )

    @property
    def points(self) -> tuple[HookPoint, ...]:
        """The hook points to install."""
        if self.hook_points == "all":
            return tuple(HookPoint)
        return tuple(HookPoint(name) for name in self.hook_points)

    def to_config(self) -> dict[str, Any]:
        """As plain data, for `additional_config`."""
        return asdict(self)

    @classmethod
    def from_config(cls, additional_config: Any) -> EngineOptions:
        """The options in a `VllmConfig`; the defaults when there are none."""
        config = additional_config if isinstance(additional_config, Mapping) else {}
        given = dict(config.get(CONFIG_KEY, {}))
        if unknown := sorted(set(given) - {f.name for f in fields(cls)}):
            raise ValueError(
                f"additional_config[{CONFIG_KEY!r}] has unknown options {unknown}; it takes "
                f"{', '.join(f.name for f in fields(cls))}"
            )
        if isinstance(given.get("hook_points"), list):
            given["hook_points"] = tuple(given["hook_points"])
        return cls(**given)
