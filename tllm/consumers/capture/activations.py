"""What a capture to memory gives the user: `activations["post_block"][12].tensor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import Payload, Place
from tllm.spec.capture import Reduction
from tllm.spec.hooks import HookPoint
from tllm.spec.selection import Intervals

IntArray = npt.NDArray[np.int32]

_NONE = np.zeros(0, np.int32)

_FEW = 256
"""Positions that are pickled as they are."""

_MANY_BYTES = 1 << 20
"""Rows that are not copied where that can be avoided."""


@dataclass(frozen=True, eq=False)
class Activation:
    """The rows of one hook point.

    Attributes:
        tensor: `[rows, hidden]`, on the host; one row with a reduction (none if there is nothing
            to reduce).
        positions: `[rows]`, position of each row's token, ascending; with a reduction, of the
            tokens that it is made of.
    """

    tensor: torch.Tensor
    positions: IntArray

    def __len__(self) -> int:
        return len(self.tensor)


class CapturedRows:
    """Rows `[rows, places, hidden]` in pieces, which are joined when somebody looks."""

    _arrived: tuple[Sequence[npt.NDArray[np.uint8]], tuple[int, ...], str]
    """In the user's process: the bytes of the pieces, the shape of a row and its dtype."""

    def __init__(self, positions: IntArray, pieces: Sequence[torch.Tensor]) -> None:
        self.positions = positions
        self._pieces = list(pieces)

    @cached_property
    def _pieces(self) -> list[torch.Tensor]:
        raw, shape, dtype = self._arrived
        kind = getattr(torch, dtype)
        pieces = [torch.from_numpy(array).view(kind) for array in raw]
        return pieces or [torch.empty((0, *shape), dtype=kind)]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def tensor(self) -> torch.Tensor:
        """All rows in one tensor."""
        if len(self._pieces) > 1:
            joined = torch.cat(self._pieces)
            self._pieces = [joined]
            if "_arrived" in vars(self):  # what was joined is kept no more
                self._arrived = [joined.view(torch.uint8).numpy()], *self._arrived[1:]
        return self._pieces[0]

    def pieces(self) -> Iterator[tuple[IntArray, torch.Tensor]]:
        """Positions and rows of each piece that has any."""
        begin = 0
        for piece in self._pieces:
            end = begin + len(piece)
            if begin < end:
                yield self.positions[begin:end], piece
            begin = end

    def up_to(self, count: int) -> CapturedRows:
        """The first rows."""
        if count >= len(self):
            return self
        return CapturedRows(self.positions[:count], self._split(count)[0])

    def within(self, intervals: Intervals) -> CapturedRows:
        """The rows at positions in any of the intervals."""
        edges = np.array([edge for interval in intervals for edge in interval], np.int64)
        # Positions in an interval have passed an odd number of edges.
        [at] = np.nonzero(np.searchsorted(edges, self.positions, side="right") % 2)
        if len(at) == len(self):
            return self
        return CapturedRows(self.positions[at], [self.tensor[torch.from_numpy(at)]])

    def split(self, position: int) -> tuple[CapturedRows, CapturedRows]:
        """The rows before a position, and the others."""
        count = int(np.searchsorted(self.positions, position))
        before, after = self._split(count)
        return CapturedRows(self.positions[:count], before), CapturedRows(
            self.positions[count:], after
        )

    def _split(self, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The pieces of the first rows, and of the others."""
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        left = count
        for piece in self._pieces:
            size = len(piece)
            if left >= size:
                before.append(piece)
            else:
                after.append(piece[left:] if left else piece)
                if left:
                    before.append(piece[:left])
            left = max(0, left - size)
        return before or [after[0][:0]], after or [before[0][:0]]

    def __getstate__(self) -> Any:
        first = self._pieces[0]
        shape, dtype = tuple(first.shape[1:]), str(first.dtype).removeprefix("torch.")
        if not len(self):
            return None, (), shape, dtype
        # What is large is not copied on its way: numpy's buffers travel beside the pickle.
        positions = self.positions if len(self) > _FEW else self.positions.tobytes()
        raw = [piece.contiguous().view(torch.uint8).numpy() for piece in self._pieces]
        return positions, raw, shape, dtype

    def __setstate__(self, state: Any) -> None:
        positions, raw, shape, dtype = state
        if isinstance(positions, bytes):
            positions = np.frombuffer(bytearray(positions), np.int32)
        self.positions = _NONE if positions is None else positions
        self._arrived = raw, shape, dtype


@dataclass(frozen=True, eq=False)
class Reduced:
    """A reduction of some rows, and the rows after them, which may turn out not to belong to the
    sequence.

    Attributes:
        total: `[1, places, hidden]` float32: their sum, maximum or last; meaningless without any.
        tail: later rows.
    """

    positions: IntArray
    total: CapturedRows
    tail: CapturedRows

    def folded(self, how: Reduction) -> tuple[IntArray, torch.Tensor]:
        """All positions, and the reduction of all rows (`mean`: their sum)."""
        total, tail = self.total.tensor.float(), self.tail.tensor.float()
        positions = np.concatenate([self.positions, self.tail.positions])
        if len(tail):
            rest = _reduce(tail, how)
            total = _combine(total, rest, how) if len(self.positions) else rest
        return positions, total

    @classmethod
    def of(cls, rows: CapturedRows, how: Reduction) -> Reduced:
        tensor = rows.tensor.float()
        total = _reduce(tensor, how) if len(rows) else tensor.new_zeros((1, *tensor.shape[1:]))
        return cls(rows.positions, CapturedRows(rows.positions[:1], [total]), rows.up_to(0))


@dataclass(frozen=True, eq=False)
class StageRows:
    """What one worker captured of one sequence.

    Attributes:
        places: hook points and their layers, counted from the start.
    """

    places: tuple[Place, ...]
    prompt: CapturedRows | Reduced
    generated: CapturedRows | Reduced


class Activations(Payload, Mapping[str, "Mapping[int | None, Activation]"]):
    """Captured activations: hook point -> layer -> `Activation`.

    Hook points may be named by their aliases, and layers counted from the end. `lm_head_in` has
    the one layer None.
    """

    def __init__(
        self,
        blocks: Sequence[StageRows],
        *,
        reduction: Reduction,
        dtype: torch.dtype,
        num_layers: int,
        problem: str | None = None,
    ) -> None:
        self._blocks = tuple(blocks)
        self._reduction = reduction
        self._dtype = dtype
        self._num_layers = num_layers
        self._problem = problem

    @property
    def problem(self) -> str | None:
        return self._problem

    def __getstate__(self) -> dict[str, Any]:
        # What was looked at are views of the rows, and a view is pickled with all of them.
        return {name: value for name, value in vars(self).items() if name != "_by_point"}

    # -- as the user sees it -------------------------------------------------------------------

    def __getitem__(self, point: str) -> Mapping[int | None, Activation]:
        name = HookPoint.parse(point).value
        try:
            return self._by_point[name]
        except KeyError:
            raise KeyError(
                f"{point!r} was not captured; captured were {', '.join(self._by_point) or 'none'}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_point)

    def __len__(self) -> int:
        return len(self._by_point)

    def __repr__(self) -> str:
        places = ", ".join(f"{p} {sorted(layers, key=str)}" for p, layers in self.items())
        empty = self._problem is None and all(map(_is_empty, self._blocks))
        told = ": no rows, since no token that was computed is at the positions asked for"
        return f"Activations({places}{told if empty else ''})"

    def stacked(self) -> tuple[tuple[Place, ...], list[tuple[IntArray, torch.Tensor]]]:
        """Of what one worker captured: places, and positions with rows `[rows, places, hidden]`.
        Large rows that lie in several pieces are not joined for it.

        With a reduction there is one row, and the positions are those that it was made of.
        """
        [block] = self._blocks
        phases = block.prompt, block.generated
        if all(isinstance(rows, CapturedRows) for rows in phases):
            pieces = [p for rows in phases if isinstance(rows, CapturedRows) for p in rows.pieces()]
            if sum(rows.nbytes for _, rows in pieces) >= _MANY_BYTES:
                return block.places, pieces
        return block.places, [self._values(block)]

    @cached_property
    def _by_point(self) -> dict[str, _Layers]:
        found: dict[str, dict[int | None, Activation]] = {}
        for block in sorted(self._blocks, key=lambda block: _is_empty(block)):
            positions, tensor = self._values(block)
            for (point, layer), rows in zip(block.places, tensor.unbind(1), strict=True):
                layers = found.setdefault(point, {})
                if layer not in layers:
                    layers[layer] = Activation(rows, positions)
        ordered = [point.value for point in HookPoint if point.value in found]
        return {
            point: _Layers(
                dict(sorted(found[point].items(), key=lambda item: item[0] or 0)),
                self._num_layers,
            )
            for point in ordered
        }

    def _values(self, block: StageRows) -> tuple[IntArray, torch.Tensor]:
        """Positions, and the tensor `[rows, places, hidden]`."""
        prompt, generated = block.prompt, block.generated
        if isinstance(prompt, CapturedRows) and isinstance(generated, CapturedRows):
            parts = [part for part in (prompt, generated) if len(part)] or [prompt]
            if len(parts) == 1:
                return parts[0].positions, parts[0].tensor
            return (
                np.concatenate([part.positions for part in parts]),
                torch.cat([part.tensor for part in parts]),
            )
        assert isinstance(prompt, Reduced) and isinstance(generated, Reduced)
        folded = [part.folded(self._reduction) for part in (prompt, generated)]
        positions = np.concatenate([positions for positions, _ in folded])
        values = [value for positions, value in folded if len(positions)]
        if not values:
            return positions, folded[0][1][:0].to(self._dtype)
        value = values[0]
        if len(values) == 2:
            value = _combine(values[0], values[1], self._reduction)
        if self._reduction == "mean":
            value = value / len(positions)
        return positions, value.to(self._dtype)

    def written(self) -> dict[str, dict[str, dict[str, Any]]]:
        """As `{hook point: {layer: {"tensor", "positions"}}}`."""
        return {
            point: {
                str(layer): {"tensor": rows.tensor, "positions": rows.positions}
                for layer, rows in layers.items()
            }
            for point, layers in self.items()
        }

    # -- as it comes about ---------------------------------------------------------------------

    def _with(self, blocks: Sequence[StageRows], problem: str | None) -> Activations:
        return Activations(
            blocks,
            reduction=self._reduction,
            dtype=self._dtype,
            num_layers=self._num_layers,
            problem=problem,
        )

    def joined(self, other: Any) -> Activations:
        if not isinstance(other, Activations):
            return self
        return self._with((*self._blocks, *other._blocks), self._problem or other._problem)

    def with_prompt_of(self, first: Any) -> Activations:
        if not isinstance(first, Activations):
            return self
        prompts = {block.places: block.prompt for block in first._blocks}
        blocks = [replace(b, prompt=prompts.get(b.places, b.prompt)) for b in self._blocks]
        return self._with(blocks, self._problem)

    def up_to(self, num_tokens: int) -> Activations:
        end, problem, blocks = num_tokens - 1, self._problem, []
        for block in self._blocks:
            generated = block.generated
            if isinstance(generated, CapturedRows):
                count = int(np.searchsorted(generated.positions, end))
                generated = generated.up_to(count)
            else:
                ahead = len(generated.positions) - np.searchsorted(generated.positions, end)
                if ahead:
                    problem = (
                        f"{ahead} tokens that were computed ahead of the sequence's end are in the "
                        f"{self._reduction}; use reduction 'none' together with stop strings"
                    )
                count = int(np.searchsorted(generated.tail.positions, end))
                generated = replace(generated, tail=generated.tail.up_to(count))
            same = generated is block.generated
            blocks.append(block if same else StageRows(block.places, block.prompt, generated))
        if all(map(is_, blocks, self._blocks)):
            return self
        return self._with(blocks, problem)


class _Layers(Mapping["int | None", Activation]):
    """Layers of a hook point; negative ones count from the end."""

    def __init__(self, layers: Mapping[int | None, Activation], num_layers: int) -> None:
        self._layers = layers
        self._num_layers = num_layers

    def __getitem__(self, layer: int | None) -> Activation:
        located = layer + self._num_layers if layer is not None and layer < 0 else layer
        try:
            return self._layers[located]
        except KeyError:
            raise KeyError(
                f"layer {layer} was not captured; captured were {', '.join(map(str, self._layers))}"
            ) from None

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _is_empty(block: StageRows) -> bool:
    return not any(
        len(part.positions) or (isinstance(part, Reduced) and len(part.tail))
        for part in (block.prompt, block.generated)
    )


def _reduce(rows: torch.Tensor, how: Reduction) -> torch.Tensor:
    """`[1, ...]` of `[rows, ...]`; `mean` sums."""
    if how == "mean":
        return rows.sum(0, keepdim=True)
    return rows.amax(0, keepdim=True) if how == "max" else rows[-1:]


def _combine(earlier: torch.Tensor, later: torch.Tensor, how: Reduction) -> torch.Tensor:
    if how == "mean":
        return earlier + later
    return torch.maximum(earlier, later) if how == "max" else later
