"""The plugin that brings interventions into vLLM's API server (`vllm.endpoint_plugins`)."""

from __future__ import annotations

import logging
import os
from typing import Any

from tllm.client.attached import Attached
from tllm.client.llm import attach
from tllm.client.results import check_steered
from tllm.engine import versions
from tllm.engine.handlers import check_pooled
from tllm.engine.shutdown import Shutdown
from tllm.server.bodies import CheckedBodies
from tllm.server.document import add_fields
from tllm.server.doors import Door
from tllm.server.limits import LimitsByKey
from tllm.server.listed_models import ListedModels
from tllm.server.live import LiveScores
from tllm.server.metrics import Stats
from tllm.server.page import page_router
from tllm.server.patch_sweeps import PatchSweeps
from tllm.server.routes import metrics, router
from tllm.server.settings import ServerSettings
from tllm.server.state import ServerState, capture_files
from tllm.steering.files import module_in

_DOORS = ("openai_serving_completion", "openai_serving_chat", "openai_serving_responses")


class InterventionPlugin:
    """Adds our routes to the server's app, and puts our doors before its handlers."""

    name = "tllm"
    required_tasks = None
    _interventions: Attached | None = None

    def attach_router(self, app: Any) -> None:
        """Called by vLLM when the app is built."""
        # A library that vLLM's server imports sets the root's level to ERROR.
        ours = logging.getLogger("tllm")
        if ours.level == logging.NOTSET:
            ours.setLevel(logging.WARNING)
        app.include_router(router)
        app.include_router(page_router)
        app.add_api_route("/metrics", metrics, include_in_schema=False)
        routes = app.router.routes
        routes.insert(0, routes.pop())  # before vLLM's, which it is in the place of
        add_fields(app)
        app.add_middleware(CheckedBodies, max_mib=ServerSettings.from_environment().max_body_mib)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called by vLLM when the handlers are there."""
        if engine_client is None:  # a server that only renders prompts
            return
        if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
            raise RuntimeError(
                "VLLM_USE_RUST_FRONTEND is set, but the Rust front end knows no interventions; "
                "unset it, or serve without tllm"
            )
        versions.probe(serving=True)
        settings = ServerSettings.from_environment()
        interventions = attach(
            engine_client,
            consumers=settings.consumers,
            capture_consumers=settings.capture_consumers,
            result_timeout_s=settings.result_timeout_s,
        )
        self._interventions = interventions
        Shutdown(engine_client, self.finish)
        await interventions.intervention_stats()  # with it all consumers begin, or the server ends
        for name, path in settings.steering_modules.items():
            await _register(interventions, name, path)
        # A batch has no socket.
        files = capture_files(settings, args.port, getattr(args, "uds", None))
        live = LiveScores(interventions)
        limits = LimitsByKey.read(settings.limits, files.folder / "in-flight")
        sweeps = PatchSweeps(interventions, limits, state.openai_serving_models)
        state.tllm = ServerState(interventions, settings, files, Stats(interventions), sweeps)
        handlers = {door: getattr(state, door, None) for door in _DOORS}
        doors = {door: handler for door, handler in handlers.items() if handler is not None}
        for door, handler in doors.items():
            setattr(state, door, Door(handler, interventions, settings, files, live, limits))
        if doors:  # a request may name a module
            state.openai_serving_models = ListedModels(state.openai_serving_models, interventions)
        check_pooled((state[name] for name in state), check_steered)

    async def finish(self) -> None:
        """Called before the engine is killed: consumers do what they still have to do."""
        if self._interventions is not None:
            await self._interventions.clear_consumers()


async def _register(interventions: Attached, name: str, path: str) -> None:
    """Register a module; what is wrong with it names its file."""
    try:
        await interventions.steering.register_module(name, module_in(path))
    except ValueError as error:
        raise ValueError(f"--steering-module {name}={path}: {error}") from error


def plugin() -> InterventionPlugin:
    return InterventionPlugin()
