"""The taps of a loaded model: descriptors, capture programs, tables, and their hooks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, Protocol

import numpy as np
import torch

from tllm.runtime import ops
from tllm.runtime.descriptor import (
    DESCRIPTOR_WIDTH,
    FLAG_BITS,
    LAYOUT_VERSION,
    STAGES,
    Descriptor,
    Flag,
    PlanRow,
    Stage,
)
from tllm.runtime.kernels.backend import HAS_TRITON, starts_early
from tllm.runtime.transfer import upload
from tllm.spec.hooks import HookPoint

TapKey = tuple[HookPoint, int | None]
"""A hook point and its layer. Two keys may be the two stages of one tap."""


_PLAN_BUFFER = "tllm_plan"


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


@dataclass(frozen=True)
class AddedNorm:
    """A norm over the sum of a stream and a residual: `weight x / sqrt(mean(x^2) + eps)`.

    Its `forward(stream, residual)` returns the normed rows and the sum.
    """

    module: torch.nn.Module
    """Has the `weight`, `[hidden]`."""
    eps: float


def compile_digest(points: Iterable[str], dtype: torch.dtype, fuse_norms: bool) -> str:
    """What vLLM's compile cache must tell apart: everything our taps bake into the graph."""
    baked = {
        "layout": LAYOUT_VERSION,
        "descriptor": DESCRIPTOR_WIDTH,
        "ops": [str(op.default._schema) for op in (ops.tap, ops.tap_norm)],
        "fuse_norms": fuse_norms and HAS_TRITON,
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
        second: the hook point that is the same tensor as one of `sites`, and is reached after it.
        hidden_size, dtype, device: of the residual stream.
        max_tokens: the most tokens in a batch, padding included.
        max_programs: the most distinct capture programs.
        add_rows: add rows to begin with; the tables grow.

    Attributes:
        index: by hook point: `STAGES` times the number of its tap, plus its stage.
        norms_fused: how many taps are computed together with the norm after them.
    """

    def __init__(
        self,
        sites: Mapping[TapKey, Site],
        *,
        second: Mapping[TapKey, TapKey],
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
        self.norms_fused = 0
        self.index: dict[TapKey, int] = {key: STAGES * i for i, key in enumerate(sites)}
        for key, following in second.items():
            self.index[following] = self.index[key] + 1
        count = max(1, len(sites))

        self.plan = torch.full((len(PlanRow), max_tokens), -1, dtype=torch.int32, device=device)
        self._columns_host = np.full((STAGES * count, max_programs), -1, np.int32)
        self._columns = torch.full(
            (STAGES * count, max_programs), -1, dtype=torch.int32, device=device
        )
        self._add_index: dict[int, torch.Tensor] = {}
        self._add_table: dict[int, torch.Tensor] = {}

        self._fields = np.zeros((count, DESCRIPTOR_WIDTH), np.int64)
        self._flags = np.zeros(STAGES * count, np.int64)
        # `[points, fields]`: the same memory, as each point's own fields.
        self._stages = self._fields[
            :, Descriptor.STAGE : Descriptor.STAGE + STAGES * Stage.SIZE
        ].reshape(count, STAGES, Stage.SIZE)
        self._set_point_field(
            Stage.COLUMNS, np.arange(STAGES * count), [row.data_ptr() for row in self._columns]
        )
        self._descriptors = torch.zeros((count, DESCRIPTOR_WIDTH), dtype=torch.int64, device=device)
        self._early = starts_early(device)
        self._settled = True
        self._spacer = torch.zeros(1, dtype=torch.uint8, device=device)
        self._stale = True
        self.commit()

    def install(self, norms: Mapping[TapKey, AddedNorm] = MappingProxyType({})) -> None:
        """Hook the modules. Before the model is compiled: later hooks would be ignored.

        Args:
            norms: by site, the norm that reads it next: both are computed by one kernel.
        """
        self.norms_fused = len(norms)
        for key, site in self.sites.items():
            name = f"tllm_{key[0].value}"
            norm = norms.get(key)
            module = site.module if norm is None else norm.module
            descriptor = self._descriptors[self.index[key] // STAGES]
            module.register_buffer(name, descriptor, persistent=False)
            module.register_buffer(_PLAN_BUFFER, self.plan, persistent=False)
            if norm is not None:
                module.forward = MethodType(_tapped_norm(norm.eps, name), module)
            elif site.side == "input":
                site.module.register_forward_pre_hook(_input_hook(site, name), with_kwargs=True)
            else:
                site.module.register_forward_hook(_output_hook(site, name))

    def commit(self) -> None:
        """Bring changed descriptors to the device, before the forward pass that needs them."""
        if self._stale:
            stages = self._flags.reshape(-1, STAGES)
            shifts = FLAG_BITS * np.arange(STAGES)
            self._fields[:, Descriptor.FLAGS] = (stages << shifts).sum(1)
            self._descriptors.copy_(upload(self._fields, self.device))
            self._stale = False

    def settle(self) -> None:
        """Put something between the kernels that wrote what taps read, and the forward pass.

        A tap looks up what it has to do while the kernel before it still ends, and that must not
        be one that writes what is looked up. It never is where a forward pass begins with an
        embedding; on a later pipeline rank it could be.
        """
        if not self._settled:
            self._spacer.zero_()
            self._settled = True

    def unsettle(self) -> None:
        """The plan or a table was written by a kernel."""
        self._settled = not self._early

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
        self._columns[:, program].copy_(upload(column, self.device))
        self.unsettle()

    def set_capturing(self, keys: Iterable[TapKey]) -> None:
        """Which hook points may capture; all others do not even look at the plan."""
        self._set_flag(Flag.CAPTURE, [self.index[key] for key in keys])

    def set_steering(self, points: np.ndarray) -> None:
        """Which points (numbers of `index`) steer any row; all others do not look at the plan."""
        self._set_flag(Flag.STEER, points)

    def place_steering(
        self,
        tables: torch.Tensor,
        operations: torch.Tensor,
        vectors: torch.Tensor,
        sums: Mapping[int, torch.Tensor],
    ) -> None:
        """Where steering is read from, from the next commit on.

        Args:
            tables: int32 `[points, steering rows, Operation.SIZE]`.
            operations: int32 `[operations, Operation.SIZE]`.
            vectors: `[vectors, hidden]` in the model's dtype.
            sums: by point, `[steering rows, hidden]` in the model's dtype.
        """
        self._set_point_field(
            Stage.STEERING, np.arange(len(tables)), [table.data_ptr() for table in tables]
        )
        self._set_point_field(
            Stage.SUMS,
            np.array(list(sums), np.int64),
            [table.data_ptr() for table in sums.values()],
        )
        self._fields[:, Descriptor.OPERATIONS] = operations.data_ptr()
        self._fields[:, Descriptor.VECTORS] = vectors.data_ptr()
        self._stale = True

    @property
    def num_points(self) -> int:
        """Hook points there is room for: `STAGES` of each tap."""
        return len(self._flags)

    def reserve_additions(self, rows: int) -> None:
        """Make room for add rows below `rows`."""
        if rows > self.add_rows:
            self.add_rows = 2 * rows
            for point in list(self._add_table):
                self._allocate_additions(point)

    def set_additions(self, key: TapKey, add_rows: torch.Tensor, vectors: torch.Tensor) -> None:
        """Add `vectors[i]` to the rows of add row `add_rows[i]` at this hook point.

        Args:
            add_rows: `[n]` int64 on the device.
            vectors: `[n, hidden]` on the device, any float dtype.
        """
        point = self.index[key]
        if point not in self._add_table:
            self._allocate_additions(point)
        self._add_table[point].index_copy_(0, add_rows, vectors.to(self.dtype))
        self._add_index[point].index_copy_(0, add_rows, add_rows.to(torch.int32))
        self.unsettle()

    def clear_additions(self, key: TapKey, add_rows: torch.Tensor) -> None:
        """Add nothing to the rows of these add rows at this hook point."""
        point = self.index[key]
        if point in self._add_index:
            self._add_index[point].index_fill_(0, add_rows, -1)
            self.unsettle()

    def _allocate_additions(self, point: int) -> None:
        index = torch.full((self.add_rows,), -1, dtype=torch.int32, device=self.device)
        table = torch.zeros((self.add_rows, self.hidden_size), dtype=self.dtype, device=self.device)
        if point in self._add_table:
            old = len(self._add_index[point])
            index[:old].copy_(self._add_index[point])
            table[:old].copy_(self._add_table[point])
        self._add_index[point], self._add_table[point] = index, table
        self._set_point_field(Stage.ADD_INDEX, np.array([point]), [index.data_ptr()])
        self._set_point_field(Stage.ADD_TABLE, np.array([point]), [table.data_ptr()])
        self._flags[point] |= int(Flag.ADD)

    def _set_point_field(self, field: Stage, points: np.ndarray, addresses: Sequence[int]) -> None:
        self._stages[points // STAGES, points % STAGES, field] = addresses
        self._stale = True

    def _set_flag(self, flag: Flag, points: Sequence[int] | np.ndarray) -> None:
        """Set a flag for these points, and clear it for all others."""
        flags = self._flags & ~int(flag)
        flags[points] |= int(flag)
        if not np.array_equal(flags, self._flags):
            self._flags = flags
            self._stale = True


def _tapped_norm(eps: float, name: str) -> Any:
    """The `forward` of a norm that taps what it adds up."""

    def forward(self: Any, stream: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            raise RuntimeError(
                f"{type(self).__name__} is called without the residual that its tap reads too; "
                "start the engine with fuse_norms=False, and report this model"
            )
        descriptor, plan = getattr(self, name), getattr(self, _PLAN_BUFFER)
        return torch.ops.tllm.tap_norm(stream, residual, self.weight, eps, descriptor, plan)

    return forward


def _input_hook(site: Site, name: str) -> Any:
    """A pre-forward hook that taps an argument in place, or a copy that only the module sees."""
    stream_of, residual_of, private = site.stream, site.residual, site.private

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = stream_of.get(args, kwargs)
        residual = None if residual_of is None else residual_of.get(args, kwargs)
        if private:
            stream = stream.clone()
        torch.ops.tllm.tap(stream, residual, getattr(module, name), getattr(module, _PLAN_BUFFER))
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
        torch.ops.tllm.tap(stream, residual, getattr(module, name), getattr(module, _PLAN_BUFFER))

    return hook
