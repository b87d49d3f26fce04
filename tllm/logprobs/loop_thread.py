"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that have an event loop of their own, or none.

    vLLM's async engine belongs to the loop it was started in; callers may come and go with theirs.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def running(self) -> bool:
        """Whether `stop` was not called yet."""
        return self.loop.is_running()

    @property
    def inside(self) -> bool:
        """Whether the caller is on that thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result, on any other thread."""
        if self.inside:
            work.close()
            raise RuntimeError(
                "called from the engine's own event loop, which would wait for itself"
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function there soon, in the order posted."""
        self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        if not self.loop.is_running():
            return
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
