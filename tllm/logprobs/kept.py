"""Requests that stay in the engine between their tokens, and which of them may."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

import vllm
from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input

from tllm.client.llm import AsyncLLM
from tllm.engine.capacity import BlockLedger, Capacity, HeldBlocks
from tllm.engine.verdicts import check_goes_on
from tllm.logprobs.arena import Address, Addresses, Arena


class LaneClosedError(RuntimeError):
    """A lane was closed while its next token was computed."""

    def __init__(self) -> None:
        super().__init__("the lane was closed while it waited for its next token")


class KeptRequest:
    """vLLM's streaming input: each turn appends tokens, computes only them, and samples one token,
    which vLLM drops when the next turn begins. It begins as a request of vLLM's client, or in bulk.

    Attributes:
        tokens: how many it has.
        asked: how many it has when all turns that were begun have ended.
        open: whether it takes turns.
        version: of what answers depend on (`Versions`), when it began.
        holders: the lanes that are at its last token.
        output: the last one; once `ended` is set, with the consumers' results.
        last_used: the loop's time of its last turn's end.
        turns: how many were asked for and have not ended.
        request_id: as `AsyncLLM.generate` was given it; empty before the first turn.
        engine_id: the engine's own; None while it is not known.
        address: where it is told of its results' places, once it was asked in bulk.
    """

    def __init__(self, engine: AsyncLLM, held: HeldBlocks, version: Hashable) -> None:
        self.tokens = 0
        self.asked = 0
        self.open = True
        self.held = held
        self.version = version
        self.holders: set[Holder] = set()
        self.output: Any = None
        self.ended = asyncio.Event()
        self.last_used = 0.0
        self.turns = 0
        self.request_id = ""
        self.engine_id: str | None = None
        self.address: Address | None = None
        self._engine = engine
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue()
        self._turn: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._lost: Callable[[Exception], None] | None = None
        self._abort: Callable[[], None] | None = None

    async def turn(
        self, tokens: Sequence[int], params: vllm.SamplingParams, request_id: str, **options: Any
    ) -> None:
        """Append tokens and wait until what comes after them was computed.

        Args:
            tokens: one or more.
            request_id, options: of `AsyncLLM.generate`; those of the first turn are used.
        """
        self.tokens += len(tokens)
        if self.address is not None:
            self.address.told = None  # these have options of their own
        async with self._lock:
            if not self.open:
                raise LaneClosedError
            loop = asyncio.get_running_loop()
            self._turn = loop.create_future()
            self._inputs.put_nowait(StreamingInput(tokens_input(list(tokens)), params))
            if self._task is None:
                self.request_id = request_id
                self._task = loop.create_task(self._pump(params, request_id, options))
                # A callback, since a task that is cancelled before it begins runs nothing at all.
                self._task.add_done_callback(self._end)
            # The turn is the request's, not this caller's: it goes on when the caller is cancelled.
            await asyncio.shield(self._turn)
            self.last_used = loop.time()

    def begin(self, request_id: str, abort: Callable[[], None]) -> None:
        """Somebody else begins it in the engine, and sends all its turns.

        Args:
            request_id: as the engine knows it.
            abort: ends it there.
        """
        self.request_id = self.engine_id = request_id
        self._abort = abort

    def begin_turn(self, tokens: int, lost: Callable[[Exception], None]) -> None:
        """A turn that somebody else sends the engine, while no other is under way.

        Args:
            tokens: how many are appended.
            lost: called when the request ends before `end_turn`.
        """
        self.tokens += tokens
        self._lost = lost

    def address_in(self, arena: Arena, addresses: Addresses) -> Address | None:
        """Where a worker looks up the places of its results; None without room for a table."""
        address = self.address
        if address is None or address.arena is not arena:
            try:
                other = addresses.take(arena)
            except OSError:
                return None  # it keeps the one that it has
            if address is not None:
                address.give_back()
            address = self.address = other
        return address

    def end_turn(self, now: float) -> None:
        """What comes after the tokens was computed, at a time of the loop."""
        self._lost = None
        self.last_used = now

    async def _pump(
        self, params: vllm.SamplingParams, request_id: str, options: dict[str, Any]
    ) -> None:
        try:
            outputs = self._engine.generate(self._stream(), params, request_id, **options)
            async with aclosing(outputs):
                async for output in outputs:
                    self.output = output
                    check_goes_on(output)
                    # vLLM's client takes it for the end of an input, and waits for the next.
                    if output.outputs[0].finish_reason == "abort":
                        break
                    if self._turn is not None and not self._turn.done():
                        self._turn.set_result(None)
            self._fail(RuntimeError("the engine ended the request of a lane: it was aborted"))
        except Exception as error:
            self._fail(error)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._fail(LaneClosedError())
        self._over()

    def _over(self) -> None:
        self.open = False
        self.ended.set()
        if self.address is not None:
            self.address.give_back()

    @property
    def in_bulk(self) -> bool:
        """Whether somebody else sends all its turns."""
        return self._abort is not None

    def give_up(self) -> None:
        """One of its turns in bulk was not computed: it goes no further."""
        if self._abort is not None:
            self._abort()
            self.lose(LaneClosedError())
        elif self.open and self._task is not None:  # vLLM's client has not heard of its end
            self.open = False
            self._task.cancel()

    def lose(self, error: Exception) -> None:
        """The engine has ended what was begun in bulk, or it was given up."""
        if self._abort is not None:
            self._abort = None
            self._fail(error)
            self._over()

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
        self.give_up()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def close(self) -> None:
        """Let the engine free it: at once when no turn is under way, else by aborting it."""
        self.open = False
        if self.in_bulk:
            self.give_up()
        elif self._task is None:
            self.ended.set()
        elif self._lost is not None or (self._turn is not None and not self._turn.done()):
            self._task.cancel()
        else:
            self._inputs.put_nowait(None)


class Holder:
    """A lane, as the engine's loop knows it.

    Attributes:
        request: the kept request that is at the lane's last computed token, if there is one.
        served: the kept requests it had, when consumers have something to say about them.
    """

    def __init__(self) -> None:
        self.request: KeptRequest | None = None
        self.served: list[KeptRequest] = []
        self.closed = False

    def hold(self, request: KeptRequest) -> None:
        """The lane is at this request's last token."""
        self.request = request
        request.holders.add(self)

    def share(self, fork: Holder, tokens: int) -> None:
        """A fork of the lane is at this request's last token, too; whoever asks first goes on with
        it. Not a fork that went its own way before this was heard, nor one of fewer tokens: those
        that were asked for meanwhile are not the fork's.

        Args:
            tokens: how many the lane had when it was forked.
        """
        request = self.request
        if request is None or request.asked > tokens or fork.closed or fork.request is not None:
            return
        fork.hold(request)

    def take_over(self, request: KeptRequest) -> None:
        """The request goes on as this lane's; others that hold it go other ways."""
        if len(request.holders) > 1:
            for other in request.holders:
                if other is not self:
                    other.request = None
            request.holders = {self}


