"""What the engine is started with, and how the workers are told, through vLLM's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vllm.platforms import current_platform

from tllm.consumers.base import Consumer
from tllm.engine import limits, versions
from tllm.engine.executor import executor_for
from tllm.engine.seams import uses
from tllm.runtime.ring import Overflow
from tllm.spec.hooks import HEAD_POINTS, HookPoint
from tllm.spec.reading import one_or_several, require_bool, require_one_of, whole_number

CONFIG_KEY = "tllm"
"""Key of `VllmConfig.additional_config` under which the options travel."""

CHEAP_POINTS = ("embed", "pre_attn", "post_attn", "post_block", "lm_head_in")
"""The points whose taps are computed with the norm that follows, where that is compiled; `embed`
has the tap of `pre_attn` of the first layer."""
_NAMED_ONLY = *HEAD_POINTS, HookPoint.ROUTER
EAGER_POINTS = tuple(point.value for point in HookPoint if point not in _NAMED_ONLY)
"""The points that have taps by default where nothing is compiled."""


_RING_BYTES, _RING_SHARE = 2**31, 20
"""The capture ring's limit where none is given, and of a device's memory one part in so many."""

uses("vllm.config.ParallelConfig", "worker_cls", "the worker is ours")
uses("vllm.config.SchedulerConfig", "scheduler_cls", "the scheduler is ours")


@dataclass(frozen=True)
class EngineOptions:
    """Options of tLLM that are fixed when the engine starts.

    Attributes:
        hook_points: the points that get a tap in every layer, or `"all"`. A tap that nobody uses
            costs at most one empty kernel launch (see `fuse_norms`); a point without a tap cannot
            be used later. None: all but `q`, `k`, `v`, `attn_heads` and `router`, and where the
            model is compiled for a GPU `CHEAP_POINTS`, so that what is not used costs nothing
            there.
        capture_mib: memory the capture ring begins with, in MiB; `max_capture_mib` where that is
            less.
        max_capture_mib: the most it grows to. None: 2048, or a twentieth of the device's memory
            where that is more. A step's rows are brought to the host while the next ones come, if
            there is room for both.
        overflow: what happens when consumers are slower than the model and the ring is full:
            `block` waits for them, `drop` gives up rows and counts them.
        max_steering_configs: how many distinct ways of steering run at once; requests that would
            need more wait. 0 turns steering off.
        max_steering_mib: the most memory that steering vectors take on the device, in MiB.
        max_patch_mib: the most memory that rows take which are kept to be patched in, in MiB.
        max_patch_host_mib: the same of those that are kept on the host.
        max_conversations: how many conversations conditions are remembered for at a time. 0 turns
            that off.
        fuse_norms: whether a tap before an RMSNorm is computed together with it, by one kernel of
            ours. It sums squares in another order than vLLM's: of half a million normed values in
            bfloat16 one or none was seen to differ, by a rounding.
    """

    hook_points: tuple[str, ...] | str | None = None
    capture_mib: int = 64
    max_capture_mib: int | None = None
    overflow: Overflow = "block"
    max_steering_configs: int = 512
    max_steering_mib: int = 1024
    max_patch_mib: int = 1024
    max_patch_host_mib: int = 8192
    max_conversations: int = 4096
    fuse_norms: bool = True

    def __post_init__(self) -> None:
        if self.hook_points not in ("all", None):
            points = tuple(HookPoint.parse(name).value for name in one_or_several(self.hook_points))
            object.__setattr__(self, "hook_points", points)
        require_one_of("overflow", self.overflow, Overflow)
        require_bool("fuse_norms", self.fuse_norms)
        least = dict.fromkeys(("max_steering_configs", "max_conversations"), 0)
        sizes = ["capture_mib", "max_steering_mib", "max_patch_mib", "max_patch_host_mib"]
        if self.max_capture_mib is not None:
            sizes.append("max_capture_mib")
        for name, number in (dict.fromkeys(sizes, 1) | least).items():
            object.__setattr__(self, name, whole_number(getattr(self, name), f"{name}=", number))

    @property
    def points(self) -> tuple[HookPoint, ...]:
        if self.hook_points in ("all", None):
            return tuple(HookPoint)
        return tuple(map(HookPoint, self.hook_points or ()))

    def resolved(self, *, eager: bool) -> EngineOptions:
        """With the default hook points of an engine in the place of None."""
        if self.hook_points is not None:
            return self
        compiled = not eager and not current_platform.is_cpu()
        return replace(self, hook_points=CHEAP_POINTS if compiled else EAGER_POINTS)

    @property
    def first_capture_bytes(self) -> int:
        """What the capture ring begins with."""
        return min(self.capture_mib, self.max_capture_mib or self.capture_mib) * 2**20

    def most_capture_bytes(self, device_bytes: int) -> int:
        """The most the capture ring grows to, on a device of so many bytes."""
        if self.max_capture_mib is not None:
            return self.max_capture_mib * 2**20
        return max(_RING_BYTES, device_bytes // _RING_SHARE)

    def to_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, vllm_config: Any) -> EngineOptions:
        options = cls.from_config(vllm_config.additional_config)
        return options.resolved(eager=vllm_config.model_config.enforce_eager)

    @classmethod
    def from_config(cls, additional_config: Any) -> EngineOptions:
        """The options in a `VllmConfig`; the defaults when there are none."""
        config = additional_config if isinstance(additional_config, Mapping) else {}
        of_config = config.get(CONFIG_KEY) or {}
        if not isinstance(of_config, Mapping):
            raise ValueError(
                f"additional_config[{CONFIG_KEY!r}]={of_config!r:.60} was given; give a dict of "
                f"{', '.join(f.name for f in fields(cls))}"
            )
        given = {name: value for name, value in of_config.items() if value is not None}
        if unknown := sorted(set(given) - {f.name for f in fields(cls)}):
            raise ValueError(
                f"additional_config[{CONFIG_KEY!r}] has unknown options {unknown}; it takes "
                f"{', '.join(f.name for f in fields(cls))}"
            )
        if isinstance(given.get("hook_points"), list):
            given["hook_points"] = tuple(given["hook_points"])
        return cls(**given)


WORKERS = (
    "tllm.engine.worker_cpu.InterventionCPUWorker",
    "tllm.engine.worker_cuda.InterventionCUDAWorker",
)
"""`worker_cls` on a CPU, and on a GPU."""

SCHEDULER = "tllm.engine.scheduler.create_scheduler"
"""`scheduler_cls`."""


def engine_arguments(
    kwargs: Mapping[str, Any], options: Mapping[str, Any], consumers: Iterable[Consumer]
) -> dict[str, Any]:
    """vLLM's engine arguments with tLLM attached.

    Args:
        kwargs: the user's engine arguments.
        options: fields of `EngineOptions`; they count before those that `additional_config` has.
        consumers: known already; the hook points they need are installed too.
    """
    versions.probe()
    limits.check_arguments(kwargs)
    for name in ("worker_cls", "scheduler_cls"):
        _check_place(name, kwargs.get(name))
    asked = replace(EngineOptions.from_config(kwargs.get("additional_config")), **options)
    chosen = asked.resolved(eager=bool(kwargs.get("enforce_eager")))
    chosen = _with_points_of(consumers, chosen)
    return {
        **kwargs,
        **executor_for(kwargs),
        "worker_cls": WORKERS[not current_platform.is_cpu()],
        "scheduler_cls": SCHEDULER,
        "additional_config": {
            **(kwargs.get("additional_config") or {}),
            CONFIG_KEY: chosen.to_config(),
        },
    }


def attach_to_config(
    vllm_config: Any, options: Mapping[str, Any], consumers: Iterable[Consumer]
) -> None:
    """Let an engine that is made from this config have tLLM attached.

    Args:
        options, consumers: as of `engine_arguments`.
    """
    versions.probe()
    limits.check(vllm_config)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if not str(parallel.worker_cls).startswith("vllm."):
        _check_place("worker_cls", parallel.worker_cls)
    _check_place("scheduler_cls", scheduler.scheduler_cls)
    asked = replace(EngineOptions.from_config(vllm_config.additional_config), **options)
    chosen = asked.resolved(eager=vllm_config.model_config.enforce_eager)
    chosen = _with_points_of(consumers, chosen)
    parallel.worker_cls = WORKERS[not current_platform.is_cpu()]
    scheduler.scheduler_cls = SCHEDULER
    given = vllm_config.additional_config or {}
    vllm_config.additional_config = {**given, CONFIG_KEY: chosen.to_config()}


def check_attached(vllm_config: Any) -> None:
    """Raise `ValueError` for an engine whose workers are not ours."""
    if vllm_config.parallel_config.worker_cls not in WORKERS:
        worker = WORKERS[not current_platform.is_cpu()]
        raise ValueError(
            "this engine's workers know nothing of interventions; start it with "
            f"worker_cls={worker!r} and scheduler_cls={SCHEDULER!r} (vllm serve: --worker-cls and "
            "--scheduler-cls), or make a tllm.LLM or tllm.AsyncLLM"
        )


def _check_place(name: str, given: Any) -> None:
    if given not in (None, "auto", SCHEDULER, *WORKERS):
        raise ValueError(
            f"{name}={given!r} was given, but tLLM attaches through its own; leave it out, or use "
            "vllm.LLM"
        )


def _with_points_of(consumers: Iterable[Consumer], options: EngineOptions) -> EngineOptions:
    """Options with the hook points that consumers need."""
    points = set(options.points)
    for consumer in consumers:
        for flow in consumer.flows():
            points |= {HookPoint(site) for site, _ in flow.places}
            points |= {HookPoint(write.site) for write in flow.writes if write.site}
    if options.hook_points == "all":
        return options
    return replace(options, hook_points=tuple(p.value for p in HookPoint if p in points))
