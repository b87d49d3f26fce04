"""One engine in a process of its own: reads commands as JSON lines, answers as JSON lines.

python -m benchmarks.engine_process {"engine": "vllm" | "tllm", "shape": ..., "arguments": {...}}
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.asked import Asked, asked
from benchmarks.drafter import depend_on_the_last_token, draw_drafter, placed
from benchmarks.replicas import Replicas
from benchmarks.step_costs import watch, watched
from benchmarks.step_times import LLMStepTimes, StepTimes
from benchmarks.workload import BENCHMARKS, SHAPES, Benchmark, Shape

_KV_BYTES = 8 * 2**30
_STD = 0.02  # of the weights
_START_STEPS = 4
_COUNTERS = ("rows_captured", "rows_dropped", "rows_steered", "tokens_drafted", "tokens_accepted")
_ESAMP_COUNTERS = {
    "rows_predicted": "predictions",
    "candidates_guided": "candidates_changed",
    "rows_trained": "rows_trained",
    "steps_trained": "loss_count",
}


def draw_weights(model: torch.nn.Module, scale: float) -> None:
    """Weights that keep activations alive, and logits of standard deviation `scale`; of each rank
    its own."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    generator = torch.Generator(next(model.parameters()).device).manual_seed(rank)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            parameter.data.fill_(_STD)
        elif not parameter.is_floating_point():  # several numbers in a word
            parameter.data.random_(-(2**31), 2**31 - 1, generator=generator)
        elif parameter.dtype.itemsize == 1:
            drawn = torch.empty_like(parameter, dtype=torch.float32)
            parameter.data.copy_(drawn.normal_(generator=generator))
        elif parameter.dim() < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.normal_(0.0, _STD, generator=generator)
        if name.endswith("lm_head.weight"):  # of the last stage alone
            parameter.data.mul_(scale / parameter.shape[1] ** 0.5 / _STD)


