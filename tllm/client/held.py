"""What steers requests: which of it the workers hold for a front end, and how they are brought the
rest."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tllm.client.calls import ALONE, Steps, WorkerCall
from tllm.client.facts import Facts
from tllm.client.registrations import Registrations
from tllm.params import asked_of
from tllm.runtime.packed_vectors import PackedVectors
from tllm.spec.groups import SteeringGroup
from tllm.spec.reading import FloatArray

logger = logging.getLogger(__name__)

_BROUGHT_AT_ONCE = 2**26
"""Bytes of vectors in one call, about; more of a single request."""


@dataclass(frozen=True)
class Upload:
    """What the workers do not hold yet, and what they may give up first."""

    vectors: Mapping[str, FloatArray]
    groups: Mapping[str, SteeringGroup]
    released: Sequence[str]
    dtype: str

    @property
    def packed(self) -> PackedVectors:
        return PackedVectors.of(self.vectors, self.dtype)


class HeldByWorkers:
    """The groups that the workers hold for this front end, and the requests that use them."""

    def __init__(self) -> None:
        #: By group: its vectors, and how many rows each is.
        self._groups: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._vectors: Counter[str] = Counter()  # groups that have it
        self._num_rows = 0  # that all vectors have
        #: Groups of calls that failed, or that nobody waited for: some workers may hold them.
        self._unknown: set[str] = set()
        self._users: Counter[str] = Counter()
        self._requests: dict[str, tuple[SteeringGroup, ...]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def hold(self, prompt_id: str, groups: tuple[SteeringGroup, ...]) -> None:
        """A request runs with these groups: the workers must keep them."""
        if groups:
            self._requests[prompt_id] = groups
            self._users.update(group.digest for group in groups)

    def release(self, prompt_id: str) -> None:
        """A request has ended."""
        for group in self._requests.pop(prompt_id, ()):
            self._users[group.digest] -= 1
            if not self._users[group.digest]:
                del self._users[group.digest]

    def has(self, groups: Sequence[SteeringGroup]) -> bool:
        """Whether the workers hold these groups, which are used now."""
        for group in groups:
            if group.digest not in self._groups:
                return False
            self._groups.move_to_end(group.digest)
        return True

    def upload(self, groups: Sequence[SteeringGroup], facts: Facts, front_ends: int) -> Upload:
        """What must be sent to the workers before these groups are used.

        Args:
            front_ends: how many share the memory for vectors.
        """
        missing = {g.digest: g for g in groups if g.digest not in self._groups}
        needed = {v: _rows_of(rows) for g in missing.values() for v, rows in g.vectors.items()}
        room = facts.max_mib * 2**20 // facts.row_bytes // front_ends
        total = self._num_rows + sum(n for v, n in needed.items() if v not in self._vectors)
        current = {group.digest for group in groups}
        released: list[str] = []
        lost: Counter[str] = Counter()  # groups that had it
        gone: set[str] = set()
        for digest, vectors in self._groups.items():  # least recently used first
            if total <= room:
                break
            if not self._users[digest] and digest not in current:
                released.append(digest)
                lost.update(vectors.keys())
                gone_now = {v for v in vectors if lost[v] == self._vectors[v]}
                gone |= gone_now
                total -= sum(vectors[v] for v in gone_now - needed.keys())
        if total > room:
            share = f" between {front_ends} front ends" if front_ends > 1 else ""
            raise ValueError(
                f"steering needs {total * facts.row_bytes / 2**20:.1f} MiB of vectors for the "
                f"requests that run, and max_steering_mib={facts.max_mib}{share}; start the engine "
                "with a larger max_steering_mib, or run fewer distinct vectors at once"
            )
        new = {
            digest: vector
            for group in missing.values()
            for digest, vector in group.vectors.items()
            if digest not in self._vectors or digest in gone  # what is given up is sent again
        }
        return Upload(new, missing, [*released, *self._unknown], facts.dtype)

    def sent(self, upload: Upload, arrived: bool) -> None:
        """An upload was sent; what it gives up is gone, also where the rest was refused."""
        if arrived:
            self._unknown.difference_update(upload.released)
        else:
            self._unknown.update(upload.groups, upload.released)
        for digest in upload.released:
            for vector, rows in self._groups.pop(digest, {}).items():
                self._vectors[vector] -= 1
                if not self._vectors[vector]:
                    self._vectors.pop(vector)
                    self._num_rows -= rows
        for digest, group in upload.groups.items() if arrived else ():
            held = self._groups[digest] = {v: _rows_of(rows) for v, rows in group.vectors.items()}
            self._num_rows += sum(n for v, n in held.items() if v not in self._vectors)
            self._vectors.update(held.keys())


class VectorUploads:
    """Brings the workers the groups of steering that they do not hold yet.

    Args:
        registered: what is known of the engine.
        held: what the workers hold for this front end.
    """

    def __init__(self, registered: Registrations, held: HeldByWorkers) -> None:
        self._registered = registered
        self._held = held
        #: Groups that requests wait for, each under a key of its own.
        self._wanted: dict[object, Sequence[SteeringGroup]] = {}

    def bring(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        """Let the workers hold groups. The caller goes on without waiting for anything else.

        A call waits for the step that is under way. So whoever comes meanwhile waits for one call
        more, which brings what all of them need. Where the workers refuse a condition of one, each
        brings its own, and hears what is wrong with it.
        """
        if self._held.has(groups):
            return
        me = object()
        self._wanted[me] = groups
        together = True
        try:
            while not self._held.has(groups):
                yield ALONE  # what is on its way is not there yet, and must not be given up again
                if self._held.has(groups):
                    return
                upload = self._upload(groups, together)
                operations = {digest: group.operations for digest, group in upload.groups.items()}
                gates = {d: group.gates for d, group in upload.groups.items() if group.gates}
                call = (self._registered.holder, upload.packed, operations, upload.released, gates)
                arrived = False
                try:
                    yield WorkerCall("update_steering", call)
                    arrived = True
                except ValueError:
                    if upload.groups.keys() <= {group.digest for group in groups}:
                        raise
                    together = False
                finally:
                    self._held.sent(upload, arrived)
        finally:
            del self._wanted[me]

    def _upload(self, groups: Sequence[SteeringGroup], together: bool) -> Upload:
        """What brings groups, and, together with them, those that others wait for."""
        brought = {group.digest: group for group in groups}
        size = 0
        for waiting in self._wanted.values() if together else ():
            size += sum(v.nbytes for group in waiting for v in group.vectors.values())
            if size <= _BROUGHT_AT_ONCE:
                brought |= {group.digest: group for group in waiting}
        facts, front_ends = self._registered.facts, self._registered.front_ends
        try:
            return self._held.upload([*brought.values()], facts, front_ends)
        except ValueError:  # there is no room for all of them
            return self._held.upload(groups, facts, front_ends)

    def expect(self, params: Iterable[Any]) -> Steps[None]:
        """Requests are about to be added: let the workers hold what steers them, in few calls."""
        if not self._registered.is_current:
            yield from self._registered.current()
        new: dict[str, SteeringGroup] = {}
        size = 0
        for each in params:
            try:
                steering = asked_of(each).steering
                groups = () if steering is None else self._registered.composer.groups(steering)
            except ValueError:  # the request will say so itself
                continue
            for group in groups:
                if group.digest not in new and not self._held.has([group]):
                    new[group.digest] = group
                    size += sum(vector.nbytes for vector in group.vectors.values())
            if size > _BROUGHT_AT_ONCE:
                yield from self._bring_if_possible([*new.values()])
                new, size = {}, 0
        if len(new) > 1:
            yield from self._bring_if_possible([*new.values()])

    def _bring_if_possible(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        """Bring groups, unless there is no room for all of them, or the workers refuse a condition
        of one: then each request brings its own, and hears what is wrong with it."""
        try:
            yield from self.bring(groups)
        except ValueError as error:
            logger.debug("steering is brought with each request: %s", error)


def _rows_of(vector: FloatArray) -> int:
    """How many rows a vector is, or several that an operation takes together."""
    return len(vector) if vector.ndim > 1 else 1
