"""Adapters by name: mixed in one gather, in lanes and completions, and in the cache."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from logprobs.asking import ENGINE, MODEL, OTHER_ENGINE, agrees, gathered, prompts
from tllm.logprobs import AsyncVirtualLM, TransformersLM

HIDDEN, LAYERS, RANK = 128, 6, 4
_NAME = "base_model.model.model.layers.{}.self_attn.o_proj"


def save_adapter(path, seed):
    """A random adapter of the attention's output projections, as PEFT saves one."""
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = _NAME.format(layer)
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) / 4
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def merged(path):
    """The demo model with an adapter in its weights."""
    reference = TransformersLM.from_name(MODEL)
    tensors = load_file(f"{path}/adapter_model.safetensors")
    for layer, block in enumerate(reference._model.model.layers):
        name = _NAME.format(layer)
        delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        block.self_attn.o_proj.weight.data += delta
    return reference


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, seed) for name, seed in (("one", 1), ("two", 2))}


@pytest.fixture(scope="module")
def references(paths):
    plain = {None: TransformersLM.from_name(MODEL)}
    return plain | {name: merged(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def lm(paths):
    options = ENGINE | {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    with AsyncVirtualLM.from_name(MODEL, engine_opts=options, cache_size=100) as lm:
        for name, path in paths.items():
            lm.add_new_lora(path, name)
        yield lm


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


def test_what_cannot_be_loaded_or_set_is_refused(lm, paths, tmp_path):
    with pytest.raises(ValueError, match="no adapter 'x' was added"):
        lm.set_lora(lora_name="x")
    with pytest.raises(ValueError, match="was added from"):
        lm.set_lora(str(tmp_path), "one")
    lm.add_new_lora(paths["one"], "one")  # again
    with pytest.raises(ValueError, match=r"max_loras=3.*max_loras=4 or more"):
        lm.add_new_lora(str(tmp_path), "three")
