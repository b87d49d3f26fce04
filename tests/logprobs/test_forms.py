"""The forms of genlm-backend: its names of arguments, tokens as bytes, the model's own end, an
engine that exists."""

from __future__ import annotations

import asyncio
import pickle
from typing import get_type_hints

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams

from logprobs.asking import ENGINE, MODEL, OTHER_ENGINE, agrees, gathered, greedy, prompts
from tllm import AsyncLLM
from tllm.logprobs import AsyncVirtualLM, Token
from tllm.logprobs.base import _byte_alphabet, token_bytes
from tllm.logprobs.query import LaneOptions
from tllm.params import ASKED_FIELDS

TEXT = "On Monday Ben felt café ☃\n"


@pytest.mark.parametrize("model", ["lm", "reference"])
def test_prompts_may_be_given_by_name(model, reference, request):
    asked = prompts(3, seed=50)
    model = request.getfixturevalue(model)
    expected = reference.batch_next_token_logprobs_sync(asked)
    found = [
        asyncio.run(model.batch_next_token_logprobs(token_ids_list=asked)),
        model.batch_next_token_logprobs_sync(token_ids_list=asked),
        torch.stack([model.next_token_logprobs_sync(token_ids=prompt) for prompt in asked]),
    ]
    single = model.next_token_logprobs(token_ids=asked[0])

    async def wait():
        return await single

    assert all(agrees(rows, expected, OTHER_ENGINE) for rows in found)
    assert agrees(asyncio.run(wait()), expected[0], OTHER_ENGINE)


def test_a_part_of_the_vocabulary_is_not_taken_for_a_prompt(lm):
    with pytest.raises(TypeError, match="token_ids"):
        lm.next_token_logprobs([5], token_ids=[1, 2])
    with pytest.raises(ValueError, match=r"unknown arguments \['tokens'\]"):
        lm.next_token_logprobs([5], tokens=[1, 2])


def test_what_a_query_takes_is_what_sampling_parameters_take():
    refused = {"patch", "stop_when", "abort_when", "conversation"}
    assert {*ASKED_FIELDS, "lora_name"} - refused == set(get_type_hints(LaneOptions))


@pytest.mark.parametrize("model", ["lm", "reference"])
def test_tokens_are_bytes_that_add_up_to_the_text(model, request):
    model = request.getfixturevalue(model)
    vocabulary = model.byte_vocab
    assert [token.token_id for token in vocabulary] == list(range(len(model.tokenizer)))
    encoded = model.tokenizer.encode(TEXT)
    assert b"".join(vocabulary[i] for i in encoded).decode() == TEXT
    end = model.tokenizer.eos_token
    assert vocabulary[model.tokenizer.eos_token_id] == end.encode()
    assert all(model.str_vocab)
    assert model.str_vocab[encoded[0]] == model.tokenizer.decode(encoded[:1])


def test_tokens_are_told_apart_by_their_ids():
    one, other = Token(1, b"a"), Token(2, b"a")
    assert one != other and len({one, other, Token(1, b"a")}) == 2
    assert one == b"a" and one.byte_string == b"a" and type(one.byte_string) is bytes
    again = pickle.loads(pickle.dumps(other))
    assert (again, again.token_id, bytes(again)) == (other, 2, b"a")
    assert repr(one) == "Token(1, b'a')"


def tokenizer_of(model, pre_tokenizer, decoder):
    built = Tokenizer(model)
    built.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        built.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def test_tokens_in_the_way_of_sentencepiece_are_bytes_too():
    """Letters, a sign for the space, and single bytes for all else."""
    pieces = ["<unk>", "▁", *"Ab1,é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizer_of(bpe, pre_tokenizers.Metaspace(), decoders.Metaspace())
    found = token_bytes(tokenizer)
    assert found[1:7] == [b" ", b"A", b"b", b"1", b",", "é".encode()]
    assert found[7 + 0xE2] == b"\xe2"


def test_tokens_behind_ids_that_nobody_has_are_there():
    """As where a vocabulary was padded before tokens were added to it."""
    vocabulary = {character: i for i, character in enumerate(sorted(_byte_alphabet()))}
    bpe = models.BPE(vocabulary | {"AB": 300}, [("A", "B")])
    tokenizer = tokenizer_of(bpe, pre_tokenizers.ByteLevel(add_prefix_space=False), None)
    found = token_bytes(tokenizer)
    assert [found[i] for i in tokenizer.encode("ABb")] == [b"AB", b"b"]
    assert [token.token_id for token in found] == list(range(301))
    assert found[299] == b""


def test_tokens_that_do_not_add_up_are_refused():
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "Ab", "1", ","])}
    tokenizer = tokenizer_of(
        models.WordPiece(vocabulary, unk_token="<unk>"),
        pre_tokenizers.Whitespace(),
        decoders.WordPiece(),
    )
    with pytest.raises(ValueError, match="not pieces of text that add up"):
        token_bytes(tokenizer)


