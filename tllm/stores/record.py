"""A record: what one sample of one request captured, on its way to disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from numbers import Integral
from operator import index
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import require_one_of, whole_number
from tllm.stores.error import plain_text
from tllm.stores.format import (
    Identity,
    canonical_json,
    checked_text,
    dtype_name,
    parse_json,
)

RecordStatus = Literal["ok", "partial_error"]

PositionArray = npt.NDArray[np.int32]

_INT32_MAX = 2**31 - 1

_SMALL = 1 << 20
"""Bytes of a record whose arrays are stacked for less work."""


class ArrayKey(NamedTuple):
    """Which array of a record: a hook point's name, and the layer (None for `lm_head_in`)."""

    hook: str
    layer: int | None

    @property
    def name(self) -> str:
        """`post_block.12`, or `lm_head_in`."""
        return self.hook if self.layer is None else f"{self.hook}.{self.layer}"

    @classmethod
    def of(cls, hook: str | HookPoint, layer: int | None) -> ArrayKey:
        """The key, of a hook point or its alias; `ValueError` for what is none."""
        try:
            return _array_key(hook, layer)
        except TypeError:  # it cannot be hashed
            raise ValueError(
                f"hook={hook!r:.60} and layer={layer!r:.60} name no array; give the name of one "
                "hook point, and the number of one layer"
            ) from None


@lru_cache(4096, typed=True)
def _array_key(hook: str | HookPoint, layer: int | None) -> ArrayKey:
    point = HookPoint.parse(hook)
    if not point.has_layer:
        if layer is not None:
            raise ValueError(f"layer={layer!r} given with {point}, which has no layer: give None")
        return ArrayKey(point.value, None)
    if isinstance(layer, bool) or not isinstance(layer, Integral) or not 0 <= layer <= _INT32_MAX:
        raise ValueError(
            f"layer={layer!r} is not a layer of {point}; give the layer's number from 0 on "
            "(negative ones must be resolved by who knows the model)"
        )
    return ArrayKey(point.value, int(layer))


@dataclass(frozen=True, eq=False)
class Rows:
    """What was captured at one hook point of one layer.

    Attributes:
        tensor: `[rows, hidden]` on the CPU, of any dtype in `tllm.stores.format`. It is not copied
            (unless it is not contiguous), and must not change before it is written.
        positions: `[rows]`, position of each row's token in the sequence, ascending; for a
            reduction, of the last token that went into the row.
    """

    tensor: torch.Tensor
    positions: torch.Tensor | npt.NDArray[Any] | Sequence[int]


@dataclass(frozen=True, eq=False)
class StackedRows:
    """What was captured at several hook points and layers, all for the same tokens.

    As `Rows` for each of them, at a fraction of the work for small records.

    Attributes:
        places: `(hook, layer)` of each, as in `Record.arrays`.
        tensor: `[rows, places, hidden]` on the CPU; as in `Rows`.
        positions: `[rows]`, as in `Rows`.
    """

    places: tuple[tuple[str | HookPoint, int | None], ...]
    tensor: torch.Tensor
    positions: torch.Tensor | npt.NDArray[Any] | Sequence[int]


