"""What front ends have registered in a worker: it is the worker's, and they ask for what is new.

Several front ends (processes of the API server) may share the workers of an engine. Each of them
must steer by what any of them has set, and none may take away what another's requests use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from tllm.runtime.packed_vectors import PackedVectors
from tllm.runtime.steering import Steering
from tllm.shared_memory import FOLDER, IN_MEMORY, SharedFile
from tllm.spec.reading import FloatArray

WEIGHTS = "weights"
"""Key of nothing but a version: another one after the model's weights were replaced."""

STEERING_KEYS = ("steering", "module:", "monitor:", WEIGHTS)
"""How the keys of what steers begin: global steering, named modules and monitors; and what an
answer that was kept depends on as well."""


_MOST_REMOVED = 4096
"""How many removals can be told; of older ones nothing is kept."""


class News(NamedTuple):
    """What a front end does not know yet.

    Attributes:
        version: of all that is registered.
        entries: by key, the version of the change and the value; None: removed.
        whole: these are all keys that there are: others that the front end knows were removed.
    """

    version: int
    entries: dict[str, tuple[int, bytes | None]]
    whole: bool


class Registered:
    """Values by key, with a version, which whoever is on the same host can read without asking.

    Values are bytes that only the front ends understand. The workers of the first replica have the
    say; those of others only keep theirs.

    Attributes:
        version: another number after each change.
        shared_file: name of one that holds two numbers of 8 bytes: the version, and that of the
            last change of what steers, or of the weights; empty without.
    """

    def __init__(self) -> None:
        self.version = 0
        self.shared_file = ""
        self._entries: dict[str, tuple[int, bytes]] = {}
        #: The version of each, ascending.
        self._removed: dict[str, int] = {}
        #: The version of the last removal that is not among these any more.
        self._forgotten = 0
        self._held: SharedFile | None = None
        self._shown: Any = None

    def show(self) -> None:
        """Let others on this host see the version."""
        if self.shared_file or not IN_MEMORY:
            return
        self._held = SharedFile.reserve(16)
        self._shown = self._held.map().view("int64")
        self._shown[:] = self.version
        self.shared_file = self._held.path.name

    def close(self) -> None:
        if self._held is not None:
            self._held.release()

    def change(self, key: str, seen: int, value: bytes | None) -> bool:
        """Set a value, or remove it, unless somebody else has changed it meanwhile.

        Args:
            seen: the version at which the caller saw the value last; 0 for one that is not there.

        Returns:
            Whether it was set.
        """
        if (self._entries[key][0] if key in self._entries else 0) != seen:
            return False
        self.put(key, value)
        return True

    def put(self, key: str, value: bytes | None) -> None:
        """Set a value, or remove it, whatever was there."""
        self.version += 1
        self._removed.pop(key, None)
        if value is not None:
            self._entries[key] = self.version, value
        else:
            self._entries.pop(key, None)
            self._removed[key] = self.version
            if len(self._removed) > _MOST_REMOVED:
                self._forgotten = self._removed.pop(next(iter(self._removed)))
        if self._shown is not None:
            if key.startswith(STEERING_KEYS):
                self._shown[1] = self.version
            self._shown[0] = self.version

    def since(self, version: int) -> News:
        """What has changed after a version."""
        whole = version < self._forgotten
        entries: dict[str, tuple[int, bytes | None]] = {
            key: entry for key, entry in self._entries.items() if whole or entry[0] > version
        }
        latest = takewhile(lambda each: each[1] > version, reversed(self._removed.items()))
        entries.update((key, (changed, None)) for key, changed in latest)
        return News(self.version, entries, whole)


class HeldGroups:
    """Which front end has need of which steering groups; a group goes when nobody has.

    Vectors go with the last group that has them.
    """

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._held: dict[str, set[str]] = {}
        self._holders: Counter[str] = Counter()
        self._vectors: dict[str, frozenset[str]] = {}
        self._groups_of: Counter[str] = Counter()

    @property
    def num_vectors(self) -> int:
        return len(self._groups_of)

    def attach(self, holder: str) -> int:
        """A front end begins; the number of those that are there.

        Args:
            holder: name of a shared file that the front end's process answers for, or any other
                name of its own. What processes held that are gone is given up.
        """
        for name in [n for n in self._held if n.startswith("tllm-") and not (FOLDER / n).exists()]:
            self.put(name, {}, {}, list(self._held[name]))
            del self._held[name]
        self._held.setdefault(holder, set())
        return len(self._held)

    def put(
        self,
        holder: str,
        vectors: PackedVectors | Mapping[str, FloatArray],
        groups: Mapping[str, Any],
        released: Iterable[str],
        gates: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Give up groups that a front end has no need of, then keep new ones for it.

        Args:
            vectors: by digest.
            groups: operations by digest.
            gates: conditions of groups that have any, by digest.
        """
        held = self._held.setdefault(holder, set())
        gone = []
        for digest in held.intersection(released):
            held.remove(digest)
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                gone.append(digest)
        unused = []
        for vector in (vector for digest in gone for vector in self._vectors.pop(digest)):
            self._groups_of[vector] -= 1
            if not self._groups_of[vector]:
                self._groups_of.pop(vector)
                unused.append(vector)
        self._steering.drop(gone, unused)
        try:
            self._steering.put(vectors, groups, gates)
        except Exception:
            # Nobody would give up what came before the one that is refused.
            self._steering.drop(
                [each for each in groups if each not in self._vectors],
                [each for each in vectors if not self._groups_of[each]],
            )
            raise
        for digest, operations in groups.items():
            if digest not in self._vectors:
                judged = gates[digest].gates if digest in gates else ()
                probes = (gate.vector for gate in judged if gate.vector)
                used = (vector for _, _, vector, _ in operations)
                self._vectors[digest] = frozenset((*used, *probes))
                self._groups_of.update(self._vectors[digest])
            if digest not in held:
                held.add(digest)
                self._holders[digest] += 1
