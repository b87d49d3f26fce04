"""The user's half: what every front end does with consumers and requests."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle
import vllm

from tllm.consumers.base import Consumer
from tllm.engine import versions
from tllm.engine.options import CONFIG_KEY, EngineOptions
from tllm.registry import check
from tllm.spec.hooks import HookPoint
from tllm.spec.request import EXTRA_ARG, RequestSpec


class WorkerCall(Protocol):
    """Calls a method of the workers with pickled arguments, and returns their answers."""

    def __call__(self, method: str, payload: bytes) -> list[bytes]: ...


def encode_call(*args: Any) -> bytes:
    """Arguments of a worker call."""
    return cloudpickle.dumps(args)


def decode_answers(answers: Sequence[bytes]) -> list[Any]:
    """The workers' answers; raises what the first one to fail raised."""
    decoded = [pickle.loads(answer) for answer in answers]
    for status, *rest in decoded:
        if status == "error":
            refused, message = rest
            raise (ValueError if refused else RuntimeError)(message)
    return [rest[0] for _, *rest in decoded]


def engine_arguments(
    kwargs: dict[str, Any], options: Mapping[str, Any], consumers: Iterable[Consumer]
) -> dict[str, Any]:
    """vLLM's engine arguments with tLLM attached.

    Args:
        kwargs: the user's engine arguments.
        options: `EngineOptions` fields.
        consumers: known already; the hook points they need are installed too.
    """
    from vllm.platforms import current_platform

    versions.probe()
    for name in ("worker_cls", "scheduler_cls"):
        if kwargs.get(name) not in (None, "auto"):
            raise ValueError(
                f"{name}={kwargs[name]!r} was given, but tLLM attaches through its own; leave it "
                "out, or use vllm.LLM"
            )
    chosen = EngineOptions(**options)
    points = set(chosen.points)
    for consumer in consumers:
        for flow in consumer.flows():
            points |= {HookPoint(read.site) for read in flow.reads if read.site}
            points |= {HookPoint(write.site) for write in flow.writes if write.site}
    if chosen.hook_points != "all":
        ordered = tuple(point.value for point in HookPoint if point in points)
        chosen = EngineOptions(**{**options, "hook_points": ordered})
    worker = "worker_cpu.InterventionCPUWorker"
    if not current_platform.is_cpu():
        worker = "worker_cuda.InterventionCUDAWorker"
    return {
        **kwargs,
        "worker_cls": f"tllm.engine.{worker}",
        "scheduler_cls": "tllm.engine.scheduler.create_scheduler",
        "additional_config": {
            **(kwargs.get("additional_config") or {}),
            CONFIG_KEY: chosen.to_config(),
        },
    }


class Client:
    """Consumers and requests of one engine, as the user's process knows them."""

    def __init__(self) -> None:
        self.consumers: dict[str, Consumer] = {}

    def admit(self, consumer: Consumer) -> bytes:
        """Check a consumer and make the payload of the `register` call."""
        check(consumer)
        if consumer.consumer_id in self.consumers:
            raise ValueError(
                f"a consumer with consumer_id={consumer.consumer_id!r} is registered; unregister "
                "it first, or give this one another consumer_id"
            )
        return encode_call(consumer)

    def prepare(
        self, params: vllm.SamplingParams, request_id: str
    ) -> tuple[vllm.SamplingParams, str]:
        """A request's own copy of its parameters, and the key its results are kept under.

        Raises `ValueError` for options that no registered consumer takes.
        """
        given = (params.extra_args or {}).get(EXTRA_ARG, {})
        options: Mapping[str, Mapping[str, Any]] = given.get("consumers", {})
        for name, chosen in options.items():
            if name not in self.consumers:
                raise ValueError(
                    f"consumers[{name!r}]: no such consumer is registered; registered are "
                    f"{', '.join(self.consumers) or 'none'}"
                )
            enabled = chosen.get("enabled", True)
            if not isinstance(enabled, bool):
                raise ValueError(
                    f"consumers[{name!r}]['enabled'] is {enabled!r}; give True or False"
                )
            self.consumers[name].validate_options(chosen)
        active = [
            consumer
            for name, consumer in self.consumers.items()
            if options.get(name, {}).get("enabled", True)
        ]
        flows = [flow for consumer in active for flow in consumer.flows()]
        # Rows of a flow that reads the logits are sampled from: the cache never holds those.
        reads_prompt = any(
            flow.reads and flow.phase != "decode" and not flow.reads_port("logits")
            for flow in flows
        )
        writes = any(w.port == "residual_stream" for flow in flows for w in flow.writes)
        spec = RequestSpec(
            request_id=request_id,
            prompt_id=uuid.uuid4().hex,
            num_samples=params.n,
            consumers=options,
            rows_from=0 if reads_prompt else None,
            isolated=writes,
        )
        own = params.clone()
        own.extra_args = {**(params.extra_args or {}), EXTRA_ARG: spec.to_wire()}
        return own, spec.prompt_id

    @staticmethod
    def merge_results(
        answers: Sequence[Mapping[str, Mapping[int, Mapping[str, Any]]]],
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """Results of all workers: of a tensor-parallel group the first rank's, of pipeline stages
        each stage's own consumers'."""
        merged: dict[str, dict[int, dict[str, Any]]] = {}
        for answer in answers:
            for prompt_id, samples in answer.items():
                for index, results in samples.items():
                    kept = merged.setdefault(prompt_id, {}).setdefault(index, {})
                    for name, result in results.items():
                        kept.setdefault(name, dict(result))
        return merged
