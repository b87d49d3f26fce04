"""What is on disk: where, under which names, and what a sidecar says.

    ROOT/tllm-store.json                 the marker: format and version
    ROOT/index.parquet                   optional: all sidecars as a table (`catalog`)
    ROOT/writers/WRITER/                 one folder for each writer, locked while it lives
        staging/                         unfinished files, not part of the store
        sharded/shard-N.safetensors      payload: rows of many records, and their `positions`
        sharded/shard-N.jsonl            its sidecar: a line for each record (or part of one)
        packed/TAG/NAME.safetensors      payload of one record; NAME.json is its sidecar
        per_file/TAG/NAME/ARRAY.safetensors    one array of one record; NAME.json beside NAME/

    a line   = {"arrays":[piece, ...], "record_id":..., "part":..., "last":..., ..., "crc32":...}
    a piece  = file, tensor, row_start, rows, position_start: consecutive rows of one array
    a record = the lines with its id and names (tag, request id, sample), by stage and part; whole
               when each stage has its last part

doc/reference/store-format.md has every field.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import torch

from tllm.stores.error import StoreError, plain_text

FORMAT = "tllm-store"
VERSION = 1

Layout = Literal["per_file", "packed", "sharded"]

Identity = tuple[str, str, int, int]
"""What a record is called: tag, request id, sample index and pipeline stage."""

MARKER = "tllm-store.json"
INDEX = "index.parquet"
WRITERS = "writers"
PAYLOAD_SUFFIX = ".safetensors"
POSITIONS = "positions"
"""The tensor of a payload that has the positions of its rows."""

POSITION_BYTES = 4
"""Of one position, an `I32`."""

MAX_TEXT_BYTES = 1024
"""Longest request id, tag or writer id, in UTF-8."""

_MAX_ROOT = 3300
"""Longest path of a root, in bytes: what lies below stays within the 4096 of Linux."""

_MAX_NAME = 160
"""Longest file name made of one id; what is appended to it stays below the usual 255."""

_UNTAGGED = "@untagged"  # `file_name` never gives an @
_SIDECARS = {"sharded": ".jsonl", "packed": ".json", "per_file": ".json"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))]
)


# -- element types ---------------------------------------------------------------------------------

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What rows may be made of, by safetensors' names."""

ITEM_SIZES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
"""Bytes of one element."""

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_WITHOUT_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""What numpy lacks, with a type of the same size."""


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name; `ValueError` for what a store does not keep."""
    try:
        return _DTYPE_NAMES[dtype]
    except KeyError:
        allowed = ", ".join(str(known) for known in _DTYPE_NAMES)
        raise ValueError(
            f"rows of {dtype} cannot be stored; convert them to one of {allowed}"
        ) from None


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor as numpy: shared memory, except where numpy has no such type.

    bfloat16 and both float8 types become float32, in which all of their values are exact.
    """
    if tensor.dtype in _WITHOUT_NUMPY:
        tensor = tensor.to(torch.float32)
    return tensor.numpy()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.dtype in _WITHOUT_NUMPY:
        tensor = tensor.view(_WITHOUT_NUMPY[tensor.dtype])
    return memoryview(tensor.numpy()).cast("B")


# -- names -----------------------------------------------------------------------------------------


def normal_text(text: str) -> str:
    """`text` in Unicode's normal form C, in which all texts of a store are."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def checked_text(field: str, text: str) -> str:
    """`text` in Unicode's normal form C.

    Raises `ValueError` that names `field` for what cannot be an id: no string, more than
    `MAX_TEXT_BYTES` in UTF-8, control characters, or lone surrogates.
    """
    if not isinstance(text, str):
        raise ValueError(f"{field}={text!r} is not allowed; give a string")
    if text.isascii() and text.isprintable() and len(text) <= MAX_TEXT_BYTES:
        return text
    normal = normal_text(text)
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in normal):
        raise ValueError(
            f"{field}={text!r} has control characters or lone surrogates; leave them out"
        )
    if (size := len(normal.encode())) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{field} has {size} bytes in UTF-8; at most {MAX_TEXT_BYTES} are allowed: "
            "give a shorter one, and put the rest into metadata"
        )
    return normal


def file_name(text: str) -> str:
    """A file name for `text` that no other text gets, on any usual file system.

    Lower-case letters, digits, `_`, `-` and inner dots stand for themselves; an upper-case letter
    is `+` and its lower case (file systems may ignore case); every other byte of UTF-8 is `%xx`.
    The first character is escaped too where a system reserves the name (`con`, `nul.txt`), and
    dots at either end are. No text is the name `%`. What would be longer than 160 characters is
    cut to 120 and gets `~` and the first 128 bits of its SHA-256: there, and only there, different
    names rest on that hash.
    """
    if not text:
        return "%"
    last = len(text) - 1
    reserved = text.partition(".")[0].lower() in _DEVICES
    name = "".join(
        _escape(c, plain=not (i == 0 and reserved) and not (c == "." and i in (0, last)))
        for i, c in enumerate(text)
    )
    if len(name) > _MAX_NAME:
        return f"{name[:120]}~{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return name