@dataclass(frozen=True)
class RecordMeta:
    """Everything about a record except its rows.

    Attributes:
        request_id: the caller's id, any text without control characters.
        tag: the caller's grouping; empty for none.
        sample_index: which of the n samples, from 0.
        prompt_len: number of prompt tokens.
        token_ids: of prompt and output, as far as they are known.
        model: name of the model.
        versions: of libraries; those of tllm and torch are added in the store when missing.
        reduction: how rows were reduced (`none`, `mean`, `max`, `last`), for the reader.
        status: `ok`, or `partial_error`: rows are missing, `error` says why.
        error: empty if and only if the status is `ok`.
        metadata: plain JSON data of the caller.
        record_id: unique to this capture of this sample, and shared by its pipeline stages; made
            up when empty.
        stage: pipeline stage that captured these layers, from 0.
        num_stages: how many stages write a part of the record; a reader joins them.
        created: UTC, ISO 8601; now when empty.
    """

    request_id: str
    tag: str = ""
    sample_index: int = 0
    prompt_len: int = 0
    token_ids: Sequence[int] = ()
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reduction: str = "none"
    status: RecordStatus = "ok"
    error: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    record_id: str = ""
    stage: int = 0
    num_stages: int = 1
    created: str = ""

    def __post_init__(self) -> None:
        """Check and normalise; raises `ValueError` naming the field."""
        fill: dict[str, Any] = {
            name: checked_text(name, getattr(self, name))
            for name in ("request_id", "tag", "record_id", "model", "reduction", "created")
        }
        fill["record_id"] = fill["record_id"] or _new_id()
        fill["created"] = fill["created"] or utc_now()
        fill["token_ids"] = _whole_numbers("token_ids", self.token_ids)
        for name in ("sample_index", "prompt_len", "stage", "num_stages"):
            fill[name] = whole_number(getattr(self, name), f"{name}=", 0, _INT32_MAX)
        if self.stage >= self.num_stages:
            raise ValueError(
                f"stage={self.stage} of num_stages={self.num_stages} is not allowed; stages count "
                "from 0 to num_stages - 1"
            )
        require_status(self.status, self.error)
        fill["error"] = plain_text(self.error)
        for name in ("versions", "metadata"):
            # A copy, which the caller cannot change any more.
            fill[name] = parse_json(require_json(name, getattr(self, name)).encode())
        for name, value in fill.items():
            object.__setattr__(self, name, value)

    @property
    def identity(self) -> Identity:
        """What may exist once: `(tag, request_id, sample_index, stage)`."""
        return self.tag, self.request_id, self.sample_index, self.stage


Arrays = Mapping[tuple[str | HookPoint, int | None], Rows] | StackedRows | Sequence[StackedRows]


@dataclass(frozen=True, eq=False)
class Record:
    """A whole record, for `StoreWriter.submit`.

    Attributes:
        meta: what it is.
        arrays: rows by `(hook, layer)`; hook points by name or alias, layer None for `lm_head_in`.
            Or all of them stacked, in one piece or several of the same places, in order.
    """

    meta: RecordMeta
    arrays: Arrays


StackKind = tuple[tuple[ArrayKey, ...], str, int]
"""Arrays, dtype and width of a stack."""


