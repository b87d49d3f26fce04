"""Every way in carries interventions."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal

import pytest
import torch
import vllm
from engine.asking import generate, greedy, prompts_of, tokens_of
from engine.reference import HIDDEN
from tiny_engines import TINY_ENGINE

from tllm import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, EngineArgs, attach
from tllm.consumers.base import Consumer
from tllm.consumers.logging import LoggingConsumer
from tllm.engine.options import SCHEDULER, WORKERS, EngineOptions
from tllm.engine.refusals import RefusedError
from tllm.ports import ConsumerFlow, ResidualStream

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
    return core.model_executor.driver_worker.worker.session.consumers.results


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


def test_results_of_one_output_are_waited_for_as_those_of_several(llm):
    (output,) = generate(llm, prompts_of([5]), greedy(1, capture=CAPTURE))
    for outputs in (output, [output], {1: output}.values()):
        llm.wait_for_results(outputs, 1)
    assert output.capture_results["memory"].status == "ok"


def test_what_stands_in_extra_args_by_hand_is_refused(llm):
    asked = vllm.SamplingParams(max_tokens=1, extra_args={"stop_when": "a monitor"})
    [prompt] = prompts_of([7])
    with pytest.raises(ValueError, match=r"extra_args\['stop_when'\] was given"):
        generate(llm, [prompt], asked)
    with pytest.raises(ValueError, match=r"extra_args\['stop_when'\] was given"):
        llm.llm_engine.add_request("by hand", {"prompt_token_ids": prompt}, asked)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture
def interruptible():
    """A process that was started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_after_an_interrupt_nothing_is_left(llm, interruptible):
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


def test_after_an_interrupt_while_requests_are_added_none_is_left(llm, interruptible, monkeypatch):
    """vLLM leaves those that were added before, and gives their outputs to the next caller."""
    prompts = prompts_of([5, 9, 6])
    before = tokens_of(generate(llm, prompts, greedy(6)))
    core, added = llm.llm_engine.engine_core, []
    add = core.add_request

    def interrupted(request):
        if len(added) == 1:
            signal.raise_signal(signal.SIGINT)
        add(request)
        added.append(request)

    with monkeypatch.context() as patched:
        patched.setattr(core, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts, greedy(6, capture=CAPTURE))
    assert len(added) == 2, "the one that was being added is whole"
    assert not llm.llm_engine.has_unfinished_requests() and not llm._front._running
    assert tokens_of(generate(llm, prompts, greedy(6))) == before
    assert not llm._tllm.held.num_requests and not results_of(llm)._kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("forwards", [1, 3])  # of the run whose rows are kept, of an experiment
def test_after_an_interrupt_of_a_sweep_nothing_is_left(llm, interruptible, monkeypatch, forwards):
    """It comes between two steps, as in `generate`: the engine is not left in the middle of one."""
    prompts = prompts_of([5, 9])
    before = tokens_of(generate(llm, prompts, greedy(6)))
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    forward, seen = runner.execute_model, []

    def interrupted(*args):
        found = forward(*args)
        seen.append(None)
        if len(seen) == forwards:
            signal.raise_signal(signal.SIGINT)  # before anything is sampled
        return found

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, "execute_model", interrupted)
        corrupt = [prompts[1][0] % 250 + 1, *prompts[1][1:]]
        llm.patching.sweep(prompts[1], corrupt, hooks="post_block", metric="kl")
    assert not llm.llm_engine.has_unfinished_requests() and not llm._front._running
    assert not llm.patching.kept() and not llm._tllm.held.num_requests
    llm.clear_consumers()
    assert tokens_of(generate(llm, prompts, greedy(6))) == before
    assert not results_of(llm)._kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


class Watched:
    """Stands in the place of methods of an engine, as a profiler does."""

    def __init__(self, engine):
        self.added, self.steps = 0, 0
        self._add_request, self._step = engine.add_request, engine.step
        engine.add_request, engine.step = self.add_request, self.step

    def add_request(self, *args, **kwargs):
        self.added += 1
        return self._add_request(*args, **kwargs)

    def step(self):
        self.steps += 1
        return self._step()


class OfTheirOwn(vllm.LLM):
    """An `LLM` of a user's own class."""

    def greeting(self):
        return "hello"


def test_an_engine_of_vllms_that_exists_is_attached_to_once(tiny_model):
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    theirs = OfTheirOwn(
        tiny_model,
        worker_cls=WORKERS[torch.cuda.is_available()],
        scheduler_cls=SCHEDULER,
        **options,
    )
    watched = Watched(theirs.llm_engine)
    handle = attach(theirs)
    assert attach(theirs.llm_engine) is handle is theirs
    assert isinstance(theirs, OfTheirOwn) and isinstance(theirs, LLM)
    assert theirs.greeting() == "hello" and type(theirs).__name__ == "OfTheirOwn"
    (output,) = generate(theirs, prompts_of([5]), greedy(2, capture=CAPTURE))
    assert output.activations["post_block"][1].tensor.shape[0] == 6
    assert set(handle.consumers) == {"memory"}
    assert watched.added == 1 and watched.steps >= 2
    # vLLM's own `beam_search` would make requests that say nothing of what was asked.
    asked = BeamSearchParams(beam_width=1, max_tokens=3, capture=CAPTURE)
    with pytest.raises(RefusedError, match="a beam is computed by many requests"):
        theirs.beam_search(prompts_of([5]), asked)


