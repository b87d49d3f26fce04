"""What the server is started with, as `tllm serve` hands it to the processes of `vllm serve`."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tllm.spec.conversations import LONGEST_S

VARIABLE = "TLLM_SERVER"
"""Environment variable with the settings as JSON: `vllm serve` has no flags for its plugins."""


class ServerSettings(BaseModel):
    """Settings of the server's interventions; a field that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    consumers: tuple[str, ...] = ()
    """Specs such as `esamp:beta=0.3`, registered when the server starts."""
    capture_consumers: tuple[str, ...] = ()
    """The same; their results are in `capture_results`."""
    steering_modules: dict[str, str] = Field(default_factory=dict)
    """Modules by name: files as `tllm.steering.load` reads them."""
    admin_api_key: str | None = Field(default=None, min_length=1)
    """Who gives it may use the admin routes; without one, they answer on loopback only."""
    allow_capture: bool = True
    """Whether requests may ask for captures."""
    allow_consumers: bool = True
    """Whether requests may give options to consumers."""
    limits: Path | None = None
    """A JSON file with what callers may ask, by API key (`tllm.server.limits`)."""
    max_body_mib: int = Field(default=64, ge=1)
    """The most that the body of a request may have."""
    inline_bytes: int = Field(default=65536, ge=0)
    """Results up to this size stand in the response; larger ones are fetched by reference."""
    captures_seconds: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """How long a result that is fetched by reference is kept."""
    captures_mib: int = Field(default=1024, ge=1)
    """The most that such results take on disk; the oldest go first."""
    captures_folder: Path | None = None
    """Where they are kept, the same for all processes of a server."""
    result_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """How long a response waits for consumers that still work on a result."""

    @classmethod
    def from_environment(cls) -> ServerSettings:
        """The settings of this process; the defaults where none are given."""
        return cls.model_validate_json(os.environ.get(VARIABLE) or "{}")
