"""The scheduler: vLLM's own, with prefix-cache and admission rules for rows read or changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tllm.engine import prefix_cache
from tllm.engine.bulk import BulkRequests
from tllm.engine.conversation_memory import ConversationMemory
from tllm.engine.media import seen_whole, tokens_of
from tllm.engine.options import EngineOptions
from tllm.engine.seams import overrides, uses
from tllm.engine.turns import Turns
from tllm.engine.verdicts import RequestEndings
from tllm.spec.changes import Changes, combined, decided_changes, steering_changes
from tllm.spec.patching import patch_changes
from tllm.spec.request import RequestSpec
from tllm.spec.stretches import Configuration, configurations, steering_stretches

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
    from vllm.v1.request import Request
else:
    _Base = object

logger = init_logger(__name__)

_LOST = "streamed requests that vLLM has taken out of its queues"

uses(
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm_config hash_block_size kv_cache_manager requests waiting finished_req_ids",
    "admission and prefix-cache rules",
)
uses(
    "vllm.v1.core.sched.scheduler.Scheduler",
    "num_spec_tokens running dynamic_sd_lookup max_num_running_reqs",
    "nothing is drafted where tokens are guided",
)
uses(
    "vllm.v1.core.sched.scheduler.Scheduler",
    "_enqueue_waiting_request connector running use_pp scheduler_config",
    _LOST,
)
uses("vllm.v1.core.sched.scheduler.Scheduler", "kv_holding_waiting", _LOST, since="0.31")
uses(
    "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "get_block_ids evict_blocks",
    "blocks of a request that cannot go on are nobody else's",
)
uses(
    "vllm.v1.core.sched.request_queue.RequestQueue",
    "prepend_requests remove_requests",
    "requests wait until the steering tables have room",
)
uses(
    "vllm.v1.request.Request",
    "request_id sampling_params num_prompt_tokens prompt_token_ids all_token_ids status "
    "streaming_queue num_computed_tokens block_hashes num_output_tokens stop_reason mm_features "
    "spec_token_ids",
    "what a request asks, and how far it is",
)
uses(
    "vllm.v1.request.Request",
    "drop_stale_output",
    "which tokens under way of a request that is computed again are drawn anew",
)


class _Rules(_Base):
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = EngineOptions.of(self.vllm_config)
        self._tllm_max_configurations = options.max_steering_configs
        self._tllm_configurations: dict[str, frozenset[Configuration]] = {}
        self._tllm_admitted: set[str] = set()
        self._tllm_reuse_limits: dict[str, int] = {}
        self._tllm_ended: dict[str, tuple[int, ...]] = {}
        self._tllm_wanted: set[str] = set()
        self._tllm_held = 0
        #: For which no tokens are drafted, nor for those beside them.
        self._tllm_guided: set[str] = set()
        self._tllm_told_of_guides = False
        self._tllm_drafts_by_size = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._tllm_endings = RequestEndings()
        self._tllm_conversations = ConversationMemory()
        self._tllm_bulk = BulkRequests()
        self._tllm_turns = Turns() if Turns.offered(self) else None
        # Before 0.31 there are other queues; a connector keeps requests after their end.
        self._tllm_loses_sessions = (
            hasattr(self, "kv_holding_waiting")
            and self.connector is None
            and (self.scheduler_config.async_scheduling or self.use_pp)
        )
        # A connector may find that what a step read was not there.
        self._tllm_gives_notice = hasattr(self, "kv_holding_waiting") and self.connector is None
        self._tllm_block_size = self.hash_block_size
        prefix_cache.limit_reuse(self.kv_cache_manager, self._tllm_reuse_limits)

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler.add_request",
        "block keys and reuse limits of a request, before its first block is looked up",
    )
    def add_request(self, request: Request) -> None:
        if BulkRequests.are_in(request):
            self._tllm_bulk.note_inbox(request)
            for begun in self._tllm_bulk.begun(request):
                self.add_request(begun)
            self._tllm_continue(request)
            return
        spec = RequestSpec.of(request)
        if spec.wants_tokens:
            self._tllm_wanted.add(request.request_id)
        if spec.is_plain:
            super().add_request(request)
            return
        if spec.guided and self.num_spec_tokens:
            self._tllm_guided.add(request.request_id)
            if not self._tllm_told_of_guides:
                self._tllm_told_of_guides = True
                logger.warning(
                    "a consumer guides which tokens are drawn for a request: while one that it "
                    "serves runs or waits, speculative decoding drafts nothing for any request; "
                    "turn it off (consumers={'esamp': {'enabled': False}}, if it is ESamp) where "
                    "tokens are to be drafted"
                )
        known = request.request_id in self.requests  # more of a streamed prompt
        if spec.conversation is not None:
            spec = self._tllm_conversations.begin(request, spec)
        prompt_len = request.num_prompt_tokens - spec.generated
        prompt = prompt_len, tokens_of(request) or ()
        stretches = steering_stretches(spec.steering, *prompt) if spec.steering else []
        changed, history = stretches, ""
        if spec.stops or spec.aborts or spec.acted:
            self._tllm_endings.add(request.request_id, spec)
        changing = [use for use in spec.steering if use.changes_rows]
        if len(changing) < len(spec.steering):
            # Blocks are shared with whoever does not ask to be judged.
            changed = steering_stretches(changing, *prompt) if changing else []
            # But what is done to later tokens may depend on it, and on where the prompt ends.
            for_later = [use.to_wire() for use in spec.steering if use.judges_for_later]
            history = repr((prompt_len, for_later)) if for_later else ""
        if spec.conversation is not None and spec.conversation.held:
            history += repr(("held before", spec.conversation.held))
        self._tllm_limit_reuse(request, spec, prompt)
        if not known:
            changes: dict[str, Changes] = {}
            if spec.patch:
                changes["patch"] = patch_changes(spec.patch, request.num_prompt_tokens)
            if (decided := spec.steered_from(*prompt)) is not None:
                changes["decided"] = decided_changes(decided)
            if changed or not changes:
                changes["steering"] = steering_changes(changed, history)
            whole = seen_whole(request.mm_features, self.vllm_config.model_config)
            prefix_cache.apply(request, spec, combined(changes), self._tllm_block_size, whole)
        if stretches:
            needed = configurations(stretches) - {()}
            before = self._tllm_configurations.get(request.request_id, frozenset())
            self._tllm_configurations[request.request_id] = needed | before
        super().add_request(request)

    def _tllm_limit_reuse(
        self, request: Request, spec: RequestSpec, prompt: tuple[int, Sequence[int]]
    ) -> None:
        """A cached block's rows would never pass the model. Blocks are still written, under the
        plain key: reading changes nothing in them."""
        limits, session = self._tllm_reuse_limits, self.requests.get(request.request_id)
        if session is None:
            first = spec.rows_from(*prompt, spec.sample_index(request.request_id))
            if first is None and request.resumable and spec.reads:
                first = prompt[0]  # later inputs may have the rows that are read
            if first is not None:
                limits[request.request_id] = first
        elif spec.reads and request.request_id not in limits:
            limits[request.request_id] = session.num_prompt_tokens

    def _tllm_continue(self, message: Request) -> None:
        """The inputs of streamed requests that a message holds."""
        turns, staying, asking = self._tllm_turns, [], []
        for request, more in self._tllm_bulk.continued(message, self.requests):
            if turns is None or not turns.fits(self, request, more):
                # vLLM's add_request looks at nothing that it lacks.
                add = self.add_request if more.is_steered else super().add_request
                add(cast("Request", more))
                continue
            staying.append(request)
            if more.sampling_params is not request.sampling_params:
                asking.append(request.request_id)
            if more.is_steered:
                self.add_request(cast("Request", more))
            else:  # as vLLM's add_request does with one that waits; all but its token is computed
                super()._update_request_as_session(request, more)
        if staying and turns is not None:
            turns.begin(self, staying, asking)

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler._update_request_as_session",
        "block keys of a streamed prompt, when an input continues it",
    )
    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # vLLM 0.30 forgets this: a block's key would hold the token that was drawn last, which is
        # dropped now, and the block another token's keys and values.
        kept = session.num_tokens - 1
        # Where a turn ends among drafts that were accepted, vLLM counts those behind its end, too,
        # and would keep the last token.
        computed = min(session.num_computed_tokens, kept)
        # And all tokens that are not computed are dropped: those of a session that was preempted
        # while its last token was computed, where steps are scheduled ahead, are its own.
        session.num_computed_tokens = kept
        del session.block_hashes[kept // self.hash_block_size :]
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = computed

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler.schedule",
        "requests for which the steering tables have no room wait",
    )
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.finished_req_ids:
            self._tllm_forget_finished()
        held = self._tllm_hold_back()
        try:
            with self._tllm_undrafted() if self._tllm_guided else nullcontext():
                output = super().schedule(*args, **kwargs)
        finally:
            if held:
                self.waiting.prepend_requests(reversed(held))
        if len(held) != self._tllm_held:
            output.tllm_held_back = self._tllm_held = len(held)
        if self.num_spec_tokens and output.preempted_req_ids:
            output.tllm_drawn_anew = self._tllm_drawn_anew(output.preempted_req_ids)
        if self._tllm_ended:
            output.tllm_ended, self._tllm_ended = self._tllm_ended, {}
        if self._tllm_turns is not None and self._tllm_turns.tokens:
            output.tllm_turns = turns = self._tllm_turns.scheduled(output, self.requests)
            if self._tllm_configurations:
                taken = self._tllm_configurations.keys() & turns.engine_ids
                self._tllm_admitted |= taken
        if output.scheduled_new_reqs and self._tllm_configurations:
            new = {each.req_id for each in output.scheduled_new_reqs}
            self._tllm_admitted |= new & self._tllm_configurations.keys()
        return output

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
        "outputs of requests in bulk go back in one message; what conditions and controllers end, "
        "and conversations remember",
    )
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._tllm_endings.hear(model_runner_output, self.requests)
        self._tllm_conversations.hear(model_runner_output)
        # vLLM calls it for each request of each step: ours only in steps that may end one.
        if self._tllm_endings.may_end or self._tllm_conversations.fired:
            self.__dict__.pop("_update_request_with_output", None)
        else:
            self.__dict__["_update_request_with_output"] = super()._update_request_with_output
        bulk = self._tllm_bulk or None
        if bulk is not None and self._tllm_gives_notice and not self._tllm_endings.may_end:
            bulk.give_notice(model_runner_output, self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._tllm_loses_sessions:
            self._tllm_queue_lost_sessions()
        self._tllm_endings.divide(outputs)
        if bulk is not None:
            bulk.take(outputs)
        return outputs

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output",
        "a condition or a controller ends a request",
    )
    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        end = self._tllm_endings.of(request, len(new_token_ids))
        if end is None:
            found = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
            self._tllm_conversations.settle(request.request_id, len(found[0]))
            return found
        kept, stopped = new_token_ids[: end.kept], False
        if kept:
            kept, stopped = super()._update_request_with_output(request, kept, *args, **kwargs)
        # The row that ends a request was judged, too, if the request did not end before it.
        rows = len(kept) if stopped else end.kept + 1
        self._tllm_conversations.settle(request.request_id, rows)
        if not stopped:
            if end.status == RequestStatus.FINISHED_ERROR:
                # Who asks the same is to hear the same: a row that was not finite is computed anew.
                groups = self.kv_cache_manager.get_block_ids(request.request_id)
                self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
                # No later input follows: there is no drawn token that it would take the place of.
                request.resumable = False
            request.status, request.stop_reason = end.status, end.reason
            if kept:
                self._tllm_endings.end_apart(request.request_id)
        return kept, True

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler._free_request",
        "which tokens a sequence ended with",
    )
    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        wanted = request.request_id in self._tllm_wanted
        self._tllm_wanted.discard(request.request_id)
        self._tllm_guided.discard(request.request_id)
        self._tllm_endings.forget(request.request_id)
        self._tllm_conversations.forget(request.request_id)
        # Whoever aborts, or finds a stop string, knows better which tokens belong to the output;
        # the string may be among tokens that came long before the end, and be found only now.
        # Of a streamed prompt nobody does, and when its inputs end vLLM aborts it.
        known = request.status != RequestStatus.FINISHED_ABORTED or request.stop_reason is not None
        params = request.sampling_params
        known = known and not (params is not None and params.stop)
        if wanted and (known or request.streaming_queue is not None):
            self._tllm_ended[request.request_id] = tuple(request.all_token_ids)
        return super()._free_request(request, *args, **kwargs)

    @overrides(
        "vllm.v1.core.sched.scheduler.Scheduler._holds_kv_blocks",
        "a pause waits for what runs beside streamed requests that were preempted",
        since="0.31",
    )
    def _holds_kv_blocks(self, request: Request) -> bool:
        # One that was preempted while its turn's last token was computed waits for an input without
        # blocks. vLLM takes it from the number of those that have some, and would miss another.
        waits = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        return waits or super()._holds_kv_blocks(request)

    def _tllm_queue_lost_sessions(self) -> None:
        """Let streamed requests go on that vLLM has taken out of its queues.

        It does that to one that was preempted while its turn's last token was computed: it puts it
        back, and then removes what has stopped and was preempted.
        """
        queues = self.running, self.waiting, self.kv_holding_waiting
        if sum(map(len, queues)) >= len(self.requests):
            return
        queued = set(itertools.chain(*queues))
        for request in self.requests.values():
            if request.streaming_queue is not None and request not in queued:
                self._enqueue_waiting_request(request)

    def _tllm_forget_finished(self) -> None:
        for table in (self._tllm_reuse_limits, self._tllm_configurations):
            for request_id in [i for i in table if i not in self.requests]:
                del table[request_id]
        self._tllm_admitted &= self._tllm_configurations.keys()
        if self._tllm_bulk:
            self._tllm_bulk.forget(self.requests)
        if self._tllm_turns is not None:
            self._tllm_turns.forget(self.requests)

    @contextmanager
    def _tllm_undrafted(self) -> Iterator[None]:
        """The step that is scheduled meanwhile has no drafts: what is drafted is not drawn from the
        candidates that somebody guides."""
        for request in self.running:
            if request.spec_token_ids:
                request.spec_token_ids = []
        # Where it has no table of how many tokens are drafted in a batch of each size, vLLM makes
        # batches uniform: it gives requests drafts that nobody has made.
        scheduler: Any = self
        table = scheduler.dynamic_sd_lookup
        if table is None:
            scheduler.dynamic_sd_lookup = self._tllm_drafts_by_size
        try:
            yield
        finally:
            scheduler.dynamic_sd_lookup = table

    def _tllm_drawn_anew(self, preempted: Iterable[str]) -> list[str]:
        """Of requests that are computed again those whose last tokens, which were under way, are
        drawn anew; of the others they are delivered."""
        found = []
        for request_id in preempted:
            request: Any = self.requests.get(request_id)
            if request is not None and getattr(request, "drop_stale_output", False):
                found.append(request_id)
        return found

    def _tllm_hold_back(self) -> list[Request]:
        """Take requests out of the queue for which the workers' steering tables have no room.

        The newest wait; whoever ran already keeps its rows. A request that alone needs more than
        the limit is let through, since waiting would not help it.
        """
        limit, wanted = self._tllm_max_configurations, self._tllm_configurations
        if not wanted or not self.waiting or sum(map(len, wanted.values())) <= limit:
            return []
        in_use: set[Configuration] = set()
        for request_id in self._tllm_admitted:
            in_use |= wanted[request_id]
        held = []
        for request in self.waiting:
            needed = wanted.get(request.request_id)
            if needed is None or request.request_id in self._tllm_admitted:
                continue
            if len(in_use | needed) <= limit or len(needed) > limit:
                in_use |= needed
            else:
                held.append(request)
        if held:
            self.waiting.remove_requests(held)
        return held


class _Sync(_Rules, Scheduler):
    pass


class _Async(_Rules, AsyncScheduler):
    pass


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """`scheduler_cls`: which class is right is known only once vLLM has completed its config."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    chosen = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return chosen(*args, **kwargs)
