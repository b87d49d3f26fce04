"""How the client's steps, which do no input or output themselves, reach the workers.

A step of the client is a generator (`Steps`): it yields what it wants done and is sent what came of
it. `SyncCalls` does that for `LLM`, `AsyncCalls` for `AsyncLLM` and for the engine of a server.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from enum import Enum
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import cloudpickle
from vllm import AsyncLLMEngine, LLMEngine

from tllm.answers import decode, leave
from tllm.engine.calls import ask_all_workers, ask_workers

_T = TypeVar("_T")
_Step = TypeVar("_Step")


class WorkerCall(NamedTuple):
    """Call a method of `WorkerCalls` in every worker; sent their answers, by rank."""

    method: str
    args: tuple[Any, ...] = ()


class Pause(NamedTuple):
    """Wait, and let others go on meanwhile."""

    seconds: float


class Alone(Enum):
    """Whether other steps may go on that have asked to be alone, and have not ended."""

    ALONE = True
    """None of them does from here on, until these have ended or yield `TOGETHER`."""

    TOGETHER = False
    """They do again."""


ALONE, TOGETHER = Alone.ALONE, Alone.TOGETHER

LEAVING = (asyncio.CancelledError, KeyboardInterrupt)
"""Raised by who waits no more for the workers, which may do all the same what they were asked."""

Steps: TypeAlias = Generator[WorkerCall | Pause | Alone, Any, _T]


def drive(steps: Generator[_Step, Any, _T], do: Callable[[_Step], Any]) -> _T:
    """Take steps to their end: each is done, and what came of it, or was raised, is theirs; also an
    interrupt that comes between two of them."""
    advance: Callable[[], _Step] = partial(next, steps)
    while True:
        try:
            while True:
                step = advance()
                advance = partial(steps.send, do(step))
        except BaseException as error:
            if getgeneratorstate(steps) != GEN_CLOSED:
                advance = partial(steps.throw, error)
            elif isinstance(error, StopIteration):
                result: _T = error.value
                return result
            else:
                raise


async def drive_async(
    steps: Generator[_Step, Any, _T], do: Callable[[_Step], Awaitable[Any]]
) -> _T:
    """`drive`, where what is done is awaited."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await do(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        result: _T = done.value
        return result


def living(engine: weakref.ref[LLMEngine]) -> LLMEngine:
    """An engine, which ends with what its user has of it; `RuntimeError` where it has ended."""
    found = engine()
    if found is None:
        raise RuntimeError(
            "this engine has ended, since nobody had it any more; keep the LLM for as long as its "
            "steering, patching and consumers are used"
        )
    return found


class SyncCalls:
    """Does what steps want, for an engine whose caller waits.

    Args:
        token: of the client's `SharedFolder`.
        over: the prompts that are over and that no worker has heard of; they hear of them before
            they are asked anything else.
    """

    def __init__(self, engine: LLMEngine, token: str, over: Callable[[], list[str]]) -> None:
        self._engine = weakref.ref(engine)  # which has us
        self._token = token
        self._over = over

    def run(self, steps: Steps[_T]) -> _T:
        return drive(steps, self._do)

    def ask(self, call: WorkerCall) -> list[Any]:
        over = self._over()
        if over:
            self.ask(WorkerCall("take_results", (over,)))
        payload = cloudpickle.dumps(call.args)
        answers = ask_workers(living(self._engine), (call.method, payload, self._token))
        return decode_answers(answers())

    def _do(self, step: WorkerCall | Pause | Alone) -> Any:
        if isinstance(step, WorkerCall):
            return self.ask(step)
        if isinstance(step, Pause):
            time.sleep(step.seconds)
        return None


class AsyncCalls:
    """Does what steps want, on an engine's event loop.

    Args:
        token: of the client's `SharedFolder`.
    """

    def __init__(self, engine: AsyncLLMEngine, token: str) -> None:
        self._engine = engine
        self._token = token
        self._alone = asyncio.Lock()

    async def run(self, steps: Steps[_T]) -> _T:
        alone = False

        async def do(step: WorkerCall | Pause | Alone) -> Any:
            nonlocal alone
            if isinstance(step, WorkerCall):
                return await self.ask(step)
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif step is ALONE and not alone:
                alone = await self._alone.acquire()
            elif step is TOGETHER and alone:
                alone = False
                self._alone.release()
            return None

        try:
            return await drive_async(steps, do)
        finally:
            if alone:
                self._alone.release()

    async def ask(self, call: WorkerCall) -> list[Any]:
        """Call the workers of all replicas."""
        payload = cloudpickle.dumps(call.args)
        arguments = (call.method, payload, self._token)
        answers = asyncio.ensure_future(ask_all_workers(self._engine, arguments))
        try:
            return decode_answers(await asyncio.shield(answers))
        except asyncio.CancelledError:
            # They are made all the same, and keep shared memory until somebody has looked.
            answers.add_done_callback(_leave)
            raise


def _leave(answers: asyncio.Future[list[Any]]) -> None:
    """Nobody waits for the workers' answers any more."""
    if not answers.cancelled() and answers.exception() is None:
        for answer in answers.result():
            leave(answer)


def decode_answers(answers: Sequence[bytes]) -> list[Any]:
    """The workers' answers; raises what the first one to fail raised."""
    decoded = [decode(answer) for answer in answers]
    for status, answer in decoded:
        if status == "error":
            raise answer
    return [answer for _, answer in decoded]