@dataclass(eq=False, slots=True)  # not frozen: that costs more than all checks together
class CheckedStack:
    """Rows of one array or several that were found fit to be stored; a single one is a stack of
    one.

    Attributes:
        tensor: `[rows, arrays, hidden]`, contiguous, on the CPU.
        dtype: by safetensors' name.
        positions: `[rows]` int32, ascending.
    """

    keys: tuple[ArrayKey, ...]
    tensor: torch.Tensor
    dtype: str
    positions: PositionArray

    @property
    def rows(self) -> int:
        """Number of rows of each array."""
        return self.tensor.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions."""
        return self.tensor.nbytes + len(self.keys) * self.positions.nbytes

    @classmethod
    def of(cls, given: StackedRows, after: int = -1) -> CheckedStack:
        """Check stacked rows, whose positions are above `after`; raises `ValueError` saying what is
        wrong with them."""
        keys, tensor = keys_of(given), given.tensor
        name = f"{keys[0].name} and {len(keys) - 1} more"
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3 or 0 in tensor.shape[1:]:
            found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ValueError(f"{name}: {found} was given; give a tensor [rows, places, hidden]")
        if tensor.shape[1] != len(keys):
            raise ValueError(
                f"{name}: a tensor {list(tensor.shape)} was given for {len(keys)} places; give "
                "[rows, places, hidden]"
            )
        return cls._checked(name, keys, tensor, checked_positions(name, given.positions, after))

    @classmethod
    def single(cls, key: ArrayKey, tensor: torch.Tensor, positions: PositionArray) -> CheckedStack:
        """Check the rows of one array; their positions come from `checked_positions`.

        Raises `ValueError` naming the array and what is wrong with it.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.shape[1] == 0:
            found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ValueError(f"{key.name}: {found} was given; give a tensor [rows, hidden]")
        return cls._checked(key.name, (key,), tensor[:, None], positions)

    @classmethod
    def _checked(
        cls, name: str, keys: tuple[ArrayKey, ...], tensor: torch.Tensor, positions: PositionArray
    ) -> CheckedStack:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: a {tensor.layout} tensor on {tensor.device} was given; give a plain "
                "tensor on the CPU"
            )
        try:
            dtype = dtype_name(tensor.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if len(positions) != len(tensor):
            raise ValueError(
                f"{name}: {len(positions)} positions were given for {len(tensor)} rows; give "
                "one for each"
            )
        # Each of these calls costs microseconds, and there is one for every row of a decode step.
        if tensor.requires_grad:
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return cls(keys, tensor, dtype, positions)

    @property
    def kind(self) -> StackKind:
        """What stacks must have in common to follow each other: arrays, dtype, width."""
        return self.keys, self.dtype, self.tensor.shape[2]

    @property
    def what(self) -> str:
        """For messages."""
        names = ", ".join(key.name for key in self.keys)
        return f"{self.dtype} rows of {self.tensor.shape[2]} of {names}"

    def unstacked(self) -> list[CheckedStack]:
        """Each array by itself; its rows are copied, unless it is alone."""
        if len(self.keys) == 1:
            return [self]
        return [
            CheckedStack((key,), self.tensor[:, i : i + 1].contiguous(), self.dtype, self.positions)
            for i, key in enumerate(self.keys)
        ]


def keys_of(given: StackedRows) -> tuple[ArrayKey, ...]:
    """The arrays of stacked rows; `ValueError` for what names none, or is not stacked."""
    if not isinstance(given, StackedRows):
        raise ValueError(f"{type(given).__name__} was given as a stack; give StackedRows")
    try:
        return _keys(given.places)
    except TypeError:  # a list cannot be looked up
        return _keys.__wrapped__(given.places)


@lru_cache(4096)
def _keys(places: tuple[tuple[str | HookPoint, int | None], ...]) -> tuple[ArrayKey, ...]:
    try:
        pairs = [(hook, layer) for hook, layer in places]
    except (TypeError, ValueError):
        raise ValueError(
            f"places={places!r:.60} is not allowed; give the hook point and layer of each array, "
            "such as (('post_block', 12),)"
        ) from None
    keys = tuple(ArrayKey.of(hook, layer) for hook, layer in pairs)
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key.name} is given twice; give it once")
    if not keys:
        raise ValueError("places=() is empty; give the hook point and layer of each array")
    return keys


def checked_positions(
    name: str, given: torch.Tensor | npt.NDArray[Any] | Sequence[int], after: int = -1
) -> PositionArray:
    """Positions `[rows]` as little-endian int32.

    Raises `ValueError` naming the array unless they are integers that ascend, all above `after`.
    """
    try:
        wide = np.asarray(given)
    except (TypeError, ValueError) as error:  # on a device, of a type that numpy lacks, or ragged
        raise ValueError(
            f"{name}: positions={given!r:.60} are not allowed ({error}); give a list of integers, "
            "one for each row"
        ) from None
    if wide.ndim != 1 or (len(wide) and wide.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: positions of shape {list(wide.shape)} and type {wide.dtype} were given; give "
            "a list of integers, one for each row"
        )
    wide = wide.astype(np.int64)
    if len(wide) and (wide[0] <= after or wide[-1] > _INT32_MAX or (np.diff(wide) <= 0).any()):
        raise ValueError(
            f"{name}: positions must ascend, from {after + 1} to at most {_INT32_MAX}; got "
            f"{wide[:8].tolist()}{'...' if len(wide) > 8 else ''}"
        )
    return wide.astype("<i4")


