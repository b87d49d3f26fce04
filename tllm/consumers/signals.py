"""What conditions of steering made of each token: `output.outputs[i].signals`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.exporting import ExportingConsumer
from tllm.consumers.token_rows import TokenRows
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    Payload,
    PerToken,
    PortBundle,
    RequestInfo,
    RequestMeta,
    RowMeta,
    Signals,
)
from tllm.spec.gates import MAX_GATES
from tllm.spec.selection import END

_STEPS, _HELD_ROWS = 16, 4096
"""Scores wait on the device for so many steps, or rows: each way to the host costs the engine time,
however little there is to bring. A sequence that ends does not wait."""

_FEW_BYTES = 64 << 10
"""Of rows that go to the user as bytes; more may lie in shared memory."""

_FLOW = ConsumerFlow(
    reads=[RequestMeta.read(), Signals.read()],
    bundle_key=("engine_step_id",),
    prompt_rows="computed",
    ranks="first",
    delivery="device_lease",
)
"""What every request with conditions asks for; one object, so that it is looked at once."""


class ConditionRows:
    """What the conditions of one sequence made of its rows, which all of its signals have. On the
    way to the user a few rows go as bytes, which is several times as fast as arrays.

    Attributes:
        positions: int32 `[rows]`, ascending.
        values: float32 `[rows, 2, conditions]`, strengths and scores; no number where a condition
            was not judged.
    """

    def __init__(self, positions: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> None:
        self.positions, self.values = positions, values

    def __reduce__(self) -> tuple[Any, ...]:
        if self.values.nbytes > _FEW_BYTES:
            return ConditionRows, (self.positions, self.values)
        return _few_rows, (self.positions.tobytes(), self.values.tobytes(), self.values.shape)


def _few_rows(positions: bytes, values: bytes, shape: tuple[int, ...]) -> ConditionRows:
    """The same in the user's process."""
    return ConditionRows(
        np.frombuffer(positions, np.int32), np.frombuffer(values, np.float32).reshape(shape)
    )


@dataclass(frozen=True, eq=False)
class Signal(Payload):
    """What one condition made of the tokens that it was judged for.

    Attributes:
        positions: int32 `[tokens]`, ascending.
        scores: float32 `[tokens]`: what the probe gave, its bias included; of joined conditions,
            their strength.
        strengths: float32 `[tokens]`, 0 to 1: how much of what it decides on was done.
    """

    positions: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    strengths: npt.NDArray[np.float32]

    @property
    def fired(self) -> npt.NDArray[np.int32]:
        """The positions at which it held: where the strength is above one half."""
        return self.positions[self.strengths > 0.5]

    @classmethod
    def of_rows(cls, rows: ConditionRows, number: int, end: int = END) -> Signal:
        """What the condition of a number made of rows before a position. Arrays that nobody looks
        at are not made."""
        signal = cls.__new__(cls)
        vars(signal)["_made_of"] = rows, number, end
        return signal

    def __reduce__(self) -> tuple[Any, ...]:
        if "_made_of" in vars(self):
            return _signal_of, vars(self)["_made_of"]
        return Signal, tuple(vars(self).values())

    def __getattr__(self, name: str) -> Any:
        # Only where an attribute is not there yet.
        if name not in _ARRAYS or "_made_of" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows, number, end = vars(self)["_made_of"]
        count = int(np.searchsorted(rows.positions, end))
        strengths, scores = rows.values[:count, 0, number], rows.values[:count, 1, number]
        judged = ~np.isnan(strengths)
        arrays = rows.positions[:count][judged], scores[judged], strengths[judged]
        vars(self).update(zip(_ARRAYS, arrays, strict=True))
        return vars(self)[name]

    def up_to(self, num_tokens: int) -> Signal:
        """What belongs to a sequence of `num_tokens` tokens. Its last one has passed the model only
        where a condition made it the last: who knows what ended it asks for one token less."""
        if "_made_of" in vars(self):
            rows, number, end = vars(self)["_made_of"]
            return Signal.of_rows(rows, number, min(end, num_tokens))
        count = int(np.searchsorted(self.positions, num_tokens))
        return Signal(*(getattr(self, name)[:count] for name in _ARRAYS))

    def joined(self, other: Signal) -> Signal:
        """Of pipeline stages, the one that judged it."""
        return self if len(self.positions) >= len(other.positions) else other

    def written(self) -> dict[str, Any]:
        """With the positions at which it held."""
        return {**super().written(), "fired": self.fired}


