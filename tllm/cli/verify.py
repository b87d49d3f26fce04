"""`tllm verify`: what a certificate looks like, and what it is asked with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tllm.verify.certificate import Certificate, PointFigures

SHOWN = 20
"""Differences that are printed; the JSON file has all."""
_COLOURS = {"certified": "green", "incomplete": "yellow", "differs": "red"}
_SAYS = {
    "certified": "Every hook point was compared, and nothing differs.",
    "incomplete": "Nothing differs, and not everything could be compared.",
    "differs": "There are differences: do not trust this model here.",
}


def engine_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of `vllm serve` as arguments of `LLM`; those that were given.

    Raises `ValueError` for one that an engine does not have.
    """
    from tllm.engine.launch import engine_parser

    parser = engine_parser("tllm verify")
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found, unknown = parser.parse_known_args(list(given))
    if unknown:
        raise ValueError(
            f"unknown options {' '.join(unknown)}; further options are those of an engine, such as "
            "--tensor-parallel-size 2 (vllm serve --help=all lists them)"
        )
    return vars(found)


def render(certificate: Certificate, console: Console) -> None:
    engine = certificate.engine
    head = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    head.add_row("[bold]model[/bold]", escape(f"{certificate.model} ({engine['architecture']})"))
    served = (
        f"tLLM {engine['tllm']}, vLLM {engine['vllm']} ({engine['runner']}), {engine['dtype']}, "
        f"{engine['device']}"
    )
    head.add_row("[bold]engine[/bold]", escape(served))
    head.add_row("[bold]against[/bold]", escape(certificate.reference))
    console.print(head)
    console.print(_points(certificate, engine["num_layers"]))
    console.print(_batches(certificate))
    for point, why in certificate.lacking.items():
        _line(console, "", f"no {point}: {why}")
    for note in certificate.notes:
        _line(console, "", note)
    for what in certificate.unchecked:
        _line(console, "[yellow]not checked:[/yellow] ", what)
    for difference in certificate.differences[:SHOWN]:
        _line(console, "[red]differs:[/red] ", str(difference))
    if (more := len(certificate.differences) - SHOWN) > 0:
        _line(console, "", f"and {more} more differences (--json has all)")
    colour, said = _COLOURS[certificate.verdict], _SAYS[certificate.verdict]
    console.print(f"[{colour}]{certificate.verdict}[/{colour}]: {said}", highlight=False)


def _points(certificate: Certificate, num_layers: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("point", no_wrap=True)
    columns = (
        "layers",
        "rows",
        "error",
        "limit",
        "exchanged",
        "steered",
        "patched",
        "gated",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for name, figures in certificate.points.items():
        right = figures.worst <= figures.limit
        worst = f"{figures.worst:.1e}" if figures.rows else "-"
        table.add_row(
            "logprobs" if name == "logits" else name,
            _layers(figures, num_layers),
            f"{figures.rows:,}",
            worst if right else f"[red]{worst}[/red]",
            f"{figures.limit:.1e}",
            f"{figures.power:.1e}" if figures.exchanged else "-",
            _share(figures.seen, figures.steered),
            _share(figures.patches_seen, figures.patched),
            _share(figures.gates_seen, figures.gated),
        )
    return table


def _share(seen: int, count: int) -> str:
    """Of so many requests, those whose change would be seen."""
    return f"{seen}/{count}" if count else "-"


def _layers(figures: PointFigures, num_layers: int) -> str:
    if not figures.layers:
        return "-"
    count = len(figures.layers)
    return f"all {count}" if count == num_layers else f"{count} of {num_layers}"


def _batches(certificate: Certificate) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("batch", no_wrap=True)
    columns = ("requests", "samples", "tokens", "rows", "cached", "chunked", "preempted")
    for column in columns:
        table.add_column(column, justify="right")
    for batch in certificate.batches:
        figures = (batch.requests, batch.samples, batch.tokens, batch.rows, batch.cached_tokens)
        more = (batch.chunked, batch.preemptions)
        table.add_row(batch.name, *(f"{figure:,}" for figure in (*figures, *more)))
    return table


def _line(console: Console, mark: str, text: str) -> None:
    console.print(f"{mark}{escape(text)}", soft_wrap=True, highlight=False)
