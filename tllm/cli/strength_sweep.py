"""`tllm strength-sweep`: how strongly to steer, by what it brings and what it costs."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tllm.cli.engine import check_prompts, start_engine
from tllm.cli.files import check_there, check_writable
from tllm.cli.progress import progress_bar
from tllm.spec.phases import Phase, phase_named
from tllm.spec.reading import prompt_lines, scalar

if TYPE_CHECKING:
    from tllm.steering import SteeringModule, StrengthSweep
    from tllm.steering.strength_sweep import StrengthPoint

COLUMNS = ("strength", "effect", "effect_error", "perplexity", "text_perplexity")
_Prompt = str | list[int]


@dataclass(frozen=True)
class StrengthJob:
    """What to sweep.

    Attributes:
        model: a path or a name on the Hugging Face hub.
        vectors: a file or a folder that `tllm.steering.load` reads.
        loading: further arguments of `load`.
        strengths, phase, max_tokens, temperature, seed: as `tllm.steering.sweep` takes them.
        prompts, texts: files of JSON Lines; without `texts` none are read.
        prompt: prompts that were given one by one, before those of the file.
        matches, effect: a regular expression, or `FILE.py:NAME` of a function; one of the two.
        out: a file whose name ends in .json or .csv.
        plot: one that ends in .svg.
        max_perplexity_ratio: as `StrengthSweep.best` takes it.
        engine: further arguments of `tllm.LLM`.
    """

    model: str
    vectors: Path
    strengths: Sequence[float]
    loading: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[str] = ()
    prompts: Path | None = None
    texts: Path | None = None
    matches: str | None = None
    effect: str | None = None
    phase: Phase = "decode"
    max_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    out: Path | None = None
    plot: Path | None = None
    max_perplexity_ratio: float = 1.5
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # All of it before an engine starts, which takes minutes.
        object.__setattr__(self, "phase", phase_named(self.phase, "--phase"))
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens {self.max_tokens} must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature} must be 0 or more")
        if not 1 <= self.max_perplexity_ratio < math.inf:
            raise ValueError(
                f"--max-perplexity-ratio {self.max_perplexity_ratio} must be 1 or more: 1 allows "
                "what the weakest strength costs"
            )
        check_there("--vectors", self.vectors)
        check_there("--prompts", self.prompts)
        check_there("--texts", self.texts)
        check_writable("--out", self.out, (".json", ".csv"))
        check_writable("--plot", self.plot, (".svg",))


def run(job: StrengthJob, console: Console) -> StrengthSweep:
    """Sweep, with a bar of the strengths."""
    from tllm.steering import load, sweep

    effect = _effect(job)
    listed = _prompts(job.prompts) if job.prompts else []
    prompts = [*job.prompt, *listed]
    if not prompts:
        raise ValueError("give at least one --prompt, or --prompts with a file of JSON Lines")
    texts = _prompts(job.texts) if job.texts else []
    given = {"--prompt": job.prompt, "a line of --prompts": listed, "a line of --texts": texts}
    check_prompts(
        [(name, each) for name, several in given.items() for each in several], job.model, job.engine
    )
    vectors: SteeringModule = load(job.vectors, **job.loading)

    llm = start_engine(job.model, **job.engine)
    with progress_bar(console) as bar:
        task = bar.add_task("strengths", total=len(job.strengths))
        return sweep(
            llm,
            vectors,
            job.strengths,
            prompts,
            effect,
            phase=job.phase,
            texts=texts,
            max_tokens=job.max_tokens,
            temperature=job.temperature,
            seed=job.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _prompts(path: Path) -> list[_Prompt]:
    """Texts and token ids of JSON Lines; `ValueError` names the line that is wrong."""
    found = [prompt for _, _, prompt in prompt_lines(path)]
    if not found:
        raise ValueError(f"{path} has no lines")
    return found


# -- the effect ------------------------------------------------------------------------------------


def _effect(job: StrengthJob) -> Callable[[str], float]:
    """What judges a continuation; `ValueError` where none can."""
    if (job.matches is None) == (job.effect is None):
        raise ValueError(
            "give --matches REGEX, whose effect is the share of texts that have it, or --effect "
            "FILE.py:NAME, a function from a text to a number; one of the two"
        )
    if job.effect is not None:
        return _function(job.effect)
    try:
        pattern = re.compile(job.matches or "")
    except re.error as error:
        raise ValueError(f"--matches {job.matches!r} is no regular expression: {error}") from None
    return lambda text: float(pattern.search(text) is not None)


def _function(given: str) -> Callable[[str], float]:
    """A function of a Python file; what it raises or gives wrongly is a `ValueError`."""
    file, _, name = given.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ValueError(f"--effect {given!r} is not FILE.py:NAME")
    if not Path(file).is_file():
        raise ValueError(f"--effect {given!r}: {file!r} is no file")
    try:
        function = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:  # of whatever kind: the file is the user's
        raise ValueError(
            f"--effect {given!r}: the file raised {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ValueError(f"--effect {given!r}: the file has no function {name!r}")

    def judged(text: str) -> float:
        try:
            value = function(text)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"--effect {given!r} raised {type(error).__name__}: {error}, for {text!r:.80}"
            ) from error
        if isinstance(value, bool):
            return float(value)
        return scalar(value, f"--effect {given!r}: what it gave for {text!r:.80}")

    return judged


# -- what came of it -------------------------------------------------------------------------------


def render(swept: StrengthSweep, job: StrengthJob, console: Console) -> None:
    """Print a row for each strength, and the best one."""
    with_texts = job.texts is not None
    table = Table()
    for column in ("strength", "effect", "perplexity", *(["of texts"] if with_texts else [])):
        table.add_column(column, justify="right")
    for row in swept.rows:
        error = f" ± {row.effect_error:.3f}" if math.isfinite(row.effect_error) else ""
        values = [f"{row.strength:g}", f"{row.effect:.3f}{error}"]
        costs = [row.perplexity, *([row.text_perplexity] if with_texts else [])]
        table.add_row(*values, *(f"{cost:.4g}" for cost in costs))
    console.print(table)
    try:
        best = swept.best(job.max_perplexity_ratio)
        said = (
            f"strength {best.strength:g}, of those whose perplexity is at most "
            f"{job.max_perplexity_ratio:g} times that of the weakest"
        )
    except ValueError as error:
        said = f"not known: {error}"
    console.print(f"best: {said}", highlight=False, soft_wrap=True)


def write(swept: StrengthSweep, job: StrengthJob, path: Path) -> None:
    """Write the rows as CSV, or with what was asked as JSON. A number that is none, or infinite,
    is left empty there, and null here; so is a best one that is not known."""
    rows = [_numbers_of(row) for row in swept.rows]
    if path.suffix.lower() == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
        return
    asked = {
        "model": job.model,
        "vectors": str(job.vectors),
        **job.loading,
        "matches": job.matches,
        "effect": job.effect,
        "phase": job.phase,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
    }
    best = None
    with suppress(ValueError):  # there is none
        best = swept.best(job.max_perplexity_ratio).strength
    told = {**asked, "rows": rows, "best": best}
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _numbers_of(row: StrengthPoint) -> dict[str, float | None]:
    values = {column: getattr(row, column) for column in COLUMNS}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
