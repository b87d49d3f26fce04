"""`python -m benchmarks.logprobs`: steps of particles a second, beside untouched vLLM.

Each step of a round needs the distribution of every particle's next token. Untouched vLLM resubmits
all tokens with max_tokens=1 and its prefix cache on: without log-probabilities (`resubmit`, which
tells nothing but one drawn token: a bound), and with its top 20 (`resubmit-top20`). tLLM answers
with the whole vocabulary (`query`, `lane`, and all lanes in one call: `lanes`), or with the top 20.
Rounds of both engines alternate.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import particle_options as given
from benchmarks.__main__ import RESULTS, environment

WAYS = {
    "resubmit": "vllm",
    "resubmit-top20": "vllm",
    "query": "tllm",
    "query-top20": "tllm",
    "lane": "tllm",
    "lane-top20": "tllm",
    "lanes": "tllm",
    "lanes-top20": "tllm",
}


class Engine:
    """The other end of an engine process, which is ready after `wait`."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.logprobs_process", json.dumps(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
        )

    def wait(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, way: str, particles: int, number: int, steps: int) -> dict[str, Any]:
        """One round."""
        assert self._process.stdin is not None
        asked = {"way": way, "particles": particles, "round": number, "steps": steps}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.wait()

    def leave(self) -> None:
        """Tell the process to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ended(self) -> None:
        """Wait until it has."""
        try:
            self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()


def check(way: str, particles: int, steps: int, counters: dict[str, Any]) -> None:
    """A benchmark of nothing is a failure."""
    expected = particles * steps
    if counters["answers"] != expected:
        raise SystemExit(f"{way}: {counters['answers']} answers instead of {expected}")
    if WAYS[way] == "vllm":
        return
    if counters["rows"] < expected:
        raise SystemExit(f"{way}: {counters['rows']} rows were computed instead of {expected}")
    mass = counters["mean_probability_mass"]
    if not (0 < mass <= 1.001 and ("top" in way or abs(mass - 1) < 1e-3)):
        raise SystemExit(f"{way}: probabilities sum to {mass}")


class Progress:
    """Lines on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begin

    def __call__(self, line: str) -> None:
        print(f"{self.seconds:7.1f} s  {line}", file=sys.stderr, flush=True)


def main(
    shape: given.Shape = "demo",
    particles: Annotated[str, typer.Option(help="Numbers of particles.")] = "1,8,64,256",
    steps: given.Steps = 32,
    prompt_tokens: given.PromptTokens = 64,
    rounds: given.Rounds = 3,
    budget: Annotated[
        float, typer.Option(help="Seconds since the start after which no second round begins.")
    ] = math.inf,
    ways: Annotated[str, typer.Option(help="Ways of stepping.")] = ",".join(WAYS),
    transport: Annotated[str, typer.Option(help="shared or rpc.")] = "shared",
    options: given.EngineArguments = "{}",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure, write `logprobs-SHAPE.json` after every round, and print a table."""
    progress = Progress()
    counts = [int(count) for count in particles.split(",")]
    chosen = ["resubmit", *(way for way in ways.split(",") if way != "resubmit")]
    if unknown := sorted(set(chosen) - set(WAYS)):
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(WAYS)}")
    command = {
        "shape": shape,
        "particles": counts,
        "steps": steps,
        "prompt_tokens": prompt_tokens,
        "transport": transport,
        "options": json.loads(options),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"logprobs-{shape}.json"
    about = {"name": path.stem, "workload": command, **environment()}
    engines = {
        name: Engine({**command, "engine": name})
        for name in dict.fromkeys(WAYS[way] for way in chosen)
    }
    taken: dict[tuple[int, str], list[dict[str, Any]]] = {}
    figures: list[dict[str, Any]] = []
    try:
        for name, engine in engines.items():
            engine.wait()
            progress(f"{name} is ready")
        # All numbers of particles in each round, so that every figure is there after the first.
        for number in range(rounds):
            for count in counts:
                if number and progress.seconds > budget:
                    progress(f"no more rounds after {budget:.0f} s")
                    return
                for way, found in one_round(engines, chosen, count, steps, number):
                    taken.setdefault((count, way), []).append(found)
                    progress(f"{count} particles, round {number + 1}, {way}: {told(found, steps)}")
                figures = [
                    figure(taken, count, way, steps)
                    for count in counts
                    for way in chosen
                    if (count, way) in taken
                ]
                path.write_text(json.dumps({**about, "results": figures}, indent=1) + "\n")
    finally:
        for engine in engines.values():
            engine.leave()
        for engine in engines.values():
            engine.ended()
        progress(f"results so far are in {path}")
        Console().print(table(figures))


def one_round(
    engines: dict[str, Engine], ways: list[str], count: int, steps: int, number: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way once; before the first round, a whole one to warm up, so that memory is as it is in
    use."""
    if number == 0:
        for place, way in enumerate(ways):
            engines[WAYS[way]].round(way, count, 10_000 * count + place, steps)
    for way in ways if number % 2 else ways[::-1]:
        # No tokens are fed twice, so no way profits from another's prefix cache.
        serial = 10_000 * count + 100 * (number + 1) + ways.index(way)
        found = engines[WAYS[way]].round(way, count, serial, steps)
        check(way, count, steps, found["counters"])
        yield way, found


def told(found: dict[str, Any], steps: int) -> str:
    """One round, to be read."""
    wall, cpu = 1e3 * found["seconds"] / steps, 1e3 * found["cpu_seconds"] / steps
    line = f"{wall:.2f} ms a step, {cpu:.2f} ms of them the client's CPU"
    sent = found["counters"].get("bytes_out")
    return line if sent is None else f"{line}, {sent / steps / 2**20:.1f} MiB a step"


def figure(
    taken: dict[tuple[int, str], list[dict[str, Any]]], count: int, way: str, steps: int
) -> dict[str, Any]:
    """Medians over the rounds so far; ratios are within a round."""
    seconds = [found["seconds"] for found in taken[count, way]]
    base = [found["seconds"] for found in taken[count, "resubmit"]]
    cpu = [found["cpu_seconds"] for found in taken[count, way]]
    ratios = [b / s for b, s in zip(base, seconds, strict=True)]
    middle = statistics.median(seconds)
    return {
        "particles": count,
        "way": way,
        "rounds": len(seconds),
        "ms_per_step": round(1e3 * middle / steps, 3),
        "ms_per_step_of_rounds": [round(1e3 * each / steps, 3) for each in seconds],
        "client_cpu_ms_per_step": round(1e3 * statistics.median(cpu) / steps, 3),
        "bytes_of_rounds": [found["counters"].get("bytes_out") for found in taken[count, way]],
        "answers_per_second": round(count * steps / middle, 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "counters": taken[count, way][-1]["counters"],
    }


def table(figures: list[dict[str, Any]]) -> Table:
    """To be read."""
    rows = Table(
        "particles",
        "way",
        "rounds",
        "ms a step",
        "client's CPU",
        "answers/s",
        "resubmission / this",
        "range",
    )
    for each in figures:
        rows.add_row(
            str(each["particles"]),
            each["way"],
            str(each["rounds"]),
            f"{each['ms_per_step']:.2f}",
            f"{each['client_cpu_ms_per_step']:.2f}",
            f"{each['answers_per_second']:,.0f}",
            f"{each['ratio']:.3f}",
            f"{min(each['ratios']):.3f} to {max(each['ratios']):.3f}",
        )
    return rows


if __name__ == "__main__":
    typer.run(main)
