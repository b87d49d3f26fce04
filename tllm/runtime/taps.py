"""The taps of a loaded model: descriptors, capture programs, add tables, and their hooks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tllm.runtime import ops
from tllm.runtime.descriptor import (
    DESCRIPTOR_WIDTH,
    LAYOUT_VERSION,
    Descriptor,
    Flag,
    PlanRow,
)
from tllm.spec.hooks import HookPoint

TapKey = tuple[HookPoint, int | None]


class Argument(Protocol):
    """One argument of a module's `forward`, passed by position or by keyword."""

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def replace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...


class Site(Protocol):
    """Where one hook point of one layer passes a module's boundary (see `tllm.models.sites`)."""

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def side(self) -> str: ...

    @property
    def stream(self) -> Any: ...

    @property
    def residual(self) -> Any: ...

    @property
    def private(self) -> bool: ...


def compile_digest(points: Iterable[str], dtype: torch.dtype) -> str:
    """What vLLM's compile cache must tell apart: everything our taps bake into the graph."""
    baked = {
        "layout": LAYOUT_VERSION,
        "descriptor": DESCRIPTOR_WIDTH,
        "op": str(ops.tap.default._schema),
        "points": sorted(points),
        "dtype": str(dtype),
    }
    return hashlib.sha256(json.dumps(baked, sort_keys=True).encode()).hexdigest()[:16]


