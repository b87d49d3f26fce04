"""The parts that need no engine."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import multiprocessing
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tllm.consumers.next_token import ADDRESS_WIDTH, HEADER, NextTokenConsumer
from tllm.engine.capacity import BlockLedger, Capacity
from tllm.logprobs import AsyncVirtualLM, OutputCache, load_model_by_name, virtual_lm
from tllm.logprobs.arena import Addresses, Arena
from tllm.logprobs.kept import Holder, KeptRequest
from tllm.logprobs.loop import Collector, EngineLoop, Mailbox
from tllm.logprobs.query import WHOLE, Answer, Form, Interventions, Query, stacked
from tllm.ports import PortBundle, RequestInfo, RowMeta
from tllm.runtime.transfer import PinnedCopy
from tllm.shared_memory import SharedRows


def test_the_cache_keeps_what_was_used_last_and_shares_no_memory():
    cache = OutputCache(2, move_to_cpu=True)
    value = torch.ones(3)
    cache["a"] = value
    value.zero_()
    cache["b"] = torch.ones(1)
    cache["a"].zero_()
    cache["c"] = torch.ones(1)
    assert "b" not in cache
    assert cache["a"].tolist() == [1, 1, 1]
    assert len(cache) == 2
    cache.clear()
    assert "a" not in cache
    with pytest.raises(KeyError):
        cache["a"]
    with pytest.raises(ValueError, match="maxsize=0"):
        OutputCache(0)


def test_a_batch_closes_when_nothing_else_can_arrive():
    async def run(askers, batch_size=100, timeout=60.0, hops=0):
        loop = asyncio.get_running_loop()
        batches = []
        collector = Collector(loop, batches.append, batch_size, timeout)

        async def ask(i):
            for _ in range(hops * i):
                await asyncio.sleep(0)
            collector.add([i])

        await asyncio.gather(*map(ask, range(askers)))
        while sum(map(len, batches)) < askers:
            await asyncio.sleep(0)
        return batches

    assert asyncio.run(run(50)) == [list(range(50))]
    assert asyncio.run(run(5, hops=1)) == [[0, 1, 2, 3, 4]]  # one more in each turn of the loop
    assert asyncio.run(run(5, hops=1, batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert asyncio.run(run(5, batch_size=2)) == [[0, 1, 2, 3, 4]]  # all are ready at once
    assert len(asyncio.run(run(5, hops=1, timeout=0.0))) > 1


@functools.cache
def opened(path, width):
    return SharedRows(Path(path), width)


def written(arena, place, ticket, values, ids=()):
    """What a worker does; it maps a file once."""
    path, width, row = arena.option(place)
    target = opened(path, width).values[row]
    target[:2].view(np.int32)[:] = np.array([ticket], np.int64).view(np.int32)
    target[2:HEADER].view(np.int32)[:] = len(values), len(ids)
    target[HEADER : HEADER + len(values)] = values
    target[HEADER + len(values) : HEADER + len(values) + len(ids)].view(np.int32)[:] = ids


def test_large_results_are_views_whose_rows_come_back_when_they_are_dropped():
    async def run():
        numbers = 2**15
        arena = Arena(numbers, 4 * (numbers + 16) * 32)
        results = []
        for ticket in range(2**40, 2**40 + 30):
            place = await arena.lease()
            written(arena, place, ticket, np.full(numbers, ticket % 97, np.float32))
            results.append((ticket, arena.read(place, ticket).values))
        assert len(arena) == 32
        # The later ones are copies: some rows stay for what is on its way.
        assert arena.free == 32 // 8
        for ticket, values in results:
            assert torch.equal(values, torch.full((numbers,), ticket % 97.0))
        part = results[0][1][5:7]
        del results, values
        gc.collect()
        assert arena.free == 31
        assert part.tolist() == [2**40 % 97] * 2
        del part
        gc.collect()
        assert arena.free == 32
        place = await arena.lease()
        with pytest.raises(RuntimeError, match="sent no log-probabilities"):
            arena.read(place, 7)
        assert arena.free == 32
        assert not Path(arena.option(place)[0]).exists()  # once it is mapped
        arena.close()

    asyncio.run(run())


def test_memory_grows_once_for_what_is_asked_together():
    """The rows of a step are held until those of the next are there, so twice as many are had."""
    arena = Arena(64, 2**24)
    (root,) = arena.lease_many(1)
    assert len(arena.paths) == 1
    for _ in range(3):
        first, second = arena.lease_many(64), arena.lease_many(64)
        assert len({root, *first, *second}) == 129
        assert first == sorted(first, reverse=True)
        for place in (*first, *second):
            arena.release(place)
    assert (len(arena.paths), len(arena)) == (2, 130)
    arena.lease_many(256)
    assert (len(arena.paths), len(arena)) == (3, 2 * 257)
    most = 2**24 // (4 * arena.width)
    assert len(arena.lease_many(most)) == most - 257 == arena._max_rows - 257
    assert arena.lease_many(1) == []
    arena.close()


def test_rows_of_large_results_follow_each_other_where_there_is_memory():
    """They are one tensor as they lie; else each step of lanes would be copied."""
    arena = Arena(2**15, 2**25)
    held = [*arena.lease_many(16), *arena.lease_many(16)]
    assert (len(arena), arena.free) == (32, 0)
    for place in held[::2]:
        arena.release(place)
    for _ in range(3):
        places = arena.lease_many(12)  # there are 16 rows, but no two that are neighbours
        assert places == [*range(places[0], places[0] - 12, -1)]
        for place in places:
            arena.release(place)
    assert (len(arena.paths), len(arena)) == (2, 32 + 24)
    while arena.free:  # more than there is memory for so
        assert arena.lease_many(12)
    assert len(arena) == arena._max_rows
    arena.close()


def test_memory_that_others_need_is_not_taken_and_that_is_told(monkeypatch, caplog):
    arena = Arena(64, 2**24)
    row = 4 * arena.width
    monkeypatch.setattr("tllm.logprobs.arena.room", lambda: (40 - len(arena)) * row)
    first = arena.lease_many(12)
    assert not caplog.records
    rest = arena.lease_many(64)
    assert len({*first, *rest}) == len(arena) == 40
    assert "no room for more than 40 shared rows" in caplog.text
    assert arena.lease_many(1) == []
    arena.release(rest[0])
    assert arena.lease_many(2) == rest[:1]
    arena.close()


def test_rows_are_copied_rather_than_lent_where_those_on_their_way_may_need_them():
    """As many as were on their way at a time, but half of the memory is always lent."""
    numbers, rows = 2**15, 20
    arena = Arena(numbers, 4 * (numbers + 16) * rows)
    places = arena.lease_many(6)
    for ticket, place in enumerate(places):
        written(arena, place, ticket, np.full(numbers, ticket, np.float32))
    held = [arena.read(place, ticket).values for ticket, place in enumerate(places)]
    for ticket in range(6, 18):
        (place,) = arena.lease_many(1)
        written(arena, place, ticket, np.full(numbers, ticket, np.float32))
        held.append(arena.read(place, ticket).values)
    assert [int(values[0]) for values in held] == list(range(18))
    assert len(arena) - arena.free == rows - 6
    arena.close()


def test_rows_that_are_read_together_are_one_block_and_free_together():
    numbers = 2**15
    arena = Arena(numbers, 4 * (numbers + 16) * 64)
    first = arena.lease_many(6)[-1]
    places, tickets = range(first, first + 6), range(10, 16)
    for ticket, place in zip(tickets, places, strict=True):
        written(arena, place, ticket, np.full(numbers, ticket, np.float32))
    assert arena.read_rows(places, range(11, 17)) is None  # of other tickets
    rows = arena.read_rows(places, tickets)
    assert len(rows) == 6 and rows.values[:, 0].tolist() == [*tickets]
    assert rows[2].values.data_ptr() == rows.values[2].data_ptr()
    free, answer = arena.free, rows[2].values
    del rows
    gc.collect()
    assert arena.free == free  # one of them is held
    assert (answer == 12).all()
    del answer
    gc.collect()
    assert arena.free == free + 6
    arena.close()


def test_an_address_is_told_once_and_again_when_there_are_more_files():
    arena, addresses = Arena(64, 2**24), Addresses()
    arena.lease_many(1)
    address = addresses.take(arena)
    told = address.options(Form(top_k=3))
    assert told["top_k"] == 3
    path, entry, serial, width, paths = told["address"]
    assert (width, paths) == (arena.width, list(arena.paths))
    assert address.options(Form(top_k=3)) is None
    address.say(2**40, 5)
    table = SharedRows(Path(path), ADDRESS_WIDTH).values.view(np.int64)
    assert table[entry].tolist()[:3] == [2**40, 5, serial]
    arena.lease_many(64)
    assert address.options(Form(top_k=3))["address"][-1] == list(arena.paths)
    assert address.options(WHOLE) == {"address": [path, entry, serial, width, list(arena.paths)]}
    address.give_back()
    assert table[entry, 2] == 0
    other = addresses.take(arena)
    again = other.options(WHOLE)["address"]
    assert again[1] == entry and again[2] not in (0, serial)
    assert len({addresses.take(arena).options(WHOLE)["address"][0] for _ in range(512)}) == 2
    arena.close()
    addresses.close()
    assert not Path(path).exists()


def test_a_lane_for_which_there_is_no_other_address_keeps_its_own(monkeypatch):
    """An entry that was given back twice would be two lanes'."""
    lane, arena, narrow = KeptRequest(None, None, ()), Arena(100, 2**20), Arena(8, 2**20)
    addresses = Addresses()
    address = lane.address_in(arena, addresses)
    taken = [addresses.free.pop() for _ in range(len(addresses.free))]

    def no_room(rows, width):
        raise OSError("no room")

    monkeypatch.setattr(SharedRows, "create", no_room)
    assert lane.address_in(narrow, addresses) is None
    assert lane.address_in(arena, addresses) is address
    address.give_back()
    free = [(id(table), entry) for table, entry in [*addresses.free, *taken]]
    assert len(free) == len(set(free))
    arena.close()
    addresses.close()


