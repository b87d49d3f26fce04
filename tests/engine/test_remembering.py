"""Conditions that decide on later tokens than they are judged for, against `transformers`."""

from __future__ import annotations

import os

import pytest
import torch

from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.drawn_methods import METHODS, drawn
from engine.reference import HIDDEN, GatedChange
from engine.test_conditions import (
    INTERPRETED,
    PLACES,
    WHEN,
    Asked,
    P,
    V,
    add,
    at,
    dot,
    run_random,
)

REQUESTS = int(os.environ.get("TLLM_ORACLE_REQUESTS", 16 if INTERPRETED else 24))
TOKENS = 5 if INTERPRETED else 8


def rest(strengths):
    """From the token after the first for which it holds."""
    held = (strengths > 0.5).float()
    return (held.cumsum(0) - held > 0).float()


def following(strengths):
    """The token after each for which it holds."""
    held = (strengths > 0.5).float()
    return torch.cat([torch.zeros(1), held[:-1]])


def after(prompt_len):
    """The tokens after a prompt, whose strength all of them have."""

    def recall(strengths):
        found = (strengths > 0.5).float()
        found[:prompt_len] = 0
        return found

    return recall


def of_prompt(score, prompt_len, over):
    """The score of the last row of a prompt, or of the mean of its rows, for every token."""

    def of(rows):
        rows = rows[:prompt_len]
        row = rows[-1:] if over == "prompt_last" else rows.mean(0, keepdim=True)
        return score(row)

    return lambda rows: of(rows).expand(len(rows))


class Remembering(Asked):
    """Random requests of which most conditions remember."""

    overs = ("prompt_last", "prompt_mean")

    def entry(self, prompt_len):
        pick = self.pick
        kind = pick.choice(["token", "rest", "rest", "next", *self.overs])
        if kind == "token":
            return super().entry(prompt_len)
        index = pick.randrange(len(PLACES))
        place = PLACES[index]
        method = drawn(pick.choice(list(METHODS)), pick.randrange(30), HIDDEN, size=3.0)
        prefix = pick.choice(["", "decode_"])
        start, last = prompt_len, len(PLACES) - 1
        if kind in ("rest", "next") and not prefix:
            last = index - (2 if place[0] == "pre_attn" else 1)
            start = 0
            if last < 0:
                prefix, start, last = "decode_", prompt_len, len(PLACES) - 1
        when, probes, strength, edges = self.condition(last)
        if kind in ("rest", "next"):
            when["scope"] = kind
            recall = rest if kind == "rest" else following
        else:
            when["over"] = kind
            recall, start = after(prompt_len), 0
            probes = [(where, of_prompt(score, prompt_len, kind)) for where, score in probes]
        entry = {**method.entry, "when": when}
        change = GatedChange(place, method.change, probes, strength, start, recall=recall)
        return f"{prefix}steering_vectors", at(place, entry), change, edges, method


def test_random_requests_are_as_transformers_has_them(llm, reference):
    """All scopes and places, mixed; prompts in chunks, cached prefixes, two samples."""
    run_random(llm, reference, 20, REQUESTS, kind=Remembering)