@pytest.mark.parametrize("model", ["lm", "reference"])
def test_results_are_the_callers_to_change_and_to_learn_by(model, request):
    model = request.getfixturevalue(model)
    row, table = (
        model.next_token_logprobs_sync([5]),
        model.batch_next_token_logprobs_sync([[5]] * 2),
    )
    expected = row.clone()
    row.requires_grad_().exp().sum().backward()
    table[0] = 0.0
    assert agrees(table[1], expected)
    torch.testing.assert_close(row.grad, expected.exp())
    assert agrees(model.next_token_logprobs_sync([5]), expected)


def test_completions_end_where_the_model_ends(lm, reference):
    prompt = lm.tokenizer.encode("On Monday Ben felt")
    end = reference.underlying_model.generation_config.eos_token_id
    tokens = asyncio.run(lm.sample(prompt, 120, temperature=0))
    assert tokens == asyncio.run(reference.sample(prompt, 120, temperature=0))
    assert tokens == asyncio.run(lm.sample(prompt, 120, [end], temperature=0))
    assert len(tokens) < 120 and end not in tokens
    longer = asyncio.run(lm.sample(prompt, 120, [], temperature=0))
    assert longer[: len(tokens) + 1] == [*tokens, end] and len(longer) == 120
    some = asyncio.run(lm.batch_sample([prompt] * 2, 5, temperature=0))
    assert some == [tokens[:5]] * 2


async def completion(engine, prompt, request_id):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
        last = output
    return list(last.outputs[0].token_ids)


def test_a_model_in_other_processes_says_where_it_is(lm, reference):
    assert isinstance(reference.underlying_model, torch.nn.Module)
    with pytest.raises(AttributeError, match="lives in the engine's processes"):
        _ = lm.underlying_model


def test_an_engine_that_exists_is_asked_and_left_as_it_was(reference, forked_processes):
    asked = prompts(5, seed=51)
    expected = reference.batch_next_token_logprobs_sync(asked)

    async def ask(engine):
        lm = await AsyncVirtualLM.from_engine(engine, cache_size=4)
        own = await completion(engine, asked[0], "beside")
        rows, other = await gathered(
            [
                lm.batch_next_token_logprobs(asked),
                asyncio.to_thread(lm.batch_next_token_logprobs_sync, asked),
            ]
        )
        assert agrees(rows, expected, OTHER_ENGINE) and agrees(other, expected, OTHER_ENGINE)
        assert await greedy(lm, asked[0], 4) == own
        async with lm.open(asked[0]) as lane:
            await lane.next()
            lane.feed(own[0])
            step = await lane.next()
            assert agrees(step, await lm.next_token_logprobs(lane.tokens))
        assert lm.stats() == await asyncio.to_thread(lm.stats)
        with pytest.raises(RuntimeError, match="would wait for itself"):
            lm.next_token_logprobs_sync([5])
        with pytest.raises(RuntimeError, match=r"asyncio.to_thread\(...\) of what has none"):
            lm.register_consumer("logging")
        with pytest.raises(ValueError, match="another AsyncVirtualLM"):
            await AsyncVirtualLM.from_engine(engine)
        with pytest.raises(ValueError, match="started on another event loop"):
            await asyncio.to_thread(asyncio.run, AsyncVirtualLM.from_engine(engine))
        late = asyncio.ensure_future(lm.sample([7], 200, []))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(lm.cleanup)
        with pytest.raises(RuntimeError, match="cleanup"):
            await lm.next_token_logprobs([5])
        assert len(await late) == 200  # a request of the engine's like any other
        assert await completion(engine, asked[0], "after") == own
        assert "next_token" not in engine.consumers

    async def run():
        engine = await AsyncLLM.create(MODEL, **ENGINE)
        try:
            await ask(engine)
            await ask(engine)
        finally:
            engine.shutdown()

    asyncio.run(run())
