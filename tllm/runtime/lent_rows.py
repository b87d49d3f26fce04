"""Rows that a consumer may look at while it is called, by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tllm.runtime.flows import BoundFlow, Roles


class LentRows(Mapping[str, Any]):
    """Entries by role. Those of several roles are one tensor, of which each is made a view when it
    is asked for: what nobody looks at costs nothing.

    Args:
        rows: `[rows, roles, hidden]`.
        columns: which of the roles each is.
        others: by role.
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


def apart(entries: Mapping[Roles, Any], flow: BoundFlow) -> Mapping[str, Any]:
    """Entries by role. Where they are the consumer's own, each has its rows side by side."""
    found: dict[str, Any] = {}
    lent: torch.Tensor | None = None
    for roles, value in entries.items():
        if isinstance(roles, str):
            found[roles] = value
        elif flow.flow.delivery == "device_lease":
            lent = value
        else:
            own = value.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            # Nobody else has what these share, and so autograd need not take them for views, which
            # it would not let a consumer change in place.
            each = torch.unsafe_chunk(own.flatten(0, 1), len(roles))
            found.update(zip(roles, each, strict=True))
    return found if lent is None else LentRows(lent, flow.columns, found, {})
