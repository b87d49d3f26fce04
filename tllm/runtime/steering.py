"""Steering in a worker: the device tables that the tap op reads, and who uses which rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column
from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.descriptor import CHAIN_UNIT, HAS_SUM, KIND_UNIT, Operation, OperationKind
from tllm.runtime.gates import Gates, JudgedGates
from tllm.runtime.latches import Latch
from tllm.runtime.packed_vectors import PackedVectors
from tllm.runtime.placed_groups import GroupOperation, GroupPlacing, PlacedGroup
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.token_choices import TokenChoices
from tllm.runtime.vector_sums import VectorSums
from tllm.runtime.vector_table import VectorTable
from tllm.spec.gates import Gate, GroupGates
from tllm.spec.operations import (
    Coefficients,
    DimensionWise,
    Features,
    Gradient,
    OperationForm,
    Rotation,
)
from tllm.spec.reading import FloatArray

_WORDS = int(Operation.SIZE)
_ONLY_A_SUM = np.zeros((1, _WORDS), np.int32)
"""What stands where a configuration adds, and does nothing else."""
_ONLY_A_SUM[:, Operation.CHAIN] = HAS_SUM


_Done = tuple[str, OperationForm, int]
"""Digest of a vector, what is done with it, and which gate decides, as `Operation.GATE` says it."""


@dataclass(eq=False)
class _Places:
    """Points at which some configurations, and no others, have operations."""

    points: npt.NDArray[np.int64]
    users: int = 0
    """Configurations that are in use."""


@dataclass(eq=False)
class _Configuration:
    """A row of the tables: the groups that apply to a token, in order."""

    row: int
    places: _Places
    """Where it has operations."""
    chains: list[tuple[int, int]]
    """`(start, length)` of the operations after the entry's, at each point with several; and of the
    rules of features."""
    vectors: set[str]
    gates: JudgedGates | None = None
    """The conditions that are judged for it."""
    users: int = 0


class Steering:
    """What tokens can be steered with, and the rows that stand for it on the device.

    Vectors and groups come from the user's process and are kept until it drops them. A *row* is
    one combination of groups; sequences that ask the same share it. What changes here reaches
    the device in `commit`, before the forward pass that needs it: a few rows are written, nothing
    is recompiled or captured anew.

    Args:
        resolve: from a hook point and layer to its key; raises `ValueError` for one that this
            engine has no tap for.
        rows: rows to begin with; tables grow.
        max_vectors: vectors to allocate room for ahead of need.
        max_positions: the most tokens of a sequence.
        agree: see `Session`.

    Attributes:
        choices: rows that depend on the token.
        gates: what is judged for rows.
        users: rows that sequences have, each counted as often as it is had.
        stale: whether `commit` has anything to do.
    """

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        rows: int,
        max_vectors: int,
        max_positions: int,
        agree: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._taps = taps
        self._placing = GroupPlacing(taps, resolve)
        self.choices = TokenChoices(taps.device)
        self.gates = Gates(taps, max_positions, agree)
        self._groups: dict[str, PlacedGroup] = {}
        self._vectors = VectorTable(taps, self.gates, max_vectors)
        self._sums = VectorSums(taps)
        self._configurations: dict[tuple[str, ...], _Configuration] = {}
        self._unused: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._free_rows: list[int] = []
        self._chains = ConsecutivePlaces()
        self._places: WeakValueDictionary[tuple[int, ...], _Places] = WeakValueDictionary()
        self._num_rows = max(1, rows)
        self._entries = StagedTable((taps.num_points, 0, _WORDS), 2, torch.int32, taps.device)
        self._operations = StagedTable((0, _WORDS), 1, torch.int32, taps.device)
        self.stale = False  # something is staged, or points that steer have come or gone
        self.users = 0

    # -- what the user's process keeps here -------------------------------------------------------

    def put(
        self,
        vectors: PackedVectors | Mapping[str, FloatArray],
        groups: Mapping[str, Sequence[GroupOperation]],
        gates: Mapping[str, GroupGates] = MappingProxyType({}),
    ) -> None:
        """Add vectors and groups by digest; those that are here are left alone.

        Args:
            gates: conditions of groups that have any.

        Raises `ValueError` for vectors of another width than the model's, when a group names a hook
        point that this engine has no tap for, and when a condition is judged later in the network
        than what it decides on.
        """
        self.stale |= self._vectors.put(vectors)
        for digest, operations in groups.items():
            if digest in self._groups:
                continue
            self._groups[digest] = self._placing.place(operations, gates.get(digest))

    def crossings(self, groups: Iterable[str]) -> tuple[bool, bool]:
        """Of a sequence with these groups: whether a later pipeline stage needs what is judged
        here, and whether this one needs what is judged on an earlier one."""
        held = [self._groups[digest] for digest in groups if digest in self._groups]
        return any(group.tells for group in held), any(group.hears for group in held)

    def drop(self, groups: Iterable[str], vectors: Iterable[str]) -> None:
        """Forget groups that no new sequence will ask for, and vectors that none of the groups left
        has. What running sequences still use stays until they end."""
        dropped = set(groups)
        for key in [k for k in self._unused if not dropped.isdisjoint(k)]:
            self._remove(key)
        for digest in dropped:
            self._groups.pop(digest, None)
        self._vectors.drop(vectors)

    @property
    def vector_bytes(self) -> int:
        """Device memory that vectors and their sums take."""
        return self._vectors.tensor.nbytes + self._sums.num_bytes

    @property
    def rows_in_use(self) -> int:
        """Distinct combinations that running sequences ask for."""
        return len(self._configurations) - len(self._unused)

    # -- rows ------------------------------------------------------------------------------------

    def acquire(self, groups: tuple[str, ...]) -> int:
        """The row for these groups; to be given back with `release`. -1 for no groups.

        Raises `ValueError` for a group that is not here.
        """
        if not groups:
            return -1
        configuration = self._configurations.get(groups)
        if configuration is None:
            configuration = self._configurations[groups] = self._configure(groups)
        self.users += 1
        self._unused.pop(groups, None)
        if configuration.users == 0:
            configuration.places.users += 1
            self.stale = self.stale or configuration.places.users == 1
            self._use_gates(configuration, 1)
        configuration.users += 1
        return configuration.row

    def remember(
        self, slot: int, groups: Iterable[str], prompt_len: int, held_before: Container[int] = ()
    ) -> Latch | None:
        """What a sequence with these groups has to remember of its conditions; to be given back
        with `forget`. None for nothing.

        Args:
            held_before: numbers of conditions that held in an earlier request of its conversation.
        """
        held = [self._groups[digest] for digest in groups if digest in self._groups]
        gates = {gate.number: gate for group in held for gate in group.remembered}
        told = {gate.number: gate for group in held for gate in group.told}
        if not gates and not told:
            return None
        self.stale = True
        latch = self.gates.latches.acquire([*gates.values(), *told.values()], held_before)
        if of_mean := [gates[number] for number in sorted(gates) if gates[number].of_mean]:
            self.gates.means.ask(slot, latch, of_mean, prompt_len)
        return latch

    def forget(self, slot: int, latch: Latch) -> None:
        """A sequence has ended."""
        self.gates.means.forget(slot)
        self.gates.latches.release(latch)

    def release(self, groups: tuple[str, ...]) -> None:
        """A sequence does not need this row any more. It is kept until its place is needed."""
        if not groups:
            return
        self.users -= 1
        configuration = self._configurations[groups]
        configuration.users -= 1
        if configuration.users == 0:
            configuration.places.users -= 1
            self.stale = self.stale or configuration.places.users == 0
            self._use_gates(configuration, -1)
            self._unused[groups] = None
            if any(digest not in self._groups for digest in groups):
                self._remove(groups)

    def _use_gates(self, configuration: _Configuration, more: int) -> None:
        if configuration.gates is not None:
            self.gates.use(configuration.gates, more)
            self.stale = True

    def _configure(self, groups: tuple[str, ...]) -> _Configuration:
        if unknown := [digest for digest in groups if digest not in self._groups]:
            raise ValueError(
                f"steering {unknown[0]} is not in this worker; ask through tllm.LLM or "
                "tllm.AsyncLLM, which bring it here"
            )
        held = [self._groups[digest] for digest in groups]
        summands = [group.sums for group in held if group.sums is not None]
        if len(summands) == len(held):
            return self._configure_sums([each for of_group in summands for each in of_group])
        # At each point: what is added first, as one sum; then the other operations, in order.
        sums: list[tuple[int, int, float]] = []
        operations: dict[int, list[_Done]] = {}
        vectors: set[str] = set()
        judged: dict[int, dict[int, Gate]] = {}
        for group in held:
            if group.hears:
                self.gates.expect()
            for point, gate in group.gates:
                judged.setdefault(point, {})[gate.number] = gate
                vectors.update([gate.vector] if gate.vector else ())
            for point, vector, done, number in group.operations:
                vectors.add(vector)
                others = operations.setdefault(point, [])
                if not number and not others and type(done) is Coefficients and done.only_adds:
                    sums.append((point, self._vectors.rows[vector], done.add))
                else:
                    others.append((vector, done, number))
        row, places = self._free_row(), self._places_of(operations)
        self._sums.note(row, sums)
        summed = {point for point, _, _ in sums}
        chains = self._stage_operations(row, places, operations, summed)
        gates = None
        if judged:
            in_order = {p: [at[n] for n in sorted(at)] for p, at in judged.items()}
            gates = self.gates.place(row, in_order)
        return self._configured(_Configuration(row, places, chains, vectors, gates))

    def _stage_operations(
        self,
        row: int,
        places: _Places,
        operations: Mapping[int, Sequence[_Done]],
        summed: Collection[int],
    ) -> list[tuple[int, int]]:
        """What is done at each point beside a sum: the first operation is the entry, and the others
        lie elsewhere, one after the other. Returns where these lie, and the rules of features.

        Args:
            summed: points where there is a sum.
        """
        chains: list[tuple[int, int]] = []
        words = self._in_words([each for others in operations.values() for each in others], chains)
        if len(words) == len(operations) and not summed:  # one at each point, as most are
            words[:, Operation.CHAIN] = 1
            self._stage_entries(places, row, words)
            return chains
        entries, first = np.zeros((len(operations), _WORDS), np.int32), 0
        for entry, (point, others) in zip(entries, operations.items(), strict=True):
            count, start = len(others), 0
            if count:
                entry[:] = words[first]
            if count > 1:
                start, rest = self._chains.acquire(count - 1), np.arange(1, count)
                chains.append((start, count - 1))
                self._operations.stage_all(start - 1 + rest, words[first + rest])
            entry[Operation.CHAIN] = count + CHAIN_UNIT * start + HAS_SUM * (point in summed)
            first += count
        self._stage_entries(places, row, entries)
        return chains

    def _configure_sums(self, summands: Sequence[tuple[int, str, float]]) -> _Configuration:
        """A configuration that only adds vectors, as most do of which there are many."""
        vectors = {vector for _, vector, _ in summands}
        row = self._free_row()
        places = self._places_of(dict.fromkeys(point for point, _, _ in summands))
        self._sums.note(
            row, [(point, self._vectors.rows[v], factor) for point, v, factor in summands]
        )
        self._stage_entries(places, row, _ONLY_A_SUM)
        return self._configured(_Configuration(row, places, [], vectors))

    def _configured(self, configuration: _Configuration) -> _Configuration:
        self.stale = True
        self._vectors.use(configuration.vectors)
        return configuration

    def _places_of(self, points: Iterable[int]) -> _Places:
        found = tuple(points)
        places = self._places.get(found)
        if places is None:
            places = self._places[found] = _Places(np.array(found, np.int64))
        return places

    def _stage_entries(self, places: _Places, row: int, entries: npt.NDArray[np.int32]) -> None:
        """The entries of a row, one at each of some points, or the same at all of them."""
        points = places.points
        if len(points):
            index = np.empty((len(points), 2), np.int64)
            index[:, 0], index[:, 1] = points, row
            if len(entries) < len(points):
                entries = entries.repeat(len(points), axis=0)
            self._entries.stage_all(index, entries)

    def _in_words(
        self, operations: Sequence[_Done], chains: list[tuple[int, int]]
    ) -> npt.NDArray[np.int32]:
        """Operations as the tap reads them.

        Args:
            chains: where the rules of features lie is put here.
        """
        words = np.zeros((len(operations), _WORDS), np.int32)
        if not operations:
            return words
        vectors, forms, numbers = zip(*operations, strict=True)
        words[:, Operation.VECTOR] = [self._vectors.rows[vector] for vector in vectors]
        floats = chain.from_iterable(_FLOATS_OF[type(form)](form) for form in forms)
        coefficients = words[:, Operation.ADD : Operation.COEFFICIENTS_END]
        coefficients[:] = np.fromiter(floats, np.float32).view(np.int32).reshape(coefficients.shape)
        words[:, Operation.GATE] = [
            number + _KINDS[type(form)] for number, form in zip(numbers, forms, strict=True)
        ]
        for at, form in enumerate(forms):
            if isinstance(form, Features):
                chains.append(self._placed_rules(form))
                words[at, [Operation.LOW, Operation.HIGH]] = chains[-1]
        return words

    def _placed_rules(self, features: Features) -> tuple[int, int]:
        """Where the rules of features lie, and how many there are."""
        count = len(features.rules)
        start = self._chains.acquire(count)
        for i, rule in enumerate(features.rules):
            words = np.zeros(_WORDS, np.float32)
            words[: len(rule)] = rule  # as `FeatureWord` has it
            self._operations.stage(start + i, words.view(np.int32))
        return start, count

    def _free_row(self) -> int:
        if not self._free_rows and len(self._configurations) >= self._num_rows:
            if self._unused:
                self._remove(next(iter(self._unused)))
            else:
                self._num_rows *= 2
        return self._free_rows.pop() if self._free_rows else len(self._configurations)

    def _remove(self, groups: tuple[str, ...]) -> None:
        self.stale = True
        self._unused.pop(groups)
        configuration = self._configurations.pop(groups)
        self._stage_entries(
            configuration.places, configuration.row, np.zeros((1, _WORDS), np.int32)
        )
        self._sums.forget(configuration.row)
        for start, length in configuration.chains:
            self._chains.release(start, length)
        if configuration.gates is not None:
            self.gates.remove(configuration.gates)
        self._free_rows.append(configuration.row)
        self._vectors.leave(configuration.vectors)

    # -- the device --------------------------------------------------------------------------------

    def commit(self) -> None:
        """Bring what changed to the device. On the compute stream, before a forward pass."""
        if not self.stale:
            return
        self._grow()
        self._vectors.commit()
        self._sums.make(self._vectors.tensor)
        self._entries.commit()
        self._operations.commit()
        self.gates.commit(self._num_rows)
        self._taps.set_used(Column.STEER, self._points_in_use())
        self._taps.note_write()
        self.stale = False

    def _points_in_use(self) -> npt.NDArray[np.int64]:
        """Points at which the rows of running sequences have operations."""
        used = np.zeros(self._taps.num_points, bool)
        for places in self._places.values():
            if places.users:
                used[places.points] = True
        return np.flatnonzero(used)

    def _grow(self) -> None:
        """Make room. What is outgrown lives on until the passes that read it are enqueued."""
        rows = len(self._configurations) + len(self._free_rows)
        moved = [
            self._entries.grow((self._taps.num_points, self._num_rows, _WORDS)),
            self._operations.grow((room(self._chains.end, 64), _WORDS)),
            self._vectors.grow(),
            self._sums.grow(min(self._num_rows, room(rows, 8))),
        ]
        if any(moved):
            self._taps.place_steering(
                self._entries.tensor,
                self._operations.tensor,
                self._vectors.tensor,
                self._sums.by_point,
            )


_KINDS: Mapping[type[OperationForm], int] = {
    Coefficients: KIND_UNIT * int(OperationKind.ALONG),
    Rotation: KIND_UNIT * int(OperationKind.ROTATE),
    DimensionWise: KIND_UNIT * int(OperationKind.DIMENSIONS),
    Features: KIND_UNIT * int(OperationKind.FEATURES),
    Gradient: KIND_UNIT * int(OperationKind.GRADIENT),
}
"""What the word of the gate has beside the gate, by the form of an operation."""

_FLOATS_OF: Mapping[type[OperationForm], Callable[[Any], tuple[float, ...]]] = {
    Coefficients: attrgetter("add", "norm", "component", "strength", "low", "high"),
    Rotation: lambda form: (form.cosine, form.sine, form.adaptive, form.strength, 0, 0),
    DimensionWise: lambda form: (0, 0, form.vectors, form.strength, 0, 0),
    # Where the rules are, who places them says.
    Features: lambda form: (0, 0, 0, form.strength, 0, 0),
    Gradient: lambda form: (0, 0, 0, form.strength, form.units, form.outer),
}
"""The words of an operation from `ADD` to before `COEFFICIENTS_END`, by its form."""
