"""Steering in a worker: the device tables that the tap op reads, and who uses which rows."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column
from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.descriptor import (
    CHAIN_UNIT,
    HAS_SUM,
    KIND_UNIT,
    Operation,
    OperationKind,
)
from tllm.runtime.gates import Gates, JudgedGates
from tllm.runtime.latches import Latch
from tllm.runtime.packed_vectors import PackedVectors
from tllm.runtime.placed_groups import GroupOperation, GroupPlacing, PlacedGroup
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.token_choices import TokenChoices
from tllm.runtime.transfer import upload
from tllm.spec.conditions import PROBE, Gate, GroupGates
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
_SUMS_AT_ONCE = 4096
_ONLY_A_SUM = np.zeros(_WORDS, np.int32)
"""What stands where a configuration adds, and does nothing else."""
_ONLY_A_SUM[Operation.CHAIN] = HAS_SUM


@dataclass(eq=False)
class _Places:
    """Points at which some configurations, and no others, have operations."""

    points: npt.NDArray[np.int64]
    users: int = 0
    """Configurations that are in use."""


@dataclass(frozen=True, eq=False)
class _Sums:
    """What is added, `[summands]` each, those of one point in their order.

    Attributes:
        vectors: rows of the table of vectors.
    """

    points: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.int64]
    factors: npt.NDArray[np.float32]

    @classmethod
    def of(cls, summands: Sequence[tuple[int, int, float]]) -> _Sums:
        """From point, vector and factor of each."""
        points, vectors, factors = zip(*summands, strict=True)
        return cls(np.array(points), np.array(vectors), np.array(factors, np.float32))


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
        self._vectors: dict[str, int] = {}
        self._vector_users: Counter[str] = Counter()  # configurations
        self._dropped_vectors: set[str] = set()
        self._rows_of_vectors: dict[str, int] = {}
        self._placed = ConsecutivePlaces()
        self._configurations: dict[tuple[str, ...], _Configuration] = {}
        self._unused: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._free_rows: list[int] = []
        self._chains = ConsecutivePlaces()
        self._places: WeakValueDictionary[tuple[int, ...], _Places] = WeakValueDictionary()
        self._new_sums: dict[int, _Sums] = {}  # by row
        self._sum_points: dict[int, int] = {}  # point: its place in `_sums`
        self._first_rows = max(1, rows)
        self._max_vectors = max_vectors
        device, dtype, hidden = taps.device, taps.dtype, taps.hidden_size
        self._entries = StagedTable((taps.num_points, 0, _WORDS), 2, torch.int32, device)
        self._operations = StagedTable((0, _WORDS), 1, torch.int32, device)
        self._bank = StagedTable((0, hidden), 1, dtype, device)
        self._sums = StagedTable((0, 0, hidden), 2, dtype, device)  # written by kernels only
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

        Raises `ValueError` when a group names a hook point that this engine has no tap for, or a
        condition is judged later in the network than what it decides on.
        """
        hidden, dtype = self._taps.hidden_size, self._taps.dtype
        if not isinstance(vectors, PackedVectors):
            vectors = PackedVectors.of(vectors, str(dtype).removeprefix("torch."))
        single = vectors.rows
        for array in (*([single] if vectors.digests else []), *vectors.others.values()):
            if array.shape[-1] != hidden or array.ndim > 2:
                raise ValueError(
                    f"steering vectors have shape {tuple(array.shape)}; hidden is {hidden}"
                )
        self._dropped_vectors.difference_update(vectors)
        new = [i for i, digest in enumerate(vectors.digests) if digest not in self._vectors]
        if new:
            held = single if len(new) == len(single) else single[new]
            self._hold([vectors.digests[i] for i in new], held.to(dtype), rows=1)
        for digest, array in vectors.others.items():
            if digest.startswith(PROBE):
                self.gates.hold(digest, array)
            elif digest not in self._vectors:
                held = torch.tensor(array.reshape(-1, hidden), dtype=dtype)
                self._hold([digest], held, rows=len(held))
        for digest, operations in groups.items():
            if digest in self._groups:
                continue
            self._groups[digest] = self._placing.place(operations, gates.get(digest))

    def _hold(self, digests: Sequence[str], held: torch.Tensor, rows: int) -> None:
        """Take in vectors of as many rows each."""
        firsts = np.array([self._placed.acquire(rows) for _ in digests], np.int64)
        self._vectors.update(zip(digests, firsts.tolist(), strict=True))
        self._rows_of_vectors.update(dict.fromkeys(digests, rows))
        self._bank.stage_all((firsts[:, None] + np.arange(rows)).reshape(-1), held)
        self.stale = True

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
        self._dropped_vectors.update(vectors)
        self._free_dropped_vectors()

    def _free_dropped_vectors(self) -> None:
        for digest in [v for v in self._dropped_vectors if not self._vector_users[v]]:
            self._dropped_vectors.discard(digest)
            if not self.gates.let_go(digest) and digest in self._vectors:
                self._placed.release(self._vectors.pop(digest), self._rows_of_vectors.pop(digest))

    @property
    def vector_bytes(self) -> int:
        """Device memory that vectors and their sums take."""
        return sum(table.tensor.nbytes for table in (self._bank, self._sums))

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
        operations: dict[int, list[npt.NDArray[np.int32]]] = {}
        vectors: set[str] = set()
        chains: list[tuple[int, int]] = []
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
                adds = isinstance(done, Coefficients) and done.only_adds and not number
                if isinstance(done, Coefficients) and adds and not others:
                    sums.append((point, self._vectors[vector], done.add))
                    continue
                others.append(self._in_words(vector, done, number, chains))
        row = self._free_row()
        self._note_sums(row, sums)
        summed = {point for point, _, _ in sums}
        for point, others in operations.items():
            entry = others[0].copy() if others else np.zeros(_WORDS, np.int32)
            rest = others[1:]
            start = 0
            if rest:
                start = self._chains.acquire(len(rest))
                chains.append((start, len(rest)))
                for i, words in enumerate(rest):
                    self._operations.stage(start + i, words)
            entry[Operation.CHAIN] = len(others) + CHAIN_UNIT * start + HAS_SUM * (point in summed)
            self._entries.stage((point, row), entry)
        gates = None
        if judged:
            in_order = {p: [at[n] for n in sorted(at)] for p, at in judged.items()}
            gates = self.gates.place(row, in_order)
        places = self._places_of(operations)
        return self._configured(_Configuration(row, places, chains, vectors, gates))

    def _configure_sums(self, summands: Sequence[tuple[int, str, float]]) -> _Configuration:
        """A configuration that only adds vectors, as most do of which there are many."""
        vectors = {vector for _, vector, _ in summands}
        row = self._free_row()
        places = self._places_of(dict.fromkeys(point for point, _, _ in summands))
        self._note_sums(row, [(point, self._vectors[v], factor) for point, v, factor in summands])
        self._stage_entries(places, row, _ONLY_A_SUM)
        return self._configured(_Configuration(row, places, [], vectors))

    def _configured(self, configuration: _Configuration) -> _Configuration:
        self.stale = True
        self._vector_users.update(configuration.vectors)
        return configuration

    def _places_of(self, points: Iterable[int]) -> _Places:
        found = tuple(points)
        places = self._places.get(found)
        if places is None:
            places = self._places[found] = _Places(np.array(found, np.int64))
        return places

    def _note_sums(self, row: int, sums: Sequence[tuple[int, int, float]]) -> None:
        """What is to be added in a new row: point, vector and factor of each summand."""
        if sums:
            for point, _, _ in sums:
                self._sum_points.setdefault(point, len(self._sum_points))
            self._new_sums[row] = _Sums.of(sums)

    def _stage_entries(self, places: _Places, row: int, entry: npt.NDArray[np.int32]) -> None:
        """The same entry of a row at several points."""
        points = places.points
        if len(points):
            index = np.stack([points, np.full_like(points, row)], 1)
            self._entries.stage_all(index, torch.from_numpy(entry).expand(len(points), -1))

    def _in_words(
        self, vector: str, done: OperationForm, number: int, chains: list[tuple[int, int]]
    ) -> npt.NDArray[np.int32]:
        """An operation as the tap reads it.

        Args:
            number: which gate decides, as `Operation.GATE` says it.
            chains: where the rules of features lie is put here.
        """
        words = np.zeros(_WORDS, np.int32)
        words[Operation.VECTOR] = self._vectors[vector]
        kind, floats = _in_words(done)
        words[Operation.ADD : Operation.COEFFICIENTS_END] = floats.view(np.int32)
        words[Operation.GATE] = number + KIND_UNIT * kind
        if isinstance(done, Features):
            chains.append(self._placed_rules(done))
            words[[Operation.LOW, Operation.HIGH]] = chains[-1]
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
        if not self._free_rows and len(self._configurations) >= self._first_rows:
            if self._unused:
                self._remove(next(iter(self._unused)))
            else:
                self._first_rows *= 2
        return self._free_rows.pop() if self._free_rows else len(self._configurations)

    def _remove(self, groups: tuple[str, ...]) -> None:
        self.stale = True
        self._unused.pop(groups)
        configuration = self._configurations.pop(groups)
        self._stage_entries(configuration.places, configuration.row, np.zeros(_WORDS, np.int32))
        self._new_sums.pop(configuration.row, None)
        for start, length in configuration.chains:
            self._chains.release(start, length)
        if configuration.gates is not None:
            self.gates.remove(configuration.gates)
        self._free_rows.append(configuration.row)
        for digest in configuration.vectors:
            self._vector_users[digest] -= 1
            if not self._vector_users[digest]:  # there is no end to the vectors that requests bring
                del self._vector_users[digest]
        self._free_dropped_vectors()

    # -- the device --------------------------------------------------------------------------------

    def commit(self) -> None:
        """Bring what changed to the device. On the compute stream, before a forward pass."""
        if not self.stale:
            return
        self._grow()
        self._bank.commit()
        self._add_up()
        self._entries.commit()
        self._operations.commit()
        self.gates.commit(self._first_rows)
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

    def _add_up(self) -> None:
        """Make the sums of new rows, from the vectors on the device."""
        if not self._new_sums:
            return
        device, hidden, bank = self._taps.device, self._taps.hidden_size, self._bank.tensor
        rows = self._sums.tensor.shape[1]
        flat = self._sums.tensor.view(-1, hidden)
        place_of = np.zeros(self._taps.num_points, np.int64)
        place_of[[*self._sum_points]] = [*self._sum_points.values()]
        new = self._new_sums.items()
        places = np.concatenate([place_of[sums.points] * rows + row for row, sums in new])
        vectors = np.concatenate([sums.vectors for _, sums in new])
        factors = np.concatenate([sums.factors for _, sums in new])
        order = np.argsort(places, kind="stable")
        summed, firsts, counts = np.unique(places[order], return_index=True, return_counts=True)
        # Of each summand, which place it is added to, and how many came before it there.
        which = np.repeat(np.arange(len(summed)), counts)
        before = np.arange(len(order)) - firsts[which]
        index = np.zeros((counts.max(), len(summed)), np.int64)
        scale = np.zeros((*index.shape, 1), np.float32)
        index[before, which], scale[before, which, 0] = vectors[order], factors[order]
        for low in range(0, len(summed), _SUMS_AT_ONCE):
            part = slice(low, low + _SUMS_AT_ONCE)
            of, by = upload(index[:, part], device), upload(scale[:, part], device)
            total = torch.zeros((of.shape[1], hidden), dtype=torch.float32, device=device)
            for vector, factor in zip(of, by, strict=True):
                total.addcmul_(bank[vector].float(), factor)
            flat.index_copy_(0, upload(summed[part], device), total.to(flat.dtype))
        self._new_sums.clear()

    def _grow(self) -> None:
        """Make room. What is outgrown lives on until the passes that read it are enqueued."""
        held = self._placed.end
        vectors = max(held, min(room(held, 16), self._max_vectors))
        rows = len(self._configurations) + len(self._free_rows)
        sums = len(self._sum_points), min(self._first_rows, room(rows, 8))
        moved = [
            self._entries.grow((self._taps.num_points, self._first_rows, _WORDS)),
            self._operations.grow((room(self._chains.end, 64), _WORDS)),
            self._bank.grow((vectors, self._taps.hidden_size)),
            bool(self._sum_points) and self._sums.grow((*sums, self._taps.hidden_size)),
        ]
        if any(moved):
            self._taps.place_steering(
                self._entries.tensor,
                self._operations.tensor,
                self._bank.tensor,
                {point: self._sums.tensor[at] for point, at in self._sum_points.items()},
            )


def _in_words(form: OperationForm) -> tuple[OperationKind, npt.NDArray[np.float32]]:
    """The kind of an operation, and its words from `ADD` on."""
    if isinstance(form, Rotation):
        given = (form.cosine, form.sine, form.adaptive, form.strength, 0, 0)
        return OperationKind.ROTATE, np.array(given, np.float32)
    if isinstance(form, DimensionWise):
        return OperationKind.DIMENSIONS, np.array(
            (0, 0, form.vectors, form.strength, 0, 0), np.float32
        )
    if isinstance(form, Gradient):
        return OperationKind.GRADIENT, np.array(
            (0, 0, 0, form.strength, form.units, form.outer), np.float32
        )
    if isinstance(form, Features):  # where its rules are, who places them says
        return OperationKind.FEATURES, np.array((0, 0, 0, form.strength, 0, 0), np.float32)
    return OperationKind.ALONG, np.array([*vars(form).values()], np.float32)
