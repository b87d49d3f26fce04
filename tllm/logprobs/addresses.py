"""Where the results of requests go that are asked again and again."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tllm.consumers.next_token import ADDRESS_WIDTH
from tllm.logprobs.arena import Arena
from tllm.logprobs.query import Form
from tllm.shared_memory import SharedRows

_ENTRIES = 512
"""Addresses of a table."""


class Address:
    """An entry of a table, where a worker finds the ticket and the place of the next result of one
    request.

    Attributes:
        arena: that the places are of.
        told: what the engine was told of it: the form of the results and the number of files; None
            for nothing.
    """

    __slots__ = ("_all", "_entries", "_entry", "_serial", "_table", "arena", "told")

    def __init__(
        self, of: Addresses, arena: Arena, table: SharedRows, entry: int, serial: int
    ) -> None:
        self.arena = arena
        self.told: tuple[Form, int] | None = None
        self._all = of
        self._table, self._entry, self._serial = table, entry, serial
        self._entries = table.values.view(np.int64)
        self._entries[entry] = 0, 0, serial, 0

    def say(self, ticket: int, place: int) -> None:
        """Where the next result goes."""
        entry = self._entries[self._entry]
        entry[0], entry[1] = ticket, place

    def options(self, form: Form) -> dict[str, Any] | None:
        """As `NextTokenConsumer` takes them; None when the engine has them."""
        arena = self.arena
        if self.told == (form, len(arena.paths)):
            return None
        self.told = form, len(arena.paths)
        table = str(self._table.path)
        address = [table, self._entry, self._serial, arena.width, list(arena.paths)]
        return {"address": address, **form.options()}

    def heard(self) -> None:
        """The worker has the table: nothing is left behind, however this process ends."""
        self._table.unlink()

    def give_back(self) -> None:
        """Nothing more is said here. A worker that is late finds another serial."""
        self._entries[self._entry, 2] = 0
        self._all.free.append((self._table, self._entry))


class Addresses:
    """Tables of the addresses of requests.

    Attributes:
        free: tables and entries that nobody uses.
    """

    def __init__(self) -> None:
        self.free: list[tuple[SharedRows, int]] = []
        self._serials = itertools.count(1)
        self._tables: list[SharedRows] = []

    def take(self, arena: Arena) -> Address:
        """A new one. Raises `OSError` when there is no room for a table."""
        if not self.free:
            table = SharedRows.create(_ENTRIES, ADDRESS_WIDTH)
            self._tables.append(table)
            self.free = [(table, entry) for entry in reversed(range(_ENTRIES))]
        return Address(self, arena, *self.free.pop(), next(self._serials))

    def close(self) -> None:
        for table in self._tables:
            table.unlink()
