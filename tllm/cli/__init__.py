"""The `tllm` command."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

import tllm
from tllm.cli.doctor import examine, render
from tllm.cli.store import app as store_app

app = typer.Typer(help="tLLM: interventions for vLLM.", no_args_is_help=True)
app.add_typer(store_app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tllm {tllm.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """What every subcommand shares."""


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Also start an engine with this model (with random weights)."),
    ] = None,
) -> None:
    """Say what is installed, what was found in vLLM and in a model, and what is wrong."""
    report = examine(model)
    render(report, Console())
    raise typer.Exit(1 if report.problems else 0)
