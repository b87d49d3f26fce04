"""From callers' threads and event loops to the engine's loop, and back."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from tllm.logprobs.kept import Holder
from tllm.logprobs.query import Answer, AnswerRows, Query

T = TypeVar("T")

_AFTER_CLEANUP = "cleanup() was called: this model has no engine any more; make another"
_ELSEWHERE = (
    "this process was forked from the one that the model belongs to, and reaches no engine; make a "
    "model here, or ask in that process"
)
_NOT_RUNNING = (
    "the event loop that the engine was started on does not run, so that nobody would answer; ask "
    "on that loop, or while it runs"
)


class EngineLoop:
    """The event loop that an engine belongs to: vLLM's async engine stays on the one it was
    started in, while callers come and go with theirs.

    Args:
        loop: one that runs already; by default one on a thread of its own is started.

    Attributes:
        closed: set by whoever cleans up; from then on the methods for callers raise
            `RuntimeError`, as they do in a process that was forked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self.closed = False
        self._process = os.getpid()
        self._background: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._run, name="tllm-logprobs", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def inside(self) -> bool:
        """Whether the caller is on that loop."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result, anywhere else."""
        try:
            self.check_runs()
            if self.inside:
                raise RuntimeError(
                    "called from the engine's own event loop, which would wait for itself; await "
                    "the form without _sync, or asyncio.to_thread(...) of what has none"
                )
        except RuntimeError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function there and wait for its result; on that loop, at once."""
        if self.inside:
            self.check_open()
            return function()

        async def called() -> T:
            return function()

        return self.run(called())

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs there, on any loop."""
        try:
            self.check_runs()
        except RuntimeError:
            work.close()
            raise
        if self.inside:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function there soon, in the order posted."""
        self.check_open()
        if self.inside:
            self.loop.call_soon(function, *args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function there, before what is asked after it: on that loop at once, as what is
        asked there may be served at once, too; anywhere else soon, in the order told and posted."""
        if not self.inside:
            self.post(function, *args)
            return
        self.check_open()
        function(*args)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that nobody waits for; called there."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def is_ours(self) -> bool:
        """Whether it was made in this process, and nobody has cleaned up."""
        return not self.closed and self._process == os.getpid()

    def check_open(self) -> None:
        if not self.is_ours:
            raise RuntimeError(_AFTER_CLEANUP if self.closed else _ELSEWHERE)

    def check_runs(self) -> None:
        """Raise `RuntimeError` where whoever waited for an answer would wait for ever."""
        self.check_open()
        if self._thread is None and not self.loop.is_running():
            raise RuntimeError(_NOT_RUNNING)

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what remains to be done there, and end the thread if it is our own. Returns when
        that is done; on the loop itself, at once."""
        self.closed = True
        if self._process != os.getpid() or not self.loop.is_running():
            return
        if self.inside:  # where the last reference was dropped
            threading.Thread(target=self.end, args=(last,)).start()
            return
        # Whoever the loop belongs to may end it meanwhile.
        with suppress(CancelledError):
            asyncio.run_coroutine_threadsafe(last(), self.loop).result()
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Collector(Generic[T]):
    """Collects what is asked on one event loop, and hands it over in batches.

    A batch is closed when nothing else can arrive: when the loop has run everything that was
    ready, and none of it has asked anything more. A loop that stays busy with other things closes
    it too. `timeout` and `batch_size` are upper bounds for one whose asking never ends.

    Args:
        hand_over: takes a batch.
        batch_size: a batch of so many waits for nobody who is not ready yet.
        timeout: seconds after which a batch is handed over in any case.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hand_over: Callable[[list[T]], None],
        batch_size: int,
        timeout: float,
    ) -> None:
        self._loop = loop
        self._hand_over = hand_over
        self._batch_size = batch_size
        self._timeout = timeout
        self._batch: list[T] = []
        self._armed = False
        self._deadline = 0.0

    def add(self, items: Iterable[T]) -> None:
        """Ask."""
        self._batch += items
        if not self._armed:
            self._armed = True
            self._deadline = self._loop.time() + self._timeout
            self._loop.call_soon(self._look, 0)

    def _look(self, seen: int) -> None:
        waits = len(self._batch) < self._batch_size and self._loop.time() < self._deadline
        if len(self._batch) > seen and waits:
            self._loop.call_soon(self._look, len(self._batch))
            return
        self._armed = False
        batch, self._batch = self._batch, []
        if batch:
            self._hand_over(batch)


