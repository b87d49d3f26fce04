"""What the routes and doors of one server process share."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException, Request

from tllm.client.attached import Attached
from tllm.server.metrics import Stats
from tllm.server.patch_sweeps import PatchSweeps
from tllm.server.results import CaptureFiles
from tllm.server.settings import ServerSettings


@dataclass(frozen=True)
class ServerState:
    """One server process: its engine's interventions, settings, results to be fetched, the
    statistics of the workers, and sweeps."""

    interventions: Attached
    settings: ServerSettings
    files: CaptureFiles
    stats: Stats
    sweeps: PatchSweeps


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state = getattr(request.app.state, "tllm", None)
    if not isinstance(state, ServerState):
        raise HTTPException(503, "this server has no engine with interventions")
    return state


def capture_files(settings: ServerSettings, port: int) -> CaptureFiles:
    """The folder of a server's results; its processes are known by the port that they share."""
    folder = settings.captures_folder or Path(tempfile.gettempdir(), f"tllm-captures-{port}")
    return CaptureFiles(folder, settings.captures_seconds, settings.captures_mib)
