"""One payload file being filled with rows of records."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tllm.stores.format import (
    FORMAT,
    ITEM_SIZES,
    POSITION_BYTES,
    POSITIONS,
    VERSION,
    as_bytes,
)
from tllm.stores.payload import PayloadFile, RowPlace
from tllm.stores.record import ArrayKey, CheckedStack, StackKind

Buffer = npt.NDArray[np.uint8]

_METADATA = {"format": "pt", FORMAT: str(VERSION)}

_LONGEST_NAME = 40
"""More bytes than the name of a tensor has: hook point, layer and number."""

_ROUND = 1 << 20
_MOST_SPARE = 128 << 20
"""Bytes that are kept for the next block."""

_NOWHERE = RowPlace((), ())


@dataclass(eq=False, slots=True)
class StackPiece:
    """Consecutive rows of a stack of one record in one payload, staged or written.

    The work for it is that of one array, however many there are.

    Attributes:
        kind: arrays, dtype and width.
        rows: of each array.
        positions: `[rows]` I32, their bytes.
        stacks: the rows, until they are written.
        place: where the first row of each array is.
        before: the written piece that these rows go on in the same tensors, and will be part of.
        crc32: by array, of the rows; once the file is sealed, of their positions too.
        position_start: in the file's positions.
        file: the payload, as the record's sidecar names it.
    """

    owner: Hashable
    kind: StackKind
    rows: int = 0
    positions: bytearray = field(default_factory=bytearray)
    stacks: list[CheckedStack] = field(default_factory=list)
    place: RowPlace = _NOWHERE
    before: StackPiece | None = None
    crc32: Sequence[int] = ()
    position_start: int = 0
    file: str = ""

    @property
    def total_rows(self) -> int:
        """Of all arrays together."""
        return self.rows * len(self.kind[0])

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions, of all arrays together."""
        _, dtype, hidden = self.kind
        return self.total_rows * (hidden * ITEM_SIZES[dtype] + POSITION_BYTES)

    def extend(self, stack: CheckedStack) -> None:
        """The record's next rows."""
        self.rows += stack.rows
        self.positions += stack.positions.data
        self.stacks.append(stack)

    def encode(self) -> str:
        """As canonical JSON: one object for each array, with commas between."""
        keys, dtype, hidden = self.kind
        fields: list[int | str] = []
        for crc32, start in zip(self.crc32, self.place.row_starts, strict=True):
            fields += crc32, self.file, self.position_start, start, self.rows
        return _template(keys, dtype, hidden, self.place.tensors) % tuple(fields)


@lru_cache(256)
def _template(keys: tuple[ArrayKey, ...], dtype: str, hidden: int, tensors: tuple[str, ...]) -> str:
    """The JSON of pieces without what differs from record to record. All texts in it are of this
    package's making: nothing to escape."""
    return ",".join(
        f'{{"crc32":%d,"dtype":"{dtype}","file":"%s","hidden":{hidden},"hook":"{key.hook}",'
        f'"layer":{"null" if key.layer is None else key.layer},"position_start":%d,'
        f'"row_start":%d,"rows":%d,"tensor":"{tensor}"}}'
        for key, tensor in zip(keys, tensors, strict=True)
    )


