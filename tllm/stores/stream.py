"""A record that is written while it is captured."""

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
from tllm.stores.publisher import Item
from tllm.stores.record import (
    ArrayKey,
    CheckedRows,
    RecordMeta,
    RecordStatus,
    Rows,
    checked_positions,
)
from tllm.stores.recording import Published, Recording


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
        put: Callable[[Item], StoreError | None],
    ) -> None:
        self.meta = meta
        self.future = future
        self._recording = recording
        self._put = put
        self._ended = False
        self._arrays: dict[ArrayKey, tuple[str, int, int]] = {}
        self._lost: dict[str, StoreError] = {}
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
            self._require_open()
            key = ArrayKey.of(hook, layer)
            dtype, hidden, after = self._arrays.get(key, (None, None, -1))
            checked = checked_positions(key.name, positions, after)
            rows = CheckedRows.of(key, Rows(tensor, positions), checked)
            if dtype is not None and (dtype, hidden) != (rows.dtype, rows.tensor.shape[1]):
                raise ValueError(
                    f"{key.name}: {rows.dtype} rows of {rows.tensor.shape[1]} were given after "
                    f"{dtype} rows of {hidden}; an array has one dtype and one width"
                )
            if rows.rows:
                after = int(rows.positions[-1])
            self._arrays[key] = rows.dtype, rows.tensor.shape[1], after
            if self._recording is None:
                return
            error = self._put(Item(self._recording, [rows], lost=self._take_lost()))
            if error is not None:
                self._lost[f"rows of {key.name} were not kept: {error.reason}"] = error

    def finish(
        self,
        status: RecordStatus = "ok",
        error: str = "",
        *,
        token_ids: Sequence[int] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Future[Published]:
        """Nothing more will come; returns `future`.

        Args:
            status, error: see `RecordMeta`.
            token_ids, metadata: instead of those given at the beginning.

        Raises:
            ValueError: status, error or metadata are malformed; the record is still open.
            StoreError: the record has ended.
        """
        with self._lock:
            self._require_open()
            changes: dict[str, Any] = {"status": status, "error": error}
            if token_ids is not None:
                changes["token_ids"] = token_ids
            if metadata is not None:
                changes["metadata"] = metadata
            self._end(end=replace(self.meta, **changes))
            return self.future

    def abort(self) -> None:
        """Give the record up: nothing of it is kept. `future` raises `StoreError` (`aborted`)."""
        with self._lock:
            self._require_open()
            self._end(abort=True)

    def _end(self, end: RecordMeta | None = None, abort: bool = False) -> None:
        self._ended = True
        if self._recording is not None:
            # Ends are never refused: they have no rows.
            self._put(Item(self._recording, end=end, abort=abort, lost=self._take_lost()))

    def _take_lost(self) -> dict[str, StoreError]:
        lost, self._lost = self._lost, {}
        return lost

    def _require_open(self) -> None:
        if self._ended:
            raise StoreError(
                f"record {self.meta.request_id!r} has ended; begin another one", "closed"
            )
