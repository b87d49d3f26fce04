"""Rows of several arrays of a record that have the same positions: handled as one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tllm.stores.dtype import ITEM_SIZES, as_bytes
from tllm.stores.payload import PayloadFile
from tllm.stores.record import ArrayKey, CheckedStack
from tllm.stores.recording import Recording
from tllm.stores.sidecar import POSITION_BYTES

Buffer = npt.NDArray[np.uint8]

_ROUND = 1 << 20
_MOST_SPARE = 128 << 20
"""Bytes that are kept for the next block."""


@dataclass(eq=False, slots=True)
class StackPiece:
    """A stack of one record, staged or written. The work for it is that of one array.

    Attributes:
        stacks: the rows, until they are written.
        block: what the stacks of one write have in common, once it is known.
        row: first row in the block's tensors.
        crc32: by array, of the rows and their positions, once they are in the file.
        position_start: in the file's positions.
    """

    recording: Recording
    keys: tuple[ArrayKey, ...]
    rows: int
    positions: bytes
    nbytes: int
    stacks: list[CheckedStack]
    block: StackBlock | None = None
    row: int = 0
    crc32: Sequence[int] = ()
    position_start: int = 0

    @classmethod
    def of(cls, recording: Recording, stack: CheckedStack) -> StackPiece:
        """A record's stack, not yet written."""
        positions = stack.positions.tobytes()
        return cls(recording, stack.keys, stack.rows, positions, stack.nbytes, [stack])

    def extend(self, stack: CheckedStack) -> None:
        """The record's next rows, of the same arrays."""
        self.rows += stack.rows
        self.positions += stack.positions.tobytes()
        self.nbytes += stack.nbytes
        self.stacks.append(stack)


@dataclass(eq=False)
class StackBlock:
    """Stacks with the same arrays, dtype and width that are written together.

    Attributes:
        tensors, row_starts: by array, its tensor in the file, and where the block begins in it.
        data: bytes of `[arrays, rows, hidden]`, until they were checked.
        memory: that they are in, if it is the block's own.
        rows: of all stacks together.
    """

    dtype: str
    hidden: int
    tensors: tuple[str, ...]
    row_starts: tuple[int, ...]
    data: memoryview | None
    memory: Buffer | None
    rows: int

    @classmethod
    def place(
        cls,
        file: PayloadFile,
        names: Sequence[str],
        pieces: Sequence[StackPiece],
        spare: list[Buffer],
    ) -> StackBlock:
        """Give staged stacks their place in the file: the rows of an array side by side.

        Args:
            spare: memory of earlier blocks, which is filled faster than new memory.
        """
        rows = 0
        taken: Buffer | None = None
        for piece in pieces:
            piece.row = rows
            rows += piece.rows
        stacks = [stack for piece in pieces for stack in piece.stacks]
        keys, dtype, hidden = stacks[0].kind
        if len(stacks) == 1 and rows <= 1:
            data = as_bytes(stacks[0].tensor)
        elif not rows:
            data = memoryview(b"")
        else:
            width = hidden * ITEM_SIZES[dtype]
            nbytes = len(keys) * rows * width
            taken = spare.pop() if spare else None
            if taken is None or len(taken) < nbytes:
                taken = np.empty(-(-nbytes // _ROUND) * _ROUND, np.uint8)
            side_by_side = taken[:nbytes].reshape(len(keys), rows, width)
            row = 0
            for stack in stacks:
                # numpy, since torch would begin threads of its own for each of ours.
                given = np.frombuffer(as_bytes(stack.tensor) or b"", np.uint8)
                given = given.reshape(stack.rows, len(keys), width)
                side_by_side[:, row : row + stack.rows] = given.transpose(1, 0, 2)
                row += stack.rows
            data = taken[:nbytes].data
        spans = file.add_each(names, dtype, hidden, rows, data)
        block = cls(
            dtype,
            hidden,
            tuple(span.tensor for span in spans),
            tuple(span.row_start for span in spans),
            data,
            taken,
            rows,
        )
        for piece in pieces:
            piece.block = block
        return block

    def settle(self, pieces: Sequence[StackPiece], spare: list[Buffer]) -> None:
        """The rows are in the file: note their checksums, and let go of them."""
        assert self.data is not None
        row_bytes = self.hidden * ITEM_SIZES[self.dtype]
        whole, crc32 = self.rows * row_bytes, zlib.crc32
        for piece in pieces:
            data, positions, length = self.data, piece.positions, piece.rows * row_bytes
            first = piece.row * row_bytes
            starts = range(first, first + whole * len(piece.keys), whole) if whole else ()
            piece.crc32 = [
                crc32(positions, crc32(data[start : start + length])) for start in starts
            ] or [crc32(positions)] * len(piece.keys)
            piece.stacks = []
        self.data = None
        if self.memory is not None and len(self.memory) <= _MOST_SPARE:
            spare[:] = [self.memory]
        self.memory = None


@dataclass(eq=False, slots=True)
class StackEntry:
    """The pieces of one stack in one payload file: what `PieceEntry` is for one array."""

    piece: StackPiece
    file: str

    @property
    def rows(self) -> int:
        """Of all arrays together."""
        return self.piece.rows * len(self.piece.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions, of all arrays together."""
        block = self.piece.block
        assert block is not None
        return self.rows * (block.hidden * ITEM_SIZES[block.dtype] + POSITION_BYTES)

    def encode(self) -> str:
        """As canonical JSON: one object for each array, with commas between."""
        piece, block = self.piece, self.piece.block
        assert block is not None
        values: list[int | str] = []
        for crc32, start in zip(piece.crc32, block.row_starts, strict=True):
            values += crc32, self.file, piece.position_start, start + piece.row, piece.rows
        text = _template(piece.keys, block.dtype, block.hidden, block.tensors)
        return text % tuple(values)


@lru_cache(256)
def _template(keys: tuple[ArrayKey, ...], dtype: str, hidden: int, tensors: tuple[str, ...]) -> str:
    """The JSON of a stack's pieces without what differs from record to record. All texts in it are
    of this package's making: nothing to escape."""
    return ",".join(
        f'{{"crc32":%d,"dtype":"{dtype}","file":"%s","hidden":{hidden},"hook":"{key.hook}",'
        f'"layer":{"null" if key.layer is None else key.layer},"position_start":%d,'
        f'"row_start":%d,"rows":%d,"tensor":"{tensor}"}}'
        for key, tensor in zip(keys, tensors, strict=True)
    )
