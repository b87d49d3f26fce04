"""Looks at bodies before routes do: how large they are, and fields of ours that a route would
ignore."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.request_fields import FIELDS, meant_by
from tllm.server.fields import PLACES, UNSUPPORTED
from tllm.spec.request import EXTRA_ARG, refusal_of_own

_READ_BY = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_OUR_ROUTES = ("/v1/steering", "/v1/esamp", "/v1/patch_sweep")
"""They refuse by themselves what they do not know."""
_NAMES = (*FIELDS, *UNSUPPORTED)
_NAME_IN_FORM = re.compile(rb'[; ]name="([^"\r\n]{1,64})"')
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
        ours = path.startswith(_OUR_ROUTES) or path in _READ_BY
        body = b"" if ours else b"".join(message.get("body", b"") for message in messages)
        given = _form(body) if _is_form(scope) else _json(body)
        if refused := refusal(path, given, lambda: _instead(scope.get("app"))):
            await _error(400, *refused)(scope, receive, send)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


def refusal(path: str, given: dict[str, Any], instead: Callable[[], str]) -> tuple[str, str] | None:
    """Why a body is refused at a path that reads none of our fields, and the field; None for one
    that asks for nothing of ours.

    Args:
        instead: says what to do.
    """
    if named := _in_json(given):
        return f"{named[0]} was given, but {path} does not read it; {instead()}", named[0]
    for place, inside in _handed_on(given):
        if refused := refusal_of_own(place, inside):
            return refused, place
    return None


def _instead(app: Any) -> str:
    """What to use on this server: of a model that does not generate, no route reads our fields."""
    routes = {getattr(route, "path", "") for route in getattr(app, "routes", ())}
    if reading := [path for path in _READ_BY if path in routes]:
        return f"use {', '.join(reading)}"
    return (
        "no route of this server does, whose model generates nothing; what is set with "
        "/v1/steering/set steers all its requests"
    )


def _error(status: int, message: str, field: str | None) -> JSONResponse:
    body = {"message": message, "type": "BadRequestError", "param": field, "code": status}
    return JSONResponse({"error": body}, status)


def _is_form(scope: Scope) -> bool:
    kind = dict(scope["headers"]).get(b"content-type", b"").lower()
    return bool(kind.startswith(b"multipart/form-data"))


def _form(body: bytes) -> dict[str, str]:
    """The fields that a form has, such as those of audio; their values are not looked at."""
    return {name.decode("latin-1"): "" for name in _NAME_IN_FORM.findall(body)}


def _json(body: bytes) -> dict[str, Any]:
    """The fields of a body; none of what is no JSON, or no object."""
    try:
        given: Any = json.loads(body) if body else None
    except (ValueError, RecursionError):  # somebody else's to refuse
        return {}
    return given if isinstance(given, dict) else {}


def _in_json(given: dict[str, Any]) -> list[str]:
    """Our fields that a body has, and what it would hand to the engine behind our back."""
    found = [name for name, value in given.items() if value is not None and _is_ours(name)]
    for place in PLACES:
        inside = given.get(place)
        if isinstance(inside, dict):
            found += [f"{place}[{name!r}]" for name in inside if name in _NAMES]
    return found + [f"{n}[{EXTRA_ARG!r}]" for n, in_it in _handed_on(given) if EXTRA_ARG in in_it]


def _handed_on(given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What a body hands on to the engine as it is, by the field that it stands in."""
    places = [inside for place in PLACES if isinstance(inside := given.get(place), dict)]
    return [
        (name, inside)
        for fields in (*places, given)
        for name in _INNER
        if isinstance(inside := fields.get(name), dict)
    ]


def _is_ours(name: str) -> bool:
    """Whether a name is that of a field of ours, or is nearly so."""
    return name in _NAMES or meant_by(name) is not None
