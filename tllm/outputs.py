"""What tLLM puts on vLLM's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from vllm.outputs import RequestOutput

from tllm.ports import Payload
from tllm.ports.request_meta import cut

Status = Literal["ok", "partial_error", "error", "pending"]

#: The consumer whose results are an output's `activations`.
_MEMORY = "memory"


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


def attach_results(
    output: RequestOutput,
    results: Mapping[int, Mapping[str, ConsumerResult]] | None,
    captures: Iterable[str] = (),
    lengths: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Put results on an output: on each completion its own, on the output those of sample 0.

    Args:
        results: by sample and consumer; None while the request runs.
        lengths: how many tokens were generated, by sample, when it has ended.

    Sets on both: `consumer_results`, from consumer id to `ConsumerResult`; `capture_results`, those
    of `captures`, the consumers that the request asked to capture; and `activations`, what the
    consumer `memory` captured (None when it captured nothing).
    """
    prompt_len = len(output.prompt_token_ids or ())
    named = list(captures)
    given = results or {}
    for completion in output.outputs:
        own = dict(given.get(completion.index, {}))
        if results is not None:
            for name in named:
                own.setdefault(name, ConsumerResult("error", "the workers gave no result", None))
        num_tokens = prompt_len + lengths.get(completion.index, 0)
        aborted = completion.finish_reason == "abort"
        final = {
            name: _final(result, given.get(0, {}).get(name), num_tokens, aborted)
            for name, result in own.items()
        }
        _set(completion, final, named)
    first = output.outputs[0].consumer_results if output.outputs else {}  # type: ignore[attr-defined]
    _set(output, first, named)


def set_result(output: RequestOutput, completion: Any, name: str, result: ConsumerResult) -> None:
    """Replace one result, wherever it is on the output."""
    completion.consumer_results[name] = result
    targets = [completion, output] if completion is output.outputs[0] else [completion]
    for target in targets:
        if name in target.capture_results:
            target.capture_results[name] = result


def _set(target: Any, results: Mapping[str, ConsumerResult], captures: Iterable[str]) -> None:
    target.consumer_results = results
    target.capture_results = {name: results[name] for name in captures if name in results}
    target.activations = results[_MEMORY].payload if _MEMORY in results else None


def _final(
    result: ConsumerResult, first: ConsumerResult | None, num_tokens: int, aborted: bool
) -> ConsumerResult:
    """With the prompt rows of sample 0 where they are shared, and without rows of tokens that were
    computed ahead of the sequence's end."""
    payload, problems = result.payload, [result.error]
    if isinstance(payload, Payload) and first is not None and first is not result:
        payload = payload.with_prompt_of(first.payload)
        if first.status not in ("ok", result.status) or first.error != result.error:
            problems.append(
                first.error and f"of sample 0, whose prompt rows these are: {first.error}"
            )
    payload = cut(payload, num_tokens)
    problems.append(payload.problem if isinstance(payload, Payload) else None)
    if aborted and payload is not None:
        problems.append("the request was aborted; this is what was captured until then")
    status: Status = result.status
    text = "; ".join(filter(None, problems)) or None
    if status == "ok" and text:
        status = "partial_error"
    return replace(result, status=status, error=text, payload=payload)
