"""The token that follows each row: what a training algorithm predicts."""

from __future__ import annotations

from tllm.ports.base import PortRead
from tllm.spec.phases import Phase, phase_named


class TokenTarget:
    """`[rows]` int64: the token after each row's token.

    For a row that is sampled from, the sampled token; for an earlier prompt row, the prompt's
    next token. A flow that reads it is called after sampling.
    """

    @staticmethod
    def read(*, phase: Phase = "any", role: str = "token_target") -> PortRead:
        """Read the token that follows each row."""
        phase = phase_named(phase)
        return PortRead("token_target", role, phase)
