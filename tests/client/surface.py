"""How one method of vLLM's is compared on an engine of vLLM's and on one of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch
from vllm.outputs import PoolingRequestOutput, RequestOutput

KINDS = ("generator", "embedder", "classifier", "cross-encoder")
"""What a model is for."""

_PASSING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|pid=\d+")


@dataclass(frozen=True)
class Method:
    """What is compared of one method.

    Attributes:
        calls: by kind of model, a call of the engine; both engines must answer alike.
        checks: what holds of it with interventions: in words, of which kind of model, and what
            shows it.
        note: why it is not compared.
    """

    calls: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    checks: Sequence[tuple[str, str, Callable[[Any], Any]]] = ()
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """What an engine answered: a value, or the error that it raised."""

    value: Any = None
    error: str = ""


def answer_of(call: Callable[[Any], Any], engine: Any) -> Answer:
    """What an engine answers."""
    try:
        return Answer(plainly(call(engine)))
    except Exception as error:
        return refused(error)


def refused(error: Exception) -> Answer:
    """An error, without what differs from call to call."""
    return Answer(error=_PASSING.sub("...", f"{type(error).__name__}: {error}"))


def plainly(value: Any) -> Any:
    """A value as what can be compared."""
    if isinstance(value, RequestOutput):
        samples = [(o.index, o.token_ids, o.text, o.finish_reason) for o in value.outputs]
        scores = [plainly(o.logprobs) for o in value.outputs]
        return [value.prompt, value.prompt_token_ids, plainly(samples), scores, value.finished]
    if isinstance(value, PoolingRequestOutput):
        return [value.prompt_token_ids, plainly(asdict(value.outputs)), value.finished]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return plainly(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plainly(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [plainly(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def public(cls: type) -> set[str]:
    """The public methods and properties of a class."""
    return {name for name in dir(cls) if not name.startswith("_")}


def rows(methods: Mapping[str, Method], found: Mapping[tuple[str, str], Answer]) -> list[str]:
    """A row of the document for each method.

    Args:
        found: what both engines answered, by method and kind of model.
    """

    def cell(name: str, kind: str) -> str:
        if (name, kind) not in found:
            return ""
        return "vLLM's refusal" if found[name, kind].error else "the same"

    kinds = [kind for kind in KINDS if any(kind == of for _, of in found)]
    lines = [
        f"| Method | {' | '.join(kinds)} | With interventions |",
        f"|{'---|' * (len(kinds) + 2)}",
    ]
    for name, method in sorted(methods.items()):
        cells = " | ".join(cell(name, kind) for kind in kinds)
        with_them = "; ".join(dict.fromkeys(says for says, _, _ in method.checks)) or method.note
        lines.append(f"| `{name}` | {cells} | {with_them} |")
    return lines


def each(kinds: Sequence[str], call: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """The same call for several kinds of models."""
    return dict.fromkeys(kinds, call)
