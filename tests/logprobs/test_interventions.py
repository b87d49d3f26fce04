"""Steering and capture inside queries and lanes."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
import torch
import vllm
from fuzz.gates import save_autoencoder
from packaging.version import Version
from safetensors.torch import load_file, save_file
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind

from logprobs.asking import OTHER_ENGINE, VOCAB, agrees, gathered
from logprobs.steering import HIDDEN, LAYER, STEERED, VECTOR, steered_by
from tllm import SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.sae import SaeConsumer
from tllm.engine.refusals import RefusedError
from tllm.ports import Actions, ConsumerFlow, ResidualStream, Stop

PROMPT = [60, 61, 62, 63]


def test_steered_and_plain_questions_share_a_gather_and_a_cache(lm, reference):
    asked = [lm.next_token_logprobs(PROMPT, **STEERED), lm.next_token_logprobs(PROMPT)] * 2
    found = asyncio.run(gathered(asked))
    for row in found[::2]:
        assert agrees(row, steered_by(reference, PROMPT), OTHER_ENGINE)
    for row in found[1::2]:
        assert agrees(row, reference.next_token_logprobs_sync(PROMPT), OTHER_ENGINE)
    before = lm.stats()["computed"]
    again = lm.next_token_logprobs_sync(
        PROMPT, steering_vectors={"post_block": {LAYER: VECTOR * 1}}
    )
    assert torch.equal(again, found[0])
    assert lm.stats()["computed"] == before  # an equal vector is the same question
    half = {"steering_vectors": {"post_block": {LAYER: VECTOR / 2}}}
    other = lm.next_token_logprobs_sync(PROMPT, **half)
    assert agrees(other, steered_by(reference, PROMPT, VECTOR / 2), OTHER_ENGINE)


def test_a_lane_and_its_forks_are_steered_in_every_token(lm, reference):
    async def run():
        steered, plain = lm.open(PROMPT, **STEERED), lm.open(PROMPT)
        await gathered([steered.next(), plain.next()])
        forks = [steered.fork(), steered.fork(), plain.fork()]
        await gathered([steered.close(), plain.close()])
        for token in (70, 71):
            for i, lane in enumerate(forks):
                lane.feed(token + i)
            found = await gathered(lane.next() for lane in forks)
        tokens = [lane.tokens for lane in forks]
        await gathered(lane.close() for lane in forks)
        return found, tokens

    found, tokens = asyncio.run(run())
    for row, given in zip(found[:2], tokens, strict=False):
        assert agrees(row, steered_by(reference, given), OTHER_ENGINE)
    assert agrees(found[2], reference.next_token_logprobs_sync(tokens[2]), OTHER_ENGINE)


def test_global_steering_reaches_questions_that_follow_and_lanes_that_are_open(lm, reference):
    async def run():
        async with lm.open(PROMPT) as lane:
            plain = await lane.next()
            lm.run(lm.engine.steering.set(vectors={"post_block": {LAYER: VECTOR}}))
            try:
                lane.feed(70)
                return plain, await lane.next(), await lm.next_token_logprobs(PROMPT)
            finally:
                lm.run(lm.engine.steering.clear())

    lm.next_token_logprobs_sync(PROMPT)  # remembered
    plain, step, query = asyncio.run(run())
    assert agrees(plain, reference.next_token_logprobs_sync(PROMPT), OTHER_ENGINE)
    assert agrees(step, steered_by(reference, [*PROMPT, 70]), OTHER_ENGINE)
    assert agrees(query, steered_by(reference, PROMPT), OTHER_ENGINE)
    assert agrees(lm.next_token_logprobs_sync(PROMPT), plain)


def test_what_is_not_finite_any_more_is_an_error_and_no_answer(lm, reference):
    """Queries, lanes and completions, steered by themselves and, in bulk, by what is global."""
    alternating = torch.tensor([1.5e18, 0.0] * (HIDDEN // 2))
    large = {"post_block": dict.fromkeys((1, 2, 3), alternating)}
    refused = pytest.raises(ValueError, match="is not finite any more at the end of the network")

    async def step(**asked):
        async with lm.open(PROMPT, **asked) as lane:
            return await lane.next()

    for asking in (
        lambda: lm.next_token_logprobs(PROMPT, steering_vectors=large),
        lambda: step(steering_vectors=large),
        lambda: lm.sample(PROMPT, 4, [], temperature=0, steering_vectors=large),
    ):
        with refused:
            asyncio.run(asking())
    lm.run(lm.engine.steering.set(vectors=large))
    try:
        for asking in (lambda: lm.next_token_logprobs(PROMPT), step):
            with refused:
                asyncio.run(asking())
    finally:
        lm.run(lm.engine.steering.clear())
    assert agrees(
        lm.next_token_logprobs_sync(PROMPT),
        reference.next_token_logprobs_sync(PROMPT),
        OTHER_ENGINE,
    )


ALTERNATING = torch.tensor([1.5e18, 0.0] * (HIDDEN // 2))
BREAKING = {
    "steering_vectors": {"post_block": dict.fromkeys((1, 2, 3), ALTERNATING)},
    "steering_positions": {"token_ids": [700]},
}
"""One token of this id is too much."""


def test_a_lane_whose_later_step_is_not_finite_hears_of_it_again_and_again(lm, reference):
    refused = pytest.raises(ValueError, match="is not finite any more at the end of the network")

    async def run():
        async with lm.open(PROMPT, **BREAKING) as lane:
            await lane.next()
            fork = lane.fork()
            for fed in ([700], [71], [72, 73]):
                lane.feed(*fed)
                with refused:
                    await asyncio.wait_for(lane.next(), 60)
            fork.feed(71)
            found = await asyncio.wait_for(fork.next(), 60)
            await fork.close()
            return found

    expected = reference.next_token_logprobs_sync([*PROMPT, 71])
    assert agrees(asyncio.run(run()), expected, OTHER_ENGINE)


def test_a_streamed_prompt_ends_with_the_input_that_is_not_finite(lm):
    """vLLM 0.32 takes the error for the end of an input, and would drop a token of it with the
    next, in the place of the one that was drawn. 0.33 ends the request itself."""
    params = SamplingParams(
        max_tokens=1, detokenize=False, output_kind=RequestOutputKind.DELTA, **BREAKING
    )
    heard, outputs = [], []

    async def inputs():
        for number, tokens in enumerate((PROMPT, [700], [71])):
            while len(heard) < number:
                await asyncio.sleep(0.01)
            yield StreamingInput({"prompt_token_ids": list(tokens)})

    async def run():
        async for output in lm.engine.generate(inputs(), params, "streamed"):
            heard.append(output.outputs[0].finish_reason)
            outputs.append(output)

    ends = Version(vllm.__version__) >= Version("0.33")
    refused = pytest.raises(RefusedError, match="is not finite any more")
    with nullcontext() if ends else refused:
        lm.run(asyncio.wait_for(run(), 60))
    assert heard == ["length", "error"]
    assert "is not finite any more" in outputs[-1].outputs[0].stop_reason
    if ends:
        assert outputs[-1].finished
        assert outputs[-1].consumer_results["steering"].status == "error"


def test_completions_may_be_steered_in_their_generated_tokens_only(lm):
    decode = {"decode_steering_vectors": {"post_block": {LAYER: 5 * VECTOR}}}
    tokens = asyncio.run(lm.sample(PROMPT, 6, [], temperature=0, **decode))
    plain = asyncio.run(lm.sample(PROMPT, 6, [], temperature=0))
    assert tokens[0] == plain[0]
    assert tokens != plain
    for ask in (lm.next_token_logprobs, lm.open):
        with pytest.raises(ValueError, match=r"decode_steering_vectors.*would do nothing"):
            ask(PROMPT, **decode)


@pytest.mark.parametrize(
    "narrowed",
    [
        {"positions": "all_generated"},
        {"when": {"over": "prompt_last"}},
        {"when": {"over": "prompt_mean", "scope": "conversation"}},
    ],
)
def test_what_steers_generated_tokens_alone_is_refused_where_all_are_given(lm, narrowed):
    probe = {"probe": {"hook": "post_block", "layer": 0, "vector": VECTOR}, "above": 0.0}
    if "when" in narrowed:
        narrowed = {"when": {**probe, **narrowed["when"]}}
    steered = {"steering_vectors": {"post_block": {LAYER: {"vector": VECTOR, **narrowed}}}}
    for ask in (lm.next_token_logprobs, lm.open):
        with pytest.raises(ValueError, match=r"steering_vectors\['post_block'\].*would do nothing"):
            ask(PROMPT, **steered)
    assert asyncio.run(lm.sample(PROMPT, 2, [], temperature=0, **steered))


def test_modules_and_monitors_of_generated_tokens_alone_are_refused_where_all_are_given(lm):
    steering = lm.engine.steering
    probe = {"hook": "post_block", "layer": 0, "vector": VECTOR}
    added = {"post_block": {LAYER: {"vector": VECTOR}}}
    later = {"post_block": {LAYER: {"vector": VECTOR, "when": "judged once"}}}
    once = {"probe": probe, "above": 0.0, "over": "prompt_last"}
    lm.run(steering.register_monitor("judged once", once))
    lm.run(steering.register_module("decoding", {"decode_vectors": added}))
    lm.run(steering.register_module("both", {"decode_vectors": added, "vectors": added}))
    try:
        for asked, what in (
            ({"steering_vectors": later}, r"steering_vectors\['post_block'\]\[2\]"),
            ({"steering_module_ref": "decoding"}, "the module 'decoding'"),
            ({"steering_module_ref": [("both", 1.0), ("decoding", 2.0)]}, "the module 'decoding'"),
        ):
            with pytest.raises(ValueError, match=f"{what} would do nothing"):
                lm.next_token_logprobs_sync(PROMPT, **asked)
            lane = lm.open(PROMPT, **asked)
            with pytest.raises(ValueError, match=f"{what} would do nothing"):
                lane.next_sync()
            lane.close_sync()
            assert asyncio.run(lm.sample(PROMPT, 2, [], temperature=0, **asked))
        steered = lm.next_token_logprobs_sync(PROMPT, steering_module_ref="both")
        assert not torch.equal(steered, lm.next_token_logprobs_sync(PROMPT))
    finally:
        for name in ("decoding", "both"):
            lm.run(steering.unregister_module(name))
        lm.run(steering.unregister_monitor("judged once"))


def autoencoder(folder, bias):
    """One whose features are all active, or none, by their bias."""
    path = save_autoencoder(folder) / "sae_weights.safetensors"
    weights = load_file(path)
    save_file({**weights, "b_enc": torch.full_like(weights["b_enc"], bias)}, path)
    return SaeConsumer(folder)


def test_answers_that_were_kept_are_those_of_the_autoencoder_that_is_there(lm, reference, tmp_path):
    """One that is registered with the engine itself, which tells the model of nothing."""
    active = {"any": [{"probe": {"sae": "sae", "feature": 3}, "above": 0.5}]}
    asked = {"steering_vectors": {"post_block": {LAYER: {"vector": VECTOR, "when": active}}}}
    plain = reference.next_token_logprobs_sync(PROMPT)
    steered = steered_by(reference, PROMPT)
    for number, (bias, expected) in enumerate([(1e3, steered), (-1e3, plain), (1e3, steered)]):
        lm.run(lm.engine.register_consumer(autoencoder(tmp_path / str(number), bias)))
        try:
            found = lm.next_token_logprobs_sync(PROMPT, **asked)
            assert agrees(found, expected, OTHER_ENGINE)
            computed = lm.stats()["computed"]
            assert torch.equal(lm.next_token_logprobs_sync(PROMPT, **asked), found)
            assert lm.stats()["computed"] == computed
            waiting = lm.next_token_logprobs(PROMPT, **asked)
        finally:
            lm.run(lm.engine.unregister_consumer("sae"))
        with pytest.raises(ValueError, match="no autoencoder 'sae' is registered"):
            asyncio.run(waiting)


@pytest.mark.parametrize("positions", ["last_prompt", {"exclude": {"positions": [-1]}}])
def test_a_lane_is_not_steered_by_where_it_ends(lm, reference, positions):
    """The last token of each turn was, until the lane lost its place and had one last token."""
    entry = {"vector": VECTOR, "positions": positions}

    async def ask():
        asked = lm.open(PROMPT, steering_vectors={"post_block": {LAYER: entry}})
        async with asked as lane:
            await lane.next()

    with pytest.raises(ValueError, match="a lane's tokens are a prompt that grows"):
        asyncio.run(ask())
    capture = {"memory": {"hooks": {"post_block": [LAYER]}, "positions": positions}}
    with pytest.raises(ValueError, match=r"capture\['memory'\]\['positions'\] counts from the end"):
        lm.open(PROMPT, capture=capture).next_sync()
    assert lm.next_token_logprobs_sync(PROMPT, capture=capture).isfinite().all()
    capture["memory"]["positions"] = "all_generated"
    with pytest.raises(ValueError, match=r"\['positions'\] would read nothing"):
        lm.open(PROMPT, capture=capture)
    try:
        lm.run(lm.engine.steering.set(vectors={"post_block": {LAYER: entry}}))
        with pytest.raises(ValueError, match="a lane's tokens are a prompt that grows"):
            lm.open(PROMPT).next_sync()
        assert lm.next_token_logprobs_sync(PROMPT).isfinite().all()
    finally:
        lm.run(lm.engine.steering.clear())


def test_a_lane_whose_condition_would_remember_is_told_of_lanes(lm):
    probe = {"probe": {"hook": "post_block", "layer": 0, "vector": VECTOR}, "above": 0.0}
    entry = {"vector": VECTOR, "when": {**probe, "scope": "rest"}}
    steered = {"steering_vectors": {"post_block": {LAYER: entry}}}
    with pytest.raises(ValueError, match=r"'scope', 'over'.* as a lane's is, too"):
        lm.open(PROMPT, **steered).next_sync()
    assert lm.next_token_logprobs_sync(PROMPT, **steered).isfinite().all()


class Enough(Consumer):
    """Ends a completion by the row at a position."""

    consumer_id = "enough"
    on_request_only = True

    def flows(self):
        read = ResidualStream.read(layer=LAYER, role="h", phase="decode")
        return [ConsumerFlow(reads=[read], writes=[Actions.write("stop")], window="same_step")]

    def decide(self, rows, ctx):
        for request, position in zip(rows.owners, rows.meta.positions.tolist(), strict=True):
            if position == len(PROMPT) + 2:
                yield Stop(request, reason="enough")


def test_a_completion_that_a_controller_ends_has_all_its_tokens(lm):
    lm.register_consumer(Enough())
    try:
        whole = asyncio.run(lm.sample(PROMPT, 8, [], temperature=0))
        ended = asyncio.run(lm.sample(PROMPT, 8, [], temperature=0, consumers={"enough": {}}))
    finally:
        lm.unregister_consumer("enough")
    assert ended == whole[:3]


def test_what_a_completion_captures_to_memory_nobody_would_see(lm):
    with pytest.raises(ValueError, match="gives tokens alone"):
        asyncio.run(lm.sample(PROMPT, 2, capture={"memory": {"hooks": {"post_block": [LAYER]}}}))


def test_a_query_and_a_lane_bring_captured_rows(lm, reference):
    capture = {"memory": {"hooks": {"post_block": [LAYER]}, "positions": "all_prompt"}}
    answer = asyncio.run(lm.query(PROMPT, capture=capture))
    rows = answer.output.activations["post_block"][LAYER].tensor
    assert agrees(answer.values, reference.next_token_logprobs_sync(PROMPT), OTHER_ENGINE)
    states = reference._model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert torch.allclose(rows, states[LAYER + 1][0], atol=1e-3)
    assert torch.equal(lm.next_token_logprobs_sync(PROMPT, capture=capture), answer.values)

    async def run():
        lane = lm.open(PROMPT, capture=capture)
        for token in (70, 71):
            await lane.next()
            lane.feed(token)
        await lane.next()
        impatient = asyncio.ensure_future(lane.close())
        await asyncio.sleep(0)
        impatient.cancel()
        outputs = await lane.close()
        assert await lane.close() == outputs
        return outputs

    [output] = asyncio.run(run())
    fed = torch.tensor([[*PROMPT, 70, 71]])
    states = reference._model(fed, output_hidden_states=True).hidden_states
    rows = output.activations["post_block"][LAYER].tensor
    assert torch.allclose(rows, states[LAYER + 1][0], atol=1e-3)


class Adder(Consumer):
    """Adds a vector of its own to every request."""

    consumer_id = "adder"

    def flows(self):
        return [ConsumerFlow(writes=[ResidualStream.write(layer=LAYER, role="add")])]

    def on_request_started(self, request, ctx):
        ctx.writer("add").set([request], VECTOR)


def test_a_consumer_that_writes_is_never_answered_from_the_cache(lm, reference):
    plain = lm.next_token_logprobs_sync(PROMPT)
    lm.register_consumer(Adder())
    try:
        before = lm.stats()["computed"]
        for _ in range(2):
            changed = lm.next_token_logprobs_sync(PROMPT)
        assert lm.stats()["computed"] - before == 2
        off = lm.next_token_logprobs_sync(PROMPT, consumers={"adder": {"enabled": False}})
    finally:
        lm.unregister_consumer("adder")
    assert agrees(changed, steered_by(reference, PROMPT), OTHER_ENGINE)
    assert agrees(off, plain)
    assert plain.shape == (VOCAB,)


class Pusher(Consumer):
    """May steer what follows in every request."""

    consumer_id = "pusher"

    def flows(self):
        read = ResidualStream.read(layer=1, role="h", phase="prefill")
        return [ConsumerFlow(reads=[read], writes=[Actions.write("steer")], window="next_step")]

    def decide(self, rows, ctx):
        return ()


def test_what_a_controller_may_have_steered_is_not_remembered(lm):
    """It steers the later chunks of a prompt, and answers were given out when it was gone."""
    plain = lm.next_token_logprobs_sync(PROMPT)
    lm.run(lm.engine.register_consumer(Pusher()))
    try:
        before = lm.stats()["computed"]
        for _ in range(2):
            lm.next_token_logprobs_sync(PROMPT)
        assert lm.stats()["computed"] - before == 2
    finally:
        lm.run(lm.engine.unregister_consumer("pusher"))
    assert torch.equal(lm.next_token_logprobs_sync(PROMPT), plain)
    assert lm.stats()["computed"] - before == 2


def test_lanes_hear_of_a_consumer_that_writes_as_queries_do(lm, reference):
    """Also those that were open before, whether they have kept their place or not."""

    async def run():
        async with lm.open(PROMPT) as lane:
            found = [await lane.next()]
            await asyncio.to_thread(lm.register_consumer, Adder())
            try:
                found.append(await lane.next())
                lane.feed(70)
                found.append(await lane.next())
            finally:
                await asyncio.to_thread(lm.unregister_consumer, "adder")
            lane.feed(71)
            return [*found, await lane.next()]

    expected = (
        reference.next_token_logprobs_sync(PROMPT),
        steered_by(reference, PROMPT),
        steered_by(reference, [*PROMPT, 70]),
        reference.next_token_logprobs_sync([*PROMPT, 70, 71]),
    )
    for row, wanted in zip(asyncio.run(run()), expected, strict=True):
        assert agrees(row, wanted, OTHER_ENGINE)


class Always(Enough):
    """The same for every request."""

    consumer_id = "always"
    on_request_only = False


def test_a_lane_without_the_controller_of_every_request_hears_of_it(lm):
    """What decides is not asked for prompts that arrive in parts."""
    lm.register_consumer(Always())
    try:
        for lane in (lm.open(PROMPT), lm.open(PROMPT, consumers={})):
            with pytest.raises(ValueError, match="decides what is done to requests"):
                lane.next_sync()
            lane.close_sync()
        lane = lm.open(PROMPT, consumers={"always": {"enabled": False}})
        found = lane.next_sync()
        lane.close_sync()
    finally:
        lm.unregister_consumer("always")
    assert agrees(found, lm.next_token_logprobs_sync(PROMPT))
