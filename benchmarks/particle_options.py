"""Command-line options that the benchmarks of particles and of lanes share."""

from __future__ import annotations

from typing import Annotated

import typer

Shape = Annotated[str, typer.Option(help="demo, or one of benchmarks.workload.SHAPES.")]
Steps = Annotated[int, typer.Option(help="Steps of a round.")]
Rounds = Annotated[int, typer.Option(help="Rounds of each way, in turn.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of the prompt.")]
EngineArguments = Annotated[str, typer.Option(help="Engine arguments, as JSON.")]
