"""The reference in a process of its own, out of vLLM's reach.

vLLM's Transformers backend changes classes of `transformers` in place when an engine starts, so a
process that has had an engine can no longer say what plain `transformers` does.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import families
from .reference import Reference, States, Steers, Writes


class ReferenceProcess:
    """Makes the tiny checkpoints under `root` and answers for them as `Reference` does."""

    def __init__(self, root: Path, variant: families.Variant = families.Variant()) -> None:  # noqa: B008
        self.root = root
        self.variant = variant
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_use_one_thread
        )

    def checkpoint(self, family: str) -> Path:
        """The folder of the family's checkpoint, for `LLM(model=...)`."""
        return self._pool.submit(families.save, family, self.root, self.variant).result()

    def places(self, family: str) -> list[tuple[str, int | None]]:
        return self._ask(Reference.places, family)

    def run(
        self, family: str, token_ids: list[int], writes: Writes, steers: Steers | None = None
    ) -> tuple[States, Tensor]:
        return self._ask(Reference.run, family, token_ids, writes, steers)

    def capture(self, family: str, token_ids: list[int], writes: Writes | None = None) -> States:
        return self._ask(Reference.capture, family, token_ids, writes)

    def greedy(
        self, family: str, prompt_ids: list[int], n: int, writes: Writes | None = None
    ) -> list[int]:
        return self._ask(Reference.greedy, family, prompt_ids, n, writes)

    def logits(self, family: str, token_ids: list[int], writes: Writes | None = None) -> Tensor:
        return self._ask(Reference.logits, family, token_ids, writes)

    def hidden_states(self, family: str, token_ids: list[int]) -> tuple[Tensor, ...]:
        return self._ask(Reference.hidden_states, family, token_ids)

    def generated(self, family: str, prompt_ids: list[int], n: int) -> list[int]:
        return self._ask(Reference.generated, family, prompt_ids, n)

    def close(self) -> None:
        self._pool.shutdown()

    def _ask(self, question: Callable[..., Any], family: str, *args: Any) -> Any:
        # Bytes, because tensors would be handed over through shared memory, one file each.
        answer = self._pool.submit(
            _answer, question, family, self.root, self.variant, _packed(args)
        )
        return _unpacked(answer.result())


def _use_one_thread() -> None:
    # By a name of ours: vLLM's CPU worker puts a local function in place of torch's.
    torch.set_num_threads(1)


def _answer(
    question: Callable[..., Any],
    family: str,
    root: Path,
    variant: families.Variant,
    args: bytes,
) -> bytes:
    return _packed(question(_loaded(family, root, variant), *_unpacked(args)))


@cache
def _loaded(family: str, root: Path, variant: families.Variant) -> Reference:
    return Reference(family, families.save(family, root, variant))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))
