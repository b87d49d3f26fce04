"""What a request asks of tLLM, as it travels in `SamplingParams.extra_args["tllm"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXTRA_ARG = "tllm"
"""Key of `SamplingParams.extra_args` under which the request's spec travels."""


@dataclass(frozen=True)
class RequestSpec:
    """Plain data only: it crosses process boundaries as msgpack.

    Attributes:
        request_id: the id the caller knows.
        prompt_id: unique to one prompt of one call; the n samples of the prompt share it, and
            results are kept under it. Empty when nobody will come for results.
        num_samples: n.
        consumers: options by consumer id.
        rows_from: first prompt position whose rows somebody reads (None: no prompt rows): the
            prefix cache may serve only what lies before it.
        isolated: rows are changed by writes, so cached blocks are not shared with anybody.
    """

    request_id: str = ""
    prompt_id: str = ""
    num_samples: int = 1
    consumers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows_from: int | None = None
    isolated: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "request_id": self.request_id,
            "prompt_id": self.prompt_id,
            "num_samples": self.num_samples,
            "consumers": {name: dict(options) for name, options in self.consumers.items()},
            "rows_from": self.rows_from,
            "isolated": self.isolated,
        }

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> RequestSpec:
        """The spec of a request; the default one for a request without."""
        wire = (extra_args or {}).get(EXTRA_ARG)
        return cls(**wire) if wire else cls()
