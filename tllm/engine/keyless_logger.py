"""What vLLM's API server logs of requests, without keys of conversations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tllm.engine.seams import overrides, uses
from tllm.spec.request import EXTRA_ARG

_LOGGER = "vllm.entrypoints.serve.utils.request_logger.RequestLogger"
_FOR = "keys of conversations are secrets, and not logged"
uses("vllm.entrypoints.serve.engine.serving.BaseServing", "request_logger", _FOR)

_FIELD = "conversation"
_HIDDEN = "***"


class KeylessLogger:
    """Stands before vLLM's logger of requests.

    Args:
        theirs: vLLM's.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    @classmethod
    def put_before(cls, handler: Any) -> None:
        """Let a handler of vLLM's log through one, if it logs requests."""
        theirs = handler.request_logger
        if theirs is not None and not isinstance(theirs, cls):
            handler.request_logger = cls(theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    @overrides(f"{_LOGGER}.log_request_body", _FOR, takes="request", since="0.31")
    def log_request_body(self, request: Any) -> None:
        """As vLLM's."""
        fields = {
            "vllm_xargs": _without_key(getattr(request, "vllm_xargs", None)),
            **_without_key(request.model_extra or {}),
        }
        told = {name: value for name, value in fields.items() if name in request.model_fields_set}
        self._theirs.log_request_body(request.model_copy(update=told))

    @overrides(f"{_LOGGER}.log_inputs", _FOR, takes="params")
    def log_inputs(self, *args: Any, params: Any, **kwargs: Any) -> None:
        if getattr(params, "extra_args", None):
            params = copy.copy(params)
            params.extra_args = _without_key(params.extra_args)
        self._theirs.log_inputs(*args, params=params, **kwargs)


def _without_key(given: Any) -> Any:
    """What a request brings, with nothing in the place of its conversation's key."""
    if not isinstance(given, Mapping):
        return given
    found = dict(given)
    if EXTRA_ARG in found:
        found[EXTRA_ARG] = _without_key(found[EXTRA_ARG])
    named = found.get(_FIELD)
    if isinstance(named, Mapping) and "key" in named:
        found[_FIELD] = {**named, "key": _HIDDEN}
    elif isinstance(named, str):  # what is malformed may hold the key as well
        found[_FIELD] = _HIDDEN
    return found
