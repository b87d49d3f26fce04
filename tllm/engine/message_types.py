"""The types that vLLM's engine reads its messages with.

It reads them on a thread of its process, which ends when a value has another type: of this request
and of all others nothing is heard any more. vLLM itself does not look before it sends.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tllm.engine.seams import uses

_FIELDS = ("prompt_token_ids", "cache_salt", "data_parallel_rank", "priority", "trace_headers")
"""Those of a request that its caller gives, beside its parameters."""

uses(
    "vllm.v1.engine.EngineCoreRequest",
    " ".join(_FIELDS),
    "values of types that would end the thread that reads them are refused",
)

_TYPES = {
    field.name: field.type
    for field in msgspec.structs.fields(EngineCoreRequest)
    if field.name in _FIELDS
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
_NOT_SENT = (TypeError, OverflowError, UnicodeEncodeError)
"""What vLLM raises itself for a value that is in no message."""


def check_params(params: SamplingParams) -> None:
    """Raise `ValueError` for sampling parameters that the engine could not read."""
    bare = copy.copy(params)
    bare.extra_args = None
    try:
        message = _ENCODER.encode(bare)
    except OverflowError:
        _refuse_beyond_64_bits(bare)
        return
    except _NOT_SENT:
        return
    try:
        _DECODER.decode(message)
    except msgspec.ValidationError as error:
        named = re.search(r"\$\.(\w+)", str(error))
        raise ValueError(_told(named and named[1], params, error)) from None


def _refuse_beyond_64_bits(params: SamplingParams) -> None:
    """Name the field that has a whole number which no message holds."""
    for name in params.__struct_fields__:
        try:
            _ENCODER.encode(getattr(params, name))
        except OverflowError:
            raise ValueError(
                f"{name} is beyond the 64 bits that a whole number may have, or has such a number; "
                "give a smaller one"
            ) from None
        except _NOT_SENT:
            pass


def check_request(request: EngineCoreRequest) -> None:
    """Raise `ValueError` for a request, beside its parameters, that the engine could not read."""
    for name, kind in _TYPES.items():
        value = getattr(request, name)
        if value is None:
            continue
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            if not _is_refused_by_vllm(value):
                raise ValueError(_told(name, request, error)) from None


def _is_refused_by_vllm(value: Any) -> bool:
    """Whether there is something in a list that vLLM cannot send, such as numpy's numbers; an
    engine in this process may take it."""
    try:
        _ENCODER.encode(value)
    except _NOT_SENT:
        return isinstance(value, list)
    return False


def _told(name: str | None, struct: Any, error: msgspec.ValidationError) -> str:
    what, _, where = str(error).replace("| null", "| None").partition(" - at ")
    inside = where.strip("`").removeprefix("$").removeprefix(f".{name}")
    given = "the request" if name is None else f"{name}={getattr(struct, name)!r:.60}"
    return f"{given}: {what[:1].lower()}{what[1:]}{f' at {inside}' if inside else ''}"
