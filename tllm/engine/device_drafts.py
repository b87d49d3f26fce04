"""Speculative decoding on the V2 model runner, where drafts are made and compared on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tllm.engine.drafts import accepted_of, has_ended
from tllm.engine.seams import uses
from tllm.runtime.columns import IntArray
from tllm.runtime.steps import Steps

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

_IN_FLIGHT = 2
"""The most steps of an engine whose output was not asked for yet."""


class _Asked(NamedTuple):
    """What is known of a running request from its beginning."""

    sampling_params: Any
    prompt_len: int


@dataclass(frozen=True, eq=False)
class _Step:
    """The step that runs; arrays `[sequences]`.

    Attributes:
        drafts: how many tokens of each are drafted; None: none of any.
    """

    request_ids: Sequence[str]
    starts: IntArray
    counts: IntArray
    drafts: IntArray | None


class DeviceDrafts:
    """What the host knows of drafts that are made and compared on the device.

    In a step in which anything is done to any row, the step's tokens are waited for when it ends:
    the drafter may still be at work on the next drafts then. In all others nothing is waited for.

    Args:
        steps: told how many tokens were drafted and accepted.
    """

    def __init__(self, runner: Any, steps: Steps) -> None:
        self._runner = runner
        self._steps = steps
        self._ahead = runner.scheduler_config.async_scheduling
        self._asked: dict[str, _Asked] = {}
        self._begun: set[str] = set()
        self._computed: dict[str, int] = {}
        self._step: _Step | None = None
        self._uncounted: deque[tuple[Any, IntArray]] = deque()
        self._idle_drafts: IntArray | None = None
        self._request_ids: Sequence[str] = ()
        self._last: tuple[Sequence[str], Any] = (), None

    # -- before the forward pass -------------------------------------------------------------------

    def track(self, scheduled: Any) -> None:
        """A step is scheduled: which requests begin, or are begun again, and which have ended."""
        for request_id in scheduled.finished_req_ids:
            self._asked.pop(request_id, None)
        self._begun = {new.req_id for new in scheduled.scheduled_new_reqs}
        for new in scheduled.scheduled_new_reqs:
            self._asked[new.req_id] = _Asked(new.sampling_params, new.prompt_len)

    def begin_idle(self, batch: Any) -> None:
        """A step begins in which nothing is done to any row."""
        self._step, self._computed = None, {}
        self._idle_drafts = drafts_of(batch)
        self._request_ids = batch.req_ids[: batch.num_reqs]

    def begin(self, batch: Any, counts: IntArray) -> tuple[IntArray, IntArray | None]:
        """A step begins; returns where each of its sequences is, and how many tokens are drafted.

        Args:
            counts: `[sequences]`, tokens of each that the step computes.
        """
        request_ids = batch.req_ids[: batch.num_reqs]
        self._request_ids = request_ids
        starts, drafts = self._starts(batch, request_ids), drafts_of(batch)
        self._step = _Step(request_ids, starts, counts, drafts)
        self._idle_drafts = None
        return starts, drafts

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

    def end(self, output: Any) -> IntArray | None:
        """A step is over; returns how many of the tokens computed of each are its own, None where
        none was drafted.

        Args:
            output: of the model runner, under way to the host.
        """
        step, self._step = self._step, None
        idle, self._idle_drafts = self._idle_drafts, None
        last, self._last = self._last, (self._request_ids, output)
        if idle is not None:
            self._uncounted.append((output, idle))
            while len(self._uncounted) > _IN_FLIGHT:
                self._count_first()
        if step is None:
            return None
        if step.drafts is None:
            computed = step.starts + step.counts
            self._computed = dict(zip(step.request_ids, computed.tolist(), strict=True))
            return None
        output.copy_event.synchronize()
        drawn = output.num_sampled_tokens_np
        own = step.counts - step.drafts
        computed = step.starts + own + np.where(step.drafts > 0, drawn - 1, 0)
        self._computed = dict(zip(step.request_ids, computed.tolist(), strict=True))
        self._steps.count_drafts(*_drafted_and_accepted(step.drafts, drawn))
        kept = own.copy()
        for i in np.flatnonzero(step.drafts).tolist():
            kept[i] += self._accepted(step, i, output, int(drawn[i]))
        if self._ahead:
            kept[self._ended(step, *last)] = 0
        return kept

    def _accepted(self, step: _Step, i: int, output: Any, drawn: int) -> int:
        """How many drafts of a sequence are accepted, and followed by another token of it."""
        assert step.drafts is not None
        length = int(step.starts[i] + step.counts[i] - step.drafts[i]) + drawn
        tokens = output.sampled_token_ids[i, :drawn].tolist()
        request = self._drawn(step.request_ids[i], tokens, length)
        return accepted_of(request, drawn, self._runner.max_model_len)

    def _ended(self, step: _Step, request_ids: Sequence[str], output: Any) -> list[int]:
        """Which sequences of a step have ended with the step before, which the scheduler had not
        heard of when it made this one."""
        if output is None:
            return []
        output.copy_event.synchronize()
        drawn = output.num_sampled_tokens_np.tolist()
        places = {request_id: place for place, request_id in enumerate(request_ids)}
        found = []
        for i, request_id in enumerate(step.request_ids):
            place = None if request_id in self._begun else places.get(request_id)
            if place is None or not drawn[place]:
                continue
            tokens = output.sampled_token_ids[place, : drawn[place]].tolist()
            request = self._drawn(request_id, tokens, int(step.starts[i]) + 1)
            at_once = range(drawn[place])
            if any(has_ended(request, self._runner.max_model_len, hidden) for hidden in at_once):
                found.append(i)
        return found

    def _drawn(self, request_id: str, tokens: list[int], length: int) -> _Drawn:
        """A sequence of this length, prompt and all.

        Args:
            tokens: its last ones.
        """
        asked = self._asked[request_id]
        if asked.sampling_params.repetition_detection is not None:
            states = self._runner.req_states
            row = states.all_token_ids.gpu[states.req_id_to_index[request_id]]
            tokens = row[asked.prompt_len : length].cpu().tolist()
        return _Drawn(*asked, _Last(tokens, length - asked.prompt_len))

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
    output_token_ids: _Last


class _Last:
    """The last tokens of a list whose length is known, looked at from its end."""

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        assert index < 0
        return self._tokens[index]
