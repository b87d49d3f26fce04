"""Requests in bulk: many in one message to the engine, and their ends in one message back.

A request, and each input of a streamed one, costs vLLM's client more time than the model needs for
its token when hundreds of them want one token each. Whoever gets what he wants from a consumer, and
has no use for vLLM's output, can send them together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.request import Request

from tllm.spec.request import EXTRA_ARG

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM

_EXTRA = "tllm_bulk"
_ENDED, _FAILED = "tllm_bulk_ended", "tllm_bulk_failed"
"""Ids of outputs whose `new_token_ids` are tickets."""


class Item(NamedTuple):
    """One token of one request.

    Attributes:
        ticket: of the sender, who is told when the token was computed.
        request_id: a new one, or the engine's own of a streamed request that waits for input.
        tokens: the prompt, or what is appended to it.
        consumers: options by consumer id, instead of those that the request has.
    """

    ticket: int
    request_id: str
    tokens: Sequence[int]
    consumers: Mapping[str, Any]


class Bulk:
    """The client's half, one for an engine. All methods are called on the engine's event loop.

    Not for data-parallel replicas: vLLM's client chooses one for each message.

    Args:
        ended: called with each ticket once: with None when the token was computed, or with what
            went wrong. Not called for what was aborted.
    """

    def __init__(self, engine: AsyncLLM, ended: Callable[[int, Exception | None], None]) -> None:
        self._engine = engine
        self._ended = ended
        self._sent: dict[int, str] = {}
        self._begun: dict[str, int] = {}
        self._messages: dict[str, list[int]] = {}
        self._numbers = itertools.count(1)
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

    def send(
        self, params: vllm.SamplingParams, begun: Sequence[Item], continued: Sequence[Item]
    ) -> Coroutine[Any, Any, None]:
        """Send requests of one token each.

        Args:
            params: of the requests in `begun`, prepared by the engine. That they have a token, and
                fit into the engine, is the caller's to check.
            continued: the next input of streamed requests, which keep their own parameters.

        Returns:
            What does it, and never raises. What is to reach the engine later must begin later.
        """
        tickets = [item.ticket for item in (*begun, *continued)]
        self._sent.update((item.ticket, item.request_id) for item in (*begun, *continued))
        self._begun.update((item.request_id, item.ticket) for item in begun)
        name = f"{_EXTRA}_{next(self._numbers)}"
        self._messages[name] = tickets
        message = copy(params)
        wire = {"begun": list(map(list, begun)), "continued": list(map(list, continued))}
        message.extra_args = {**(params.extra_args or {}), _EXTRA: wire}
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=message,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return self._deliver(request, tickets)

    async def _deliver(self, request: EngineCoreRequest, tickets: list[int]) -> None:
        try:
            self._engine._run_output_handler()
            if self._engine.errored:
                raise self._engine.dead_error
            await self._engine.engine_core.add_request_async(request)
        except Exception as error:
            self._end(tickets, error)

    def forget(self, ticket: int) -> None:
        """Say nothing more of a ticket."""
        self._begun.pop(self._sent.pop(ticket, ""), None)

    def abort(self, ticket: int) -> Coroutine[Any, Any, None]:
        """Give up a request that was begun. To be run like what `send` returns."""
        request_id = self._sent[ticket]
        self.forget(ticket)
        return self._engine.engine_core.abort_requests_async([request_id])

    def _on_outputs(self, outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        others = []
        for output in outputs:
            name = output.request_id
            if name == _ENDED:
                self._end(output.new_token_ids, None)
            elif name == _FAILED:
                self._end(output.new_token_ids, _aborted())
            elif name in self._begun:  # told by the engine itself, as when it is paused
                self._end([self._begun[name]], _aborted())
            elif name in self._messages:  # refused before the scheduler saw it
                self._end(self._messages[name], _aborted())
            else:
                others.append(output)
        return self._process_outputs(others, *args, **kwargs)

    def _on_error(self, error: Exception) -> None:
        self._end(list(self._sent), error)
        self._propagate_error(error)

    def _end(self, tickets: Iterable[int], error: Exception | None) -> None:
        for ticket in list(tickets):
            if ticket in self._sent:
                self.forget(ticket)
                self._ended(ticket, error)
        open_ones = self._sent.keys()
        for name, of in list(self._messages.items()):
            if open_ones.isdisjoint(of):
                del self._messages[name]


def _aborted() -> RuntimeError:
    return RuntimeError("the engine aborted the request, or did not take it")


class BulkRequests:
    """The scheduler's half: takes messages apart, and keeps the outputs of what was in them."""

    def __init__(self) -> None:
        self._tickets: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    @staticmethod
    def are_in(request: Request) -> bool:
        """Whether a request is a message."""
        params = request.sampling_params
        return params is not None and _EXTRA in (params.extra_args or ())

    def of(self, message: Request, running: Mapping[str, Request]) -> Iterator[Request]:
        """What a message holds, as vLLM's own requests.

        Args:
            running: by id. A request that has ended is not continued: the client is told of its
                end by its own last output.
        """
        assert message.sampling_params is not None and message.sampling_params.extra_args
        wire = message.sampling_params.extra_args.pop(_EXTRA)
        for item in map(Item._make, wire["begun"]):
            yield self._request(message, item, message.sampling_params)
        for item in map(Item._make, wire["continued"]):
            known = running.get(item.request_id)
            if known is not None and known.sampling_params is not None:
                yield self._request(message, item, known.sampling_params, resumable=True)

    def _request(
        self, message: Request, item: Item, params: vllm.SamplingParams, resumable: bool = False
    ) -> Request:
        self._tickets[item.request_id] = item.ticket
        own = copy(params)
        extra = params.extra_args or {}
        spec = dict(extra.get(EXTRA_ARG, {}))
        spec["consumers"] = {**spec.get("consumers", {}), **item.consumers}
        if not resumable:
            spec["request_id"] = item.request_id
        own.extra_args = {**extra, EXTRA_ARG: spec}
        return Request(
            request_id=item.request_id,
            prompt_token_ids=list(item.tokens),
            sampling_params=own,
            pooling_params=None,
            client_index=message.client_index,
            arrival_time=message.arrival_time,
            block_hasher=None if resumable else message._block_hasher,
            resumable=resumable,
        )

    def take(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Put the tickets in the place of the outputs that they stand for."""
        for of_client in outputs.values():
            tickets: dict[str, list[int]] = {_ENDED: [], _FAILED: []}
            others = []
            for output in of_client.outputs:
                ticket = self._tickets.get(output.request_id)
                if ticket is None:
                    others.append(output)
                elif output.finish_reason is not None:
                    del self._tickets[output.request_id]
                    computed = output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
                    tickets[_ENDED if computed else _FAILED].append(ticket)
            others += [EngineCoreOutput(kind, found) for kind, found in tickets.items() if found]
            of_client.outputs = others

    def forget(self, running: Mapping[str, Request]) -> None:
        """Requests that were aborted have no last output."""
        self._tickets = {i: ticket for i, ticket in self._tickets.items() if i in running}
