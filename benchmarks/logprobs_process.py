"""One engine in a process of its own that steps particles; JSON lines in, JSON lines out.

python -m benchmarks.logprobs_process {"engine": "vllm" | "tllm", "shape": ..., ...}
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.workload import SHAPES

TOP = 20


class Round:
    """The tokens that particles are fed: the same for every way of stepping them."""

    def __init__(
        self, number: int, command: dict[str, Any], particles: int, steps: int, vocab: int
    ) -> None:
        draw = random.Random(number)
        tokens = range(command["prompt_tokens"])
        self.prompt = [draw.randrange(2, vocab) for _ in tokens]
        # The first differs: equal queries would be computed once.
        rest = range(steps - 1)
        firsts = draw.sample(range(2, vocab), particles)
        self.fed = [[first, *(draw.randrange(2, vocab) for _ in rest)] for first in firsts]
        self.steps = steps

    def prompts(self, step: int) -> list[list[int]]:
        """What each particle has after some steps."""
        return [self.prompt + fed[:step] for fed in self.fed]


def arguments(command: dict[str, Any], folder: str) -> tuple[str, dict[str, Any], int]:
    """The model, the engine's arguments, and the size of the vocabulary."""
    shared = {
        "max_num_seqs": max(command["particles"]),
        "max_num_batched_tokens": 8192,  # vLLM's default depends on the class that is used
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **command["options"],
    }
    if command["shape"] == "demo":
        model = str(Path(__file__).parents[1] / "demo" / "model")
        vocab = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        # On a CPU a block has 128 tokens by default: the prefix cache would not have any of these.
        own = {
            "dtype": "float32",
            "max_model_len": 512,
            "block_size": 32,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 2**29,
        }
        return model, own | shared, vocab
    shape = SHAPES[command["shape"]]
    Path(folder, "config.json").write_text(json.dumps(shape.config()))
    own = {
        "dtype": shape.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.4,
        "kv_cache_memory_bytes": 8 * 2**30,  # not measured: the engines start side by side
    }
    return folder, own | shared, shape.vocab


class Clock:
    """What is timed of a round: all that is asked, without looking at answers.

    Attributes:
        seconds: of wall time.
        cpu: seconds of this process on all threads, which is the client's half: the engine has a
            process of its own.
    """

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *raised: object) -> None:
        wall, cpu = self._began
        self.seconds += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


class Vllm:
    """Untouched vLLM: every step resubmits every particle's tokens, with max_tokens=1."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(model, **options)

    def close(self) -> None:
        """End the engine's process."""
        self._llm.llm_engine.engine_core.shutdown()

    def step(self, work: Round, way: str, clock: Clock) -> dict[str, Any]:
        """All steps of a round."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP if way == "resubmit-top20" else None,
        )
        answers = 0
        for step in range(work.steps):
            prompts = [{"prompt_token_ids": tokens} for tokens in work.prompts(step + 1)]
            with clock:
                outputs = self._llm.generate(prompts, params, use_tqdm=False)
            answers += sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"answers": answers}


class Tllm:
    """`AsyncVirtualLM`, with lanes and with queries."""

    def __init__(self, model: str, options: dict[str, Any], transport: str) -> None:
        from tllm.logprobs import AsyncVirtualLM

        self._lm = AsyncVirtualLM.from_name(model, engine_opts=options, transport=transport)

    def close(self) -> None:
        """End the engine's process."""
        self._lm.cleanup()

    def step(self, work: Round, way: str, clock: Clock) -> dict[str, Any]:
        """All steps of a round, and what shows that they were computed; that is not timed."""
        before = self._counters()
        kind, _, top = way.partition("-")
        form: dict[str, Any] = {"top_k": TOP} if top else {}
        walk: Callable[[Round, dict[str, Any], Clock], Awaitable[dict[str, Any]]]
        walk = self._queries if kind == "query" else partial(self._lanes, together=kind == "lanes")
        found = asyncio.run(walk(work, form, clock))  # type: ignore[arg-type]
        after = self._counters()
        return {**found, **{name: after[name] - before[name] for name in after}}

    def _counters(self) -> dict[str, Any]:
        lm = self._lm
        consumer = lm.run(lm.engine.read_stats(lm.engine.consumers["next_token"]))
        names = ("rows", "bundles", "bytes_out")
        return {"parked": lm.stats()["parked"], **{name: consumer[name] for name in names}}

    async def _lanes(
        self, work: Round, form: dict[str, Any], clock: Clock, *, together: bool
    ) -> dict[str, Any]:
        with clock:
            root = self._lm.open(work.prompt)
            await root.next(**form)  # type: ignore[arg-type]
            lanes = [root.fork() for _ in work.fed]
            await root.close()
        answers, total = 0, 0.0
        for step in range(work.steps):
            with clock:
                for lane, fed in zip(lanes, work.fed, strict=True):
                    lane.feed(fed[step])
                if together:
                    found = await self._lm.batch_next(lanes, **form)
                else:
                    rows = await asyncio.gather(*(lane.next(**form) for lane in lanes))  # type: ignore
            if together:
                rows = list(zip(*found, strict=True) if isinstance(found, tuple) else found)
            answers += len(rows)
            total += _mass(rows[-1])
        with clock:
            await asyncio.gather(*(lane.close() for lane in lanes))
        return {"answers": answers, "mean_probability_mass": total / work.steps}

    async def _queries(self, work: Round, form: dict[str, Any], clock: Clock) -> dict[str, Any]:
        answers, total = 0, 0.0
        for step in range(work.steps):
            prompts = work.prompts(step + 1)
            with clock:
                waiting = (self._lm.next_token_logprobs(p, **form) for p in prompts)
                rows = await asyncio.gather(*waiting)
            answers += len(rows)
            total += _mass(rows[-1])
        return {"answers": answers, "mean_probability_mass": total / work.steps}


def _mass(row: Any) -> float:
    """The probability of all tokens that came back.

    On this thread: those of torch would still spin on every core in the step after.
    """
    values = row[0] if isinstance(row, tuple) else row
    return float(np.exp(values.numpy()).sum())


def main() -> None:
    """Serve commands until standard input ends."""
    # vLLM and its libraries print to standard output: keep the answers apart.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    command = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        model, options, vocab = arguments(command, folder)
        engine: Vllm | Tllm
        if command["engine"] == "vllm":
            engine = Vllm(model, options)
        else:
            engine = Tllm(model, options, command["transport"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = Round(asked["round"], command, asked["particles"], asked["steps"], vocab)
        # With all that vLLM imports, a full collection takes as long as many steps, and comes when
        # it comes: each round begins after one.
        gc.collect()
        clock = Clock()
        counters = engine.step(work, asked["way"], clock)
        found = {"seconds": clock.seconds, "cpu_seconds": clock.cpu, "counters": counters}
        print(json.dumps(found), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
