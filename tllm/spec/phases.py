"""The two phases of a token: it belongs to the prompt, or it was generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tllm.spec.reading import require_one_of

Phase = Literal["any", "prefill", "decode"]
SelectedPhase = Literal["any", "prompt", "generation"]

SELECTED_PHASES: Mapping[Phase, SelectedPhase] = {
    "any": "any",
    "prefill": "prompt",
    "decode": "generation",
}
"""By name of a phase: what a selection calls the tokens that are computed in it."""

_NAMED: Mapping[str, Phase] = {
    **{phase: phase for phase in SELECTED_PHASES},
    **{selected: phase for phase, selected in SELECTED_PHASES.items()},
}


def phase_named(given: Any, name: str = "phase") -> Phase:
    """The phase of a name: `any`, `prefill` (or `prompt`), `decode` (or `generation`)."""
    require_one_of(name, given, _NAMED)
    return _NAMED[given]
