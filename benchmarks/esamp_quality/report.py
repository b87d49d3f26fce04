"""Results as a table, and as frontiers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.esamp_quality.scores import KS, Scores, interval


def read(path: Path) -> list[dict[str, Any]]:
    """Results, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Every setting: those of a kind together, best Pass@64 first."""
    shown = Table("setting", *(f"Pass@{k}" for k in KS), "95%", "distinct", "valid", "s")
    best = {kind: max(_last(r) for r in results if r["kind"] == kind) for kind in _kinds(results)}
    for result in sorted(results, key=lambda r: (-best[r["kind"]], r["kind"], -_last(r))):
        scores = Scores.of(result)
        ks = [k for k in KS if k <= scores.samples]
        low, high = interval(scores.pass_at(ks[-1]))
        shown.add_row(
            result["name"],
            *(f"{100 * scores.pass_at(k).mean():.1f}" if k in ks else "" for k in KS),
            f"{100 * low:.1f} to {100 * high:.1f}",
            f"{scores.distinct.mean():.2f}",
            f"{100 * scores.valid.mean() / scores.samples:.1f}",
            f"{result['seconds']:.0f}",
        )
    return shown


def against(results: Sequence[dict[str, Any]]) -> Table:
    """Each kind at its best setting, for each k, minus plain sampling at *its* best; the interval
    is of the paired difference over problems."""
    ks = [k for k in KS if k <= results[0]["samples"]]
    shown = Table("kind", *(f"Pass@{k} - plain" for k in ks), "distinct - plain")
    plain = [Scores.of(r) for r in results if r["kind"] == "plain"]
    for kind in _kinds(results):
        if kind == "plain":
            continue
        ours = [Scores.of(r) for r in results if r["kind"] == kind]
        cells = [
            _difference([s.pass_at(k) for s in ours], [s.pass_at(k) for s in plain], 100)
            for k in ks
        ]
        cells.append(_difference([s.distinct for s in ours], [s.distinct for s in plain], 1))
        shown.add_row(kind, *cells)
    return shown


def _difference(ours: Sequence[Any], plain: Sequence[Any], unit: float) -> str:
    one, other = (max(each, key=lambda values: values.mean()) for each in (ours, plain))
    low, high = interval(unit * (one - other))
    return f"{unit * (one - other).mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def _kinds(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(result["kind"] for result in results))


def _last(result: dict[str, Any]) -> float:
    scores = Scores.of(result)
    return float(scores.pass_at(min(KS[-1], scores.samples)).mean())


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Pass@16 and distinct right solutions against Pass@1: a point a setting, but for those whose
    Pass@1 is below half of the best, which are counted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    least = max(_first(r) for r in results) / 2
    shown = [r for r in results if _first(r) >= least]
    some = min(16, shown[0]["samples"])
    for kind in _kinds(shown):
        scores = [Scores.of(r) for r in shown if r["kind"] == kind]
        style = {"marker": "^", "linestyle": ""} | (
            {"marker": "o", "color": "black", "zorder": 3} if kind == "plain" else {}
        )
        first = [100 * s.pass_at(1).mean() for s in scores]
        left.plot(first, [100 * s.pass_at(some).mean() for s in scores], label=kind, **style)
        right.plot(first, [s.distinct.mean() for s in scores], **style)
    left.set(xlabel="Pass@1, %", ylabel=f"Pass@{some}, %")
    right.set(xlabel="Pass@1, %", ylabel="distinct right solutions of a problem")
    if len(shown) < len(results):
        below = f"{len(results) - len(shown)} settings have less than {100 * least:.0f}"
        right.set_title(f"{below}, and are not shown", fontsize=9)
    left.legend()
    figure.savefig(path)


def _first(result: dict[str, Any]) -> float:
    return float(Scores.of(result).pass_at(1).mean())
