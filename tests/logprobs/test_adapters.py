"""Adapters by name: mixed in one gather, in lanes and completions, and in the cache."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from adapters import merge
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from logprobs.asking import MODEL, OTHER_ENGINE, agrees, gathered, prompts
from logprobs.steering import STEERED, steered_by
from tllm.logprobs import TransformersLM


@pytest.fixture(scope="module")
def references(adapters, reference):
    found = {None: reference}
    for name, path in adapters.items():
        found[name] = TransformersLM.from_name(MODEL)
        merge(Path(path), found[name].underlying_model)
    return found


def test_adapters_are_mixed_in_one_gather(lm, references):
    asked = [(prompt, name) for prompt in prompts(4) for name in (None, "one", "two")]
    found = asyncio.run(
        gathered(lm.next_token_logprobs(prompt, lora_name=name) for prompt, name in asked)
    )
    for (prompt, name), row in zip(asked, found, strict=True):
        assert agrees(row, references[name].next_token_logprobs_sync(prompt), OTHER_ENGINE)
    before = lm.stats()["computed"]
    again = [lm.next_token_logprobs_sync(prompt, lora_name=name) for prompt, name in asked]
    assert lm.stats()["computed"] == before  # remembered, by adapter
    assert torch.equal(torch.stack(again), torch.stack(found))


def test_the_adapter_that_is_set_when_asking_applies(lm, references):
    waiting = []
    for name in ("one", "two"):
        lm.set_lora(lora_name=name)
        waiting.append(lm.next_token_logprobs([31, 32, 33]))
        waiting.append(lm.sample([31, 32, 33], 4, [], temperature=0, lora_name=name))
    lm.clear_lora()
    waiting.append(lm.next_token_logprobs([31, 32, 33]))
    found = asyncio.run(gathered(waiting))
    for name, row in ((("one"), found[0]), ("two", found[2]), (None, found[4])):
        assert agrees(row, references[name].next_token_logprobs_sync([31, 32, 33]), OTHER_ENGINE)
    for name, tokens in (("one", found[1]), ("two", found[3])):
        expected = references[name].sample([31, 32, 33], 4, [], temperature=0)
        assert tokens == asyncio.run(expected)


def test_lanes_keep_their_adapter(lm, references):
    async def run():
        lanes = [lm.open([40, 41], lora_name=name) for name in ("one", "two", None)]
        await gathered(lane.next() for lane in lanes)
        forks = [lane.fork() for lane in lanes]
        for lane in (*lanes, *forks):
            lane.feed(50)
        found = await gathered(lane.next() for lane in (*lanes, *forks))
        await gathered(lane.close() for lane in (*lanes, *forks))
        return found

    found = asyncio.run(run())
    for name, row in zip(("one", "two", None) * 2, found, strict=True):
        assert agrees(row, references[name].next_token_logprobs_sync([40, 41, 50]), OTHER_ENGINE)


def test_an_adapter_of_the_engines_own_users_is_another(lm, adapters, references):
    """Under the number of one that it has, an engine takes any other for that."""
    prompt, own = [31, 32, 33], LoRARequest("own", 1, adapters["two"])
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    async def completed():
        given = {"prompt_token_ids": prompt}
        async for output in lm.engine.generate(given, params, "own", lora_request=own):
            last = output
        await lm.engine.remove_lora(1)
        return list(last.outputs[0].token_ids)

    found = lm.run(completed())
    one, two = (asyncio.run(references[name].sample(prompt, 8, [], 0)) for name in ("one", "two"))
    assert found == two != one


def test_adapters_and_steering_are_mixed_in_one_gather_and_remembered_apart(lm, references):
    prompt = [60, 61, 62, 63]
    asked = [(name, steered) for name in (None, "one", "two") for steered in ({}, STEERED)]

    def ask(name, steered):
        return lm.next_token_logprobs(prompt, lora_name=name, **steered)

    found = asyncio.run(gathered(ask(*each) for each in asked))
    for (name, steered), row in zip(asked, found, strict=True):
        expected = steered_by if steered else type(references[name]).next_token_logprobs_sync
        assert agrees(row, expected(references[name], prompt), OTHER_ENGINE)
    before = lm.stats()["computed"]
    again = asyncio.run(gathered(ask(*each) for each in reversed(asked)))
    assert lm.stats()["computed"] == before
    assert torch.equal(torch.stack(again[::-1]), torch.stack(found))


def test_an_adapter_may_be_replaced_by_another_under_its_name(lm, adapters, references):
    prompt = [31, 32, 33]
    lm.add_new_lora(adapters["one"], "changing")
    old = lm.next_token_logprobs_sync(prompt, lora_name="changing")
    lm.add_new_lora(adapters["two"], "changing")
    new = lm.next_token_logprobs_sync(prompt, lora_name="changing")  # not the remembered one
    assert agrees(old, references["one"].next_token_logprobs_sync(prompt), OTHER_ENGINE)
    assert agrees(new, references["two"].next_token_logprobs_sync(prompt), OTHER_ENGINE)


def test_an_adapter_is_replaced_more_often_than_there_are_places(
    lm, adapters, references, tmp_path
):
    """As in training, which writes each step's weights over those of the last: in a folder of their
    own, or in the same one."""
    prompt = [31, 32, 33]
    for step in range(4):
        for name in ("one", "two"):
            expected = references[name].next_token_logprobs_sync(prompt)
            shutil.copytree(adapters[name], tmp_path / "policy", dirs_exist_ok=True)
            for path in (adapters[name], tmp_path / "policy"):
                lm.add_new_lora(path, "policy")
                found = lm.next_token_logprobs_sync(prompt, lora_name="policy")
                assert agrees(found, expected, OTHER_ENGINE), (step, name, path)
    assert lm._adapters.named("policy").lora_name == "policy (8)", "what consumers are told"
    with pytest.raises(Exception, match="No adapter found"):
        lm.add_new_lora(tmp_path, "policy")
    assert torch.equal(lm.next_token_logprobs_sync(prompt, lora_name="policy"), found)


def test_an_open_lane_keeps_an_adapter_that_is_replaced(lm, adapters, references):
    lanes, expected = [], references["one"].next_token_logprobs_sync([40, 41])
    try:
        with pytest.raises(ValueError, match="until the lanes that were opened with it are closed"):
            for step in range(8):
                lm.add_new_lora(adapters[("one", "two")[step % 2]], "policy")
                lanes.append(lm.open([40, 41], lora_name="policy"))
        assert 1 < len(lanes) < 8
        assert agrees(lanes[0].next_sync(), expected, OTHER_ENGINE)
    finally:
        for lane in lanes:
            lane.close_sync()
    for step in range(8):
        lm.add_new_lora(adapters[("one", "two")[step % 2]], "policy")


def test_what_cannot_be_loaded_or_set_is_refused(lm, adapters, tmp_path):
    with pytest.raises(ValueError, match="no adapter 'x' was added"):
        lm.set_lora(lora_name="x")
    with pytest.raises(ValueError, match="was added from"):
        lm.set_lora(str(tmp_path), "one")
    lm.add_new_lora(Path(adapters["one"]), "one")  # again
    lm.set_lora(Path(adapters["one"]), "one")
    lm.clear_lora()
    with pytest.raises(Exception, match="No adapter found"):
        lm.add_new_lora(str(tmp_path), "nowhere")
    with pytest.raises(ValueError, match="no adapter 'nowhere' was added"):
        lm.next_token_logprobs_sync([5], lora_name="nowhere")
    if current_platform.is_cpu():
        with pytest.raises(ValueError, match=r"max_loras=6.*max_loras=7 or more"):
            for number in range(6):
                lm.add_new_lora(adapters["two"], f"one more, {number}")