_ARRAYS = tuple(each.name for each in fields(Signal))
_NO_ROWS = PerToken(np.zeros(0, np.int32), np.zeros((0, 2, MAX_GATES), np.float32))


def _signal_of(rows: ConditionRows, number: int, end: int) -> Signal:
    """A signal in the user's process."""
    return Signal.of_rows(rows, number, end)


class SignalsConsumer(ExportingConsumer):
    """Brings scores and strengths to the user, for requests whose steering has conditions.

    A request need not name it: what has conditions uses it, unless it says
    `consumers={"signals": {"enabled": False}}`. A sequence's result is a `Signal` for each
    condition, by its name.
    """

    consumer_id = "signals"
    on_request_only = True

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """Every row that is computed: rows that the prefix cache has were judged for another."""
        if not options.get("names"):
            return ()
        return (_FLOW,)

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """`enabled` alone is a user's; `names` are given by the conditions."""
        names = options.get("names", {})
        known = isinstance(names, Mapping) and all(isinstance(n, int) for n in names.values())
        if not known or set(options) - {"names"}:
            raise ValueError(
                f"consumers['signals'] is {dict(options)!r:.80}; it takes only 'enabled', and "
                "names its signals as the conditions of steering are named"
            )

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing has arrived."""
        self._rows = TokenRows()
        self._context = ctx
        #: What is on the device, and whose it is.
        self._held: list[tuple[torch.Tensor, RowMeta]] = []
        self._held_rows = 0
        self._requests: Sequence[RequestInfo] = ()
        self._width = 0

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Keep what the conditions of these requests gave, and send it off every few steps."""
        meta = bundle.meta
        if meta.requests is not self._requests:  # those of a steady batch are one object
            self._requests = meta.requests
            self._width = max(_width(request) for request in meta.requests)
        values = bundle.entries["signals"][:, :, : self._width].clone()
        if self._held and self._held[0][0].shape[2] != self._width:
            self._send(ctx)
        self._held.append((values, meta))
        self._held_rows += len(meta)
        if len(self._held) >= _STEPS or self._held_rows >= _HELD_ROWS:
            self._send(ctx)

    def _send(self, ctx: ConsumerContext) -> None:
        """What is on the device goes to the host."""
        if self._held:
            held, self._held, self._held_rows = self._held, [], 0
            values = torch.cat([each for each, _ in held])
            self.send_rows(ctx, {"signals": values}, attached=[meta for _, meta in held])

    def synchronize(self) -> None:
        """Everything of the steps so far is on its way."""
        self._send(self._context)

    def on_rows(
        self, tensors: Mapping[str, torch.Tensor], meta: RowMeta | None, attached: Any
    ) -> None:
        """Sort it by sequence."""
        values, first = tensors["signals"].numpy(), 0
        for each in attached:
            self._rows.add(each, {"signals": values[first : first + len(each)]})
            first += len(each)

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """Its signals, when what is under way has arrived; None without conditions."""
        if not request.options.get("names"):
            return None
        self._requests = ()  # the batch is another one, if there is one
        self._send(ctx)
        return self.promised(request, ctx)

    def result_of(self, request: RequestInfo) -> dict[str, Signal]:
        """Each of its signals, by name."""
        found = self._rows.take(request, _width(request)) or {}
        given = found.get("signals", _NO_ROWS)
        rows = ConditionRows(given.positions, given.values)
        names = request.options["names"]
        return {name: Signal.of_rows(rows, number) for name, number in names.items()}


def _width(request: RequestInfo) -> int:
    """How many of the conditions that a token may have are a request's, in the order of numbers."""
    return 1 + max(request.options["names"].values())
