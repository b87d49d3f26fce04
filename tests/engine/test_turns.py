"""Lanes stay in the running batch: a turn of one token is no new request for the workers."""

from __future__ import annotations

import os
import random

import pytest
import torch
from oldest_vllm import ON_0_30
from vllm.v1.core.sched.interface import PauseState

from benchmarks.driven_lanes import DrivenLanes
from engine.reference import VOCAB
from tllm import SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.next_token import NextTokenConsumer
from tllm.ports import ConsumerFlow, ResidualStream
from tllm.spec.request import RowsRead
from tllm.spec.selection import Selection

RUNNER = os.environ["TLLM_TEST_RUNNER"]


keeps_streams = pytest.mark.skipif(
    ON_0_30,
    reason="vLLM 0.30 gives up a streamed request that is preempted while its token is computed, "
    "which its lane hears as an error",
)


class Walk:
    """Lanes with what was fed to them, whose answers are compared with `transformers`."""

    def __init__(self, llm, reference):
        self.lanes = DrivenLanes(llm)
        self.tokens: dict[str, list[int]] = {}
        self._reference = reference
        self._random = random.Random(7)

    def open(self, name, prompt, **extra):
        self.tokens[name] = list(prompt)
        self.lanes.open(name, prompt, **extra)

    def feed(self, *names, count=1):
        drawn = {name: [self._random.randrange(2, VOCAB) for _ in range(count)] for name in names}
        for name in names:
            self.tokens[name] += drawn[name]
        self.lanes.feed(drawn)

    def check(self):
        """The answers to what was asked last are those of `transformers`."""
        answers = self.lanes.answers()
        assert answers
        for name, found in answers.items():
            expected = self._reference.run(self.tokens[name])[0][-1].log_softmax(-1)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)

    def turn(self, *names, count=1):
        """Feed lanes and compute; returns how many were new to the workers, and known to them."""
        self.lanes.new = self.lanes.cached = 0
        self.feed(*names, count=count)
        self.lanes.run()
        self.check()
        return self.lanes.new, self.lanes.cached

    def end(self):
        self.lanes.abort(*self.tokens)
        self.lanes.run()
        self.lanes.step()
        self.lanes.close()


def walk_in(engine, reference):
    engine.register_consumer(NextTokenConsumer())
    walk = Walk(engine, reference)
    yield walk
    walk.end()
    assert not engine.intervention_stats()[0]["running_sequences"]


def skip_without_turns(llm):
    ahead = llm.llm_engine.engine_core.engine_core.async_scheduling
    if ON_0_30 or (RUNNER == "v1" and ahead):
        pytest.skip("vLLM's V1 runner that schedules ahead begins turns anew, and all of vLLM 0.30")


@pytest.fixture
def walk(llm, reference):
    skip_without_turns(llm)
    yield from walk_in(llm, reference)


@pytest.fixture
def tight_walk(tight_llm, reference):
    yield from walk_in(tight_llm, reference)


def prompt(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB) for _ in range(length)]


def test_a_turn_of_one_token_is_no_new_request(walk):
    names = [f"lane-{number}" for number in range(5)]
    for number, name in enumerate(names):
        walk.open(name, prompt(3 + 15 * number, number))
    walk.lanes.run()
    walk.check()
    assert walk.lanes.new == 5
    for _ in range(6):
        assert walk.turn(*names) == (0, 5)
    assert walk.turn(*names[1:3]) == (0, 2)  # the others wait
    assert walk.turn(*names) == (0, 5)


def test_results_go_where_the_table_says_also_when_there_are_more_files(walk):
    names = [f"lane-{number}" for number in range(7)]
    for number, name in enumerate(names[:3]):
        walk.open(name, prompt(5 + number, number))
    walk.lanes.run()
    walk.check()
    held = walk.lanes._arena.lease_many(10)  # which leaves few rows in the first file
    for number, name in enumerate(names[3:], 3):
        walk.open(name, prompt(5 + number, number))
    walk.lanes.run()
    walk.check()
    for count in (3, 7, 5):
        assert walk.turn(*names[:count]) == (0, count)
        assert walk.turn(*reversed(names[:count])) == (0, count)
    assert len(walk.lanes._arena.paths) > 1
    for place in held:
        walk.lanes._arena.release(place)


def test_nothing_is_written_for_a_lane_whose_address_is_another_ones(walk):
    for name in ("first", "second"):
        walk.open(name, prompt(6))
    walk.lanes.run()
    walk.check()
    walk.turn("first", "second")
    walk.feed("first", "second")
    address = walk.lanes._addresses.pop("first")
    address.give_back()
    walk.lanes.run()
    lost = [ticket for ticket, (name, _) in walk.lanes._waiting.items() if name == "first"]
    _, place = walk.lanes._waiting.pop(lost[0])
    walk.check()  # of the second
    with pytest.raises(RuntimeError, match="sent no log-probabilities"):
        walk.lanes._arena.read(place, lost[0])


