"""Requests in bulk: many in one message to the engine, and their ends in one message back.

A request, and each input of a streamed one, costs vLLM's client more time than the model needs for
its token when hundreds of them want one token each. Whoever gets what he wants from a consumer, and
has no use for vLLM's output, can send them together.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.request import Request, RequestStatus

from tllm.engine.notices import NoticeInbox, NoticeOutbox
from tllm.engine.refusals import RefusedError
from tllm.engine.seams import overrides, uses
from tllm.spec.request import EXTRA_ARG, OWN_ARGS

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.outputs import ModelRunnerOutput

_EXTRA = f"{OWN_ARGS}bulk"
_MESSAGE = re.compile(rf"{_EXTRA}_\d+")
"""Ids of messages. vLLM's front ends add letters to those that users give."""

_ENDED, _FAILED = "tllm_bulk_ended", "tllm_bulk_failed"
"""Ids of outputs whose `new_token_ids` are tickets."""


_COMPUTED = "whose tokens a step has computed, before its outputs are gone through"
uses(
    "vllm.v1.engine.async_llm.AsyncLLM",
    "engine_core output_processor output_handler errored dead_error _run_output_handler",
    "messages with many requests go to the engine, and their ends come back",
)
uses(
    "vllm.v1.engine.core_client.AsyncMPClient",
    "add_request_async abort_requests_async",
    "messages with many requests go to the engine",
)
uses(
    "vllm.v1.engine.output_processor.OutputProcessor",
    "external_req_ids",
    "the engine's own id of a streamed request",
)
uses(
    "vllm.v1.request.Request",
    "request_id sampling_params client_index arrival_time resumable _block_hasher",
    "requests are made of a message",
)
uses(
    "vllm.v1.engine.EngineCoreOutput",
    "request_id new_token_ids finish_reason stop_reason",
    "ends of many requests are one output",
)
uses(
    "vllm.v1.request.StreamingUpdate",
    "mm_features prompt_token_ids max_tokens arrival_time sampling_params",
    "more tokens of a streamed request are told without a request of their own",
)
uses(
    "vllm.v1.request.Request",
    "status client_index num_stale_output_tokens",
    _COMPUTED,
)
uses("vllm.v1.outputs.ModelRunnerOutput", "req_ids sampled_token_ids", _COMPUTED)
uses("vllm.v1.engine.EngineCoreOutputs", "outputs", "ends of many requests are one output")
uses("vllm.SamplingParams", "extra_args", "what a request asks of tLLM travels in it")


class BulkItem(NamedTuple):
    """One token of a new request.

    Attributes:
        ticket: of the sender, who is told when the token was computed.
        tokens: the prompt.
        consumers: options by consumer id, instead of those that all have.
        streamed: whether it waits for more input then, until it is aborted.
    """

    ticket: int
    request_id: str
    tokens: Sequence[int]
    consumers: Mapping[str, Any] | None
    streamed: bool = False


class BulkInputs(NamedTuple):
    """The next inputs of streamed requests that wait for one, and one token of each. What is of one
    request stands at one place of each list.

    Attributes:
        tickets: of the sender, who is told when the token was computed.
        request_ids: the engine's own.
        tokens: what is appended.
        consumers: options by consumer id, instead of those that the request has, of those that ask
            otherwise than before: each with its place in the lists.
    """

    tickets: list[int]
    request_ids: list[str]
    tokens: list[Sequence[int]]
    consumers: list[tuple[int, Mapping[str, Any]]]


_NO_INPUTS = BulkInputs([], [], [], [])


Ended = Callable[[Sequence[int], Exception | None], None]
"""Called with tickets, once for each: with None when the tokens were computed, or with what went
wrong."""


