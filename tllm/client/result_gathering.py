"""How results of consumers come to the outputs of requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tllm.client.calls import Pause, Steps, WorkerCall
from tllm.client.registrations import Registrations
from tllm.client.request import Prepared
from tllm.client.results import (
    LEFT,
    ConsumerResult,
    attach_results,
    samples_of,
    set_result,
)
from tllm.consumers.base import Consumer
from tllm.ports.payload import reason_of

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.1


class ResultGathering:
    """Gathers what the workers have to say about requests that have ended.

    Args:
        registered: the consumers that are there.

    Attributes:
        over: prompts that are over and that the workers have not heard of.
    """

    def __init__(self, registered: Registrations) -> None:
        self.over: list[str] = []
        self._registered = registered

    def has_results(self, prepared: Prepared) -> bool:
        """Whether the workers may have anything to say about a request when it ends."""
        if not prepared.keeps_results:
            return False
        consumers = self._registered.consumers.keys()
        if prepared.patch is not None:  # rows may have been dropped before it began
            return True
        if not prepared.named <= consumers:  # it asked for what has left
            return True
        says_why = prepared.samples.need_reasons or bool(consumers)
        return not consumers <= prepared.unused or (bool(prepared.groups) and says_why)

    def hear_who_left(self, requests: Iterable[Prepared]) -> Steps[None]:
        """Know which consumers other front ends have removed, before the results of requests that
        name some are gathered."""
        if self._registered.is_current or not any(request.named for request in requests):
            return
        try:
            yield from self._registered.current()
        except Exception as error:  # the engine is going down, and `gather` says so
            logger.warning("it is not known which consumers have left: %s", error)

    def gather(
        self, outputs: Sequence[Any], timeout_s: float | None, *, alone: bool
    ) -> Steps[None]:
        """Put results on outputs that are the last of their requests.

        Args:
            outputs: each with its request as `tllm_request`.
            timeout_s: how long to wait for consumers; what they have not made then is pending.
            alone: nobody else uses the engine meanwhile, so that workers may wait for consumers,
                and say of requests without results whether they could be steered.
        """
        late: list[Any] = []
        over: list[Any] = []
        for output in outputs:
            request = output.tllm_request
            # Of what is pending, a consumer that has left may still owe something.
            has = request.results.pending or self.has_results(request)
            (late if has else over).append(output)
        steered = [o.tllm_request.prompt_id for o in over if o.tllm_request.groups]
        if alone and steered:
            # Steering has no result, but a worker that could not steer says so. Hardly ever.
            failed = set().union(*(yield WorkerCall("not_steered", (steered,))))
            late += [o for o in over if o.tllm_request.prompt_id in failed]
            over = [o for o in over if o.tllm_request.prompt_id not in failed]
        for output in over:
            self._put_on(output)
            if alone:
                self.over.append(output.tllm_request.prompt_id)
        if late:
            yield from self._fetch_results(late, timeout_s, alone)
        for output in late:
            self._put_on(output)

    def _fetch_results(
        self, outputs: Sequence[Any], timeout_s: float | None, alone: bool
    ) -> Steps[None]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for output in outputs:
            output.tllm_request.samples.gather(output)
        requests = {o.tllm_request.prompt_id: o.tllm_request for o in outputs}
        tokens = {o.tllm_request.prompt_id: o.tllm_request.tokens(o) for o in outputs}
        pending, pause = list(requests), 0.001
        left = 1.0 if timeout_s is None else timeout_s
        while True:
            wait_s = min(1.0, left) if alone else 0.0
            try:
                answers = yield WorkerCall("take_results", (pending, tokens, wait_s))
            except Exception as error:  # the engine is going down; what was generated is here
                logger.warning("no results of consumers were to be had: %s", error)
                for prompt_id in pending:
                    requests[prompt_id].results.lost = reason_of(error)
                return
            for worker, answer in enumerate(answers):
                for prompt_id, request in requests.items():
                    request.results.add(worker, answer.get(prompt_id, {}))
            pending = [name for name, request in requests.items() if request.results.pending]
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if not pending or left <= 0:
                return
            if not alone:
                yield Pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _put_on(self, output: Any) -> None:
        """Put what is known of a request's results on its output, and give them, each once, to the
        consumers of this process."""
        request: Prepared = output.tllm_request
        joined = request.results.joined()
        consumers = self._registered.consumers
        missing = dict.fromkeys(request.named - consumers.keys(), LEFT)
        if request.results.lost:
            used = request.named | (consumers.keys() - request.unused)
            lost = f"the workers could not be asked for the result: {request.results.lost}"
            missing |= dict.fromkeys(used, lost)
            joined = {sample: _made(results) for sample, results in joined.items()}
        attach_results(output, request, joined, missing)
        for index, sample in samples_of(output):
            for name, result in list(sample.consumer_results.items()):
                consumer, key = consumers.get(name), (index, name)
                if consumer is None or result.status == "pending" or key in request.handed_over:
                    continue
                request.handed_over.add(key)
                if getattr(consumer.on_result, "__func__", None) is Consumer.on_result:
                    continue  # it does nothing
                wrong = _wrong_in_on_result(consumer, output, index, result)
                if wrong:
                    set_result(output, sample, name, replace(result, status="error", error=wrong))


def _made(results: Mapping[str, ConsumerResult]) -> dict[str, ConsumerResult]:
    """Those that are not to be asked for again."""
    return {name: result for name, result in results.items() if result.status != "pending"}


def _wrong_in_on_result(consumer: Consumer, output: Any, index: int, result: Any) -> str:
    """Give a consumer a result of an output; what went wrong, or nothing. The output keeps its
    samples: other consumers, and who asked, are given theirs out of it."""
    of_output, wrong = output.outputs, ""
    samples = list(of_output) if isinstance(of_output, list) else []
    try:
        consumer.on_result(output, index, result)
    except (Exception, SystemExit) as error:
        logger.exception("consumer %r raised in on_result", consumer.consumer_id)
        wrong = reason_of(error)
    is_changed = isinstance(of_output, list) and [*map(id, of_output)] != [*map(id, samples)]
    if is_changed or output.outputs is not of_output:
        output.outputs = of_output
        if is_changed:
            of_output[:] = samples
        told = "on_result changed which samples output.outputs has; they were put back"
        logger.error("consumer %r: %s", consumer.consumer_id, told)
        wrong = "; ".join(filter(None, (wrong, told)))
    return wrong
