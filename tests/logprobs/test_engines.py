"""Three families beside the demo model, each in an engine of another kind, until its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from oracle import families
from two_workers import skip_without_two_workers
from vllm.v1.engine.exceptions import EngineDeadError

from logprobs.asking import (
    ENGINE,
    OTHER_ENGINE,
    SAME_ENGINE,
    agrees,
    gathered,
    prompts,
    vllm_logprobs,
)
from logprobs.walk import check
from tllm.logprobs import TransformersLM, load_model_by_name

# Ranks compile their embedding's mask even in eager mode, and Inductor takes the interpreter's
# driver for one that it can compile with.
UNCOMPILED = {"TORCH_COMPILE_DISABLE": os.environ["TRITON_INTERPRET"]}
KINDS = {
    "llama": ({}, {}, {}),
    "gpt2": ({}, {"transport": "rpc"}, {}),
    "gemma2": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", **UNCOMPILED},
    ),
}
"""Engine arguments, arguments of the backend, environment variables: one engine as it comes, one
without shared memory, one of two ranks."""

every_family = pytest.mark.parametrize("family", KINDS, indirect=True)


def running():
    """Processes that this one has started, and those that they have."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    }


def shared_files():
    """Memory for which this process answers; an engine's client has a page of its own."""
    found = Path("/dev/shm").glob(f"tllm-*-{os.getpid()}-*")
    return {path for path in found if path.stat().st_size > 4096}


class Family:
    """A tiny model in an engine, and in `transformers`.

    Attributes:
        before: the processes that ran when its engine was started.
        files: the shared memory that there was.
        collected: how often younger objects were collected since all were, when it had started.
    """

    def __init__(self, path, engine_opts, options):
        self.reference = TransformersLM.from_name(path)
        self.before, self.files = running(), shared_files()
        opts = ENGINE | {"skip_tokenizer_init": True, "max_logprobs": -1} | engine_opts
        self.lm = load_model_by_name(path, llm_opts={"engine_opts": opts, **options})
        self.collected = gc.get_count()[2]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory, shared_lm, forked_processes):
    engine_opts, options, environment = KINDS[request.param]
    if "tensor_parallel_size" in engine_opts and torch.cuda.is_available():
        skip_without_two_workers()
    path = str(families.save(request.param, tmp_path_factory.mktemp(request.param)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        family = Family(path, engine_opts, options)
    yield family
    family.lm.cleanup()


@every_family
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(family):
    assert family.lm.tokenizer is None
    check(family.lm, family.reference, families.VOCAB)


@every_family
def test_no_full_collection_of_what_was_imported_is_left_to_the_first_steps(family):
    """It takes 0.4 to 1 s with all that vLLM imports, in the middle of whatever is asked."""
    assert family.collected == 0


@every_family
def test_log_probabilities_are_those_of_vllm(family):
    for prompt in prompts(3, seed=40):
        asked = [token % families.VOCAB for token in prompt]
        found = family.lm.next_token_logprobs_sync(asked)
        assert agrees(found, vllm_logprobs(family.lm, asked), SAME_ENGINE)


@every_family
def test_several_engines_answer_side_by_side(family, lm, reference):
    asked = [[token % families.VOCAB for token in prompt] for prompt in prompts(4, seed=41)]

    async def both():
        return await gathered(
            model.next_token_logprobs(prompt) for prompt in asked for model in (lm, family.lm)
        )

    found = asyncio.run(both())
    for i, prompt in enumerate(asked):
        assert agrees(found[2 * i], reference.next_token_logprobs_sync(prompt), OTHER_ENGINE)
        theirs = family.reference.next_token_logprobs_sync(prompt)
        assert agrees(found[2 * i + 1], theirs, OTHER_ENGINE)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_an_engine_without_adapters_says_so(family):
    with pytest.raises(ValueError, match="enable_lora"):
        family.lm.add_new_lora("x")


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_an_engine_that_dies_is_an_error_and_not_a_wait(family):
    lm = family.lm
    assert running() > family.before

    async def ask():
        lane = lm.open([5])
        await lane.next()
        lane.feed(6)
        waiting = [asyncio.ensure_future(lm.sample([i], 200, [])) for i in range(2, 60)]
        await asyncio.sleep(0.02)
        for process in running() - family.before:
            os.kill(process, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
        assert isinstance(found[-1], Exception)  # the first may have ended
        for later in (lane.next(), lm.next_token_logprobs([7]), lane.close()):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(later, 60)

    asyncio.run(ask())
    with pytest.raises(EngineDeadError):
        lm.next_token_logprobs_sync([8])
    lm.cleanup()
    assert running() == family.before


@pytest.mark.parametrize("family", ["gpt2", "gemma2"], indirect=True)
def test_cleanup_ends_one_engine_and_leaves_the_others_alone(family, lm, reference):
    other = family.lm
    kept = other.next_token_logprobs_sync([5, 6])
    assert running() > family.before
    lane = other.open([5])

    async def wait_for_too_long():
        waiting = [asyncio.ensure_future(other.sample([i], 200, [])) for i in range(2, 60)]
        async with other:  # whose end is cleanup
            await asyncio.sleep(0.05)
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert isinstance(asyncio.run(wait_for_too_long())[-1], BaseException)
    other.cleanup()  # again
    assert shared_files() <= family.files
    assert running() == family.before
    for ask in (
        lambda: other.next_token_logprobs_sync([5]),
        lambda: asyncio.run(other.next_token_logprobs([5])),
        lambda: asyncio.run(other.sample([5], 2, [])),
        lane.next_sync,
    ):
        with pytest.raises(RuntimeError, match="cleanup"):
            ask()
    asyncio.run(lane.close())
    assert agrees(kept, family.reference.next_token_logprobs_sync([5, 6]), OTHER_ENGINE)
    found = lm.next_token_logprobs_sync([8, 9])
    assert agrees(found, reference.next_token_logprobs_sync([8, 9]), OTHER_ENGINE)
