"""`python -m benchmarks.lane_steps`: what a step of lanes costs the host, inside an engine.

An engine runs in this process, and lanes are fed a token each in every step, as the client's
messages do it. Twice, in turn: as running requests, and with each turn scheduled as a new request
(`anew`), as where the running batch cannot have them. Calls of Python are the same on every
machine; thread CPU time hangs on it, and less on what else it does than wall time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import particle_options as given
from benchmarks.logprobs_process import arguments


class FunctionCalls:
    """Python functions that are called, those of ours apart."""

    def __init__(self) -> None:
        self.all = self.ours = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """A profile function."""
        if event == "call":
            self.all += 1
            self.ours += f"{os.sep}tllm{os.sep}" in frame.f_code.co_filename


def measured(lanes: Any, names: list[str], vocab: int, steps: int, seed: int) -> dict[str, float]:
    """Medians of steps in which every lane is fed a token."""
    draw = random.Random(seed)
    taken, calls, ours = [], [], []
    lanes.new = lanes.cached = 0
    for number in range(steps):
        tokens = {name: [draw.randrange(2, vocab)] for name in names}
        counted = FunctionCalls() if number % 4 == 3 else None  # which makes them slow
        message = lanes.message(tokens)
        began = time.thread_time()
        sys.setprofile(counted)
        lanes.add(message)
        lanes.run()
        sys.setprofile(None)
        if counted is None:
            taken.append(time.thread_time() - began)
        else:
            calls.append(counted.all)
            ours.append(counted.ours)
        assert len(lanes.answers()) == len(names)
    return {
        "CPU ms": round(1e3 * statistics.median(taken), 3),
        "least CPU ms": round(1e3 * min(taken), 3),
        "calls": statistics.median(calls),
        "calls of ours": statistics.median(ours),
        "new requests": lanes.new / steps,
    }


def main(
    shape: given.Shape = "demo",
    particles: Annotated[str, typer.Option(help="Numbers of lanes.")] = "1,64",
    steps: given.Steps = 32,
    rounds: given.Rounds = 3,
    prompt_tokens: given.PromptTokens = 64,
    options: given.EngineArguments = "{}",
) -> None:
    """Print a table, and the same as JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from benchmarks.driven_lanes import DrivenLanes
    from tllm import LLM
    from tllm.consumers.next_token import NextTokenConsumer

    counts = [int(count) for count in particles.split(",")]
    command = {"particles": counts, "shape": shape, "options": json.loads(options)}
    with TemporaryDirectory() as folder:
        model, chosen, vocab = arguments(command, folder)
        llm = LLM(model, **chosen, consumers=[NextTokenConsumer()])
    lanes = DrivenLanes(llm)
    turns = lanes.core.scheduler._tllm_turns
    draw = random.Random(0)
    prompt = [draw.randrange(2, vocab) for _ in range(prompt_tokens)]
    found: dict[str, list[dict[str, float]]] = {}
    for count in counts:
        for number in range(rounds):
            for way, way_turns in (("running", turns), ("anew", None)):
                lanes.core.scheduler._tllm_turns = way_turns
                names = [f"{way}-{count}-{number}-{lane}" for lane in range(count)]
                for lane, name in enumerate(names):
                    lanes.open(name, [*prompt, 2 + lane])
                lanes.run()
                lanes.answers()
                one = measured(lanes, names, vocab, steps, number)
                found.setdefault(f"{count}, {way}", []).append(one)
                lanes.abort(*names)
                lanes.step()
    table = Table("lanes, way", *next(iter(found.values()))[0])
    for name, figures in found.items():
        medians = {k: statistics.median(each[k] for each in figures) for k in figures[0]}
        table.add_row(name, *(f"{value:.5g}" for value in medians.values()))
        print(json.dumps({name: figures}), flush=True)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