class Admission:
    """Which requests are kept. A kept request holds one of the engine's `max_num_seqs` places, and
    blocks of the KV cache, while it computes nothing. Whenever others need them, the one that was
    idle longest is parked: it ends, and its lane will begin another, for which the prefix cache has
    nearly everything.

    The engine itself queues what is too much for it, so that nothing waits here.

    Args:
        idle_seconds: a kept request that is idle for so long is parked too, for the sake of
            requests that did not come through here.
    """

    def __init__(self, engine: AsyncLLM, idle_seconds: float) -> None:
        self._engine = engine
        self._capacity = Capacity.of(engine.vllm_config)
        self._ledger = BlockLedger(self._capacity.block_size)
        self._passing = 0
        self._active = 0
        self._idle: OrderedDict[KeptRequest, None] = OrderedDict()
        self._idle_seconds = idle_seconds
        self._timer: asyncio.TimerHandle | None = None
        self.parked = 0

    @property
    def idle(self) -> int:
        """Kept requests between two turns."""
        return len(self._idle)

    @property
    def blocks(self) -> int:
        """Of the cache, that kept requests hold."""
        return self._ledger.used

    def enter(self, num_tokens: int) -> int:
        """A request that is not kept begins; give what comes back to `leave`."""
        blocks = self._ledger.blocks(num_tokens)
        self._active += 1
        self._passing += blocks
        self._make_room()
        return blocks

    def leave(self, blocks: int) -> None:
        self._active -= 1
        self._passing -= blocks

    def keep(self, root: Hashable, tokens: Sequence[int], version: Hashable) -> KeptRequest:
        """A request that will be kept.

        Args:
            root: equal for requests that may share blocks of the cache.
            version: of `Versions`.
        """
        return KeptRequest(self._engine, self._ledger.open(root, tokens), version)

    def begin_turn(self, request: KeptRequest, num_tokens: int) -> None:
        """A kept request has something to compute. Others may have to go for it: `make_room`."""
        self._idle.pop(request, None)
        request.turns += 1
        request.asked = num_tokens
        self._active += 1
        self._ledger.grow(request.held, num_tokens)

    def end_turn(self, request: KeptRequest) -> None:
        """It was computed. Followed by `make_room`, as `begin_turn` is."""
        request.turns -= 1
        self._active -= 1
        if not request.open:
            self.drop(request)
        elif not request.turns:  # else whoever asked was cancelled, and has asked again
            self._idle[request] = None

    def let_go(self, holder: Holder) -> None:
        """A lane needs its request no more."""
        request, holder.request = holder.request, None
        if request is not None:
            request.holders.discard(holder)
            if not request.holders:
                self.drop(request)

    def drop(self, request: KeptRequest) -> None:
        """Nobody needs it any more."""
        self._idle.pop(request, None)
        self._ledger.close(request.held)
        if request.open:
            request.close()

    def make_room(self) -> None:
        """Turns have begun or ended."""
        self._make_room()
        self._watch()

    def _make_room(self) -> None:
        while self._idle and (
            self._active + len(self._idle) > self._capacity.sequences
            or self._ledger.used + self._passing > self._capacity.blocks
        ):
            self._park()

    def _park(self) -> None:
        request, _ = self._idle.popitem(last=False)
        self.parked += 1
        self.drop(request)

    def _watch(self) -> None:
        if self._timer is None and self._idle:
            loop = asyncio.get_running_loop()
            oldest = next(iter(self._idle)).last_used
            delay = max(0.01, oldest + self._idle_seconds - loop.time())
            self._timer = loop.call_later(delay, self._park_idle)

    def _park_idle(self) -> None:
        self._timer = None
        limit = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle and next(iter(self._idle)).last_used <= limit:
            self._park()
        self._watch()
