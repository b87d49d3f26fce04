"""Every public method of `vllm.LLM` and `AsyncLLM`, compared with plain vLLM.

`doc/reference/vllm-surface.md` is the table of what was compared. To write it anew:

    TLLM_WRITE_SURFACE=1 python -m pytest -q tests/client/test_surface.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from client.surface import KINDS, Method, answer_of, each, plainly, public
from client.tiny_models import DEMO_MODEL, save_classifier, save_cross_encoder
from tiny_engines import TINY_ENGINE
from vllm.sampling_params import BeamSearchParams as TheirBeams

from tllm import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    PoolingParams,
    SamplingParams,
)

DOCUMENT = Path(__file__).parents[2] / "doc" / "reference" / "vllm-surface.md"
OPTIONS = TINY_ENGINE | {"skip_tokenizer_init": False, "max_model_len": 128}
del OPTIONS["hook_points"]
TEXTS = ["hello there", "a b c", "one two three four"]
CHAT = [{"role": "user", "content": "hello there"}]
VECTOR = {"post_block": {1: torch.linspace(-3, 3, 128)}}
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


def beams_refuse(llm: Any) -> None:
    with pytest.raises(ValueError, match="a beam is computed by many requests; capture its rows"):
        llm.beam_search(TEXTS, BeamSearchParams(**BEAMS, capture=CAPTURE))


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


CHECKS = [
    pytest.param(kind, check, id=f"{name}-{kind}-{says.split()[0]}")
    for name, method in OFFLINE.items()
    for says, kind, check in method.checks
]


@pytest.mark.parametrize(("kind", "check"), CHECKS)
def test_llm_with_interventions(pairs, kind, check):
    check(pairs[kind][1])
