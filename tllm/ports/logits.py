"""The model's logits, before penalties, temperature and filters."""

from __future__ import annotations

from tllm.ports.base import PortRead


class Logits:
    """Rows `[rows, vocab]`, one for each sequence that samples a token this step.

    Of a request with `structured_outputs`, they are -inf for tokens that these do not allow.
    """

    @staticmethod
    def read(*, role: str = "logits") -> PortRead:
        """Read the logits. Rows of a flow that reads them are the rows that are sampled from."""
        return PortRead("logits", role)
