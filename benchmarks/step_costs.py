"""What a step costs, counted where the host's noise does not reach: CPU time of its thread, what it
launches, and how long its kernels have the GPU."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.call_times import CALLS, CallTimes

_PROFILED = 32
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


class Traced(NamedTuple):
    """An event of the profiler: on the GPU, or a call of the host. Nanoseconds."""

    name: str
    on_gpu: bool
    start: int
    end: int


class StepCosts:
    """Watches a round's steps inside the worker's process: first their CPU time, and that of our
    calls in them; then, on a GPU, some with the profiler, which would spoil the first.

    A step goes from one call of `execute_model` to the next, so what vLLM does between them on the
    engine's thread is a part of it: scheduling, sampling, taking in what was sampled. That thread
    sleeps while it waits for the GPU.

    Args:
        steps: of the round, at least. Of those the second quarter is timed, and of the third up to
            32 are profiled.
    """

    def __init__(self, worker: Any, steps: int) -> None:
        quarter = max(1, steps // 4)
        self._timed = range(quarter, 2 * quarter)
        self._profiled = range(0)
        if torch.cuda.is_available():
            self._profiled = range(2 * quarter, 2 * quarter + min(quarter, _PROFILED))
        self._worker = worker
        self._execute = worker.execute_model
        self._ours = CallTimes()
        self._profiler: Any = None
        self._steps = 0
        self._began: list[float] = []
        self.found: dict[str, Any] = {}
        worker.execute_model = self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        number, self._steps = self._steps, self._steps + 1
        if number == self._timed.start and hasattr(self._worker, "session"):
            for name in CALLS:
                self._ours.of(self._worker.session.steps, name)
        if self._timed.start <= number <= self._timed.stop:
            self._began.append(time.thread_time())
        if number == self._timed.stop:
            self._take_times()
        if self._profiled:
            if number == self._profiled.start:
                self._profile()
            elif number == self._profiled.stop:
                self._take_profile()
        return self._execute(*args, **kwargs)

    def _take_times(self) -> None:
        steps = len(self._timed)
        times = [after - before for before, after in pairwise(self._began)]
        self.found["steps_timed"] = steps
        self.found["host_us"] = 1e6 * statistics.median(times)
        if self._ours.taken:
            ours = sum(sum(taken) for taken in self._ours.taken.values())
            self.found["own_host_us"] = 1e6 * ours / steps
        self._ours.restore()

    def _profile(self) -> None:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        profiler = torch.profiler.profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:  # another profiler has it: no reason to lose the round
            self.found["profile_error"] = repr(error)
        else:
            self._profiler = profiler

    def _take_profile(self) -> None:
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            self.found |= of_profile(
                _traced(profiler.profiler.kineto_results.events()),
                min(self._steps, self._profiled.stop) - self._profiled.start,
            )
        except (RuntimeError, AttributeError) as error:
            self.found["profile_error"] = repr(error)

    def close(self) -> dict[str, Any]:
        """Watch no more; what was found."""
        self._ours.restore()
        self._take_profile()
        del self._worker.execute_model
        return self.found


def _traced(events: Iterable[Any]) -> Iterator[Traced]:
    on_gpu = torch.autograd.DeviceType.CUDA
    for event in events:
        yield Traced(event.name(), event.device_type() == on_gpu, event.start_ns(), event.end_ns())


def of_profile(events: Iterable[Traced], steps: int) -> dict[str, Any]:
    """What the events of some steps come to in one.

    A kernel may begin before the one in front of it has ended, and wait: it counts from then on. So
    `gpu_us` is how long the GPU computed at all, and what the kernels have adds up to it.
    """
    events = sorted(events, key=lambda event: event.start)
    launches = sum(not event.on_gpu and event.name.startswith(_LAUNCHES) for event in events)
    times: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    free = 0
    for event in events:
        if event.on_gpu:
            times[event.name] += max(0, event.end - max(event.start, free))
            numbers[event.name] += 1
            free = max(free, event.end)
    return {
        "steps_profiled": steps,
        "launches": launches / steps,
        "kernels": sum(numbers.values()) / steps,
        "gpu_us": sum(times.values()) / 1e3 / steps,
        "by_kernel": {
            name: [number / steps, times[name] / 1e3 / steps] for name, number in numbers.items()
        },
    }


def compared(vllm: Mapping[str, Any], tllm: Mapping[str, Any]) -> dict[str, Any]:
    """The costs of both, rounded, and what a step of tLLM costs more.

    `more_gpu_us` is that of the kernels of which one has more than the other in a step: the others
    are the same work, and differ by chance. `changed` names them: how many more, and microseconds.
    """
    found: dict[str, Any] = {
        name: {
            what: round(value, 2) if isinstance(value, float) else value
            for what, value in costs.items()
            if what != "by_kernel"
        }
        for name, costs in (("vllm", vllm), ("tllm", tllm))
    }
    for what in ("host_us", "launches"):
        if what in vllm and what in tllm:
            found[f"more_{what}"] = round(tllm[what] - vllm[what], 2)
    if "own_host_us" in tllm:
        found["own_host_us"] = round(tllm["own_host_us"], 2)
    if "by_kernel" in vllm and "by_kernel" in tllm:
        changed = _changed(vllm["by_kernel"], tllm["by_kernel"])
        found["more_gpu_us"] = round(sum(us for _, us in changed.values()), 2)
        found["changed"] = {
            name[:90]: [round(number, 2), round(us, 2)]
            for name, (number, us) in sorted(changed.items(), key=lambda item: -abs(item[1][1]))
        }
    return found


def _changed(
    vllm: Mapping[str, list[float]], tllm: Mapping[str, list[float]]
) -> dict[str, tuple[float, float]]:
    changed: dict[str, tuple[float, float]] = {}
    for name in {*vllm, *tllm}:
        before, after = vllm.get(name, [0, 0]), tllm.get(name, [0, 0])
        # What happens now and then, such as a request's end, is not in every window alike.
        if abs(after[0] - before[0]) >= 0.5 or not before[0] or not after[0]:
            changed[name] = after[0] - before[0], after[1] - before[1]
    return changed


def watch(worker: Any, steps: int) -> None:
    """Sent to a worker: watch the steps that come."""
    inner = worker.worker
    inner.step_costs = StepCosts(inner, steps)


def watched(worker: Any) -> dict[str, Any]:
    """Sent to a worker: what was found."""
    inner = worker.worker
    found: dict[str, Any] = inner.step_costs.close()
    del inner.step_costs
    return found
