"""One payload file being filled with rows of records."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tllm.stores.dtype import as_bytes
from tllm.stores.payload import PayloadFile
from tllm.stores.record import ArrayKey, CheckedRows, CheckedStack, PositionArray, StackKind
from tllm.stores.recording import Recording
from tllm.stores.sidecar import FORMAT, VERSION, Entry, PieceEntry
from tllm.stores.stack import Buffer, StackBlock, StackEntry, StackPiece

POSITIONS = "positions"
_METADATA = {"format": "pt", FORMAT: str(VERSION)}

_LONGEST_NAME = 40
"""More bytes than the name of a tensor has: hook point, layer and number."""

_Group = tuple[ArrayKey, str, int]


@dataclass(eq=False, slots=True)
class Piece:
    """Rows of one array of one record, staged or written.

    Attributes:
        buffers: the rows' bytes, until they are written.
        positions: in the order of the rows.
        tensor, row_start: their place in the file.
        crc32: of the rows that are in the file; in the end, of their positions too.
    """

    recording: Recording
    key: ArrayKey
    dtype: str
    hidden: int
    rows: int
    buffers: list[memoryview]
    positions: list[PositionArray]
    tensor: str = ""
    row_start: int = 0
    crc32: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions that wait to be written."""
        return sum(map(len, self.buffers)) + sum(part.nbytes for part in self.positions)

    def is_continued_by(self, other: Piece) -> bool:
        """Whether the rows of `other` follow in the same tensor."""
        return other.tensor == self.tensor and other.row_start == self.row_start + self.rows


