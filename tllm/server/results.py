"""Results of consumers as JSON, and large ones as files that are fetched by reference."""

from __future__ import annotations

import base64
import math
import secrets
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tllm.ports import Payload
from tllm.ports.payload import reason_of

_NAME_BYTES = 16
_SUFFIXES = (".safetensors", ".partial")


class NotKeptError(Exception):
    """A result cannot be kept until it is fetched; the message says why."""


class CaptureFiles:
    """Results that wait to be fetched: a file each, with expiry. Processes may share a folder, and
    what else is in it stays.

    Args:
        seconds: how long a file is kept.
        mib: the most that all of them take; the oldest go first.
    """

    def __init__(self, folder: Path, seconds: float, mib: int) -> None:
        self.folder = folder
        self._seconds = seconds
        self._bytes = mib * 2**20
        self._make_folder()
        self.sweep()  # what a server before left

    def put(
        self, tensors: Mapping[str, torch.Tensor], beside: dict[str, int] | None = None
    ) -> tuple[str, float]:
        """Keep tensors; their id, and when they expire (seconds since the epoch).

        Args:
            beside: bytes by id of what the same answer refers to, which stays; this is added to it.

        Raises `NotKeptError` for more than all results may take, and where the disk takes no more.
        """
        beside = {} if beside is None else beside
        total, others = sum(tensor.nbytes for tensor in tensors.values()), sum(beside.values())
        if total + others > self._bytes:
            before = f", others of this answer {others / 2**20:.1f}" if others else ""
            raise NotKeptError(
                f"it has {total / 2**20:.1f} MiB{before}, and results that are fetched by "
                f"reference may have {self._bytes / 2**20:.0f} MiB together (captures_mib); ask "
                "for fewer rows"
            )
        name = secrets.token_hex(_NAME_BYTES)
        partial = self.folder / f"{name}.partial"
        # Copies: arrays of one result may be one, such as the positions of several layers.
        copies = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        try:
            self._make_folder()  # where somebody has cleaned up
            save_file(copies, partial)
            partial.rename(self._path(name))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink()
            raise NotKeptError(f"{self.folder} does not take it: {error}") from error
        beside[name] = total
        self.sweep(kept=beside)
        return name, time.time() + self._seconds

    def find(self, name: str) -> Path | None:
        """The file of an id; None for one that is not known, or has expired."""
        if not _is_name(name):
            return None
        path = self._path(name)
        try:
            return path if path.stat().st_mtime + self._seconds > time.time() else None
        except FileNotFoundError:
            return None

    def sweep(self, kept: Container[str] = ()) -> None:
        """Remove what has expired, and the oldest of what is too much, but not those `kept`."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix not in _SUFFIXES or not _is_name(path.stem):
                continue
            try:
                found.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another process was faster
                continue
        total = sum(size for _, size, _ in found)
        for modified, size, path in sorted(found):
            if modified + self._seconds > time.time() and total <= self._bytes:
                break
            if path.stem not in kept:
                path.unlink(missing_ok=True)
                total -= size

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _is_name(text: str) -> bool:
    """Whether it may be the id of a result."""
    return len(text) == 2 * _NAME_BYTES and set(text) <= set("0123456789abcdef")


def as_json(
    results: Mapping[str, Any],
    files: CaptureFiles,
    inline_bytes: int,
    beside: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Results of consumers by id, as they stand in a response.

    Args:
        beside: what the response refers to already, as of `CaptureFiles.put`.
    """
    beside = {} if beside is None else beside
    return {name: _result(result, files, inline_bytes, beside) for name, result in results.items()}


def _result(
    result: Any, files: CaptureFiles, inline_bytes: int, beside: dict[str, int]
) -> dict[str, Any]:
    status, error, payload = result.status, result.error, None
    try:
        payload = _payload(result.payload, files, inline_bytes, beside)
    except Exception as fault:  # a consumer's result may be anything, and do anything
        told = str(fault) if isinstance(fault, (TypeError, NotKeptError)) else reason_of(fault)
        status = "error"
        error = "; ".join(filter(None, (error, f"the result cannot be written: {told}")))
    if error is not None:
        error = error.encode("utf-8", "backslashreplace").decode()
    return {"status": status, "error": error, "payload": payload}


def _payload(payload: Any, files: CaptureFiles, inline_bytes: int, beside: dict[str, int]) -> Any:
    plain = _plain(payload)
    tensors: dict[str, torch.Tensor] = {}
    contents = _named(plain, "", tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) <= inline_bytes:
        return _encoded(plain)
    name, expires = files.put(tensors, beside)
    return {
        "url": f"/v1/captures/{name}",
        "expires": expires,
        "format": "safetensors",
        "contents": contents,
    }


def in_response(value: Any) -> Any:
    """Anything as it stands in a response. Raises `TypeError` for what cannot be written."""
    return _encoded(_plain(value))


def _plain(value: Any) -> Any:
    """Mappings, lists, scalars and CPU tensors."""
    if isinstance(value, str):
        return _written(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):  # JSON has no numbers that are not finite
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Payload):
        return _plain(value.written())
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().cpu()
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Mapping):
        return {_written(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(each) for each in value]
    raise TypeError(
        f"it holds a {type(value).__name__}; return plain data, arrays, tensors, or a Payload with "
        "written()"
    )


def _written(text: str) -> str:
    """A text as UTF-8 has it. Raises `TypeError` for one that it has not."""
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        raise TypeError(f"its text {text!r:.60} has lone surrogates; leave them out") from None


def _named(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value with names in the place of its tensors, which go into `tensors`."""
    if isinstance(value, torch.Tensor):
        name = path or "tensor"
        while name in tensors:
            name += "_"
        tensors[name] = value
        return {"name": name, "dtype": _dtype(value), "shape": list(value.shape)}
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        return {key: _named(each, f"{prefix}{key}", tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each, f"{prefix}{i}", tensors) for i, each in enumerate(value)]
    return value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _encoded(value: Any) -> Any:
    """Tensors as base64 of their bytes, little-endian, with dtype and shape."""
    if isinstance(value, torch.Tensor):
        # Of no elements a view may have any stride, which bytes of them must not.
        flat = value.contiguous().reshape(-1) if value.numel() else value.new_empty(0)
        data = flat.view(torch.uint8).numpy().tobytes()
        return {
            "dtype": _dtype(value),
            "shape": list(value.shape),
            "data": base64.b64encode(data).decode(),
        }
    if isinstance(value, dict):
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    return value
