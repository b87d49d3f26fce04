"""`python -m benchmarks.engine_host`: what our calls cost the host inside a running engine.

An engine runs in this process. Thread CPU time of our calls in a step is measured (before the
forward pass, around sampling, at the step's end), and of the engine's whole step beside it, which
is mostly vLLM's own. On a GPU that has what `benchmarks.host` cannot show: launches, copies,
events, and threads that ask for the interpreter. CPU time hangs on the machine, and less on what
else it does than ratios of speed do.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.call_times import CALLS, CallTimes
from benchmarks.engine_process import EngineProcess
from benchmarks.workload import BENCHMARKS, SHAPES, Benchmark, Captured


def cases(shape: str) -> dict[str, Benchmark]:
    """What is measured, 128 sequences each; idle at both ends."""
    many = BENCHMARKS[f"steer-128-gates-{shape}"].workload
    idle = BENCHMARKS[f"idle-alone-{shape}"]
    one_layer = replace(many, max_tokens=many.max_tokens // 2)
    return {
        "idle": idle,
        "steered, 128 ways": BENCHMARKS[f"steer-128-configs-{shape}"],
        "128 conditions, with signals": BENCHMARKS[f"steer-128-gates-{shape}"],
        "every layer read": replace(BENCHMARKS[f"taps-{shape}"], workload=many),
        "one layer to memory": Benchmark(
            f"capture-1-{shape}", shape, "capture", one_layer, captured=Captured(1)
        ),
        "ESamp": BENCHMARKS[f"esamp-{shape}"],
        "idle again": idle,
    }


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "7b",
    rounds: Annotated[int, typer.Option(help="Rounds of each case; the first warms up.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write what was found, as JSON.")] = None,
) -> None:
    """Print a table: microseconds of a step, the mean over its round; medians of rounds."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    chosen = cases(shape)
    arguments = chosen["idle"].workload.engine_arguments
    process = EngineProcess("tllm", SHAPES[shape], arguments)
    core = process.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    ours, whole = CallTimes(), CallTimes()
    for name in CALLS:
        ours.of(worker.session.steps, name)
    whole.of(core, "step_fn")
    found: dict[str, dict[str, float]] = {}
    for case, benchmark in chosen.items():
        process.use(benchmark)
        figures: list[dict[str, float]] = []
        for number in range(rounds):
            ours.clear()
            whole.clear()
            round_ = process.round(benchmark, number)
            steps = len(whole.taken["step_fn"])
            times = {name: 1e6 * sum(taken) / steps for name, taken in ours.taken.items()}
            times["ours"] = sum(times.values())
            times["engine's step"] = 1e6 * statistics.median(whole.taken["step_fn"])
            figures.append({"step, ms": 1e3 * round_["step_seconds"], **times})
        kept = figures[1:] or figures
        found[case] = {
            name: round(statistics.median(each[name] for each in kept), 2) for name in kept[0]
        }
        print(json.dumps({case: found[case]}), flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    table = Table("", *found)
    for name in found["idle"]:
        table.add_row(name, *(f"{figures[name]:.5g}" for figures in found.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
