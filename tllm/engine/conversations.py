"""The conversations that requests have named: whose they are, and when they are forgotten."""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_CONDITIONS = 256
"""The most different conditions of which requests of one conversation may ask that it remembers."""


class ConversationPlace(NamedTuple):
    """Where the engine remembers a conversation.

    Attributes:
        place: a number below the most that there may be.
        serial: of the conversation; another one that has the place later has a larger one.
    """

    place: int
    serial: int


@dataclass(eq=False)
class _Conversation:
    where: ConversationPlace
    key_digest: bytes
    begun: float
    expires: float
    owner: str = ""
    requests: int = 0
    conditions: set[str] = field(default_factory=set)

    def name(self, now: float, expires_s: float) -> ConversationPlace:
        """A request names it: where it is."""
        self.expires = now + expires_s
        self.requests += 1
        return self.where


class Conversations:
    """Who may name which conversation; what it remembers, the scheduler knows.

    Every worker of an engine hears the same calls, with the caller's time, and so has the same.

    Args:
        limit: the most that there may be at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[str, _Conversation] = {}
        self._free = list(range(limit - 1, -1, -1))
        self._serial = 0

    def enter(
        self,
        name: str,
        key_digest: bytes,
        expires_s: float,
        now: float,
        owner: str = "",
        most: int | None = None,
        conditions: Collection[str] = (),
    ) -> ConversationPlace:
        """A request names a conversation: where it is. One that is not there begins.

        Args:
            key_digest: of its secret.
            expires_s: it is forgotten so long after `now`, unless it is named again.
            now: in seconds since the epoch.
            owner: of one that begins.
            most: how many the owner may have; None for as many as there is room for.
            conditions: of the request, as the conversation knows them.

        Raises `ValueError` for the wrong key, and where there is no room.
        """
        known = self._by_id.get(name)
        if known is not None and known.expires <= now:
            self._remove(name)
            known = None
        if known is None:
            self._check_owner(name, owner, most, now)
            known = self._begin(name, key_digest, now, owner)
        if not hmac.compare_digest(known.key_digest, key_digest):
            raise ValueError(
                f"conversation: {name!r:.80} was begun with another key; give its key (over HTTP "
                "with the same API key), or another id"
            )
        count = len(known.conditions.union(conditions))
        if count > MOST_CONDITIONS:
            raise ValueError(
                f"conversation: {name!r:.80} would have {count} conditions that differ, and "
                f"remembers at most {MOST_CONDITIONS}; give those again that it has, or another id"
            )
        known.conditions.update(conditions)
        return known.name(now, expires_s)

    def _check_owner(self, name: str, owner: str, most: int | None, now: float) -> None:
        if most is None:
            return
        known = self._by_id.values()
        if sum(each.owner == owner and each.expires > now for each in known) >= most:
            raise ValueError(
                f"conversation: {name!r:.80} would be one more than the {most} that its owner "
                "(over HTTP an API key) may have at a time; name one of them, wait until one "
                "expires, give shorter 'expires_s', or have one forgotten"
            )

    def _begin(self, name: str, key_digest: bytes, now: float, owner: str) -> _Conversation:
        if not self._free:
            for old in [o for o, each in self._by_id.items() if each.expires <= now]:
                self._remove(old)
        if not self._free:
            raise ValueError(
                f"conversation: {name!r:.80} would be one more than max_conversations="
                f"{self._limit}; wait until one expires, have one forgotten "
                "(llm.steering.forget_conversation), or start the engine with more"
            )
        self._serial += 1
        where = ConversationPlace(self._free.pop(), self._serial)
        begun = self._by_id[name] = _Conversation(where, key_digest, now, now, owner)
        return begun

    def _remove(self, name: str) -> None:
        self._free.append(self._by_id.pop(name).where.place)

    def leave(self, place: int, serial: int) -> None:
        """A request that named a conversation did not begin; if no other has named it, it did not
        begin either."""
        for name, known in self._by_id.items():
            if known.where == (place, serial):
                known.requests -= 1
                if not known.requests:
                    self._remove(name)
                return

    def forget(self, name: str, now: float) -> bool:
        """Forget a conversation; whether it was there."""
        known = self._by_id.get(name)
        if known is None:
            return False
        self._remove(name)
        return known.expires > now

    def described(self, now: float) -> dict[str, dict[str, Any]]:
        """For people: by id, when it began and will be forgotten, and its requests so far."""
        return {
            name: {
                "begun": each.begun,
                "expires_in_s": each.expires - now,
                "requests": each.requests,
            }
            for name, each in self._by_id.items()
            if each.expires > now
        }

    @property
    def count(self) -> int:
        now = time.time()
        return sum(each.expires > now for each in self._by_id.values())
