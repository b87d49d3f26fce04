"""A group of steering as this worker does it: at the points of its pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tllm.runtime.descriptor import SCOPE_UNIT
from tllm.runtime.taps import TapKey, Taps
from tllm.spec.conditions import order_of
from tllm.spec.gates import Gate, GroupGates
from tllm.spec.operations import Coefficients, OperationForm

GroupOperation = tuple[str, int | None, str, OperationForm]
"""Hook point, layer, digest of the vector, and what is done with it."""


@dataclass(frozen=True, eq=False)
class PlacedGroup:
    """A group of steering in this worker.

    Attributes:
        operations: point, digest of the vector, what is done, and which gate decides, as
            `Operation.GATE` says it.
        gates: point and condition.
        remembered: what a sequence remembers of its conditions.
        told: likewise of those that earlier pipeline stages judge.
        tells: whether a later pipeline stage may need what is judged here.
        hears: whether this one needs what is judged on an earlier one.
        sums: where all that it does is to add vectors: point, digest of the vector and factor of
            each.
    """

    operations: list[tuple[int, str, OperationForm, int]]
    gates: list[tuple[int, Gate]]
    remembered: list[Gate]
    told: list[Gate]
    tells: bool
    hears: bool
    sums: list[tuple[int, str, float]] | None = None


class GroupPlacing:
    """Finds the points at which groups are done and their conditions judged.

    Args:
        resolve: see `Steering`.
    """

    def __init__(self, taps: Taps, resolve: Callable[[str, int | None], TapKey]) -> None:
        self._taps = taps
        self._resolve = resolve
        self._points: dict[tuple[str, int | None], int | None] = {}  # None: on another stage

    def place(self, operations: Sequence[GroupOperation], gates: GroupGates | None) -> PlacedGroup:
        """A group without what another pipeline stage does.

        Raises `ValueError` for a hook point that this engine has no tap for, and for a condition
        that is judged later in the network than what it decides on.
        """
        if gates is None:
            here: list[tuple[int, str, OperationForm, int]] = []
            added: list[tuple[int, str, float]] = []
            for hook, layer, vector, done in operations:
                if (point := self._point(hook, layer)) is None:
                    continue
                here.append((point, vector, done, 0))
                if isinstance(done, Coefficients) and done.only_adds:
                    added.append((point, vector, done.add))
            sums = added if len(added) == len(here) else None
            return PlacedGroup(here, [], [], [], tells=False, hears=False, sums=sums)
        return self._gated_group(operations, gates)

    def _point(self, hook: str, layer: int | None) -> int | None:
        """The point of a place; None where another pipeline stage has it."""
        place = hook, layer
        if place not in self._points:
            self._points[place] = self._taps.index.get(self._resolve(hook, layer))
        return self._points[place]

    def _gated_group(self, operations: Sequence[GroupOperation], gates: GroupGates) -> PlacedGroup:
        """A group with conditions, as this worker does it."""
        points, earlier = self._where_judged(gates)
        # Later requests of a conversation, and the scheduler, hear of conditions from the last
        # stage.
        needed = {each.number for each in gates.gates if each.kept_as}
        needed_here = set(needed)
        if not operations and not gates.judges:
            needed_here = needed = {each.number for each in gates.gates}
        scopes = {number: gates.scope_of(number) for number in {*gates.of_operations}}
        deciding_here, deciding_later, found = set(), set(), []
        for (hook, layer, vector, done), number in zip(
            operations, gates.of_operations, strict=True
        ):
            point, scope = self._point(hook, layer), scopes[number]
            if point is None:
                deciding_later.add(number)
                continue
            self._check_gate(point, number, points, earlier, before=scope > 0)
            found.append((point, vector, done, number + 1 + SCOPE_UNIT * scope))
            deciding_here.add(number)
        needed_here = needed_here.union(*map(gates.made_of, deciding_here))
        needed = needed.union(*map(gates.made_of, deciding_later))
        judged = [(points[each.number], each) for each in gates.judged if each.number in points]
        for point, each in judged:
            for term in each.terms:
                self._check_gate(point, term, points, earlier, before=each.of_mean)
            needed_here = needed_here.union(each.terms)
        remembered = [each for each in gates.gates if each.scope or each.over]
        return PlacedGroup(
            found,
            judged,
            [each for each in remembered if each.number in points],
            # Nothing is added up for them here.
            [each._replace(vector="") for each in remembered if each.number in earlier],
            tells=not needed.isdisjoint(points),
            hears=not needed_here.isdisjoint(earlier),
        )

    def _where_judged(self, gates: GroupGates) -> tuple[dict[int, int], set[int]]:
        """By number of a gate, the point of this pipeline stage that judges it; and the numbers of
        those that earlier stages judge."""
        points, earlier = {}, set()
        for each in gates.gates:
            point = self._point(each.hook, each.layer)
            if point is not None:
                points[each.number] = point
            elif order_of(*self._resolve(each.hook, each.layer)) < self._first:
                earlier.add(each.number)
        return points, earlier

    @cached_property
    def _first(self) -> tuple[int, int]:
        """Where the first point of this pipeline stage is."""
        return min((order_of(*key) for key in self._taps.index), default=(0, 0))

    def _check_gate(
        self,
        point: int,
        number: int,
        points: Mapping[int, int],
        earlier: Container[int],
        *,
        before: bool,
    ) -> None:
        """Refuse a gate that is not judged when it is needed.

        Args:
            points, earlier: see `_where_judged`.
            before: whether what was judged for earlier tokens is needed.
        """
        if number < 0 or number in earlier:
            return
        if number in points and (before or points[number] <= point):
            return
        raise ValueError(
            "a condition is judged later in the network, or on a later pipeline stage, than what "
            "it decides on; give a probe at or before the place that it gates, or start the "
            "engine with pipeline_parallel_size=1"
        )
