"""Linear probes: a score for every token, computed where the activations are."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from tllm.consumers.base import Consumer
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    PerToken,
    Phase,
    PortBundle,
    RequestInfo,
    ResidualStream,
    RowMeta,
)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


class ProbeConsumer(Consumer):
    """Scores every token with `h . w + b`, in float32.

    A sequence's scores come back with its output, as
    `output.outputs[i].consumer_results["probe"].payload`: a `PerToken` whose `values` are
    `[rows]` for one probe and `[rows, probes]` for several. A sequence none of whose tokens was
    in the phase has no result.

    Args:
        weight: `[hidden]`, or `[probes, hidden]`; numpy array, tensor or nested list.
        bias: a number, or `[probes]`.
        path: a `.safetensors` file with `weight` and, if there is one, `bias`, instead of them.
        layer: index of the block; negative counts from the end. `lm_head_in` has none.
        site: hook point, or its alias.
        phase: score the tokens of the `prompt` (`"prefill"`), generated ones (`"decode"`) or
            `"any"`.
        consumer_id: its name, for a second one in the same engine.
    """

    remote_methods = ("so_far",)

    def __init__(
        self,
        weight: Any = None,
        bias: Any = None,
        *,
        path: str | Path | None = None,
        layer: int = -1,
        site: str = "post_block",
        phase: Phase = "any",
        consumer_id: str = "probe",
    ) -> None:
        if (weight is None) == (path is None):
            raise ValueError("give either weight= (an array) or path= (a .safetensors file)")
        if path is not None:
            if bias is not None:
                raise ValueError("bias= was given with path=; put 'bias' into the file instead")
            weight, bias = _load(Path(path))
        self.consumer_id = consumer_id
        self._weight = _floats("weight", weight)
        if self._weight.dim() not in (1, 2) or 0 in self._weight.shape:
            raise ValueError(
                f"weight has shape {list(self._weight.shape)}; give [hidden], or [probes, hidden]"
            )
        shape = self._weight.shape[:-1]
        self._bias = torch.zeros(shape) if bias is None else _floats("bias", bias)
        if self._bias.shape != shape:
            raise ValueError(
                f"bias has shape {list(self._bias.shape)}; for a weight of shape "
                f"{list(self._weight.shape)} give {list(shape) or 'a number'}"
            )
        self._read = ResidualStream.read(layer=layer, site=site, phase=phase)

    def flows(self) -> Sequence[ConsumerFlow]:
        """On a thread of its own: the engine never waits for a score."""
        return [ConsumerFlow(reads=[self._read], window="background", delivery="device_lease")]

    @torch.inference_mode()
    def start(self, ctx: ConsumerContext) -> None:
        """Put the weights where the activations are."""
        if self._weight.shape[-1] != ctx.model.hidden_size:
            raise ValueError(
                f"weight is for hidden size {self._weight.shape[-1]}, and the model's is "
                f"{ctx.model.hidden_size}; train the probe on this model's activations"
            )
        self._weight = self._weight.to(ctx.device)
        self._bias = self._bias.to(ctx.device)
        self._scores = _Scores()

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """Its scores may be asked for while it runs."""
        self._scores.begin(request)

    @torch.inference_mode()
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Score the rows; only this thread waits for them."""
        rows = bundle.entries["hidden"].float()
        scores = rows @ self._weight.mT if self._weight.dim() == 2 else rows @ self._weight
        self._scores.add(bundle.meta, (scores + self._bias).cpu().numpy())

    def so_far(self, since: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, PerToken]]:
        """Scores of sequences that run, as far as they are known.

        Args:
            since: the first position of interest, by the id of a prompt and its sample.

        Returns:
            By prompt and sample; what is not there has no new scores, or has ended.
        """
        return self._scores.so_far(since)

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> PerToken | None:
        """The sequence's scores."""
        return self._scores.take(request)


