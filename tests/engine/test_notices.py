"""Notices of what was computed: they come, or do no harm."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tllm import SamplingParams
from tllm.engine.bulk import Bulk, BulkInputs, BulkItem, BulkRequests
from tllm.engine.notices import NoticeInbox, NoticeOutbox


async def _delivered():
    """Give the loop time to look at its sockets."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_an_inbox_hears_what_is_sent_to_it_and_leaves_nothing_behind():
    async def run():
        heard: list[int] = []
        inbox = NoticeInbox(heard.extend)
        path = Path(inbox.address)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # nobody else's notices are believed
        outbox = NoticeOutbox(inbox.address)
        outbox.send([3, 2**40])
        await _delivered()
        assert not path.exists()  # who is killed now leaves nothing
        outbox.send(range(5_000))
        await _delivered()
        assert heard == [3, 2**40, *range(5_000)]
        inbox.close()
        outbox.send([1])
        await _delivered()
        assert len(heard) == 5_002
        outbox.close()

    asyncio.run(run())


def test_an_inbox_that_nobody_wrote_to_leaves_nothing_behind():
    async def run():
        inbox = NoticeInbox(lambda numbers: None)
        inbox.close()
        return Path(inbox.address)

    assert not asyncio.run(run()).exists()


@pytest.mark.parametrize("numbers", [[1], range(2**20)], ids=["nobody", "too_long"])
def test_a_notice_that_cannot_be_sent_is_not(numbers, tmp_path):
    outbox = NoticeOutbox(str(tmp_path / "nobody"))
    outbox.send(numbers)
    outbox.close()


def test_a_full_inbox_makes_nobody_wait():
    async def run():
        heard: list[int] = []
        inbox = NoticeInbox(heard.extend)
        outbox = NoticeOutbox(inbox.address)
        for number in range(20_000):  # nobody reads meanwhile
            outbox.send([number])
        await _delivered()
        inbox.close()
        outbox.close()
        assert heard == list(range(len(heard)))
        assert 0 < len(heard) < 20_000

    asyncio.run(run())


def _begun(message: EngineCoreRequest, bulk: BulkRequests) -> dict[str, Request]:
    request = Request.from_engine_core_request(message, block_hasher=None)
    assert bulk.are_in(request)
    bulk.note_inbox(request)
    return {each.request_id: each for each in bulk.begun(request)}


def test_a_notice_tells_what_was_computed_for_good():
    items = [BulkItem(10 + i, name, [1, 2], None) for i, name in enumerate("abcdef")]

    async def run():
        heard: list[int] = []
        inbox, bulk = NoticeInbox(heard.extend), BulkRequests()
        asked = Bulk.message(
            SamplingParams(max_tokens=1), 1, items, BulkInputs([], [], [], []), inbox.address
        )
        running = _begun(asked, bulk)
        for request in running.values():
            request.status = RequestStatus.RUNNING
        running["b"].status = RequestStatus.PREEMPTED  # it may be computed again
        running["c"].num_stale_output_tokens = 1  # and this one was, in the meantime
        del running["d"]  # aborted
        names = [*"abcdef", "another"]
        drawn = [[7]] * 4 + [[], [7], [7]]  # the prompt of "e" is computed in part
        output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, drawn)
        bulk.give_notice(output, running)
        await _delivered()
        inbox.close()
        return heard

    assert asyncio.run(run()) == [10, 15]


def test_a_request_of_a_user_is_no_message():
    asked = Bulk.message(SamplingParams(max_tokens=1), 1, [], BulkInputs([], [], [], []))
    request = Request.from_engine_core_request(asked, block_hasher=None)
    assert BulkRequests.are_in(request)
    request.request_id += "-1a2b3c4d"  # as vLLM's front ends make a user's
    assert not BulkRequests.are_in(request)
