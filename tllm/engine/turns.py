"""Which streamed requests stay in the scheduler's running batch when a token continues them.

vLLM schedules each input of a streamed request as a new request: all its tokens and blocks are sent
again, and the model runner gives up its place in the batch. Where an input is one token, in the
place of the one that was drawn, a decode step does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from tllm.engine.seams import uses
from tllm.spec.request import wire_of
from tllm.spec.turns import StepTurns

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from tllm.engine.bulk import NextInput

_GO_ON = "requests that a token continues go from the waiting to the running ones"
uses(
    "vllm.v1.core.sched.scheduler.Scheduler",
    "running connector ec_connector use_pp num_spec_tokens use_v2_model_runner "
    "num_sampled_tokens_per_step max_model_len has_mamba_layers max_num_running_reqs "
    "scheduler_config vllm_config",
    _GO_ON,
)
uses(
    "vllm.v1.core.sched.scheduler.Scheduler",
    "kv_holding_waiting deferred_waiting",
    _GO_ON,
    since="0.31",
)
uses(
    "vllm.config.ModelConfig",
    "uses_mrope rswa_window",
    "models for which a runner remembers how long the prompt was",
)
uses(
    "vllm.v1.request.Request",
    "lora_request mm_features prompt_embeds use_structured_output num_tokens num_in_flight_tokens",
    "which requests stay in the running batch when a token continues them",
)
uses(
    "vllm.v1.core.sched.output.SchedulerOutput",
    "scheduled_new_reqs num_scheduled_tokens",
    "which requests that a token continued are scheduled",
)


class Turns:
    """Tokens that continue requests, from their arrival until the workers hear of them.

    A request waits for its token as vLLM lets it wait, with its blocks and its place among
    `max_num_seqs`; only with the token it becomes a running one. So it is aborted, counted and,
    once it runs, preempted as any other.

    Attributes:
        tokens: by request id, those of which the workers have not heard.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self._asking: set[str] = set()  # otherwise than before
        self._drawing: dict[str, SamplingParams] = {}  # which are known to draw by logits alone

    @staticmethod
    def offered(scheduler: Scheduler) -> bool:
        """Whether an engine's requests may stay in the running batch.

        Elsewhere more than the drawn token would have to be replaced: drafts that followed it, what
        other pipeline stages were told, a state that was computed with it. vLLM's V1 runner, when
        it schedules ahead, takes the drawn token on the device, and it counts positions in several
        dimensions when a prompt comes; V2 tells attention with a window of the rest how long the
        prompt is.
        """
        if not hasattr(scheduler, "kv_holding_waiting"):  # before 0.31
            return False
        model, on_v1 = scheduler.vllm_config.model_config, not scheduler.use_v2_model_runner
        return not (
            (on_v1 and scheduler.scheduler_config.async_scheduling)
            or (on_v1 and model.uses_mrope)
            or (model.rswa_window is not None and not on_v1)
            or scheduler.use_pp
            or scheduler.num_spec_tokens
            or scheduler.num_sampled_tokens_per_step != 1
            or scheduler.has_mamba_layers
            or scheduler.connector is not None
            or scheduler.ec_connector is not None
        )

    def fits(self, scheduler: Scheduler, request: Request, more: NextInput) -> bool:
        """Whether a request that waits for an input can go on with this one as a running request.

        One token, in the place of the only one that was drawn since the last input. Nothing that
        the runner keeps of the request may depend on which of its tokens were drawn.
        """
        return (
            len(more.prompt_token_ids) == 1
            and request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            and request.num_in_flight_tokens == 0
            and request.num_output_tokens == 1
            and request.num_computed_tokens == request.num_tokens - 1
            and request.num_tokens < scheduler.max_model_len
            and request.lora_request is None
            and not request.mm_features
            and request.prompt_embeds is None
            and not request.use_structured_output
            and self._is_drawn_alone(more)
        )

    def _is_drawn_alone(self, more: NextInput) -> bool:
        """Whether `_draws_by_logits_alone`; of the same parameters that is asked once."""
        if self._drawing.get(more.request_id) is more.sampling_params:
            return True
        if not _draws_by_logits_alone(more.sampling_params):
            return False
        self._drawing[more.request_id] = more.sampling_params
        return True

    def forget(self, running: Mapping[str, Request]) -> None:
        """Other requests have ended than those that run."""
        for request_id in [each for each in self._drawing if each not in running]:
            del self._drawing[request_id]
        self._asking.intersection_update(running)

    def begin(
        self, scheduler: Scheduler, requests: Iterable[Request], asking: Iterable[str]
    ) -> None:
        """These, which vLLM has continued and would schedule as new ones, are running ones.

        Args:
            asking: ids of those that ask otherwise than before.
        """
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        staying = [each for each in requests if each.status == RequestStatus.WAITING][:room]
        if not staying:
            return
        scheduler.kv_holding_waiting.remove_requests(staying)
        scheduler.deferred_waiting.difference_update(staying)
        for request in staying:
            request.status = RequestStatus.RUNNING
            self.tokens[request.request_id] = request.all_token_ids[-1]
        scheduler.running.extend(staying)
        self._asking.update(asking)

    def scheduled(self, output: Any, requests: Mapping[str, Request]) -> StepTurns:
        """Those of which the workers must hear with this step."""
        # A preempted one may come back as a new request, and brings all that it has.
        begun = {new.req_id for new in output.scheduled_new_reqs}
        ids: list[str] = []
        tokens, lengths, computed = [], [], []
        waiting, counts = {}, output.num_scheduled_tokens
        for request_id, token in self.tokens.items():
            request = requests.get(request_id)
            count = counts.get(request_id)
            if request is None or request_id in begun:
                continue
            if count is None:
                waiting[request_id] = token
                continue
            ids.append(request_id)
            tokens.append(token)
            lengths.append(request.num_prompt_tokens)
            computed.append(request.num_computed_tokens - count)  # the step is counted already
        consumers = {
            request_id: wire_of(requests[request_id].sampling_params).get("consumers", {})
            for request_id in self._asking.intersection(ids)
        }
        self._asking.intersection_update(waiting)
        self.tokens = waiting
        return StepTurns(ids, tokens, lengths, computed, consumers)


def _draws_by_logits_alone(params: SamplingParams) -> bool:
    """Whether the tokens before do not matter to the sampler, nor which of them were drawn."""
    return (
        params.max_tokens == 1
        and params.temperature == 0.0
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and not params.bad_words
        and not params.min_tokens
        and params.logprobs is None
        and params.prompt_logprobs is None
    )