class Volume:
    """Collects rows, writes them in blocks, and says in the end where whose rows are.

    A *block* is what is staged between two writes. Within it, rows of the same arrays, dtype and
    width lie side by side, whoever's they are.

    Args:
        path: payload file to create.
        header_bytes, sync: see `PayloadFile`.
        tensor_name: of the only tensor; by default each is called by its hook point and layer.
        spare: memory of earlier blocks, also of volumes before: it is filled faster than new one.
    """

    def __init__(
        self,
        path: Path,
        header_bytes: int,
        sync: bool,
        tensor_name: str | None = None,
        spare: list[Buffer] | None = None,
    ) -> None:
        self.path = path
        self._file = PayloadFile(path, header_bytes, sync)
        self._tensor_name = tensor_name
        self._staged: dict[StackKind, list[StackPiece]] = {}
        self._written: dict[Hashable, dict[StackKind, list[StackPiece]]] = {}
        self._spare = [] if spare is None else spare
        self._memory: list[Buffer] = []
        self._broken: OSError | None = None
        self.staged_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows, staged or written."""
        return self._file.data_bytes + self.staged_bytes

    @property
    def begun(self) -> bool:
        return self._file.begun

    def has_room(self, stacks: Sequence[CheckedStack]) -> bool:
        """Whether the header has room for these rows on top of what is staged."""
        if not self._file.begun:
            return True
        # What is staged already needs no second tensor.
        kinds = {*self._staged, *(stack.kind for stack in stacks)}
        needed = sum(len(keys) for keys, _, _ in kinds)
        return self._file.has_room(needed, needed * _LONGEST_NAME)

    def stage(self, owner: Hashable, stack: CheckedStack) -> None:
        """Take rows into the next block; nothing is copied or written yet."""
        kind = stack.kind
        pieces = self._staged.setdefault(kind, [])
        if not pieces or pieces[-1].owner is not owner:
            pieces.append(StackPiece(owner, kind))
        pieces[-1].extend(stack)
        self.staged_bytes += stack.nbytes

    def staged_owners(self) -> list[Any]:
        return list(dict.fromkeys(p.owner for pieces in self._staged.values() for p in pieces))

    def unstage(self, owner: Hashable) -> int:
        """Take a record's staged rows out again; returns their bytes."""
        freed = 0
        for kind, pieces in list(self._staged.items()):
            freed += sum(piece.nbytes for piece in pieces if piece.owner is owner)
            self._staged[kind] = [piece for piece in pieces if piece.owner is not owner]
            if not self._staged[kind]:
                del self._staged[kind]
        self.staged_bytes -= freed
        return freed

    def write(self) -> int:
        """Write the staged block; returns its bytes.

        After an `OSError` nothing of the block is in the file, and it is still staged: `unstage`
        it, or try again. When undoing fails too, the file is lost: `seal` raises that error.
        """
        mark = self._file.mark()
        self._place()
        try:
            self._file.write()
        except OSError:
            try:
                self._file.rollback(mark)
            except OSError as error:
                self._broken = error
            raise
        self._commit()
        freed, self.staged_bytes = self.staged_bytes, 0
        return freed

    def seal(self) -> int:
        """Write what is left and finish the file; returns its size, 0 when there is no file.

        After an `OSError`, `discard`.
        """
        if self._broken is not None:
            raise self._broken
        self._place()
        self._commit()
        if not self._written:
            return 0
        self._add_positions()
        return self._file.finish(_METADATA)

    def pieces(self, owner: Hashable, file: str) -> list[StackPiece]:
        """A record's rows, once sealed; `file` is the payload as its sidecar names it."""
        found = list(chain.from_iterable(self._written.get(owner, {}).values()))
        for piece in found:
            piece.file = file
        return found

    def discard(self) -> None:
        self._file.discard()

    def _place(self) -> None:
        """Give staged pieces their places in the file, and note their checksums."""
        self._memory.clear()
        for kind, pieces in self._staged.items():
            keys, dtype, hidden = kind
            rows = sum(piece.rows for piece in pieces)
            names = [self._tensor_name or key.name for key in keys]
            buffers = self._buffers(kind, pieces, rows)
            tensors, starts = self._file.add(names, dtype, hidden, rows, buffers)
            row_bytes, row = hidden * ITEM_SIZES[dtype], 0
            for piece in pieces:
                piece.place = RowPlace(tensors, tuple([start + row for start in starts]))
                piece.before = self._before(piece)
                piece.crc32 = piece.before.crc32 if piece.before else (0,) * len(keys)
                if len(keys) == 1:
                    [crc32] = piece.crc32
                    for stack in piece.stacks:
                        crc32 = zlib.crc32(as_bytes(stack.tensor), crc32)
                    piece.crc32 = (crc32,)
                elif rows:
                    [data] = buffers
                    first, length, whole = row * row_bytes, piece.rows * row_bytes, rows * row_bytes
                    piece.crc32 = [
                        zlib.crc32(data[first + i * whole : first + i * whole + length], crc32)
                        for i, crc32 in enumerate(piece.crc32)
                    ]
                row += piece.rows

    def _buffers(
        self, kind: StackKind, pieces: Sequence[StackPiece], rows: int
    ) -> Sequence[memoryview]:
        """The bytes of `[arrays, rows, hidden]`: rows of an array side by side."""
        keys, dtype, hidden = kind
        stacks = [stack for piece in pieces for stack in piece.stacks]
        if len(keys) == 1 or not rows or (len(stacks) == 1 and rows == 1):
            return [as_bytes(stack.tensor) for stack in stacks]
        width = hidden * ITEM_SIZES[dtype]
        nbytes = len(keys) * rows * width
        memory = self._spare.pop() if self._spare else None
        if memory is None or len(memory) < nbytes:
            memory = np.empty(-(-nbytes // _ROUND) * _ROUND, np.uint8)
        self._memory.append(memory)
        side_by_side = memory[:nbytes].reshape(len(keys), rows, width)
        row = 0
        for stack in stacks:
            # numpy, since torch would begin threads of its own for each of ours.
            given = np.frombuffer(as_bytes(stack.tensor) or b"", np.uint8)
            given = given.reshape(stack.rows, len(keys), width)
            side_by_side[:, row : row + stack.rows] = given.transpose(1, 0, 2)
            row += stack.rows
        return [memory[:nbytes].data]

    def _before(self, piece: StackPiece) -> StackPiece | None:
        known = self._written.get(piece.owner, {}).get(piece.kind)
        if not known or known[-1].place.tensors != piece.place.tensors:
            return None
        ends = [start + known[-1].rows for start in known[-1].place.row_starts]
        return known[-1] if ends == list(piece.place.row_starts) else None

    def _commit(self) -> None:
        """Staged pieces are in the file: let go of their rows, and join them with those before."""
        for kind, pieces in self._staged.items():
            for piece in pieces:
                piece.stacks = []
                if known := piece.before:
                    known.rows += piece.rows
                    known.positions += piece.positions
                    known.crc32 = piece.crc32
                else:
                    self._written.setdefault(piece.owner, {}).setdefault(kind, []).append(piece)
        self._staged.clear()
        self._spare += [memory for memory in self._memory if len(memory) <= _MOST_SPARE]
        del self._spare[:-1]
        self._memory.clear()

    def _add_positions(self) -> None:
        """One tensor with the positions of all pieces; those of a record share equal ones."""
        buffers: list[memoryview] = []
        count = 0
        for kinds in self._written.values():
            starts: dict[bytes, int] = {}
            for piece in chain.from_iterable(kinds.values()):
                positions = bytes(piece.positions)
                if positions not in starts:
                    starts[positions] = count
                    buffers.append(memoryview(positions))
                    count += piece.rows
                piece.position_start = starts[positions]
                piece.crc32 = [zlib.crc32(positions, crc32) for crc32 in piece.crc32]
        self._file.add([POSITIONS], "I32", None, count, buffers)