def checked_arrays(record: Record) -> list[CheckedStack]:
    """All arrays of a record; `ValueError` for what is no record, and when an array is not fit, is
    given twice, or does not follow the one before."""
    if not isinstance(record, Record):
        raise ValueError(f"record={record!r:.60} is {type(record).__name__}; give a Record")
    if isinstance(record.arrays, Mapping):
        return _checked_singles(record.arrays)
    pieces = [record.arrays] if isinstance(record.arrays, StackedRows) else record.arrays
    if not isinstance(pieces, Iterable):
        raise ValueError(
            f"arrays={pieces!r:.60} is {type(pieces).__name__}; give Rows by (hook, layer), "
            "StackedRows, or a list of StackedRows"
        )
    checked: list[CheckedStack] = []
    after = -1
    for piece in pieces:
        stack = CheckedStack.of(piece, after)
        if checked and stack.kind != checked[0].kind:
            raise ValueError(
                f"a piece of {stack.what} was given after one of {checked[0].what}; all pieces of "
                "a record have the same places, dtype and width"
            )
        after = int(stack.positions[-1]) if stack.rows else after
        checked.append(stack)
    if not checked:
        raise ValueError("no pieces were given; give at least one, which may have no rows")
    return [stack for stack in checked if stack.rows] or checked[:1]


def _checked_singles(
    arrays: Mapping[tuple[str | HookPoint, int | None], Rows],
) -> list[CheckedStack]:
    checked: dict[ArrayKey, CheckedStack] = {}
    # Arrays mostly share their positions: they are checked, and stored, once.
    positions: dict[int, PositionArray] = {}
    for place, rows in arrays.items():
        if not isinstance(place, tuple) or len(place) != 2:
            raise ValueError(
                f"arrays has the key {place!r:.60}; give (hook, layer), such as ('post_block', 12)"
            )
        key = ArrayKey.of(*place)
        if not isinstance(rows, Rows):
            raise ValueError(f"{key.name}: {type(rows).__name__} was given; give Rows")
        if key in checked:
            raise ValueError(f"{key.name} is given twice, once by its alias; give it once")
        known = positions.get(id(rows.positions))
        if known is None:
            known = positions[id(rows.positions)] = checked_positions(key.name, rows.positions)
        checked[key] = CheckedStack.single(key, rows.tensor, known)
    singles = list(checked.values())
    first = singles[0] if singles else None
    if first is None or len(singles) * first.nbytes > _SMALL:
        return singles
    # Small rows of the same tokens are less work together, though they are copied for it.
    alike = first.dtype, first.tensor.shape, id(first.positions)
    if any((s.dtype, s.tensor.shape, id(s.positions)) != alike for s in singles):
        return singles
    tensor = torch.cat([single.tensor for single in singles], 1)
    return [CheckedStack(tuple(checked), tensor, first.dtype, first.positions)]


def require_status(status: str, error: str) -> None:
    """`ValueError` unless the status is known and has an error exactly when it should."""
    require_one_of("status", status, RecordStatus)
    if not isinstance(error, str) or (status == "ok") == bool(error):
        raise ValueError(
            f"error={error!r} does not go with status={status!r}; a partial_error says in error "
            "what is missing, and ok has none"
        )


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, given))
    except TypeError:
        raise ValueError(f"{name}={given!r:.60} is not allowed; give a list of integers") from None


def require_json(name: str, value: Mapping[str, Any]) -> str:
    """`value` as canonical JSON; `ValueError` when it is no object of plain data."""
    if value == {}:
        return "{}"
    try:
        text = canonical_json(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be plain JSON data: {error}") from None
    if any(not isinstance(key, str) for key in value):
        raise ValueError(f"{name} has keys that are no strings; JSON knows only strings")
    return text


def _new_id() -> str:
    """An id that no other process makes either, without asking the system for each."""
    return f"{_process_id(os.getpid())}-{next(_NUMBERS):x}"


@lru_cache(1)
def _process_id(pid: int) -> str:
    # By process id, because a forked process must not go on with its parent's.
    return uuid4().hex


_NUMBERS = itertools.count()


def utc_now() -> str:
    """The time as sidecars have it."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
