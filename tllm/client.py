"""The user's half: what every front end does with consumers and requests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import cloudpickle
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from tllm.checked_params import CheckedParams
from tllm.collected import Collected
from tllm.consumers.base import Consumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.engine import versions
from tllm.engine.executor import executor_for
from tllm.engine.options import CONFIG_KEY, EngineOptions
from tllm.outputs import set_result
from tllm.ports import ConsumerFlow
from tllm.registry import available_consumers, check
from tllm.runtime.answers import SharedFolder, decode
from tllm.samples import Samples
from tllm.spec.hooks import HookPoint
from tllm.spec.request import EXTRA_ARG, RequestSpec, RowsRead, Wire
from tllm.spec.selection import Selection
from tllm.spec.steering import Group, RequestSteering
from tllm.steering_state import SteeringState

logger = logging.getLogger(__name__)


class WorkerCall(Protocol):
    """Calls a method of the workers with pickled arguments, and returns their answers."""

    def __call__(self, method: str, payload: bytes) -> list[bytes]: ...


def encode_call(*args: Any) -> bytes:
    """Arguments of a worker call."""
    return cloudpickle.dumps(args)


def decode_answers(answers: Sequence[bytes]) -> list[Any]:
    """The workers' answers; raises what the first one to fail raised."""
    decoded = [decode(answer) for answer in answers]
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
            points |= {HookPoint(site) for site, _ in flow.places}
            points |= {HookPoint(write.site) for write in flow.writes if write.site}
    if chosen.hook_points != "all":
        ordered = tuple(point.value for point in HookPoint if point in points)
        chosen = EngineOptions(**{**options, "hook_points": ordered})
    worker = "worker_cpu.InterventionCPUWorker"
    if not current_platform.is_cpu():
        worker = "worker_cuda.InterventionCUDAWorker"
    return {
        **kwargs,
        **executor_for(kwargs),
        "worker_cls": f"tllm.engine.{worker}",
        "scheduler_cls": "tllm.engine.scheduler.create_scheduler",
        "additional_config": {
            **(kwargs.get("additional_config") or {}),
            CONFIG_KEY: chosen.to_config(),
        },
    }


#: Consumers of every engine, made when a request names them for the first time.
BUILT_IN: Mapping[str, Callable[[], Consumer]] = {"memory": MemoryConsumer}


class RefusedError(ValueError):
    """What a request asks is not possible."""


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine.

    Attributes:
        params: its own copy of the parameters.
        prompt_id: the key its results are kept under.
        capture_options: of the consumers whose results are capture results.
        wants_tokens: a consumer waits for the tokens of the output.
        streamed: its prompt arrives in parts; only the engine knows which tokens it keeps of the
            answers between them.
        unused: the consumers that were registered and have nothing to do with it.
        steered: something is done to its rows.
        samples: what was given out so far.
        results: what the workers said so far.
        handed_over: which of them the user's consumers were given, by sample and consumer.
    """

    params: SamplingParams
    prompt_id: str
    capture_options: Mapping[str, Mapping[str, Any]]
    wants_tokens: bool = False
    streamed: bool = False
    unused: frozenset[str] = frozenset()
    steered: bool = False
    samples: Samples = field(default_factory=Samples)
    results: Collected = field(default_factory=Collected)
    handed_over: set[tuple[int, str]] = field(default_factory=set)

    @property
    def captures(self) -> tuple[str, ...]:
        """The consumers whose results are capture results."""
        return tuple(self.capture_options)


def tokens_of(output: RequestOutput, prepared: Prepared) -> dict[int, list[int]] | None:
    """All tokens of each sample, if a consumer waits for them; None: the engine will say."""
    if not prepared.wants_tokens:
        return {}
    if prepared.streamed:
        return None
    prompt = list(output.prompt_token_ids or ())
    return {sample: [*prompt, *tokens] for sample, tokens in prepared.samples.tokens.items()}


def collect(prepared: Mapping[str, Prepared], answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Give requests, by `prompt_id`, what each worker answered; returns who must ask again."""
    for worker, answer in enumerate(answers):
        for prompt_id, request in prepared.items():
            request.results.add(worker, answer.get(prompt_id, {}))
    return [prompt_id for prompt_id, request in prepared.items() if request.results.pending]


