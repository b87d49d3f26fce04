"""Which distiller each running sequence uses."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tllm.consumers.esamp.config import RequestOptions, Scope
from tllm.ports import RequestInfo

UNGUIDED = -1


class DistillerKey(NamedTuple):
    """What the sequences that share a distiller have in common."""

    kind: Literal["prompt", "request", "shared", "group"]
    name: str
    sample: int = 0

    @classmethod
    def of(cls, request: RequestInfo, scope: Scope) -> DistillerKey:
        """The key of a sequence; a `group` in its options goes before the scope."""
        group = RequestOptions.parse(request.options).group
        if group is not None:
            return cls("group", group)
        if scope == "shared":
            return cls("shared", "")
        if scope == "request":
            return cls("request", request.prompt_id, request.sample_index)
        return cls("prompt", request.prompt_id)

    def label(self, request: RequestInfo) -> str:
        """How statistics name it: by the id the caller knows, where there is one."""
        if self.kind == "group":
            return f"group:{self.name}"
        if self.kind == "shared":
            return "shared"
        if self.kind == "request":
            return f"{request.request_id}/{self.sample}"
        return request.request_id


@dataclass(eq=False)
class Lease:
    """A distiller in use. `slot` is `UNGUIDED` when there was no room for it.

    Attributes:
        live: the running sequences that share it.
        pending: sequences that will use it and have not finished; 0 when unknown.
    """

    key: DistillerKey
    label: str
    slot: int
    pending: int
    live: set[tuple[str, int]] = field(default_factory=set)


class SlotTable:
    """Lends slots to prompts (or samples, or groups) and takes them back.

    A prompt keeps its slot until its n samples have finished, even while none of them runs: the
    others may still be waiting to be scheduled. When room is needed, the slot of a prompt that
    runs no sample is taken first.

    Args:
        capacity: number of slots at first.
        growable: double the number when none is free.
        scope: who shares a distiller.
        persist: keep the slots of groups (and of the shared distiller) until they are forgotten.

    Attributes:
        fresh: slots lent since they were last reset, with the label of the new user.
        version: changes whenever a sequence may have got another slot.
        refused: distillers that found no slot.
    """

    def __init__(self, capacity: int, growable: bool, scope: Scope, persist: bool) -> None:
        self.capacity = capacity
        self.growable = growable
        self.scope = scope
        self.persist = persist
        self.fresh: dict[int, str] = {}
        self.version = 0
        self.refused = 0
        self._free = list(range(capacity))
        self._leases: dict[DistillerKey, Lease] = {}
        #: Of groups that were forgotten, while sequences run that had joined before.
        self._forgotten: list[Lease] = []
        self._joined: dict[tuple[str, int], Lease] = {}

    @property
    def in_use(self) -> int:
        return sum(lease.slot != UNGUIDED for lease in self._all())

    def _all(self) -> list[Lease]:
        return [*self._leases.values(), *self._forgotten]

    def join(self, request: RequestInfo) -> Lease:
        """The lease of a running sequence, made now if it has none."""
        sequence = request.prompt_id, request.sample_index
        key, lease = DistillerKey.of(request, self.scope), self._joined.get(sequence)
        if lease is not None and lease.key != key:  # a later input of its prompt names another
            self._end(lease, sequence)
            self.version += 1
            lease = None
        if lease is None:
            lease = self._leases.get(key) or self._lend(key, request)
            lease.live.add(sequence)
            self._joined[sequence] = lease
        return lease

    def leave(self, request: RequestInfo) -> bool:
        """A sequence ended; whether it had a distiller, or never needed one."""
        sequence = request.prompt_id, request.sample_index
        lease = self._joined.get(sequence)
        if lease is None:
            lease = self._leases.get(DistillerKey.of(request, self.scope))
        if lease is None:
            return True
        guided = lease.slot != UNGUIDED
        self._end(lease, sequence)
        return guided

    def _end(self, lease: Lease, sequence: tuple[str, int]) -> None:
        """A sequence uses a distiller no more."""
        self._joined.pop(sequence, None)
        lease.live.discard(sequence)
        lease.pending -= 1
        if not lease.live and lease.pending <= 0 and not self._persists(lease):
            self._recycle(lease)

    def forget_group(self, name: str) -> bool:
        """Take the slot of a group back, now or when the last of its sequences that run has ended;
        whether there was such a group. Sequences that join later begin anew, in another slot."""
        lease = self._leases.get(DistillerKey("group", name))
        if lease is None:
            return False
        if lease.live:
            self._forgotten.append(self._leases.pop(lease.key))
        else:
            self._recycle(lease)
        return True

    def shrink_to(self, capacity: int) -> None:
        """Growing failed: slots from `capacity` on do not exist, now or later."""
        self.capacity = capacity
        self.growable = False
        self.version += 1
        self._free = [slot for slot in self._free if slot < capacity]
        self.fresh = {slot: label for slot, label in self.fresh.items() if slot < capacity}
        for lease in self._all():
            if lease.slot >= capacity:
                lease.slot = UNGUIDED
                self.refused += 1

    def _lend(self, key: DistillerKey, request: RequestInfo) -> Lease:
        pending = {"prompt": request.num_samples, "request": 1}.get(key.kind, 0)
        lease = Lease(key, key.label(request), self._take(), pending)
        self._leases[key] = lease
        self.version += 1
        if lease.slot == UNGUIDED:
            self.refused += 1
        else:
            self.fresh[lease.slot] = lease.label
        return lease

    def _take(self) -> int:
        if not self._free:
            self._reclaim_idle()
        if not self._free and self.growable:
            self._free = list(range(self.capacity, 2 * self.capacity))
            self.capacity *= 2
        return heapq.heappop(self._free) if self._free else UNGUIDED

    def _reclaim_idle(self) -> None:
        for lease in self._leases.values():
            if not lease.live and lease.slot != UNGUIDED and not self._persists(lease):
                self._recycle(lease)
                return

    def _recycle(self, lease: Lease) -> None:
        if lease in self._forgotten:
            self._forgotten.remove(lease)
        else:
            del self._leases[lease.key]
        self.version += 1
        if lease.slot != UNGUIDED:
            heapq.heappush(self._free, lease.slot)

    def _persists(self, lease: Lease) -> bool:
        kept = self.persist and lease.key.kind in ("group", "shared")
        return kept and lease.slot != UNGUIDED and lease not in self._forgotten
