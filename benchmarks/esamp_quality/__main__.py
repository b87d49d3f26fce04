"""`python -m benchmarks.esamp_quality`: train a small model that reasons, and sample from it."""

from __future__ import annotations

import json
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.esamp_quality import report
from benchmarks.esamp_quality.sampling import serve
from benchmarks.esamp_quality.settings import SAMPLES, confirmation, grid
from benchmarks.esamp_quality.training import Recipe, train

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Out = Annotated[Path, typer.Option(help="Folder of the model.")]
Numbers = Annotated[int, typer.Option(help="Numbers of a problem.")]


@app.command("train")
def train_model(
    out: Out,
    numbers: Numbers = Recipe.numbers,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Problems of a step.")] = Recipe.batch,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = Recipe.hidden,
    layers: Annotated[int, typer.Option(help="Its layers.")] = Recipe.layers,
    seconds: Annotated[float, typer.Option(help="No step begins after so long.")] = Recipe.seconds,
) -> None:
    """Train the model from nothing; the checkpoint of the wanted skill is kept."""
    recipe = Recipe(numbers, hidden, layers, batch, steps, seconds=seconds)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    skill = train(recipe, out, device)
    print(f"kept: Pass@1 {skill:.3f} at temperature 1")


@app.command()
def run(
    model: Annotated[Path, typer.Option(help="Folder of the trained model.")],
    out: Annotated[Path, typer.Option(help="File of the results, JSON Lines; it is added to.")],
    count: Annotated[int, typer.Option(help="Problems.")] = 200,
    numbers: Numbers = Recipe.numbers,
    samples: Annotated[int, typer.Option(help="Samples of each.")] = SAMPLES,
    engines: Annotated[int, typer.Option(help="Engines side by side on the device.")] = 1,
    seconds: Annotated[float, typer.Option(help="No setting begins after so long.")] = 1e9,
    eager: Annotated[bool, typer.Option(help="Neither compile nor capture graphs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 2026,
    again: Annotated[bool, typer.Option(help="The settings around the best, not all.")] = False,
    only: Annotated[str, typer.Option(help="Kinds of settings, comma-separated.")] = "",
) -> None:
    """Sample the problems in every way of the grid."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    kinds = only.split(",") if only else []
    tried = confirmation() if again else grid(layers)
    wanted = [s for s in tried if not kinds or s.kind in kinds]
    done = {result["name"] for result in report.read(out)} if out.exists() else set()
    context = get_context("spawn")
    settings, results = context.Queue(), context.Queue()
    for setting in wanted:
        if setting.name not in done:
            settings.put(setting)
    work = (model, count, numbers, seed, samples, eager, settings, results, seconds)
    workers = [context.Process(target=serve, args=work) for _ in range(engines)]
    for worker in workers:
        settings.put(None)
        worker.start()
    with out.open("a") as file:
        while any(worker.is_alive() for worker in workers) or not results.empty():
            try:
                result = results.get(timeout=1.0)
            except Empty:
                continue
            file.write(json.dumps(result, separators=(",", ":")) + "\n")
            file.flush()
            print(f"{result['name']}: {result['seconds']:.1f} s", flush=True)
    show(out)
    raise typer.Exit(int(any(worker.exitcode for worker in workers)))


@app.command()
def show(
    results: Annotated[Path, typer.Argument(help="File of the results.")],
    plot: Annotated[Path | None, typer.Option(help="Write the frontiers to this image.")] = None,
) -> None:
    """Print the results, and draw them."""
    found = report.read(results)
    if not found:
        raise typer.BadParameter(f"{results} has no results")
    console = Console(width=140)
    console.print(report.table(found))
    if {"plain"} < {result["kind"] for result in found}:
        console.print(report.against(found))
    if plot is not None:
        report.plot(found, plot)


if __name__ == "__main__":
    app()
