"""`POST /v1/patch_sweep`: sweeps over HTTP, line by line as they are computed."""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field, Strict

from tllm.client.attached import Attached
from tllm.engine.handlers import adapter_named
from tllm.patching import METRICS, Sweep
from tllm.server.fields import FieldError
from tllm.server.limits import SWEEP, Limits, LimitsByKey
from tllm.server.strict_body import StrictBody

_Prompt: TypeAlias = str | list[int]
_Answers: TypeAlias = str | int | list[str | int | list[str | int]]
_Line: TypeAlias = dict[str, Any]
_METRIC = (
    f"One of {', '.join(METRICS)}, or a list; or an object that has answers, too: "
    '{"logit_diff": [right, wrong]}.'
)


class SweepBody(StrictBody):
    """A sweep; the fields are those of `llm.patching.sweep`."""

    clean: Annotated[
        _Prompt | list[_Prompt], Field(description="A prompt as text or token ids, or a list.")
    ]
    corrupt: Annotated[
        _Prompt | list[_Prompt],
        Field(
            description="A prompt as text or token ids, or a list; of as many prompts and tokens "
            "as clean."
        ),
    ]
    hooks: Annotated[
        str | list[str],
        Field(description="A hook point whose rows are patched, as text, or a list of them."),
    ]
    layers: Annotated[
        str | int | list[int | str] | None,
        Field(description='"all", 4, [0, 4], "4:9", "0,4-8,-1"; all unless told.'),
    ] = None
    positions: Annotated[
        str | int | list[int] | None,
        Field(
            description='A number, or a list of them, or "all"; negative ones count from the end '
            "of the prompt; all unless told."
        ),
    ] = None
    heads: Annotated[
        str | int | list[int] | None,
        Field(
            description='A number, or a list of them, or "all", with hooks "attn_heads", "q", "k", '
            '"v"; one at a time.'
        ),
    ] = None
    together: Annotated[bool, Field(description="Patch all positions in one experiment.")] = False
    metric: Annotated[str | list[str] | dict[str, _Answers], Field(description=_METRIC)] = (
        "recovered"
    )
    answers: Annotated[
        _Answers | None,
        Field(description="[right, wrong] next tokens, as text or ids; or a list, for each pair."),
    ] = None
    noising: Annotated[
        bool, Field(description="Put rows of the corrupt run into the clean one.")
    ] = False
    window: Annotated[int, Field(description="Layers that are patched together.")] = 1
    freeze: Annotated[
        str | list[str],
        Field(
            default=[],
            description='"attn_out", "mlp_out", both in a list, or "all": what keeps still in path '
            "patching.",
        ),
    ]
    receivers: Annotated[
        list[Annotated[tuple[str, str | int | list[int | str]], Strict(False)]],
        Field(
            default=[],
            description='A list of where paths end, as [["mlp_in", 3]]; else at the logits.',
        ),
    ]
    model: Annotated[
        str | None, Field(description="An adapter that is served, or the model's own name.")
    ] = None


class PatchSweeps:
    """The sweeps of one server process.

    Args:
        limits: of all callers. A sweep is one request in flight.
        models: what is served, vLLM's `OpenAIServingModels`.
    """

    def __init__(self, interventions: Attached, limits: LimitsByKey, models: Any) -> None:
        self._interventions = interventions
        self._limits = limits
        self._models = models
        self._running: set[asyncio.Task[Sweep]] = set()

    async def begin(self, body: SweepBody, headers: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """Begin a sweep; its lines, each JSON: how many experiments there are, each of them, and a
        summary. Who gives the lines up stops the sweep.

        Raises `FieldError` for what the caller may not, and `ValueError` for what is wrong.
        """
        caller = self._limits.caller(headers)
        self._limits.of(caller).check({SWEEP: body})
        try:
            adapter = None if body.model is None else adapter_named(self._models, body.model)
        except ValueError as error:
            raise FieldError("model", str(error), HTTPStatus.NOT_FOUND) from None
        end = self._limits.begin(caller, {SWEEP: body})
        lines: asyncio.Queue[_Line | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._swept(body, adapter, self._limits.of(caller), lines))
        self._running.add(task)

        def over(task: asyncio.Task[Sweep]) -> None:
            self._running.discard(task)
            end()
            lines.put_nowait(None)

        task.add_done_callback(over)
        try:
            first = await lines.get()
        except BaseException:
            task.cancel()
            raise
        if first is None:
            task.result()  # raises what is wrong
        stop = _stop_once(task)
        stream = _lines(first, lines, task, stop)
        weakref.finalize(stream, stop)  # also one that nobody began to read
        return stream

    async def _swept(
        self, body: SweepBody, adapter: Any, limits: Limits, lines: asyncio.Queue[_Line | None]
    ) -> Sweep:
        def progress(done: int, total: int) -> None:
            if done:
                return
            if limits.experiments is not None and total > limits.experiments:
                raise FieldError(
                    SWEEP,
                    f"this sweep has {total} experiments; with this API key one may have "
                    f"{limits.experiments}: fewer layers, positions, heads or prompts",
                    HTTPStatus.BAD_REQUEST,
                )
            lines.put_nowait({"experiments": total})

        given = body.model_dump(exclude_none=True, exclude={"model"})
        sweep: Sweep = await self._interventions.patching.sweep(
            given.pop("clean"),
            given.pop("corrupt"),
            **given,
            at_once=limits.requests,
            progress=progress,
            each=lambda row: lines.put_nowait({"experiment": row}),
            lora_request=adapter,
        )
        return sweep


async def _lines(
    first: _Line | None,
    lines: asyncio.Queue[_Line | None],
    task: asyncio.Task[Sweep],
    stop: Callable[[], None],
) -> AsyncGenerator[str, None]:
    try:
        line = first
        while line is not None:
            yield _json(line)
            line = await lines.get()
        try:
            last = {"summary": _summary(task.result())}
        except Exception as error:
            last = {"error": {"message": str(error), "type": type(error).__name__}}
        yield _json(last)
    finally:
        stop()


def _stop_once(task: asyncio.Task[Sweep]) -> Callable[[], None]:
    """Cancels a sweep, but not a second time: it drops the rows that it has kept then."""

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    return stop


def _summary(sweep: Sweep) -> dict[str, Any]:
    """A sweep without its experiments."""
    return {
        "hooks": sweep.hooks,
        "layers": sweep.layers,
        "heads": sweep.heads,
        "positions": sweep.positions,
        "tokens": sweep.tokens,
        "clean": sweep.clean,
        "corrupt": sweep.corrupt,
        "noise_floor": sweep.noise_floor,
        "computed": sweep.computed,
        "not_numbers": sweep.not_numbers,
        "values": sweep.values,
        "top": sweep.top(10),
    }


def _json(line: _Line) -> str:
    return json.dumps(_plain(line), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """As JSON has it: what is no number is null."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
