"""Steering in a worker: the device tables that the tap op reads, and who uses which rows.

Where what is done to a generated token depends on which it is, the row plan holds a *choice* until
the tokens are known, and then a steering row in its place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.descriptor import (
    CHAIN_UNIT,
    HAS_SUM,
    KIND_UNIT,
    SCOPE_UNIT,
    Operation,
    OperationKind,
)
from tllm.runtime.gates import Gates, JudgedGates
from tllm.runtime.kernels import token_choice
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.latches import Latch
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.transfer import upload
from tllm.spec.conditions import PROBE, Gate, GroupGates, order_of
from tllm.spec.operations import (
    Coefficients,
    DimensionWise,
    Features,
    Gradient,
    OperationForm,
    Rotation,
)

GroupOperation = tuple[str, int | None, str, OperationForm]
"""Hook point, layer, digest of the vector, and what is done with it."""

Choice = tuple[tuple[tuple[int, int], ...], int]
"""`(token, steering row)` of the tokens that are named, and the row of all others."""

_WORDS = int(Operation.SIZE)
_SUMS_AT_ONCE = 4096


@dataclass(eq=False)
class _Places:
    """Points at which some configurations, and no others, have operations."""

    points: npt.NDArray[np.int64]
    users: int = 0
    """Configurations that are in use."""


@dataclass(frozen=True, eq=False)
class _HeldGroup:
    """A group as this worker does it.

    Attributes:
        operations: point, digest of the vector, what is done, and which gate decides, as
            `Operation.GATE` says it.
        gates: point and condition.
        remembered: what a sequence remembers of its conditions.
        told: likewise of those that earlier pipeline stages judge.
        tells: whether a later pipeline stage may need what is judged here.
        hears: whether this one needs what is judged on an earlier one.
    """

    operations: list[tuple[int, str, OperationForm, int]]
    gates: list[tuple[int, Gate]]
    remembered: list[Gate]
    told: list[Gate]
    tells: bool
    hears: bool


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


class TokenChoices:
    """Steering rows by token, for tokens that the host does not know when it plans a step.

    The row plan holds `-2 - i` for choice i; `apply` puts the row of the token in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._use_kernel = uses_triton(device)
        self._numbers: dict[Choice, int] = {}
        self._users: Counter[int] = Counter()
        self._free: list[int] = []
        self._runs = ConsecutivePlaces()
        self._starts: dict[int, int] = {}
        self._heads = StagedTable((0, 3), 1, torch.int32, device)
        self._entries = StagedTable((0, 2), 1, torch.int32, device)

    def acquire(self, choice: Choice) -> int:
        """What stands for a choice in the row plan; to be given back with `release`."""
        number = self._numbers.get(choice)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[choice] = number
            by_token, others = choice
            start = self._starts[number] = self._runs.acquire(len(by_token))
            self._heads.stage(number, np.array([start, len(by_token), others], np.int32))
            for i, entry in enumerate(by_token):
                self._entries.stage(start + i, np.array(entry, np.int32))
        self._users[number] += 1
        return -2 - number

    def release(self, choice: Choice) -> None:
        """A sequence does not need this choice any more."""
        number = self._numbers[choice]
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[choice], self._users[number]
            self._runs.release(self._starts.pop(number), len(choice[0]))
            self._free.append(number)

    def apply(self, steer: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Choose by token. On the compute stream, before a forward pass.

        Args:
            steer: int32 `[tokens]`, the plan's steering rows.
            token_ids: `[tokens]`, of the batch.
        """
        if self._heads:
            self._heads.grow((room(len(self._numbers) + len(self._free), 16), 3))
            self._entries.grow((room(self._runs.end, 64), 2))
            self._heads.commit()
            self._entries.commit()
        run = token_choice.launch if self._use_kernel else token_choice.reference
        run(steer, token_ids, self._heads.tensor, self._entries.tensor)


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

    Attributes:
        choices: rows that depend on the token.
        gates: what is judged for rows.
        users: rows that sequences have, each counted as often as it is had.
    """

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        rows: int,
        max_vectors: int,
        max_positions: int,
    ) -> None:
        self._taps = taps
        self._resolve = resolve
        self.choices = TokenChoices(taps.device)
        self.gates = Gates(taps, max_positions)
        self._groups: dict[str, _HeldGroup] = {}
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
        self._new_sums: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._sum_points: dict[int, int] = {}  # point: its place in `_sums`
        self._first_rows = max(1, rows)
        self._max_vectors = max_vectors
        device, dtype, hidden = taps.device, taps.dtype, taps.hidden_size
        self._entries = StagedTable((taps.num_points, 0, _WORDS), 2, torch.int32, device)
        self._operations = StagedTable((0, _WORDS), 1, torch.int32, device)
        self._bank = StagedTable((0, hidden), 1, dtype, device)
        self._sums = StagedTable((0, 0, hidden), 2, dtype, device)  # written by kernels only
        self._stale = False  # something is staged, or points that steer have come or gone
        self.users = 0

    # -- what the user's process keeps here -------------------------------------------------------

    def put(
        self,
        vectors: Mapping[str, npt.NDArray[np.float32]],
        groups: Mapping[str, Sequence[GroupOperation]],
        gates: Mapping[str, GroupGates] = MappingProxyType({}),
    ) -> None:
        """Add vectors and groups by digest; those that are here are left alone.

        Args:
            gates: conditions of groups that have any.

        Raises `ValueError` when a group names a hook point that this engine has no tap for, or a
        condition is judged later in the network than what it decides on.
        """
        hidden = self._taps.hidden_size
        for digest, vector in vectors.items():
            if vector.shape[-1] != hidden or vector.ndim > 2:
                raise ValueError(f"steering vectors have shape {vector.shape}; hidden is {hidden}")
            self._dropped_vectors.discard(digest)
            if digest.startswith(PROBE):
                self.gates.hold(digest, vector)
            elif digest not in self._vectors:
                held = torch.from_numpy(np.array(vector)).to(self._taps.dtype).view(-1, hidden)
                first = self._vectors[digest] = self._placed.acquire(len(held))
                self._rows_of_vectors[digest] = len(held)
                for row, each in enumerate(held, first):
                    self._bank.stage(row, each)
                self._stale = True
        for digest, operations in groups.items():
            if digest in self._groups:
                continue
            self._groups[digest] = self._held_group(operations, gates.get(digest))

    def _held_group(
        self, operations: Sequence[GroupOperation], gates: GroupGates | None
    ) -> _HeldGroup:
        """A group as this worker does it: without what another pipeline stage does."""
        gates = GroupGates((-1,) * len(operations), ()) if gates is None else gates
        index, found = self._taps.index, []
        points, earlier = self._where_judged(gates)
        # Later requests of a conversation, and the scheduler, hear of conditions from the last
        # stage.
        needed = {each.number for each in gates.gates if each.kept_as}
        needed_here = set(needed)
        if not operations and not gates.judges:
            needed_here = needed = {each.number for each in gates.gates}
        for (hook, layer, vector, coefficients), number in zip(
            operations, gates.of_operations, strict=True
        ):
            key = self._resolve(hook, layer)
            if key in index:
                scope = gates.scope_of(number)
                self._check_gate(index[key], number, points, earlier, before=scope > 0)
                word = number + 1 + SCOPE_UNIT * scope
                found.append((index[key], vector, coefficients, word))
                needed_here = needed_here | gates.made_of(number)
            else:
                needed = needed | gates.made_of(number)
        judged = [(points[each.number], each) for each in gates.judged if each.number in points]
        for point, each in judged:
            for term in each.terms:
                self._check_gate(point, term, points, earlier, before=each.of_mean)
            needed_here = needed_here.union(each.terms)
        remembered = [each for each in gates.gates if each.scope or each.over]
        return _HeldGroup(
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
        index = self._taps.index
        first = min((order_of(*key) for key in index), default=(0, 0))
        points, earlier = {}, set()
        for each in gates.gates:
            key = self._resolve(each.hook, each.layer)
            if key in index:
                points[each.number] = index[key]
            elif order_of(*key) < first:
                earlier.add(each.number)
        return points, earlier

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
            self._stale = self._stale or configuration.places.users == 1
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
        self._stale = True
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
            self._stale = self._stale or configuration.places.users == 0
            self._use_gates(configuration, -1)
            self._unused[groups] = None
            if any(digest not in self._groups for digest in groups):
                self._remove(groups)

    def _use_gates(self, configuration: _Configuration, more: int) -> None:
        if configuration.gates is not None:
            self.gates.use(configuration.gates, more)
            self._stale = True

    def _configure(self, groups: tuple[str, ...]) -> _Configuration:
        if unknown := [digest for digest in groups if digest not in self._groups]:
            raise ValueError(
                f"steering {unknown[0]} is not in this worker; ask through tllm.LLM or "
                "tllm.AsyncLLM, which bring it here"
            )
        # At each point: what is added first, as one sum; then the other operations, in order.
        sums: dict[int, list[tuple[int, float]]] = {}
        operations: dict[int, list[npt.NDArray[np.int32]]] = {}
        vectors: set[str] = set()
        chains: list[tuple[int, int]] = []
        judged: dict[int, dict[int, Gate]] = {}
        for digest in groups:
            if self._groups[digest].hears:
                self.gates.expect()
            for point, gate in self._groups[digest].gates:
                judged.setdefault(point, {})[gate.number] = gate
                vectors.update([gate.vector] if gate.vector else ())
            for point, vector, coefficients, number in self._groups[digest].operations:
                vectors.add(vector)
                others = operations.setdefault(point, [])
                if (
                    isinstance(coefficients, Coefficients)
                    and coefficients.only_adds
                    and not others
                    and not number
                ):
                    sums.setdefault(point, []).append((self._vectors[vector], coefficients.add))
                    continue
                words = np.zeros(_WORDS, np.int32)
                words[Operation.VECTOR] = self._vectors[vector]
                kind, floats = _in_words(coefficients)
                words[Operation.ADD : Operation.COEFFICIENTS_END] = floats.view(np.int32)
                words[Operation.GATE] = number + KIND_UNIT * kind
                others.append(words)
                if isinstance(coefficients, Features):
                    chains.append(self._placed_rules(coefficients))
                    words[[Operation.LOW, Operation.HIGH]] = chains[-1]
        self._stale = True
        row = self._free_row()
        for point, others in operations.items():
            entry = others[0].copy() if others else np.zeros(_WORDS, np.int32)
            rest = others[1:]
            start = 0
            if rest:
                start = self._chains.acquire(len(rest))
                chains.append((start, len(rest)))
                for i, words in enumerate(rest):
                    self._operations.stage(start + i, words)
            entry[Operation.CHAIN] = len(others) + CHAIN_UNIT * start
            if point in sums:
                entry[Operation.CHAIN] += HAS_SUM
                self._sum_points.setdefault(point, len(self._sum_points))
                self._new_sums[point, row] = sums[point]
            self._entries.stage((point, row), entry)
        self._vector_users.update(vectors)
        points = tuple(operations)
        places = self._places.setdefault(points, _Places(np.array(points, np.int64)))
        gates = None
        if judged:
            in_order = {p: [at[n] for n in sorted(at)] for p, at in judged.items()}
            gates = self.gates.place(row, in_order)
        return _Configuration(row, places, chains, vectors, gates)

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
        """Free the row of a combination that nobody uses."""
        self._stale = True
        self._unused.pop(groups)
        configuration = self._configurations.pop(groups)
        for point in configuration.places.points.tolist():
            self._entries.stage((point, configuration.row), np.zeros(_WORDS, np.int32))
            self._new_sums.pop((point, configuration.row), None)
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
        if not self._stale:
            return
        self._grow()
        self._bank.commit()
        self._add_up()
        self._entries.commit()
        self._operations.commit()
        self.gates.commit(self._first_rows)
        self._taps.set_steering(self._points_in_use())
        self._taps.note_write()
        self._stale = False

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
        new = [(self._sum_points[p] * rows + row, s) for (p, row), s in self._new_sums.items()]
        for low in range(0, len(new), _SUMS_AT_ONCE):
            part = new[low : low + _SUMS_AT_ONCE]
            longest = max(len(summands) for _, summands in part)
            index = np.zeros((longest, len(part)), np.int64)
            scale = np.zeros((longest, len(part), 1), np.float32)
            for i, (_, summands) in enumerate(part):
                for j, (vector, factor) in enumerate(summands):
                    index[j, i], scale[j, i, 0] = vector, factor
            total = torch.zeros((len(part), hidden), dtype=torch.float32, device=device)
            vectors, factors = upload(index, device), upload(scale, device)
            for j in range(longest):
                total.addcmul_(bank[vectors[j]].float(), factors[j])
            at = upload(np.array([place for place, _ in part], np.int64), device)
            flat.index_copy_(0, at, total.to(flat.dtype))
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
