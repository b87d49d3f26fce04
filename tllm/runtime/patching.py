"""Patching in a worker: the rows that are kept to be put elsewhere, and the tables that the tap op
reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column
from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.descriptor import Replacement
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.transfer import PinnedCopy, upload, uploaded
from tllm.spec.patching import PatchUse
from tllm.spec.selection import runs_of

_WORDS = int(Replacement.SIZE)
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Rows that are kept: `[positions, places, hidden]`; on the device, or in page-locked memory of
    the host."""

    places: dict[TapKey, int]
    rows: torch.Tensor
    on_host: bool


@dataclass(eq=False)
class PatchedRows:
    """Patch rows that sequences have which ask for the same.

    Attributes:
        starts: `(first position, patch row)` of each stretch of consecutive patched positions, and
            of those between them, with -1; ascending, the first begins at 0.
    """

    key: tuple[int, tuple[str, ...]]
    starts: list[tuple[int, int]]
    rows: tuple[int, int]
    """`(first, number)` of its patch rows."""
    replacements: tuple[int, int]
    """`(first, number)` of them, those of one place side by side."""
    places: npt.NDArray[np.int64]
    """`[places, 2]`, points and patch rows at which something is done."""
    alive: list[torch.Tensor]
    """What replacements read."""
    users: int = 0