class PendingQueries:
    """Queries that one caller waits for, until each has been answered.

    Attributes:
        waiters: one a query, until the caller has the answers.
        loop: where the caller waits.
        future: of the answers, in the order of the queries; the first error in their place.
        of_lanes: whether they are steps of lanes.
    """

    __slots__ = ("_deliver", "_left", "_outcomes", "_rows", "future", "loop", "of_lanes", "waiters")

    def __init__(
        self,
        queries: Sequence[Query],
        holders: Sequence[Holder | None],
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[PendingQueries], None],
    ) -> None:
        self.loop = loop
        self.of_lanes = holders[0] is not None
        self.future: asyncio.Future[Sequence[Answer]] = loop.create_future()
        self.waiters = [
            Waiter(query, holder, self, place)
            for place, (query, holder) in enumerate(zip(queries, holders, strict=True))
        ]
        self._deliver = deliver
        self._left = len(self.waiters)
        self._outcomes: list[Answer | Exception | None] = [None] * self._left
        self._rows: AnswerRows | None = None

    def answered(self, place: int, outcome: Answer | Exception) -> None:
        """Called once for each query, on the engine's loop."""
        self._outcomes[place] = outcome
        self._left -= 1
        if not self._left:
            self._deliver(self)

    def answered_together(self, rows: AnswerRows) -> None:
        """Called once for all queries, none of which is answered yet, in the place of `answered`;
        the answers are in the order of the queries."""
        self._rows = rows
        self._deliver(self)

    def end(self) -> None:
        """Called on the caller's loop, when there are outcomes of all."""
        # This and the waiters refer to each other. Answers may lie in rows that are free when
        # nobody refers to them, which must not take until the next garbage collection.
        outcomes, self._outcomes, self.waiters = self._outcomes, [], []
        rows, self._rows = self._rows, None
        if rows is not None:
            if not self.future.done():
                self.future.set_result(rows)
            return
        error = next((each for each in outcomes if isinstance(each, Exception)), None)
        if error is not None:
            self.fail(error)
        elif not self.future.done():
            self.future.set_result(cast(list[Answer], outcomes))

    def fail(self, error: Exception) -> None:
        """Called on the caller's loop: there will be no more outcomes."""
        if not self.future.done():
            self.future.set_exception(error)


class Waiter:
    """Who waits for the answer to a query.

    Attributes:
        holder: the lane whose next step it is, or None.
        pending: all that the caller waits for.
        place: the query's place among them.
    """

    __slots__ = ("holder", "pending", "place", "query")

    def __init__(
        self, query: Query, holder: Holder | None, pending: PendingQueries, place: int
    ) -> None:
        self.query = query
        self.holder = holder
        self.pending = pending
        self.place = place

    @property
    def is_awaited(self) -> bool:
        return not self.pending.future.done()

    def resolve(self, outcome: Answer | Exception) -> None:
        """Called once, on the engine's loop."""
        self.pending.answered(self.place, outcome)


class Mailbox:
    """Brings queries from any thread and event loop to the engine's, where they are served, and
    the answers back; all that is ready together goes together.

    Args:
        serve, cancel: called on the engine's loop with those who wait, and those who do not any
            more.
        batch_size, timeout: see `Collector`.
    """

    def __init__(
        self,
        loop: EngineLoop,
        serve: Callable[[Sequence[Waiter]], None],
        cancel: Callable[[Sequence[Waiter]], None],
        batch_size: int,
        timeout: float,
    ) -> None:
        self._loop = loop
        self._serve = serve
        self._cancel = cancel
        self._limits = batch_size, timeout
        self._collectors: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, Collector[Waiter]
        ] = weakref.WeakKeyDictionary()
        self._waiting: set[PendingQueries] = set()
        self._ready: dict[asyncio.AbstractEventLoop, list[PendingQueries]] = {}

    async def ask(
        self, queries: Sequence[Query], holders: Sequence[Holder | None]
    ) -> Sequence[Answer]:
        """The answers to queries, on any loop: of lanes, or of none."""
        self._loop.check_runs()
        loop = asyncio.get_running_loop()
        pending = PendingQueries(queries, holders, loop, self._deliver)
        self._waiting.add(pending)
        self._collector(loop).add(pending.waiters)
        try:
            return await pending.future
        except asyncio.CancelledError:
            if self._loop.is_ours and not self._loop.loop.is_closed():
                self._loop.post(self._cancel, pending.waiters)
            raise
        finally:
            self._waiting.discard(pending)

    def _collector(self, loop: asyncio.AbstractEventLoop) -> Collector[Waiter]:
        collector = self._collectors.get(loop)
        if collector is None:
            collector = Collector(loop, self._hand_over, *self._limits)
            self._collectors[loop] = collector
        return collector

    def _hand_over(self, batch: list[Waiter]) -> None:
        batch = [waiter for waiter in batch if waiter.is_awaited]
        if self._loop.inside:
            self._serve(batch)
        else:
            self._loop.post(self._serve, batch)

    def _deliver(self, pending: PendingQueries) -> None:
        ready = self._ready.setdefault(pending.loop, [])
        ready.append(pending)
        if len(ready) == 1:
            self._loop.loop.call_soon(self._send, pending.loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        ready = self._ready.pop(loop)
        if loop is self._loop.loop:
            _end_all(ready)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(_end_all, ready)

    def reset(self) -> None:
        """Cancel all who wait, but lanes, and what they asked of the engine."""
        # A list of all first, in one go: others ask meanwhile.
        waiting = [pending for pending in list(self._waiting) if not pending.of_lanes]
        for pending in waiting:
            if not pending.loop.is_closed():
                pending.loop.call_soon_threadsafe(pending.future.cancel)
        self._loop.post(self._cancel, [waiter for pending in waiting for waiter in pending.waiters])

    def fail_all(self) -> None:
        """Tell all who wait that the engine is gone."""
        for pending in list(self._waiting):
            if not pending.loop.is_closed():
                pending.loop.call_soon_threadsafe(pending.fail, RuntimeError(_AFTER_CLEANUP))


def _end_all(ready: Iterable[PendingQueries]) -> None:
    for pending in ready:
        pending.end()
