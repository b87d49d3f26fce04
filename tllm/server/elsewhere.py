"""Refuses our fields on routes that would ignore them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.server.fields import FIELDS, UNSUPPORTED
from tllm.spec.request import EXTRA_ARG

_READ_BY = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_NAMES = (*FIELDS, *UNSUPPORTED)
_MARKS = (*(f'"{name}"'.encode() for name in (*_NAMES, EXTRA_ARG)), b"\\u")
_INNER = ("vllm_xargs", "extra_args", "extra_kwargs")
"""Fields of vLLM's that go on to the engine as they are."""


class RefuseElsewhere:
    """ASGI middleware: 400 for a request that asks for interventions where nobody reads that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        ours = path.startswith("/v1/steering") or path in _READ_BY
        if scope["type"] != "http" or scope["method"] != "POST" or ours:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        named = _in_form(body) if _is_form(scope) else _in_json(body)
        if named:
            error = {
                "message": f"{named[0]} was given, but {path} does not read it; use "
                f"{', '.join(_READ_BY)}",
                "type": "BadRequestError",
                "param": named[0],
                "code": 400,
            }
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


def _is_form(scope: Scope) -> bool:
    kind = dict(scope["headers"]).get(b"content-type", b"").lower()
    return bool(kind.startswith(b"multipart/form-data"))


def _in_form(body: bytes) -> list[str]:
    """Our fields that a form has, such as those of audio."""
    return [name for name in _NAMES if f'name="{name}"'.encode() in body]


def _in_json(body: bytes) -> list[str]:
    """Our fields that a body has, and what it would hand to the engine behind our back."""
    if not any(mark in body for mark in _MARKS):
        return []
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError):  # somebody else's to refuse
        return []
    if not isinstance(given, dict):
        return []
    inner = given.get("sampling_params")
    places = [given, inner] if isinstance(inner, dict) else [given]
    hidden = [
        f"{name}[{EXTRA_ARG!r}]"
        for place in places
        for name in _INNER
        if isinstance(place.get(name), dict) and EXTRA_ARG in place[name]
    ]
    return [*(name for name in _NAMES if given.get(name) is not None), *hidden]
