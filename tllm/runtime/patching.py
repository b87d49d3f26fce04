"""Patching in a worker: the rows that are kept to be put elsewhere, and the tables that the tap op
reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

_WORDS = int(Replacement.SIZE)


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
    first: int
    length: int
    entries: list[tuple[int, int]] = field(default_factory=list)
    """Points and patch rows at which something is done."""
    chains: list[tuple[int, int]] = field(default_factory=list)
    """`(first, number)` of the replacements of each."""
    alive: list[torch.Tensor] = field(default_factory=list)
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
        for point, row in patched.entries:
            self._patches.stage((point, row), np.full((), -1, np.int32))
        self._points.subtract(point for point, _ in patched.entries)
        for start, length in patched.chains:
            self._chains.release(start, length)
        self._rows.release(patched.first, patched.length)
        self.stale = True

    def _place(
        self, key: tuple[int, tuple[str, ...]], uses: Sequence[PatchUse], prompt_len: int
    ) -> PatchedRows:
        """Write what these patches do into the tables."""
        alive: list[torch.Tensor] = []
        at: dict[tuple[int, int], list[npt.NDArray[np.int32]]] = defaultdict(list)
        for use in uses:
            self._check_kept(use)
            tap = self._resolve(use.hook, use.layer)
            if tap in self._taps.index:  # else another pipeline stage has the layer
                words = self._words(use, tap, alive)
                for position, one in zip(use.at(prompt_len), words, strict=True):
                    at[position, self._taps.index[tap]].append(one)
        positions = sorted({position for position, _ in at})
        length = room(len(positions), 1)  # few lengths, so that places are found again
        first = self._rows.acquire(length)
        row_of = {position: first + i for i, position in enumerate(positions)}
        patched = PatchedRows(key, _stretches(row_of), first, length, alive=alive)
        for (position, point), words in at.items():
            start = self._chains.acquire(len(words))
            patched.chains.append((start, len(words)))
            words[0][Replacement.COUNT] = len(words)
            for i, one in enumerate(words):
                self._replacements.stage(start + i, one)
            place = point, row_of[position]
            patched.entries.append(place)
            self._patches.stage(place, np.array(start, np.int32))
        self._points.update(point for point, _ in patched.entries)
        self.stale = True
        return patched

    def _check_kept(self, use: PatchUse) -> None:
        if use.kept is not None and use.kept[0] not in self._kept:
            raise ValueError(
                f"patch at {use.hook!r} of layer {use.layer}: the rows that it names were dropped "
                "before the request began; keep them until it has ended"
            )

    def _words(
        self, use: PatchUse, tap: TapKey, alive: list[torch.Tensor]
    ) -> list[npt.NDArray[np.int32]]:
        """The replacement at each position of a patch."""
        sources = self._sources(use, tap, alive)
        mask = 0
        if use.mask is not None:
            chosen = torch.zeros(self._taps.hidden_size, dtype=torch.float32)
            chosen[list(use.mask)] = 1.0
            alive.append(upload(chosen.numpy(), self._taps.device).to(self._taps.dtype))
            mask = alive[-1].data_ptr()
        found = []
        for source in sources:
            words = np.zeros(_WORDS, np.int32)
            words[: Replacement.KEEP] = np.array([source, mask], np.int64).view(np.int32)
            factors = np.array([use.keep, use.scale], np.float32)
            words[Replacement.KEEP : Replacement.COUNT] = factors.view(np.int32)
            found.append(words)
        return found

    def _sources(self, use: PatchUse, tap: TapKey, alive: list[torch.Tensor]) -> list[int]:
        """The address of the source of each position; 0 for zeros."""
        hidden, count = self._taps.hidden_size, len(use.positions)
        if use.kept is not None:
            uid, rows = use.kept
            kept = self._kept[uid]
            place, places = kept.places[tap], len(kept.places)
            if kept.on_host:
                chosen = kept.rows[list(rows), place]
                alive.append(uploaded(chosen, self._taps.device))
                offsets = list(range(count))
            else:
                alive.append(kept.rows)
                offsets = [row * places + place for row in rows]
        elif use.rows is not None:
            given = np.frombuffer(use.rows, np.float32).reshape(-1, hidden).copy()
            alive.append(upload(given, self._taps.device).to(self._taps.dtype))
            offsets = list(range(count)) if len(given) > 1 else [0] * count
        else:
            return [0] * count
        base, row_bytes = alive[-1].data_ptr(), hidden * self._taps.dtype.itemsize
        return [base + offset * row_bytes for offset in offsets]

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


def _stretches(row_of: dict[int, int]) -> list[tuple[int, int]]:
    """Where patched positions begin and end: `(first position, patch row)`, or -1."""
    neutral = Column.PATCH.neutral
    starts = [] if 0 in row_of else [(0, neutral)]
    for position, row in row_of.items():
        if position - 1 not in row_of:
            starts.append((position, row))
        if position + 1 not in row_of:
            starts.append((position + 1, neutral))
    return starts
