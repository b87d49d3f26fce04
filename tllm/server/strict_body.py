"""Bodies of our own routes, and what is said where one is wrong."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator

_TOLD = 3
"""How many faults of a body are told."""


class StrictBody(BaseModel):
    """A body that takes its own fields and no other, and says which these are. Values are of the
    field's own type: `true` is no number, and "no" is no `false`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        known = cls.model_fields.keys()
        if isinstance(given, Mapping) and (unknown := sorted(given.keys() - known)):
            raise ValueError(
                f"{', '.join(unknown)} was given, and is no field; give any of {', '.join(known)}"
            )
        return given


class StrictRoute(APIRoute):
    """A route that says in a sentence what is wrong with a body, as a 400; vLLM's server would say
    it as Python prints it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                faults = error.errors()[:_TOLD]
                raise HTTPException(400, "; ".join(map(_told, faults))) from None

        return answer


def _told(fault: Mapping[str, Any]) -> str:
    """A fault as pydantic found it, by the name of its field."""
    inner = fault["loc"][1:]  # behind "body", "path" or "query"
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault['ctx']['error']}, at character {inner[0]}"
    what = fault["msg"].removeprefix("Value error, ")
    if inner:
        return f"{'.'.join(map(str, inner))}: {what}"
    if fault["type"] == "value_error":
        return what
    return "the body is no object; send one as JSON, with Content-Type: application/json"