def test_random_requests_that_preempt_each_other(tight_llm, reference):
    run_random(tight_llm, reference, 21, REQUESTS // 3, kind=Remembering)


ENTRY = {"vector": V, "when": {**WHEN, "scope": "rest"}}


def remembering(prompt_len, recall=rest, start=0):
    """What `ENTRY` means at the second layer."""
    return GatedChange(
        ("post_block", 1),
        add(V, 1.0),
        [(("post_block", 0), dot(P, 0.0))],
        lambda scores: (scores[0] > 0.5).float(),
        start,
        recall=recall,
    )


def assert_greedy(reference, prompt, output, change):
    [tokens] = tokens_of([output])
    logits, _ = reference.run([*prompt, *tokens][:-1], gated=[change])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def test_a_prompt_is_read_from_the_cache_where_nothing_is_judged_for_its_tokens(llm, reference):
    """Blocks of 32 tokens; of a prompt of which only the last is judged, that one is computed."""
    [prompt] = prompts_of([100], seed=9)
    whens = {
        "steering_vectors": [({"scope": "rest"}, 0), ({"over": "prompt_last"}, 96)],
        "decode_steering_vectors": [({"scope": "rest"}, 96), ({"scope": "next"}, 96)],
    }
    for field, each in whens.items():
        for more, cached in each:
            asked = {field: {"post_block": {1: {"vector": V, "when": {**WHEN, **more}}}}}
            llm.reset_prefix_cache()
            found = [generate(llm, [prompt], greedy(TOKENS, **asked))[0] for _ in range(2)]
            assert [output.num_cached_tokens for output in found] == [0, cached], (field, more)
            assert tokens_of(found[:1]) == tokens_of(found[1:])
            if more == {"scope": "rest"}:
                start = len(prompt) if field.startswith("decode") else 0
                assert_greedy(reference, prompt, found[1], remembering(100, start=start))


def test_what_was_steered_after_one_prompt_is_not_read_by_a_longer_one(llm, reference):
    """The same tokens, the same steering, and a prompt that ends later: nothing was judged yet."""
    [prompt] = prompts_of([20], seed=5)
    entry = {"vector": V, "when": {**WHEN, "above": -1e9, "over": "prompt_last"}}
    asked = {"steering_vectors": {"post_block": {1: entry}}}
    llm.reset_prefix_cache()
    [first] = generate(llm, [prompt], greedy(60, **asked))
    longer = [*prompt, *tokens_of([first])[0]]
    [second] = generate(llm, [longer], greedy(TOKENS, **asked))
    [again] = generate(llm, [longer], greedy(TOKENS, **asked))
    assert [second.num_cached_tokens, again.num_cached_tokens] == [0, 64]
    for output in (second, again):
        change = remembering(len(longer), after(len(longer)))
        change.strength = lambda scores: torch.ones(len(scores[0]))
        assert_greedy(reference, longer, output, change)


def test_samples_have_what_the_prompt_said_and_each_its_own_besides(llm, reference):
    [prompt] = prompts_of([30], seed=6)
    asked = {"steering_vectors": {"post_block": {1: ENTRY}}}
    [output] = generate(llm, [prompt], sampled(TOKENS, n=3, seed=1, logprobs=1, **asked))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        logits, _ = reference.run([*prompt, *tokens][:-1], gated=[remembering(30)])
        expected = logits[29:].log_softmax(-1)
        ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_monitors_and_modules_remember(llm, reference):
    [prompt] = prompts_of([30], seed=3)
    llm.steering.register_monitor("turned", {**WHEN, "scope": "rest"})
    assert llm.steering.monitors()["turned"]["scope"] == "rest"
    named = {"post_block": {1: {"vector": V, "when": "turned"}}}
    llm.steering.register_module("calm", {"vectors": named})
    [output] = generate(llm, [prompt], greedy(TOKENS, steering_module_ref="calm"))
    assert_greedy(reference, prompt, output, remembering(30))
    joined = {"vector": V, "when": {"all": ["turned", WHEN]}}
    with pytest.raises(
        ValueError, match=r"the monitor 'turned' has \{'scope': 'rest'\}, and is jo"
    ):
        generate(llm, [prompt], greedy(1, steering_vectors={"post_block": {1: joined}}))
    with pytest.raises(ValueError, match=r"ends a request is judged for each token .* scope out"):
        generate(llm, [prompt], greedy(1, stop_when="turned"))
    llm.steering.unregister_module("calm")
    llm.steering.unregister_monitor("turned")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"stop_when": {**WHEN, "scope": "rest"}}, "stop_when: a condition that ends .* scope out"),
        ({"abort_when": {**WHEN, "over": "prompt_last"}}, "abort_when: .* leave over out"),
        (
            {
                "prefill_steering_vectors": at(
                    ("post_block", 1), {"vector": V, "when": {**WHEN, "over": "prompt_last"}}
                )
            },
            "the tokens after the prompt, but the entry is for tokens of the prompt",
        ),
        (
            {
                "steering_vectors": at(
                    ("post_block", 1),
                    {"vector": V, "positions": [-1], "when": {**WHEN, "over": "prompt_mean"}},
                )
            },
            "the tokens after the prompt, but the entry is for tokens of the prompt",
        ),
        (
            {
                "steering_vectors": at(
                    ("post_block", 1),
                    {"vector": V, "when": {"all": [{**WHEN, "scope": "next"}, WHEN]}},
                )
            },
            "has 'scope', and is joined with others; give it to the condition that joins them",
        ),
        (
            {"steering_vectors": at(("post_block", 1), {**ENTRY, "positions": "last_prompt"})},
            "scope='rest'.* one token alone, position -1: nothing would be steered.*prompt_last",
        ),
        (
            {"steering_vectors": at(("pre_attn", 1), ENTRY)},
            "looks at post_block of layer 0, and decides on later tokens at pre_attn of layer 1",
        ),
    ],
)
def test_what_cannot_be_remembered_is_refused(llm, asked, sentence):
    [prompt] = prompts_of([12])
    with pytest.raises(ValueError, match=sentence):
        generate(llm, [prompt], greedy(1, **asked))
    assert generate(llm, [prompt], greedy(1))
