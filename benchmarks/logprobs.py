"""`python -m benchmarks.logprobs`: steps of particles a second, beside untouched vLLM.

Each step of a round needs the distribution of every particle's next token. Untouched vLLM resubmits
all tokens with max_tokens=1 and its prefix cache on: without log-probabilities (`resubmit`, which
tells nothing but one drawn token: a bound), and with its top 20 (`resubmit-top20`). tLLM answers
with the whole vocabulary (`lane`, `query`), or with the top 20. Rounds of both engines alternate.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import RESULTS, environment
from benchmarks.pairs import bootstrap_interval

WAYS = {
    "resubmit": "vllm",
    "resubmit-top20": "vllm",
    "query": "tllm",
    "query-top20": "tllm",
    "lane": "tllm",
    "lane-top20": "tllm",
}


class Engine:
    """The other end of an engine process."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.logprobs_process", json.dumps(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, way: str, particles: int, number: int) -> dict[str, Any]:
        """One round."""
        assert self._process.stdin is not None
        asked = {"way": way, "particles": particles, "round": number}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
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


def main(
    shape: Annotated[
        str, typer.Option(help="demo, or one of benchmarks.workload.SHAPES.")
    ] = "demo",
    particles: Annotated[str, typer.Option(help="Numbers of particles.")] = "1,8,64,256",
    steps: Annotated[int, typer.Option(help="Steps of a round.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each way, in turn.")] = 3,
    ways: Annotated[str, typer.Option(help="Ways of stepping.")] = ",".join(WAYS),
    transport: Annotated[str, typer.Option(help="shared or rpc.")] = "shared",
    options: Annotated[str, typer.Option(help="Engine arguments, as JSON.")] = "{}",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure, print a table, and write `logprobs-SHAPE.json`."""
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
    engines: dict[str, Engine] = {}
    results: list[dict[str, Any]] = []
    try:
        for name in dict.fromkeys(WAYS[way] for way in chosen):
            engines[name] = Engine({**command, "engine": name})
        for count in counts:
            results += measure(engines, chosen, count, steps, rounds)
    finally:
        for engine in engines.values():
            engine.close()
    out.mkdir(parents=True, exist_ok=True)
    result = {"name": f"logprobs-{shape}", "workload": command, "rounds": rounds}
    written = {**result, "results": results, **environment()}
    (out / f"logprobs-{shape}.json").write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(written))
    table = Table(
        "particles", "way", "ms a step", "answers/s", "vLLM's time / ours", "95% interval"
    )
    for each in results:
        table.add_row(
            str(each["particles"]),
            each["way"],
            f"{each['ms_per_step']:.2f}",
            f"{each['answers_per_second']:,.0f}",
            f"{each['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*each["interval"]),
        )
    Console().print(table)


def measure(
    engines: dict[str, Engine], ways: list[str], count: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Rounds of each way in turn; ratios are within a round."""
    for way in ways:
        engines[WAYS[way]].round(way, count, 10_000 * count)  # warm-up
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        order = ways if number % 2 else ways[::-1]
        for way in order:
            # No tokens are fed twice, so no way profits from another's prefix cache.
            serial = 10_000 * count + 100 * (number + 1) + ways.index(way)
            found = engines[WAYS[way]].round(way, count, serial)
            check(way, count, steps, found["counters"])
            taken[way].append(found)
    results = []
    for way in ways:
        seconds = [found["seconds"] for found in taken[way]]
        base = [found["seconds"] for found in taken["resubmit"]]
        ratios = [b / s for b, s in zip(base, seconds, strict=True)]
        middle = statistics.median(seconds)
        results.append(
            {
                "particles": count,
                "way": way,
                "ms_per_step": round(1e3 * middle / steps, 3),
                "answers_per_second": round(count * steps / middle, 1),
                "ratio": round(statistics.median(ratios), 4),
                "interval": [round(edge, 4) for edge in bootstrap_interval(ratios)],
                "counters": taken[way][-1]["counters"],
            }
        )
    return results


if __name__ == "__main__":
    typer.run(main)
