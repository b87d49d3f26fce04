"""The header of a safetensors file: what is in it, and where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX_BYTES = 8
"""The length of the header, little endian, before the header itself."""

MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""

_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: by safetensors' name.
        begin, end: byte offsets from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(
    entries: list[TensorEntry], metadata: Mapping[str, str], capacity: int | None = None
) -> bytes:
    """Prefix and header, padded with spaces to a multiple of 8 or to exactly `capacity` bytes.

    Raises `ValueError` when it is longer than `capacity`.
    """
    # Names and dtypes are of this package's making: nothing in them is to be escaped.
    fields = [
        f'"{entry.name}":{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
        for entry in entries
    ]
    if metadata:
        named = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=True)
        fields.insert(0, f'"__metadata__":{named}')
    text = f"{{{','.join(fields)}}}".encode()
    length = -(-len(text) // 8) * 8 if capacity is None else capacity - PREFIX_BYTES
    if len(text) > length:
        raise ValueError(f"a header of {len(text)} bytes does not fit in {length}")
    return length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length)


@dataclass(frozen=True)
class Header:
    """A header that was read and found to describe its file exactly.

    Attributes:
        entries: by name.
        metadata: `__metadata__`.
        data_start: byte offset in the file at which the tensors' bytes begin.
    """

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int

    @classmethod
    def decode(cls, data: memoryview) -> Header:
        """The header of a file, given all of its bytes.

        Raises `ValueError` saying what is wrong: the tensors must cover the data without holes,
        and shapes must agree with offsets.
        """
        if len(data) < PREFIX_BYTES:
            raise ValueError(f"only {len(data)} bytes long")
        length = int.from_bytes(data[:PREFIX_BYTES], "little")
        data_start = PREFIX_BYTES + length
        if length > MAX_HEADER_BYTES or data_start > len(data):
            raise ValueError(f"its header would have {length} bytes, the file has {len(data)}")
        try:
            fields = json.loads(bytes(data[PREFIX_BYTES:data_start]))
            metadata = fields.pop("__metadata__", {})
            entries = {
                name: TensorEntry(
                    name, field["dtype"], tuple(field["shape"]), *field["data_offsets"]
                )
                for name, field in fields.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is not safetensors': {error}") from None
        end = 0
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            size = _size(entry)
            if entry.begin != end or entry.end != end + size:
                raise ValueError(
                    f"tensor {entry.name!r} lies at {entry.begin} to {entry.end}, but {size} bytes "
                    f"from {end} on were expected"
                )
            end = entry.end
        if data_start + end != len(data):
            raise ValueError(
                f"the file has {len(data)} bytes where its header says {data_start + end}"
            )
        return cls(entries, metadata, data_start)


def _size(entry: TensorEntry) -> int:
    if entry.dtype not in _SIZES:
        raise ValueError(f"tensor {entry.name!r} has the unknown dtype {entry.dtype!r}")
    size = _SIZES[entry.dtype]
    for dim in entry.shape:
        if not isinstance(dim, int) or dim < 0:
            raise ValueError(f"tensor {entry.name!r} has the shape {entry.shape}")
        size *= dim
    return size
