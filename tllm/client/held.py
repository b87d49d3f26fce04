"""Which groups of steering the workers hold for a front end."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tllm.client.facts import Facts
from tllm.runtime.packed_vectors import PackedVectors
from tllm.spec.groups import SteeringGroup
from tllm.spec.reading import FloatArray


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
                    del self._vectors[vector]
                    self._num_rows -= rows
        for digest, group in upload.groups.items() if arrived else ():
            held = self._groups[digest] = {v: _rows_of(rows) for v, rows in group.vectors.items()}
            self._num_rows += sum(n for v, n in held.items() if v not in self._vectors)
            self._vectors.update(held.keys())


def _rows_of(vector: FloatArray) -> int:
    """How many rows a vector is, or several that an operation takes together."""
    return len(vector) if vector.ndim > 1 else 1