def test_the_token_that_was_fed_stands_in_cached_blocks(walk, llm):
    """Blocks of 32 are filled in turns; a lane that begins with their tokens reads them."""
    walk.open("first", prompt(29, 5))
    walk.lanes.run()
    for _ in range(8):
        assert walk.turn("first") == (0, 1)
    walk.open("second", walk.tokens["first"])
    walk.lanes.run()
    walk.check()
    assert walk.turn("first", "second") == (0, 2)


def test_several_tokens_are_a_new_request_and_one_after_them_is_not(walk):
    walk.open("lane", prompt(20))
    walk.open("other", prompt(7, 1))
    walk.lanes.run()
    walk.check()
    assert walk.turn("lane", "other") == (0, 2)
    assert walk.turn("lane", count=3) == (1, 0)
    assert walk.turn("lane", "other") == (0, 2)


def test_lanes_and_other_requests_share_steps(walk, reference):
    walk.open("lane", prompt(9))
    walk.lanes.run()
    walk.check()
    asked = prompt(40, 3)  # more than a step computes
    expected = reference.greedy(asked, 12)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    walk.lanes.add(walk.lanes.request("other", asked, params))
    drawn = []
    while len(drawn) < 12:
        walk.feed("lane")
        for _ in range(3):
            outputs = walk.lanes.step()
            drawn += [
                t for each in outputs if each.request_id == "other" for t in each.new_token_ids
            ]
        walk.check()
    assert drawn == expected


def test_lanes_that_hold_all_places_let_others_in_when_they_end(walk, llm):
    places = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    names = [f"lane-{number}" for number in range(places)]
    for number, name in enumerate(names):
        walk.open(name, prompt(4 + number, number))
    walk.lanes.run()
    walk.check()
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    walk.lanes.add(walk.lanes.request("other", prompt(5), params))
    for _ in range(3):
        walk.feed(*names)
        outputs = walk.lanes.step()
        # Steps that are scheduled ahead; on a GPU empty ones are too, for as long as "other" waits.
        while any(step[1].total_num_scheduled_tokens for step in walk.lanes.core.batch_queue or ()):
            outputs += walk.lanes.step()
        walk.check()
        assert "other" not in {each.request_id for each in outputs}
    walk.lanes.abort(names[0])
    outputs = walk.lanes.run()
    assert {each.request_id for each in outputs} == {"other"}
    assert walk.turn(*names[1:]) == (0, places - 1)


def test_a_lane_is_given_up_with_a_token_on_its_way(walk):
    for number in range(3):
        walk.open(f"lane-{number}", prompt(6 + number, number))
    walk.lanes.run()
    walk.check()
    walk.feed("lane-0", "lane-1", "lane-2")
    walk.lanes.abort("lane-1")  # before the step that would compute it
    walk.lanes.drop("lane-1")
    walk.lanes.run()
    walk.check()
    assert walk.turn("lane-0", "lane-2") == (0, 2)
    walk.lanes.abort("lane-0")  # while it waits
    assert walk.turn("lane-2") == (0, 1)


def test_lanes_that_are_all_preempted_with_their_tokens_are_computed_anew(walk):
    names = [f"lane-{number}" for number in range(3)]
    for number, name in enumerate(names):
        walk.open(name, prompt(30 + number, number))
    walk.lanes.run()
    walk.check()
    assert walk.turn(*names) == (0, 3)
    walk.feed(*names)
    assert walk.lanes.core.reset_prefix_cache(reset_running_requests=True)
    walk.lanes.run()
    walk.check()
    assert walk.turn(*names) == (0, 3)


def test_a_lane_that_needs_a_block_takes_it_from_one_that_runs(walk):
    walk.open("first", prompt(32))
    walk.open("second", prompt(20, 1))
    walk.lanes.run()
    walk.check()
    pool = walk.lanes.core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    walk.feed("first", "second")
    walk.lanes.step()
    assert walk.lanes.core.scheduler.requests["second"].num_preemptions == 1
    pool.free_blocks(taken)
    walk.lanes.run()
    walk.check()
    assert walk.turn("first", "second") == (0, 2)


@pytest.mark.skipif(RUNNER != "v2", reason="vLLM's V1 runner keeps drawn tokens on the device then")
def test_an_engine_that_schedules_ahead_has_turns_too(tight_walk, tight_llm):
    skip_without_turns(tight_llm)
    names = [f"lane-{number}" for number in range(2)]
    for number, name in enumerate(names):
        tight_walk.open(name, prompt(28 + number, number))
    tight_walk.lanes.run()
    tight_walk.check()
    for _ in range(5):
        assert tight_walk.turn(*names) == (0, 2)


