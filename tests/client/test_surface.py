"""Every public method of `vllm.LLM` and `AsyncLLM`, compared with plain vLLM.

`doc/reference/vllm-surface.md` is the table of what was compared. To write it anew:

    TLLM_WRITE_SURFACE=1 python -m pytest -q tests/client/test_surface.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from inspect import isawaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from client.surface import KINDS, Answer, Method, answer_of, each, plainly, public, refused, rows
from client.tiny_models import DEMO_MODEL, save_classifier, save_cross_encoder
from engine.modes import Steering
from tiny_engines import TINY_ENGINE
from transformers import BertForSequenceClassification
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams as TheirBeams
from vllm.v1.engine.async_llm import AsyncLLM as TheirAsyncLLM

from tllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    PoolingParams,
    SamplingParams,
    clear_consumers,
    register_consumer,
)
from tllm.client.results import check_steered
from tllm.engine.handlers import CheckedEngine
from tllm.engine.refusals import RefusedError

DOCUMENT = Path(__file__).parents[2] / "doc" / "reference" / "vllm-surface.md"
OPTIONS = TINY_ENGINE | {"skip_tokenizer_init": False, "max_model_len": 128}
del OPTIONS["hook_points"]
TEXTS = ["hello there", "a b c", "one two three four"]
CHAT = [{"role": "user", "content": "hello there"}]
VECTOR = {"post_block": {1: torch.linspace(-3, 3, 128)}}
TOO_LARGE = {"post_block": dict.fromkeys((1, 2), [1.5e18, 0.0] * 64)}
"""Each of these vectors is allowed, and what they make of a row together is not finite."""
CAPTURE = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}
POOLING = KINDS[1:]
GREEDY = {"temperature": 0, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
BEAMS = {"beam_width": 2, "max_tokens": 5, "ignore_eos": True}
plain = vllm.SamplingParams(**GREEDY)


# -- what is called ------------------------------------------------------------------------------


def queued(llm: Any) -> Any:
    """Requests that are queued, and then waited for."""
    names = llm.enqueue(TEXTS, plain, use_tqdm=False)
    return [len(names), llm.wait_for_completion(use_tqdm=False)]


def queued_chat(llm: Any) -> Any:
    names = llm.enqueue_chat([CHAT, CHAT], plain, use_tqdm=False)
    return [len(names), llm.wait_for_completion(use_tqdm=False)]


def encoded(llm: Any) -> Any:
    tasks = ("embed", "token_embed", "classify", "token_classify", None)
    return [answer_of(partial(encoded_as, task), llm) for task in tasks]


def encoded_as(task: str | None, llm: Any) -> Any:
    return llm.encode(TEXTS, pooling_task=task, use_tqdm=False)


def beams(llm: Any) -> Any:
    outputs = llm.beam_search(TEXTS, TheirBeams(**BEAMS))
    return [
        [(beam.tokens, beam.cum_logprob, beam.text) for beam in output.sequences]
        for output in outputs
    ]


def rank_of(worker: Any) -> int:
    return worker.rank


def versioned(llm: Any) -> Any:
    llm.update_weight_version("later")
    return llm.get_weight_version()


def slept(llm: Any, level: int) -> Any:
    """An engine that has slept answers as before."""
    said = [llm.sleep(level=level), llm.wake_up()]
    return [said, answer_of(use_of(llm), llm).value]


def use_of(llm: Any) -> Any:
    """What a model is for."""
    if llm.runner_type == "generate":
        return lambda llm: llm.generate(TEXTS, plain, use_tqdm=False)
    task = llm.pooling_task
    return lambda llm: llm.encode(TEXTS, pooling_task=task, use_tqdm=False)


def checksum(model: torch.nn.Module) -> tuple[int, float]:
    parameters = list(model.parameters())
    return len(parameters), float(sum(each.double().sum() for each in parameters))


def metrics_of(llm: Any) -> Any:
    return sorted({metric.name for metric in llm.get_metrics()})


# -- with interventions --------------------------------------------------------------------------


def steered_alike(ask: Any, params: Any, llm: Any) -> None:
    """By request and globally it is steered alike, and otherwise than not at all; a plain request
    after it is as before."""
    before = plainly(ask(llm, params()))
    by_request = plainly(ask(llm, params(steering_vectors=VECTOR)))
    assert by_request != before
    assert plainly(ask(llm, params())) == before
    llm.steering.set(VECTOR)
    try:
        assert plainly(ask(llm, params())) == by_request
    finally:
        llm.steering.clear()


def captured(ask: Any, params: Any, llm: Any) -> None:
    """Each output has the rows of all its tokens, and is what it is without."""
    outputs = ask(llm, params(capture=CAPTURE))
    assert plainly(outputs) == plainly(ask(llm, params()))
    for output in outputs:
        rows = output.activations["post_block"][1]
        generated = len(output.outputs[0].token_ids) - 1 if is_text(output) else 0
        assert rows.tensor.shape == (len(output.prompt_token_ids) + generated, 128)
        assert output.capture_results["memory"].status == "ok"


def is_text(output: Any) -> bool:
    return isinstance(output, vllm.RequestOutput)


def steered(kind: str, ask: Any, params: Any) -> list[Any]:
    check = partial(steered_alike, ask, params)
    return [("steered by request and globally", kind, check)]


def both(kind: str, ask: Any, params: Any) -> list[Any]:
    return [*steered(kind, ask, params), ("captured", kind, partial(captured, ask, params))]


sampling = partial(SamplingParams, **GREEDY)


def score_refuses(llm: Any) -> None:
    with pytest.raises(ValueError, match="a score of this model is made of two requests"):
        llm.score("a", "b", pooling_params=PoolingParams(capture=CAPTURE), use_tqdm=False)


def beams_as_greedy(llm: Any) -> None:
    """One beam is greedy search: in each phase it is steered as `generate` is."""
    where = [
        {"steering_vectors": VECTOR},
        {"prefill_steering_vectors": VECTOR},
        {"decode_steering_vectors": VECTOR},
        {"steering_vectors": VECTOR, "steering_positions": "last_prompt"},
        {"steering_vectors": VECTOR, "steering_positions": {"ranges": [[4, 9]]}},
    ]
    options, seen = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}, []
    for asked in where:
        outputs = llm.generate(TEXTS, SamplingParams(**options, **asked), use_tqdm=False)
        expected = [list(output.outputs[0].token_ids) for output in outputs]
        found = llm.beam_search(TEXTS, BeamSearchParams(beam_width=1, **options, **asked))
        assert [output.sequences[0].tokens[-12:] for output in found] == expected
        seen.append(expected)
    assert len({str(each) for each in seen}) == len(where)
    llm.steering.set(decode_vectors=VECTOR)
    try:
        found = llm.beam_search(TEXTS, TheirBeams(beam_width=1, **options))
        assert [output.sequences[0].tokens[-12:] for output in found] == seen[2]
    finally:
        llm.steering.clear()
    beams_with_a_consumer(llm)


def beams_with_a_consumer(llm: Any) -> None:
    """One that acts, and has no result that would be left out."""
    plain = BeamSearchParams(**BEAMS)
    [untouched] = llm.beam_search(TEXTS[:1], plain)
    llm.register_consumer(Steering())
    try:
        named = BeamSearchParams(**BEAMS, consumers={"steering": {}})
        [steered] = llm.beam_search(TEXTS[:1], named)
    finally:
        llm.unregister_consumer("steering")
    assert steered.sequences[0].tokens != untouched.sequences[0].tokens


def beams_refuse(llm: Any) -> None:
    with pytest.raises(ValueError, match="a beam is computed by many requests; ask for it with"):
        llm.beam_search(TEXTS, BeamSearchParams(**BEAMS, capture=CAPTURE))
    with pytest.raises(TypeError, match=r"given SamplingParams; give tllm\.BeamSearchParams"):
        llm.beam_search(TEXTS, SamplingParams())
    [(point, layers)] = VECTOR.items()
    [(layer, vector)] = layers.items()
    probe = {"hook": "embed", "vector": vector}
    entry = {"vector": vector, "when": {"probe": probe, "above": 0.5, "scope": "rest"}}
    asked = {"steering_vectors": {point: {layer: entry}}}
    for most in (5, 1):  # before anything is computed
        with pytest.raises(ValueError, match="a beam, which is computed by many requests"):
            llm.beam_search(TEXTS, BeamSearchParams(**BEAMS | {"max_tokens": most}, **asked))
    llm.register_consumer("esamp")
    try:
        with pytest.raises(
            ValueError, match=r"consumers\['esamp'\] was asked, but it guides which"
        ):
            llm.beam_search(TEXTS, BeamSearchParams(**BEAMS, consumers={"esamp": {}}))
        left_out = BeamSearchParams(**BEAMS, consumers={"esamp": {"enabled": False}})
        assert llm.beam_search(TEXTS, left_out)[0].sequences
    finally:
        llm.unregister_consumer("esamp")
    expected = answer_of(queued, llm)
    llm.enqueue(TEXTS, plain, use_tqdm=False)
    with pytest.raises(ValueError, match="unfinished, and their outputs would be lost in beam_se"):
        llm.beam_search(TEXTS, TheirBeams(**BEAMS))
    assert answer_of(lambda _: [len(TEXTS), llm.wait_for_completion(use_tqdm=False)], llm) == (
        expected
    )


def survives(call: Any, llm: Any) -> None:
    """What is global steers as before."""
    before = answer_of(use_of(llm), llm)
    llm.steering.set(VECTOR)
    try:
        steered = answer_of(use_of(llm), llm)
        call(llm)
        assert answer_of(use_of(llm), llm) == steered != before
    finally:
        llm.steering.clear()
    assert answer_of(use_of(llm), llm) == before


def kept(call: Any) -> list[Any]:
    return [("what is global stays", "generator", partial(survives, call))]


def generated(llm: Any, params: Any) -> Any:
    return llm.generate(TEXTS, params, use_tqdm=False)


def chatted(llm: Any, params: Any) -> Any:
    return llm.chat(CHAT, params, use_tqdm=False)


def waited(llm: Any, params: Any) -> Any:
    llm.enqueue(TEXTS, params, use_tqdm=False)
    return llm.wait_for_completion(use_tqdm=False)


def waited_chat(llm: Any, params: Any) -> Any:
    llm.enqueue_chat([CHAT], params, use_tqdm=False)
    return llm.wait_for_completion(use_tqdm=False)


def pooled(task: str) -> Any:
    return lambda llm, params: llm.encode(TEXTS, params, pooling_task=task, use_tqdm=False)


def embedded(llm: Any, params: Any) -> Any:
    return llm.embed(TEXTS, pooling_params=params, use_tqdm=False)


def classified(llm: Any, params: Any) -> Any:
    return llm.classify(TEXTS, pooling_params=params, use_tqdm=False)


def scored(llm: Any, params: Any) -> Any:
    return llm.score(TEXTS[0], TEXTS[1:], pooling_params=params, use_tqdm=False)


LORA = LoRARequest("lora", 1, "/nowhere")
INFO = {"init_info": {}, "update_info": {}}

OFFLINE: dict[str, Method] = {
    "apply_model": Method(each(KINDS, lambda llm: llm.apply_model(checksum))),
    "beam_search": Method(
        {"generator": beams},
        [
            ("steered, by `tllm.BeamSearchParams` and globally", "generator", beams_as_greedy),
            ("captures are refused", "generator", beams_refuse),
        ],
    ),
    "chat": Method(
        each(KINDS, lambda llm: llm.chat(CHAT, plain, use_tqdm=False)),
        both("generator", chatted, sampling),
    ),
    "classify": Method(
        each(KINDS, lambda llm: llm.classify(TEXTS, use_tqdm=False)),
        [
            *both("classifier", classified, PoolingParams),
            *both("cross-encoder", classified, PoolingParams),
        ],
    ),
    "collective_rpc": Method(each(KINDS, lambda llm: llm.collective_rpc(rank_of))),
    "embed": Method(
        each(KINDS, lambda llm: llm.embed(TEXTS, use_tqdm=False)),
        both("embedder", embedded, PoolingParams),
    ),
    "encode": Method(
        each(KINDS, encoded),
        [
            *both("embedder", pooled("embed"), PoolingParams),
            *both("classifier", pooled("classify"), PoolingParams),
            *both("cross-encoder", pooled("classify"), PoolingParams),
        ],
    ),
    "enqueue": Method(each(KINDS, queued), both("generator", waited, sampling)),
    "enqueue_chat": Method(each(KINDS, queued_chat), both("generator", waited_chat, sampling)),
    "finish_weight_update": Method(each(KINDS, lambda llm: llm.finish_weight_update())),
    "from_engine_args": Method(each(KINDS, lambda llm: llm.model_config.model)),
    "generate": Method(
        each(KINDS, lambda llm: llm.generate(TEXTS, plain, use_tqdm=False)),
        both("generator", generated, sampling),
    ),
    "get_default_sampling_params": Method(
        each(KINDS, lambda llm: str(llm.get_default_sampling_params()))
    ),
    "get_metrics": Method(each(KINDS, metrics_of)),
    "get_tokenizer": Method(each(KINDS, lambda llm: llm.get_tokenizer().encode(TEXTS[0]))),
    "get_weight_version": Method(each(KINDS, lambda llm: llm.get_weight_version())),
    "get_world_size": Method(each(KINDS, lambda llm: llm.get_world_size())),
    "init_weight_transfer_engine": Method(
        each(KINDS, lambda llm: llm.init_weight_transfer_engine(INFO))
    ),
    "release_kv_cache_memory": Method(each(KINDS, lambda llm: llm.release_kv_cache_memory())),
    "reset_mm_cache": Method(each(KINDS, lambda llm: llm.reset_mm_cache())),
    "reset_prefix_cache": Method(
        each(KINDS, lambda llm: llm.reset_prefix_cache()),
        kept(lambda llm: llm.reset_prefix_cache()),
    ),
    "score": Method(
        each(KINDS, lambda llm: llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)),
        [
            *steered("embedder", scored, PoolingParams),
            *both("cross-encoder", scored, PoolingParams),
            ("captures are refused where a score is of two requests", "embedder", score_refuses),
        ],
    ),
    "shutdown_weight_transfer_engine": Method(
        each(KINDS, lambda llm: llm.shutdown_weight_transfer_engine())
    ),
    "sleep": Method(each(KINDS, lambda llm: slept(llm, 1)), kept(lambda llm: slept(llm, 1))),
    "start_draft_weight_update": Method(each(KINDS, lambda llm: llm.start_draft_weight_update())),
    "start_profile": Method(each(KINDS, lambda llm: llm.start_profile())),
    "start_weight_update": Method(each(KINDS, lambda llm: llm.start_weight_update())),
    "stop_profile": Method(each(KINDS, lambda llm: llm.stop_profile())),
    "update_weight_version": Method(each(KINDS, versioned)),
    "update_weights": Method(each(KINDS, lambda llm: llm.update_weights(INFO))),
    "wait_for_completion": Method(
        each(KINDS, lambda llm: llm.wait_for_completion(use_tqdm=False)),
        both("generator", waited, sampling),
    ),
    "wake_up": Method(each(KINDS, lambda llm: slept(llm, 0)), kept(lambda llm: slept(llm, 0))),
}


# -- AsyncLLM ------------------------------------------------------------------------------------


async def last(outputs: Any) -> Any:
    """The last output of a stream."""
    return [output async for output in outputs][-1]


async def streamed(engine: Any, params: Any = plain, name: str = "streamed") -> Any:
    return await last(engine.generate(TEXTS[0], params, name))


async def queued_one(engine: Any, params: Any = plain) -> Any:
    queue = await engine.add_request("queued", TEXTS[0], params)
    while not (output := await queue.get()).finished:
        pass
    return output


async def aborted(engine: Any, params: Any = None) -> Any:
    long = params or vllm.SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    async for output in engine.generate(TEXTS[0], long, "aborted"):
        if len(output.outputs[0].token_ids) < 100:
            await engine.abort("aborted")
    return [output.finished, output.outputs[0].finish_reason]


async def paused(engine: Any) -> Any:
    said = [await engine.pause_generation(mode="keep"), await engine.is_paused()]
    said += [await engine.resume_generation(), await engine.is_paused()]
    return [said, plainly(await streamed(engine))]


async def slept_async(engine: Any, level: int) -> Any:
    said = [await engine.sleep(level), await engine.is_sleeping(), await engine.wake_up()]
    return [said, await engine.is_sleeping(), plainly(await streamed(engine))]


async def versioned_async(engine: Any) -> Any:
    await engine.update_weight_version("later")
    return await engine.get_weight_version()


TASKS = {"generator": "embed", "embedder": "embed"}
"""What a kind of model is asked for; the others classify."""


def pooling_of(kind: str, params: Any = PoolingParams) -> Any:
    """Parameters for what a kind of model is for."""
    return partial(params, task=TASKS.get(kind, "classify"))


async def encoded_async(engine: Any, params: Any) -> Any:
    return [await last(engine.encode(text, params, f"encoded-{text}")) for text in TEXTS]


async def encoded_as_kind(kind: str, engine: Any) -> Any:
    return await encoded_async(engine, pooling_of(kind, vllm.PoolingParams)())


async def async_steered_alike(ask: Any, params: Any, engine: Any) -> None:
    before = plainly(await ask(engine, params()))
    by_request = plainly(await ask(engine, params(steering_vectors=VECTOR)))
    assert by_request != before
    await engine.steering.set(VECTOR)
    try:
        assert plainly(await ask(engine, params())) == by_request
    finally:
        await engine.steering.clear()
    assert plainly(await ask(engine, params())) == before
    with pytest.raises(ValueError, match="has no layer 99"):
        await ask(engine, params(steering_vectors={"post_block": {99: torch.ones(128)}}))


async def async_captured(ask: Any, params: Any, engine: Any) -> None:
    outputs = await ask(engine, params(capture=CAPTURE))
    for output in outputs if isinstance(outputs, list) else [outputs]:
        generated = len(output.outputs[0].token_ids) - 1 if is_text(output) else 0
        rows = output.activations["post_block"][1].tensor
        assert rows.shape == (len(output.prompt_token_ids) + generated, 128)


async def freed(engine: Any) -> None:
    asked = SamplingParams(max_tokens=100, ignore_eos=True, capture=CAPTURE)
    assert (await aborted(engine, asked))[1] == "abort"
    for _ in range(100):
        (stats,) = await engine.intervention_stats()
        if not stats["running_sequences"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(stats)


async def refused_broken(engine: Any) -> None:
    """As an API server has its engine."""
    checked = CheckedEngine(engine, check_steered)
    for name, vectors in (("broken", TOO_LARGE), ("whole", None)):
        outputs = checked.encode(TEXTS[0], PoolingParams(steering_vectors=vectors), name)
        try:
            found = [output async for output in outputs]
        except RefusedError as error:
            assert name == "broken" and "is not finite any more" in str(error)
        else:
            assert name == "whole" and len(found) == 1


def both_async(kind: str, ask: Any, params: Any) -> list[Any]:
    return [
        ("steered by request and globally", kind, partial(async_steered_alike, ask, params)),
        ("captured", kind, partial(async_captured, ask, params)),
    ]


REQUEST = SimpleNamespace(init_info={}, update_info={})


def asked(call: Any) -> dict[str, Any]:
    return {"generator": call}


# In the order of the calls: what may leave an engine otherwise than it was comes last.
ONLINE: dict[str, Method] = {
    "from_engine_args": Method(each(KINDS, lambda e: e.model_config.model)),
    "from_vllm_config": Method(asked(lambda e: e.model_config.model)),
    "generate": Method(asked(streamed), both_async("generator", streamed, sampling)),
    "add_request": Method(asked(queued_one), both_async("generator", queued_one, sampling)),
    "encode": Method(
        {kind: partial(encoded_as_kind, kind) for kind in KINDS},
        [
            *(c for kind in POOLING for c in both_async(kind, encoded_async, pooling_of(kind))),
            ("an error over HTTP where it could not be steered", "embedder", refused_broken),
        ],
    ),
    "abort": Method(asked(aborted), [("its rows and slots are free", "generator", freed)]),
    "check_admission": Method(asked(lambda e: e.check_admission())),
    "check_health": Method(asked(lambda e: e.check_health())),
    "collective_rpc": Method(asked(lambda e: e.collective_rpc("check_health"))),
    "compute_weight_checksums": Method(asked(lambda e: e.compute_weight_checksums())),
    "dead_error": Method(asked(lambda e: str(e.dead_error))),
    "do_log_stats": Method(asked(lambda e: e.do_log_stats())),
    "errored": Method(asked(lambda e: e.errored)),
    "get_kv_event_sources": Method(asked(lambda e: e.get_kv_event_sources())),
    "get_num_queued_tokens": Method(asked(lambda e: e.get_num_queued_tokens())),
    "get_num_unfinished_requests": Method(asked(lambda e: e.get_num_unfinished_requests())),
    "get_status": Method(asked(lambda e: e.get_status())),
    "get_supported_tasks": Method(asked(lambda e: e.get_supported_tasks())),
    "get_tokenizer": Method(asked(lambda e: e.get_tokenizer().encode(TEXTS[0]))),
    "get_weight_version": Method(asked(lambda e: e.get_weight_version())),
    "is_paused": Method(asked(lambda e: e.is_paused())),
    "is_running": Method(asked(lambda e: e.is_running)),
    "is_sleeping": Method(asked(lambda e: e.is_sleeping())),
    "is_stopped": Method(asked(lambda e: e.is_stopped)),
    "is_tracing_enabled": Method(asked(lambda e: e.is_tracing_enabled())),
    "list_loras": Method(asked(lambda e: e.list_loras())),
    "add_lora": Method(asked(lambda e: e.add_lora(LORA))),
    "remove_lora": Method(asked(lambda e: e.remove_lora(1))),
    "pin_lora": Method(asked(lambda e: e.pin_lora(1))),
    "pause_generation": Method(asked(paused)),
    "resume_generation": Method(asked(paused)),
    "reset_encoder_cache": Method(asked(lambda e: e.reset_encoder_cache())),
    "reset_mm_cache": Method(asked(lambda e: e.reset_mm_cache())),
    "reset_prefix_cache": Method(asked(lambda e: e.reset_prefix_cache())),
    "scale_elastic_ep": Method(asked(lambda e: e.scale_elastic_ep(1))),
    "get_external_elastic_ep_status": Method(asked(lambda e: e.get_external_elastic_ep_status())),
    "should_keep_api_server_alive": Method(asked(lambda e: e.should_keep_api_server_alive)),
    "sleep": Method(asked(lambda e: slept_async(e, 1))),
    "wake_up": Method(asked(lambda e: slept_async(e, 0))),
    "start_profile": Method(asked(lambda e: e.start_profile())),
    "stop_profile": Method(asked(lambda e: e.stop_profile())),
    "tokenizer": Method(asked(lambda e: e.tokenizer.encode(TEXTS[0]))),
    "wait_for_requests_to_drain": Method(asked(lambda e: e.wait_for_requests_to_drain(1))),
    "init_weight_transfer_engine": Method(asked(lambda e: e.init_weight_transfer_engine(REQUEST))),
    "start_weight_update": Method(asked(lambda e: e.start_weight_update())),
    "start_draft_weight_update": Method(asked(lambda e: e.start_draft_weight_update())),
    "update_weights": Method(asked(lambda e: e.update_weights(REQUEST))),
    "finish_weight_update": Method(asked(lambda e: e.finish_weight_update())),
    "shutdown_weight_transfer_engine": Method(asked(lambda e: e.shutdown_weight_transfer_engine())),
    "update_weight_version": Method(asked(versioned_async)),
    "handle_fault": Method(
        note="not compared: it ends an engine that was not started with fault tolerance"
    ),
    "release_kv_cache_memory": Method(asked(lambda e: e.release_kv_cache_memory())),
    "notify_kv_transfer_request_rejected": Method(
        asked(lambda e: e.notify_kv_transfer_request_rejected("rejected", {}))
    ),
    "checkpoint_prepare": Method(asked(lambda e: e.checkpoint_prepare())),
    "checkpoint_restore": Method(asked(lambda e: e.checkpoint_restore())),
    "shutdown": Method(asked(lambda e: e.shutdown())),
}


async def async_answer_of(call: Any, engine: Any) -> Answer:
    try:
        value = call(engine)
        return Answer(plainly(await asyncio.wait_for(value, 60) if isawaitable(value) else value))
    except Exception as error:
        return refused(error)


# -- engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Engine arguments by kind of model."""
    pooling = OPTIONS | {"runner": "pooling"}
    return {
        "generator": {"model": str(DEMO_MODEL), **OPTIONS},
        "embedder": {"model": str(DEMO_MODEL), "convert": "embed", **pooling},
        "classifier": {"model": str(save_classifier(tmp_path_factory.mktemp("cls"))), **pooling},
        "cross-encoder": {
            "model": str(save_cross_encoder(tmp_path_factory.mktemp("bert"))),
            **pooling,
        },
    }


