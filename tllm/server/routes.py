"""Routes of our own: global steering, modules, monitors, conversations, groups of ESamp's, results
fetched by reference, and sweeps."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from tllm.consumers.esamp import ESampConsumer
from tllm.engine.handlers import engine_metrics
from tllm.server.fields import FieldError, bearer_key
from tllm.server.metrics import exposition
from tllm.server.patch_sweeps import SweepBody
from tllm.server.state import ServerState, state_of
from tllm.server.strict_body import StrictBody, StrictRoute
from tllm.spec.tiers import TIER_FIELDS

Vectors = Annotated[
    dict[str, Any] | None,
    Field(
        description="{hook point: {layer: vector}}; a vector is a list of numbers or an object "
        "with `vector`, `scale`, `method`, `positions`; or the packed form."
    ),
]


_OF_MODULES = (*TIER_FIELDS, "positions")
_NAME = "1 to 256 printable characters, without spaces at the ends."


class SteeringBody(StrictBody):
    """Global steering; the fields are those of `llm.steering.set`."""

    vectors: Vectors = None
    prefill_vectors: Vectors = None
    decode_vectors: Vectors = None
    clamps: Vectors = None
    prefill_clamps: Vectors = None
    decode_clamps: Vectors = None
    positions: Any = None
    replace: bool = False


class ModuleBody(StrictBody):
    """A steering module: its name, and what it does."""

    name: str = Field(description=_NAME)
    spec: Any = Field(
        description="What `llm.steering.register_module` takes, and the JSON file of "
        "`--steering-module`: vectors, or an object with any of "
        f"{', '.join(f'`{field}`' for field in _OF_MODULES)}."
    )

    @classmethod
    def _no_field(cls, unknown: Sequence[str]) -> str:
        told = super()._no_field(unknown)
        inside = [name for name in unknown if name in _OF_MODULES]
        return f'{told}: "spec": {{"{inside[0]}": ...}}' if inside else told


class RegisteredName(StrictBody):
    """A steering module, or a monitor, by its name."""

    name: str


class MonitorBody(StrictBody):
    """A monitor: its name, and the condition that it stands for."""

    name: str = Field(description=_NAME)
    condition: Any = Field(
        description="An object with `probe` (hook, layer, vector, bias, score) and any of `above`, "
        "`below`, `between`; or with `all` or `any`, a list of these. Beside them `soft`, `scope` "
        "(token, rest, next, conversation) and `over` (token, prompt_last, prompt_mean)."
    )


class ConversationName(StrictBody):
    """A conversation by its id."""

    id: str


class GroupName(StrictBody):
    """A group of ESamp's, as requests name it."""

    group: str


def admin(request: Request) -> ServerState:
    """Let only the administrator pass; 401 without the key, 403 from another host without one."""
    state = state_of(request)
    key = state.settings.admin_api_key
    if key is not None:
        given = request.headers.get("x-admin-api-key") or bearer_key(request.headers)
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise HTTPException(
                401, "this route needs the admin key: Authorization: Bearer KEY or X-Admin-Api-Key"
            )
    elif not _is_loopback(request):
        raise HTTPException(
            403,
            "no admin key is set (--admin-api-key), so this route answers on loopback only",
        )
    return state


def _is_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:  # a Unix socket, for example
        return False


_Answers: TypeAlias = dict[int | str, dict[str, Any]]
_MALFORMED: _Answers = {400: {"description": "What is wrong, naming the field"}}
_UNKNOWN: _Answers = {404: {"description": "There is none of that name"}}
_ADMIN: _Answers = {
    401: {"description": "The admin key is set, and was not given"},
    403: {"description": "No admin key is set, and the caller is on another host"},
}

Admin = Annotated[ServerState, Depends(admin)]
TAG = "interventions"
"""Of our routes, in the server's document."""
router = APIRouter(tags=[TAG], route_class=StrictRoute)


@router.get("/v1/steering", responses=_ADMIN)
async def steering_status(state: Admin) -> dict[str, Any]:
    """What steers every request, which modules there are, and what is in use."""
    return dict(await state.interventions.steering.status())


@router.get("/v1/steering/layers", responses=_ADMIN)
async def steering_layers(state: Admin) -> dict[str, Any]:
    """Where the model can be steered."""
    return dict(await state.interventions.steering.layers())


@router.post("/v1/steering/set", responses=_ADMIN | _MALFORMED)
async def set_steering(body: SteeringBody, state: Admin) -> dict[str, Any]:
    """Steer every request from now on."""
    given = body.model_dump(exclude_none=True)
    await _checked(state.interventions.steering.set(**given))
    return await steering_status(state)


@router.post("/v1/steering/clear", responses=_ADMIN)
async def clear_steering(state: Admin) -> dict[str, Any]:
    """Stop steering every request. Registered modules stay."""
    await state.interventions.steering.clear()
    return await steering_status(state)


@router.get("/v1/steering/modules", responses=_ADMIN)
async def steering_modules(state: Admin) -> dict[str, Any]:
    """What each registered module does."""
    return dict(await state.interventions.steering.modules())


