"""Sweeps of strengths that do not come to their end, and what they leave."""

from __future__ import annotations

import re
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

    def monitors(self) -> dict[str, Any]:
        probe = {"hook": "post_block", "layer": 0}
        return {"each": {"probe": probe}, "once": {"probe": probe, "over": "prompt_mean"}}

    def _call(self, do: Any) -> None:
        self._made += 1
        if self._heard or self._made != self._number:
            do()
        if self._made == self._number:
            raise KeyboardInterrupt


def engine_of(steering: Steering) -> Any:
    """What a sweep needs of an engine that computes nothing."""

    def generate(*_: Any, **__: Any) -> None:
        raise RuntimeError("of no use")

    config = SimpleNamespace(max_model_len=64)
    engine = SimpleNamespace(model_config=config, has_unfinished_requests=lambda: False)
    return SimpleNamespace(steering=steering, llm_engine=engine, generate=generate)


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("number", range(1, 5))
def test_whichever_call_is_interrupted(number: int, heard: bool) -> None:
    steering = Steering(number, heard)
    with pytest.raises(KeyboardInterrupt):
        sweep(engine_of(steering), {}, [1.0], ["One day"], len)
    assert not steering.there


PROBE = {"hook": "post_block", "layer": 0, "vector": [1.0, 2.0]}
VECTOR: dict[str, Any] = {"vector": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"positions": "all_generated"}, "its 'positions' name no token of a prompt"),
        (
            {"when": {"probe": PROBE, "above": 0.0, "over": "prompt_last"}},
            "its condition has 'over'",
        ),
        ({"when": "once"}, "its condition has 'over'"),
        ({"positions": "last_prompt"}, ""),
        ({"when": {"probe": PROBE, "above": 0.0}}, ""),
        ({"when": "each"}, ""),
    ],
)
def test_texts_are_not_read_where_some_vectors_are_for_generated_tokens_alone(
    entry: dict[str, Any], says: str
) -> None:
    """Their perplexity would be that of a model that is steered less, or not at all."""
    llm = engine_of(Steering(0, heard=True))
    vectors = {"mlp_out": {1: VECTOR}, "post_block": {2: VECTOR | entry}}
    for texts in ((), ["One day"]):
        refused = bool(says and texts)
        message = f"vectors['post_block'][2] steers generated tokens alone: {says}"
        kind = ValueError if refused else RuntimeError
        with pytest.raises(kind, match=re.escape(message) if refused else "of no use"):
            sweep(llm, vectors, [1.0], ["One day"], len, texts=texts)
        assert not llm.steering.there