def _escape(character: str, plain: bool) -> str:
    if plain and character in _PLAIN:
        return character
    if plain and "A" <= character <= "Z":
        return f"+{character.lower()}"
    return "".join(f"%{byte:02x}" for byte in character.encode())


def root_path(root: str | bytes | os.PathLike[Any]) -> Path:
    """The folder of a store, absolute, `~` being the home folder; `ValueError` for what names
    none."""
    if not isinstance(root, (str, bytes, os.PathLike)):
        raise ValueError(
            f"root={root!r:.60} is {type(root).__name__}; give a folder as text or a path (in a "
            'spec of a consumer, root="2024" for what would be a number)'
        )
    given = os.path.expanduser(os.fsdecode(root))
    if not given or "\0" in given:
        raise ValueError(f"root={given!r} is not allowed; give a folder")
    path = Path(given).absolute()
    if (size := len(os.fsencode(path))) > _MAX_ROOT:
        raise ValueError(
            f"root has {size} bytes, and at most {_MAX_ROOT} are allowed, since paths below it are "
            "longer; give a shorter one, or a symbolic link to it"
        )
    return path


# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriterPaths:
    """The folder of one writer under a root: nobody else writes in it."""

    root: Path
    writer_id: str

    @cached_property
    def folder(self) -> Path:
        return self.root / WRITERS / file_name(self.writer_id)

    @property
    def lock(self) -> Path:
        """Locked while the writer lives."""
        return self.folder / "lock"

    @cached_property
    def staging(self) -> Path:
        return self.folder / "staging"

    def shard(self, number: int) -> Path:
        """A shard's payload; its sidecar has the suffix `.jsonl`."""
        return self.folder / "sharded" / f"shard-{number:08d}{PAYLOAD_SUFFIX}"

    def next_shard(self) -> int:
        """The first number above all that are taken."""
        taken = [int(name[6:14]) for name in self._shard_files() if name[6:14].isdigit()]
        return max(taken, default=-1) + 1

    def shards(self) -> list[Path]:
        """The payloads that are there."""
        folder = self.folder / "sharded"
        return [folder / name for name in self._shard_files() if name.endswith(PAYLOAD_SUFFIX)]

    def _shard_files(self) -> list[str]:
        try:
            names = os.listdir(self.folder / "sharded")
        except FileNotFoundError:
            return []
        return [name for name in names if name.startswith("shard-")]

    def sidecar(self, layout: Layout, identity: Identity, generation: int) -> Path:
        """The sidecar of one record; payloads lie beside it, under the same stem."""
        tag, request_id, sample_index, stage = identity
        stem = f"{file_name(request_id)}@{sample_index}"
        if stage:
            stem += f"-stage{stage}"
        if generation > 1:
            stem += f"-{generation}"
        return self.folder / layout / (file_name(tag) if tag else _UNTAGGED) / f"{stem}.json"


def sidecars(root: Path) -> dict[str, tuple[int, int]]:
    """All sidecars under a root, sorted: path relative to it, to size and time of modification, ns.

    A file that disappears meanwhile is left out.

    Raises:
        StoreError: a folder cannot be read.
    """
    found: dict[str, tuple[int, int]] = {}
    try:
        for writer in _entries(root / WRITERS):
            for layout, suffix in _SIDECARS.items():
                folder = f"{WRITERS}/{writer}/{layout}"
                inner = [""] if layout == "sharded" else [f"/{t}" for t in _entries(root / folder)]
                for place in inner:
                    for name in _entries(root / f"{folder}{place}", suffix):
                        path = f"{folder}{place}/{name}"
                        with contextlib.suppress(FileNotFoundError):
                            state = os.stat(root / path)
                            found[path] = state.st_size, state.st_mtime_ns
    except OSError as error:
        raise StoreError.from_os_error(f"{str(root)!r} cannot be read", error) from None
    return dict(sorted(found.items()))


