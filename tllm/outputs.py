"""What tLLM puts on vLLM's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm.outputs import RequestOutput

from tllm.ports import PerToken

Status = Literal["ok", "error"]


@dataclass(frozen=True)
class ConsumerResult:
    """What one consumer has to say about one sequence.

    Attributes:
        status: `error` when the consumer raised while the sequence used it.
        error: the consumer's error, or None.
        payload: what its `on_request_finished` returned.
    """

    status: Status
    error: str | None
    payload: Any


def attach_results(
    output: RequestOutput, results: Mapping[int, Mapping[str, Mapping[str, Any]]] | None
) -> None:
    """Put results on an output: on each completion its own, on the output those of sample 0.

    Sets `output.consumer_results` and `output.outputs[i].consumer_results`, mappings from consumer
    id to `ConsumerResult`; empty when no consumer had anything to say.
    """
    prompt_len = len(output.prompt_token_ids or ())
    for completion in output.outputs:
        given = (results or {}).get(completion.index, {})
        num_tokens = prompt_len + len(completion.token_ids)
        completion.consumer_results = {  # type: ignore[attr-defined]
            name: _trimmed(ConsumerResult(**result), num_tokens) for name, result in given.items()
        }
    first = output.outputs[0].consumer_results if output.outputs else {}  # type: ignore[attr-defined]
    output.consumer_results = first  # type: ignore[attr-defined]


def _trimmed(result: ConsumerResult, num_tokens: int) -> ConsumerResult:
    """Without rows of tokens that were computed ahead of the sequence's end."""
    payload = result.payload
    if isinstance(payload, PerToken):
        return replace(result, payload=payload.up_to(num_tokens))
    if isinstance(payload, Mapping):
        cut = {
            key: value.up_to(num_tokens) if isinstance(value, PerToken) else value
            for key, value in payload.items()
        }
        return replace(result, payload=cut)
    return result
