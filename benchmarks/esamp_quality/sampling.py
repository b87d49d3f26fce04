"""One engine that samples all problems in one way after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.esamp_quality.guidance import consumer_of
from benchmarks.esamp_quality.problems import END, Problem, chain_length, problems
from benchmarks.esamp_quality.scores import score
from benchmarks.esamp_quality.settings import SAMPLES, Setting


class Sampling:
    """An engine with the trained model.

    Args:
        error: the mean square of a trained distiller's errors; measured by whoever asks for
            `noise` first, if it is 0.
    """

    def __init__(
        self,
        model: Path,
        problems: Sequence[Problem],
        samples: int = SAMPLES,
        eager: bool = False,
    ) -> None:
        from tllm import LLM

        self.problems = problems
        self.samples = samples
        self.error = 0.0
        self.llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=1024,
            kv_cache_memory_bytes=2**31,
            gpu_memory_utilization=0.2,
            disable_log_stats=True,
            enforce_eager=eager,
        )

    def run(self, setting: Setting) -> dict[str, Any]:
        """Scores of a setting, and what shows that it did what it says."""
        if setting.kind == "noise" and not self.error:
            self.run(Setting("esamp", setting.temperature, setting.min_p, setting.beta))
        longest = chain_length(len(self.problems[0].numbers)) + 1
        tokens = self.samples * longest
        consumer = consumer_of(setting, self.error, len(self.problems), tokens)
        if consumer is not None:
            self.llm.register_consumer(consumer)
        begin = time.monotonic()
        try:
            samples: list[list[list[int]]] = [[] for _ in self.problems]
            for wave in range(setting.waves):
                for found, more in zip(samples, self._wave(setting, wave), strict=True):
                    found += more
            seconds = time.monotonic() - begin
            stats = {} if consumer is None else dict(consumer.read_stats())
        finally:
            if consumer is not None:
                self.llm.unregister_consumer(consumer.consumer_id)
        if setting.kind == "esamp" and setting == Setting(
            "esamp", setting.temperature, setting.min_p, setting.beta
        ):
            self.error = float(stats["loss_last"])
        _check(setting, stats)
        kept = ("loss_mean", "loss_last", "rows_trained", "candidates_changed")
        return {
            **setting.as_dict(),
            "seconds": round(seconds, 2),
            "stats": {name: stats[name] for name in kept if name in stats},
            **score(self.problems, samples).as_dict(),
        }

    def _wave(self, setting: Setting, wave: int) -> list[list[list[int]]]:
        from tllm import SamplingParams

        count = self.samples // setting.waves
        longest = chain_length(len(self.problems[0].numbers)) + 1
        params = [
            SamplingParams(
                n=count,
                temperature=setting.temperature,
                min_p=setting.min_p,
                max_tokens=longest,
                stop_token_ids=[END],
                ignore_eos=True,
                detokenize=False,
                seed=10_000 * number + wave * count,
                consumers={"esamp": {"group": str(number)}} if setting.waves > 1 else None,
            )
            for number in range(len(self.problems))
        ]
        prompts = [{"prompt_token_ids": problem.tokens} for problem in self.problems]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            for completion in output.outputs:
                for name, result in completion.consumer_results.items():
                    if result.status != "ok":
                        raise RuntimeError(f"{setting.name}: {name}: {result.error}")
        return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def _check(setting: Setting, stats: dict[str, Any]) -> None:
    """A setting that did nothing is a failure."""
    if setting.kind in ("plain", "noise"):
        return
    if not stats["candidates_changed"]:
        raise RuntimeError(f"{setting.name}: no candidate was changed: {stats}")
    learns = setting.kind not in ("lens", "stratified")
    if learns != bool(stats["rows_trained"]):
        raise RuntimeError(f"{setting.name}: {stats['rows_trained']} rows were trained on")


def serve(
    model: Path,
    count: int,
    numbers: int,
    seed: int,
    samples: int,
    eager: bool,
    settings: Any,
    results: Any,
    seconds: float,
) -> None:
    """A process of its own that takes settings from a queue until it finds None there.

    Args:
        settings, results: queues.
        seconds: no setting begins when the engine has been there for so long.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sampling = Sampling(model, problems(count, numbers, seed), samples, eager)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        setting: Setting | None = settings.get()
        if setting is None:
            break
        results.put(sampling.run(setting))
