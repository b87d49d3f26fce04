"""Speculative decoding on the V2 model runner, where drafts are made and compared on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tllm.engine.drafts import FromEnd, accepted_of, has_ended
from tllm.engine.seams import uses
from tllm.runtime.columns import IntArray
from tllm.runtime.steps import IN_FLIGHT, Decide, Steps

uses(
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "speculative_config max_model_len scheduler_config req_states",
    "which drafted tokens are accepted",
)
uses(
    "vllm.v1.worker.gpu.input_batch.InputBatch",
    "num_draft_tokens num_draft_tokens_per_req idx_mapping",
    "which tokens of a step are drafted",
)
uses(
    "vllm.v1.worker.gpu.states.RequestState",
    "num_computed_tokens all_token_ids req_id_to_index",
    "where a sequence is whose drafts were compared on the device",
)
uses(
    "vllm.v1.worker.gpu.async_utils.AsyncOutput",
    "sampled_token_ids num_sampled_tokens_np copy_event",
    "which drafted tokens are accepted",
)
uses(
    "vllm.v1.core.sched.output.NewRequestData",
    "req_id sampling_params prompt_len",
    "whether a sequence ends among the tokens that were accepted at once",
)

uses(
    "vllm.v1.core.sched.output.SchedulerOutput",
    "preempted_req_ids",
    "sequences that are computed again, of which the last steps' drafts must be known before",
)
uses(
    "vllm.sampling_params.SamplingParams",
    "max_tokens stop_token_ids eos_token_id repetition_detection",
    "whether a sequence may have ended among the tokens that were accepted at once",
)


class _Asked(NamedTuple):
    """What is known of a running request from its beginning.

    Attributes:
        length: tokens, prompt and all, with which it has ended at the latest.
        last_tokens: those with which it ends.
    """

    sampling_params: Any
    prompt_len: int
    length: int
    last_tokens: frozenset[int]

    @property
    def looks_back(self) -> bool:
        """Whether all its tokens decide whether it ends."""
        return self.sampling_params.repetition_detection is not None

    @classmethod
    def of(cls, new: Any, max_model_len: int) -> _Asked:
        params, prompt_len = new.sampling_params, new.prompt_len
        length = min(prompt_len + (params.max_tokens or max_model_len), max_model_len)
        tokens = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
        return cls(params, prompt_len, length, frozenset(tokens))


class _Ends:
    """When the sequences of a batch may have ended: few have in any step, and whether one has is
    much to ask of each.

    Args:
        asked: of each.
    """

    def __init__(self, request_ids: Sequence[str], asked: Sequence[_Asked]) -> None:
        self.request_ids = request_ids
        self.asked = asked
        self._lengths = np.array([each.length for each in asked], np.int32)
        self._look_back = np.array([each.looks_back for each in asked])
        tokens = frozenset[int]().union(*(each.last_tokens for each in asked))
        self._last_tokens = np.array(sorted(tokens), np.int64)

    def at(self, lengths: IntArray, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """`[sequences]`, those that may have ended: all that have are among them.

        Args:
            lengths: `[sequences]`, tokens of each, prompt and all.
            tokens: `[sequences, tokens]`, the last ones.
        """
        found = (lengths >= self._lengths) | self._look_back
        if len(self._last_tokens):
            found |= np.isin(tokens, self._last_tokens).any(1)
        return np.asarray(found)


@dataclass(frozen=True, eq=False)
class _Step:
    """A step; arrays `[sequences]`.

    Attributes:
        starts: position of the first token of each. While it is not `known`, that is of those that
            begin with the step; the others are there at least.
        known: whether the steps before are decided.
        drafts: how many tokens of each are drafted; None: none of any.
        begun: the sequences that begin with it, or are begun again.
        ends: None where there are no drafts.
    """

    request_ids: Sequence[str]
    starts: IntArray
    known: bool
    counts: IntArray
    drafts: IntArray | None
    begun: frozenset[str]
    ends: _Ends | None


class DeviceDrafts:
    """What the host knows of drafts that are made and compared on the device.

    Which of them are accepted is found out as late as it can be, since that waits for the device:
    mostly when the next step begins, as its rows are where these have come to. Where nothing
    depends on that, two steps later.

    Args:
        steps: told how many tokens were drafted and accepted.
    """

    def __init__(self, runner: Any, steps: Steps) -> None:
        self._runner = runner
        self._steps = steps
        self._ahead = runner.scheduler_config.async_scheduling
        self._asked: dict[str, _Asked] = {}
        self._ends: _Ends | None = None
        self._begun: frozenset[str] = frozenset()
        self._drawn_anew: Container[str] = ()
        self._computed: dict[str, int] = {}
        self._step: _Step | None = None
        self._undecided: deque[_Step] = deque()
        self._uncounted: deque[tuple[Any, IntArray]] = deque()
        self._idle_drafts: IntArray | None = None
        self._request_ids: Sequence[str] = ()
        self._last: tuple[Sequence[str], Any] = (), None

    # -- before the forward pass -------------------------------------------------------------------

    def track(self, scheduled: Any) -> None:
        """A step is scheduled: which requests begin, or are begun again, and which have ended."""
        self._drawn_anew = ()
        for request_id in scheduled.finished_req_ids:
            self._asked.pop(request_id, None)
        self._begun = frozenset(new.req_id for new in scheduled.scheduled_new_reqs)
        for new in scheduled.scheduled_new_reqs:
            self._asked[new.req_id] = _Asked.of(new, self._runner.max_model_len)
        if self._begun:
            self._ends = None

    def draw_anew(self, request_ids: Container[str]) -> None:
        """What the last step of each of these drew is dropped, so that drafts that were accepted in
        it are not their own. To be said before those steps are decided, which `track` is behind."""
        self._drawn_anew = request_ids

    def begin_idle(self, batch: Any) -> None:
        """A step begins in which nothing is done to any row."""
        self._step, self._computed = None, {}
        self._idle_drafts = drafts_of(batch)
        self._request_ids = batch.req_ids[: batch.num_reqs]

    def may_finish(self, request_ids: Iterable[str]) -> bool:
        """Whether it can be found out later which drafts of requests that have ended were their
        own: the model runner forgets all their tokens."""
        return not any(self._asked[i].looks_back for i in request_ids if i in self._asked)

    def begin_undecided(self, batch: Any) -> bool:
        """A step begins, where it need not be known which drafts of the last are accepted; else
        nothing is begun."""
        if not self._steps.undecided or (drafts := drafts_of(batch)) is None:
            return False
        ids = batch.req_ids[: batch.num_reqs]
        counts = batch.num_scheduled_tokens[: batch.num_reqs].astype(np.int32, copy=False)
        scheduled = batch.num_computed_tokens_np[: batch.num_reqs].astype(np.int32)
        where = partial(self._where, ids, scheduled)
        sampled_from = batch.prefill_len_np[: batch.num_reqs]
        if not self._steps.begin_undecided(ids, counts, sampled_from, drafts, where):
            return False
        self._note(ids, scheduled, counts, drafts, known=False)
        return True

    def _where(
        self, request_ids: Sequence[str], scheduled: IntArray
    ) -> tuple[IntArray, IntArray] | None:
        """Of each sequence of the next step the lowest position of its first token, and by how many
        tokens it may be further on. None where one was not in the last step."""
        bounds = {i: (at, at) for i, at in self._computed.items()}
        for step in self._undecided:
            starts = zip(step.request_ids, step.starts.tolist(), strict=True)
            if step.known:
                bounds = {i: (start, start) for i, start in starts}
            else:
                bounds = {
                    i: (start, start) if i in step.begun else bounds[i] for i, start in starts
                }
            own = step.counts if step.drafts is None else step.counts - step.drafts
            computed = zip(bounds.items(), own.tolist(), step.counts.tolist(), strict=True)
            bounds = {i: (low + fewest, high + most) for (i, (low, high)), fewest, most in computed}
        begun = self._begun
        if not all(i in bounds or i in begun for i in request_ids):
            return None
        of_each = [
            (at, at) if i in begun else bounds[i]
            for i, at in zip(request_ids, scheduled.tolist(), strict=True)
        ]
        low, high = np.array(of_each, np.int32).T
        return low, high - low

    def begin(self, batch: Any, counts: IntArray) -> tuple[IntArray, IntArray | None]:
        """A step begins, and those before are decided; returns where each of its sequences is, and
        how many tokens are drafted.

        Args:
            counts: `[sequences]`, tokens of each that the step computes.
        """
        ids = batch.req_ids[: batch.num_reqs]
        starts, drafts = self._starts(batch, ids), drafts_of(batch)
        self._note(ids, starts, counts, drafts, known=True)
        return starts, drafts

    def _note(
        self,
        ids: Sequence[str],
        starts: IntArray,
        counts: IntArray,
        drafts: IntArray | None,
        *,
        known: bool,
    ) -> None:
        """A step has begun."""
        ends = None if drafts is None else self._ends_of(ids)
        self._step = _Step(ids, starts, known, counts, drafts, self._begun, ends)
        self._request_ids, self._idle_drafts = ids, None

    def _ends_of(self, request_ids: Sequence[str]) -> _Ends:
        if self._ends is None or self._ends.request_ids != request_ids:
            self._ends = _Ends(request_ids, [self._asked[each] for each in request_ids])
        return self._ends

    def _starts(self, batch: Any, request_ids: Sequence[str]) -> IntArray:
        """Position of the first token of each sequence that the step computes.

        When a step is scheduled ahead, the scheduler takes all drafts of the last for accepted.
        """
        scheduled: IntArray = batch.num_computed_tokens_np[: batch.num_reqs].astype(np.int32)
        if not self._ahead:
            return scheduled
        known = self._computed
        if all(i in known or i in self._begun for i in request_ids):
            for place, request_id in enumerate(request_ids):
                if request_id not in self._begun:
                    scheduled[place] = known[request_id]
            return scheduled
        # The last step was idle, so that its tokens were not waited for.
        computed = self._runner.req_states.num_computed_tokens.gpu[batch.idx_mapping]
        found: IntArray = computed.cpu().numpy()[: batch.num_reqs].astype(np.int32)
        return found

    # -- its end -----------------------------------------------------------------------------------

    def end(self, output: Any) -> Decide | None:
        """A step is over; returns what finds out how many of its tokens are their sequences' own,
        None where none was drafted.

        Args:
            output: of the model runner, under way to the host.
        """
        step, self._step = self._step, None
        idle, self._idle_drafts = self._idle_drafts, None
        ids, self._request_ids = self._request_ids, ()
        # When a step without tokens is over, the scheduler has heard of the one before it.
        last, self._last = self._last, (ids, output if ids else None)
        if idle is not None:
            self._uncounted.append((output, idle))
            while len(self._uncounted) > IN_FLIGHT:
                self._count_first()
        if step is None:
            return None
        if step.drafts is None:
            computed = step.starts + step.counts
            self._computed = dict(zip(step.request_ids, computed.tolist(), strict=True))
            return None
        self._undecided.append(step)
        return partial(self._decide, step, output, *last)

    def _decide(
        self, step: _Step, output: Any, last_ids: Sequence[str], last_output: Any
    ) -> tuple[IntArray, IntArray]:
        """Where the sequences of a step were, and how many of the tokens computed of each are its
        own. Waits for the step's tokens; steps are decided in their order.

        Args:
            last_ids, last_output: sequences and output of the step before.
        """
        assert step is self._undecided[0]
        self._undecided.popleft()
        output.copy_event.synchronize()
        count = len(step.request_ids)
        if not step.known:
            step = replace(step, starts=self._placed(step), known=True)
        starts, drafts, ends = step.starts, step.drafts, step.ends
        assert drafts is not None and ends is not None
        drawn = np.asarray(output.num_sampled_tokens_np[:count])
        own = step.counts - drafts
        accepted = np.where(drafts > 0, np.maximum(drawn - 1, 0), 0).astype(np.int32)
        computed = starts + own + np.where(drafts > 0, drawn - 1, 0)
        self._computed = dict(zip(step.request_ids, computed.tolist(), strict=True))
        self._steps.count_drafts(*_drafted_and_accepted(drafts, drawn))
        kept: IntArray = own + accepted
        may_have_ended = ends.at(starts + own + drawn, output.sampled_token_ids[:count])
        for i in np.flatnonzero(may_have_ended & (accepted > 0)).tolist():
            kept[i] = own[i] + self._accepted(step, i, output, int(drawn[i]))
        if self._drawn_anew:
            dropped = self._dropped(step)
            kept[dropped] = own[dropped]
        if self._ahead and last_output is not None:
            kept[self._ended(step, last_ids, last_output)] = 0
        return starts, kept

    def _dropped(self, step: _Step) -> list[int]:
        """Which sequences of a step that is decided draw anew what they drew in it."""
        later = {request_id for each in self._undecided for request_id in each.request_ids}
        return [
            i
            for i, request_id in enumerate(step.request_ids)
            if request_id in self._drawn_anew and request_id not in later
        ]

    def _placed(self, step: _Step) -> IntArray:
        """Where the sequences of a step are, now that the steps before are decided."""
        found = [
            start if i in step.begun else self._computed[i]
            for i, start in zip(step.request_ids, step.starts.tolist(), strict=True)
        ]
        return np.array(found, np.int32)

    def _accepted(self, step: _Step, i: int, output: Any, drawn: int) -> int:
        """How many drafts of a sequence are accepted, and followed by another token of it."""
        assert step.drafts is not None
        length = int(step.starts[i] + step.counts[i] - step.drafts[i]) + drawn
        tokens = output.sampled_token_ids[i, :drawn].tolist()
        request = self._drawn(step, i, tokens, length)
        return accepted_of(request, drawn, self._runner.max_model_len)

    def _ended(self, step: _Step, request_ids: Sequence[str], output: Any) -> list[int]:
        """Which sequences of a step have ended with the step before, which the scheduler had not
        heard of when it made this one."""
        assert step.ends is not None
        output.copy_event.synchronize()
        drawn, tokens = output.num_sampled_tokens_np, output.sampled_token_ids
        if request_ids == step.request_ids:
            places = np.arange(len(request_ids))
        else:
            known = {request_id: place for place, request_id in enumerate(request_ids)}
            places = np.array([known.get(request_id, -1) for request_id in step.request_ids])
        may_have_ended = (places >= 0) & (drawn[places] > 0)
        may_have_ended &= step.ends.at(step.starts + 1, tokens[places])
        found = []
        for i in np.flatnonzero(may_have_ended).tolist():
            if step.request_ids[i] in step.begun:
                continue
            place = places[i]
            at_once = range(drawn[place])
            last = tokens[place, : drawn[place]].tolist()
            request = self._drawn(step, i, last, int(step.starts[i]) + 1)
            if any(has_ended(request, self._runner.max_model_len, hidden) for hidden in at_once):
                found.append(i)
        return found

    def _drawn(self, step: _Step, i: int, tokens: list[int], length: int) -> _Drawn:
        """A sequence of a step at this length, prompt and all.

        Args:
            tokens: its last ones.
        """
        assert step.ends is not None
        asked = step.ends.asked[i]
        if asked.looks_back:
            states = self._runner.req_states
            row = states.all_token_ids.gpu[states.req_id_to_index[step.request_ids[i]]]
            tokens = row[asked.prompt_len : length].cpu().tolist()
        last = FromEnd(tokens, length - asked.prompt_len)
        return _Drawn(asked.sampling_params, asked.prompt_len, last)

    # -- counting ----------------------------------------------------------------------------------

    def settle(self) -> None:
        while self._uncounted:
            self._count_first()

    def _count_first(self) -> None:
        output, drafts = self._uncounted.popleft()
        output.copy_event.synchronize()
        drawn = output.num_sampled_tokens_np
        self._steps.count_drafts(*_drafted_and_accepted(drafts, drawn))


def drafts_of(batch: Any) -> IntArray | None:
    """`[sequences]`, how many tokens of a batch are drafted; None: none."""
    if not batch.num_draft_tokens:
        return None
    found: IntArray = batch.num_draft_tokens_per_req[: batch.num_reqs].astype(np.int32)
    return found


def _drafted_and_accepted(drafts: IntArray, drawn: IntArray) -> tuple[int, int]:
    """How many tokens were drafted, and how many of them were drawn."""
    return int(drafts.sum()), int(np.maximum(drawn - 1, 0)[drafts > 0].sum())


class _Drawn(NamedTuple):
    """A request with the tokens drawn in a step, as far as it is known on the host."""

    sampling_params: Any
    num_prompt_tokens: int
    output_token_ids: FromEnd