def test_a_fork_shares_only_what_its_tokens_begin_with():
    """Whoever forks on another thread may be heard after the parent's next step, or after what was
    done with the fork."""
    request = KeptRequest(None, None, ())
    parent, closed, begun = Holder(), Holder(), Holder()
    own, late, child = KeptRequest(None, None, ()), Holder(), Holder()
    parent.hold(request)
    closed.closed = True
    begun.hold(own)
    for tokens, holder in ((5, closed), (5, begun), (4, late), (5, child)):
        request.asked = 5
        parent.share(holder, tokens)
    assert (closed.request, begun.request, late.request) == (None, own, None)
    assert child.request is request and request.holders == {parent, child}


def test_whoever_finds_no_free_row_waits_for_one():
    async def run():
        arena = Arena(8, 0)  # two rows
        first, second = await arena.lease(), await arena.lease()
        third = asyncio.ensure_future(arena.lease())
        await asyncio.sleep(0.01)
        assert not third.done()
        written(arena, second, 5, np.array([1.5, 2.5], np.float32), [3, 4])
        answer = arena.read(second, 5)
        assert (answer.values.tolist(), answer.token_ids.tolist()) == ([1.5, 2.5], [3, 4])
        assert await asyncio.wait_for(third, 5) == second
        arena.release(first)
        arena.close()

    asyncio.run(run())