@pytest.fixture(scope="module")
def pairs(arguments):
    """By kind of model, an engine of vLLM's and one of ours."""
    return {
        kind: [cls.from_engine_args(EngineArgs(**given)) for cls in (vllm.LLM, LLM)]
        for kind, given in arguments.items()
    }


@pytest.fixture(scope="module")
def offline(pairs):
    """What both answered, by method and kind of model."""
    found = {}
    for name, method in OFFLINE.items():
        for kind, call in method.calls.items():
            found[name, kind] = tuple(answer_of(call, llm) for llm in pairs[kind])
    return found


def test_the_table_has_every_method_of_llm():
    assert public(vllm.LLM) - OFFLINE.keys() == set()


@pytest.mark.parametrize("name", sorted(OFFLINE))
def test_llm_answers_as_vllms(offline, name):
    if not hasattr(vllm.LLM, name):
        pytest.skip(f"this vLLM has no LLM.{name}")
    for kind in OFFLINE[name].calls:
        theirs, ours = offline[name, kind]
        assert ours == theirs, kind


def checks_of(methods: dict[str, Method]) -> list[Any]:
    return [
        pytest.param(kind, check, id=f"{name}-{kind}-{says.split()[0]}")
        for name, method in methods.items()
        for says, kind, check in method.checks
    ]


