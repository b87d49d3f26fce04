"""`python -m benchmarks.host`: what our own calls cost the host in a steady decode step.

A session runs on taps of no model, on a CPU, so nothing is measured but our calls: before the
forward pass, before and after sampling, at the step's end. Two kinds of figures: microseconds, and
counts that do not hang on the machine (Python calls, uploads to the device, operators on it). Each
case runs in a process of its own; with `--against` another checkout of tLLM is measured too, in
turn, by this same file. Beside a steady step: one whose batch is laid out anew, as it is when a
sequence comes or goes; what a request costs that comes and goes; and the CPU time of all threads in
a step in which one request has ended, whose results are taken, and another begins.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

BATCH, LAYERS, HIDDEN, PROMPT = 128, 28, 8, 16
_HERE = Path(__file__).parents[1]


class Counts(TorchDispatchMode):
    """What this thread does while it is entered: operators on tensors, those of a row plan's
    kernel as one, and uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not func.is_view
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Counts:
        from tllm.runtime.kernels import row_plan

        expand, from_numpy, thread = row_plan.reference, torch.from_numpy, threading.get_ident()

        def expanded(*args: Any) -> Any:
            self.operators += 1
            with _disable_current_modes():
                return expand(*args)

        def uploaded(array: Any) -> Any:
            self.uploads += threading.get_ident() == thread  # others bring results to the user
            return from_numpy(array)

        self._replaced = ExitStack()
        self._replaced.enter_context(replaced(row_plan, "reference", expanded))
        self._replaced.enter_context(replaced(torch, "from_numpy", uploaded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()


@contextmanager
def replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function in a module, meanwhile."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """The functions of ours that are called meanwhile."""
    called: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and f"{os.sep}tllm{os.sep}" in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _consumers(layers: int) -> dict[str, Callable[[], Any]]:
    from tllm.consumers.base import Consumer
    from tllm.consumers.capture.memory import MemoryConsumer
    from tllm.ports import ConsumerFlow, RequestMeta, ResidualStream

    class Reading(Consumer):
        """Is given rows, and does nothing with them."""

        consumer_id = "reading"

        def __init__(self, layers: int) -> None:
            self._layers = layers

        def flows(self) -> Any:
            reads = [
                ResidualStream.read(layer=layer, phase="decode", role=f"layer {layer}")
                for layer in range(self._layers)
            ]
            return [ConsumerFlow(reads=(*reads, RequestMeta.read()), delivery="device_lease")]

        def consume_bundle(self, bundle: Any, ctx: Any) -> None:
            pass

    class Writing(Consumer):
        """Writes another vector for every sequence in every step."""

        consumer_id = "writing"
        write = ResidualStream.write(layer=3, phase="any")
        vectors = torch.zeros(0)  # the ring's rows were never computed here, and may be NaN

        def flows(self) -> Any:
            reads = ResidualStream.read(layer=3, phase="decode"), RequestMeta.read()
            return [ConsumerFlow(reads=reads, writes=(self.write,), delivery="device_lease")]

        def consume_bundle(self, bundle: Any, ctx: Any) -> None:
            rows = bundle.entries[bundle.reads[0].role]
            if len(self.vectors) != len(rows):
                self.vectors = torch.zeros_like(rows)
            ctx.writer(self.write.role).set(bundle.meta.requests, self.vectors)

    return {
        "captured, one layer": lambda: Reading(1),
        "captured, all layers": lambda: Reading(layers),
        "captured to memory": MemoryConsumer,
        "written by a consumer": Writing,
    }


CASES = (
    "idle",
    "steered, one way",
    "steered, 128 ways",
    "steered by position",
    "captured, one layer",
    "captured, all layers",
    "captured to memory",
    "written by a consumer",
    "captured and steered",
)


@dataclass
class Steady:
    """Sequences that decode."""

    case: str
    layers: int = LAYERS
    batch: int = BATCH

    def __post_init__(self) -> None:
        from tllm.ports import ModelView
        from tllm.runtime.session import Session
        from tllm.runtime.taps import Taps
        from tllm.spec.hooks import HookPoint

        cpu = torch.device("cpu")
        points: dict[Any, Any] = {
            (HookPoint.POST_BLOCK, layer): None for layer in range(self.layers)
        }
        second: dict[Any, Any] = {
            (HookPoint.POST_BLOCK, layer): (HookPoint.PRE_ATTN, layer + 1)
            for layer in range(self.layers - 1)
        }
        taps = Taps(
            points,
            second=second,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=cpu,
            max_tokens=self.batch * PROMPT,
            max_programs=64,
            add_rows=2 * self.batch,
        )
        # What some commits take, and others do not.
        more: dict[str, Any] = {
            "max_patch_bytes": 0,
            "max_patch_host_bytes": 0,
            "max_positions": 2048,
            "drafts": False,
        }
        more = {name: more[name] for name in more.keys() & signature(Session).parameters.keys()}
        self.session = Session(
            taps,
            lambda site, layer: (HookPoint.parse(site), layer),
            ModelView(HIDDEN, self.layers, 10, torch.float32, cpu, None, None, None, self.batch),
            lm_head=None,
            samples=True,
            max_sequences=self.batch,
            max_programs=64,
            steering_rows=2 * self.batch,
            steering_vectors=2 * self.batch,
            ring_rows=4 * self.batch * self.layers,
            max_ring_rows=4 * self.batch * self.layers,
            overflow="block",
            **more,
        )
        consumers = _consumers(self.layers)
        if self.case in consumers:
            self.session.consumers.register(consumers[self.case]())
        if self.case == "captured and steered":
            self.session.consumers.register(consumers["captured, all layers"]())
        self._start()
        steps = getattr(self.session, "steps", None)
        if steps is not None:
            self._calls = (
                steps.begin_idle,
                steps.begin,
                steps.before_sampling,
                steps.after_sampling,
                steps.end,
            )
        else:  # an older commit
            old: Any = self.session
            self._calls = (
                old.rest_step,
                old.begin_step,
                old.before_sampling,
                old.after_sampling,
                old.end_step,
            )
        self.counts = np.ones(self.batch, np.int32)
        self.ids = torch.zeros(self.batch * PROMPT, dtype=torch.int64)
        self.sampled = torch.zeros(self.batch, dtype=torch.int64)
        self.sampled_from = np.full(self.batch, PROMPT, np.int32)
        self.starts = np.zeros(self.batch, np.int32)
        self.step(np.full(self.batch, PROMPT, np.int32))

    def _start(self) -> None:
        from tllm.spec.request import RequestSpec
        from tllm.spec.selection import Selection

        try:
            from tllm.spec.groups import GroupUse
            from tllm.spec.operations import Coefficients
        except ImportError:  # older commits have both in one file
            from tllm.spec.steering import Coefficients, GroupUse  # type: ignore[no-redef]

        ways = self.batch if "128" in self.case or self.case == "captured and steered" else 1
        positions = Selection.parse({"ranges": [[0, 10**6]]} if "position" in self.case else {})
        one = np.ones(HIDDEN, np.float32)
        operations = {
            f"way {way}": [
                ("post_block", layer, f"vector {way}", Coefficients(add=1.0))
                for layer in range(self.layers)
            ]
            for way in range(ways)
        }
        self.session.steering.put({f"vector {way}": one for way in range(ways)}, operations)
        self._specs: dict[str, Any] = {}
        session: Any = self.session  # of older commits, too
        sequences = getattr(session, "sequences", None)
        self._start_one = sequences.start if sequences else session.start_sequence
        self._finish_one = sequences.finish if sequences else session.finish_sequence
        self.names = [f"request {number}" for number in range(self.batch)]
        for number, name in enumerate(self.names):
            steering: tuple[Any, ...] = ()
            if "steered" in self.case:
                steering = (GroupUse("any", positions, f"way {number % ways}"),)
            consumers = (
                {"memory": {"hooks": {"post_block": "all"}}} if "memory" in self.case else {}
            )
            spec = RequestSpec(name, name, steering=steering, consumers=consumers)
            self._specs[name] = spec
            self._start_one(name, [1] * PROMPT, PROMPT, spec, 0)

    def step(self, counts: Any) -> float:
        """Compute tokens of every sequence; microseconds of our calls."""
        starts = self.starts
        begin_idle, begin, before_sampling, after_sampling, end = self._calls
        started = time.perf_counter()
        if not begin_idle():
            begin(self.names, starts, counts, self.sampled_from, self.ids)
            before_sampling(None)
            after_sampling(self.sampled, self.ids)
        end()
        ended = time.perf_counter()
        self.starts = starts + counts
        return 1e6 * (ended - started)

    def replace(self, number: int) -> float:
        """Let a request go and come again; microseconds."""
        name = self.names[number % self.batch]
        started = time.perf_counter()
        self._finish_one(name)
        self._start_one(name, [1] * PROMPT, PROMPT, self._specs[name], 0)
        return 1e6 * (time.perf_counter() - started)

    def one_for_another(self, steps: int) -> float:
        """Steps in each of which one request has ended and another begins, whose results are taken
        in the end; CPU microseconds of all threads, a step."""
        from tllm.runtime.results import sendable

        started, ended = time.process_time(), []
        for number in range(steps):
            place, name = number % self.batch, f"{number} beside others"
            ended.append(self.names[place])
            self._finish_one(ended[-1])
            spec = dataclasses.replace(self._specs[ended[-1]], request_id=name, prompt_id=name)
            self._specs[name] = spec
            self.names = [*self.names[:place], name, *self.names[place + 1 :]]
            self._start_one(name, [1] * PROMPT, PROMPT, spec, 0)
            starts, counts = self.starts.copy(), self.counts.copy()
            starts[place], counts[place] = 0, PROMPT
            self.starts = starts
            self.step(counts)
        self.session.flush()
        sendable(self.session.sequences.pop_results(ended, {}, 60.0))
        return 1e6 * (time.process_time() - started) / steps

    def step_anew(self) -> float:
        """A step whose batch is laid out anew."""
        self.session._slots.invalidate()
        return self.step(self.counts)


def measured(case: str, steps: int) -> dict[str, float]:
    """One case in this process: median microseconds, and counts of one step."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        steady = Steady(case)
        for _ in range(steps // 4):
            steady.step(steady.counts)
        times = [steady.step(steady.counts) for _ in range(steps)]
        counts = counted(steady)
        anew = [steady.step_anew() for _ in range(steps // 4)]
        replaced = [steady.replace(number) for number in range(steps // 4)]
        others = [steady.one_for_another(steps // 4) for _ in range(3)]
        steady.session.close()
    return {
        "us": statistics.median(times),
        "anew": statistics.median(anew),
        "request": statistics.median(replaced),
        "others": statistics.median(others),
        **counts,
    }


def counted(steady: Steady) -> dict[str, int]:
    """Python calls, uploads and operators of one step.

    The calls are the fewest of four steps: a step now and then also takes memory for those that
    follow, or gives back what another thread has just let go of.
    """
    with Counts() as counts:
        steady.step(steady.counts)
    calls = []
    for _ in range(4):
        with python_calls() as called:
            steady.step(steady.counts)
        calls.append(len(called))
    return {"calls": min(calls), "uploads": counts.uploads, "operators": counts.operators}


def _child(tree: Path, case: str, steps: int) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--case", case, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}, {case}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    against: Annotated[
        Path | None, typer.Option(help="Another checkout of tLLM, measured in turn.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes for each case and checkout.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of which the median is taken.")] = 400,
    case: Annotated[str, typer.Option(help="Measure this one here, and print JSON.")] = "",
) -> None:
    """Print a table: microseconds (median and range over rounds), and counts of one step."""
    if case:
        print(json.dumps(measured(case, steps)))
        return
    trees = [_HERE] if against is None else [against.resolve(), _HERE]
    table = Table("case", "checkout", *_COLUMNS, title="microseconds, and counts of a steady step")
    for each in CASES:
        found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
        for _ in range(rounds):
            for tree in trees:
                found[tree].append(_child(tree, each, steps))
        for tree, results in found.items():
            table.add_row(
                each,
                "this one" if tree == _HERE else str(tree),
                *(_shown([result[name] for result in results]) for name in _COLUMNS.values()),
            )
    Console(width=160).print(table)


_COLUMNS = {
    "a steady step": "us",
    "one laid out anew": "anew",
    "a request": "request",
    "one for another": "others",
    "Python calls": "calls",
    "uploads": "uploads",
    "operators": "operators",
}


def _shown(values: list[float]) -> str:
    """Median and range."""
    if min(values) == max(values):
        return f"{values[0]:.0f}"
    return f"{statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


if __name__ == "__main__":
    typer.run(main)
