"""`tllm capture`: activations of many prompts, into a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import tllm.stores
from tllm.cli.earlier_run import ASKED_LAYERS, REDUCED_POSITIONS, EarlierRun
from tllm.cli.engine import start_engine
from tllm.cli.progress import progress_bar
from tllm.spec.capture import CaptureSpec
from tllm.spec.hooks import HookPoint
from tllm.spec.reading import prompt_lines
from tllm.stores.format import WRITERS, normal_text, root_path
from tllm.stores.writer_root import owner_of

NAME = "filesystem"


@dataclass(frozen=True)
class Job:
    """What to capture, of what, and where to.

    Attributes:
        model: a path or a name on the Hugging Face hub.
        inputs: JSON Lines; each line is a text, or an object with `prompt` (text) or
            `prompt_token_ids`, and `id` if there is one (else `line-N`).
        out: folder of the store.
        capture: options of the capture, as in `SamplingParams(capture={"filesystem": ...})`.
        max_tokens: tokens to generate for each prompt; of the last one there are no rows.
        batch: prompts that are handed to the engine at once.
        engine: further arguments of `tllm.LLM`.
    """

    model: str
    inputs: Path
    out: Path
    capture: Mapping[str, Any]
    tag: str = ""
    layout: tllm.stores.Layout = "sharded"
    max_tokens: int = 1
    batch: int = 256
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        CaptureSpec.parse(self.capture, "capture")
        object.__setattr__(self, "out", root_path(self.out))
        for option, number in (("--max-tokens", self.max_tokens), ("--batch", self.batch)):
            if number < 1:
                raise ValueError(f"{option} {number} must be 1 or more")
        if not self.inputs.is_file():
            raise ValueError(f"input {str(self.inputs)!r} is no file; give a file of JSON Lines")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out {str(self.out)!r} is no folder; give one, or a name for one")


@dataclass
class Summary:
    """What came of a job.

    Attributes:
        captured, skipped: prompts that are in the store now, and that were before.
        failures: by error, prompts that are not in the store, or not whole.
        rows, bytes: written in this run.
        seconds: from the first prompt to the last.
    """

    captured: int = 0
    skipped: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    bytes: int = 0
    rows_dropped: int = 0
    seconds: float = 0.0


def run(job: Job, console: Console) -> Summary:
    """Capture what is not in the store yet."""
    prompts = list(_read(job.inputs))
    if not prompts:
        raise ValueError(f"input {str(job.inputs)!r} has no prompts; give one or more, each a line")
    summary = Summary()
    _check_alone(job.out)
    done = _earlier_run(job).captured(dict(prompts))
    left = [(name, prompt) for name, prompt in prompts if name not in done]
    summary.skipped = len(prompts) - len(left)
    if left:
        _capture(job, left, summary, console)
    return summary


def _check_alone(out: Path) -> None:
    """Refuse a store that another run writes into: both would capture what is not there yet."""
    for folder in out.glob(f"{WRITERS}/*-{NAME}-*"):
        if owner := owner_of(out, folder.name):
            raise ValueError(
                f"out {str(out)!r} is written into by {owner}; wait until it has ended and go on "
                "then, or give another --out; where it is left of a run that was killed, end it"
            )


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """`(id, prompt)` of each line; `ValueError` names the line that is wrong."""
    seen: dict[str, int] = {}
    for number, entry, prompt in prompt_lines(path):
        name = f"line-{number}"
        if isinstance(entry, dict) and (given := entry.get("id")) is not None:
            if not isinstance(given, (str, int, float)) or isinstance(given, bool):
                raise ValueError(
                    f"{path}, line {number}: the id {given!r:.60} is neither text nor a number"
                )
            name = normal_text(str(given))  # as it will be in the store
        if name in seen:
            raise ValueError(
                f"{path}, line {number}: the id {name!r} is that of line {seen[name]} too"
            )
        seen[name] = number
        yield name, prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _earlier_run(job: Job) -> EarlierRun:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        from tllm.engine.tokenizer import encoded, tokenizer_of  # vLLM takes seconds to import

        return encoded(tokenizer_of(job.model, job.engine), texts)

    given = job.engine.get("served_model_name") or job.model
    served = given[0] if isinstance(given, list) else given
    if not isinstance(served, str):
        raise ValueError(
            f"--engine-arg served_model_name={given!r:.60}: give a text, or a list of texts"
        )
    return EarlierRun(
        job.out,
        job.tag,
        model=served,
        asked=CaptureSpec.parse(job.capture, "capture"),
        max_tokens=job.max_tokens,
        encode=encode,
    )


def _capture(job: Job, prompts: list[tuple[str, Any]], summary: Summary, console: Console) -> None:
    from tllm import SamplingParams
    from tllm.consumers.capture.filesystem import FilesystemConsumer
    from tllm.engine.options import CHEAP_POINTS
    from tllm.engine.refusals import REFUSALS

    spec, options = CaptureSpec.parse(job.capture, "capture"), _options(job)
    points = {*CHEAP_POINTS, *(point for point, _ in spec.hooks)}
    # What is there under one of these names is not whole: it is made anew.
    consumer = FilesystemConsumer(
        job.out,
        layout=job.layout,
        tag=job.tag,
        on_collision="overwrite",
    )
    engine = {"hook_points": [p.value for p in HookPoint if p.value in points], **job.engine}
    try:
        llm = start_engine(job.model, capture_consumers=[consumer], result_timeout_s=0.0, **engine)
    except ValueError as error:
        # Another run may have begun while this engine started.
        if isinstance(error.__cause__, tllm.stores.WriterInUseError):
            _check_alone(job.out)
        raise
    begin = time.monotonic()
    with progress_bar(console) as progress:
        task = progress.add_task("prompts", total=len(prompts))
        written: list[Any] = []
        refused: list[str] = []
        accepted = 0
        remaining = iter(prompts)
        while batch := list(islice(remaining, job.batch)):
            for name, prompt in batch:
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=job.max_tokens,
                    detokenize=False,
                    capture={NAME: {**options, "request_id": name}},
                )
                try:
                    llm.enqueue(prompt, params, use_tqdm=False)
                except REFUSALS as error:
                    refused.append(f"{name} was refused: {error}")
            outputs = llm.wait_for_completion(use_tqdm=False)
            accepted += len(outputs)
            # The disk works on the batch before while the engine is at this one.
            _count(llm, written, summary)
            written = outputs
            progress.update(task, advance=len(batch), description=_rate(summary, begin))
        if not accepted:  # what is wrong is wrong with all of them
            raise ValueError(refused[0])
        _count(llm, written, summary)
        summary.failures.update(refused)
        progress.update(task, description=_rate(summary, begin))
    summary.seconds = time.monotonic() - begin
    summary.rows_dropped = sum(worker["rows_dropped"] for worker in llm.intervention_stats())
    llm.clear_consumers()


def _options(job: Job) -> dict[str, Any]:
    """What each request asks for, but for the name of its record."""
    spec = CaptureSpec.parse(job.capture, "capture")
    layers = {hook: str(layers) for hook, layers in spec.hooks if layers is not None}
    noted: dict[str, Any] = {ASKED_LAYERS: layers}
    if spec.reduction != "none":
        noted[REDUCED_POSITIONS] = job.capture.get("positions", "all")
    return {**job.capture, "metadata": noted}


def _count(llm: Any, outputs: list[Any], summary: Summary) -> None:
    """Wait for the records of some outputs, and count them."""
    llm.wait_for_results(outputs)
    for output in outputs:
        result = output.capture_results[NAME]
        if result.status == "ok":
            summary.captured += 1
        else:
            summary.failures[f"{result.status}: {result.error}"] += 1
        if result.payload is not None:
            summary.rows += result.payload.rows
            summary.bytes += result.payload.bytes


def _rate(summary: Summary, begin: float) -> str:
    return f"prompts ({summary.rows / (time.monotonic() - begin):,.0f} rows/s)"


def render(summary: Summary, job: Job, console: Console) -> None:
    """Print what came of it."""
    table = Table("", Column(overflow="fold"), show_header=False)
    table.add_row("captured", _prompts(summary.captured))
    table.add_row("there before", _prompts(summary.skipped))
    table.add_row("rows", f"{summary.rows:,} ({summary.bytes / 1e6:,.1f} MB)")
    if summary.seconds:
        seconds = summary.seconds
        table.add_row(
            "speed",
            f"{summary.rows / seconds:,.0f} rows/s, {summary.bytes / seconds / 1e6:,.1f} MB/s "
            f"for {seconds:,.1f} s",
        )
    table.add_row("rows dropped", f"{summary.rows_dropped:,}")
    table.add_row("failed", _prompts(summary.failures.total()))
    for error, count in summary.failures.most_common(5):
        table.add_row("", escape(f"{count} x {error}"))
    table.add_row("store", escape(str(job.out)))
    console.print(table)


def _prompts(number: int) -> str:
    return f"{number:,} prompt" if number == 1 else f"{number:,} prompts"
