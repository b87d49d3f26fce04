"""Several engines in one process, and what is left when one of them is cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from oracle import families
from vllm.v1.engine.exceptions import EngineDeadError

from logprobs.asking import ENGINE, agrees, gathered, prompts
from tllm.logprobs import AsyncVirtualLM, TransformersLM


def shared_files():
    return list(Path("/dev/shm").glob(f"tllm-rows-{os.getpid()}-*"))


def children():
    """Processes that this one has started, and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found


def test_an_engine_that_dies_is_an_error_and_not_a_wait(tmp_path):
    path = str(families.save("llama", tmp_path))
    before = children()
    lm = AsyncVirtualLM.from_name(path, engine_opts=ENGINE | {"skip_tokenizer_init": True})

    async def ask():
        lane = lm.open([5])
        await lane.next()
        lane.feed(6)
        waiting = [lm.sample([i], 200, []) for i in range(2, 9)]
        running = [asyncio.ensure_future(each) for each in waiting]
        await asyncio.sleep(0.02)
        for process in children() - before:
            os.kill(process, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        assert all(isinstance(each, Exception) for each in found)
        for later in (lane.next(), lm.next_token_logprobs([7]), lane.close()):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(later, 60)

    asyncio.run(ask())
    with pytest.raises(EngineDeadError):
        lm.next_token_logprobs_sync([8])
    lm.cleanup()
    assert children() == before


def test_cleanup_ends_one_engine_and_leaves_the_others_alone(lm, reference, tmp_path):
    processes = children()
    path = str(families.save("llama", tmp_path))
    options = ENGINE | {"skip_tokenizer_init": True}
    other = AsyncVirtualLM.from_name(path, engine_opts=options)
    asked = [[token % families.VOCAB for token in prompt] for prompt in prompts(4)]

    async def both():
        return await gathered(
            model.next_token_logprobs(prompt) for prompt in asked for model in (lm, other)
        )

    found = asyncio.run(both())
    theirs = TransformersLM.from_name(path)
    for i, prompt in enumerate(asked):
        assert agrees(found[2 * i], reference.next_token_logprobs_sync(prompt), 0.03)
        assert agrees(found[2 * i + 1], theirs.next_token_logprobs_sync(prompt), 0.03)
    assert children() > processes

    lane = other.open([5])

    async def wait_for_too_long():
        waiting = [asyncio.ensure_future(other.sample([i], 200, [])) for i in range(2, 30)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(other.cleanup)
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(each, BaseException) for each in asyncio.run(wait_for_too_long()))
    other.cleanup()  # again
    assert not shared_files()
    assert children() == processes
    for ask in (
        lambda: other.next_token_logprobs_sync([5]),
        lambda: asyncio.run(other.next_token_logprobs([5])),
        lambda: asyncio.run(other.sample([5], 2, [])),
        lane.next_sync,
    ):
        with pytest.raises(RuntimeError, match="cleanup"):
            ask()
    asyncio.run(lane.close())
    assert agrees(found[1], theirs.next_token_logprobs_sync(asked[0]), 0.03)
    assert agrees(
        lm.next_token_logprobs_sync([8, 9]), reference.next_token_logprobs_sync([8, 9]), 0.03
    )
