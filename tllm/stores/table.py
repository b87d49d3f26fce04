"""Records, put together from the lines of sidecars."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tllm.stores.catalog import Catalog

IntArray = npt.NDArray[np.int64]

STATUSES = ("ok", "partial_error", "pending")
"""What a record that can be read may be; `pending`: its end was not published (yet)."""

_HIDDEN = -1


class RecordTable:
    """One row a record; its parts, and those of its pipeline stages, are joined.

    Records are in the order of their first lines. Those that were aborted, or that another record
    replaced, are there with the status code -1.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        lines = catalog.lines
        ids = lines["record_id"].combine_chunks().dictionary_encode()
        # The codes are in the order of first appearance.
        group: IntArray = ids.indices.to_numpy().astype(np.int64)
        self._stage: IntArray = lines["stage"].to_numpy().astype(np.int64)
        self._part: IntArray = lines["part"].to_numpy().astype(np.int64)
        self._last = lines["last"].to_numpy()
        self._num_stages: IntArray = lines["num_stages"].to_numpy().astype(np.int64)
        order = np.lexsort((self._part, self._stage, group))
        starts = np.searchsorted(group[order], np.arange(len(ids.dictionary) + 1))
        self.size = len(ids.dictionary)
        self.status: npt.NDArray[np.int8] = np.full(self.size, _HIDDEN, np.int8)
        self.errors: dict[int, str] = {}
        self.doubles: list[int] = []
        """Lines of parts that are there already: they are not used."""
        head = order[starts[:-1]] if self.size else np.zeros(0, np.int64)
        codes = self._line_codes()
        alone = (np.diff(starts) == 1) & (self._num_stages[head] == 1) & (self._part[head] == 0)
        alone &= self._last[head] if self.size else False
        self.status[alone] = codes[head[alone]]
        for record in np.flatnonzero(~alone):
            head[record] = self._join(
                int(record), order[starts[record] : starts[record + 1]], codes
            )
        self.head: IntArray = head
        """`[records]`, the line that describes each: the last of the first stage there is."""
        self._hide_replaced()
        used = np.ones(len(lines), bool)
        used[self.doubles] = False
        line = catalog.piece_lines
        kept = np.flatnonzero(used[line])
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        by_record = kept[np.argsort(rank[line[kept]], kind="stable")]
        self.pieces: pa.Table = catalog.pieces.take(pa.array(by_record))
        """`PIECE_SCHEMA`, in the order of records, stages and parts."""
        self.piece_records: IntArray = group[line[by_record]]
        """`[pieces]`, the record of each, ascending."""
        self.piece_starts: IntArray = np.searchsorted(self.piece_records, np.arange(self.size + 1))
        """`[records + 1]`, the first piece of each."""

    @cached_property
    def heads(self) -> pa.Table:
        """One row a record: `LINE_SCHEMA` of the line that describes it."""
        return self.catalog.lines.take(pa.array(self.head))

    @cached_property
    def piece_keys(self) -> tuple[list[tuple[str, int | None]], IntArray]:
        """The arrays that occur, as `(hook, layer)`, and `[pieces]`, which one each belongs to."""
        hooks = self.pieces["hook"].combine_chunks().dictionary_encode()
        names = hooks.dictionary.to_pylist()
        layers: IntArray = self.pieces["layer"].fill_null(-1).to_numpy().astype(np.int64)
        if not len(layers):
            return [], layers
        wide = int(layers.max()) + 2
        numbers, codes = np.unique(
            hooks.indices.to_numpy() * wide + layers + 1, return_inverse=True
        )
        keys = [(names[n // wide], None if n % wide == 0 else int(n % wide) - 1) for n in numbers]
        return keys, codes.astype(np.int64)

    def column(self, name: str) -> list[Any]:
        """A column of `heads` as a list."""
        return self.heads[name].to_pylist()

    def _line_codes(self) -> npt.NDArray[np.int8]:
        encoded = self.catalog.lines["status"].combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        known = np.array([STATUSES.index(n) if n in STATUSES else _HIDDEN for n in names], np.int8)
        return known[encoded.indices.to_numpy()] if len(names) else np.zeros(0, np.int8)

    def _join(self, record: int, lines: IntArray, codes: npt.NDArray[np.int8]) -> int:
        """Work out a record of several lines; returns the line that describes it."""
        parts: dict[tuple[int, int], int] = {}
        for line in lines.tolist():
            place = int(self._stage[line]), int(self._part[line])
            if place in parts:
                self.doubles.append(line)
            parts.setdefault(place, line)
        errors = self.catalog.lines["error"].take(pa.array(list(parts.values()))).to_pylist()
        texts = list(dict.fromkeys(error for error in errors if error))
        ends = {stage: part for (stage, part), line in parts.items() if self._last[line]}
        missing = [
            f"part {part} of stage {stage}"
            for stage, end in ends.items()
            for part in range(end)
            if (stage, part) not in parts
        ]
        if missing:
            texts.append(f"{', '.join(missing)} is missing on disk")
        num_stages = int(self._num_stages[lines].max())
        partial = STATUSES.index("partial_error")
        if any(codes[line] == _HIDDEN for line in parts.values()):
            self.status[record] = _HIDDEN
        elif any(stage not in ends for stage in range(num_stages)):
            self.status[record] = STATUSES.index("pending")
        elif texts or any(codes[parts[place]] == partial for place in ends.items()):
            self.status[record] = partial
        else:
            self.status[record] = STATUSES.index("ok")
        self.errors[record] = "; ".join(texts)
        first = min(stage for stage, _ in parts)
        return parts[first, ends[first]] if first in ends else int(lines[0])

    def _hide_replaced(self) -> None:
        """A record hides those of lower generations once it is whole."""
        generations = self.heads["generation"].to_numpy()
        finished = (self.status >= 0) & (self.status != STATUSES.index("pending"))
        replaces = self.heads["replaces"].to_numpy() & finished & (generations > 1)
        if not replaces.any():
            return
        names = [self.column(name) for name in ("tag", "request_id", "sample_index")]
        identities = list(zip(*names, strict=True))
        newest: dict[tuple[Any, ...], int] = {}
        for record in np.flatnonzero(replaces).tolist():
            identity = identities[record]
            newest[identity] = max(newest.get(identity, 0), int(generations[record]))
        for record, identity in enumerate(identities):
            if generations[record] < newest.get(identity, 0):
                self.status[record] = _HIDDEN