class EngineProcess:
    """A vLLM or tLLM engine on random weights, and the rounds it is asked for."""

    def __init__(self, engine: str, shape: Shape, given: dict[str, Any]) -> None:
        self.shape = shape
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape.config()))
            arguments: dict[str, Any] = {
                "dtype": shape.dtype,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "gpu_memory_utilization": 0.4,
                # Not measured: the engines start side by side.
                "kv_cache_memory_bytes": _KV_BYTES if shape.name != "tiny" else None,
                "disable_log_stats": True,
                **given,
            }
            if drafts := given.get("speculative_config"):
                arguments["speculative_config"] = placed(drafts, shape, Path(folder))
            self.llm: Any
            if "data_parallel_size" in given:
                self.llm = Replicas(engine, folder, arguments)
            elif engine == "vllm":
                from vllm import LLM

                self.llm = LLM(folder, **arguments)
            else:
                from tllm import LLM as InterventionLLM  # noqa: N811

                self.llm = InterventionLLM(folder, **arguments)
        self.llm.apply_model(_Draw(shape.scale))
        if drafts:
            self.llm.apply_model(depend_on_the_last_token)
            assert all(self.llm.collective_rpc(draw_drafter))
        self.engine = engine
        self.current = ""
        self.steering: list[dict[str, Any]] = [{}]
        self._distinct: dict[str, list[Any]] = {}
        self.capturing: Any = None
        self.consumer: Any = None
        self._served = 0

    def close(self) -> None:
        """End what would not end with this process."""
        if self.capturing is not None:
            self.capturing.close()
        if isinstance(self.llm, Replicas):
            self.llm.close()

    @property
    def sampler(self) -> str:
        """Who draws where top-k or top-p is asked for: FlashInfer, or vLLM itself."""
        found: list[str] = self.llm.collective_rpc(sampler_of)
        return found[self._sampling_rank]

    def use(self, benchmark: Benchmark) -> None:
        """Switch what tLLM does; no recompilation, no new CUDA graph."""
        if benchmark.name == self.current or self.engine == "vllm":
            return
        from benchmarks.consumers import consumer_for
        from benchmarks.steering import steering_for

        self.llm.clear_consumers()
        if self.capturing is not None:
            self.capturing.close()
            self.capturing = None
        consumer = consumer_for(benchmark.variant, self.shape)
        if consumer is not None:
            self.llm.register_consumer(consumer)
        self.consumer = consumer
        self.steering = [{}]
        if benchmark.steered is not None and benchmark.name not in self._distinct:
            self.steering = steering_for(benchmark)
        if benchmark.captured is not None:
            from benchmarks.capture import Capturing

            self.capturing = Capturing(benchmark, self.shape)
            self.steering = self.capturing.params
            if self.capturing.consumer is not None:
                self.llm.register_consumer(self.capturing.consumer)
        self.current = benchmark.name

    def round(self, benchmark: Benchmark, number: int) -> dict[str, Any]:
        """Generate once; seconds, tokens, steps that gave something out, and what the consumer
        counted.

        `step_seconds` is the mean of the middle half of the steps: what a step costs, whatever else
        the host did. `start_seconds` is how long the first `_START_STEPS` steps took, with adding
        the requests, however many of them were in by then, and `end_seconds` what came after the
        last step. `plain_seconds`, where only some requests capture: how long the others took on
        average, until the engine gave out their last token. `latency_seconds`, where requests come
        one after the other: from when one was due to its last token, on average.
        """
        requests = asked(benchmark.workload, self.shape.vocab, number)
        made = self._params(benchmark, requests)
        before = self._counted()
        with self._step_times() as times:
            begin = time.perf_counter()
            outputs = self._generate(benchmark, requests, made)
            seconds = time.perf_counter() - begin
        found = {
            "seconds": seconds,
            "steps": len(times.steps),
            "step_seconds": times.middle,
            "start_seconds": times.steps[:_START_STEPS][-1] - begin,
            "end_seconds": begin + seconds - times.steps[-1],
            "tokens": sum(len(each.token_ids) for output in outputs for each in output.outputs),
            "counters": self._counters(benchmark, before, outputs, seconds),
        }
        captured = benchmark.captured
        if captured is not None and captured.one_in > 1:
            plain = [o.request_id for i, o in enumerate(outputs) if captured.is_plain(i)]
            found["plain_seconds"] = statistics.mean(times.finished[name] - begin for name in plain)
        if benchmark.workload.arrivals:
            found["latency_seconds"] = statistics.mean(
                times.finished[output.request_id] - begin - each.due
                for output, each in zip(outputs, requests, strict=True)
            )
        return found

    def _step_times(self) -> StepTimes:
        if isinstance(self.llm, Replicas):
            return self.llm.step_times()
        return LLMStepTimes(self.llm)

    def _generate(
        self, benchmark: Benchmark, requests: Sequence[Asked], params: Sequence[Any]
    ) -> list[Any]:
        """Outputs in the order of the requests."""
        if not benchmark.workload.arrivals:
            prompts = [{"prompt_token_ids": each.prompt_token_ids} for each in requests]
            return list(self.llm.generate(prompts, params, use_tqdm=False))
        engine = self.llm.llm_engine
        waiting = deque(zip(requests, params, strict=True))
        names: list[str] = []
        finished: dict[str, Any] = {}
        begin = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][0].due <= time.perf_counter() - begin:
                request, asking = waiting.popleft()
                self._served += 1
                names.append(f"arrival-{self._served}")
                prompt = {"prompt_token_ids": request.prompt_token_ids}
                engine.add_request(names[-1], prompt, asking)
            if engine.has_unfinished_requests():
                outputs = engine.step()
                finished.update({each.request_id: each for each in outputs if each.finished})
            elif waiting:
                time.sleep(max(0.0, begin + waiting[0][0].due - time.perf_counter()))
        return [finished[name] for name in names]

    def _counted(self) -> dict[str, Any]:
        """What is counted over a round: nothing by vLLM."""
        if self.engine == "vllm":
            return {}
        counted: dict[str, Any] = dict(self.llm.intervention_stats()[0])
        if self.consumer is not None:
            counted["stats"] = dict(self.llm.read_stats(self.consumer))
        return counted

    def _counters(
        self, benchmark: Benchmark, before: dict[str, Any], outputs: list[Any], seconds: float
    ) -> dict[str, Any]:
        """What a round did: nothing that vLLM would count."""
        if self.engine == "vllm":
            return {}
        after = self._counted()
        counters: dict[str, Any] = {name: after[name] - before[name] for name in _COUNTERS}
        counters["consumers"] = after["consumers"]
        if self.consumer is not None:
            stats = counters["stats"] = after["stats"]
            stats.pop("loss_per_prompt", None)  # grows with every prompt ever served
            if benchmark.variant == "esamp":
                counters["esamp"] = {
                    called: stats[name] - before["stats"][name]
                    for called, name in _ESAMP_COUNTERS.items()
                }
        if benchmark.steered is not None and benchmark.steered.gated:
            counters["signals"] = judged_and_fired(outputs)
        if self.capturing is not None:
            counters["capture"] = self.capturing.counters(outputs, seconds)
        return counters

    def costs(self, benchmark: Benchmark, number: int) -> dict[str, Any]:
        """A round whose steps are looked into, which slows them down; see `StepCosts`."""
        requests = asked(benchmark.workload, self.shape.vocab, number)
        self.llm.collective_rpc(watch, args=(max(each.max_tokens for each in requests),))
        self.round(benchmark, number)
        found: dict[str, Any] = self.llm.collective_rpc(watched)[self._sampling_rank]
        return found

    @property
    def _sampling_rank(self) -> int:
        """The first rank of the last pipeline stage."""
        replicated = isinstance(self.llm, Replicas)
        config = self.llm.vllm_config if replicated else self.llm.llm_engine.vllm_config
        parallel = config.parallel_config
        return int(parallel.world_size - parallel.tensor_parallel_size)

    def _params(self, benchmark: Benchmark, requests: Sequence[Asked]) -> list[Any]:
        """The parameters of each prompt; parameters that are alike are one object."""
        work = benchmark.workload
        params = {
            "n": work.samples,
            "temperature": work.temperature,
            "min_p": work.min_p,
            "top_p": work.top_p,
            "top_k": work.top_k,
            "ignore_eos": True,
            "detokenize": False,
        }
        if work.arrivals or isinstance(self.llm, Replicas):
            from vllm.sampling_params import RequestOutputKind

            params["output_kind"] = RequestOutputKind.FINAL_ONLY  # as `generate` has it
        if self.engine == "vllm":
            from vllm import SamplingParams as Params
        else:
            from tllm import SamplingParams as Params  # type: ignore[assignment]
        if work.ragged:
            steering = [{}] if self.engine == "vllm" else self.steering
            return [
                Params(**params, **steering[i % len(steering)], max_tokens=each.max_tokens)
                for i, each in enumerate(requests)
            ]
        params["max_tokens"] = work.max_tokens
        if self.engine == "vllm":
            return [Params(**params)] * work.prompts
        distinct = self._distinct.get(benchmark.name)
        if distinct is None:
            distinct = [Params(**params, **steering) for steering in self.steering]
            if benchmark.steered is not None:  # the others' belong to consumers that come and go
                self._distinct[benchmark.name] = distinct
        return [distinct[i % len(distinct)] for i in range(work.prompts)]


