"""What stands between vLLM's synchronous front ends and their callers: every override of one of
their methods.

All of them are on instances, so that they can be put on an engine that exists already, whoever made
it. What happens to a request is decided by whoever is given (`tllm.client`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.engine.llm_engine import LLMEngine

from tllm.engine.async_front import AsyncLLMFront
from tllm.engine.in_process import let_others_live
from tllm.engine.interrupts import (
    noted_interrupts,
    often_uninterrupted,
    raises_in_place,
    uninterrupted,
)
from tllm.engine.processed_requests import check_requests, params_of, put_into
from tllm.engine.refusals import RefusedError
from tllm.engine.seams import overrides, uses
from tllm.engine.verdicts import check_goes_on

uses(
    "vllm.v1.engine.output_processor.OutputProcessor",
    "parent_requests request_states",
    "what an interrupted caller leaves behind is aborted",
)
uses("vllm.entrypoints.llm.LLM", "pooling_task", "which scores are made of two requests")
uses(
    "vllm.entrypoints.generate.beam_search.utils.BeamSearchSequence",
    "logprobs",
    "a beam's generated tokens are told apart",
)
uses(
    "vllm.v1.engine.core_client.SyncMPClient",
    "_send_input",
    "an interrupt waits until a message to the engine's process is sent",
    takes="request_type request",
)


class SyncRequests(Protocol):
    """Who decides what happens to the requests of an `LLMEngine`."""

    def expect(self, params: Sequence[Any]) -> None:
        """Requests with these parameters are about to be added."""

    def admit(self, params: Any, request_id: str) -> Any:
        """Make a request ready; its `params` are vLLM's parameters, its own."""

    def note(self, request: Any, output: Any) -> None:
        """An output of a request, before the caller has it."""

    def finish(self, outputs: list[Any]) -> None:
        """Put results on the last outputs of requests, each with its request as `tllm_request`."""

    def drop(self, requests: list[Any]) -> None:
        """Requests were aborted: nobody will come for their results."""

    def refuse(self, request: Any) -> None:
        """A request did not begin."""

    def step(self) -> None:
        """The engine begins a step."""


class _Running(NamedTuple):
    engine_id: str
    request: Any


class LLMEngineFront:
    """Stands before an `LLMEngine`: `add_request`, `step` and `abort_request` of that instance.

    It belongs to the engine, which ends as soon as its user has it no more.

    Attributes:
        handle: gives what the user calls.
        generated: how many of the last tokens of the prompts that are added now were generated,
            where they are beams.
    """

    handle: Callable[[], Any] = staticmethod(lambda: None)
    generated: int | None = None

    def __init__(self, engine: LLMEngine, requests: SyncRequests, check: Any) -> None:
        self._engine: LLMEngine = weakref.proxy(engine)
        self._requests = requests
        self._check = check
        self._running: dict[str, _Running] = {}
        self._ended: list[Any] | None = None
        self._interrupted = False
        self._add_request = _unowned(engine, "add_request")
        self._abort_request = _unowned(engine, "abort_request")
        # A step is on the path of every token: it has no function of ours more than it needs.
        self._living: weakref.ref[LLMEngine] = weakref.ref(engine)
        step = engine.step
        self._step = step.__func__ if _is_own(step, engine) else lambda _: step()
        if isinstance(engine.engine_core, InprocClient):
            let_others_live(engine.engine_core)
        _send_whole(engine.engine_core)
        engine.add_request = self.add_request  # type: ignore[method-assign]
        engine.step = self.step  # type: ignore[method-assign]
        engine.abort_request = self.abort_request  # type: ignore[method-assign]
        check_requests(engine, check)

    @overrides(
        "vllm.v1.engine.llm_engine.LLMEngine.add_request", "requests carry what is asked of them"
    )
    def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a request ready, and hand it on."""
        if request_id in self._running:
            raise RefusedError(
                f"request_id={request_id!r} is the name of a request that runs; give this one "
                "another, so that their results are told apart"
            )
        request = self._requests.admit(params_of(prompt, params), request_id)
        try:
            params = put_into(prompt, request.params, self._check)
            with uninterrupted():
                engine_id = self._add_request(request_id, prompt, params, *args, **kwargs)
        except BaseException:
            self._requests.refuse(request)
            # vLLM keeps what it could not send to the engine, and would wait for it for ever.
            self._abort_request([request_id], False)
            raise
        self._running[request_id] = _Running(engine_id, request)
        return engine_id

    @overrides("vllm.v1.engine.llm_engine.LLMEngine.step", "results are put on last outputs")
    def step(self) -> list[Any]:
        """The outputs of a step; the last one of a request has its results."""
        self._requests.step()
        outputs = self._step(self._living())
        ended = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._requests.note(running.request, output)
                if output.finished:
                    del self._running[output.request_id]
                    output.tllm_request = running.request
                    ended.append(output)
        if self._ended is not None:
            self._ended += ended
        elif ended:
            self._requests.finish(ended)
        if self._interrupted:
            raise KeyboardInterrupt
        return outputs  # type: ignore[no-any-return]

    @overrides(
        "vllm.v1.engine.llm_engine.LLMEngine.abort_request", "what a request held is given up"
    )
    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Abort requests, and give up what they held."""
        names = list(request_ids)
        self._abort_request(names, internal)
        wanted = set(names)
        gone = [
            name
            for name, running in self._running.items()
            if (running.engine_id if internal else name) in wanted
        ]
        self._requests.drop([self._running.pop(name).request for name in gone])

    @contextmanager
    def added_together(self, params: Sequence[Any]) -> Iterator[None]:
        """Requests with these parameters are added, of which none is left unless all are added:
        vLLM itself leaves those before an interrupt, and gives their outputs to its next caller."""
        self._requests.expect(params)
        before = self._running.copy()
        try:
            with often_uninterrupted():
                yield
        except BaseException:
            self.abort_request([name for name in self._running if name not in before])
            raise

    @contextmanager
    def together(self) -> Iterator[list[Any]]:
        """Requests that the caller waits for together: their results are fetched at the end.

        An interrupt comes between two steps of an engine in this process, which would be left in
        the middle of one otherwise. Whatever ends the wait, nothing is left for the next caller.

        Yields:
            The outputs of those that have ended. They have their results after it.
        """
        if self._ended is not None:  # the caller's caller waits for more
            yield self._ended
            return
        ended = self._ended = []
        try:
            with self._interrupts_between_steps():
                yield ended
            self._requests.finish(ended)
        except BaseException:
            processor = self._engine.output_processor
            # Samples first: vLLM aborts those of a request that has several, but not twice.
            unfinished = [*processor.request_states, *processor.parent_requests]
            self.abort_request(unfinished, internal=True)
            # Those that had ended by then, too: their outputs are lost.
            self._requests.drop([output.tllm_request for output in self._ended or ()])
            raise
        finally:
            self._ended = None

    @contextmanager
    def in_beams(self, generated: int) -> Iterator[None]:
        """Requests that are added in here are beams that have grown by as many tokens."""
        self.generated = generated
        try:
            yield
        finally:
            self.generated = None

    @contextmanager
    def _interrupts_between_steps(self) -> Iterator[None]:
        if not raises_in_place() or not isinstance(self._engine.engine_core, InprocClient):
            yield
            return

        def note() -> None:
            self._interrupted = True

        try:
            with noted_interrupts(note):
                yield
        finally:
            self._interrupted = False


