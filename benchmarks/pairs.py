"""Engines in processes of their own, measured in turn."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.layout import LAYOUTS
from benchmarks.load import Load
from benchmarks.step_costs import compared
from benchmarks.workload import Benchmark


class Engine:
    """The other end of an engine process.

    Args:
        engine: `"vllm"` or `"tllm"`.
        tree: a folder with the `tllm` and `benchmarks` of another commit; None for this one's.
        layout: over GPUs, one of `LAYOUTS`.

    Attributes:
        started: what it said of itself when it had started.
    """

    started: Mapping[str, Any]

    def __init__(
        self,
        engine: str,
        benchmark: Benchmark,
        tree: Path | None = None,
        layout: str = "one",
        kv_gib: float | None = None,
    ) -> None:
        arguments = benchmark.workload.engine_arguments
        if kv_gib is not None:
            arguments |= {
                "kv_cache_memory_bytes": int(kv_gib * 2**30),
                "gpu_memory_utilization": 0.25,  # no more than what must be free at the start
            }
        arguments |= LAYOUTS[layout]
        command = {"engine": engine, "shape": benchmark.shape, "arguments": arguments}
        environment = {
            **os.environ,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends `draw_weights` to the worker
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        if tree is not None:
            paths = [str(tree), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_process", json.dumps(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )

    def wait(self) -> None:
        """Wait until the engine has started."""
        self.started = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, benchmark: str, number: int) -> dict[str, Any]:
        """One round of generation."""
        return self._ask("round", benchmark, number)

    def costs(self, benchmark: str, number: int) -> dict[str, Any]:
        """What its steps cost, from a round that is not measured (`StepCosts`)."""
        return self._ask("costs", benchmark, number)

    def _ask(self, what: str, benchmark: str, number: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"what": what, "benchmark": benchmark, "round": number}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


class Copies:
    """Engines that are alike, each for two pairs in turn.

    Where in memory an engine's weights came to lie makes it faster or slower by some tenths of a
    percent for as long as it lives. So one engine of each kind compares that, too.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    @property
    def sampler(self) -> str:
        """Who draws for requests with top-k or top-p: FlashInfer, or vLLM itself."""
        sampler: str = self._engines[0].started["sampler"]
        return sampler

    def __len__(self) -> int:
        return len(self._engines)

    def round(self, benchmark: str, number: int) -> dict[str, Any]:
        """One round of generation, on the engine whose turn it is."""
        return self._engines[(number - 1) // 2 % len(self)].round(benchmark, number)

    def costs(self, benchmark: str, number: int) -> dict[str, Any]:
        """What the steps of the first one cost."""
        return self._engines[0].costs(benchmark, number)


@contextmanager
def engines(
    benchmark: Benchmark,
    *,
    control: bool = False,
    copies: int = 1,
    against: Path | None = None,
    layout: str = "one",
    kv_gib: float | None = None,
) -> Iterator[tuple[Copies, Copies, Copies | None]]:
    """Untouched vLLM, tLLM and an older tLLM, all resident: they start side by side, and work in
    turn.

    Args:
        control: untouched vLLM in place of tLLM, too.
        copies: engines of each.
        against: a folder with the older `tllm` and its `benchmarks`; None for no older one.
        layout: of each engine's model over GPUs, one of `LAYOUTS`.
        kv_gib: KV cache of each engine; None for what `engine_process` takes.
    """
    kinds: list[tuple[str, Path | None]] = [("vllm", None), ("vllm" if control else "tllm", None)]
    if against is not None:
        kinds.append(("tllm", against))
    opened: list[Engine] = []
    try:
        for name, tree in kinds:
            opened += [Engine(name, benchmark, tree, layout, kv_gib) for _ in range(copies)]
        for engine in opened:
            engine.wait()
        vllm, tllm, *older = (
            Copies(opened[first : first + copies]) for first in range(0, len(opened), copies)
        )
        yield vllm, tllm, older[0] if older else None
    finally:
        for engine in opened:
            engine.close()


_AVERAGED = (
    "seconds",
    "steps",
    "step_seconds",
    "start_seconds",
    "end_seconds",
    "plain_seconds",
    "latency_seconds",
)
"""What is averaged over the two rounds of vLLM beside a round of tLLM."""


def measure(
    vllm: Copies,
    tllm: Copies,
    benchmarks: Sequence[Benchmark],
    pairs: int,
    seconds: float | None = None,
    older: Copies | None = None,
    loaded: bool = False,
) -> list[dict[str, Any]]:
    """Measure benchmarks of one workload together: a round of each between two of vLLM.

    What all of them are compared with is a round of vLLM: its own scatter would be in every ratio.

    Args:
        seconds: stop after so long, with fewer pairs; 3 at least.
        older: an older tLLM, whose round of a benchmark comes right before or after ours.
        loaded: as many pairs again, of the same engines, on few cores with busy neighbours
            (`Load`): `loaded` of a result.
    """
    ours = {"tllm": tllm} | ({"older": older} if older else {})
    for number in range(1 - 2 * len(vllm), 1):  # warm-up
        vllm.round(benchmarks[0].name, number)
        for benchmark in benchmarks:
            for engine in ours.values():
                engine.round(benchmark.name, number)
    rounds = _pairs(vllm, ours, benchmarks, pairs, seconds)
    results = {
        benchmark.name: _result(benchmark, rounds[benchmark.name]) for benchmark in benchmarks
    }
    if loaded:
        with Load() as load:
            rounds = _pairs(vllm, ours, benchmarks, pairs, seconds)
            described = load.described()
        for name, result in results.items():
            result["loaded"] = described | _figures(rounds[name])
    return [*results.values()]


def step_costs(
    vllm: Copies, tllm: Copies, benchmarks: Sequence[Benchmark]
) -> dict[str, dict[str, Any]]:
    """What a step of each costs, from one more round of each (`compared`).

    To be called when nothing is measured any more: a profiler leaves its traces in a process.
    """
    of_vllm = vllm.costs(benchmarks[0].name, 0)
    return {each.name: compared(of_vllm, tllm.costs(each.name, 0)) for each in benchmarks}


def _pairs(
    vllm: Copies,
    ours: Mapping[str, Copies],
    benchmarks: Sequence[Benchmark],
    pairs: int,
    seconds: float | None,
) -> dict[str, list[dict[str, Any]]]:
    """Rounds by benchmark: each pair's `vllm`, and those of `ours`."""
    rounds: dict[str, list[dict[str, Any]]] = {benchmark.name: [] for benchmark in benchmarks}
    begin = time.monotonic()
    for number in range(1, pairs + 1):
        if seconds is not None and number > 3 and time.monotonic() - begin > seconds:
            break
        before = vllm.round(benchmarks[0].name, number)
        # Who comes first changes with every pair.
        turn = 1 if number % 2 else -1
        found = {
            each.name: {name: ours[name].round(each.name, number) for name in [*ours][::turn]}
            for each in benchmarks[::turn]
        }
        after = vllm.round(benchmarks[0].name, number)
        of_vllm = before | {
            name: (before[name] + after[name]) / 2 for name in _AVERAGED if name in before
        }
        for name, done in rounds.items():
            done.append({"vllm": of_vllm, **found[name]})
    return rounds


def _result(benchmark: Benchmark, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, and the figures."""
    return {
        "name": benchmark.name,
        "workload": {
            "shape": benchmark.shape,
            "variant": benchmark.variant,
            **asdict(benchmark.workload),
        },
        **_figures(rounds),
    }


def _figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of throughputs over pairs of rounds, with its interval and the counters.

    `step_ratio` is that of single steps, the middle half of each round's (`StepTimes`), vLLM's time
    divided by tLLM's; `start_ms` and `end_ms` are what tLLM takes longer for the first steps and
    after the last (`EngineProcess.round`), and `steps` how many more it takes, in the median pair.
    Where only some requests do what is measured, the others' speed too: `plain_ratio` is their mean
    time from the start of the round to their last token, likewise; where requests come one after
    the other, `latency_ratio` is that of the mean time from when one was due to its last token.
    Beside an older tLLM, `older_ratio` and `older_step_ratio` are its time of a round and of a step
    divided by ours.
    """
    speeds = {
        name: [pair[name]["tokens"] / pair[name]["seconds"] for pair in rounds]
        for name in ("vllm", "tllm")
    }
    ratios = [a / b for a, b in zip(speeds["tllm"], speeds["vllm"], strict=True)]
    plain: dict[str, Any] = {}
    if "plain_seconds" in rounds[0]["tllm"]:
        plain = _summary("plain_", _faster(rounds, "plain_seconds"))
    if "latency_seconds" in rounds[0]["tllm"]:
        plain |= _summary("latency_", _faster(rounds, "latency_seconds"))
    older: dict[str, Any] = {}
    if "older" in rounds[0]:
        older = _summary("older_", _faster(rounds, "seconds", "older")) | _summary(
            "older_step_", _faster(rounds, "step_seconds", "older")
        )
    captures = [pair["tllm"]["counters"].get("capture", {}) for pair in rounds]
    disk: dict[str, Any] = {}
    if "share_of_disk" in captures[0]:
        shares = [capture["share_of_disk"] for capture in captures]
        disk = {
            "share_of_disk": round(statistics.median(shares), 4),
            "shares_of_disk": [round(share, 4) for share in shares],
        }
    return {
        "pairs": len(rounds),
        **_summary("", ratios),
        **_summary("step_", _faster(rounds, "step_seconds")),
        "start_ms": round(1e3 * _more(rounds, "start_seconds"), 2),
        "end_ms": round(1e3 * _more(rounds, "end_seconds"), 2),
        "steps": _more(rounds, "steps"),
        **plain,
        **older,
        **disk,
        "vllm_tokens_per_second": round(statistics.median(speeds["vllm"]), 1),
        "tllm_tokens_per_second": round(statistics.median(speeds["tllm"]), 1),
        "counters": rounds[-1]["tllm"]["counters"],
    }


def _faster(rounds: Sequence[dict[str, Any]], time_of: str, whose: str = "vllm") -> list[float]:
    """In each pair of rounds, vLLM's time, or an older tLLM's, divided by tLLM's."""
    return [pair[whose][time_of] / pair["tllm"][time_of] for pair in rounds]


def _more(rounds: Sequence[dict[str, Any]], what: str) -> float:
    """By how much tLLM has more of something than vLLM, in the median pair of rounds."""
    return statistics.median(pair["tllm"][what] - pair["vllm"][what] for pair in rounds)


def _summary(prefix: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Ratios, their median, and its interval."""
    return {
        f"{prefix}ratio": round(statistics.median(ratios), 4),
        f"{prefix}interval": [round(edge, 4) for edge in bootstrap_interval(ratios)],
        f"{prefix}ratios": [round(ratio, 4) for ratio in ratios],
    }


def bootstrap_interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """95% interval of the median."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(draws)
    )
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]