async def lent(arena, ticket):
    """The values of a row that is the caller's until he drops them."""
    place = await arena.lease()
    written(arena, place, ticket, np.ones(2**15, np.float32))
    return arena.read(place, ticket).values


def test_a_row_whose_waiter_left_is_for_the_next_in_line():
    async def run():
        arena = Arena(8, 0)  # two rows
        place, _ = await arena.lease(), await arena.lease()
        first, second = (asyncio.ensure_future(arena.lease()) for _ in range(2))
        await asyncio.sleep(0.01)
        arena.release(place)
        first.cancel()
        assert await asyncio.wait_for(second, 5) == place
        arena.close()

    asyncio.run(run())


@pytest.mark.parametrize("looks", [False, True])
def test_rows_that_come_back_are_for_whoever_waits(monkeypatch, looks):
    """Also where nobody asks for rows afterwards, and where somebody looks how many are free."""

    async def run():
        arena = Arena(2**15, 4 * (2**15 + 16) * 16)
        arena.expect(16)
        held = [await lent(arena, ticket) for ticket in range(1, 8)]
        taken = [await arena.lease() for _ in range(arena.free)]
        monkeypatch.setattr("tllm.logprobs.arena.room", lambda: 0)
        waiter = asyncio.ensure_future(arena.lease())
        await asyncio.sleep(0.01)
        assert not waiter.done() and taken
        held.pop()
        gc.collect()
        if looks:
            assert arena.free <= 1
        assert await asyncio.wait_for(waiter, 5) not in taken
        arena.close()

    asyncio.run(run())


