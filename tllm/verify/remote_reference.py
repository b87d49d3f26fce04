"""A `Reference` that lives in another process."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from tllm.verify.plain_process import PlainProcess
from tllm.verify.reference import Layer, Reference, States, Steers


class RemoteReference:
    """Answers as `Reference` does.

    Args:
        checkpoint, **options: as `Reference` takes them.
    """

    def __init__(self, process: PlainProcess, checkpoint: str, **options: Any) -> None:
        self._process = process
        self._key = checkpoint, tuple(options.items())

    def places(self) -> list[tuple[str, Layer]]:
        return self._process.ask(_asked, *self._key, "places")

    def doubts(self) -> str:
        return self._process.ask(_asked, *self._key, "doubts")

    def run(self, token_ids: list[int], steers: Steers | None = None) -> tuple[States, Tensor]:
        return self._process.ask(_asked, *self._key, "run", token_ids, steers)


@cache
def _loaded(checkpoint: str, options: tuple[tuple[str, Any], ...]) -> Reference:
    return Reference(checkpoint, **dict(options))


def _asked(checkpoint: str, options: Any, method: str, *args: Any) -> Any:
    return getattr(_loaded(checkpoint, options), method)(*args)
