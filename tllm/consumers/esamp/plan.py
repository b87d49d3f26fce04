"""How the rows of a step are laid out: grouped by distiller, padded, in few blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

#: A block may always have this many padded rows: fewer launches are worth more than less work.
_FREE_PADDING = 512


class BlockShape(NamedTuple):
    """Distillers `[first, stop)`, each with room for `width` rows. The key of a CUDA graph."""

    first: int
    stop: int
    width: int

    @property
    def slots(self) -> int:
        return self.stop - self.first

    @property
    def rows(self) -> int:
        """Number of rows, padding included."""
        return self.slots * self.width


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of neighbouring distillers.

    Attributes:
        shape: which distillers, and the rows each has room for.
        index: `[slots, width]`, the bundle's row at each place, -1 for padding. The real rows
            of a distiller come first.
        counts: `[slots]`, real rows of each distiller.
    """

    shape: BlockShape
    index: IntArray
    counts: IntArray


def plan_blocks(slots: npt.NDArray[Any], capacity: int) -> list[Block]:
    """Group rows by distiller.

    Sizes are rounded up to powers of two, so that few distinct shapes occur while samples
    finish. Distillers go into one block unless that pads it to more than twice its rows.

    Args:
        slots: `[rows]`, the distiller of each row, -1 for none.
        capacity: number of distillers in the bank.
    """
    kept = np.flatnonzero(slots >= 0)
    order = kept[np.argsort(slots[kept], kind="stable")]
    counts = np.bincount(slots[kept], minlength=capacity).astype(np.int32)
    starts = np.cumsum(counts) - counts
    blocks = []
    for shape in _block_shapes(counts):
        own = counts[shape.first : shape.stop]
        place = np.arange(shape.width)
        filled = place < own[:, None]
        index = np.full((shape.slots, shape.width), -1, np.int32)
        source = starts[shape.first : shape.stop, None] + place
        index[filled] = order[source[filled]]
        blocks.append(Block(shape, index, own))
    return blocks


def _block_shapes(counts: IntArray) -> list[BlockShape]:
    shapes: list[BlockShape] = []
    needed = 0
    for slot in np.flatnonzero(counts).tolist():
        width = _power_of_two(int(counts[slot]))
        if shapes:
            merged = BlockShape(shapes[-1].first, slot + 1, max(shapes[-1].width, width))
            if merged.rows <= max(_FREE_PADDING, 2 * (needed + width)):
                shapes[-1] = merged
                needed += width
                continue
        shapes.append(BlockShape(slot, slot + 1, width))
        needed = width
    starts = [shape.first for shape in shapes] + [len(counts)]
    return [
        shape._replace(stop=min(next_start, shape.first + _power_of_two(shape.slots)))
        for shape, next_start in zip(shapes, starts[1:], strict=True)
    ]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
