"""What is read of some rows, before it is a bundle of a consumer's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from tllm.ports import RequestInfo, RowMeta
from tllm.runtime.transfer import upload
from tllm.spec.selection import END

Roles: TypeAlias = str | tuple[str, ...]
"""Of one entry of a bundle, or of several that are one tensor `[rows, roles, hidden]` until the
consumer is called."""


@dataclass(frozen=True, eq=False)
class ReadRows:
    """What a flow reads of some rows, and whose they are.

    Attributes:
        parts: tensors with `len(meta)` rows.
        phase: of the first row.
        shared: of which roles the parts are views of memory that later steps use again.
    """

    parts: Mapping[Roles, torch.Tensor]
    meta: RowMeta
    phase: int
    shared: Collection[Roles] = ()

    def kept(self) -> ReadRows:
        """The same, to be kept beyond the step."""
        parts = {r: part.clone() if r in self.shared else part for r, part in self.parts.items()}
        return ReadRows(parts, self.meta, self.phase)

    def select(self, rows: np.ndarray) -> ReadRows:
        """Some of the rows, in this order."""
        return ReadRows(_selected(self.parts, rows), self.meta.select(rows), self.phase)

    @staticmethod
    def joined(several: Sequence[ReadRows]) -> ReadRows:
        """Rows after rows, those of each sequence in ascending position."""
        if len(several) == 1:
            return several[0]
        meta, order = join_meta([each.meta for each in several])
        parts: Mapping[Roles, torch.Tensor] = {
            roles: torch.cat([each.parts[roles] for each in several]) for roles in several[0].parts
        }
        if order is not None:
            parts = _selected(parts, order)
        return ReadRows(parts, meta, several[0].phase)

    def in_turns(self) -> Iterator[ReadRows]:
        """Where a step has several rows of generated tokens of a sequence: the first of each, with
        the prompts' rows, then the second of each, and so on."""
        owner, positions = self.meta.request_index, self.meta.positions
        prompt_lens = np.array([request.prompt_len for request in self.meta.requests])
        generated = positions >= prompt_lens[owner]
        first = np.full(len(prompt_lens), END)
        np.minimum.at(first, owner[generated], positions[generated])
        turn = np.where(generated, positions - first[owner], 0)
        for number in range(int(turn.max(initial=0)) + 1):
            rows = np.flatnonzero(turn == number)
            yield self if len(rows) == len(turn) else self.select(rows)

    def divided(
        self, bundle_key: Sequence[str], max_rows: int
    ) -> Iterator[tuple[dict[str, Any], ReadRows]]:
        """The rows of each bundle, with the values of the key that only they share."""
        for values, rows in split_meta(self.meta, bundle_key, max_rows):
            yield values, self if rows is None else self.select(rows)


def _selected(parts: Mapping[Roles, torch.Tensor], rows: np.ndarray) -> dict[Roles, torch.Tensor]:
    if not parts:
        return {}
    index = upload(rows.astype(np.int64), next(iter(parts.values())).device)
    return {roles: part[index] for roles, part in parts.items()}


def join_meta(metas: list[RowMeta]) -> tuple[RowMeta, np.ndarray | None]:
    """Rows after rows; a sequence that has rows in several is there once, but for one whose prompt
    has grown between: its rows are told as they were.

    Returns:
        The rows' description, and their order where they had to be moved: those of a sequence
        ascend by position, whichever program each of them had.
    """
    if len(metas) == 1:
        return metas[0], None
    numbers: dict[tuple[str, int, int], int] = {}
    requests: list[RequestInfo] = []
    indices = []
    for meta in metas:
        each = []
        for request in meta.requests:
            sequence = (request.prompt_id, request.sample_index, request.prompt_len)
            if sequence not in numbers:
                numbers[sequence] = len(requests)
                requests.append(request)
            each.append(numbers[sequence])
        indices.append(np.array(each, np.int32)[meta.request_index])
    joined = RowMeta(
        tuple(requests),
        np.concatenate(indices),
        np.concatenate([meta.positions for meta in metas]),
        np.concatenate([meta.steps for meta in metas]),
    )
    if len(requests) == sum(len(meta.requests) for meta in metas):
        return joined, None
    owner = joined.request_index
    by_owner = np.argsort(owner, kind="stable")
    back = (np.diff(joined.positions[by_owner]) < 0) & (np.diff(owner[by_owner]) == 0)
    if not back.any():
        return joined, None
    order = np.lexsort((joined.positions, owner))
    return joined.select(order), order


def split_meta(
    meta: RowMeta, bundle_key: Sequence[str], max_rows: int
) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Rows of each bundle, with the key values they share; None is all rows."""
    names = [k for k in ("request_id", "prompt_id") if k in bundle_key]
    if not names and not (max_rows and len(meta) > max_rows):
        yield {}, None
        return
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(meta.requests):
        sequence = (request.request_id, request.sample_index) if "request_id" in names else ()
        groups.setdefault((*sequence, request.prompt_id if names else ""), []).append(i)
    for members in groups.values():
        first = meta.requests[members[0]]
        values = {"request_id": first.request_id, "prompt_id": first.prompt_id}
        rows = np.flatnonzero(np.isin(meta.request_index, members))
        for begin in range(0, len(rows), max_rows or len(rows)):
            yield values, rows[begin : begin + (max_rows or len(rows))]
