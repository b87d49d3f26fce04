"""Next-token log-probabilities that stay in the worker until somebody takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import ConsumerContext, PerToken

KEPT_RESULTS, KEPT_MIB = 2**16, 4096
"""The most results, and MiB of them, that wait in the worker until somebody takes them."""


@dataclass(frozen=True)
class NextToken:
    """Log-probabilities of the token after one position.

    Attributes:
        values: float32 `[vocab]`, `[k]` or `[len(token_ids)]`.
        token_ids: int32 `[k]` for `top_k`, best first; None otherwise.
    """

    values: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class DroppedResult:
    """What `pop` gives for a ticket whose result had to make room for later ones.

    Attributes:
        error: that it was dropped, in words.
    """

    error: str


class ArrivingRows:
    """Results of one step, on their way to the host."""

    def __init__(
        self, values: torch.Tensor, ids: torch.Tensor | None, ctx: ConsumerContext
    ) -> None:
        self._values = ctx.to_host(values)
        self._ids = None if ids is None else ctx.to_host(ids)
        self.row_bytes = 4 * values.shape[1] * (1 if ids is None else 2)

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One of them, once it is there."""
        ids = None if self._ids is None else self._ids.wait()[index]
        return self._values.wait()[index], ids


class KeptResults:
    """Results that wait to be taken, by ticket; the oldest make room for later ones.

    Attributes:
        dropped: how many did.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._found: dict[int, tuple[ArrivingRows, int]] = {}
        self._bytes = 0
        # The newest of those that were dropped, whose users are told when they ask.
        self._gone: dict[int, None] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._found)

    def put(self, ticket: int, arriving: ArrivingRows, row: int) -> None:
        """The newest result of a ticket; that before is over."""
        self.forget(ticket)
        self._found[ticket] = arriving, row
        self._bytes += arriving.row_bytes
        while len(self._found) > self._most or self._bytes > self._most_bytes:
            oldest = next(iter(self._found))
            if oldest == ticket:
                return
            self.forget(oldest)
            self._gone[oldest] = None
            self.dropped += 1
            if len(self._gone) > KEPT_RESULTS:
                del self._gone[next(iter(self._gone))]

    def pop(self, ticket: int) -> NextToken | DroppedResult | None:
        """The result of a ticket, which is given once; None for one that was not computed."""
        if ticket in self._gone:
            del self._gone[ticket]
            return DroppedResult(
                f"the result of ticket {ticket} was dropped: more than kept_results={self._most}, "
                f"or kept_mib={self._most_bytes >> 20}, were waiting to be taken; pop results "
                "sooner, or register NextTokenConsumer with more"
            )
        if ticket not in self._found:
            return None
        arriving, row = self._found[ticket]
        self.forget(ticket)
        values, ids = arriving.row(row)
        return NextToken(values.numpy(), None if ids is None else ids.numpy())

    def forget(self, ticket: int) -> None:
        """Nobody will ask for it."""
        self._gone.pop(ticket, None)
        found = self._found.pop(ticket, None)
        if found is not None:
            self._bytes -= found[0].row_bytes


class ResultsByPosition:
    """Results of one sequence, in the order of their positions.

    Attributes:
        differ: whether some are of other options than others, as inputs of a streamed prompt may
            have them.
    """

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._rows: list[tuple[ArrivingRows, int]] = []
        self._options: Mapping[str, Any] | None = None
        self.differ = False

    def add(
        self, position: int, arriving: ArrivingRows, row: int, options: Mapping[str, Any]
    ) -> None:
        if self._options is not options:
            before, self._options = self._options, options
            self.differ |= before is not None and _values_of(before) != _values_of(options)
        self._positions.append(position)
        self._rows.append((arriving, row))

    def all(self) -> Any:
        """Every one, with its token's position."""
        positions = np.array(self._positions, np.int32)
        values, ids = zip(*(arriving.row(row) for arriving, row in self._rows), strict=True)
        found = PerToken(positions, torch.stack(values).numpy())
        if ids[0] is None:
            return found
        return {"values": found, "token_ids": PerToken(positions, torch.stack(ids).numpy())}


def _values_of(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which values a request is given of each token."""
    return tuple(options.get(name) for name in ("top_k", "token_ids"))
