"""Requests whose prompt vLLM has processed, before they go to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tllm.engine.message_types import check_request
from tllm.engine.refusals import RefusedError
from tllm.engine.seams import uses

_PROCESSED = "positions are found and checked once a prompt is processed"
uses("vllm.v1.engine.input_processor.InputProcessor", "process_inputs", _PROCESSED)
uses(
    "vllm.v1.engine.input_processor.InputProcessor",
    "process_inputs_async",
    _PROCESSED,
)

Check: TypeAlias = Callable[[Any], object]
"""Is shown a request, and may change its parameters, or raise."""


def check_requests(engine: Any, check: Check) -> None:
    """Let an engine show each request once its prompt is processed."""
    processor = engine.input_processor
    process = processor.process_inputs

    def checked(*args: Any, **kwargs: Any) -> Any:
        return _shown(process(*args, **kwargs), check)

    processor.process_inputs = checked
    if not hasattr(processor, "process_inputs_async"):  # newer vLLM tokenizes on a thread
        return
    process_async = processor.process_inputs_async

    async def checked_async(*args: Any, **kwargs: Any) -> Any:
        return _shown(await process_async(*args, **kwargs), check)

    processor.process_inputs_async = checked_async


def params_of(prompt: Any, params: Any) -> Any:
    """vLLM may be given a request of its own in place of a prompt, whose parameters count then."""
    return prompt.params if isinstance(prompt, EngineCoreRequest) else params


def put_into(prompt: Any, params: Any, check: Check) -> Any:
    """Give such a request other parameters; returns these."""
    if isinstance(prompt, EngineCoreRequest):
        name = "sampling_params" if isinstance(params, SamplingParams) else "pooling_params"
        setattr(prompt, name, params)
        _shown(prompt, check)  # vLLM has processed its prompt before
    return params


def _shown(request: Any, check: Check) -> Any:
    try:
        check_request(request)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    check(request)
    return request
