"""A record whose rows come in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch

from tllm.spec.hooks import HookPoint
from tllm.stores.error import StoreError
from tllm.stores.record import (
    ArrayKey,
    CheckedStack,
    RecordMeta,
    RecordStatus,
    StackedRows,
    checked_positions,
    keys_of,
)
from tllm.stores.recording import Published, QueuedRows, Recording

_ArrayEnd = tuple[str | None, int, int]
"""Of an array's rows so far: dtype, width and last position."""
_NEW: _ArrayEnd = None, 0, -1


class RecordStream:
    """Takes a record's rows as they come. Made by `StoreWriter.begin`.

    What happens to the record on the way (a full disk, a full queue, a limit) raises nothing here:
    it is in what `future` gives. Calls of one array's rows must come in the order of positions;
    several threads may call.
    """

    def __init__(
        self,
        meta: RecordMeta,
        future: Future[Published],
        recording: Recording | None,
        put: Callable[[QueuedRows], StoreError | None],
    ) -> None:
        self.meta = meta
        self.future = future
        self._recording = recording
        self._put = put
        self._ended = False
        self._stacked: bool | None = None
        self._arrays: dict[ArrayKey, _ArrayEnd] = {}
        self._lost: dict[str, StoreError] = {}
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    @property
    def active(self) -> bool:
        """Whether rows still go anywhere: False once it ended, and when it was refused or skipped
        from the start."""
        return self._recording is not None and not self._ended

    def append(
        self,
        hook: str | HookPoint,
        layer: int | None,
        positions: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        tensor: torch.Tensor,
    ) -> None:
        """Add rows of one array.

        Args:
            hook, layer: which array; the layer of `lm_head_in` is None.
            positions: `[rows]`, above all that this array was given before.
            tensor: `[rows, hidden]` on the CPU, of the array's dtype; it is not copied and must not
                change before `future` is done or `StoreWriter.flush` came back.

        Raises:
            ValueError: the rows are not fit to be stored, or do not go with those before.
            StoreError: the record has ended.
        """
        with self._lock:
            self._require(stacked=False)
            key = ArrayKey.of(hook, layer)
            checked = checked_positions(key.name, positions, self._arrays.get(key, _NEW)[2])
            self._give(CheckedStack.single(key, tensor, checked))

    def append_stack(self, rows: StackedRows) -> None:
        """`append` for several arrays whose rows have the same positions; raises as it does. A
        record takes either."""
        with self._lock:
            self._require(stacked=True)
            ends = [self._arrays.get(key, _NEW)[2] for key in keys_of(rows)]
            self._give(CheckedStack.of(rows, max(ends, default=-1)))

    def finish(
        self,
        status: RecordStatus = "ok",
        error: str = "",
        *,
        prompt_len: int | None = None,
        token_ids: Sequence[int] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Future[Published]:
        """Nothing more will come; returns `future`.

        Args:
            status, error: see `RecordMeta`.
            prompt_len, token_ids, metadata: instead of those given at the beginning.

        Raises:
            ValueError: status, error or metadata are malformed; the record is still open.
            StoreError: the record has ended.
        """
        given = {"prompt_len": prompt_len, "token_ids": token_ids, "metadata": metadata}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        with self._lock:
            self._require()
            self._end(end=replace(self.meta, status=status, error=error, **changes))
            return self.future

    def abort(self) -> None:
        """Give the record up: nothing of it is kept. `future` raises `StoreError` (`aborted`)."""
        with self._lock:
            self._require()
            self._end(abort=True)

    def _end(self, end: RecordMeta | None = None, abort: bool = False) -> None:
        self._ended = True
        if self._recording is not None:
            # Ends are never refused: they have no rows.
            self._put(QueuedRows(self._recording, end=end, abort=abort, lost=self._pop_lost()))

    def _give(self, stack: CheckedStack) -> None:
        """Queue rows. When they find no place, that is said with what comes next; the first of them
        stand for all that follow for the same reason.

        Raises `ValueError` when they do not go with those before.
        """
        _, dtype, hidden = stack.kind
        ends = [self._arrays.get(key, _NEW) for key in stack.keys]
        for known, width, _ in ends:
            if known is not None and (known, width) != (dtype, hidden):
                raise ValueError(
                    f"{stack.what} were given after {known} rows of {width}; an array has one "
                    "dtype and one width"
                )
        for key, (*_, after) in zip(stack.keys, ends, strict=True):
            self._arrays[key] = dtype, hidden, int(stack.positions[-1]) if stack.rows else after
        if self._recording is None:
            return
        lost = self._pop_lost()
        try:
            error = self._put(QueuedRows(self._recording, [stack], lost=lost))
        except BaseException:  # who waits for room may be interrupted, and the record goes on
            what = f"rows of {stack.keys[0].name} were given up while they waited for room"
            self._lost = {**lost, what: StoreError(f"{self._recording.what}: {what}", "aborted")}
            raise
        if error is not None:
            self._lost = lost
            others = f" and {len(stack.keys) - 1} more" if len(stack.keys) > 1 else ""
            what = stack.keys[0].name + others
            if (what, error.reason) not in self._told:
                self._told.add((what, error.reason))
                lost[f"rows of {what} were not kept: {error.reason} ({error})"] = error

    def _pop_lost(self) -> dict[str, StoreError]:
        lost, self._lost = self._lost, {}
        return lost

    def _require(self, stacked: bool | None = None) -> None:
        """That the record goes on, and takes rows in this form."""
        if self._ended:
            raise StoreError(
                f"record {self.meta.request_id!r} has ended; begin another one", "closed"
            )
        if stacked is None:
            return
        if self._stacked not in (None, stacked):
            raise ValueError(
                f"record {self.meta.request_id!r} was given rows by "
                f"{'append_stack' if self._stacked else 'append'} before; go on with that"
            )
        self._stacked = stacked