@pytest.mark.parametrize(("kind", "check"), checks_of(OFFLINE))
def test_llm_with_interventions(pairs, kind, check):
    check(pairs[kind][1])


def test_rows_of_a_cross_encoder_are_those_of_transformers(pairs, arguments):
    """At each hook point of each layer: BERT adds a branch to the stream before the norm."""
    name = arguments["cross-encoder"]["model"]
    model = BertForSequenceClassification.from_pretrained(name, dtype=torch.float32).eval()
    found = {}

    def keep(point, layer, *, at_input=False):
        def hook(module, args, kwargs, output):
            seen = (args or tuple(kwargs.values())) if at_input else output
            found[point, layer] = (seen[0] if isinstance(seen, tuple) else seen).detach()[0].clone()

        return hook

    model.bert.embeddings.register_forward_hook(keep("embed", None), with_kwargs=True)
    for i, block in enumerate(model.bert.encoder.layer):
        for point, module, at_input in (
            ("pre_attn", block, True),
            ("attn_in", block.attention, True),
            ("attn_out", block.attention.output.dense, False),
            ("post_attn", block.attention, False),
            ("mlp_in", block.intermediate, True),
            ("mlp_out", block.output.dense, False),
            ("post_block", block, False),
        ):
            hook = keep(point, i, at_input=at_input)
            module.register_forward_hook(hook, with_kwargs=True)
    llm = pairs["cross-encoder"][1]
    points = llm.steering.layers()["hook_points"]
    asked = {"memory": {"hooks": dict.fromkeys(points, "all"), "positions": "all"}}
    (output,) = llm.score(*TEXTS[:2], pooling_params=PoolingParams(capture=asked), use_tqdm=False)
    inputs = llm.get_tokenizer()(*TEXTS[:2], return_tensors="pt")
    with torch.no_grad():
        score = model(**inputs).logits.sigmoid().item()
    assert abs(score - output.outputs.score) < 1e-5
    assert len(points) == 8 and len(found) == 1 + 7 * 3
    for (point, layer), expected in found.items():
        rows = output.activations[point][layer].tensor
        assert torch.allclose(rows, expected, atol=1e-4), (point, layer)