def test_answers_are_free_as_soon_as_nobody_refers_to_them():
    """Their rows would be wanting until a garbage collection, and the next ones be copied."""
    made: list[weakref.ref[torch.Tensor]] = []
    query = Query.of((1, 2))

    def serve(waiters):
        for waiter in waiters:
            values = torch.ones(4)
            made.append(weakref.ref(values))
            waiter.resolve(Answer(values))

    async def run():
        loop = EngineLoop(asyncio.get_running_loop())
        mailbox = Mailbox(loop, serve, lambda waiters: None, batch_size=8, timeout=1.0)
        answers = await mailbox.ask([query, query], [None, None])
        assert [each() is not None for each in made] == [True, True]
        del answers
        await asyncio.sleep(0)  # what woke this task has the future until then
        assert [each() is not None for each in made] == [False, False]

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_blocks_are_counted_once_when_they_are_shared():
    ledger = BlockLedger(4)
    one = ledger.open(None, range(9))  # two full blocks, and one that is begun
    assert ledger.used == 3
    two = ledger.open(None, [*range(8), 99])
    other = ledger.open(7, range(9))
    assert ledger.used == 3 + 1 + 3
    ledger.grow(one, 13)
    assert ledger.used == 7 + 1
    for holding in (one, two, other, one):
        ledger.close(holding)
    assert ledger.used == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(None, 31), (1024, 31), (315, 9)])
def test_layers_with_several_windows_leave_room_for_fewer_tokens(tokens, blocks):
    """As vLLM counts them: a sequence of Gemma 2 has blocks for each window."""
    cache = SimpleNamespace(num_gpu_blocks=32, block_size=32, kv_cache_size_tokens=tokens)
    config = SimpleNamespace(cache_config=cache, scheduler_config=SimpleNamespace(max_num_seqs=8))
    assert Capacity.of(config) == Capacity(8, blocks, 32)


def test_the_block_of_a_prompts_last_token_is_each_requests_own():
    """vLLM computes that token for each, and with it the block, also one that is full."""
    ledger = BlockLedger(4)
    for holding in [ledger.open(None, range(8)) for _ in range(3)]:
        ledger.grow(holding, 8)
    assert ledger.used == 1 + 3 * 2


def test_equal_interventions_have_equal_keys():
    def key(vector, **more):
        return Interventions.of({"consumers": {"x": {"vector": vector, **more}}}).key

    assert key(torch.ones(3)) == key(torch.ones(3))
    assert key(np.ones(3)) == key(np.ones(3))
    assert key([1, 2], a=1, b=2) == key([1, 2], b=2, a=1)
    assert len({key([1]), key([2]), key([1.0]), key(torch.ones(1)), key(np.ones(1))}) == 5
    assert Interventions.of({}).key == Interventions.of({"consumers": None}).key == ""
    with pytest.raises(ValueError, match="is object; give numbers"):
        key(object())
    # Of what is no plain data nobody tells what equals it.
    rows = {"hooks": {"post_block": [0]}, "positions": range(2)}
    one, other = (Interventions.of({"capture": {"memory": rows}}).key for _ in range(2))
    assert one != other


def test_autoencoders_of_conditions_are_told_apart_by_their_registrations():
    probe = {"sae": "b", "feature": 1}
    nested = {"any": [{"all": [{"probe": probe, "above": 1}, "monitor"]}]}
    nested["any"].append({"probe": {**probe, "sae": "a"}, "above": 1})
    both = [{"vector": [1.0], "when": nested}, {"vector": [1.0], "when": "monitor"}]
    found = Interventions.of({"steering_vectors": {"post_block": {1: both}}})
    assert found.autoencoders == ("a", "b")
    assert Interventions.of({}).autoencoders == ()
    told = [found.with_registrations(ids).key for ids in (("1", "2"), ("1", "2"), ("1", "3"))]
    assert told[0] == told[1] != told[2]
    unknown = [found.with_registrations(None).key for _ in range(2)]
    assert len({found.key, *told, *unknown}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ticket": -1}, "ticket"),
        ({"ticket": "a"}, "ticket"),
        ({"place": ["x", 9, 0]}, "without a 'ticket'"),
        ({"ticket": 1, "address": ["x", 0, 1, 9, ["y"]]}, "'address' and 'ticket'; give one"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1, "token_ids": [1]}, "give one of them"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": 5}, "must be a list of token ids"),
        ({"other": 1}, "unknown options"),
    ],
)
def test_options_of_the_consumer_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        NextTokenConsumer().validate_options(options)