class OfflineFront:
    """Mixed into `vllm.LLM`, whose engine has an `LLMEngineFront`."""

    _front: LLMEngineFront

    @overrides(
        "vllm.entrypoints.llm.LLM._render_and_add_requests",
        "what steers requests that are added together is brought to the workers at once, and an "
        "interrupt leaves none of them",
    )
    def _render_and_add_requests(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with self._front.added_together(params):
            return super()._render_and_add_requests(prompts, params, *args, **kwargs)  # type: ignore[misc]

    @overrides(
        "vllm.entrypoints.llm.LLM._run_engine", "results of all requests are fetched at once"
    )
    def _run_engine(self, *args: Any, **kwargs: Any) -> Any:
        with self._front.together():
            outputs = super()._run_engine(*args, **kwargs)  # type: ignore[misc]
        if self._front.generated is not None:
            for output in outputs:  # of beams, which nobody sees
                check_goes_on(output)
        return outputs

    @overrides(
        "vllm.entrypoints.llm.LLM._beam_search_step",
        "a beam's generated tokens, which are a prompt's in each of its steps, are told apart",
    )
    def _beam_search_step(self, instances_batch: Any, *args: Any, **kwargs: Any) -> Any:
        beams = [beam for instance in instances_batch for beam in instance.beams]
        # All beams of a batch have grown alike: one by one, with each step.
        with self._front.in_beams(len(beams[0].logprobs) if beams else 0):
            return super()._beam_search_step(instances_batch, *args, **kwargs)  # type: ignore[misc]

    @property
    def scores_in_one_pass(self) -> bool:
        """Whether both texts of a score are one request, as of a cross-encoder."""
        return bool(self.pooling_task == "classify")  # type: ignore[attr-defined]


def handle_of(engine: Any) -> Any:
    """What the user of an engine calls that one of ours stands before; None: none does."""
    front = getattr(engine.add_request, "__self__", None)
    return front.handle() if isinstance(front, (LLMEngineFront, AsyncLLMFront)) else None


def _send_whole(client: Any) -> None:
    """Let a front end send each message to the engine's process whole. Of one that is sent in part
    the engine hears together with the next one, which ends the thread that reads them: nothing is
    heard any more."""
    if not isinstance(client, SyncMPClient):
        return
    send = _unowned(client, "_send_input")

    def sent(*args: Any, **kwargs: Any) -> Any:
        with uninterrupted():
            return send(*args, **kwargs)

    client._send_input = sent  # type: ignore[method-assign]


def _unowned(owner: Any, name: str) -> Callable[..., Any]:
    """A method that ours stands in the place of, for what its object has: with a cycle of
    references an engine would stay, and all its memory, since vLLM takes it out of what Python
    collects. What somebody has put in the method's place is kept as it is."""
    method: Callable[..., Any] = getattr(owner, name)
    if not _is_own(method, owner):
        return method
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = found()
        assert own is not None, "an engine that has ended calls nothing"
        return own(*args, **kwargs)

    return call


def _is_own(method: Callable[..., Any], owner: Any) -> bool:
    """Whether a method is the object's, and nobody's in its place."""
    return inspect.ismethod(method) and method.__self__ is owner
