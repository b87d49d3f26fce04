"""The server's OpenAPI document: our fields in vLLM's requests, and our routes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from tllm.server.routes import TAG

REQUESTS = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest")
"""Requests of vLLM's that take our fields."""

_VECTORS = {
    "type": "object",
    "description": "{hook point: {layer: vector}}: added to the rows of prompt and generation. A "
    "vector is a list of numbers, or an object with vector, scale, method, positions, when, or "
    "a list of these; in the place of {layer: vector}, the packed form.",
}
_CLAMPS = {
    "type": "object",
    "description": "{hook point: {layer: clamp}}, applied after all vectors; a clamp is an object "
    "with vector and any of min, max, value.",
}
_MODULE = {
    "anyOf": [{"type": "string"}, {"type": "array"}],
    "description": "A registered module: its name, [name, scale], or a list of these.",
}
_CONDITION = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}
PROPERTIES: Mapping[str, Mapping[str, Any]] = {
    "consumers": {
        "type": "object",
        "additionalProperties": {"type": "object"},
        "description": "Options by consumer; {} asks for its results, and "
        '{"enabled": false} turns it off for the request.',
    },
    "capture": {
        "type": "object",
        "additionalProperties": {"type": "object"},
        "description": "What to capture, by the consumer that it goes to: "
        '{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}.',
    },
    "steering_vectors": _VECTORS,
    "prefill_steering_vectors": _VECTORS | {"description": "The same, for tokens of the prompt."},
    "decode_steering_vectors": _VECTORS | {"description": "The same, for generated tokens."},
    "steering_clamps": _CLAMPS,
    "prefill_steering_clamps": _CLAMPS | {"description": "The same, for tokens of the prompt."},
    "decode_steering_clamps": _CLAMPS | {"description": "The same, for generated tokens."},
    "steering_module_ref": _MODULE,
    "steering_name": _MODULE | {"description": "Another name of steering_module_ref."},
    "steering_positions": {
        "description": "Which tokens to steer, for entries that say none: all, all_prompt, "
        "all_generated, last_prompt, image, video, audio, a list of positions, or an object."
    },
    "patch": {
        "type": "array",
        "items": {"type": "object"},
        "description": "Rows that are put in the place of the request's own: objects with hook, "
        "layer, positions, source and alpha.",
    },
    "stop_when": _CONDITION
    | {
        "description": "A condition (an object with probe and above, below or between; or the name "
        "of a monitor), or a list of them: a choice ends with the first generated token for whose "
        'row one holds. finish_reason is "stop", stop_reason its name.'
    },
    "abort_when": _CONDITION
    | {
        "description": "The same for the rows of the prompt: where one holds, nothing is "
        'generated. finish_reason is "abort", stop_reason its name; the scores are in '
        "consumer_results.signals."
    },
    "conversation": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "key": {"type": "string"},
            "expires_s": {"type": "number"},
        },
        "required": ["id", "key"],
        "description": 'The conversation that the request belongs to: what holds of "scope": '
        '"conversation" in one request holds in later ones with the same id, key (a secret of 16 '
        "characters or more) and API key, until expires_s seconds (3600 unless told) have passed "
        "since one of them came.",
    },
}
"""What each field is, as OpenAPI has it."""


def add_fields(app: FastAPI) -> None:
    """Let an app's document say what its requests take beside vLLM's fields, and what our routes
    answer."""
    of_app = app.openapi

    def openapi() -> dict[str, Any]:
        document = without_422(of_app())
        schemas = document.get("components", {}).get("schemas", {})
        for name in REQUESTS:
            if name in schemas:
                schemas[name].setdefault("properties", {}).update(PROPERTIES)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def without_422(document: dict[str, Any]) -> dict[str, Any]:
    """A document without FastAPI's answer to what is wrong in a body: our routes have another."""
    for path in document["paths"].values():
        for operation in path.values():
            if TAG in operation.get("tags", ()):
                operation["responses"].pop("422", None)
    return document
