"""Conditions in a request: numbered, as taps judge them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import NamedTuple

from tllm.spec.conditions import (
    Condition,
    FeatureCondition,
    JointCondition,
    NamedCondition,
    order_of,
)
from tllm.spec.memory import OVERS, SCOPES, Memory
from tllm.spec.probes import KINDS
from tllm.spec.reading import FloatArray

MAX_GATES = 32
"""The most probes, and joints of them, that one request may have, global steering together with its
own."""


class Gate(NamedTuple):
    """A condition in a request, as taps judge it: a probe, or a joint of others.

    Attributes:
        number: which of the request's it is; those that a joint names have smaller ones.
        hook, layer: where it is judged; a joint, where the last of its terms is.
        vector: digest of the probe's vector; none for a joint.
        score: index in `KINDS`.
        bias, low, high, soft, middle: with the score `s`, bias included, its strength is 1 where
            `low < s < high` and else 0; or `sigmoid(soft (s - middle))` where `soft` is not 0.
        terms: numbers of those that a joint joins.
        every: whether all of them must hold: its strength is then the least of theirs, else the
            greatest.
        names: of its signal, as the user gave them: what is judged alike is judged once.
        scope: index in `SCOPES`: the tokens for which it decides.
        over: index in `OVERS`: what it is judged for.
        threshold: of the feature of an autoencoder, which is 0 where it is not above.
        kept_as: what it is known by in the requests of a conversation; empty where none but its
            own sample remembers it.
        widths: of the hidden layers of a small MLP, see `MlpProbe`; its bias is the last layer's.
    """

    number: int
    hook: str
    layer: int | None
    vector: str = ""
    score: int = 0
    bias: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    soft: float = 0.0
    middle: float = 0.0
    terms: tuple[int, ...] = ()
    every: bool = False
    names: tuple[str, ...] = ()
    scope: int = 0
    over: int = 0
    threshold: float = 0.0
    kept_as: str = ""
    widths: tuple[int, ...] = ()

    @property
    def of_mean(self) -> bool:
        """Whether it is judged for the mean of the prompt's rows."""
        return OVERS[self.over] == "prompt_mean"


class GroupGates(NamedTuple):
    """The conditions of a group.

    Attributes:
        of_operations: the number of the gate of each operation, -1 for none.
        gates: what must be judged for it, terms before joints.
        judges: whether its tokens are those for which conditions on the prompt are judged; all
            others are judged for the tokens of every group that has them.
    """

    of_operations: tuple[int, ...]
    gates: tuple[Gate, ...]
    judges: bool = False

    @property
    def judged(self) -> tuple[Gate, ...]:
        """What is judged for the tokens of the group."""
        return tuple(gate for gate in self.gates if bool(gate.over) == self.judges)

    def made_of(self, number: int) -> frozenset[int]:
        """A gate of the group with all that it joins; nothing for none."""
        terms = next((gate.terms for gate in self.gates if gate.number == number), ())
        own = frozenset((number,) if number >= 0 else ())
        return own.union(*(self.made_of(term) for term in terms))

    def scope_of(self, number: int) -> int:
        """That of a gate of the group; 0 for none."""
        return next((gate.scope for gate in self.gates if gate.number == number), 0)


class GateNumbers:
    """Numbers the conditions of a request, those that judge alike together."""

    def __init__(self) -> None:
        self._gates: dict[tuple[str, Memory], Gate] = {}
        self._needed: dict[int, frozenset[int]] = {}
        self.vectors: dict[str, FloatArray] = {}

    def number(self, condition: Condition, memory: Memory | None = None) -> int:
        """The number of a condition; it gets one if it has none.

        Args:
            memory: of one that is joined with others; by default its own.
        """
        memory = condition.memory if memory is None else memory
        key = condition.digest, memory
        known = self._gates.get(key)
        if known is not None:
            if isinstance(condition, JointCondition):
                for term in condition.terms:  # here they may be called otherwise
                    self.number(term, memory.of_terms)
            if condition.name and condition.name not in known.names:
                names = *known.names, condition.name
                self._gates[key] = known._replace(names=names)
            return known.number
        assert not isinstance(condition, (NamedCondition, FeatureCondition))
        scope, over = SCOPES.index(memory.scope), OVERS.index(memory.over)
        kept_as = f"{memory.over}:{condition.digest}" if memory.is_kept else ""
        if isinstance(condition, JointCondition):
            numbers = [self.number(term, memory.of_terms) for term in condition.terms]
            terms = tuple(dict.fromkeys(numbers))  # each once
            last = max(condition.probes(), key=lambda probe: order_of(probe.point, probe.layer))
            place = last.point.value, last.layer
            gate = Gate(len(self._gates), *place, terms=terms, every=condition.every)
        else:
            gate = Gate(
                len(self._gates),
                condition.point.value,
                condition.layer,
                condition.vector_digest,
                KINDS.index(condition.score),
                condition.bias,
                *condition.edges,
                threshold=condition.threshold,
                widths=condition.widths,
            )
            self.vectors[condition.vector_digest] = condition.vector
        self._needed[gate.number] = frozenset((gate.number,)).union(
            *(self._needed[term] for term in gate.terms)
        )
        names = (condition.name,) if condition.name else ()
        gate = gate._replace(names=names, scope=scope, over=over, kept_as=kept_as)
        self._gates[key] = gate
        return gate.number

    def of(self, gates: Iterable[Gate]) -> dict[str, FloatArray]:
        return {gate.vector: self.vectors[gate.vector] for gate in gates if gate.vector}

    def gates(self, numbers: Iterable[int]) -> tuple[Gate, ...]:
        """What must be judged for these."""
        needed = frozenset().union(*(self._needed[number] for number in numbers))
        return tuple(gate for gate in self._gates.values() if gate.number in needed)


def signal_names(
    gates: Iterable[Gate], what: str = "the request with global steering"
) -> dict[str, int]:
    """What the signals of a request are called, each with the number of its gate: as their
    conditions are named, else by their places.

    Args:
        what: has the conditions, for the message.

    Raises `ValueError` where two conditions have one name.
    """
    by_number = {gate.number: gate for gate in gates}
    names: dict[str, int] = {}
    for number, gate in sorted(by_number.items()):
        for name in gate.names:
            if names.setdefault(name, number) != number:
                raise ValueError(
                    f"two conditions of {what} are called {name!r}; give each its own 'name'"
                )
    for number, gate in sorted(by_number.items()):
        if not gate.names:
            names[_free_name(gate, names)] = number
    return names


def _free_name(gate: Gate, taken: Container[str]) -> str:
    """A name from the place of a gate."""
    place = gate.hook if gate.layer is None else f"{gate.hook}:{gate.layer}"
    if gate.terms:
        place = f"{'all' if gate.every else 'any'}:{place}"
    name, count = place, 1
    while name in taken:
        count += 1
        name = f"{place}#{count}"
    return name
