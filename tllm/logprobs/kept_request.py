"""A request that stays in the engine between its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import vllm
from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input

from tllm.llm import AsyncLLM
from tllm.logprobs.blocks import Holding


class LaneClosedError(RuntimeError):
    """A lane was closed while its next token was computed."""

    def __init__(self) -> None:
        super().__init__("the lane was closed while it waited for its next token")


class KeptRequest:
    """vLLM's streaming input: each turn appends tokens, computes only them, and samples one token,
    which vLLM drops when the next turn begins.

    Attributes:
        tokens: how many it has.
        open: whether it takes turns.
        holding: its blocks.
        steering: the engine's `steering.version` when it began.
        holders: the lanes that are at its last token.
        output: the last one; once `ended` is set, with the consumers' results.
        last_used: the loop's time of its last turn's end.
        turns: how many were asked for and have not ended.
        request_id: as `AsyncLLM.generate` was given it; empty before the first turn.
    """

    def __init__(self, engine: AsyncLLM, holding: Holding) -> None:
        self.steering = engine.steering.version
        self._engine = engine
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        self._turn: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.tokens = 0
        self.open = True
        self.holding = holding
        self.holders: set[Any] = set()
        self.output: Any = None
        self.ended = asyncio.Event()
        self.last_used = 0.0
        self.turns = 0
        self.request_id = ""
        self._lost: Callable[[Exception], None] | None = None

    async def turn(
        self,
        tokens: Sequence[int],
        params: vllm.SamplingParams,
        request_id: str,
        **options: Any,
    ) -> None:
        """Append tokens and wait until what comes after them was computed.

        Args:
            tokens: one or more.
            params: of this turn.
            request_id, options: of `AsyncLLM.generate`; those of the first turn are used.
        """
        self.tokens += len(tokens)
        async with self._lock:
            if not self.open:
                raise LaneClosedError
            loop = asyncio.get_running_loop()
            self._turn = loop.create_future()
            part = StreamingInput(tokens_input(list(tokens)), params)
            self._inputs.put_nowait(part)
            if self._task is None:
                self.request_id = request_id
                self._task = loop.create_task(self._pump(params, request_id, options))
            # The turn is the request's, not this caller's: it goes on when the caller is cancelled.
            await asyncio.shield(self._turn)
            self.last_used = loop.time()

    def begin_turn(self, tokens: int, lost: Callable[[Exception], None]) -> None:
        """A turn that somebody else sends the engine, while no other is under way.

        Args:
            tokens: how many are appended.
            lost: called when the request ends before `end_turn`.
        """
        self.tokens += tokens
        self._lost = lost

    def end_turn(self) -> None:
        """What comes after the tokens was computed."""
        self._lost = None
        self.last_used = asyncio.get_running_loop().time()

    async def _pump(
        self, params: vllm.SamplingParams, request_id: str, options: dict[str, Any]
    ) -> None:
        try:
            async for output in self._engine.generate(
                self._stream(), params, request_id, **options
            ):
                self.output = output
                if self._turn is not None and not self._turn.done():
                    self._turn.set_result(None)
            self._fail(RuntimeError("the engine ended the request of a lane: it was aborted"))
        except Exception as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(LaneClosedError())
            raise
        finally:
            self.open = False
            self.ended.set()

    def _fail(self, error: Exception) -> None:
        self.open = False
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)
            self._turn.exception()  # seen, if nobody waits for it
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(error)

    async def _stream(self) -> AsyncGenerator[StreamingInput, None]:
        while (part := await self._inputs.get()) is not None:
            yield part

    def cancel(self) -> asyncio.Task[None] | None:
        """Abort it; returns what to wait for."""
        self.open = False
        if self._task is not None:
            self._task.cancel()
        return self._task

    def close(self) -> None:
        """Let the engine free it: at once when no turn is under way, else by aborting it."""
        self.open = False
        if self._task is None:
            self.ended.set()
        elif self._lost is not None or (self._turn is not None and not self._turn.done()):
            self._task.cancel()
        else:
            self._inputs.put_nowait(None)