class Taps:
    """The device tables behind the tap op, for the hook points installed in a model.

    Everything the op reads is reached through a descriptor, so that what a tap does changes by
    a write to device memory: no recompile, no re-capture of a CUDA graph.

    Args:
        sites: the installed hook points, in the order the forward pass reaches them.
        hidden_size, dtype, device: of the residual stream.
        max_tokens: the most tokens in a batch, padding included.
        max_programs: the most distinct capture programs.
        add_rows: intervention rows to begin with; the tables grow.
    """

    def __init__(
        self,
        sites: Mapping[TapKey, Site],
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        max_programs: int,
        add_rows: int,
    ) -> None:
        self.sites = sites
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.add_rows = add_rows
        self.index: dict[TapKey, int] = {key: i for i, key in enumerate(sites)}
        count = max(1, len(sites))

        self.plan = torch.full((len(PlanRow), max_tokens), -1, dtype=torch.int32, device=device)
        self._columns_host = np.full((count, max_programs), -1, np.int32)
        self._columns = torch.full((count, max_programs), -1, dtype=torch.int32, device=device)
        self._add_index: dict[int, torch.Tensor] = {}
        self._add_table: dict[int, torch.Tensor] = {}

        self._fields = np.zeros((count, DESCRIPTOR_WIDTH), np.int64)
        self._fields[:, Descriptor.PLAN] = self.plan.data_ptr()
        self._fields[:, Descriptor.PLAN_STRIDE] = self.plan.stride(0)
        self._fields[:, Descriptor.COLUMNS] = [row.data_ptr() for row in self._columns]
        self._descriptors = torch.zeros((count, DESCRIPTOR_WIDTH), dtype=torch.int64, device=device)
        self._stale = True
        self.commit()

    def install(self) -> None:
        """Hook the modules. Before the model is compiled: later hooks would be ignored."""
        for key, site in self.sites.items():
            name = f"tllm_{key[0].value}"
            site.module.register_buffer(name, self._descriptors[self.index[key]], persistent=False)
            if site.side == "input":
                site.module.register_forward_pre_hook(_input_hook(site, name), with_kwargs=True)
            else:
                site.module.register_forward_hook(_output_hook(site, name))

    def commit(self) -> None:
        """Bring changed descriptors to the device, before the forward pass that needs them."""
        if self._stale:
            self._descriptors.copy_(torch.from_numpy(self._fields.copy()))
            self._stale = False

    def set_arena(self, arena: torch.Tensor) -> None:
        """Where captured rows go from the next commit on."""
        self._fields[:, Descriptor.ARENA] = arena.data_ptr()
        self._stale = True

    def set_program(self, program: int, keys: Sequence[TapKey]) -> None:
        """Define a capture program: tap `keys[i]` is stored in the token's i-th ring row."""
        column = np.full(len(self._columns_host), -1, np.int32)
        for i, key in enumerate(keys):
            column[self.index[key]] = i
        self._columns_host[:, program] = column
        self._columns[:, program].copy_(torch.from_numpy(column))

    def set_capturing(self, keys: Iterable[TapKey]) -> None:
        """Which taps may capture; all others do not even look at the plan."""
        wanted = {self.index[key] for key in keys}
        flags = self._fields[:, Descriptor.FLAGS] & ~int(Flag.CAPTURE)
        flags[list(wanted)] |= int(Flag.CAPTURE)
        self._set_flags(flags)

    def reserve_additions(self, rows: int) -> None:
        """Make room for intervention rows below `rows`."""
        if rows > self.add_rows:
            self.add_rows = 2 * rows
            for tap in list(self._add_table):
                self._allocate_additions(tap)

    def set_additions(
        self, key: TapKey, interventions: torch.Tensor, vectors: torch.Tensor
    ) -> None:
        """Add `vectors[i]` to the rows of intervention `interventions[i]` at this tap.

        Args:
            interventions: `[n]` int64 on the device.
            vectors: `[n, hidden]` on the device, any float dtype.
        """
        tap = self.index[key]
        if tap not in self._add_table:
            self._allocate_additions(tap)
        self._add_table[tap].index_copy_(0, interventions, vectors.to(self.dtype))
        self._add_index[tap].index_copy_(0, interventions, interventions.to(torch.int32))

    def clear_additions(self, key: TapKey, interventions: torch.Tensor) -> None:
        """Add nothing to the rows of these interventions at this tap."""
        tap = self.index[key]
        if tap in self._add_index:
            self._add_index[tap].index_fill_(0, interventions, -1)

    def _allocate_additions(self, tap: int) -> None:
        index = torch.full((self.add_rows,), -1, dtype=torch.int32, device=self.device)
        table = torch.zeros((self.add_rows, self.hidden_size), dtype=self.dtype, device=self.device)
        if tap in self._add_table:
            old = len(self._add_index[tap])
            index[:old].copy_(self._add_index[tap])
            table[:old].copy_(self._add_table[tap])
        self._add_index[tap], self._add_table[tap] = index, table
        self._fields[tap, Descriptor.ADD_INDEX] = index.data_ptr()
        self._fields[tap, Descriptor.ADD_TABLE] = table.data_ptr()
        flags = self._fields[:, Descriptor.FLAGS].copy()
        flags[tap] |= int(Flag.ADD)
        self._set_flags(flags)
        self._stale = True

    def _set_flags(self, flags: np.ndarray) -> None:
        if not np.array_equal(flags, self._fields[:, Descriptor.FLAGS]):
            self._fields[:, Descriptor.FLAGS] = flags
            self._stale = True


def _input_hook(site: Site, name: str) -> Any:
    """A pre-forward hook that taps an argument in place, or a copy that only the module sees."""
    stream_of, residual_of, private = site.stream, site.residual, site.private

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = stream_of.get(args, kwargs)
        residual = None if residual_of is None else residual_of.get(args, kwargs)
        if private:
            stream = stream.clone()
        torch.ops.tllm.tap(stream, residual, getattr(module, name))
        return stream_of.replace(args, kwargs, stream) if private else None

    return hook


def _output_hook(site: Site, name: str) -> Any:
    """A forward hook that taps what the module returns, in place."""
    stream_at, residual_at = site.stream, site.residual
    assert not site.private, "the output of a module is its own"

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            stream = output[stream_at]
            residual = None if residual_at is None else output[residual_at]
        else:
            stream, residual = output, None
        torch.ops.tllm.tap(stream, residual, getattr(module, name))

    return hook
