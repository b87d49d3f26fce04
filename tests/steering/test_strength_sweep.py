"""An interrupted sweep of strengths leaves none of its modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tllm.steering import sweep


class Steering:
    """Modules by name; a call of the workers is interrupted.

    Args:
        number: of the call.
        heard: whether the workers do what they are asked in it.
    """

    def __init__(self, number: int, heard: bool) -> None:
        self.there: dict[str, Any] = {}
        self._number, self._heard, self._made = number, heard, 0

    def register_module(self, name: str, spec: Any) -> None:
        self._call(lambda: self.there.update({name: spec}))

    def unregister_module(self, name: str) -> None:
        self._call(lambda: self.there.pop(name))

    def modules(self) -> list[str]:
        return list(self.there)

    def _call(self, do: Any) -> None:
        self._made += 1
        if self._heard or self._made != self._number:
            do()
        if self._made == self._number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("number", range(1, 5))
def test_whichever_call_is_interrupted(number: int, heard: bool) -> None:
    steering = Steering(number, heard)

    def generate(*_: Any, **__: Any) -> None:
        raise RuntimeError("of no use")

    config = SimpleNamespace(max_model_len=64)
    engine = SimpleNamespace(model_config=config, has_unfinished_requests=lambda: False)
    llm: Any = SimpleNamespace(steering=steering, llm_engine=engine, generate=generate)
    with pytest.raises(KeyboardInterrupt):
        sweep(llm, {}, [1.0], ["One day"], len)
    assert not steering.there
