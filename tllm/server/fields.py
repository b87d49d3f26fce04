"""The fields that a request's body may have beside vLLM's, and what they ask."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from tllm.params import parse_asked
from tllm.request_fields import FIELDS, meant_by
from tllm.server.settings import ServerSettings
from tllm.spec.conversations import COUNTED
from tllm.spec.request import EXTRA_ARG, refusal_of_own

ENDING_FIELDS = ("stop_when", "abort_when")
"""Those that end a request where a condition holds."""

_MODULE_REF = "steering_module_ref"
"""What the engine calls it, whether a request has it by this name, as `steering_name` or in
`model`."""

UNSUPPORTED = {
    "patch_vectors": "patching by vectors (use patch)",
    "steering": "a field of this name (use steering_vectors)",
}
"""Fields that peers have and this server does not: nobody who asks shall get nothing in silence."""


class FieldError(ValueError):
    """A field of a request is wrong.

    Attributes:
        field: its name; None where several are wrong together.
    """

    def __init__(
        self, field: str | None, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


def asked_in(body: Mapping[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """What a request asks, checked, as plain data for `extra_args["tllm"]`; empty for nothing.

    Args:
        body: the fields of the request that vLLM does not know.

    Raises `FieldError` naming the field that is wrong.
    """
    for name, what in UNSUPPORTED.items():
        if body.get(name) is not None:
            raise FieldError(
                name, f"{name} was given, but {what} is not supported; leave the field out"
            )
    _check_names(body)
    asked = {name: body[name] for name in FIELDS if body.get(name) is not None}
    if "steering_name" in asked:
        if _MODULE_REF in asked:
            raise FieldError(
                "steering_name",
                "steering_name and steering_module_ref were both given; give one of them",
            )
        asked[_MODULE_REF] = asked.pop("steering_name")
    for name, allowed in (
        ("capture", settings.allow_capture),
        ("consumers", settings.allow_consumers),
    ):
        if name in asked and not allowed:
            raise FieldError(name, f"{name} was given, but this server does not allow it")
    if asked:
        _check_counted(asked.get("conversation"))
        try:
            _check_options(asked.get("consumers"))
            parse_asked(asked)
        except ValueError as error:
            raise field_error(error, body) from None
    return asked


def _check_names(body: Mapping[str, Any]) -> None:
    """Refuse fields that are ours but for their spelling, or stand in a place where nobody reads
    them: vLLM ignores what it does not know. And names of our own messages, before a stream
    begins: an answer of `/v1/responses` that the engine refuses later ends without a word."""
    for name, value in body.items():
        meant = None if name in FIELDS or value is None else meant_by(name)
        if meant is not None:
            told = name if name.isprintable() else repr(name)  # lone surrogates cannot be sent
            field = name if told is name else None
            raise FieldError(field, f"{told} was given, and is no field; {meant} may be meant")
    for place in PLACES:
        inside = body.get(place)
        if not isinstance(inside, Mapping):
            continue
        if found := sorted(inside.keys() & set(FIELDS)):
            raise FieldError(
                place, f"{place}[{found[0]!r}] was given; put {found[0]} into the body itself"
            )
        if EXTRA_ARG in inside:
            raise FieldError(
                place,
                f"{place}[{EXTRA_ARG!r}] was given; give what you ask as fields of the request's "
                "body",
            )
        if refusal := refusal_of_own(place, inside):
            raise FieldError(place, refusal)


PLACES = ("extra_body", "vllm_xargs", "extra_args", "sampling_params")
"""Where clients put fields of a body, beside the body itself: the first is an argument of OpenAI's
client, which sends what is in it as fields."""


def _check_options(options: Any) -> None:
    """Refuse options of consumers that JSON may have, and that cannot be sent to a worker."""
    try:
        json.dumps(options, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("consumers has a text with lone surrogates; leave them out") from None
    except RecursionError:
        raise ValueError("consumers is nested too deeply; give plain options") from None


def _check_counted(conversation: Any) -> None:
    """Refuse what only the server says of a conversation, before it is looked at whether that is
    whole."""
    if not isinstance(conversation, Mapping):
        return
    if given := sorted(COUNTED & conversation.keys()):
        raise FieldError(
            "conversation",
            f"conversation has {given}, which the server says itself (--limits); give 'id', 'key' "
            "and 'expires_s'",
        )


def field_error(
    error: ValueError, body: Mapping[str, Any], with_module: str | None = None
) -> FieldError:
    """What is refused, by the name of the field as the request has it.

    Args:
        body: the fields of the request that vLLM does not know.
        with_module: the request's `model`, where that names a steering module.
    """
    message, field, status = str(error), None, HTTPStatus.BAD_REQUEST
    if isinstance(error, FieldError):
        field, status = error.field, error.status
    other, told = ("steering_name", "steering_name")
    if with_module is not None:
        other, told = ("model", f"model={with_module!r:.80}")
    if with_module is not None or ("steering_name" in body and _MODULE_REF not in body):
        message = re.sub(rf"\b{_MODULE_REF}\b", lambda _: told, message)
        field = other if field == _MODULE_REF or message.startswith(told) else field
    if "vllm_xargs" in body and not isinstance(error, FieldError):  # another name in the engine
        message = re.sub(r"^extra_args(?=\[)", "vllm_xargs", message)
    if field is None:
        field = next(
            (name for name in (*FIELDS, "vllm_xargs") if message.startswith(name) and name in body),
            None,
        )
    return FieldError(field, message, status)


def bearer_key(headers: Mapping[str, str]) -> str:
    """The API key of `Authorization: Bearer KEY`; "" where there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def is_sendable(key: str) -> bool:
    """Whether a caller can send a key in a header so that it arrives as it is."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def of_caller(
    conversation: Mapping[str, Any], headers: Mapping[str, str], caller: int, most: int | None
) -> dict[str, Any]:
    """A conversation that belongs to its key and to the API key that it came with.

    Args:
        caller: who is counted for it, where there may be only so many.
        most: how many this caller may have at a time.
    """
    sender = bearer_key(headers)
    both = json.dumps([sender, conversation["key"]])
    own = {**conversation, "key": hashlib.sha256(both.encode()).hexdigest()}
    return own if most is None else {**own, "owner": f"caller {caller}", "most": most}