def test_an_embedding_of_gated_rows_is_that_of_rows_steered_by_hand(pairs):
    """At the positions whose scores are above the threshold; and its signals are there."""
    llm = pairs["embedder"][1]
    vector, probe = 5 * torch.randn(2, 128, generator=torch.Generator().manual_seed(3))

    def embedding(**asked: Any) -> Any:
        return llm.embed(TEXTS[2], pooling_params=PoolingParams(**asked), use_tqdm=False)[0]

    scores = embedding(capture=CAPTURE).activations["post_block"][1].tensor @ probe
    edge = float(scores.sort().values[len(scores) // 2 :][:2].mean())
    above = (scores > edge).nonzero()[:, 0].tolist()
    assert 0 < len(above) < len(scores)
    looks = {"hook": "post_block", "layer": 1, "vector": probe}
    entry = {"vector": vector, "when": {"probe": looks, "above": edge, "name": "gate"}}
    gated = embedding(steering_vectors={"post_block": {2: entry}})
    by_hand = {"vector": vector, "positions": above}
    expected = embedding(steering_vectors={"post_block": {2: by_hand}})
    always = embedding(steering_vectors={"post_block": {2: vector}})
    found, wanted, other, plain = (
        torch.tensor(each.outputs.embedding) for each in (gated, expected, always, embedding())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3 and (found - other).abs().max() > 1e-3
    assert gated.signals["gate"].fired.tolist() == above
    assert torch.allclose(torch.tensor(gated.signals["gate"].scores), scores, rtol=1e-4, atol=1e-3)


def test_a_score_of_rows_that_are_not_finite_any_more_is_refused(pairs):
    """It is made of two requests, and has no place for the results of either."""
    llm = pairs["embedder"][1]
    params = PoolingParams(steering_vectors=TOO_LARGE)
    with pytest.raises(ValueError, match="is not finite any more at the end of the network"):
        llm.score(TEXTS[0], TEXTS[1:], pooling_params=params, use_tqdm=False)
    assert len(llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)) == 2


def test_beams_whose_rows_are_not_finite_any_more_are_refused(pairs):
    """As requests end with an error; a beam is none that could say so."""
    llm = pairs["generator"][1]
    large = {"post_block": dict.fromkeys((1, 2, 3), [1.5e18, 0.0] * 64)}
    with pytest.raises(ValueError, match="is not finite any more at the end of the network"):
        llm.beam_search(TEXTS, BeamSearchParams(**BEAMS, steering_vectors=large))
    assert len(llm.beam_search(TEXTS, BeamSearchParams(**BEAMS))) == len(TEXTS)


def test_an_embedding_of_rows_that_are_not_finite_any_more_says_so(pairs):
    llm = pairs["embedder"][1]
    params = [PoolingParams(steering_vectors=TOO_LARGE), PoolingParams()]
    broken, plain = llm.embed(TEXTS[:2], pooling_params=params, use_tqdm=False)
    result = broken.consumer_results["steering"]
    assert result.status == "error" and "is not finite any more" in result.error
    assert plain.consumer_results == {}


@pytest.fixture(scope="module")
def online(arguments, offline, forked_processes):
    """What vLLM's and our asynchronous engine answered, and what its checks raised."""
    found, raised = {}, {}
    given = {kind: AsyncEngineArgs(**arguments[kind]) for kind in KINDS}

    async def ask(kind: str, engine: Any) -> dict[str, Answer]:
        try:
            return {
                name: await async_answer_of(method.calls[kind], engine)
                for name, method in ONLINE.items()
                if kind in method.calls and hasattr(engine, name)
            }
        finally:
            engine.shutdown()

    async def check(kind: str, engine: Any) -> None:
        for name, method in ONLINE.items():
            for says, of, shown in method.checks:
                if of == kind:
                    try:
                        await asyncio.wait_for(shown(engine), 120)
                    except Exception as error:
                        raised[name, kind, says] = error

    async def compare() -> None:
        theirs = await ask("generator", TheirAsyncLLM.from_engine_args(given["generator"]))
        config = given["generator"].create_engine_config()
        engine = AsyncLLM.from_vllm_config(config)
        await check("generator", engine)
        ours = await ask("generator", engine)
        found.update({(name, "generator"): (theirs[name], ours[name]) for name in theirs})
        for kind in POOLING:
            consumer = register_consumer("logging")
            engine = AsyncLLM.from_engine_args(given[kind])
            await check(kind, engine)
            raised["read_stats", kind] = None if await consumer.read_stats() else "no statistics"
            ours = await ask(kind, engine)
            theirs = await ask(kind, TheirAsyncLLM.from_engine_args(given[kind]))
            found.update({(name, kind): (theirs[name], ours[name]) for name in theirs})
            clear_consumers()

    try:
        asyncio.run(compare())
    finally:
        clear_consumers()
    return found, raised


def test_the_table_has_every_method_of_async_llm():
    assert public(TheirAsyncLLM) - ONLINE.keys() == set()


@pytest.mark.parametrize("name", sorted(ONLINE))
def test_async_llm_answers_as_vllms(online, name):
    if not hasattr(TheirAsyncLLM, name):
        pytest.skip(f"this vLLM has no AsyncLLM.{name}")
    for kind in ONLINE[name].calls:
        theirs, ours = online[0][name, kind]
        assert ours == theirs, kind


def test_async_llm_with_interventions(online):
    assert {key: error for key, error in online[1].items() if error is not None} == {}


def test_the_document_is_what_was_compared(offline, online):
    if not vllm.__version__.startswith("0.32."):
        pytest.skip(f"the document is of vLLM 0.32, and this is {vllm.__version__}")
    text = document(offline, online[0])
    if os.environ.get("TLLM_WRITE_SURFACE"):
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text


_HEAD = """# vLLM's own methods

What every public method of `vllm.LLM` and of `AsyncLLM` gives with tLLM. This page is written by
`TLLM_WRITE_SURFACE=1 python -m pytest tests/client/test_surface.py`, which calls each of them on an
engine of vLLM's and on one of ours (tiny models, eager, on a CPU, vLLM 0.32). It fails when vLLM
has a method that is not here, and when this page is not what it found.

*The same*: equal values, to the last digit. *vLLM's refusal*: vLLM raises, and tLLM raises the same
sentence; the method is for another kind of model, or for an engine that was started with what these
were not (adapters, a profiler, weight transfer). The last column says what was shown with
interventions; where it is empty, the method has nothing to do with them.
"""


def document(offline: Mapping[Any, Any], online: Mapping[Any, Any]) -> str:
    theirs = [{key: pair[0] for key, pair in found.items()} for found in (offline, online)]
    return "\n".join(
        [
            _HEAD,
            "## `LLM`",
            "",
            *rows(OFFLINE, theirs[0]),
            "",
            "## `AsyncLLM`",
            "",
            *rows(
                {name: ONLINE[name] for name in ONLINE if hasattr(TheirAsyncLLM, name)}, theirs[1]
            ),
            "",
        ]
    )