def sampler_of(worker: Any) -> str:
    """Sent to a worker: who draws where top-k or top-p is asked for; "" where nobody does."""
    sampler = worker.worker.model_runner.sampler
    if sampler is None:  # another pipeline stage's
        return ""
    if hasattr(sampler, "use_flashinfer"):  # the V2 runner
        return "FlashInfer" if sampler.use_flashinfer else "vLLM"
    forward = sampler.topk_topp_sampler.forward.__name__
    return "FlashInfer" if forward == "forward_cuda" else "vLLM"


def judged_and_fired(outputs: list[Any]) -> dict[str, int]:
    """How many tokens conditions were judged for, and for how many they held."""
    samples = [sample for output in outputs for sample in output.outputs]
    signals = [signal for sample in samples for signal in sample.signals.values()]
    return {
        "judged": sum(len(signal.positions) for signal in signals),
        "fired": sum(len(signal.fired) for signal in signals),
    }


class _Draw:
    """`draw_weights` as something that a worker can be sent."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, model: torch.nn.Module) -> None:
        draw_weights(model, self.scale)


def main() -> None:
    """Serve commands until standard input ends."""
    # vLLM and its libraries print to standard output: keep the answers apart.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    command = json.loads(sys.argv[1])
    process = EngineProcess(command["engine"], SHAPES[command["shape"]], command["arguments"])
    started = {"sampler": process.sampler}
    print(json.dumps(started), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        benchmark = BENCHMARKS[request["benchmark"]]
        process.use(benchmark)
        work = process.costs if request["what"] == "costs" else process.round
        found = work(benchmark, request["round"])
        print(json.dumps(found, default=str), file=answers, flush=True)
    process.close()


if __name__ == "__main__":
    main()
