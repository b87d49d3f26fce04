"""References of all families, in one process of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tllm.verify.plain_process import PlainProcess
from tllm.verify.reference import States, Steers

from . import families
from .reference import FamilyReference, Writes


class ReferenceProcess:
    """Makes the tiny checkpoints under `root` and answers for them as `FamilyReference` does."""

    def __init__(self, root: Path, variant: families.Variant = families.Variant()) -> None:  # noqa: B008
        self.root = root
        self.variant = variant
        self._process = PlainProcess(threads=1)
        self._unchanged: dict[tuple[str, tuple[int, ...]], tuple[States, Tensor]] = {}

    def checkpoint(self, family: str) -> Path:
        """The folder of the family's checkpoint, for `LLM(model=...)`."""
        return self._process.ask(families.save, family, self.root, self.variant)

    def places(self, family: str) -> list[tuple[str, int | None]]:
        return self._ask(FamilyReference.places, family)

    def run(
        self, family: str, token_ids: list[int], writes: Writes, steers: Steers | None = None
    ) -> tuple[States, Tensor]:
        """What is asked again of a family, with nothing changed, is not computed again."""
        if writes or steers:
            return self._ask(FamilyReference.written, family, token_ids, writes, steers)
        asked = family, tuple(token_ids)
        if asked not in self._unchanged:
            if any(of != family for of, _ in self._unchanged):
                self._unchanged.clear()
            self._unchanged[asked] = self._ask(FamilyReference.written, family, token_ids, {})
        return self._unchanged[asked]

    def capture(self, family: str, token_ids: list[int], writes: Writes | None = None) -> States:
        return self._ask(FamilyReference.capture, family, token_ids, writes)

    def greedy(
        self, family: str, prompt_ids: list[int], n: int, writes: Writes | None = None
    ) -> list[int]:
        return self._ask(FamilyReference.greedy, family, prompt_ids, n, writes)

    def logits(self, family: str, token_ids: list[int], writes: Writes | None = None) -> Tensor:
        return self._ask(FamilyReference.logits, family, token_ids, writes)

    def hidden_states(self, family: str, token_ids: list[int]) -> tuple[Tensor, ...]:
        return self._ask(FamilyReference.hidden_states, family, token_ids)

    def generated(self, family: str, prompt_ids: list[int], n: int) -> list[int]:
        return self._ask(FamilyReference.generated, family, prompt_ids, n)

    def close(self) -> None:
        self._process.close()

    def _ask(self, question: Callable[..., Any], family: str, *args: Any) -> Any:
        return self._process.ask(_answer, question, family, self.root, self.variant, args)


def _answer(
    question: Callable[..., Any],
    family: str,
    root: Path,
    variant: families.Variant,
    args: tuple[Any, ...],
) -> Any:
    return question(_loaded(family, root, variant), *args)


@cache
def _loaded(family: str, root: Path, variant: families.Variant) -> FamilyReference:
    return FamilyReference(str(families.save(family, root, variant)))
