"""A record that was read from a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from tllm.spec.hooks import HookPoint
from tllm.stores.catalog import read_line
from tllm.stores.error import StoreError
from tllm.stores.format import TORCH_DTYPES, PieceEntry, SidecarLine, to_numpy
from tllm.stores.payload import PayloadCache
from tllm.stores.record import ArrayKey


class StoredRecord:
    """What one sample of one request captured, on disk. Rows are read when they are asked for.

    Attributes:
        request_id, tag, sample_index, prompt_len, model, reduction, created, record_id: see
            `RecordMeta`.
        num_tokens: of prompt and output, as far as they were known.
        generation: which record of its tag, request id and sample it is, from 1.
        layout, writer: how it was written, and by whom; a writer of its first stage.
        status: `ok`; `partial_error`: rows are missing, `error` says why; `pending`: its end is not
            published: it is being written, or its writer was killed.
        error: empty when the status is `ok`.
    """

    def __init__(
        self,
        root: Path,
        head: Mapping[str, Any],
        status: str,
        error: str,
        pieces: Iterable[PieceEntry],
        payloads: PayloadCache,
    ) -> None:
        self.request_id: str = head["request_id"]
        self.tag: str = head["tag"]
        self.sample_index: int = head["sample_index"]
        self.prompt_len: int = head["prompt_len"]
        self.num_tokens: int = head["num_tokens"]
        self.model: str = head["model"]
        self.reduction: str = head["reduction"]
        self.created: str = head["created"]
        self.record_id: str = head["record_id"]
        self.generation: int = head["generation"]
        self.layout: str = head["layout"]
        self.writer: str = head["writer"]
        self.status = status
        self.error = error
        self._root = root
        self._sidecar: tuple[str, int] = head["sidecar"], head["offset"]
        self._payloads = payloads
        self._pieces: dict[ArrayKey, list[PieceEntry]] = {}
        for piece in pieces:
            self._pieces.setdefault(ArrayKey(piece.hook, piece.layer), []).append(piece)

    def __repr__(self) -> str:
        return f"<StoredRecord {self.name} {self.status}, {len(self._pieces)} arrays>"

    @property
    def name(self) -> str:
        """`tag/request_id#sample`, with `~2` for the second of its kind."""
        tag = f"{self.tag}/" if self.tag else ""
        again = f"~{self.generation}" if self.generation > 1 else ""
        return f"{tag}{self.request_id}#{self.sample_index}{again}"

    @property
    def keys(self) -> list[ArrayKey]:
        """Its arrays, in the order in which they were written."""
        return list(self._pieces)

    @property
    def hooks(self) -> dict[str, list[int | None]]:
        """The layers of each hook point, ascending."""
        found: dict[str, list[int | None]] = {}
        for key in sorted(self._pieces, key=lambda key: (key.hook, key.layer or 0)):
            found.setdefault(key.hook, []).append(key.layer)
        return found

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of prompt and output, as far as they were known. Raises `StoreError`."""
        return tuple(self._line.token_ids)

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that captured it. Raises `StoreError`."""
        return dict(self._line.versions)

    @property
    def metadata(self) -> dict[str, Any]:
        """The caller's data. Raises `StoreError`."""
        return dict(self._line.metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of rows and positions."""
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    @property
    def files(self) -> list[Path]:
        """Its payload files."""
        names = dict.fromkeys(p.file for pieces in self._pieces.values() for p in pieces)
        return [self._root / name for name in names]

    def shape(self, hook: str | HookPoint, layer: int | None = None) -> tuple[int, int]:
        """`(rows, hidden)` of an array. Raises `StoreError` (`missing`) when it is not there."""
        pieces = self._find(hook, layer)
        return sum(piece.rows for piece in pieces), pieces[0].hidden

    def dtype(self, hook: str | HookPoint, layer: int | None = None) -> torch.dtype:
        """The dtype of an array. Raises `StoreError` (`missing`) when it is not there."""
        return TORCH_DTYPES[self._find(hook, layer)[0].dtype]

    def tensor(self, hook: str | HookPoint, layer: int | None = None) -> torch.Tensor:
        """Rows `[rows, hidden]` in the dtype in which they were stored.

        They share memory with the file, unless they lie in several places: then they are copied
        together. What is changed in place stays private to the process, which may see it when it
        reads this array again: `clone()` it first. Other arrays, batches, exports and `verify` have
        what is stored.

        Raises:
            ValueError: the hook point is none, or the layer does not go with it.
            StoreError: the array is not there, or a file is gone or damaged: the checksum of rows
                and positions is compared when they are read first.
        """
        pieces = self._find(hook, layer)
        if len(pieces) == 1:
            return self._payloads.get(pieces[0].file).hand_out(pieces[0])
        return torch.cat([self._payloads.get(p.file).read(p)[0] for p in pieces])

    def positions(self, hook: str | HookPoint, layer: int | None = None) -> torch.Tensor:
        """`[rows]` int32, the position of each row's token: a copy. Raises as `tensor` does."""
        pieces = self._find(hook, layer)
        return torch.cat([self._payloads.get(p.file).read(p)[1] for p in pieces])

    def numpy(self, hook: str | HookPoint, layer: int | None = None) -> npt.NDArray[Any]:
        """Rows `[rows, hidden]` as numpy; bfloat16 and float8, which numpy lacks, as float32.

        Raises as `tensor` does.
        """
        return to_numpy(self.tensor(hook, layer))

    def _find(self, hook: str | HookPoint, layer: int | None) -> Sequence[PieceEntry]:
        key = ArrayKey.of(hook, layer)
        if key not in self._pieces:
            there = ", ".join(key.name for key in self._pieces) or "none"
            raise StoreError(
                f"record {self.name} has no {key.name}; its arrays are: {there}", "missing"
            )
        return self._pieces[key]

    @cached_property
    def _line(self) -> SidecarLine:
        sidecar, offset = self._sidecar
        try:
            return read_line(self._root, sidecar, offset)
        except FileNotFoundError:
            raise StoreError(
                f"{sidecar} is gone: its record was replaced or removed; Store.refresh() sees what "
                "is there now",
                "missing",
            ) from None
        except OSError as error:
            raise StoreError.from_os_error(f"{sidecar} cannot be read", error) from None
        except ValueError as error:
            raise StoreError(f"{sidecar} is damaged: {error}", "damaged") from None
