"""What a bundle has by role: rows that are lent to a consumer while it is called, or its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from tllm.ports import RowMeta
from tllm.runtime.flows import BoundFlow
from tllm.runtime.read_rows import Roles


class LentRows(Mapping[str, Any]):
    """Entries by role. Those of several roles are one tensor, of which each is made a view when it
    is asked for: what nobody looks at costs nothing.

    Args:
        rows: `[rows, roles, hidden]`.
        columns: which of the roles each is.
        views: those that were asked for before, of the same rows.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        columns: Mapping[str, int],
        others: Mapping[str, Any],
        views: dict[str, torch.Tensor],
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._others = others
        self._views = views

    def __getitem__(self, role: str) -> Any:
        view = self._views.get(role)
        if view is not None:
            return view
        column = self._columns.get(role)
        if column is None:
            return self._others[role]
        view = self._views[role] = self._rows[:, column]
        return view

    def __contains__(self, role: object) -> bool:
        return role in self._columns or role in self._others

    def __iter__(self) -> Iterator[str]:
        yield from self._columns
        yield from self._others

    def __len__(self) -> int:
        return len(self._columns) + len(self._others)


def by_role(
    flow: BoundFlow,
    parts: Mapping[Roles, torch.Tensor],
    meta: RowMeta,
    shared: Collection[Roles],
    views: dict[str, torch.Tensor] | None = None,
) -> Mapping[str, Any]:
    """The entries of a bundle. Where they are the consumer's own, each has its rows side by side.

    Args:
        parts, meta, shared: as `ReadRows` has them.
        views: those of the same parts that `LentRows` has made before.
    """
    found: dict[str, Any] = {}
    lent: torch.Tensor | None = None
    for roles, (port, _) in flow.gathered.items():
        if isinstance(roles, tuple):
            if flow.lends:
                lent = parts[roles]
                continue
            part = parts[roles]
            own = part.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            # Nobody else has what these share, and so autograd need not take them for views, which
            # it would not let a consumer change in place.
            each = torch.unsafe_chunk(own.flatten(0, 1), len(roles))
            found.update(zip(roles, each, strict=True))
        elif port == "request_meta":
            found[roles] = meta
        else:
            part = parts[roles]
            found[roles] = part.clone() if roles in shared and not flow.lends else part
    if lent is None:
        return found
    return LentRows(lent, flow.columns, found, {} if views is None else views)