def test_a_loop_that_ends_while_its_model_is_cleaned_up_is_no_error(monkeypatch):
    """`cleanup` on the loop itself, as the last thing that is done there."""
    raised, ended = [], []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    async def last():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main():
        loop = EngineLoop(asyncio.get_running_loop())
        before = set(threading.enumerate())
        loop.end(last)
        threads = set(threading.enumerate()) - before
        await asyncio.sleep(0.05)
        return threads

    for thread in asyncio.run(main()):
        thread.join(10)
        assert not thread.is_alive()
    assert (raised, ended) == ([], [True])


async def nothing():
    pass


def test_a_loop_that_does_not_run_is_an_error_and_not_a_wait():
    loop = asyncio.new_event_loop()
    engine_loop = EngineLoop(loop)
    mailbox = Mailbox(engine_loop, None, None, 20, 0.02)
    try:
        for wait in (
            lambda: engine_loop.run(nothing()),
            lambda: engine_loop.call(dict),
            lambda: asyncio.run(engine_loop.wait_for(nothing())),
            lambda: asyncio.run(mailbox.ask([Query.of((5,))], [None])),
        ):
            with pytest.raises(RuntimeError, match=r"does not run.*ask on that loop"):
                wait()
        assert loop.run_until_complete(engine_loop.wait_for(nothing())) is None
    finally:
        loop.close()


def test_a_forked_process_does_not_wait_for_the_loop_of_another():
    engine_loop = EngineLoop()
    process = multiprocessing.get_context("fork").Process(target=ask_from_fork, args=(engine_loop,))
    process.start()
    process.join(30)
    process.kill()
    engine_loop.end(nothing)
    assert process.exitcode == 0


def ask_from_fork(engine_loop):
    with pytest.raises(RuntimeError, match=r"was forked from.*make a model here"):
        engine_loop.run(nothing())
    engine_loop.end(nothing)  # as when the process ends


def test_queries_are_cancelled_while_others_are_asked():
    """From another thread: those that wait may be others at any time."""
    engine_loop = EngineLoop()
    mailbox = Mailbox(engine_loop, None, lambda waiters: None, 20, 0.02)

    class Asked:
        waiters = ()

        @property
        def of_lanes(self):
            mailbox._waiting.add(Asked())
            return True

    mailbox._waiting.update([Asked(), Asked()])
    mailbox.reset()
    engine_loop.end(nothing)


def test_what_is_no_engine_that_can_be_asked_is_refused():
    with pytest.raises(TypeError, match=r"was given builtins\.object; give a tllm\.AsyncLLM"):
        asyncio.run(AsyncVirtualLM.from_engine(object()))


def test_an_argument_that_from_name_has_not_is_refused_before_an_engine_starts():
    with pytest.raises(
        TypeError, match=r"unknown arguments \['dtype'\]; give vLLM's in engine_opts"
    ):
        AsyncVirtualLM.from_name("no/model", dtype="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_size": -1}, "cache_size=-1 must be 0 or more"),
        ({"cache_size": "all"}, "cache_size='all' is not a whole number"),
        ({"cache_opts": {"to_cpu": True}}, r"cache_opts has unknown keys \['to_cpu'\]"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
        ({"timeout": -1}, "timeout=-1 must be 0 or more seconds"),
        ({"transport": "shm"}, "transport='shm' is not known; choose one of shared, rpc"),
        ({"shared_mib": 0.5}, "shared_mib=0.5 is not a whole number"),
        ({"idle_seconds": "5"}, "idle_seconds='5' is not a number"),
    ],
)
def test_what_is_wrong_is_refused_before_an_engine_starts(monkeypatch, options, message):
    async def create(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(virtual_lm.AsyncLLM, "create", create)
    with pytest.raises(ValueError, match=message):
        AsyncVirtualLM.from_name("a/model", **options)


def test_an_engine_of_which_no_model_is_made_is_ended(monkeypatch):
    class Engine:
        ended = False
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))

        def shutdown(self):
            self.ended = True

    engine = Engine()

    async def create(*args, **kwargs):
        return engine

    monkeypatch.setattr(virtual_lm.AsyncLLM, "create", create)
    with pytest.raises(ValueError, match="data_parallel_size is more than 1"):
        AsyncVirtualLM.from_name("a/model")
    assert engine.ended


