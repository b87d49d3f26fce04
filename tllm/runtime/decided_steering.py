"""What controllers steer running sequences with, by position."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tllm.runtime.placed_groups import GroupOperation
from tllm.runtime.steering import Steering
from tllm.runtime.taps import TapKey
from tllm.spec.groups import SteeringGroup, compose
from tllm.spec.operations import max_reach
from tllm.spec.selection import END
from tllm.spec.stretches import Configuration, Stretches, TokenChoice
from tllm.spec.tiers import OTHER_LAYERS, SteeringEntry, Tiers

_MAX_UNUSED = 64
"""Groups that stay in the tables when no sequence needs them: the same is often decided again."""

_DECIDED = "decided:"
"""What the digests of groups and vectors begin with that only controllers have."""


@dataclass(eq=False)
class NamedSteering:
    """What a controller steers a sequence with, under a name.

    Attributes:
        tiers: as it was given.
        done: the same with its scale.
        until: the position that it ends before.
        groups: digests of what is done.
    """

    tiers: Tiers
    done: Tiers
    until: int
    groups: Configuration


@dataclass(eq=False)
class DecidedSteering:
    """What controllers steer one sequence with.

    Attributes:
        named: what is in force, by consumer and name, in the order in which it came.
        stretches: `(first position, groups)`, all there was and what is known to come: a sequence
            that is computed again is steered as it was.
        begin: the tables have what is done from this position on.
        groups: those in the tables.
    """

    named: dict[tuple[str, str], NamedSteering] = field(default_factory=dict)
    stretches: list[tuple[int, Configuration]] = field(default_factory=list)
    begin: int = 0
    groups: frozenset[str] = frozenset()

    def change(self, position: int) -> None:
        """What is in force from a position on is what is `named` now."""
        while self.stretches and self.stretches[-1][0] >= position:
            self.stretches.pop()
        ends = {each.until for each in self.named.values() if position < each.until < END}
        for start in sorted({position, *ends}):
            applied = (each.groups for each in self.named.values() if start < each.until)
            done = tuple(digest for groups in applied for digest in groups)
            if (self.stretches[-1][1] if self.stretches else ()) != done:
                self.stretches.append((start, done))

    def in_force(self) -> list[tuple[int, Configuration]]:
        """What is done from `begin` on; the first stretch begins at 0."""
        first = bisect_right(self.stretches, self.begin, key=lambda each: each[0])
        before = self.stretches[first - 1][1] if first else ()
        return [(0, before), *self.stretches[first:]]

    def after(self, asked: Stretches) -> Stretches:
        """What is done to each position: what the request asks, then this."""
        decided = self.in_force()
        starts = sorted({start for start, _ in (*asked, *decided)})
        found: Stretches = []
        for start in starts:
            own = asked[bisect_right(asked, start, key=lambda each: each[0]) - 1][1]
            more = decided[bisect_right(decided, start, key=lambda each: each[0]) - 1][1]
            both: Configuration | TokenChoice
            if isinstance(own, TokenChoice):
                each = tuple((token, (*groups, *more)) for token, groups in own.by_token)
                both = TokenChoice(each, (*own.others, *more))
            else:
                both = (*own, *more)
            if not found or found[-1][1] != both:
                found.append((start, both))
        return found


class DecidedGroups:
    """Groups that controllers made, on the host for as long as a sequence may need them, and in the
    steering tables while one does.

    Args:
        resolve: from a hook point and layer to its key; raises `ValueError` for one that this
            engine has no tap for.
        dtype: of the model's rows.
        enabled: whether this engine steers.
    """

    def __init__(
        self,
        steering: Steering,
        resolve: Callable[[str, int | None], TapKey],
        *,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        enabled: bool,
    ) -> None:
        self._steering = steering
        self._resolve = resolve
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._numbers = torch.finfo(dtype)
        self._max_reach = max_reach(self._numbers.max, hidden_size)
        self._enabled = enabled
        self._groups: dict[str, SteeringGroup] = {}
        self._last: tuple[Tiers, tuple[SteeringGroup, ...]] | None = None
        self._sequences: Counter[str] = Counter()  # that may need a group
        self._in_tables: Counter[str] = Counter()  # sequences that need it there
        #: Groups in the tables that none needs, and what their vectors are called there.
        self._unused: OrderedDict[str, list[str]] = OrderedDict()

    def read(self, given: object, name: str) -> Tiers:
        """Steering as a controller gives it. Raises `ValueError` for what cannot be done."""
        if not self._enabled:
            raise ValueError(
                f"{name}: steering is not enabled in this engine; start it with "
                "max_steering_configs=512"
            )
        tiers = Tiers.parse(vectors=given, names={"vectors": name})
        return tiers.map(self._checked)

    def _checked(self, entry: SteeringEntry) -> SteeringEntry:
        if entry.when is not None:
            raise ValueError(
                f"{entry.name} has a condition ('when'); what a controller decides is done: leave "
                "it out, or give it with the request"
            )
        if not entry.positions.everything:
            raise ValueError(
                f"{entry.name} has 'positions'; what a controller decides is done to the tokens "
                "after its decision: say tokens= for how many"
            )
        if entry.num_layers not in (None, self._num_layers):
            raise ValueError(OTHER_LAYERS.format(entry.name, entry.num_layers, self._num_layers))
        self._resolve(entry.point.value, entry.layer)
        if entry.vector.shape[-1] != self._hidden_size:
            raise ValueError(
                f"{entry.name} has {entry.vector.shape[-1]} numbers; the model's hidden size is "
                f"{self._hidden_size}"
            )
        entry.check_numbers(self._numbers.max, self._max_reach, self._numbers.smallest_normal)
        layer = None if entry.layer is None else entry.layer % self._num_layers
        return replace(entry, layer=layer)

    def check(self, parts: Sequence[Tiers], name: str) -> None:
        """Refuse what together does too much at one place."""
        groups = self._composed(parts[0]) if len(parts) == 1 else compose(parts)
        SteeringGroup.check_limits(groups, name, self._max_reach)

    # -- groups of a sequence ----------------------------------------------------------------------

    def hold(self, tiers: Tiers) -> Configuration:
        """What is done, for one sequence; to be given back with `release`."""
        found = []
        for group in self._composed(tiers):
            digest = _DECIDED + group.digest
            self._groups.setdefault(digest, group)
            self._sequences[digest] += 1
            found.append(digest)
        return tuple(found)

    def _composed(self, tiers: Tiers) -> tuple[SteeringGroup, ...]:
        """The groups of what is done; the last are kept, as many sequences are often steered by one
        object."""
        if self._last is None or self._last[0] is not tiers:
            self._last = tiers, compose([tiers])
        return self._last[1]

    def release(self, groups: Mapping[str, int]) -> None:
        """A sequence that held these so often has ended."""
        for digest, count in groups.items():
            self._sequences[digest] -= count
            if not self._sequences[digest]:
                del self._sequences[digest], self._groups[digest]

    def place(self, decided: DecidedSteering, groups: frozenset[str]) -> Callable[[], None]:
        """Let the tables have the groups of a sequence; what is returned lets those go that it does
        not need any more, once its rows are others."""
        for digest in groups - decided.groups:
            self._in_tables[digest] += 1
            if self._in_tables[digest] == 1 and self._unused.pop(digest, None) is None:
                self._put(digest)
        gone, decided.groups = decided.groups - groups, groups

        def let_go() -> None:
            for digest in gone:
                self._in_tables[digest] -= 1
                if not self._in_tables[digest]:
                    del self._in_tables[digest]
                    self._unused[digest] = list(self._vectors(digest).values())
            while len(self._unused) > _MAX_UNUSED:
                oldest, vectors = self._unused.popitem(last=False)
                self._steering.drop([oldest], vectors)

        return let_go

    def _vectors(self, digest: str) -> dict[str, str]:
        """What the vectors of a group are called in the tables: they are its own."""
        return {vector: f"{digest}:{vector}" for vector in self._groups[digest].vectors}

    def _put(self, digest: str) -> None:
        group, called = self._groups[digest], self._vectors(digest)
        operations: list[GroupOperation] = [
            (hook, layer, called[vector], done) for hook, layer, vector, done in group.operations
        ]
        vectors = {called[vector]: array for vector, array in group.vectors.items()}
        self._steering.put(vectors, {digest: operations})
