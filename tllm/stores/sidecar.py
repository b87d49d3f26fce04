"""The JSON that says whose the rows of a payload are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from tllm.stores.dtype import ITEM_SIZES
from tllm.stores.record import canonical_json

FORMAT = "tllm-store"
VERSION = 1

POSITION_BYTES = 4
"""Of one position, an `I32`."""


class Entry(Protocol):
    """Pieces of a record in one payload file."""

    @property
    def file(self) -> str:
        """The payload, relative to the sidecar's folder."""

    @property
    def rows(self) -> int:
        """Of all arrays together."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions."""

    def encode(self) -> str:
        """As canonical JSON objects with commas between."""


@dataclass(slots=True)  # not frozen: there is one for each array of each record
class PieceEntry:
    """Consecutive rows of one array of a record in one payload file.

    Attributes:
        hook, layer: which array.
        dtype: by safetensors' name.
        rows, hidden: shape.
        file: the payload, relative to the sidecar's folder, with `/`.
        tensor: name of the tensor `[>= rows, hidden]` in it.
        row_start: first row in `tensor`.
        position_start: first element in the file's tensor `positions`.
        crc32: of the rows' bytes followed by those of their positions.
    """

    hook: str
    layer: int | None
    dtype: str
    rows: int
    hidden: int
    file: str
    tensor: str
    row_start: int
    position_start: int
    crc32: int

    def encode(self) -> str:
        """As canonical JSON. All texts in it are of this package's making: nothing to escape."""
        layer = "null" if self.layer is None else self.layer
        return (
            f'{{"crc32":{self.crc32},"dtype":"{self.dtype}","file":"{self.file}",'
            f'"hidden":{self.hidden},"hook":"{self.hook}","layer":{layer},'
            f'"position_start":{self.position_start},"row_start":{self.row_start},'
            f'"rows":{self.rows},"tensor":"{self.tensor}"}}'
        )

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions."""
        return self.rows * (self.hidden * ITEM_SIZES[self.dtype] + POSITION_BYTES)


@dataclass(frozen=True)
class SidecarLine:
    """One record, or one part of a record that was too long for one shard.

    The fields are described in doc/reference/store-format.md.
    """

    record_id: str
    request_id: str
    tag: str
    sample_index: int
    generation: int
    replaces: bool
    stage: int
    num_stages: int
    part: int
    last: bool
    status: str
    error: str
    prompt_len: int
    token_ids: Sequence[int]
    model: str
    versions: Mapping[str, str]
    reduction: str
    metadata: Mapping[str, Any]
    created: str
    layout: str
    writer: str
    arrays: Sequence[Entry]

    @property
    def pieces(self) -> list[PieceEntry]:
        """The arrays of a line that was read."""
        return [entry for entry in self.arrays if isinstance(entry, PieceEntry)]

    def encode(self) -> bytes:
        """The line, with its checksum and a line feed."""
        data = {name: getattr(self, name) for name in _LINE_FIELDS if name != "arrays"}
        data |= {
            "format": FORMAT,
            "version": VERSION,
            "token_ids": list(self.token_ids),
        }
        # "arrays" sorts before all other fields.
        arrays = ",".join(piece.encode() for piece in self.arrays)
        text = f'{{"arrays":[{arrays}],{canonical_json(data)[1:]}'.encode()
        return b'%s,"crc32":%d}\n' % (text[:-1], zlib.crc32(text))

    @classmethod
    def decode(cls, line: bytes, *, checksum: bool) -> SidecarLine:
        """Read a line; `ValueError` saying what is wrong with it.

        Args:
            checksum: compare the checksum too.
        """
        try:
            data = json.loads(line)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a sidecar of {FORMAT}")
        if data.get("version") != VERSION:
            raise ValueError(
                f"format version {data.get('version')!r}; this tLLM reads version {VERSION}: "
                "update it"
            )
        if checksum:
            wanted = data.pop("crc32", None)
            if zlib.crc32(canonical_json(data).encode()) != wanted:
                raise ValueError("its checksum does not match")
        try:
            values = {name: data[name] for name in _LINE_FIELDS}
            values["arrays"] = [PieceEntry(**piece) for piece in data["arrays"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or unknown: {error}") from None
        parsed = cls(**values)
        parsed._check()
        return parsed

    def _check(self) -> None:
        for name, kind in _LINE_TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} has the wrong type")
            if kind is int and not 0 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range")
        for piece in self.pieces:
            sizes = piece.rows, piece.hidden, piece.row_start, piece.position_start, piece.crc32
            texts = piece.hook, piece.file, piece.tensor
            if (
                not all(isinstance(size, int) and 0 <= size < 2**48 for size in sizes)
                or not all(isinstance(text, str) for text in texts)
                or not (piece.layer is None or piece.layer in range(2**31))
                or piece.dtype not in ITEM_SIZES
            ):
                raise ValueError(f"an array is described wrongly: {piece}")
            if piece.file.startswith("/") or ".." in piece.file.split("/"):
                raise ValueError(f"its payload {piece.file!r} lies outside of the store")


_LINE_FIELDS = tuple(field.name for field in fields(SidecarLine))
_TEXTS = ("record_id", "request_id", "tag", "status", "error", "model", "reduction", "created")
_NUMBERS = ("sample_index", "generation", "stage", "num_stages", "part", "prompt_len")
_LINE_TYPES: dict[str, type] = {
    **dict.fromkeys((*_TEXTS, "layout", "writer"), str),
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(("versions", "metadata"), dict),
    **dict.fromkeys(("token_ids", "arrays"), list),
    **dict.fromkeys(("last", "replaces"), bool),
}
