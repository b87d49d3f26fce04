"""The reference of the server's routes and of our fields, made from its OpenAPI document.

`python -m tests.server.http_reference > doc/reference/http.md` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI

from tllm.request_fields import FIELDS
from tllm.server.document import PROPERTIES, without_422
from tllm.server.routes import router
from tllm.version import __version__


def markdown(document: Mapping[str, Any]) -> str:
    """The reference of a document's routes, and of our fields."""
    lines = [
        "# HTTP",
        "",
        "Made from the server's OpenAPI document (`python -m tests.server.http_reference`); the "
        "server itself has all of it, vLLM's routes too, at `/openapi.json`. How to use it: "
        "[Serving](../guides/serving.md).",
        "",
        "## Fields of requests",
        "",
        "In bodies of `/v1/completions`, `/v1/chat/completions` and `/v1/responses`:",
        "",
        "| Field | |",
        "|---|---|",
        *(f"| `{name}` | {_cell(PROPERTIES[name]['description'])} |" for name in FIELDS),
        "",
        "## Routes",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _route(path, method, operation, document)
    return "\n".join(lines) + "\n"


def _route(
    path: str, method: str, operation: Mapping[str, Any], document: Mapping[str, Any]
) -> Iterator[str]:
    yield from ("", f"### `{method.upper()} {path}`", "", operation["description"])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    reference = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if reference:
        schema = document["components"]["schemas"][reference]
        required = schema.get("required", ())
        yield from ("", "| Field of the body | |", "|---|---|")
        for name, each in schema["properties"].items():
            about = _cell(each.get("description", ""))
            given = "required" if name in required else f"default `{each.get('default')}`"
            yield f"| `{name}` | {' '.join(filter(None, (about, f'({given})')))} |"
    yield from ("", "| Status | |", "|---|---|")
    for status, answer in operation["responses"].items():
        yield f"| {status} | {_cell(answer['description'])} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def our_document() -> dict[str, Any]:
    """The document of our routes alone."""
    app = FastAPI(title="tLLM", version=__version__)
    app.include_router(router)
    return without_422(app.openapi())


if __name__ == "__main__":
    print(markdown(our_document()), end="")
