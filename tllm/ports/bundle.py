"""What a consumer is handed: rows with their description, and what it may do with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from tllm.ports.base import PortRead
from tllm.ports.request_meta import RequestInfo, RowMeta
from tllm.result_memory import ResultMemory


@dataclass(frozen=True, eq=False)
class PortBundle:
    """The rows of one call of `consume_bundle`.

    Attributes:
        entries: role to value; tensors have `len(meta)` rows. With `delivery="device_lease"`
            they are views into the runtime's ring: enqueue the work that reads them during the
            call, on the current stream, and keep no reference.
        meta: who each row belongs to.
        key: the values of the flow's `bundle_key` that all rows share.
        flow: index of the flow in `Consumer.flows()`; -1 for one of `Consumer.request_flows()`.
        label: the flow's `label`.
        reads: the flow's reads as this worker has them: layers are counted from the start, and a
            flow with `split_by_stage` has only the places of this pipeline stage.
    """

    entries: Mapping[str, Any]
    meta: RowMeta
    key: Mapping[str, Any]
    flow: int = 0
    label: str = ""
    reads: tuple[PortRead, ...] = ()

    @property
    def owners(self) -> list[RequestInfo]:
        """Whose each row is: `[rows]`."""
        return [self.meta.requests[i] for i in self.meta.request_index.tolist()]


@dataclass(frozen=True)
class ModelView:
    """What a consumer may know of the served model.

    Attributes:
        hidden_size, num_layers, vocab_size: the model's sizes.
        dtype: dtype of the residual stream.
        device: where it lives.
        final_norm: the model's final norm as a function of `[rows, hidden]`, or None on a
            pipeline rank without it.
        final_norm_weight, final_norm_eps: its scale `[hidden]` (as multiplied: Gemma's
            1 + w is folded in) and epsilon when it is an RMS norm; None otherwise.
        lm_head: from final states `[rows, hidden]`, as `final_norm` gives them, to the model's
            logits float32 `[rows, vocab]`, with its bias, scale and soft cap; None where it is not
            known, and `lm_head_refusal` says why. It reads the whole LM head.
        lm_head_is_shared: other tensor-parallel ranks hold parts of it. `lm_head` is then a
            collective: every rank has to call it with the same rows, in `same_step` or `next_step`.
        one_stream: the final norm reads what leaves the last block. Not so where the model carries
            several streams, of which hook points show one (Gemma 3n).
        max_requests: the most sequences that run at once.
        worker: name of this worker, unique in the engine (and among data-parallel engines).
        first_rank: whether it is the first of its tensor-parallel group; the others have the
            same rows.
        stage, num_stages: which pipeline stage it is, and of how many.
        name: the model's name.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    final_norm: Callable[[torch.Tensor], torch.Tensor] | None
    final_norm_weight: torch.Tensor | None
    final_norm_eps: float | None
    max_requests: int
    worker: str = "worker"
    first_rank: bool = True
    stage: int = 0
    num_stages: int = 1
    name: str = ""
    lm_head: Callable[[torch.Tensor], torch.Tensor] | None = None
    lm_head_refusal: str = "the LM head is not known"
    lm_head_is_shared: bool = False
    one_stream: bool = True


class ResidualWriter(ABC):
    """Sets the vectors that a `ResidualStream.write` adds. Effective from the next forward on."""

    @abstractmethod
    def set(self, requests: Sequence[RequestInfo], vectors: torch.Tensor) -> None:
        """Add `vectors[i]` (`[len(requests), hidden]`, or `[hidden]` for all) to the rows of
        request i until it is set again or cleared."""

    @abstractmethod
    def clear(self, requests: Sequence[RequestInfo]) -> None:
        """Stop adding to the rows of these requests."""


class HostTensor(ABC):
    """A copy of a tensor on the host, under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """The copy, once it has arrived. Blocks the calling thread only."""


class ConsumerContext(ABC):
    """What a consumer may use while it is called.

    Attributes:
        step: number of the engine step.
        device: the model's device.
        stream: the stream the call runs on (already current); None on a CPU.
        model: sizes, dtype and final norm of the served model.
        result_memory: host memory for large results, which then cross to the user's process without
            being copied.
    """

    step: int
    device: torch.device
    stream: torch.cuda.Stream | None
    model: ModelView
    result_memory: ResultMemory

    @abstractmethod
    def writer(self, role: str) -> ResidualWriter:
        """The writer of a declared `ResidualStream.write(role=...)`."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A host array on the device: enqueued on the current stream, never waited for."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> HostTensor:
        """Begin to copy a tensor into page-locked host memory, on the current stream."""

    @abstractmethod
    def export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None = None,
        attach: Any = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Send tensors to `Consumer.on_export` on the host, through a declared `CpuExport`.

        Exports arrive one by one, in the order they were sent.

        Args:
            meta: who the rows belong to, if they are rows.
            attach: any object of this process; `on_export` is given it with the tensors.
            into: memory for some of the tensors, of their shapes and dtypes, that `on_export` is
                given in place of new memory. Rows may lie apart. It must be page-locked, as that of
                `result_memory.used_before` is, or the engine waits for the copy.
        """

    @abstractmethod
    def side_stream(self) -> torch.cuda.Stream | None:
        """This consumer's own side stream (the one of `out_of_band`); None on a CPU."""
