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
        process: where it is.
        checkpoint, **options: as `Reference` takes them.
    """

    def __init__(self, process: PlainProcess, checkpoint: str, **options: Any) -> None:
        self._process = process
        self._key = checkpoint, tuple(options.items())

    def places(self) -> list[tuple[str, Layer]]:
        """As `Reference.places`."""
        return self._process.ask(_places, *self._key)

    def doubts(self) -> str:
        """As `Reference.doubts`."""
        return self._process.ask(_doubts, *self._key)

    def run(self, token_ids: list[int], steers: Steers | None = None) -> tuple[States, Tensor]:
        """As `Reference.run`."""
        return self._process.ask(_run, *self._key, token_ids, steers)


@cache
def _loaded(checkpoint: str, options: tuple[tuple[str, Any], ...]) -> Reference:
    return Reference(checkpoint, **dict(options))


def _places(checkpoint: str, options: Any) -> Any:
    return _loaded(checkpoint, options).places()


def _doubts(checkpoint: str, options: Any) -> Any:
    return _loaded(checkpoint, options).doubts()


def _run(checkpoint: str, options: Any, *args: Any) -> Any:
    return _loaded(checkpoint, options).run(*args)