class Client:
    """Consumers and requests of one engine, as the user's process knows them."""

    def __init__(self) -> None:
        self.consumers: dict[str, Consumer] = {}
        self._flows: dict[str, tuple[ConsumerFlow, ...]] = {}
        self.steering = SteeringState()
        self.shared = SharedFolder()
        self.capture_consumers: set[str] = set()
        self._params = CheckedParams()
        self._model: Sequence[Mapping[str, Any]] = ()
        #: Kinds of flows whose hook points were found to be in the engine.
        self._placed: set[ConsumerFlow] = set()

    def admit(self, consumer: Consumer) -> bytes:
        """Check a consumer and make the payload of the `register` call."""
        check(consumer)
        if consumer.consumer_id in self.consumers:
            raise ValueError(
                f"a consumer with consumer_id={consumer.consumer_id!r} is registered; unregister "
                "it first, or give this one another consumer_id"
            )
        self._flows[consumer.consumer_id] = tuple(consumer.flows())
        return encode_call(consumer)

    def built_in(self, params: SamplingParams) -> list[Consumer]:
        """The built-in consumers that a request names and nobody has registered yet."""
        named = (params.extra_args or {}).get(EXTRA_ARG, {}).get("consumers", {})
        return [
            make()
            for name, make in BUILT_IN.items()
            if name in named and name not in self.consumers
        ]

    @property
    def knows_model(self) -> bool:
        """Whether it knows which hook points the model has."""
        return bool(self._model)

    @property
    def num_layers(self) -> int:
        """Layers of the model, once it is known."""
        return int(self._model[0]["num_layers"])

    def learn_model(self, stats: Sequence[Mapping[str, Any]]) -> None:
        """Learn from the workers' `stats` which hook points the model has."""
        self._model = stats
        self._placed.clear()

    @staticmethod
    def asked_steering(params: SamplingParams) -> RequestSteering | None:
        """What a request asks of steering."""
        asked: RequestSteering | None = (params.extra_args or {}).get(EXTRA_ARG, {}).get("steering")
        return asked

    def prepare(
        self,
        params: SamplingParams,
        request_id: str,
        steering: Sequence[Group] = (),
        *,
        prompt_id: str | None = None,
        results: bool = True,
        streamed: bool = False,
    ) -> Prepared:
        """Make a request ready.

        Args:
            steering: what is done to it; the workers have it. It is held for the request until
                `self.steering.release(prompt_id)`.
            prompt_id: of a request that goes on (streaming input).
            results: whether somebody will come for what the consumers have to say.
            streamed: its prompt arrives in parts. Only the engine knows then where it ends.

        Raises `ValueError` for options that no registered consumer takes.
        """
        given = (params.extra_args or {}).get(EXTRA_ARG, {})
        options: Mapping[str, Mapping[str, Any]] = given.get("consumers", {})
        named: Sequence[str] = given.get("captures", ())
        for name, chosen in options.items():
            field = f"{'capture' if name in named else 'consumers'}[{name!r}]"
            if name not in self.consumers:
                raise ValueError(
                    f"{field}: no such consumer is registered; registered are "
                    f"{', '.join(self.consumers) or 'none'}{_hint(name)}"
                )
            enabled = chosen.get("enabled", True)
            if not isinstance(enabled, bool):
                raise ValueError(f"{field}['enabled'] is {enabled!r}; give True or False")
            self.consumers[name].validate_options(chosen)
        reads, writes, captures, wants_tokens, unused = [], False, [], False, set()
        for name, consumer in self.consumers.items():
            chosen = options.get(name, {})
            if (consumer.on_request_only and name not in options) or not chosen.get(
                "enabled", True
            ):
                unused.add(name)
                continue
            if name in named or name in self.capture_consumers:
                captures.append(name)
            field = f"{'capture' if name in captures else 'consumers'}[{name!r}]"
            wants_tokens = wants_tokens or consumer.needs_tokens_of(chosen)
            flows = list(self._flows[name])
            writes = writes or any(
                write.port == "residual_stream" for flow in flows for write in flow.writes
            )
            for flow in consumer.request_flows(chosen, self.num_layers):
                self._check_places(flow, field)
                flows.append(flow)
            reads += [read for flow in flows for read in _rows_read(flow, field)]
        if streamed and results and len(unused) < len(self.consumers):
            wants_tokens = True
        key = prompt_id or os.urandom(16).hex()
        spec = RequestSpec(
            request_id=request_id,
            prompt_id=key if results else "",
            num_samples=params.n,
            consumers={name: dict(chosen) for name, chosen in options.items()},
            reads=tuple(dict.fromkeys(reads)),
            wants_tokens=wants_tokens,
            isolated=writes,
            steering=tuple(group.use for group in steering),
        )
        own = self._params.copy(params, Wire.of(spec))
        if prompt_id is None:
            self.steering.hold(key, tuple(steering))
        return Prepared(
            own,
            key,
            {name: options.get(name, {}) for name in captures},
            wants_tokens=wants_tokens,
            streamed=streamed,
            unused=frozenset(unused),
            steered=bool(steering),
            samples=Samples(deltas=params.output_kind == RequestOutputKind.DELTA),
        )

    def has_results(self, prepared: Prepared) -> bool:
        """Whether the workers may have anything to say about a request when it ends."""
        used = self.consumers.keys() - prepared.unused
        return bool(used) or (prepared.steered and bool(self.consumers))

    def hand_over(self, output: RequestOutput, prepared: Prepared) -> None:
        """Give the results on an output to the user's own consumers, each once."""
        for completion in output.outputs:
            results = completion.consumer_results  # type: ignore[attr-defined]
            for name, result in list(results.items()):
                consumer, key = self.consumers.get(name), (completion.index, name)
                if consumer is None or result.status == "pending" or key in prepared.handed_over:
                    continue
                prepared.handed_over.add(key)
                try:
                    consumer.on_result(output, completion.index, result)
                except Exception as error:
                    logger.exception("consumer %r raised in on_result", name)
                    text = f"{type(error).__name__}: {error}"
                    set_result(
                        output, completion, name, replace(result, status="error", error=text)
                    )

    def _check_places(self, flow: ConsumerFlow, field: str) -> None:
        """Refuse hook points that this engine does not have."""
        if not flow.places or flow.kind in self._placed:
            return
        facts = self._model[0]
        installed = {place for worker in self._model for place in worker["hook_points"]}
        layers = facts["num_layers"]
        for site, layer in flow.places:
            if site in facts["missing"]:
                raise ValueError(
                    f"{field}['hooks']: {facts['family']} has no hook point {site}: "
                    f"{facts['missing'][site]} (it has: {', '.join(facts['points'])})"
                )
            if layer is not None and not -layers <= layer < layers:
                raise ValueError(
                    f"{field}['hooks']: {site} has no layer {layer}; give 0 to {layers - 1}, or "
                    f"{-layers} to -1 counting from the end"
                )
            name = site if layer is None else f"{site}:{layer % layers}"
            if name not in installed:
                has = ", ".join(sorted({place.partition(":")[0] for place in installed}))
                raise ValueError(
                    f"{field}['hooks']: hook point {site} has no tap in this engine (it has "
                    f"{has}); start it with hook_points=[..., {site!r}] or hook_points='all'"
                )
        if len(self._placed) >= 4096:
            self._placed.clear()
        self._placed.add(flow.kind)

    @staticmethod
    def check_positions(request: Any) -> None:
        """Refuse positions that a request cannot have, once its prompt is tokenized.

        Args:
            request: vLLM's `EngineCoreRequest`.
        """
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None:
            return
        # The last token is drawn and never passes the model.
        last = None if params.max_tokens is None else params.max_tokens - 1
        for read in RequestSpec.from_extra_args(params.extra_args).reads:
            try:
                read.positions.check(len(request.prompt_token_ids), last, read.name)
            except ValueError as error:
                raise RefusedError(str(error)) from None


def _hint(name: str) -> str:
    """How to come by a consumer that is not registered."""
    if name in available_consumers():
        example = f"{name}:root=DIRECTORY" if name == "filesystem" else name
        return f"; start the engine with capture_consumers=[{example!r}]"
    return f" (beside the built-in {', '.join(BUILT_IN)})"


def _rows_read(flow: ConsumerFlow, field: str) -> list[RowsRead]:
    """The rows that a flow reads."""
    # Rows of a flow that reads the logits are sampled from: the cache never holds those.
    if not flow.reads or flow.reads_port("logits"):
        return []
    positions = flow.selection
    if flow.phase != "any":
        phase = "prompt" if flow.phase == "prefill" else "generation"
        if positions.everything:
            positions = Selection.parse({"phase": phase})
        elif positions.phase == "any":
            if phase == "generation":
                positions = Selection.parse({"phase": phase})
        elif positions.phase != phase:
            return []
    return [RowsRead(f"{field}['positions']", positions, flow.prompt_rows == "once")]
