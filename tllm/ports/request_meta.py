"""Who each row of a bundle belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tllm.ports.base import PortRead

ResultStatus = Literal["ok", "partial_error", "error"]

IntArray = npt.NDArray[np.int32]
StepArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestInfo:
    """One running sequence: one sample of one prompt.

    Attributes:
        request_id: the id the caller knows; the n samples of a prompt share it.
        prompt_id: what the n samples of one prompt share, unique to one call of `generate`.
        sample_index: which of the n samples, from 0.
        num_samples: n.
        slot: small integer, unique among running sequences, recycled afterwards.
        prompt_len: number of prompt tokens.
        options: what this request asked of the consumer that is being called.
        token_ids: all tokens, prompt and output, in `on_request_finished` of a consumer with
            `needs_tokens`; None while they are not known, and when the request was given up.
        missing: in `on_request_finished`: which rows the runtime had to give up; None for none.
    """

    request_id: str
    prompt_id: str
    sample_index: int
    num_samples: int
    slot: int
    prompt_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None
    missing: str | None = None


@dataclass(frozen=True, eq=False)
class RowMeta:
    """Row i of every tensor of a bundle is described by element i here. Host arrays.

    Attributes:
        requests: the distinct sequences, in the order of their first row.
        request_index: `[rows]`, index into `requests`.
        positions: `[rows]`, position of the token in its sequence, from 0.
        steps: `[rows]`, engine step that computed the row.
    """

    requests: tuple[RequestInfo, ...]
    request_index: IntArray
    positions: IntArray
    steps: StepArray

    def __len__(self) -> int:
        return len(self.request_index)

    @property
    def slots(self) -> IntArray:
        """`[rows]`, the slot of each row's sequence."""
        return np.array([r.slot for r in self.requests], np.int32)[self.request_index]

    @property
    def is_prefill(self) -> npt.NDArray[np.bool_]:
        """`[rows]`, whether the row's token belongs to the prompt."""
        lengths = np.array([r.prompt_len for r in self.requests], np.int32)
        return self.positions < lengths[self.request_index]

    @property
    def request_ids(self) -> list[str]:
        """`[rows]`, the caller's id of each row's request."""
        return [self.requests[i].request_id for i in self.request_index]

    def select(self, rows: npt.NDArray[Any]) -> RowMeta:
        """The description of some of the rows, in the order given."""
        kept, first, inverse = np.unique(
            self.request_index[rows], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return RowMeta(
            tuple(self.requests[i] for i in kept[order]),
            rank[inverse].astype(np.int32),
            self.positions[rows],
            self.steps[rows],
        )


class Payload:
    """A result that knows how to become the one that the user is given.

    What a worker returns is joined with what other pipeline stages return, gets the prompt rows
    of sample 0 where prompt rows are given once, and is cut at the sequence's end. Each method
    returns a new payload; by default, the same one.
    """

    def joined(self, other: Any) -> Any:
        """This payload together with that of another pipeline stage. A class that leaves this out
        has payloads that cannot be joined: if they differ, the user is told."""
        return self

    def with_prompt_of(self, first: Any) -> Any:
        """This payload of a later sample with the prompt rows of sample 0's."""
        return self

    def up_to(self, num_tokens: int) -> Any:
        """What belongs to a sequence of `num_tokens` tokens, whose last never passed the model. It
        may be asked again of what it returned."""
        return self

    @property
    def problem(self) -> str | None:
        """What is missing or wrong in it, in words; None when nothing is."""
        return None


def in_order(positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The order in which positions ascend, and of equal ones the last only: when the prompt of a
    sequence grows, the engine may drop a token, and compute another at its position."""
    order = np.argsort(positions, kind="stable")
    last = np.append(np.diff(positions[order]) > 0, True)
    return order[last[: len(order)]]


def cut(result: Any, num_tokens: int) -> Any:
    """A payload, or those in a mapping, `up_to` the end of a sequence; anything else as it is."""
    if isinstance(result, Payload):  # which may be a mapping too
        return result.up_to(num_tokens)
    if isinstance(result, Mapping):
        return {
            key: value.up_to(num_tokens) if isinstance(value, Payload) else value
            for key, value in result.items()
        }
    return result


@dataclass(frozen=True, eq=False)
class RequestResult:
    """What `Consumer.on_request_finished` may return instead of a bare payload.

    Attributes:
        payload: for the user.
        status: `ok`, `partial_error` (some rows are missing) or `error`.
        error: why it is not `ok`.
    """

    payload: Any
    status: ResultStatus = "ok"
    error: str | None = None


@dataclass(frozen=True, eq=False)
class PerToken(Payload):
    """A result with one value for each token that passed the model.

    The engine may compute a token ahead of the one that ends a sequence; when a result reaches
    the user, rows whose token is not part of the output are gone.

    Attributes:
        positions: `[rows]`, position of each token in the sequence, ascending; given in another
            order, they and the values are sorted, and of equal ones the last counts.
        values: `[rows, ...]`, numpy array or CPU tensor.
    """

    positions: npt.NDArray[np.int32]
    values: Any

    def __post_init__(self) -> None:
        if (np.diff(self.positions) <= 0).any():
            order = in_order(self.positions)
            object.__setattr__(self, "positions", self.positions[order])
            object.__setattr__(self, "values", self.values[order])

    def up_to(self, num_tokens: int) -> PerToken:
        """What belongs to a sequence of `num_tokens` tokens, whose last never passed the model."""
        count = int(np.searchsorted(self.positions, num_tokens - 1))
        return PerToken(self.positions[:count], self.values[:count])


class RequestMeta:
    """Port that puts the bundle's `RowMeta` among its entries (it is always `bundle.meta`)."""

    @staticmethod
    def read(*, role: str = "request_meta") -> PortRead:
        """Read who the rows belong to."""
        return PortRead("request_meta", role)