@router.post("/v1/steering/modules/register", responses=_ADMIN | _MALFORMED)
async def register_module(body: ModuleBody, state: Admin) -> dict[str, Any]:
    """Give steering a name, for `steering_name` in requests and `model="MODEL:NAME"`."""
    await _checked(state.interventions.steering.register_module(body.name, body.spec))
    return {"registered": body.name}


@router.post("/v1/steering/modules/unregister", responses=_ADMIN | _MALFORMED | _UNKNOWN)
async def unregister_module(body: RegisteredName, state: Admin) -> dict[str, Any]:
    """Forget a module."""
    await _found("name", state.interventions.steering.unregister_module(body.name))
    return {"unregistered": body.name}


@router.get("/v1/steering/monitors", responses=_ADMIN)
async def steering_monitors(state: Admin) -> dict[str, Any]:
    """What each registered monitor judges."""
    return dict(await state.interventions.steering.monitors())


@router.post("/v1/steering/monitors/register", responses=_ADMIN | _MALFORMED)
async def register_monitor(body: MonitorBody, state: Admin) -> dict[str, Any]:
    """Give a condition a name, for entries of steering that say `"when": name`."""
    await _checked(state.interventions.steering.register_monitor(body.name, body.condition))
    return {"registered": body.name}


@router.post("/v1/steering/monitors/unregister", responses=_ADMIN | _MALFORMED | _UNKNOWN)
async def unregister_monitor(body: RegisteredName, state: Admin) -> dict[str, Any]:
    """Forget a monitor."""
    await _found("name", state.interventions.steering.unregister_monitor(body.name))
    return {"unregistered": body.name}


@router.get("/v1/steering/conversations", responses=_ADMIN)
async def steering_conversations(state: Admin) -> dict[str, Any]:
    """The conversations that conditions are remembered for, by id: `begun` (seconds since the
    epoch), `expires_in_s`, and `requests` so far."""
    return dict(await state.interventions.steering.conversations())


@router.post("/v1/steering/conversations/forget", responses=_ADMIN | _MALFORMED | _UNKNOWN)
async def forget_conversation(body: ConversationName, state: Admin) -> dict[str, Any]:
    """Forget a conversation: whoever names its id next begins another one."""
    await _found("id", state.interventions.steering.forget_conversation(body.id))
    return {"forgotten": body.id}


@router.post("/v1/esamp/groups/forget", responses=_ADMIN | _MALFORMED | _UNKNOWN)
async def forget_group(body: GroupName, state: Admin) -> dict[str, Any]:
    """Forget what a group of ESamp's has learned: whoever names it next begins anew."""
    esamp = ESampConsumer.consumer_id
    try:
        known = await state.interventions.call_consumer(esamp, "forget_group", body.group)
    except ValueError as error:  # there is no such consumer
        raise HTTPException(404, str(error)) from None
    if not any(known):
        raise HTTPException(
            404,
            f"group: {esamp} has no group {body.group!r:.80}; one lasts while its sequences run, "
            "or with persist=True until it is forgotten",
        )
    return {"forgotten": body.group}


@router.get("/v1/interventions", responses=_ADMIN)
async def interventions(state: Admin) -> list[dict[str, Any]]:
    """Counters of each worker: hook points, rows captured and dropped, consumers."""
    return list(await state.interventions.intervention_stats())


@router.get("/v1/captures/{name}", response_class=FileResponse, responses=_UNKNOWN)
async def capture(name: str, request: Request) -> FileResponse:
    """A result that was too large for its response, as a safetensors file."""
    path = state_of(request).files.find(name)
    if path is None:
        raise HTTPException(
            404,
            f"no capture {name!r}: it never was, it has expired, or it made room for later ones "
            "(captures_mib)",
        )
    return FileResponse(path, media_type="application/octet-stream")


_SWEPT: _Answers = {
    200: {
        "content": {"application/jsonl": {}},
        "description": "A line with `experiments`, how many there are; one with `experiment` for "
        "each, as it is computed; and one with `summary`, or `error` where it failed.",
    },
    403: {"description": "The API key does not allow it"},
    404: {"description": "No model or adapter of that name is served"},
    429: {"description": "With this API key no more requests are allowed at a time"},
}


@router.post("/v1/patch_sweep", response_class=StreamingResponse, responses=_SWEPT | _MALFORMED)
async def patch_sweep(body: SweepBody, request: Request) -> StreamingResponse:
    """Patch one row at a time of one prompt's run into another's, and measure the next token. A
    client that leaves stops the sweep."""
    try:
        lines = await state_of(request).sweeps.begin(body, request.headers)
    except FieldError as error:
        raise HTTPException(error.status, str(error)) from None
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return StreamingResponse(lines, media_type="application/jsonl")


async def metrics(request: Request) -> Response:
    """vLLM's metrics, and what interventions do, for Prometheus."""
    state = getattr(request.app.state, "tllm", None)
    ours = b"" if state is None else exposition(await state.stats.read())
    return Response(engine_metrics() + ours, media_type=CONTENT_TYPE_LATEST)


async def _checked(call: Any) -> None:
    """What is wrong with a body is the caller's fault."""
    try:
        await call
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def _found(field: str, call: Any) -> None:
    """There may be none of the name in a field."""
    try:
        await call
    except ValueError as error:
        raise HTTPException(404, f"{field}: {error}") from None
