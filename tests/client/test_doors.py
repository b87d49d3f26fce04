"""Every way in carries interventions."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
import vllm
from engine.asking import generate, greedy, prompts_of, tokens_of
from engine.reference import HIDDEN
from tiny_engines import TINY_ENGINE

from tllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    PoolingParams,
    attach,
    clear_consumers,
    register_consumer,
)
from tllm.consumers.base import Consumer
from tllm.engine.options import SCHEDULER, WORKERS
from tllm.ports import ConsumerFlow, ResidualStream

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
CAPTURE = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}


class Interrupting(Consumer):
    """Presses Ctrl-C in the third step."""

    consumer_id = "interrupting"
    steps = 0

    def flows(self):
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0, site="post_block")])]

    def on_step_end(self, ctx):
        self.steps += 1
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)


def stepped(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def results_of(llm):
    """What the worker of an engine in this process keeps."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.session.sequences.results


def test_requests_added_to_the_engine_itself_have_their_results(llm):
    engine = llm.llm_engine
    (prompt,) = prompts_of([7])
    engine.add_request("mine", prompt, greedy(4, capture=CAPTURE))
    engine.add_request("plain", prompt, greedy(4))
    with pytest.raises(ValueError, match="request_id='mine' is the name of a request that runs"):
        engine.add_request("mine", prompt, greedy(4))
    outputs = stepped(engine)
    rows = outputs["mine"].activations["post_block"][1]
    assert rows.positions.tolist() == list(range(10))
    assert outputs["plain"].capture_results == {}
    assert not llm._front._running and not llm._tllm.held.num_requests


def test_after_an_interrupt_nothing_is_left(llm):
    prompts = prompts_of([5, 9])
    before = tokens_of(generate(llm, prompts, greedy(6)))
    llm.register_consumer(Interrupting())
    ended = greedy(1, capture=CAPTURE, steering_vectors={"post_block": {1: [0.5] * HIDDEN}})
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, [ended, greedy(200, capture=CAPTURE)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.llm_engine.has_unfinished_requests() and not llm._front._running
    llm.clear_consumers()
    assert tokens_of(generate(llm, prompts, greedy(6))) == before
    assert not llm._tllm.held.num_requests and not results_of(llm)._kept


def test_workers_keep_nothing_of_requests_that_were_aborted(llm):
    """Nobody comes for the results of a request that was given up, so they are not kept."""
    engine, results = llm.llm_engine, results_of(llm)
    prompts = prompts_of([5, 9])
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add_request(name, prompt, greedy(200, capture=CAPTURE))
    for _ in range(3):
        engine.step()
    engine.abort_request(["a", "b"])
    generate(llm, prompts, greedy(3))
    assert not results._kept and not results._late


def test_an_engine_of_vllms_that_exists_is_attached_to_once(tiny_model):
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    theirs = vllm.LLM(tiny_model, worker_cls=WORKERS[0], scheduler_cls=SCHEDULER, **options)
    handle = attach(theirs)
    assert attach(theirs.llm_engine) is handle
    (output,) = generate(theirs, prompts_of([5]), greedy(2, capture=CAPTURE))
    assert output.activations["post_block"][1].tensor.shape[0] == 6
    assert set(handle.consumers) == {"memory"}


def test_an_engine_with_other_workers_is_refused(llm):
    class Engine:
        vllm_config = type("C", (), {"parallel_config": type("P", (), {"worker_cls": "x.Y"})})

        def add_request(self):
            """Vllm's own."""

    with pytest.raises(ValueError, match=r"start it with worker_cls='tllm.engine"):
        attach(Engine())


def test_pooled_requests_are_steered_and_captured():
    options = TINY_ENGINE | {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    llm = LLM(str(DEMO_MODEL), **options)
    prompts = prompts_of([5, 9])
    hidden = llm.steering.layers()["hidden_size"]

    def embedded(**asked):
        params = PoolingParams(task="embed", **asked)
        return llm.encode(prompts, params, pooling_task="embed", use_tqdm=False)

    plain = embedded()
    vector = torch.linspace(-3, 3, hidden)
    steered = embedded(steering_vectors={"post_block": {1: vector}}, capture=CAPTURE)
    for one, other in zip(plain, steered, strict=True):
        assert not torch.allclose(one.outputs.data, other.outputs.data)
        rows = other.activations["post_block"][1]
        assert rows.tensor.shape == (len(other.prompt_token_ids), hidden)
    llm.steering.set({"post_block": {1: vector}})
    for one, other in zip(embedded(), steered, strict=True):
        assert torch.allclose(one.outputs.data, other.outputs.data, atol=1e-5)
    for method, given in (("embed", (prompts,)), ("classify", (prompts,)), ("score", ("a", "b"))):
        with pytest.raises(ValueError, match=f"the outputs of {method} have no place"):
            getattr(llm, method)(*given, pooling_params=PoolingParams(capture=CAPTURE))


@pytest.mark.parametrize("way", ["from_engine_args", "from_vllm_config"])
def test_an_async_engine_carries_interventions_however_it_is_made(tiny_model, way):
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    arguments = AsyncEngineArgs(model=tiny_model, **options)
    mine = register_consumer("logging")
    vector = {"post_block": {1: torch.linspace(-3, 3, HIDDEN)}}
    prompt = {"prompt_token_ids": [5, 6, 7]}

    async def use():
        if way == "from_engine_args":
            engine = AsyncLLM.from_engine_args(arguments)
        else:
            engine = AsyncLLM.from_vllm_config(arguments.create_engine_config())
        try:
            return await ask(engine)
        finally:
            engine.shutdown()

    async def ask(engine):
        async def last(name, **asked):
            return [o async for o in engine.generate(prompt, greedy(4, **asked), name)][-1]

        plain = await last("plain")
        steered = await last("steered", steering_vectors=vector, capture=CAPTURE)
        assert steered.activations["post_block"][1].tensor.shape == (6, HIDDEN)
        await engine.steering.set(vector)
        queue = await engine.add_request("added", prompt, greedy(4))
        while not (output := await queue.get()).finished:
            pass
        assert output.outputs[0].token_ids == steered.outputs[0].token_ids
        assert output.outputs[0].token_ids != plain.outputs[0].token_ids
        with pytest.raises(ValueError, match="has no layer 99"):
            await last("wrong", steering_vectors={"post_block": {99: torch.ones(HIDDEN)}})
        return await mine.read_stats()

    try:
        assert asyncio.run(use())
    finally:
        clear_consumers()
