"""The `tllm` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import tllm
from tllm.cli import capture as capturing
from tllm.cli.doctor import examine, render
from tllm.cli.store import app as store_app
from tllm.stores import StoreError

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


@app.command()
def capture(
    model: Annotated[str, typer.Option(help="A path, or a name on the Hugging Face hub.")],
    input: Annotated[
        Path,
        typer.Option(
            help="JSON Lines: texts, or objects with 'prompt' or 'prompt_token_ids', and 'id'."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store.")],
    hooks: Annotated[
        list[str],
        typer.Option(help="Such as post_block:12, post_block:4:9, attn_out:0,4,8, pre_attn:all."),
    ],
    positions: Annotated[
        str,
        typer.Option(
            help="all, all_prompt, all_generated, last_prompt, positions such as 0,-1, or JSON."
        ),
    ] = "all",
    reduction: Annotated[str, typer.Option(help="none, mean, max or last.")] = "none",
    dtype: Annotated[str, typer.Option(help="model, float32 or float16.")] = "model",
    tag: Annotated[str, typer.Option(help="Of the records.")] = "",
    layout: Annotated[str, typer.Option(help="sharded, packed or per_file.")] = "sharded",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 1,
    batch: Annotated[int, typer.Option(help="Prompts handed to the engine at once.")] = 256,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, an argument of tllm.LLM; the value is JSON or text."),
    ] = None,
) -> None:
    """Write activations of many prompts into a store. Run it again to go on where it stopped."""
    console = Console()
    try:
        job = capturing.Job(
            model=model,
            inputs=input,
            out=out,
            capture={
                "hooks": hooks,
                "positions": _positions(positions),
                "reduction": reduction,
                "dtype": dtype,
            },
            tag=tag,
            layout=layout,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            batch=batch,
            engine=dict(map(_argument, engine_arg or ())),
        )
        summary = capturing.run(job, console)
    except (ValueError, StoreError) as error:
        raise typer.BadParameter(str(error)) from None
    capturing.render(summary, job, console)
    raise typer.Exit(1 if summary.failures else 0)


def _positions(text: str) -> Any:
    """Positions as a command line gives them."""
    if text[:1] in "[{":
        return json.loads(text)
    if text[:1].isdigit() or text[:1] == "-":
        return [int(position) for position in text.split(",")]
    return text


def _argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--engine-arg {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