class Patching:
    """What rows can be replaced with, and the patch rows that stand for it on the device.

    Rows that are kept stay until they are dropped, and then for as long as sequences use them. What
    changes here reaches the device in `commit`, before the forward pass that needs it.

    Args:
        resolve: from a hook point and layer to its key; raises `ValueError` for one that this
            engine has no tap for.
        max_bytes, max_host_bytes: the most that kept rows take on the device, and on the host.

    Attributes:
        stale: whether `commit` has anything to do.
    """

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        max_bytes: int,
        max_host_bytes: int,
    ) -> None:
        self._taps = taps
        self._resolve = resolve
        self._max_bytes = max_bytes
        self._max_host_bytes = max_host_bytes
        self._kept: dict[str, _Kept] = {}
        self._patched: dict[tuple[int, tuple[str, ...]], PatchedRows] = {}
        self._points: Counter[int] = Counter()
        self._rows, self._chains = ConsecutivePlaces(), ConsecutivePlaces()
        device = taps.device
        self._patches = StagedTable((taps.num_points, 0), 2, torch.int32, device, fill=-1)
        self._replacements = StagedTable((0, _WORDS), 1, torch.int32, device)
        self.stale = False
        self.users = 0

    # -- rows that are kept ------------------------------------------------------------------------

    def kept_bytes(self, *, on_host: bool = False) -> int:
        """What kept rows take on the device, or on the host."""
        return sum(kept.rows.nbytes for kept in self._kept.values() if kept.on_host == on_host)

    def free_bytes(self, *, on_host: bool = False) -> int:
        """How much more may be kept there."""
        most = self._max_host_bytes if on_host else self._max_bytes
        return most - self.kept_bytes(on_host=on_host)

    def keep(
        self,
        uid: str,
        places: Sequence[tuple[str, int | None]],
        rows: torch.Tensor,
        *,
        on_host: bool = False,
    ) -> None:
        """Keep rows for sequences to refer to.

        Args:
            places: hook point and layer of each; none where other pipeline stages have all of them,
                and here it need only be known whether they were dropped.
            rows: `[positions, places, hidden]` on the device, in the model's dtype.
            on_host: keep a copy on the host instead, of which sequences take what they need.

        Raises `ValueError` when there is no room.
        """
        free = self.free_bytes(on_host=on_host)
        if rows.nbytes > free:
            option = "max_patch_host_mib" if on_host else "max_patch_mib"
            most = self._max_host_bytes if on_host else self._max_bytes
            raise ValueError(
                f"these rows take {rows.nbytes / 2**20:.1f} MiB, and of {option}={most >> 20} "
                f"there are {free / 2**20:.1f} MiB left; drop what is not needed with "
                "llm.patching.drop(name), keep fewer hooks or layers, or start the engine with a "
                f"larger {option}"
            )
        keys = {self._resolve(hook, layer): i for i, (hook, layer) in enumerate(places)}
        self._kept[uid] = _Kept(keys, PinnedCopy(rows).wait() if on_host else rows, on_host)

    @property
    def device(self) -> torch.device:
        return self._taps.device

    @property
    def dtype(self) -> torch.dtype:
        return self._taps.dtype

    def has(self, hook: str, layer: int | None) -> bool:
        """Whether rows of this place can be patched in this worker."""
        return self._resolve(hook, layer) in self._taps.index

    def drop(self, uid: str) -> None:
        self._kept.pop(uid, None)

    # -- sequences ---------------------------------------------------------------------------------

    def acquire(self, uses: Sequence[PatchUse], prompt_len: int) -> PatchedRows:
        """Patch rows for what a sequence asks; to be given back with `release`.

        Raises `ValueError` for rows that are not kept any more, those of other pipeline stages too:
        a request ends only by what the last one says.
        """
        from_end = any(position < 0 for use in uses for position in use.positions)
        key = prompt_len if from_end else -1, tuple(use.digest for use in uses)
        patched = self._patched.get(key)
        if patched is None:
            patched = self._patched[key] = self._place(key, uses, prompt_len)
        patched.users += 1
        self.users += 1
        return patched

    def release(self, patched: PatchedRows) -> None:
        """A sequence does not need its patch rows any more."""
        self.users -= 1
        patched.users -= 1
        if patched.users:
            return
        del self._patched[patched.key]
        if len(patched.places):
            none = torch.full((len(patched.places),), -1, dtype=torch.int32)
            self._patches.stage_all(patched.places, none)
        self._points.subtract(patched.places[:, 0].tolist())
        self._chains.release(*patched.replacements)
        self._rows.release(*patched.rows)
        self.stale = True

    def _place(
        self, key: tuple[int, tuple[str, ...]], uses: Sequence[PatchUse], prompt_len: int
    ) -> PatchedRows:
        """Write what these patches do into the tables."""
        alive: list[torch.Tensor] = []
        words, at, points = [np.zeros((0, _WORDS), np.int32)], [_NONE], [_NONE]
        for use in uses:
            self._check_kept(use)
            tap = self._resolve(use.hook, use.layer)
            if tap in self._taps.index:  # else another pipeline stage has the layer
                words.append(self._words(use, tap, alive))
                at.append(np.array(use.at(prompt_len), np.int64))
                points.append(np.full(len(use.positions), self._taps.index[tap], np.int64))
        positions, row = np.unique(np.concatenate(at), return_inverse=True)
        point = np.concatenate(points)
        order = np.lexsort((point, row))  # those of one place stay in their order
        chained = np.concatenate(words)[order]
        # Few lengths, so that places are found again.
        rows, replacements = room(len(positions), 1), room(len(chained), 1)
        first, chain = self._rows.acquire(rows), self._chains.acquire(replacements)
        places = np.stack([point, first + row], axis=1)[order]
        begins = np.flatnonzero(np.diff(places, axis=0, prepend=-1).any(axis=1))
        chained[begins, Replacement.COUNT] = np.diff(begins, append=len(chained))
        places = places[begins]
        if len(places):
            self._replacements.stage_all(chain + np.arange(len(chained)), torch.from_numpy(chained))
            starts = torch.from_numpy((chain + begins).astype(np.int32))
            self._patches.stage_all(places, starts)
        self._points.update(places[:, 0].tolist())
        self.stale = True
        stretches = _stretches(positions, first)
        return PatchedRows(key, stretches, (first, rows), (chain, replacements), places, alive)

    def _check_kept(self, use: PatchUse) -> None:
        if use.kept is not None and use.kept[0] not in self._kept:
            raise ValueError(
                f"patch at {use.hook!r} of layer {use.layer}: the rows that it names were dropped "
                "before the request began; keep them until it has ended"
            )

    def _words(
        self, use: PatchUse, tap: TapKey, alive: list[torch.Tensor]
    ) -> npt.NDArray[np.int32]:
        """`[positions, words]`, the replacement at each position of a patch."""
        sources = self._sources(use, tap, alive)
        mask = 0
        if use.mask is not None:
            chosen = torch.zeros(self._taps.hidden_size, dtype=torch.float32)
            chosen[list(use.mask)] = 1.0
            alive.append(upload(chosen.numpy(), self._taps.device).to(self._taps.dtype))
            mask = alive[-1].data_ptr()
        words = np.zeros((len(sources), _WORDS), np.int32)
        addresses = np.stack([sources, np.full_like(sources, mask)], axis=1)
        words[:, : Replacement.KEEP] = addresses.view(np.int32)
        factors = np.array([use.keep, use.scale], np.float32)
        words[:, Replacement.KEEP : Replacement.COUNT] = factors.view(np.int32)
        return words

    def _sources(
        self, use: PatchUse, tap: TapKey, alive: list[torch.Tensor]
    ) -> npt.NDArray[np.int64]:
        """The address of the source of each position; 0 for zeros."""
        hidden, count = self._taps.hidden_size, len(use.positions)
        offsets = np.arange(count)
        if use.kept is not None:
            uid, rows = use.kept
            kept = self._kept[uid]
            place, places = kept.places[tap], len(kept.places)
            if kept.on_host:
                chosen = kept.rows[list(rows), place]
                alive.append(uploaded(chosen, self._taps.device))
            else:
                alive.append(kept.rows)
                offsets = np.array(rows, np.int64) * places + place
        elif use.rows is not None:
            given = np.frombuffer(use.rows, np.float32).reshape(-1, hidden).copy()
            alive.append(upload(given, self._taps.device).to(self._taps.dtype))
            if len(given) == 1:
                offsets = np.zeros_like(offsets)
        else:
            return np.zeros_like(offsets)
        return alive[-1].data_ptr() + offsets * (hidden * self._taps.dtype.itemsize)

    # -- the device --------------------------------------------------------------------------------

    def commit(self) -> None:
        """Bring what changed to the device. On the compute stream, before a forward pass."""
        if not self.stale:
            return
        moved = [
            self._patches.grow((self._taps.num_points, room(self._rows.end, 64))),
            self._replacements.grow((room(self._chains.end, 64), _WORDS)),
        ]
        if any(moved):
            self._taps.place_patches(self._patches.tensor, self._replacements.tensor)
        self._patches.commit()
        self._replacements.commit()
        used = np.array([point for point, users in self._points.items() if users], np.int64)
        self._taps.set_used(Column.PATCH, used)
        self._taps.note_write()
        self.stale = False


def _stretches(positions: npt.NDArray[np.int64], first: int) -> list[tuple[int, int]]:
    """Where patched positions begin and end, ascending: `(first position, patch row)`, or -1. The
    rows follow each other as the positions do."""
    runs = runs_of(positions)
    rows = first + np.searchsorted(positions, [start for start, _ in runs])
    ends = dict.fromkeys([0, *(stop for _, stop in runs)], Column.PATCH.neutral)
    begins = {start: row for (start, _), row in zip(runs, rows.tolist(), strict=True)}
    return sorted((ends | begins).items())