class Bulk:
    """The client's half, one for an engine. All methods are called on the engine's event loop.

    Not for data-parallel replicas: vLLM's client chooses one for each message.

    Args:
        ended: told of the tickets that are expected.

    Attributes:
        noticed: of how many tickets a notice came before vLLM's message.
    """

    def __init__(self, engine: AsyncLLM, ended: Ended) -> None:
        self._engine = engine
        self._ended = ended
        self._sent: dict[int, str] = {}
        self._begun: dict[str, int] = {}
        self._streamed: dict[str, Callable[[Exception], None]] = {}
        self._messages: dict[str, list[int]] = {}
        self._numbers = itertools.count(1)
        self._inbox: NoticeInbox | None = None
        self._inbox_wanted = True
        self.noticed = 0
        processor: Any = engine.output_processor
        if isinstance(getattr(processor.process_outputs, "__self__", None), Bulk):
            raise ValueError(
                "this engine is asked in bulk by another AsyncVirtualLM; use that one, or make "
                "another engine"
            )
        self._process_outputs = processor.process_outputs
        self._propagate_error = processor.propagate_error
        processor.process_outputs = self._on_outputs
        processor.propagate_error = self._on_error

    def engine_id(self, request_id: str) -> str | None:
        """The engine's own id of a running request."""
        known: Mapping[str, list[str]] = self._engine.output_processor.external_req_ids
        found = known.get(request_id)
        return found[0] if found else None

    def expect(self, tickets: Iterable[int], request_ids: Iterable[str]) -> None:
        """Of these tickets, and the requests with them, somebody wants to hear when they are
        sent."""
        self._sent.update(zip(tickets, request_ids, strict=True))

    def expect_end(self, request_id: str, lost: Callable[[Exception], None]) -> None:
        """A streamed request will be begun. `lost` is called when the engine ends it; `abort` ends
        it without that."""
        self._streamed[request_id] = lost

    def send(
        self,
        params: vllm.SamplingParams,
        begun: Sequence[BulkItem] = (),
        continued: BulkInputs = _NO_INPUTS,
    ) -> Coroutine[Any, Any, None]:
        """Send requests of one token each, all of which are expected.

        Args:
            params: of the requests in `begun`, prepared by the engine. That they have a token, and
                fit into the engine, is the caller's to check.
            continued: streamed requests, which keep their own parameters.

        Returns:
            What does it, and never raises. What is to reach the engine later must begin later.
        """
        self._begun.update((item.request_id, item.ticket) for item in begun)
        message = self.message(params, next(self._numbers), begun, continued, self._address())
        tickets = [*(item.ticket for item in begun), *continued.tickets]
        self._messages[message.request_id] = tickets
        return self._deliver(message, tickets)

    def _address(self) -> str:
        """Where the scheduler sends notices; empty where it cannot."""
        if self._inbox_wanted:
            self._inbox_wanted = False
            with suppress(OSError, NotImplementedError):
                self._inbox = NoticeInbox(self._on_notice)
        return "" if self._inbox is None else self._inbox.address

    def _on_notice(self, tickets: Sequence[int]) -> None:
        open_ones = len(self._sent)
        self.end(tickets, None)
        self.noticed += open_ones - len(self._sent)

    @staticmethod
    def message(
        params: vllm.SamplingParams,
        number: int,
        begun: Sequence[BulkItem],
        continued: BulkInputs,
        notices: str = "",
    ) -> EngineCoreRequest:
        """A message with that number, and the address of an inbox; the rest as for `send`."""
        message = copy(params)
        # Columns: little is made of them when they are read.
        wire = {"begun": list(map(list, begun)), "continued": list(continued), "notices": notices}
        message.extra_args = {**(params.extra_args or {}), _EXTRA: wire}
        return EngineCoreRequest(
            request_id=f"{_EXTRA}_{number}",
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=message,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    async def _deliver(self, request: EngineCoreRequest, tickets: list[int]) -> None:
        try:
            self._engine._run_output_handler()
            if self._engine.errored:
                raise self._engine.dead_error
            await self._engine.engine_core.add_request_async(request)
        except Exception as error:
            self.end(tickets, error)

    def abort(self, ticket: int) -> Coroutine[Any, Any, None]:
        """Give up a request that was begun. To be run like what `send` returns."""
        return self.abort_requests([self._sent[ticket]])

    def abort_requests(self, request_ids: list[str]) -> Coroutine[Any, Any, None]:
        """Give up requests, by the engine's own ids. To be run like what `send` returns."""
        for request_id in request_ids:
            self._streamed.pop(request_id, None)
        return self._engine.engine_core.abort_requests_async(request_ids)

    def end(self, tickets: Iterable[int], error: Exception | None) -> None:
        """Tell the senders of some tickets, as far as they were not told yet."""
        known = [ticket for ticket in tickets if ticket in self._sent]
        for ticket in known:
            self._begun.pop(self._sent.pop(ticket), None)
        if known:
            self._ended(known, error)
        open_ones = self._sent.keys()
        for name, of in list(self._messages.items()):
            if open_ones.isdisjoint(of):
                del self._messages[name]

    def close(self, error: Exception) -> None:
        """End what is under way with an error, and leave the engine as it was."""
        self.end(self._sent, error)
        processor: Any = self._engine.output_processor
        processor.process_outputs = self._process_outputs
        processor.propagate_error = self._propagate_error
        self._inbox_wanted = False
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    @overrides(
        "vllm.v1.engine.output_processor.OutputProcessor.process_outputs",
        "ends of requests in bulk are taken out of the engine's outputs",
    )
    def _on_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> Any:
        others = []
        for output in engine_core_outputs:
            name = output.request_id
            if name == _ENDED:
                self.end(output.new_token_ids, None)
            elif name == _FAILED:
                self.end(output.new_token_ids, _aborted(output.stop_reason))
            elif name in self._begun or name in self._streamed:
                # Told by the engine itself, as when it is paused.
                if name in self._begun:
                    self.end([self._begun[name]], _aborted())
                if (lost := self._streamed.pop(name, None)) is not None:
                    lost(_aborted())
            elif name in self._messages:  # refused before the scheduler saw it
                self.end(self._messages[name], _aborted())
            else:
                others.append(output)
        return self._process_outputs(others, *args, **kwargs)

    @overrides(
        "vllm.v1.engine.output_processor.OutputProcessor.propagate_error",
        "who waits for requests in bulk hears that the engine died",
    )
    def _on_error(self, e: Exception) -> None:
        self.end(self._sent, e)
        self._propagate_error(e)


def loop_of(engine: AsyncLLM) -> asyncio.AbstractEventLoop | None:
    """The event loop that an engine takes its outputs on; None before it has one."""
    handler = engine.output_handler
    return None if handler is None else handler.get_loop()


def _aborted(reason: int | str | None = None) -> Exception:
    if reason is not None:
        return RefusedError(str(reason))
    return RuntimeError("the engine aborted the request, or did not take it")


@dataclass(slots=True)
class NextInput:
    """More tokens of a streamed request. It has what vLLM's scheduler looks at in a `Request` that
    continues another, and costs a fraction of one."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: vllm.SamplingParams
    arrival_time: float
    max_tokens: int = 1
    resumable: bool = True
    mm_features: None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_steered(self) -> bool:
        """Whether something of its request depends on how many tokens it has."""
        return "steering" in (self.sampling_params.extra_args or {}).get(EXTRA_ARG, {})


def _asking(params: vllm.SamplingParams, consumers: Mapping[str, Any] | None, **more: Any) -> Any:
    """Parameters like others, with options of their own; `more` is of their spec."""
    extra = params.extra_args or {}
    spec = {**extra.get(EXTRA_ARG, {}), **more}
    spec["consumers"] = {**spec.get("consumers", {}), **(consumers or {})}
    own = copy(params)
    own.extra_args = {**extra, EXTRA_ARG: spec}
    return own


class BulkRequests:
    """The scheduler's half: takes messages apart, and keeps the outputs of what was in them."""

    def __init__(self) -> None:
        self._tickets: dict[str, int] = {}
        self._outboxes: dict[int, NoticeOutbox] = {}  # by client

    def __bool__(self) -> bool:
        return bool(self._tickets)

    @staticmethod
    def are_in(request: Request) -> bool:
        """Whether a request is a message, and not a user's who names one."""
        params = request.sampling_params
        named = params is not None and _EXTRA in (params.extra_args or ())
        return named and _MESSAGE.fullmatch(request.request_id) is not None

    def note_inbox(self, message: Request) -> None:
        """Who sent a message is given notice at the address that it names."""
        assert message.sampling_params is not None and message.sampling_params.extra_args
        address = message.sampling_params.extra_args[_EXTRA]["notices"]
        known = self._outboxes.get(message.client_index)
        if known is None or known.address != address:
            if known is not None:  # of an `AsyncVirtualLM` that was closed
                known.close()
            self._outboxes[message.client_index] = NoticeOutbox(address)

    def begun(self, message: Request) -> Iterator[Request]:
        """The requests that a message begins."""
        assert message.sampling_params is not None and message.sampling_params.extra_args
        for item in map(BulkItem._make, message.sampling_params.extra_args[_EXTRA]["begun"]):
            self._tickets[item.request_id] = item.ticket
            params = _asking(message.sampling_params, item.consumers, request_id=item.request_id)
            del params.extra_args[_EXTRA]
            yield Request(
                request_id=item.request_id,
                prompt_token_ids=list(item.tokens),
                sampling_params=params,
                pooling_params=None,
                client_index=message.client_index,
                arrival_time=message.arrival_time,
                block_hasher=message._block_hasher,
                resumable=item.streamed,
            )

    def continued(
        self, message: Request, running: Mapping[str, Request]
    ) -> Iterator[tuple[Request, NextInput]]:
        """The streamed requests that a message continues, and with what.

        Args:
            running: by id. A request that has ended is not continued: the client is told of its
                end by its own last output.
        """
        assert message.sampling_params is not None and message.sampling_params.extra_args
        columns = message.sampling_params.extra_args[_EXTRA]["continued"]
        tickets, request_ids, tokens, consumers = columns
        asked, arrived = dict(consumers), message.arrival_time
        for place, request_id in enumerate(request_ids):
            known = running.get(request_id)
            if known is None or known.sampling_params is None:
                continue
            params = known.sampling_params
            if place in asked:
                params = _asking(params, asked[place])
            self._tickets[request_id] = tickets[place]
            yield known, NextInput(request_id, tokens[place], params, arrived)

    def give_notice(self, output: ModelRunnerOutput, running: Mapping[str, Request]) -> None:
        """Tell the clients whose tokens a step has computed, before vLLM goes through its outputs.

        Not of requests that were preempted meanwhile: those may be computed again, and what would
        be written then is not to meet what the client asks next.
        """
        tickets: dict[int, list[int]] = {}
        for request_id, drawn in zip(output.req_ids, output.sampled_token_ids, strict=False):
            ticket = self._tickets.get(request_id)
            request = running.get(request_id)
            if not drawn or ticket is None or request is None:
                continue
            if request.status == RequestStatus.RUNNING and not request.num_stale_output_tokens:
                tickets.setdefault(request.client_index, []).append(ticket)
        for client, found in tickets.items():
            self._outboxes[client].send(found)

    def take(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Put the tickets in the place of the outputs that they stand for."""
        for of_client in outputs.values():
            ended: list[int] = []
            failed: dict[int | str | None, list[int]] = {}  # by reason
            others = []
            for output in of_client.outputs:
                ticket = self._tickets.get(output.request_id)
                if ticket is None:
                    others.append(output)
                elif output.finish_reason is not None:
                    del self._tickets[output.request_id]
                    if output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                        ended.append(ticket)
                    else:
                        failed.setdefault(output.stop_reason, []).append(ticket)
            if ended:
                others.append(EngineCoreOutput(_ENDED, ended))
            for reason, found in failed.items():
                others.append(EngineCoreOutput(_FAILED, found, stop_reason=reason))
            of_client.outputs = others

    def forget(self, running: Mapping[str, Request]) -> None:
        """Requests that were aborted have no last output."""
        self._tickets = {i: ticket for i, ticket in self._tickets.items() if i in running}