SAMPLING = "max_tokens eos_token_ids temperature seed"
CALLS = {
    "from_name": "model_name engine_opts cache_size cache_opts batch_size timeout",
    "next_token_logprobs": "token_ids",
    "next_token_logprobs_sync": "token_ids",
    "batch_next_token_logprobs": "token_ids_list",
    "batch_next_token_logprobs_sync": "token_ids_list",
    "sample": f"prompt_token_ids {SAMPLING}",
    "batch_sample": f"prompt_token_ids_list {SAMPLING}",
    "add_new_lora": "lora_path lora_name",
    "set_lora": "lora_path lora_name",
    "clear_lora": "",
    "clear_cache": "",
    "reset_async_queries": "",
    "cleanup": "",
}
"""Of genlm-backend's `AsyncVirtualLM`."""


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_genlm_backend(name):
    signature = inspect.signature(getattr(AsyncVirtualLM, name))
    positional = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name != "self"
    ]
    assert positional == CALLS[name].split()


def test_rows_that_lie_one_after_the_other_are_stacked_where_they_are():
    numbers = 2**15
    arena = Arena(numbers, 4 * (numbers + 16) * 64)
    places = arena.lease_many(8)[::-1]
    for ticket, place in enumerate(places):
        written(arena, place, ticket, np.full(numbers, ticket, np.float32))
    answers = [arena.read(place, ticket) for ticket, place in enumerate(places)]
    free, first = arena.free, answers[0].values.data_ptr()
    for order in ([0, 1, 2], [1, 0], [0, 1, 3], [0, 2], [2, 2], [3]):
        found = stacked([answers[at] for at in order])
        assert found[:, 5].tolist() == order
        at_once = order in ([0, 1, 2], [3])
        assert (found.data_ptr() == answers[order[0]].values.data_ptr()) == at_once
        if not at_once:
            assert found.untyped_storage().nbytes() == found.nbytes
    found = stacked(answers[:3])
    del answers
    gc.collect()
    assert arena.free == free + 5  # as long as somebody looks at the others
    assert found.data_ptr() == first
    del found
    gc.collect()
    assert arena.free == free + 8
    arena.close()


def test_a_stack_of_answers_holds_nothing_that_lies_between_them():
    """Any two lie at equal distances; it was written to files, and read where no memory is."""
    memory = np.arange(24, dtype=np.float32).reshape(4, 6)
    for order in ([0, 1], [0, 2], [0, 1, 2, 3]):
        found = stacked([Answer(torch.from_numpy(memory[at, 1:5])) for at in order])
        assert torch.equal(found, torch.from_numpy(memory[order, 1:5]))
        assert found.untyped_storage().nbytes() == found.nbytes


def test_backends_by_name():
    with pytest.raises(ValueError, match="choose one of vllm, hf"):
        load_model_by_name("demo/model", backend="mlx")
    with load_model_by_name("demo/model", backend="hf") as lm:
        assert lm.next_token_logprobs_sync([5, 6]).shape == (lm.vocab_size,)
        with pytest.raises(ValueError, match="the prompt is empty"):
            lm.next_token_logprobs_sync([])
        with pytest.raises(ValueError, match="no adapters"):
            lm.next_token_logprobs_sync([5], lora_name="x")
        seeded = [asyncio.run(lm.sample([5], 5, [], seed=1)) for _ in range(2)]
        assert seeded[0] == seeded[1]
    with pytest.raises(RuntimeError, match="cleanup"):
        lm.next_token_logprobs_sync([5])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"top_k": 2}, {"top_k": 3}),
        ({"token_ids": [1, 2]}, {"token_ids": [1, 3]}),
        ({"top_k": 2}, {}),
    ],
)
def test_inputs_that_ask_for_different_values_are_their_own_requests_error(before, after):
    """The consumer was detached for all who asked."""
    ctx = SimpleNamespace(
        device=torch.device("cpu"),
        model=SimpleNamespace(first_rank=True),
        to_host=PinnedCopy,
        upload=torch.from_numpy,
    )
    consumer = NextTokenConsumer()
    consumer.start(ctx)
    results = []
    for slot, later in ((0, after), (1, dict(before))):
        infos = [RequestInfo("a", f"{slot}", 0, 1, slot, 4, options=o) for o in (before, later)]
        for position, info in enumerate(infos):
            meta = RowMeta((info,), np.zeros(1, np.int32), np.array([position]), np.zeros(1, int))
            consumer.consume_bundle(PortBundle({"logits": torch.randn(1, 8)}, meta, {}), ctx)
        results.append(consumer.on_request_finished(infos[-1], ctx))
    differ, alike = results
    assert differ.status == "error" and "asked for different top_k or token_ids" in differ.error
    values = alike["values"] if "top_k" in before else alike
    assert values.positions.tolist() == [0, 1] and values.values.shape == (2, 2)
