"""Lanes driven without a client: messages to the core of an engine in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequest

from tllm import LLM, SamplingParams
from tllm.engine.bulk import Bulk, BulkInputs
from tllm.logprobs.arena import Address, Addresses, Arena
from tllm.logprobs.query import WHOLE
from tllm.logprobs.transport import CONSUMER

_ONE_TOKEN: dict[str, Any] = {
    "max_tokens": 1,
    "temperature": 0.0,
    "ignore_eos": True,
    "detokenize": False,
}


class DrivenLanes:
    """Streamed requests that go on by messages as a `Bulk` sends them, a step at a time.

    Args:
        llm: an engine in this process, with a `NextTokenConsumer`.

    Attributes:
        core: vLLM's.
        new, cached: requests that the scheduler gave its workers as new ones, and as ones that
            they have.
    """

    def __init__(self, llm: LLM) -> None:
        self.core: Any = llm.llm_engine.engine_core.engine_core
        self._arena = Arena(llm.llm_engine.model_config.get_vocab_size(), 2**28)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, int]] = {}
        self._tables = Addresses()
        self._addresses: dict[str, Address] = {}
        self.new = self.cached = 0
        self._schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self.new += len(output.scheduled_new_reqs)
        self.cached += output.scheduled_cached_reqs.num_reqs
        return output

    def close(self) -> None:
        """Leave the engine as it was."""
        del self.core.scheduler.schedule
        self._tables.close()
        self._arena.close()

    def open(self, name: str, prompt: Sequence[int], **extra: Any) -> None:
        """A lane, whose first input is a request of vLLM's own; `extra` is of its spec."""
        ticket, place = self._ticket(name)
        options = {"ticket": ticket, "place": self._arena.option(place)}
        spec = {"request_id": name, "consumers": {CONSUMER: options}, **extra}
        params = SamplingParams(**_ONE_TOKEN, extra_args={"tllm": spec})
        self.add(self.request(name, prompt, params, resumable=True))

    def feed(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """The next tokens of lanes, in one message."""
        self.add(self.message(tokens))

    def message(self, tokens: Mapping[str, Sequence[int]]) -> EngineCoreRequest:
        """The next tokens of lanes."""
        self._arena.expect(len(tokens))
        inputs = BulkInputs([], [], [], [])
        for name, appended in tokens.items():
            ticket, place = self._ticket(name)
            address = self._addresses.get(name)
            if address is None:
                address = self._addresses[name] = self._tables.take(self._arena)
            address.say(ticket, place)
            options = address.options(WHOLE)
            if options is not None:
                inputs.consumers.append((len(inputs.tickets), {CONSUMER: options}))
            inputs.tickets.append(ticket)
            inputs.request_ids.append(name)
            inputs.tokens.append(appended)
        return Bulk.message(SamplingParams(**_ONE_TOKEN), 0, (), inputs)

    def _ticket(self, name: str) -> tuple[int, int]:
        (place,) = self._arena.lease_many(1)
        ticket = next(self._numbers)
        self._waiting[ticket] = name, place
        return ticket, place

    @staticmethod
    def request(
        name: str, prompt: Sequence[int], params: SamplingParams, resumable: bool = False
    ) -> EngineCoreRequest:
        """A request as it reaches the core."""
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """Give a request to the core."""
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> list[Any]:
        """One step; what vLLM puts out."""
        outputs, computed = self.core.step_fn()
        self.core.post_step(computed)
        return [each for of in (outputs or {}).values() for each in of.outputs]

    def run(self, most: int = 1000) -> list[Any]:
        """Steps until nothing is left to compute."""
        outputs = []
        for _ in range(most):
            if not self.core.scheduler.has_unfinished_requests() and not self.core.batch_queue:
                break
            outputs += self.step()
        return outputs

    def answers(self) -> dict[str, torch.Tensor]:
        """By lane: the log-probabilities that were asked for since the last call."""
        waiting, self._waiting = self._waiting, {}
        return {
            name: self._arena.read(place, ticket).values.clone()
            for ticket, (name, place) in waiting.items()
        }

    def abort(self, *names: str) -> None:
        """Give lanes up."""
        self.core.abort_requests(list(names))
        for name in names:
            if (address := self._addresses.pop(name, None)) is not None:
                address.give_back()

    def drop(self, name: str) -> None:
        """Nobody will read what a lane was asked last."""
        for ticket, (of, place) in list(self._waiting.items()):
            if of == name:
                del self._waiting[ticket]
                self._arena.release(place)
