"""The taps of a loaded model: descriptors, capture programs, tables, and their hooks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, MethodType

import numpy as np
import torch

from tllm.models.sites import Site
from tllm.runtime import ops
from tllm.runtime.columns import FLAG_BITS, PLAN_ROWS, STAGES, Column
from tllm.runtime.descriptor import DESCRIPTOR_WIDTH, LAYOUT_VERSION, Descriptor, stage_field
from tllm.runtime.kernels.backend import HAS_TRITON, starts_early
from tllm.runtime.staged import StagedTable
from tllm.runtime.tap_hooks import PLAN_BUFFER, add_hook, hook_of, tapped_norm, unless
from tllm.runtime.transfer import upload
from tllm.spec.hooks import TapKey as TapKey


@dataclass(frozen=True)
class AddedNorm:
    """A norm over the sum of a stream and a residual: `weight x / sqrt(mean(x^2) + eps)`.

    Its `forward(stream, residual)` returns the normed rows and the sum.

    Attributes:
        plus_one: `1 + weight` is in the place of `weight`.
    """

    module: torch.nn.Module
    """Has the `weight`, `[hidden]`."""
    eps: float
    plus_one: bool = False


def compile_digest(points: Iterable[str], dtype: torch.dtype, fuse_norms: bool) -> str:
    """What vLLM's compile cache must tell apart: everything our taps bake into the graph."""
    baked = {
        "layout": LAYOUT_VERSION,
        "descriptor": DESCRIPTOR_WIDTH,
        "ops": [str(op.default._schema) for op in ops.ALL],
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
        checked: the sites where rows are checked to be finite.
        embeds: a forward pass begins by looking its tokens' embeddings up, before any tap.

    Attributes:
        index: by hook point: `STAGES` times the number of its tap, plus its stage.
        num_points: hook points there is room for.
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
        checked: Sequence[TapKey] = (),
        embeds: bool = False,
    ) -> None:
        self.sites = sites
        self.checked = checked
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.norms_fused = 0
        self.index: dict[TapKey, int] = {key: STAGES * i for i, key in enumerate(sites)}
        for key, following in second.items():
            self.index[following] = self.index[key] + 1
        count = max(1, len(sites))
        self.num_points = STAGES * count

        self.plan = torch.full((PLAN_ROWS, max_tokens), -1, dtype=torch.int32, device=device)
        self._descriptors = StagedTable((count, DESCRIPTOR_WIDTH), 1, torch.int64, device)
        self._stale = True
        self._fields = np.zeros((count, DESCRIPTOR_WIDTH), np.int64)
        self._sent = self._fields.copy()
        self._flags = np.zeros(self.num_points, np.int64)
        self._ring_offsets = StagedTable(
            (self.num_points, max_programs), 2, torch.int32, device, fill=-1
        )
        self._add_index = StagedTable((self.num_points, add_rows), 2, torch.int32, device, fill=-1)
        self._add_tables: dict[int, torch.Tensor] = {}
        self._adding: set[tuple[int, int]] = set()  # points and add rows that have a vector
        self._set_fields("RING_OFFSETS", range(self.num_points), self._ring_offsets.tensor)
        self._set_fields("ADD_INDEX", range(self.num_points), self._add_index.tensor)

        self._resting = [True] * count
        self._early = starts_early(device) and not embeds
        self._separated = True
        self._spacer = torch.zeros(1, dtype=torch.uint8, device=device)
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
            descriptor = self.descriptors[self.index[key] // STAGES]
            module.register_buffer(name, descriptor, persistent=False)
            module.register_buffer(PLAN_BUFFER, self.plan, persistent=False)
            check = key in self.checked
            if norm is not None:
                forward = tapped_norm(norm.eps, name, check=check, plus_one=norm.plus_one)
                module.forward = MethodType(forward, module)
            else:
                hook = hook_of(site, name, self.hidden_size, self.dtype, check=check)
                if self.device.type == "cpu":
                    hook = unless(self._resting, self.index[key] // STAGES, hook)
                add_hook(site, hook)

    @property
    def descriptors(self) -> torch.Tensor:
        """int64 `[taps, DESCRIPTOR_WIDTH]` on the device; always the same tensor."""
        return self._descriptors.tensor

    def commit(self) -> None:
        """Bring what has changed to the device, before the forward pass that needs it."""
        if self._stale:
            shifts = FLAG_BITS * np.arange(STAGES)
            flags = (self._flags.reshape(-1, STAGES) << shifts).sum(1)
            self._fields[:, Descriptor.FLAGS] = flags
            self._resting[:] = (flags == 0).tolist()
            for tap in np.flatnonzero((self._fields != self._sent).any(1)).tolist():
                self._descriptors.stage(tap, self._fields[tap])
            written = [
                table.commit() for table in (self._descriptors, self._ring_offsets, self._add_index)
            ]
            self._sent = self._fields.copy()
            self._stale = False
            if any(written):
                self.note_write()

    def separate(self) -> None:
        """Put something between the kernels that wrote what taps read, and the forward pass.

        A tap looks up what it has to do while the kernel before it still ends, and that must not
        be one that writes what is looked up. It never is where a forward pass begins with an
        embedding; on a later pipeline rank, or where embeddings are given, it could be.
        """
        if not self._separated:
            self._spacer.zero_()
            self._separated = True

    def note_write(self) -> None:
        """The plan or a table was written by a kernel."""
        self._separated = not self._early

    def set_arena(self, arena: torch.Tensor) -> None:
        """Where captured rows go from the next commit on."""
        self._fields[:, Descriptor.ARENA] = arena.data_ptr()
        self._stale = True

    def set_program(self, program: int, keys: Sequence[TapKey]) -> None:
        """Define a capture program: tap `keys[i]` is stored in the token's i-th ring row."""
        offsets = np.full(self.num_points, -1, np.int32)
        offsets[[self.index[key] for key in keys]] = np.arange(len(keys))
        for point in range(self.num_points):
            self._ring_offsets.stage((point, program), offsets[point : point + 1])
        self._stale = True

    def set_capturing(self, keys: Iterable[TapKey]) -> None:
        """Which hook points may capture."""
        self.set_used(Column.PROGRAM, [self.index[key] for key in keys])

    def set_used(self, column: Column, points: Sequence[int] | np.ndarray) -> None:
        """At which points (numbers of `index`) a column may say anything of a row; where none does,
        a tap does not even look at the plan."""
        flags = self._flags & ~column.flag
        flags[points] |= column.flag
        if not np.array_equal(flags, self._flags):
            self._flags = flags
            self._stale = True

    def place_gates(
        self,
        gates: torch.Tensor,
        records: torch.Tensor,
        state: torch.Tensor,
        latches: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Where conditions are read from, and what they give is kept, from the next commit on.

        Args:
            gates: int32 `[points, steering rows]`.
            records: int32 `[records, GateWord.SIZE]`.
            state: float32 `[tokens, 2, MAX_GATES]`.
        """
        points = range(self.num_points)
        self._set_fields("GATES", points, gates)
        fields = "GATE_RECORDS", "GATE_STATE", "LATCHES", "HELD", "ROW_SUMS"
        for name, table in zip(fields, (records, state, *latches), strict=True):
            self._set_fields(name, points, [table] * self.num_points)

    def place_patches(self, patches: torch.Tensor, replacements: torch.Tensor) -> None:
        """Where patches are read from, from the next commit on.

        Args:
            patches: int32 `[points, patch rows]`.
            replacements: int32 `[replacements, Replacement.SIZE]`.
        """
        points = range(self.num_points)
        self._set_fields("PATCHES", points, patches)
        self._set_fields("REPLACEMENTS", points, [replacements] * self.num_points)

    def place_check(self, told: torch.Tensor) -> None:
        """Where is told of rows that are not finite, from the next commit on.

        Args:
            told: int32 `[1 + tokens]`, on the host.
        """
        points = [self.index[key] for key in self.checked]
        self._set_fields("NOT_FINITE", points, [told] * len(points))

    def set_checking(self, checking: bool) -> None:
        """Whether any row is checked."""
        points = [self.index[key] for key in self.checked] if checking else []
        self.set_used(Column.SEQUENCE, points)

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
        self._set_fields("STEERING", range(len(tables)), tables)
        self._set_fields("SUMS", sums, sums.values())
        self._fields[:, Descriptor.OPERATIONS] = operations.data_ptr()
        self._fields[:, Descriptor.VECTORS] = vectors.data_ptr()

    def reserve_additions(self, rows: int) -> None:
        """Make room for add rows below `rows`."""
        if rows > self._add_index.tensor.shape[1]:
            self._add_index.grow((self.num_points, 2 * rows))
            self._set_fields("ADD_INDEX", range(self.num_points), self._add_index.tensor)
            for point in list(self._add_tables):
                self._allocate_additions(point)

    def set_additions(
        self, key: TapKey, add_rows: Sequence[int], vectors: torch.Tensor
    ) -> torch.Tensor:
        """Add `vectors[i]` to the rows of add row `add_rows[i]` at this hook point.

        Args:
            vectors: `[n, hidden]` on the device, any float dtype.

        Returns:
            `add_rows` on the device, int64, for `replace_additions`.
        """
        point = self.index[key]
        if point not in self._add_tables:
            self._allocate_additions(point)
        at = upload(np.array(add_rows, np.int64), self.device)
        self.replace_additions(key, at, vectors)
        for row in add_rows:
            if (point, row) not in self._adding:
                self._adding.add((point, row))
                self._add_index.stage((point, row), np.array([row], np.int32))
                self._stale = True
        return at

    def replace_additions(self, key: TapKey, add_rows: torch.Tensor, vectors: torch.Tensor) -> None:
        """Add other vectors to the rows of add rows to which something is added already."""
        self._add_tables[self.index[key]].index_copy_(0, add_rows, vectors.to(self.dtype))
        self.note_write()

    def clear_additions(self, key: TapKey, add_rows: Sequence[int]) -> None:
        """Add nothing to the rows of these add rows at this hook point."""
        for row in add_rows:
            if (place := (self.index[key], row)) in self._adding:
                self._adding.remove(place)
                self._add_index.stage(place, np.array([-1], np.int32))
                self._stale = True

    def _allocate_additions(self, point: int) -> None:
        shape = self._add_index.tensor.shape[1], self.hidden_size
        with torch.inference_mode(False):  # who makes gradients writes to it, too
            table = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if (old := self._add_tables.get(point)) is not None:
            table[: len(old)].copy_(old)
        self._add_tables[point] = table
        self._set_fields("ADD_TABLE", [point], [table])
        self._flags[point] |= Column.ADD.flag

    def _set_fields(self, name: str, points: Iterable[int], tables: Iterable[torch.Tensor]) -> None:
        """Where each of some points finds its table."""
        at = np.array(list(points), np.int64)
        field = stage_field(name) + at % STAGES
        self._fields[at // STAGES, field] = [table.data_ptr() for table in tables]
        self._stale = True
