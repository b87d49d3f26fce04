"""Who each row of a bundle belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tllm.ports.base import PortRead

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
        slot: small integer; another sequence has it once all consumers were told of the end of
            this one, by `on_request_finished`.
        prompt_len: number of prompt tokens.
        options: what this request asked of the consumer that is being called.
        adapter: the name of the LoRA adapter that it is computed with; empty for none.
        token_ids: all tokens, prompt and output, in `on_request_finished` of a consumer with
            `needs_tokens`; None while they are not known, and when the request was given up.
        missing: in `on_request_finished`: which rows the runtime had to give up; None for none.
        actions: in `on_request_finished`: what the consumer's `decide` did to the sequence, an
            `ActionLog`; None for nothing.
    """

    request_id: str
    prompt_id: str
    sample_index: int
    num_samples: int
    slot: int
    prompt_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    token_ids: tuple[int, ...] | None = None
    missing: str | None = None
    actions: Any = None

    def having(self, **fields: Any) -> RequestInfo:
        """The same with other fields. What `dataclasses.replace` does, at a tenth of its price."""
        other = RequestInfo.__new__(RequestInfo)
        vars(other).update(vars(self), **fields)
        return other


@dataclass(frozen=True, eq=False)
class RowMeta:
    """Row i of every tensor of a bundle is described by element i here. Host arrays.

    In a bundle, the rows of each sequence ascend by position. While a batch goes on, `requests` and
    `request_index` are the same objects in each step, and cannot be written to.

    Attributes:
        requests: the distinct sequences, in the order of their first row. One whose prompt has
            grown between the steps of the rows is there as it was in each.
        request_index: `[rows]`, index into `requests`.
        positions: `[rows]`, position of the token in its sequence, from 0.
        steps: `[rows]`, engine step that computed the row.
    """

    requests: tuple[RequestInfo, ...]
    request_index: IntArray
    positions: IntArray
    steps: StepArray

    @classmethod
    def of_tokens(
        cls,
        requests: tuple[RequestInfo, ...],
        request_index: IntArray,
        starts: IntArray,
        sequences: npt.NDArray[Any],
        step: int,
        before: int = 0,
    ) -> RowMeta:
        """One token of each sequence, in a step; arrays that nobody looks at are not made.

        Args:
            starts: position of each token, by sequence of the batch; not to be changed.
            sequences: `[rows]`, index into `starts`.
            before: how many positions before those the tokens are.
        """
        meta = cls.__new__(cls)
        own = vars(meta)
        own["requests"], own["request_index"] = requests, request_index
        own["_token_of"] = starts, sequences, step, before
        return meta

    def __getattr__(self, name: str) -> Any:
        # Only where an attribute is not there yet.
        found: npt.NDArray[Any]
        if name not in ("positions", "steps") or "_token_of" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        starts, sequences, step, before = vars(self)["_token_of"]
        if name == "positions":
            found = (starts[sequences] - before).astype(np.int32, copy=False)
        else:
            found = np.full(len(sequences), step, np.int64)
        vars(self)[name] = found
        return found

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


class RequestMeta:
    """Port that puts the bundle's `RowMeta` among its entries (it is always `bundle.meta`)."""

    @staticmethod
    def read(*, role: str = "request_meta") -> PortRead:
        """Read who the rows belong to."""
        return PortRead("request_meta", role)
