"""What comes back on an output: what the workers say of a request, and what was given out of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput

from tllm.engine.refusals import RefusedError
from tllm.ports import ActionLog, Payload
from tllm.ports.payload import cut, reason_of
from tllm.runtime.broken_sequences import NOT_FINITE
from tllm.spec.groups import STEERING
from tllm.spec.patching import PATCHING

if TYPE_CHECKING:
    from tllm.client.request import Prepared

logger = logging.getLogger(__name__)

Status = Literal["ok", "partial_error", "error", "pending"]

#: The consumer whose results are an output's `activations`.
_MEMORY = "memory"
#: The one whose results are the `signals`.
_SIGNALS = "signals"

LEFT = "the consumer was unregistered before the request had ended"
"""Why a consumer that a request named has no result."""


@dataclass(frozen=True)
class ConsumerResult:
    """What one consumer has to say about one sequence.

    Attributes:
        status: `error` when the consumer raised while the sequence used it, or has no result;
            `partial_error` when some of its rows are missing; `pending` when it was not done in
            time (`llm.wait_for_results` asks again).
        error: why the status is not `ok`, or None.
        payload: what its `on_request_finished` returned.
    """

    status: Status
    error: str | None
    payload: Any


class Samples:
    """The samples of a request, from its outputs in turn.

    The last output alone does not tell: vLLM gives a sample out for the last time where it ends,
    which may be in an output before, and with `RequestOutputKind.DELTA` only what is new of it.
    Everything is copied: outputs are the caller's, who may merge them (`RequestOutput.add`).

    Args:
        deltas: whether each output has only what is new.

    Attributes:
        tokens: those generated, by sample; once the last output is there.
        need_reasons: whether the workers may know why an output says no more than that the engine
            gave a sample up; of pooled requests no output says even that.
    """

    def __init__(self, *, deltas: bool = False) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.need_reasons = False
        self._deltas = deltas
        self._ended: dict[int, CompletionOutput] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """How many tokens were generated, by sample."""
        return {sample: len(tokens) for sample, tokens in self.tokens.items()}

    def add(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Note what an output gives out, before the caller has it."""
        if isinstance(output, PoolingRequestOutput):
            self.tokens[0] = []
            self.need_reasons = True
            return
        for sample in output.outputs:
            self.need_reasons |= sample.finish_reason == "error"
            if self._deltas:
                self.tokens.setdefault(sample.index, []).extend(sample.token_ids)
            elif sample.finished():
                self.tokens[sample.index] = list(sample.token_ids)
            if sample.finished() and not output.finished:
                self._ended[sample.index] = self._again(sample)

    def gather(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Bring all samples to the last output, in order. Those that ended before are as they were
        then; of deltas, with nothing new."""
        if isinstance(output, PoolingRequestOutput):
            return
        here = {sample.index: sample for sample in output.outputs}
        if not self._deltas:  # a streamed prompt may be over without an end of its sample
            self.tokens |= {index: list(sample.token_ids) for index, sample in here.items()}
        output.outputs = [sample for _, sample in sorted((self._ended | here).items())]

    def _again(self, sample: CompletionOutput) -> CompletionOutput:
        if not self._deltas:
            return replace(sample)
        nothing = None if sample.logprobs is None else sample.logprobs[:0]
        return replace(sample, text="", token_ids=[], logprobs=nothing, sampling_mask=None)


_WORST = ("ok", "pending", "partial_error", "error")
_NO_RESULT = "the workers gave no result"
_NOT_BEGUN = "the request was aborted before any of it was computed"
_NO_TOKEN = "the request was aborted before its first token, and the consumer had no result of it"
_LEFT_OUT = (
    "pipeline stages returned different results, and only the first one's is here; let "
    "on_request_finished return a mapping with a key for each layer, or a Payload that joins them"
)


class Collected:
    """The results of one prompt: each worker's, by sample and consumer, until they are joined.

    Attributes:
        lost: why the workers could not be asked for what is not here; empty where they could.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._parts: dict[int, dict[str, dict[int, Mapping[str, Any]]]] = {}

    def add(self, worker: int, samples: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
        """Add a worker's answer; it replaces what was pending there."""
        for parts in self._parts.values():
            for name, by_worker in list(parts.items()):
                if worker in by_worker and by_worker[worker]["status"] == "pending":
                    del by_worker[worker]
                if not by_worker:
                    del parts[name]
        for index, results in samples.items():
            for name, result in results.items():
                self._parts.setdefault(index, {}).setdefault(name, {})[worker] = result

    @property
    def pending(self) -> bool:
        """Whether a consumer of any worker is not done."""
        return any(
            result["status"] == "pending"
            for results in self._parts.values()
            for by_worker in results.values()
            for result in by_worker.values()
        )

    def joined(self) -> dict[int, dict[str, ConsumerResult]]:
        """One result for each sample and consumer.

        Payloads come from the first rank of a tensor-parallel group. Those of pipeline stages are
        joined if they are `Payload`s or mappings (key by key). Others that differ cannot be: the
        first stage's is given, and the result is a `partial_error`.
        """
        return {
            index: {name: _joined(list(by_worker.values())) for name, by_worker in results.items()}
            for index, results in self._parts.items()
        }


def _joined(parts: list[Mapping[str, Any]]) -> ConsumerResult:
    if len(parts) == 1:
        [part] = parts
        return ConsumerResult(part["status"], part["error"] or None, part["payload"])
    status = max((part["status"] for part in parts), key=_WORST.index)
    errors = dict.fromkeys(part["error"] for part in parts if part["error"])
    payload, left_out = None, False
    for part in parts:
        try:
            payload, complete = _with(payload, part["payload"])
        except Exception as fault:
            return _broken(fault)
        left_out = left_out or not complete
    if left_out:
        status = max(status, "partial_error", key=_WORST.index)
        errors[_LEFT_OUT] = None
    return ConsumerResult(status, "; ".join(errors) or None, payload)


def _with(payload: Any, other: Any) -> tuple[Any, bool]:
    """A stage's payload with that of a later one, and whether all of it is there."""
    if payload is None or other is None:
        return (other if payload is None else payload), True
    if isinstance(payload, Payload) and type(payload).joined is not Payload.joined:
        return payload.joined(other), True
    if isinstance(payload, Mapping) and isinstance(other, Mapping):
        pairs = {key: _with(payload.get(key), value) for key, value in other.items()}
        joined = {key: value for key, (value, _) in pairs.items()}
        return {**payload, **joined}, all(complete for _, complete in pairs.values())
    return payload, cloudpickle.dumps(payload) == cloudpickle.dumps(other)


def _broken(fault: Exception) -> ConsumerResult:
    """The result whose payload raised: one consumer's mistake, and no other result's."""
    logger.error("the payload of a consumer's result raised", exc_info=fault)
    return ConsumerResult("error", f"its result cannot be given: {reason_of(fault)}", None)


def samples_of(output: RequestOutput | PoolingRequestOutput) -> list[tuple[int, Any]]:
    """What an output has of each sample, by its index; a pooled request has one."""
    if isinstance(output, PoolingRequestOutput):
        return [(0, output.outputs)]
    return [(completion.index, completion) for completion in output.outputs]


def attach_nothing(output: RequestOutput | PoolingRequestOutput) -> None:
    """Of a request that runs there are no results: what `attach_results` sets is empty.

    Each token that is streamed comes with an output, so this is one function.
    """
    samples = [output.outputs] if isinstance(output, PoolingRequestOutput) else output.outputs
    target: Any
    for target in samples:
        target.consumer_results, target.capture_results = {}, {}
        target.activations, target.signals = None, {}
    target = output
    target.consumer_results = samples[0].consumer_results if samples else {}  # type: ignore[union-attr]
    target.capture_results, target.activations, target.signals = {}, None, {}


def attach_results(
    output: RequestOutput | PoolingRequestOutput,
    request: Prepared,
    results: Mapping[int, Mapping[str, ConsumerResult]],
    missing: Mapping[str, str],
) -> None:
    """Put results on the last output of a request: on each sample its own, on the output those of
    sample 0.

    Args:
        results: by sample and consumer.
        missing: why consumers of the request have no results, those that have left for example.

    Sets on both: `consumer_results`, from consumer id to `ConsumerResult`; `capture_results`, those
    of the consumers that the request asked to capture; `activations`, what the consumer `memory`
    captured (None when it captured nothing); and `signals`, from the name of a condition of
    steering to what it made of each token.
    """
    prompt_len, lengths = len(output.prompt_token_ids or ()), request.samples.lengths
    samples = samples_of(output)
    for index, sample in samples:
        own = dict(results.get(index, {}))
        for name, why in missing.items():
            own.setdefault(name, ConsumerResult("error", why, None))
        # The last generated token never passes the model; all of a prompt's do.
        num_tokens = prompt_len + max(lengths.get(index, 0), 1)
        completed = isinstance(sample, CompletionOutput)
        judged = completed and (sample.stop_reason in request.ended_by or _stopped(own, sample))
        aborted = completed and sample.finish_reason == "abort" and not judged
        without_token = aborted and not lengths.get(index, 0)
        for name in request.captures:
            if name not in own:
                why = _NOT_BEGUN if without_token else _NO_RESULT
                own[name] = ConsumerResult("error", why, None)
        for name in request.named if without_token else ():
            own.setdefault(name, ConsumerResult("error", _NO_TOKEN, None))
        num_rows = prompt_len + max(lengths.get(index, 0) - (not judged), 0)
        patch = request.patch
        if patch is not None and (unreached := patch.unreached(num_rows)) is not None:
            own.setdefault(PATCHING, ConsumerResult("partial_error", unreached, None))
        final = {
            # What a condition, or a controller, made of the last token counts where one of them has
            # ended the sample. A refused prompt has no token; one was computed ahead, perhaps.
            name: _final(
                result,
                results.get(0, {}).get(name),
                num_tokens - (_judges(name, result) and not (judged and lengths.get(index, 0))),
                aborted,
            )
            for name, result in own.items()
        }
        _set(sample, final, request.captures)
    _set(output, samples[0][1].consumer_results if samples else {}, request.captures)


def _stopped(results: Mapping[str, ConsumerResult], sample: CompletionOutput) -> bool:
    """Whether a controller has ended a sample."""
    if sample.finish_reason != "stop" or sample.stop_reason is None:
        return False
    given = [result.payload for result in results.values()]
    # Activations are mappings, too, whose rows are joined when somebody looks at them.
    given += [each for p in given if isinstance(p, dict) for each in p.values()]
    logs = (each for each in given if isinstance(each, ActionLog))
    return any(log.stopped_by(sample.stop_reason) for log in logs)


def _judges(name: str, result: ConsumerResult) -> bool:
    """Whether a result is of every token that was judged, the one that ended the sample too."""
    return name == _SIGNALS or isinstance(result.payload, ActionLog)


def hand_on(pooled: Iterable[Any], outputs: Sequence[Any]) -> Any:
    """Give outputs that vLLM made of those of pooled requests what is on these; returns them."""
    known = {output.request_id: output for output in pooled}
    for output in outputs:
        theirs = known[output.request_id]
        for name in (
            "consumer_results",
            "capture_results",
            "activations",
            "signals",
            "tllm_request",
        ):
            value = getattr(theirs, name)
            setattr(output, name, value)
            if name != "tllm_request":
                setattr(output.outputs, name, value)
    return outputs


def check_steered(pooled: Any) -> None:
    """Raises `RefusedError` where rows of a pooled request are not as it asked: for whoever makes
    something else of its output, which has no place for its results."""
    for name, result in pooled.consumer_results.items():
        if result.error == NOT_FINITE or (name == STEERING and result.status == "error"):
            raise RefusedError(result.error)


def set_result(output: Any, sample: Any, name: str, result: ConsumerResult) -> None:
    """Replace one result, wherever it is on the output."""
    sample.consumer_results[name] = result
    targets = [sample, output] if sample is samples_of(output)[0][1] else [sample]
    for target in targets:
        if name in target.capture_results:
            target.capture_results[name] = result


def _set(target: Any, results: Mapping[str, ConsumerResult], captures: Iterable[str]) -> None:
    target.consumer_results = results
    target.capture_results = {name: results[name] for name in captures if name in results}
    target.activations = results[_MEMORY].payload if _MEMORY in results else None
    target.signals = (results[_SIGNALS].payload if _SIGNALS in results else None) or {}


def _final(
    result: ConsumerResult, first: ConsumerResult | None, num_tokens: int, aborted: bool
) -> ConsumerResult:
    """With the prompt rows of sample 0 where they are shared, and without rows of tokens that were
    computed ahead of the sequence's end."""
    payload, problems = result.payload, [result.error]
    try:
        if isinstance(payload, Payload) and first is not None and first is not result:
            payload = payload.with_prompt_of(first.payload)
            if first.status not in ("ok", result.status) or first.error != result.error:
                problems.append(
                    first.error and f"of sample 0, whose prompt rows these are: {first.error}"
                )
        payload = cut(payload, num_tokens)
        problems.append(payload.problem if isinstance(payload, Payload) else None)
    except Exception as fault:
        return _broken(fault)
    if aborted and payload is not None:
        problems.append("the request was aborted; this is what was captured until then")
    status: Status = result.status
    text = "; ".join(filter(None, problems)) or None
    if status == "ok" and text:
        status = "partial_error"
    if (status, text) == (result.status, result.error) and payload is result.payload:
        return result
    return ConsumerResult(status, text, payload)
