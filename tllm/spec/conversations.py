"""Conversations: whose a request says it is, and what requests remember for those after them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from tllm.spec.reading import check_text, scalar

EXPIRES_S = 3600.0
"""How long a conversation is remembered after the latest request that named it, unless told."""
LONGEST_S = 365 * 86400.0

_FIELD = "conversation"
_LONGEST_TEXT = 1024
_SHORTEST_KEY = 16
COUNTED = frozenset(("owner", "most"))
"""What programs give that count the conversations of those who ask them."""
_KEYS = COUNTED | {"id", "key", "expires_s"}


@dataclass(frozen=True)
class RequestConversation:
    """The conversation that a request names.

    Attributes:
        id: its name, which others may know.
        key_digest: of the secret that it belongs to.
        expires_s: how long it is remembered after this request was added.
        owner: whose it is, among those that it is counted with; "" for nobody's.
        most: how many its owner may have at a time; None for as many as there is room for.
    """

    id: str
    key_digest: bytes
    expires_s: float = EXPIRES_S
    owner: str = ""
    most: int | None = None

    @classmethod
    def parse(cls, given: Any) -> RequestConversation:
        """From what users write; `ValueError` naming the field that is wrong. The key is not in any
        message."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{_FIELD} is {type(given).__name__}; give a mapping with 'id' and 'key', such as "
                "{'id': 'chat-7', 'key': secrets.token_hex(16)}"
            )
        if unknown := sorted(map(str, set(given) - _KEYS)):
            raise ValueError(
                f"{_FIELD} has unknown keys {unknown}; it takes 'id', 'key' and 'expires_s', and "
                "of programs that count what others begin 'owner' and 'most'"
            )
        name, key = given.get("id"), given.get("key")
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_TEXT:
            raise ValueError(
                f"{_FIELD}['id']={name!r:.60} is no name; give a text of 1 to {_LONGEST_TEXT} "
                "characters"
            )
        name = check_text(name, f"{_FIELD}['id']")
        if not isinstance(key, str) or not _SHORTEST_KEY <= len(key) <= _LONGEST_TEXT:
            raise ValueError(
                f"{_FIELD}['key'] must be a secret text of {_SHORTEST_KEY} to {_LONGEST_TEXT} "
                "characters, such as secrets.token_hex(16): who knows it takes part"
            )
        expires_s = EXPIRES_S
        if given.get("expires_s") is not None:
            expires_s = _seconds(given["expires_s"])
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        return cls(name, digest, expires_s, *_counted(given))


def _seconds(given: Any) -> float:
    """How long a conversation is remembered."""
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if is_number and not 0 < given <= LONGEST_S:
        raise ValueError(  # also of what is infinite, or no number
            f"{_FIELD}['expires_s']={given!s:.20} must be above 0 and at most "
            f"{LONGEST_S:.0f}, in seconds"
        )
    return scalar(given, f"{_FIELD}['expires_s']")


def _counted(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """Whose a conversation is, and how many he may have."""
    owner, most = given.get("owner"), given.get("most")
    if owner is None and most is None:
        return "", None
    if not isinstance(owner, str) or not 0 < len(owner) <= _LONGEST_TEXT:
        raise ValueError(
            f"{_FIELD}['owner']={owner!r:.60} is no name; give a text of 1 to {_LONGEST_TEXT} "
            "characters, whose conversations are counted together"
        )
    if type(most) is not int or most < 0:
        raise ValueError(
            f"{_FIELD}['most']={most!r:.60}; give the number of conversations that the owner may "
            "have at a time"
        )
    return owner, most


class ConversationUse(NamedTuple):
    """A conversation in a request that is under way.

    Attributes:
        place, serial: which of the engine's it is: places are used again, by ones of other serials.
        conditions: the number of each condition that it remembers, and what it is known by in
            other requests.
        in_prompt, generated: numbers of those that are judged for tokens of the prompt, and for
            generated ones.
        held: numbers of those that held in an earlier request.
    """

    place: int
    serial: int
    conditions: tuple[tuple[int, str], ...]
    in_prompt: tuple[int, ...]
    generated: tuple[int, ...]
    held: tuple[int, ...] = ()

    def recalling(self, known: Iterable[str]) -> ConversationUse:
        """The same where these conditions have held."""
        known = frozenset(known)
        return self._replace(
            held=tuple(n for n, condition in self.conditions if condition in known)
        )

    def to_wire(self) -> list[Any]:
        """As plain data."""
        named = [list(each) for each in self.conditions]
        numbers = map(list, (self.in_prompt, self.generated, self.held))
        return [self.place, self.serial, named, *numbers]

    @classmethod
    def from_wire(cls, wire: Iterable[Any]) -> ConversationUse:
        place, serial, conditions, *numbers = wire
        named = tuple((number, condition) for number, condition in conditions)
        return cls(place, serial, named, *map(tuple, numbers))
