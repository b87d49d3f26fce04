"""Refuses our fields on routes that would ignore them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.server.fields import FIELDS, UNSUPPORTED

_READ_BY = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_NAMES = (*FIELDS, *UNSUPPORTED)
_MARKS = tuple(f'"{name}"'.encode() for name in _NAMES)


class RefuseElsewhere:
    """ASGI middleware: 400 for a request that asks for interventions where nobody reads that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = path.startswith("/v1/steering") or path in _READ_BY
        if scope["type"] != "http" or scope["method"] != "POST" or ours:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        named = _named(b"".join(message.get("body", b"") for message in messages))
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


def _named(body: bytes) -> list[str]:
    """Our fields that a body has."""
    if not any(mark in body for mark in _MARKS):
        return []
    try:
        given: Any = json.loads(body)
    except ValueError:  # somebody else's to refuse
        return []
    return [name for name in _NAMES if isinstance(given, dict) and given.get(name) is not None]
