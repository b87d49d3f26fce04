"""What the routes and doors of one server process share."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException, Request

from tllm.client.attached import Attached
from tllm.server.metrics import Stats
from tllm.server.patch_sweeps import PatchSweeps
from tllm.server.results import CaptureFiles
from tllm.server.settings import VARIABLE, ServerSettings


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
    state = getattr(request.app.state, "tllm", None)
    if not isinstance(state, ServerState):
        raise HTTPException(503, "this server has no engine with interventions")
    return state


def capture_files(settings: ServerSettings, port: int, uds: str | None = None) -> CaptureFiles:
    """The folder of a server's results; its processes are known by the port that they share, or by
    the path of their Unix socket, and are those of one user of the machine.

    Raises `PermissionError` for a folder by this name that is somebody else's.
    """
    folder = settings.captures_folder
    if folder is None:
        socket = hashlib.sha256(os.path.realpath(uds).encode()).hexdigest()[:16] if uds else port
        folder = Path(tempfile.gettempdir(), f"tllm-captures-{os.getuid()}-{socket}")
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
            raise PermissionError(
                f"{folder} is for results of this server alone, and others may read it or own it; "
                f"remove it, or give captures_folder in {VARIABLE}"
            )
    return CaptureFiles(folder, settings.captures_seconds, settings.captures_mib)