def _entries(folder: Path, suffix: str | None = None) -> list[str]:
    """The folders in a folder; with a suffix, what ends so."""
    try:
        with os.scandir(folder) as entries:
            return [
                entry.name
                for entry in entries
                if (entry.is_dir(follow_symlinks=False) if suffix is None else True)
                and entry.name.endswith(suffix or "")
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- JSON ------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """One line of ASCII with sorted keys: the same data gives the same text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def parse_json(data: bytes) -> Any:
    """What is in a file; `ValueError` for whatever is no JSON."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def marker_text() -> bytes:
    return canonical_json({"format": FORMAT, "version": VERSION}).encode() + b"\n"


def require_marker(root: Path) -> None:
    """`StoreError` unless a folder is a store that this tLLM can read."""
    path = root / MARKER
    try:
        marker = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(
            f"{str(root)!r} is no store: it has no {MARKER}; give the folder that was the root of "
            "a StoreWriter",
            "missing",
        ) from None
    except OSError as error:
        raise StoreError.from_os_error(f"{str(root)!r} cannot be read", error) from None
    except ValueError as error:
        raise StoreError(f"{str(path)!r} is no JSON: {error}", "damaged") from None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise StoreError(f"{str(path)!r} is not the marker of a {FORMAT}", "damaged")
    if marker.get("version") != VERSION:
        raise StoreError(
            f"{str(path)!r} says format version {marker.get('version')!r}; this tLLM reads version "
            f"{VERSION}: update it",
            "damaged",
        )


@dataclass(slots=True)  # not frozen: there is one for each array of each record
class PieceEntry:
    """Consecutive rows of one array of a record in one payload file, as a sidecar has them.

    Attributes:
        hook, layer: which array.
        dtype: by safetensors' name.
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

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions."""
        return self.rows * (self.hidden * ITEM_SIZES[self.dtype] + POSITION_BYTES)

    def check(self) -> None:
        """`ValueError` unless all fields have their types and ranges."""
        sizes = self.rows, self.hidden, self.row_start, self.position_start, self.crc32
        if (
            not all(type(size) is int and 0 <= size < 2**48 for size in sizes)
            or not all(type(text) is str for text in (self.hook, self.file, self.tensor))
            or not (self.layer is None or (type(self.layer) is int and 0 <= self.layer < 2**31))
            or type(self.dtype) is not str
            or self.dtype not in ITEM_SIZES
        ):
            raise ValueError(f"an array is described wrongly: {self}")
        if self.file.startswith("/") or ".." in self.file.split("/"):
            raise ValueError(f"its payload {self.file!r} lies outside of the store")


@dataclass(frozen=True)
class SidecarLine:
    """One record, or one part of a record that was too long for one shard.

    The fields are described in doc/reference/store-format.md; `arrays` are the pieces of a line
    that was read.
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
    arrays: Sequence[PieceEntry] = ()

    def encode(self, pieces: Iterable[str]) -> bytes:
        """The line, with its checksum and a line feed.

        Args:
            pieces: canonical JSON of each, or of several with commas between.
        """
        data = {name: getattr(self, name) for name in LINE_TYPES if name != "arrays"}
        data |= {"format": FORMAT, "version": VERSION, "token_ids": list(self.token_ids)}
        # "arrays" sorts before all other fields.
        text = f'{{"arrays":[{",".join(pieces)}],{canonical_json(data)[1:]}'.encode()
        return b'%s,"crc32":%d}\n' % (text[:-1], zlib.crc32(text))

    @classmethod
    def decode(cls, line: bytes) -> SidecarLine:
        """Read a line; `ValueError` saying what is wrong with it, its checksum among that."""
        data = parse_json(line)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a sidecar of {FORMAT}")
        if data.get("version") != VERSION:
            raise ValueError(
                f"format version {data.get('version')!r}; this tLLM reads version {VERSION}: "
                "update it"
            )
        _require_checksum(line, data)
        try:
            values = {name: data[name] for name in LINE_TYPES}
            values["arrays"] = [PieceEntry(**piece) for piece in data["arrays"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or unknown: {error}") from None
        parsed = cls(**values)
        for name, kind in LINE_TYPES.items():
            value: Any = values[name]
            fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
            if not fits:
                raise ValueError(f"{name}={value!r} has the wrong type")
            if kind is int and not 0 <= value < 2**31:
                raise ValueError(f"{name}={value!r} is out of range")
            if kind is str and plain_text(value) != value:
                raise ValueError(f"{name}={value!r} has lone surrogates")
        for piece in parsed.arrays:
            piece.check()
        return parsed


def _require_checksum(line: bytes, data: dict[str, Any]) -> None:
    """`ValueError` unless the checksum of a line is right; takes it out of `data`."""
    wanted = data.pop("crc32", None)
    # As this package writes it, at the end: the JSON need not be written again.
    head, _, _ = line.rpartition(b',"crc32":')
    if zlib.crc32(head + b"}") == wanted:
        return
    if zlib.crc32(canonical_json(data).encode()) != wanted:
        raise ValueError("its checksum does not match")


_KINDS: dict[str, type] = {"str": str, "int": int, "bool": bool, "Sequence": list, "Mapping": dict}
LINE_TYPES = {f.name: _KINDS[str(f.type).partition("[")[0]] for f in fields(SidecarLine)}
"""What a line's fields are in JSON."""
