"""Bodies of our own routes, and what is said where one is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

_TOLD = 3
"""How many faults of a body are told."""
_SHOWN = 60
"""Characters of a value that are told."""
_WORDS: dict[object, str] = {str: "a text", int: "a whole number", bool: "true or false"}
"""What fields of one type take; of others their descriptions say it."""
_MAY_BE_LONE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\0")
"""What is in every body whose texts have lone surrogates: escaped, in UTF-8, or in UTF-16."""


class StrictBody(BaseModel):
    """A body that takes its own fields and no other, and says which these are. Values are of the
    field's own type: `true` is no number, and "no" is no `false`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _told_in_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        known = cls.model_fields
        if isinstance(given, Mapping) and (unknown := sorted(given.keys() - known.keys())):
            raise ValueError(cls._no_field(unknown))
        try:
            return validate(given)
        except ValidationError as error:
            wrong = dict.fromkeys(str(each["loc"][0]) for each in error.errors() if each["loc"])
            if not wrong:  # it is no object
                raise
            told = [cls._fault(name, given) for name in [*wrong][:_TOLD]]
            raise ValueError("; ".join(told)) from None

    @classmethod
    def _no_field(cls, unknown: Sequence[str]) -> str:
        """What is wrong with fields that it does not have."""
        known = ", ".join(cls.model_fields)
        return f"{', '.join(unknown)} was given, and is no field; give any of {known}"

    @classmethod
    def _fault(cls, name: str, given: Mapping[str, Any]) -> str:
        """What is wrong with a field: a value of another type than its own, or none."""
        if name not in given:
            return f"{name} is missing"
        field = cls.model_fields[name]
        about = (field.description or "").rstrip(".")
        allowed = _WORDS.get(field.annotation) or about[:1].lower() + about[1:]
        shown = json.dumps(given[name], ensure_ascii=False)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        return f"{name}: {shown} was given; allowed is {allowed}"


class StrictRoute(APIRoute):
    """A route that says in a sentence what is wrong with a body, as a 400; vLLM's server would say
    it as Python prints it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            _check_texts(await request.body())
            try:
                return await handle(request)
            except RequestValidationError as error:
                faults = error.errors()[:_TOLD]
                raise HTTPException(400, "; ".join(map(_told, faults))) from None

        return answer


def _check_texts(body: bytes) -> None:
    """Refuse a body with texts that no answer could repeat, as JSON may have them."""
    if _MAY_BE_LONE.search(body) is None:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # told where it is read
        return
    parts = given if isinstance(given, dict) else {"the body": given}
    for name, value in parts.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            told = name if name.isprintable() else repr(name)
            raise HTTPException(
                400, f"{told:.60} has a text with lone surrogates; leave them out"
            ) from None


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
