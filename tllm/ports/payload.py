"""What a consumer returns for a sequence, and how it becomes what the user is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

ResultStatus = Literal["ok", "partial_error", "error"]


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

    def written(self) -> Any:
        """How it stands in a response over HTTP: mappings, lists, numbers, text, numpy arrays, CPU
        tensors, and payloads again. By default the fields of a dataclass."""
        if not is_dataclass(self):
            raise TypeError(
                f"{type(self).__name__} does not say how it is written; define written()"
            )
        return {field.name: getattr(self, field.name) for field in fields(self)}


def reason_of(error: BaseException) -> str:
    """An error's type and message. A message that cannot be made is no second error."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as fault:
        return f"{type(error).__name__}, whose message raised {type(fault).__name__}"


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

    def __post_init__(self) -> None:
        if self.status not in get_args(ResultStatus):
            allowed = ", ".join(get_args(ResultStatus))
            raise ValueError(f"RequestResult(status={self.status!r:.60}): give one of {allowed}")
        if self.error is not None and not isinstance(self.error, str):
            raise TypeError(
                f"RequestResult(error={self.error!r:.60}) is {type(self.error).__name__}; give "
                "text, such as str(error), or None"
            )


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
        given = np.asarray(self.positions)
        try:
            count: int | None = len(self.values)
        except TypeError:  # one number, also as an array of no dimensions
            count = None
        whole = given.dtype.kind in "iu" or not given.size
        if given.ndim != 1 or not whole or count != len(given):
            values = type(self.values).__name__ if count is None else f"{count} values"
            raise ValueError(
                f"PerToken has positions of shape {given.shape} and type {given.dtype}, and "
                f"{values}; give whole numbers [rows], and as many values [rows, ...]"
            )
        object.__setattr__(self, "positions", given)
        if (given[1:] <= given[:-1]).any():  # unsigned ones have no differences below 0
            order = in_order(given)
            object.__setattr__(self, "positions", given[order])
            object.__setattr__(self, "values", self.values_at(order))

    def values_at(self, rows: npt.NDArray[Any]) -> Any:
        """The values of some rows, an array or tensor also where they were given as a list.

        Args:
            rows: their indices, or a mask `[rows]`.
        """
        listed = isinstance(self.values, (list, tuple))
        return (np.asarray(self.values) if listed else self.values)[rows]

    def up_to(self, num_tokens: int) -> PerToken:
        """What belongs to a sequence of `num_tokens` tokens, whose last never passed the model."""
        count = int(np.searchsorted(self.positions, num_tokens - 1))
        return PerToken(self.positions[:count], self.values[:count])
