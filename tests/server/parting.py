"""A consumer as somebody else would write it, with something to do when it stops."""

from __future__ import annotations

import time
from pathlib import Path

from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow


class Parting(Consumer):
    """Takes a while to write a file.

    Args:
        path: of the file.
    """

    consumer_id = "parting"

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def flows(self) -> list[ConsumerFlow]:
        return []

    def stop(self) -> None:
        time.sleep(2)
        self._path.write_text("whole")
