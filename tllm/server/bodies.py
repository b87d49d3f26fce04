"""Looks at bodies before routes do: how large they are, and fields of ours that a route would
ignore."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.request_fields import FIELDS
from tllm.server.fields import UNSUPPORTED
from tllm.spec.request import EXTRA_ARG

_READ_BY = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_NAMES = (*FIELDS, *UNSUPPORTED)
_MARKS = (*(f'"{name}"'.encode() for name in (*_NAMES, EXTRA_ARG)), b"\\u", b"\x00")
"""What a body has that may have our fields: as they are, escaped, or in UTF-16 or UTF-32."""
_INNER = ("vllm_xargs", "extra_args", "extra_kwargs")
"""Fields of vLLM's that go on to the engine as they are."""


class CheckedBodies:
    """ASGI middleware: 413 for a body that is too large, and 400 for one that asks for
    interventions where nobody reads that.
    """

    def __init__(self, app: ASGIApp, max_mib: int) -> None:
        self._app = app
        self._max_mib = max_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        size = len(messages[0].get("body", b""))
        while messages[-1].get("more_body") and size <= self._max_mib << 20:
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
        if size > self._max_mib << 20:
            message = (
                f"the body has more than {self._max_mib} MiB; send less, such as vectors in the "
                "packed form, or start the server with a larger --max-body-mib"
            )
            await _error(413, message, None)(scope, receive, send)
            return
        ours = path.startswith("/v1/steering") or path in _READ_BY
        body = b"" if ours else b"".join(message.get("body", b"") for message in messages)
        named = _in_form(body) if _is_form(scope) else _in_json(body)
        if named:
            message = (
                f"{named[0]} was given, but {path} does not read it; use {', '.join(_READ_BY)}"
            )
            await _error(400, message, named[0])(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


def _error(status: int, message: str, field: str | None) -> JSONResponse:
    body = {"message": message, "type": "BadRequestError", "param": field, "code": status}
    return JSONResponse({"error": body}, status)


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