def test_consumers_for_an_engine_that_is_attached_without_them_are_refused(llm):
    for given in ({"consumers": "logging"}, {"capture_consumers": [LoggingConsumer()]}):
        with pytest.raises(ValueError, match="'logging' was given for an engine that is attached"):
            attach(llm.llm_engine, **given)
    llm.register_consumer("logging")
    assert attach(llm.llm_engine, consumers=["logging"]) is llm


def test_an_engine_whose_llm_was_let_go_is_attached_to_once(tiny_model):
    llm = LLM(tiny_model, **TINY_ENGINE)
    engine, logging = llm.llm_engine, llm.register_consumer(LoggingConsumer())
    del llm
    gc.collect()
    handle = attach(engine, consumers=["logging"])
    assert attach(engine) is handle
    (prompt,) = prompts_of([7])
    engine.add_request("mine", prompt, greedy(4, capture=CAPTURE))
    assert stepped(engine)["mine"].activations["post_block"][1].tensor.shape[0] == 10
    assert logging.is_attached_to(handle) and set(handle.consumers) == {"logging", "memory"}
    handle.steering.set({"post_block": {1: [0.5] * HIDDEN}})
    assert handle.steering.status()["global"].keys() == {"vectors"}


class Refusing(Consumer):
    """Cannot begin."""

    consumer_id = "refusing"

    def flows(self):
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0, site="post_block")])]

    def start(self, ctx):
        raise ValueError("not here")


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("made", ["LLM", "AsyncLLM"])
def test_of_an_engine_whose_consumer_cannot_begin_no_process_is_left(tiny_model, monkeypatch, made):
    """Also while somebody looks at the error, which keeps all that was made."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    before = set(multiprocessing.active_children())

    async def create():
        await AsyncLLM.create(tiny_model, consumers=[Refusing()], **TINY_ENGINE)

    with pytest.raises(ValueError, match="'refusing' cannot begin: not here") as told:
        if made == "LLM":
            LLM(tiny_model, consumers=[Refusing()], **TINY_ENGINE)
        else:
            asyncio.run(create())
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.join(60)  # it has been told to end
    assert told.traceback and not any(process.is_alive() for process in left)


ASKED = {"consumers": ["logging"], "hook_points": "post_block", "max_capture_mib": 16}
"""By the arguments of a constructor; the rest by `OF_CONFIG`."""
OF_CONFIG = {"tllm": {"max_capture_mib": 8, "max_steering_configs": 3}}


def test_what_an_engine_is_made_from_may_be_vllms_and_brings_our_arguments(tiny_model):
    """Options in `additional_config` were dropped by `LLM`, in silence; `from_engine_args` took no
    consumers."""
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    args = EngineArgs(tiny_model, **options, additional_config=OF_CONFIG)
    llm = LLM.from_engine_args(args, **ASKED)
    assert type(llm) is LLM
    found = EngineOptions.of(llm.llm_engine.vllm_config)
    assert (found.hook_points, found.max_capture_mib) == (("post_block",), 16)
    assert found.max_steering_configs == 3 and found.max_conversations == 4096
    (output,) = generate(llm, prompts_of([7]), greedy(2, capture=CAPTURE))
    assert llm.consumers.keys() == {"logging", "memory"}
    assert output.activations["post_block"][1].tensor.shape == (8, HIDDEN)
    with pytest.raises(ValueError, match="post_attn"):
        elsewhere = {"memory": {"hooks": {"post_attn": [1]}, "positions": "all"}}
        generate(llm, prompts_of([7]), greedy(2, capture=elsewhere))


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("made", ["from_engine_args", "from_vllm_config"])
def test_an_async_engine_is_made_from_what_is_vllms_with_our_arguments(tiny_model, made):
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    args = AsyncEngineArgs(tiny_model, **options, additional_config=OF_CONFIG)

    async def use():
        given = args if made == "from_engine_args" else args.create_engine_config()
        with pytest.raises(TypeError, match=r"'consumer' is no argument .*mean consumers"):
            getattr(AsyncLLM, made)(given, consumer="logging")
        engine = getattr(AsyncLLM, made)(given, **ASKED)
        try:
            assert type(engine) is AsyncLLM
            found = EngineOptions.of(engine.vllm_config)
            assert (found.hook_points, found.max_capture_mib) == (("post_block",), 16)
            assert found.max_steering_configs == 3
            (prompt,) = prompts_of([7])
            async for _ in engine.generate(prompt, greedy(2, capture=CAPTURE), "mine"):
                pass
            assert engine.consumers.keys() == {"logging", "memory"}
            assert await engine.read_stats("logging")
        finally:
            engine.shutdown()

    asyncio.run(use())


def test_an_engine_with_other_workers_is_refused(llm):
    class Engine:
        vllm_config = type("C", (), {"parallel_config": type("P", (), {"worker_cls": "x.Y"})})

        def add_request(self):
            """Vllm's own."""

    with pytest.raises(ValueError, match=r"start it with worker_cls='tllm.engine"):
        attach(Engine())