class Volume:
    """Collects rows, writes them in blocks, and says in the end where whose rows are.

    A *block* is what is staged between two writes. Within it, rows of the same hook point, layer,
    dtype and width lie side by side in one tensor, whoever's they are.

    Args:
        path: payload file to create.
        header_bytes, sync: see `PayloadFile`.
        tensor_name: the tensor's name for an array.
        spare: memory of earlier blocks, also of volumes before.
    """

    def __init__(
        self,
        path: Path,
        header_bytes: int,
        sync: bool,
        tensor_name: Callable[[ArrayKey], str] = lambda key: key.name,
        spare: list[Buffer] | None = None,
    ) -> None:
        self.path = path
        self._file = PayloadFile(path, header_bytes, sync)
        self._tensor_name = tensor_name
        self._staged: dict[_Group, list[Piece]] = {}
        self._staged_stacks: dict[StackKind, list[StackPiece]] = {}
        self._pieces: dict[Recording, dict[ArrayKey, list[Piece]]] = {}
        self._stacks: dict[Recording, list[StackPiece]] = {}
        self._spare = [] if spare is None else spare
        self._position_starts: dict[Piece, int] = {}
        self._broken: OSError | None = None
        self.staged_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows, staged or written."""
        return self._file.data_bytes + self.staged_bytes

    @property
    def begun(self) -> bool:
        """Whether blocks were written."""
        return self._file.begun

    def has_room(self, arrays: Sequence[CheckedRows | CheckedStack]) -> bool:
        """Whether the header has room for these arrays on top of what is staged."""
        if not self._file.begun:
            return True
        # What is staged already needs no second tensor.
        stacks = {*self._staged_stacks}
        singles = {*self._staged}
        for rows in arrays:
            if isinstance(rows, CheckedStack):
                stacks.add(rows.kind)
            else:
                singles.add(_group(rows))
        needed = len(singles) + sum(len(keys) for keys, _, _ in stacks)
        return self._file.has_room(needed, needed * _LONGEST_NAME)

    def stage(self, recording: Recording, rows: CheckedRows | CheckedStack) -> None:
        """Take rows into the next block; nothing is copied or written yet."""
        if isinstance(rows, CheckedStack):
            stacks = self._staged_stacks.setdefault(rows.kind, [])
            if stacks and stacks[-1].recording is recording:
                stacks[-1].extend(rows)
            else:
                stacks.append(StackPiece.of(recording, rows))
            self.staged_bytes += rows.nbytes
            return
        group = self._staged.setdefault(_group(rows), [])
        if not group or group[-1].recording is not recording:
            group.append(Piece(recording, rows.key, rows.dtype, rows.tensor.shape[1], 0, [], []))
        piece = group[-1]
        piece.rows += rows.rows
        piece.buffers.append(as_bytes(rows.tensor))
        piece.positions.append(rows.positions)
        self.staged_bytes += rows.nbytes

    def staged_recordings(self) -> list[Recording]:
        """Whose rows are staged."""
        staged: list[Sequence[Piece | StackPiece]] = [
            *self._staged.values(),
            *self._staged_stacks.values(),
        ]
        return list(dict.fromkeys(piece.recording for pieces in staged for piece in pieces))

    def unstage(self, recording: Recording) -> int:
        """Take a record's staged rows out again; returns their bytes."""
        freed = 0
        for group, pieces in list(self._staged.items()):
            freed += sum(piece.nbytes for piece in pieces if piece.recording is recording)
            self._staged[group] = [p for p in pieces if p.recording is not recording]
            if not self._staged[group]:
                del self._staged[group]
        for stacks, those in list(self._staged_stacks.items()):
            freed += sum(each.nbytes for each in those if each.recording is recording)
            self._staged_stacks[stacks] = [e for e in those if e.recording is not recording]
            if not self._staged_stacks[stacks]:
                del self._staged_stacks[stacks]
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
        self._settle()
        freed, self.staged_bytes = self.staged_bytes, 0
        return freed

    def seal(self) -> int:
        """Write what is left and finish the file; returns its size, 0 when there is no file.

        After an `OSError`, `discard`.
        """
        if self._broken is not None:
            raise self._broken
        self._place()
        self._settle()
        if not self._pieces and not self._stacks:
            return 0
        self._add_positions()
        return self._file.finish(_METADATA)

    def entries(self, recording: Recording, file: str) -> list[Entry]:
        """A record's pieces, once sealed; `file` is the payload as its sidecar names it."""
        found: list[Entry] = [StackEntry(each, file) for each in self._stacks.get(recording, ())]
        return found + [
            PieceEntry(
                *piece.key,
                dtype=piece.dtype,
                rows=piece.rows,
                hidden=piece.hidden,
                file=file,
                tensor=piece.tensor,
                row_start=piece.row_start,
                position_start=self._position_starts[piece],
                crc32=piece.crc32,
            )
            for piece in self._of(recording)
        ]

    def discard(self) -> None:
        """Remove the file."""
        self._file.discard()

    def _of(self, recording: Recording) -> Iterator[Piece]:
        for pieces in self._pieces.get(recording, {}).values():
            yield from pieces

    def _place(self) -> None:
        """Give staged pieces their place in the file."""
        for (key, dtype, hidden), pieces in self._staged.items():
            buffers = [buffer for piece in pieces for buffer in piece.buffers]
            rows = sum(piece.rows for piece in pieces)
            span = self._file.add(self._tensor_name(key), dtype, hidden, rows, buffers)
            row = span.row_start
            for piece in pieces:
                piece.tensor, piece.row_start = span.tensor, row
                row += piece.rows
        for (keys, _, _), stacks in self._staged_stacks.items():
            names = [self._tensor_name(key) for key in keys]
            StackBlock.place(self._file, names, stacks, self._spare)

    def _settle(self) -> None:
        """Staged pieces are in the file: add them up, and join them with those before them."""
        for pieces in self._staged.values():
            for piece in pieces:
                known = self._pieces.setdefault(piece.recording, {}).setdefault(piece.key, [])
                joined = bool(known) and known[-1].is_continued_by(piece)
                target = known[-1] if joined else piece
                for buffer in piece.buffers:
                    target.crc32 = zlib.crc32(buffer, target.crc32)
                piece.buffers = []
                if joined:
                    target.rows += piece.rows
                    target.positions += piece.positions
                else:
                    known.append(piece)
        self._staged.clear()
        for stacks in self._staged_stacks.values():
            block = stacks[0].block
            assert block is not None
            block.settle(stacks, self._spare)
            for each in stacks:
                self._stacks.setdefault(each.recording, []).append(each)
        self._staged_stacks.clear()

    def _add_positions(self) -> None:
        """One tensor with the positions of all pieces; those of a record share equal ones."""
        buffers: list[memoryview] = []
        count = 0
        for recording in self._pieces:
            starts: dict[bytes, int] = {}
            single: dict[int, bytes] = {}
            for piece in self._of(recording):
                first = id(piece.positions[0])
                if len(piece.positions) > 1:
                    data = b"".join(part.tobytes() for part in piece.positions)
                elif (data := single.get(first, b"")) == b"":
                    data = single[first] = piece.positions[0].tobytes()
                if data not in starts:
                    starts[data] = count
                    buffers.append(memoryview(data))
                    count += piece.rows
                self._position_starts[piece] = starts[data]
                piece.crc32 = zlib.crc32(data, piece.crc32)
        for stacks in self._stacks.values():
            for each in stacks:
                each.position_start = count
                buffers.append(memoryview(each.positions))
                count += each.rows
        self._file.add(POSITIONS, "I32", None, count, buffers)


def _group(rows: CheckedRows) -> _Group:
    return rows.key, rows.dtype, rows.tensor.shape[1]
