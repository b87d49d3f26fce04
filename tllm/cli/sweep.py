"""`tllm sweep`: which layers and positions carry what differs between two prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tllm.cli.engine import check_prompts, start_engine
from tllm.cli.progress import progress_bar
from tllm.patching.metrics import Measures
from tllm.spec.hooks import HookPoint
from tllm.spec.reading import hook_named, json_lines

if TYPE_CHECKING:
    from tllm.patching import Sweep


def read_pairs(path: Path) -> tuple[list[str], list[str], list[list[str | int]] | None]:
    """Clean prompts, corrupt ones, and their answers where all lines have them, of JSON Lines with
    `clean`, `corrupt` and `answers`. Raises `ValueError` naming the line that is wrong."""
    clean: list[str] = []
    corrupt: list[str] = []
    answers: list[list[str | int]] = []
    for number, entry in json_lines(path):
        found = [entry.get(key) for key in ("clean", "corrupt")] if isinstance(entry, dict) else []
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < 2:
            raise ValueError(
                f"{path}, line {number}: give an object with 'clean' and 'corrupt', and 'answers' "
                "if the metric compares any"
            )
        clean.append(texts[0])
        corrupt.append(texts[1])
        if "answers" in entry:
            answers.append(_answers(entry["answers"], f"{path}, line {number}: 'answers'"))
    if answers and len(answers) < len(clean):
        raise ValueError(f"{path}: {len(answers)} of {len(clean)} lines have 'answers'; give all")
    if not clean:
        raise ValueError(f"{path} has no lines")
    return clean, corrupt, answers or None


def _answers(given: Any, what: str) -> list[str | int]:
    """The right answer and a wrong one, or the right one alone."""
    found = given if isinstance(given, list) else [given]
    if not found or not all(isinstance(answer, str) or type(answer) is int for answer in found):
        raise ValueError(f"{what} is {given!r:.60}; give [right, wrong], text or token ids")
    return found


def run(
    model: str, engine: Mapping[str, Any], asked: Mapping[str, Any], console: Console
) -> tuple[Sweep, list[list[str]]]:
    """Sweep, with a bar of the experiments; what came of it, and the text of the tokens.

    Args:
        engine: further arguments of `tllm.LLM`.
        asked: arguments of `llm.patching.sweep`.
    """
    # Minutes before the sweep does.
    Measures.parse(asked["metric"], asked["answers"])
    points = _points(asked)
    check_prompts(
        [
            (f"pair {i}: the {side} prompt", prompt)
            for side in ("clean", "corrupt")
            for i, prompt in enumerate(asked[side])
        ],
        model,
        engine,
    )
    llm = start_engine(model, **{"hook_points": points, **engine})
    with progress_bar(console) as bar:
        task = bar.add_task("experiments", total=None)
        sweep = llm.patching.sweep(
            **asked,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    tokenizer = llm.get_tokenizer()
    return sweep, [[tokenizer.decode([token]) for token in tokens] for tokens in sweep.tokens]


def _points(asked: Mapping[str, Any]) -> list[str]:
    """The hook points that the engine needs taps for. `ValueError` names one that is none."""
    from tllm.client.path_ways import BRANCHES
    from tllm.engine.options import CHEAP_POINTS  # vLLM takes seconds to import

    branches = BRANCHES if list(asked["freeze"]) == ["all"] else asked["freeze"]
    named = [
        *(hook_named(hook, "--hooks") for hook in asked["hooks"]),
        *(hook_named(branch, "--freeze") for branch in branches),
        *(hook_named(hook, "--receivers") for hook, _ in asked["receivers"]),
    ]
    points = {*CHEAP_POINTS, *named}
    return [point.value for point in HookPoint if point.value in points]


def render(sweep: Sweep, texts: Sequence[Sequence[str]], top: int, console: Console) -> None:
    """Print the two runs, and the experiments with the largest values."""
    for name in sweep.metrics:
        clean, corrupt = sweep.clean[name].mean(), sweep.corrupt[name].mean()
        floor = sweep.noise_floor[name]
        console.print(
            f"{name}: clean {clean:.3f}, corrupt {corrupt:.3f}, noise {floor:.1e}", highlight=False
        )
    for name, count in sweep.not_numbers.items():
        if count:
            console.print(
                f"{name}: {count} of {len(sweep.rows)} experiments gave NaN", highlight=False
            )
    table = Table()
    where = ["pair", "hook", "layer"]
    where += [] if sweep.heads is None else ["head"]
    where += [] if sweep.together else ["position", "token"]
    for column in (*where, *sweep.metrics):
        table.add_column(column, justify="left" if column in ("hook", "token") else "right")
    for row in sweep.top(top):
        told = row | {"token": escape(repr(_text(row, texts)))}
        values = [f"{row[name]:.3f}" for name in sweep.metrics]
        table.add_row(*(str(told[key]) for key in where), *values)
    console.print(table)


def write(sweep: Sweep, texts: Sequence[Sequence[str]], path: Path) -> None:
    """Write a row for each experiment, as JSON Lines; NaN is null there."""
    with path.open("w", encoding="utf-8") as file:
        for row in sweep.rows:
            known = {name: None if value != value else value for name, value in row.items()}
            file.write(json.dumps({**known, "text": _text(row, texts)}) + "\n")


def _text(row: Mapping[str, Any], texts: Sequence[Sequence[str]]) -> str | None:
    """The token at the position of an experiment; None where all were patched together."""
    return None if row["position"] is None else texts[row["pair"]][row["position"]]


def draw(sweep: Sweep, texts: Sequence[Sequence[str]], path: Path, console: Console) -> None:
    """Draw the heatmap: of all pairs, or of the first one where positions of pairs of different
    length have no mean. The tokens are under the positions where it is of one pair."""
    pair = None if sweep.comparable else 0
    labels = None
    if (len(texts) == 1 or pair is not None) and not sweep.together:
        tokens = texts[0]
        there = range(-len(tokens), len(tokens))
        labels = [f"{each} {tokens[each]}" if each in there else "" for each in sweep.positions]
    sweep.heatmap(path, pair=pair, labels=labels)
    if pair is not None:
        console.print(
            "heatmap: of pair 0 alone, since the pairs have different numbers of tokens, and their "
            "positions no mean; --positions that count from the end, such as -2,-1, have one"
        )
