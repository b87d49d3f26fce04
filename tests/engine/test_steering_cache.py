"""Steered requests and the prefix cache: nothing wrong is reused, and nothing right is lost."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from beyond_interpreting import beyond_interpreting
from tiny_engines import TINY_ENGINE

from engine.reference import HIDDEN, VOCAB
from tllm import LLM, SamplingParams
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.selection import Selection

TURNS = 1 if INTERPRETED else 14
"""Of 24 requests. Interpreted kernels are slow, and the rules are the scheduler's."""
GENERATOR = torch.Generator().manual_seed(4)
VECTORS = list(6 * torch.randn(3, HIDDEN, generator=GENERATOR))


@pytest.fixture(scope="module")
def cached(tiny_model):
    """Few enough blocks that sequences preempt each other, and enough that blocks are found."""
    options = TINY_ENGINE | {"max_model_len": 224, "num_gpu_blocks_override": 30}
    return LLM(tiny_model, max_num_batched_tokens=48, **options)


@pytest.fixture(scope="module")
def uncached(tiny_model):
    return LLM(tiny_model, enable_prefix_caching=False, **TINY_ENGINE)


class Traffic:
    """Random requests that share what they can: prefixes, vectors, modules, earlier answers."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.prefixes = [self.tokens(length) for length in (33, 64, 71, 100)]
        self.turns = []

    def tokens(self, count):
        return [self.pick.randrange(2, VOCAB) for _ in range(count)]

    def entry(self, phases):
        vector = self.pick.choice(VECTORS)
        method = self.pick.choice(["add", "add", "norm_match", "ablate"])
        entry = {"vector": vector, "method": method}
        if method == "norm_match":
            entry["scale"] = 0.5
        if self.pick.random() < 0.25:
            positions = self.pick.choice(
                [
                    "last_prompt",
                    "all_generated",
                    {"ranges": [[40, 70]]},
                    {"ranges": [[-10, None]], "exclude": {"positions": [-1]}},
                    {"phase": "generation", "windows": [[3, 6]]},
                    {"token_ids": range(0, VOCAB, 50)},
                    {"phase": "generation", "exclude": {"token_ids": range(0, VOCAB, 4)}},
                ]
            )
            if phases & Selection.parse(positions).phases:
                entry["positions"] = positions
        return entry

    def tier(self, *phases):
        point = self.pick.choice(["post_block", "pre_attn", "attn_in", "mlp_out"])
        entry = self.entry({*phases} or {"prompt", "generation"})
        return {point: {self.pick.randrange(3): entry}}

    def steering(self):
        kind = self.pick.choice(["none", "base", "prefill", "decode", "module", "several"])
        return {
            "none": dict,
            "base": lambda: {"steering_vectors": self.tier()},
            "prefill": lambda: {"prefill_steering_vectors": self.tier("prompt")},
            "decode": lambda: {"decode_steering_vectors": self.tier("generation")},
            "module": lambda: {"steering_module_ref": ("module", self.pick.choice([0, 1, -1]))},
            "several": lambda: {
                "decode_steering_vectors": self.tier("generation"),
                "steering_clamps": {
                    "post_block": {1: {"vector": self.pick.choice(VECTORS), "value": 1.0}}
                },
            },
        }[kind]()

    def request(self):
        base = self.pick.choice(self.prefixes)
        if self.turns and self.pick.random() < 0.4:  # an earlier prompt with its answer
            base = self.pick.choice(self.turns[-40:])
        prompt = (base + self.tokens(self.pick.choice([0, 1, 5, 17])))[:150]
        params = SamplingParams(
            temperature=0,
            max_tokens=self.pick.choice([2, 6, 40]),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            **self.steering(),
        )
        return SimpleNamespace(prompt=prompt, params=params)


def answers(llm, requests):
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    outputs = llm.generate(prompts, [r.params for r in requests], use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logprobs = [
        [step[token].logprob for step, token in zip(o.outputs[0].logprobs, ids, strict=True)]
        for o, ids in zip(outputs, tokens, strict=True)
    ]
    return tokens, logprobs, sum(o.num_cached_tokens or 0 for o in outputs)


def test_cached_answers_are_the_uncached_ones(cached, uncached):
    """336 requests (V1): prefixes shared by all, modules and global steering changed in between,
    preemption, chunked prefill, and prompts that contain steered answers."""
    traffic = Traffic(0)
    hits, preempted = 0, []
    scheduler = cached.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counted(*args, **kwargs):
        preempted.append(args)
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    try:
        for turn in range(TURNS):
            module = traffic.tier()
            for llm in (cached, uncached):
                if turn % 2 == 0:
                    llm.steering.register_module("module", module)
                if turn % 4 == 1:
                    llm.steering.set(decode_vectors={"post_block": {0: VECTORS[turn % 3] / 2}})
                elif turn % 4 == 2:
                    llm.steering.set({"post_block": {2: VECTORS[turn % 3]}}, replace=True)
                elif turn % 4 == 3:
                    llm.steering.clear()
            requests = [traffic.request() for _ in range(24)]
            tokens, logprobs, found = answers(cached, requests)
            expected, expected_logprobs, none = answers(uncached, requests)
            assert not none
            hits += found
            for request, ours, theirs, p, q in zip(
                requests, tokens, expected, logprobs, expected_logprobs, strict=True
            ):
                assert ours == theirs, request
                assert p == pytest.approx(q, abs=2e-4), request
                traffic.turns.append(request.prompt + ours)
    finally:
        del scheduler._preempt_request
        for llm in (cached, uncached):
            llm.steering.clear()
    assert hits > 200 * (TURNS - 1)
    assert preempted or TURNS == 1


def hits_of(llm, prompt, **steering):
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, **steering
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


@pytest.fixture
def fresh(tiny_engine):
    tiny_engine.reset_prefix_cache()
    yield tiny_engine
    tiny_engine.steering.clear()
    tiny_engine.reset_prefix_cache()


PROMPT = list(range(5, 105))  # three blocks and four tokens
STEERED = {"steering_vectors": {"post_block": {1: VECTORS[0]}}}
DECODING = {"decode_steering_vectors": {"post_block": {1: VECTORS[0]}}}


def test_unsteered_and_decode_only_requests_share_the_prompt_as_in_plain_vllm(
    fresh, plain_engine, llm
):
    import vllm

    plain_engine.reset_prefix_cache()
    params = vllm.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    own = [
        plain_engine.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        for _ in range(2)
    ]
    assert [o.num_cached_tokens for o in own] == [0, 96]
    assert hits_of(fresh, PROMPT)[0] == 0
    assert hits_of(fresh, PROMPT)[0] == 96
    assert hits_of(fresh, PROMPT, **DECODING)[0] == 96
    found, answer = hits_of(fresh, PROMPT, **DECODING)
    assert found == 96
    # What it generated lies in blocks of their own: nobody else reads them ...
    assert hits_of(fresh, PROMPT + answer + [7])[0] == 96
    # ... but who does the same to the same tokens.
    same = {"phase": "any", "ranges": [[len(PROMPT), None]]}
    entry = {"vector": VECTORS[0], "positions": same}
    again = {"steering_vectors": {"post_block": {1: entry}}}
    assert hits_of(fresh, PROMPT + answer + [7], **again)[0] == 128


@beyond_interpreting
def test_steered_prompts_share_with_the_same_steering_only(fresh):
    assert hits_of(fresh, PROMPT)[0] == 0
    assert hits_of(fresh, PROMPT, **STEERED)[0] == 0
    assert hits_of(fresh, PROMPT, **STEERED)[0] == 96
    assert hits_of(fresh, PROMPT)[0] == 96
    other = {"steering_vectors": {"post_block": {1: {"vector": VECTORS[0], "scale": 1.001}}}}
    assert hits_of(fresh, PROMPT, **other)[0] == 0
    fresh.steering.set({"post_block": {1: VECTORS[0]}})
    assert hits_of(fresh, PROMPT)[0] == 96, "the same to the same tokens, whoever asked it"
    fresh.steering.clear()
    assert hits_of(fresh, PROMPT)[0] == 96


@beyond_interpreting
def test_steering_from_a_position_on_shares_the_blocks_before_it(fresh):
    assert hits_of(fresh, PROMPT)[0] == 0
    late = {"vector": VECTORS[0], "positions": {"ranges": [[70, None]]}}
    asked = {"steering_vectors": {"post_block": {1: late}}}
    assert hits_of(fresh, PROMPT, **asked)[0] == 64
    assert hits_of(fresh, PROMPT, **asked)[0] == 96


@beyond_interpreting
def test_a_module_registered_anew_does_not_find_blocks_of_the_old_one(fresh):
    asked = {"steering_module_ref": "module"}
    fresh.steering.register_module("module", {"post_block": {0: VECTORS[0]}})
    assert [hits_of(fresh, PROMPT, **asked)[0] for _ in range(2)] == [0, 96]
    fresh.steering.register_module("module", {"post_block": {0: VECTORS[1]}})
    assert [hits_of(fresh, PROMPT, **asked)[0] for _ in range(2)] == [0, 96]
    fresh.steering.register_module("module", {"post_block": {0: VECTORS[0]}})
    assert hits_of(fresh, PROMPT, **asked)[0] == 96
    assert hits_of(fresh, PROMPT, steering_module_ref=("module", 0))[0] == 0