class _Scores:
    """Scores of the running sequences.

    Adding is one append, whatever the number of rows. They are sorted by sequence only when one
    of them ends: each row once.
    """

    def __init__(self) -> None:
        self._unsorted: list[tuple[RowMeta, FloatArray]] = []
        self._by_slot: dict[int, list[tuple[IntArray, FloatArray]]] = {}
        #: By prompt and sample: in which slot it runs.
        self._slots: dict[str, dict[int, int]] = {}
        #: Rows are added on the consumer's thread, and asked for on the engine's.
        self._lock = threading.Lock()

    def begin(self, request: RequestInfo) -> None:
        """A sequence runs."""
        with self._lock:
            self._slots.setdefault(request.prompt_id, {})[request.sample_index] = request.slot

    def add(self, meta: RowMeta, scores: FloatArray) -> None:
        """Add the scores of a bundle."""
        with self._lock:
            self._unsorted.append((meta, scores))

    def take(self, request: RequestInfo) -> PerToken | None:
        """Everything of a sequence that has ended, by position; None when there is nothing."""
        with self._lock:
            self._sort()
            pieces = self._by_slot.pop(request.slot, None)
            samples = self._slots.get(request.prompt_id, {})
            if samples.get(request.sample_index) == request.slot:
                del samples[request.sample_index]
            if not samples:
                self._slots.pop(request.prompt_id, None)
        return None if pieces is None else _joined(pieces)

    def so_far(self, since: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, PerToken]]:
        """What there is of sequences that run, from a position on."""
        found: dict[str, dict[int, PerToken]] = {}
        with self._lock:
            self._sort()
            for prompt_id, samples in since.items():
                slots = self._slots.get(prompt_id, {})
                for sample in samples.keys() & slots.keys():
                    new = _from(self._by_slot.get(slots[sample], ()), samples[sample])
                    if new:
                        found.setdefault(prompt_id, {})[sample] = _joined(new)
        return found

    def _sort(self) -> None:
        added, self._unsorted = self._unsorted, []
        if not added:
            return
        slots = np.concatenate([meta.slots for meta, _ in added])
        order = np.argsort(slots, kind="stable")
        positions = np.concatenate([meta.positions for meta, _ in added])[order]
        scores = np.concatenate([scores for _, scores in added])[order]
        owners, first = np.unique(slots[order], return_index=True)
        pieces = zip(np.split(positions, first[1:]), np.split(scores, first[1:]), strict=True)
        for slot, piece in zip(owners.tolist(), pieces, strict=True):
            self._by_slot.setdefault(slot, []).append(piece)


def _from(
    pieces: Sequence[tuple[IntArray, FloatArray]], first: int
) -> list[tuple[IntArray, FloatArray]]:
    """The rows of pieces from a position on; the last pieces are looked at first, and only they."""
    found = []
    for positions, scores in reversed(pieces):
        kept = positions >= first
        if not kept.any():
            break
        found.append((positions[kept], scores[kept]))
    return found[::-1]


def _joined(pieces: Sequence[tuple[IntArray, FloatArray]]) -> PerToken:
    positions = np.concatenate([positions for positions, _ in pieces])
    return PerToken(positions, np.concatenate([scores for _, scores in pieces]))


def _load(path: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"path={str(path)!r} is not a .safetensors file")
    tensors = load_file(path)
    if "weight" not in tensors or not set(tensors) <= {"weight", "bias"}:
        raise ValueError(
            f"path={str(path)!r} holds {', '.join(sorted(tensors)) or 'nothing'}; it must hold "
            "'weight', and may hold 'bias'"
        )
    return tensors["weight"], tensors.get("bias")


def _floats(name: str, given: Any) -> torch.Tensor:
    """As float32 on the host; `ValueError` for what is not finite numbers."""
    try:
        tensor = torch.as_tensor(given).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if not tensor.isfinite().all():
        raise ValueError(f"{name} has values that are not finite; give finite numbers")
    return tensor
