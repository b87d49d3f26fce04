"""How a request ends by a condition or a controller, or because its rows are not finite: the worker
says which held, or why, the scheduler what comes of it.

What conversations remember travels the same way (`tllm.engine.conversation_memory`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tllm.engine.refusals import RefusedError
from tllm.engine.seams import overrides, uses
from tllm.runtime.verdicts import BROKEN, PROMPT, Fired, StepVerdicts
from tllm.spec.request import RequestSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

uses(
    "vllm.v1.outputs",
    "ModelRunnerOutput",
    "what conditions made of a step travels with its tokens",
)
uses("vllm.v1.request", "RequestStatus", "how a request ends by a condition")

uses(
    "vllm.v1.engine.EngineCoreOutput",
    "request_id new_token_ids new_logprobs finish_reason stop_reason",
    "tokens that were accepted at once come before the end of their request",
)
uses("vllm.v1.outputs.LogprobsLists", "slice_request", "the end of a request has no tokens")

_FIRED = "tllm_fired"
"""Attribute of a `ModelRunnerOutput`: by request, what held."""
_NOTHING: Mapping[str, Fired] = {}


class _JudgedOutput(AsyncModelRunnerOutput):
    """A step's output, under way to the host, with what conditions made of its rows."""

    def __init__(self, output: AsyncModelRunnerOutput, verdicts: StepVerdicts) -> None:
        self._output = output
        self._verdicts = verdicts

    @overrides(
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_output",
        "what conditions made of a step is waited for where its tokens are",
    )
    def get_output(self) -> ModelRunnerOutput:
        return _noted(self._output.get_output(), self._verdicts)

    @overrides(
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_kv_connector_output",
        "what a connector brought in a step that failed is not lost",
        since="0.33",
    )
    def get_kv_connector_output(self) -> Any:
        output: Any = self._output  # of 0.32 and before, where nobody asks
        return output.get_kv_connector_output()


def with_verdicts(output: Any, verdicts: StepVerdicts) -> Any:
    """What a model runner gave, with what conditions made of the step. Nothing is waited for that
    the tokens are not waited for, too."""
    if output is None:  # of a rank that says nothing
        return None
    if isinstance(output, AsyncModelRunnerOutput):
        return _JudgedOutput(output, verdicts)
    return _noted(output, verdicts)


def _noted(output: ModelRunnerOutput, verdicts: StepVerdicts) -> ModelRunnerOutput:
    fired = verdicts.wait()
    if fired:
        setattr(output, _FIRED, fired)
    return output


def fired_in(output: Any) -> Mapping[str, Fired]:
    """What held in a step, by request, of what workers were asked for."""
    found: Mapping[str, Fired] = vars(output).get(_FIRED, _NOTHING)
    return found


def given_up(output: Any) -> str | None:
    """Why a sample of a request cannot go on, of an output as its user has it; None for no such."""
    samples = output.outputs if isinstance(output.outputs, list) else ()
    found = (each.stop_reason for each in samples if each.finish_reason == "error")
    return next((str(reason) for reason in found if reason is not None), None)


def check_goes_on(output: Any) -> None:
    """Raises `RefusedError` where `given_up` says why: for whoever hands no output on."""
    if (reason := given_up(output)) is not None:
        raise RefusedError(reason)


def _none_of(logprobs: Any) -> Any:
    """Log-probabilities of no tokens, where there are those of some."""
    return None if logprobs is None else logprobs.slice_request(0, 0)


class _End(NamedTuple):
    """How a request ends in this step: how many of its new tokens are kept, and why it does."""

    kept: int
    status: RequestStatus
    reason: str


class RequestEndings:
    """The requests that conditions may end, as the scheduler knows them.

    Attributes:
        may_end: whether any request may end in the step that was heard of last.
    """

    def __init__(self) -> None:
        self.may_end = False
        self._asked: dict[str, RequestSpec] = {}
        self._fired: Mapping[str, Fired] = {}
        #: Requests for whose prompt a condition held, computed maybe in several steps: its place
        #: in the order in which they were asked.
        self._refused: dict[str, int] = {}
        #: Why requests cannot go on.
        self._broken: dict[str, str] = {}
        self._apart: set[str] = set()

    def add(self, request_id: str, spec: RequestSpec) -> None:
        self._asked[request_id] = spec

    def forget(self, request_id: str) -> None:
        self._broken.pop(request_id, None)
        if self._asked.pop(request_id, None) is not None:
            self._refused.pop(request_id, None)

    def hear(self, output: Any, running: Container[str]) -> None:
        """A step is over.

        Args:
            running: the requests that have not ended.
        """
        self._fired = vars(output).get(_FIRED, _NOTHING)
        for request_id, fired in self._fired.items():
            broken = [str(why) for place, why in fired if place == BROKEN]
            if broken and request_id in running:
                self._broken[request_id] = broken[0]
            if request_id not in self._asked:  # it has ended since
                continue
            order = [number for number, _ in self._asked[request_id].aborts]
            in_prompt = (number for drawn, number in fired if drawn == PROMPT)
            held = [order.index(number) for number in in_prompt if number in order]
            if held:
                self._refused[request_id] = min(*held, self._refused.get(request_id, len(order)))
        self.may_end = bool(self._fired or self._refused or self._broken)

    def end_apart(self, request_id: str) -> None:
        """A request that ends has new tokens, drafted ones, and all of them are the user's."""
        self._apart.add(request_id)

    def divide(self, outputs: Mapping[int, Any]) -> None:
        """Give the new tokens of requests in an output before the one that ends them.

        Of an output that ends with a stop, vLLM's front end leaves the last token out of the text.

        Args:
            outputs: of a step, by client.
        """
        if not self._apart:
            return
        for each in outputs.values():
            divided: list[EngineCoreOutput] = []
            for output in each.outputs:
                if output.request_id in self._apart:
                    tokens = replace(output, finish_reason=None, stop_reason=None)
                    divided.append(tokens)
                    output = EngineCoreOutput(
                        output.request_id,
                        [],
                        new_logprobs=_none_of(output.new_logprobs),
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                    )
                divided.append(output)
            each.outputs = divided
        self._apart.clear()

    def of(self, request: Request, drawn: int) -> _End | None:
        """How a request ends now; None: it goes on, as far as conditions are concerned.

        Args:
            drawn: how many tokens were drawn for it in the step.
        """
        if request.request_id in self._broken:
            return _End(0, RequestStatus.FINISHED_ERROR, self._broken[request.request_id])
        spec = self._asked.get(request.request_id)
        if spec is None:
            return None
        if request.num_output_tokens == 0 and request.request_id in self._refused:
            _, reason = spec.aborts[self._refused[request.request_id]]
            return _End(0, RequestStatus.FINISHED_ABORTED, reason)
        found = self._fired.get(request.request_id, ())
        ends = {number for number, _ in spec.stops}
        fired = [each for each in found if each[1] in ends or isinstance(each[1], str)]
        assert request.sampling_params is not None
        least = request.sampling_params.min_tokens - request.num_output_tokens
        # Rows of drafts that were rejected are beyond the tokens that were drawn.
        places = [place for place, _ in fired if max(least, 0) <= place < drawn]
        if not places:
            return None
        first = min(places)
        held = {number for place, number in fired if place == first}
        named = [name for number, name in spec.stops if number in held]
        reason = next(iter((*named, *(each for each in held if isinstance(each, str)))))
        return _End(first, RequestStatus.FINISHED_STOPPED, reason)