@pytest.mark.skipif(RUNNER != "v1", reason="only V1 takes the other way")
def test_an_engine_that_schedules_ahead_begins_turns_anew_with_the_v1_runner(tight_walk):
    tight_walk.open("lane", prompt(28))
    tight_walk.lanes.run()
    tight_walk.check()
    for _ in range(5):
        assert tight_walk.turn("lane") == (1, 0)


def preempted_while_its_token_is_computed(walk):
    """A lane whose blocks go to another request, which is scheduled ahead and needs one before the
    lane's answer is there: what the other one has drawn so far."""
    walk.open("lane", prompt(10))
    walk.lanes.run()
    walk.check()
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, detokenize=False)
    walk.lanes.add(walk.lanes.request("other", prompt(24, 1), params))
    scheduler, outputs = walk.lanes.core.scheduler, []
    while scheduler.requests["other"].num_computed_tokens < 31:
        outputs += walk.lanes.step()
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    walk.feed("lane")
    for _ in range(4):
        outputs += walk.lanes.step()
    assert scheduler.requests["lane"].num_preemptions == 1
    pool.free_blocks(taken)
    return outputs


@keeps_streams
def test_a_lane_that_is_preempted_while_its_token_is_computed_keeps_its_tokens(tight_walk):
    preempted_while_its_token_is_computed(tight_walk)
    tight_walk.lanes.run()
    tight_walk.check()
    tight_walk.turn("lane")


@keeps_streams
def test_a_pause_that_waits_does_so_beside_a_lane_that_was_preempted(tight_walk, reference):
    """vLLM counts what still runs, less the streamed requests that wait for an input."""
    walk, scheduler = tight_walk, tight_walk.lanes.core.scheduler
    outputs = preempted_while_its_token_is_computed(walk)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)  # as the mode "wait" does
    outputs += walk.lanes.run()
    assert not scheduler.has_unfinished_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    drawn = [t for each in outputs if each.request_id == "other" for t in each.new_token_ids]
    assert drawn == reference.greedy(prompt(24, 1), 20)
    walk.check()
    walk.turn("lane")


class Rows(Consumer):
    """Which requests began, and which of their prompt rows were computed."""

    consumer_id = "rows"

    def flows(self):
        read = ResidualStream.read(layer=1, role="hidden", phase="prefill")
        return [ConsumerFlow(reads=[read])]

    def start(self, ctx):
        self.seen, self.begun = [], []

    def on_request_started(self, request, ctx):
        self.begun.append(request.request_id)

    def consume_bundle(self, bundle, ctx):
        names = [bundle.meta.requests[i].request_id for i in bundle.meta.request_index]
        self.seen += zip(names, bundle.meta.positions.tolist(), strict=True)


def registered_rows(llm):
    """A consumer of the engine's, and the one of its worker."""
    rows = llm.register_consumer(Rows())
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return rows, worker.session.consumers.get("rows").consumer


@pytest.mark.parametrize("asking", ["each input", "the later input"])
def test_a_row_of_a_later_input_is_computed_that_others_have_cached(walk, llm, asking):
    """The lane is preempted before it computes the row, and comes back onto their blocks."""
    rows, there = registered_rows(llm)
    tokens = prompt(100, 9)
    walk.open("other", tokens)
    walk.lanes.run()
    walk.check()
    reads = {"reads": [RowsRead("positions", Selection.parse([70])).to_wire()]}
    walk.open("lane", tokens[:10], **(reads if asking == "each input" else {}))
    walk.lanes.run()
    walk.check()
    walk.tokens["lane"] = tokens
    walk.lanes.open("lane", tokens[10:], **reads)  # more of it
    lane = walk.lanes.core.scheduler.requests["lane"]
    while lane.num_computed_tokens < 58:  # the next step is to need a block
        walk.lanes.step()
    pool = walk.lanes.core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    walk.lanes.step()
    assert lane.num_preemptions == 1
    pool.free_blocks(taken)
    walk.lanes.run()
    walk.check()
    llm.synchronize(rows)
    assert ("lane", 70) in there.seen


def test_the_rows_of_fed_tokens_are_prompt_rows_and_a_lane_begins_once(walk, llm):
    rows, there = registered_rows(llm)
    walk.open("lane", prompt(4))
    walk.open("other", prompt(3, 1))
    walk.lanes.run()
    walk.check()
    for _ in range(3):
        assert walk.turn("lane", "other") == (0, 2)
    assert walk.turn("other") == (0, 1)
    llm.synchronize(rows)
    assert there.begun == ["lane", "other"]
    wanted = [("lane", p) for p in range(7)] + [("other", p) for p in range(7)]
    assert sorted(there.seen) == wanted


def test_a_lane_ends_where_the_model_does(walk, llm):
    longest = llm.llm_engine.model_config.max_model_len - 1
    walk.open("lane", prompt(longest - 3))
    walk.lanes.run()
    walk.check()
    for _ in range(3):
        assert sum(walk.turn("lane")) == 1
    assert len(walk.tokens["lane"]) == longest
