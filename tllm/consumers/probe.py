"""Linear probes: a score for every token, computed where the activations are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tllm.consumers.base import Consumer
from tllm.consumers.token_rows import TokenRows, check_since
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    PerToken,
    Phase,
    PortBundle,
    RequestInfo,
    ResidualStream,
)
from tllm.spec.reading import float_array, scalar


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
        where = "" if path is None else f"{path}: "
        self._weight = _floats(f"{where}weight", weight)
        if self._weight.dim() not in (1, 2) or 0 in self._weight.shape:
            raise ValueError(
                f"{where}weight has shape {list(self._weight.shape)}; give [hidden], or "
                "[probes, hidden]"
            )
        shape = self._weight.shape[:-1]
        self._bias = torch.zeros(shape) if bias is None else _floats(f"{where}bias", bias)
        if self._bias.shape != shape:
            raise ValueError(
                f"{where}bias has shape {list(self._bias.shape)}; for a weight of shape "
                f"{list(self._weight.shape)} give {list(shape) or 'a number'}"
            )
        self._read = ResidualStream.read(layer=layer, site=site, phase=phase)

    def flows(self) -> Sequence[ConsumerFlow]:
        """On a thread of its own: the engine never waits for a score."""
        return [ConsumerFlow(reads=[self._read], window="background", delivery="device_lease")]

    @in_inference_mode
    def start(self, ctx: ConsumerContext) -> None:
        """Put the weights where the activations are."""
        if self._weight.shape[-1] != ctx.model.hidden_size:
            raise ValueError(
                f"weight is for hidden size {self._weight.shape[-1]}, and the model's is "
                f"{ctx.model.hidden_size}; train the probe on this model's activations"
            )
        self._weight = self._weight.to(ctx.device)
        self._bias = self._bias.to(ctx.device)
        self._scores = TokenRows()

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """Its scores may be asked for while it runs."""
        self._scores.begin(request)

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Score the rows; only this thread waits for them."""
        rows = bundle.entries["hidden"].float()
        scores = rows @ self._weight.mT if self._weight.dim() == 2 else rows @ self._weight
        self._scores.add(bundle.meta, {"values": (scores + self._bias).cpu().numpy()})

    def validate_call(self, method: str, args: Sequence[Any]) -> None:
        """Refuse what `so_far` does not take."""
        check_since(method, args)

    def so_far(self, since: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, PerToken]]:
        """Scores of sequences that run, as far as they are known.

        Args:
            since: the first position of interest, by the id of a prompt and its sample.

        Returns:
            By prompt and sample; what is not there has no new scores, or has ended.
        """
        found = self._scores.so_far(since)
        return {
            prompt_id: {sample: rows["values"] for sample, (_, rows) in samples.items()}
            for prompt_id, samples in found.items()
        }

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> PerToken | None:
        found = self._scores.take(request)
        return None if found is None else found["values"]


def _load(path: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"path={str(path)!r} is not a .safetensors file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"path={str(path)!r} is damaged, or no file of safetensors: {error}; give one that was "
            "saved whole"
        ) from None
    if "weight" not in tensors or not set(tensors) <= {"weight", "bias"}:
        raise ValueError(
            f"path={str(path)!r} holds {', '.join(sorted(tensors)) or 'nothing'}; it must hold "
            "'weight', and may hold 'bias'"
        )
    return tensors["weight"], tensors.get("bias")


def _floats(name: str, given: Any) -> torch.Tensor:
    """As float32 on the host; `ValueError` for what is not finite numbers."""
    alone = not isinstance(given, Iterable)
    return torch.as_tensor(scalar(given, name) if alone else float_array(given, name)).float()
