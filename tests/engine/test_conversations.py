"""Conditions that later requests of a conversation know of, against `transformers`."""

from __future__ import annotations

import os
import secrets
import time

import pytest
import torch
from vllm.exceptions import VLLMClientError

from engine.asking import generate, greedy, prompts_of, sampled
from engine.drawn_methods import METHODS, drawn
from engine.reference import HIDDEN, GatedChange
from engine.test_conditions import (
    PLACES,
    WHEN,
    V,
    assert_as_transformers,
    at,
)
from engine.test_patching import ZERO
from engine.test_remembering import (
    TOKENS,
    Remembering,
    after,
    assert_greedy,
    of_prompt,
    remembering,
    rest,
)
from tllm import BeamSearchParams, PoolingParams, SamplingParams
from tllm.client.attached import Client
from tllm.client.request import Prepared
from tllm.engine.conversations import MOST_CONDITIONS, Conversations
from tllm.runtime.kernels.backend import INTERPRETED

ROUNDS = int(os.environ.get("TLLM_ORACLE_REQUESTS", 24 if INTERPRETED else 48)) // 12
KEY = "a secret of this test"
KEPT = {**WHEN, "scope": "conversation"}
ENTRY = {"vector": V, "when": KEPT}


def named(name, key=KEY, **more):
    return {"id": name, "key": key, **more}


def of(entry, place=("post_block", 1), field="steering_vectors", **more):
    return {field: at(place, entry), **more}


def always(start=0):
    """What `ENTRY` means where its condition has held before."""
    return remembering(0, lambda strengths: torch.ones(len(strengths)), start)


@pytest.fixture
def name(llm):
    """Of a conversation that nobody has named."""
    yield (name := secrets.token_hex(4))
    if name in llm.steering.conversations():
        llm.steering.forget_conversation(name)


class Conversing(Remembering):
    """Random requests of a few conversations, with conditions that several of them have."""

    def __init__(self, seed):
        super().__init__(seed)
        self.known = []
        self.held = set()
        self.ids = [f"{seed}-{i}" for i in range(2)]

    def request(self, patched=None):
        self.conversation = self.pick.choice([*self.ids, *self.ids, None])
        self.used = set()
        request = super().request(patched)
        if self.conversation is not None:
            request.params.conversation = named(self.conversation)
        request.conversation = self.conversation
        return request

    def kept(self):
        """A condition with scope `conversation`, which no other entry of the request has; as asked,
        its probes, strength and thresholds, and which of the places is the last that it looks at.
        """
        unused = [each for each in self.known if each[0]["name"] not in self.used]
        if not unused or len(self.known) < 4:
            last = self.pick.randrange(len(PLACES) - 3)
            when, *meaning = self.condition(last)
            when["scope"] = "conversation"
            if self.pick.random() < 0.4:
                when["over"] = self.pick.choice(self.overs)
            unused = [(when, *meaning, last)]
            self.known += unused
        found = self.pick.choice(unused)
        self.used.add(found[0]["name"])
        return found

    def entry(self, prompt_len):
        pick = self.pick
        if pick.random() < 0.3:
            return super().entry(prompt_len)
        when, probes, strength, edges, last = self.kept()
        over, start = when.get("over"), 0
        prefix = "decode_" if over is None and pick.random() < 0.4 else ""
        index = (
            pick.randrange(len(PLACES)) if over or prefix else pick.randrange(last + 2, len(PLACES))
        )
        start = prompt_len if prefix else 0
        if (self.conversation, when["name"]) in self.held:
            first = prompt_len if over else 0

            def recall(strengths):
                return (torch.arange(len(strengths)) >= first).float()

        else:
            recall = after(prompt_len) if over else rest
        if over:
            probes = [(where, of_prompt(score, prompt_len, over)) for where, score in probes]
        method = drawn(pick.choice(list(METHODS)), pick.randrange(30), HIDDEN, size=3.0)
        change = GatedChange(PLACES[index], method.change, probes, strength, start, recall=recall)
        entry = {**method.entry, "when": when}
        return f"{prefix}steering_vectors", at(PLACES[index], entry), change, edges, method

    def learn(self, request, output):
        """What later requests of the conversation know: what held for any sample."""
        if request.conversation is None:
            return
        for when in request.whens:
            fired = (len(sample.signals[when["name"]].fired) for sample in output.outputs)
            if when.get("scope") == "conversation" and any(fired):
                self.held.add((request.conversation, when["name"]))


def run_rounds(llm, reference, seed):
    asked, compared, recalled = Conversing(seed), [], 0
    for _ in range(ROUNDS):
        requests = [asked.request() for _ in range(12)]
        recalled += sum(
            (r.conversation, when["name"]) in asked.held for r in requests for when in r.whens
        )
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
        for request, output in zip(requests, outputs, strict=True):
            compared.append(assert_as_transformers(reference, request, output))
        for request, output in zip(requests, outputs, strict=True):
            asked.learn(request, output)
    assert sum(compared) > 0.9 * len(compared) - 1
    assert recalled > len(compared) / 5
    for each in asked.ids:
        llm.steering.forget_conversation(each)


def test_random_requests_of_conversations_are_as_transformers_has_them(llm, reference):
    """What held in earlier requests holds from the first token; prompts in chunks, cached
    prefixes, two samples, beside conditions of all other scopes."""
    run_rounds(llm, reference, 30)


def test_random_requests_of_conversations_that_preempt_each_other(tight_llm, reference):
    """With steps scheduled ahead of what is known."""
    run_rounds(tight_llm, reference, 31)


def test_what_held_holds_from_the_first_token_of_the_next_request(llm, reference, name):
    [prompt, other] = prompts_of([30, 20], seed=3)
    turn = of(ENTRY, conversation=named(name))
    [first] = generate(llm, [prompt], greedy(TOKENS, **turn))
    assert_greedy(reference, prompt, first, remembering(30))
    assert len(first.outputs[0].signals["post_block:0"].fired)
    [second] = generate(llm, [other], greedy(TOKENS, **turn))
    assert_greedy(reference, other, second, always())
    [decoded] = generate(
        llm,
        [other],
        greedy(
            TOKENS, **of(ENTRY, field="decode_steering_vectors") | {"conversation": named(name)}
        ),
    )
    assert_greedy(reference, other, decoded, always(len(other)))
    told = llm.steering.conversations()[name]
    assert told["requests"] == 3 and 3590 < told["expires_in_s"] <= 3600
    assert abs(told["begun"] - time.time()) < 60
    (stats,) = llm.intervention_stats()
    assert stats["conversations"] == 1 and stats["max_conversations"] == 4096


def test_it_holds_for_no_other_conversation_condition_or_request(llm, reference, name):
    [prompt] = prompts_of([20], seed=3)
    on = {**KEPT, "above": -1e9}
    generate(llm, [prompt], greedy(TOKENS, **of({**ENTRY, "when": on}, conversation=named(name))))
    change = remembering(20)
    for asked in (
        {"conversation": named(name)},  # another threshold: another condition
        {"conversation": named(f"{name} 2")},
        {},
    ):
        [output] = generate(llm, [prompt], greedy(TOKENS, **of(ENTRY, **asked)))
        assert_greedy(reference, prompt, output, change)
    llm.steering.forget_conversation(f"{name} 2")


def test_another_key_is_refused_and_learns_nothing(llm, name):
    [prompt] = prompts_of([12])
    turn = of(ENTRY, conversation=named(name))
    generate(llm, [prompt], greedy(1, **turn))
    with pytest.raises(ValueError, match=rf"conversation: '{name}' was begun with another key; "):
        generate(llm, [prompt], greedy(1, **turn | {"conversation": named(name, "x" * 16)}))
    assert llm.steering.conversations()[name]["requests"] == 1
    assert KEY not in repr(llm.steering.conversations())


def test_what_is_forgotten_or_has_expired_begins_anew(llm, reference, name):
    [prompt] = prompts_of([30], seed=3)
    turn = of(ENTRY, conversation=named(name, expires_s=0.2))
    changes = [remembering(30), always(), remembering(30), always(), remembering(30)]
    for i, change in enumerate(changes):
        if i == 2:
            llm.steering.forget_conversation(name)
            turn["conversation"] = named(name, "another key than before")
        if i == 4:
            generate(llm, [prompt], greedy(1, **turn))
            time.sleep(0.25)
            assert name not in llm.steering.conversations()
        turn["conversation"]["expires_s"] = 0.2 if i == 3 else 60
        [output] = generate(llm, [prompt], greedy(TOKENS, **turn))
        assert_greedy(reference, prompt, output, change)
        if i == 3:
            time.sleep(0.25)
    llm.steering.forget_conversation(name)
    with pytest.raises(ValueError, match=rf"no conversation '{name}' is remembered"):
        llm.steering.forget_conversation(name)


def test_blocks_of_the_prefix_cache_know_what_held_before(llm, reference, name):
    """Two conversations in which the same held share them; a prompt is computed while anything is
    still to be judged in it."""
    [prompt] = prompts_of([100], seed=9)
    llm.reset_prefix_cache()
    cached = []
    for each in (name, name, name, f"{name} 2", f"{name} 2"):
        turn = of(ENTRY, conversation=named(each))
        [output] = generate(llm, [prompt], greedy(TOKENS, **turn))
        cached.append(output.num_cached_tokens)
        begins = len(cached) in (1, 4)
        assert_greedy(reference, prompt, output, remembering(100) if begins else always())
    assert cached == [0, 0, 96, 0, 96]
    llm.steering.forget_conversation(f"{name} 2")


def test_any_sample_decides(llm, reference, name):
    """And which one it is nobody asks: all that come later begin with what held."""
    [prompt] = prompts_of([30], seed=6)
    entry = {**ENTRY, "when": {**KEPT, "name": "mood"}}
    turn = of(entry, field="decode_steering_vectors", conversation=named(name))
    [several] = generate(llm, [prompt], sampled(TOKENS, n=3, seed=1, **turn))
    fired = [len(sample.signals["mood"].fired) > 0 for sample in several.outputs]
    assert any(fired)
    [output] = generate(llm, [prompt], sampled(TOKENS, n=2, seed=5, logprobs=1, **turn))
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        logits, _ = reference.run([*prompt, *tokens][:-1], gated=[always(30)])
        expected = logits[29:].log_softmax(-1)
        ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_requests_at_the_same_time_begin_with_what_was_known_before(llm, reference, name):
    prompts = prompts_of([30, 30], seed=3)
    turn = of(ENTRY, conversation=named(name))
    for output, prompt in zip(generate(llm, prompts, greedy(TOKENS, **turn)), prompts, strict=True):
        assert_greedy(reference, prompt, output, remembering(30))


def test_what_held_before_an_abort_is_remembered(llm, reference, name):
    """Also of a prompt that is refused, and where nobody reads signals."""
    [prompt] = prompts_of([30], seed=3)
    quiet = {"consumers": {"signals": {"enabled": False}}}
    turn = of(ENTRY, conversation=named(name), **quiet)
    engine = llm.llm_engine
    engine.add_request("given up", {"prompt_token_ids": prompt}, greedy(50, **turn))
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    engine.abort_request(["given up"])
    [output] = generate(llm, [prompt], greedy(TOKENS, **turn))
    assert_greedy(reference, prompt, output, always())
    llm.steering.forget_conversation(name)
    [refused] = generate(llm, [prompt], greedy(4, **turn, abort_when={**WHEN, "name": "no"}))
    assert refused.outputs[0].stop_reason == "no" and not refused.outputs[0].token_ids
    [output] = generate(llm, [prompt], greedy(TOKENS, **turn))
    assert_greedy(reference, prompt, output, always())


def test_a_sample_that_a_condition_ends_counts_up_to_its_last_token(tight_llm, reference):
    """Steps are scheduled ahead: the row of a token after the end is computed and is nobody's."""
    llm, name = tight_llm, "ended"
    [prompt] = prompts_of([30], seed=3)
    turn = of(ENTRY, field="decode_steering_vectors")
    [whole] = generate(llm, [prompt], greedy(TOKENS, **turn))
    signal = whole.outputs[0].signals["post_block:0"]
    first = int(signal.fired[0]) - 30  # the row of this generated token is the first that holds
    for length in (first + 1, first + 2):  # the last token's row is not computed
        ends = {"stop_token_ids": [whole.outputs[0].token_ids[length - 1]], "max_tokens": 50}
        if whole.outputs[0].token_ids[length - 1] in whole.outputs[0].token_ids[: length - 1]:
            ends = {"max_tokens": length}
        params = greedy(TOKENS, **turn, conversation=named(name))
        for field, value in ends.items():
            setattr(params, field, value)
        [output] = generate(llm, [prompt], params)
        assert len(output.outputs[0].token_ids) == length
        params = greedy(TOKENS, **turn, conversation=named(name))
        [later] = generate(llm, [prompt], params)
        assert_greedy(
            reference,
            prompt,
            later,
            remembering(30, start=30) if length == first + 1 else always(30),
        )
        llm.steering.forget_conversation(name)


def test_global_steering_remembers_for_those_who_name_a_conversation(llm, reference, name):
    [prompt] = prompts_of([30], seed=3)
    llm.steering.register_monitor("turned", KEPT)
    assert llm.steering.monitors()["turned"]["scope"] == "conversation"
    llm.steering.set({"post_block": {1: {"vector": V, "when": "turned"}}})
    plain, told = greedy(TOKENS), greedy(TOKENS, conversation=named(name))
    for params, change in (
        (plain, remembering(30)),
        (told, remembering(30)),
        (plain, remembering(30)),
        (told, always()),
    ):
        [output] = generate(llm, [prompt], params)
        assert_greedy(reference, prompt, output, change)
    llm.steering.clear()
    llm.steering.unregister_monitor("turned")
    generate(llm, [prompt], greedy(1, conversation=named(name, "x" * 16)))  # nothing is remembered


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("chat", r"conversation is str; give a mapping with 'id' and 'key'"),
        (
            {"id": "a", "key": KEY, "api": 1},
            r"unknown keys \['api'\]; it takes 'id', 'key' and 'exp",
        ),
        ({"key": KEY}, r"conversation\['id'\]=None is no name; give a text of 1 to 1024"),
        ({"id": "a"}, r"conversation\['key'\] must be a secret text of 16 to 1024 characters"),
        (
            named("a", "short secret"),
            r"conversation\['key'\] must be .* such as secrets\.token_hex",
        ),
        (named("a", owner="", most=1), r"conversation\['owner'\]='' is no name; give a text"),
        (named("a", most=1), r"conversation\['owner'\]=None is no name"),
        (named("a", owner="anna"), r"conversation\['most'\]=None; give the number of"),
        (named("a", owner="anna", most=-1), r"conversation\['most'\]=-1; give the number of"),
        (named("a", expires_s=0), r"conversation\['expires_s'\]=0 must be above 0 and at most"),
        *(
            (named("a", expires_s=each), r"\['expires_s'\]=.* must be above 0 and at most 31536000")
            for each in (1e9, 1e300, 10**400, float("inf"), float("nan"))
        ),
        (named("a", expires_s="1h"), r"\['expires_s'\]='1h' is not a number"),
    ],
)
def test_what_names_no_conversation_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        SamplingParams(conversation=given)
    assert "short secret" not in str(refused.value)


def test_replicas_refuse():
    client = Client()
    client.registered.replicas = 2
    with pytest.raises(ValueError, match="2 data-parallel replicas, each with a memory of its own"):
        asked = SamplingParams(conversation=named("a")).asked.conversation
        next(client.admission._enter(asked, Prepared(None, "of the prompt", {})))


def test_beams_and_pooling_are_refused_a_conversation(llm, name):
    """Streamed prompts are in test_streaming.py; nothing is begun."""
    given, [prompt] = named(name), prompts_of([12])
    beams = BeamSearchParams(beam_width=2, max_tokens=2, conversation=given)
    with pytest.raises(VLLMClientError, match="conversation was asked, but a beam is computed by"):
        llm.beam_search([{"prompt_token_ids": prompt}], beams)
    pooled = PoolingParams(task="embed", conversation=given)
    with pytest.raises(ValueError, match="conversation was given for pooling"):
        llm.llm_engine.add_request("pooled", {"prompt_token_ids": prompt}, pooled)
    assert not llm.llm_engine.has_unfinished_requests()
    assert name not in llm.steering.conversations()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"consumers": {"nobody": {}}}, r"consumers\['nobody'\]: no such consumer is registered"),
        ({"patch": [{**ZERO, "source": {"run": "gone"}}]}, "'gone'"),
    ],
)
def test_a_request_that_is_refused_begins_no_conversation(llm, name, more, sentence):
    asked = greedy(1, **of(ENTRY, conversation=named(name)), **more)
    with pytest.raises(ValueError, match=sentence):
        generate(llm, prompts_of([4]), asked)
    assert name not in llm.steering.conversations()
    assert not llm.intervention_stats()[0]["running_sequences"]
    generate(llm, prompts_of([4]), greedy(1, **of(ENTRY, conversation=named(name, "x" * 16))))


def test_a_request_that_vllm_refuses_begins_no_conversation(llm, name):
    longest = llm.llm_engine.model_config.max_model_len
    for length, more in ((longest + 1, {}), (4, {"allowed_token_ids": [10**6]})):
        [prompt] = prompts_of([length])
        asked = greedy(1, **of(ENTRY, conversation=named(name)), **more)
        with pytest.raises(VLLMClientError):
            llm.llm_engine.add_request("wrong", {"prompt_token_ids": prompt}, asked)
        assert name not in llm.steering.conversations()
    generate(llm, prompts_of([4]), greedy(1, **of(ENTRY, conversation=named(name))))
    with pytest.raises(VLLMClientError):
        llm.llm_engine.add_request("wrong", {"prompt_token_ids": prompt}, asked)
    assert llm.steering.conversations()[name]["requests"] == 1, "it goes on without the refused one"


def test_conversations_are_limited_and_room_is_made_by_those_that_expired():
    there = Conversations(2)
    keys = b"a" * 32, b"b" * 32
    first = there.enter("one", keys[0], 10, now=0)
    assert there.enter("one", keys[0], 5, now=8) == first
    second = there.enter("two", keys[1], 100, now=9)
    assert first.place != second.place
    with pytest.raises(ValueError, match=r"'three' would be one more than max_conversations=2; "):
        there.enter("three", keys[0], 10, now=12.9)
    with pytest.raises(ValueError, match="begun with another key"):
        there.enter("one", keys[1], 10, now=12.9)
    third = there.enter("three", keys[0], 10, now=13)
    assert third.place == first.place and third.serial > second.serial
    assert set(there.described(13)) == {"two", "three"} and not there.forget("one", 13)
    there.leave(*first)  # of a conversation whose place is another's by now
    assert set(there.described(13)) == {"two", "three"}
    again = there.enter("two", keys[0], 10, now=110)  # expired: whoever comes first has the name
    assert again.serial > third.serial
    assert there.forget("two", 111) and not there.described(130)


def test_a_conversation_has_so_many_conditions(llm, name):
    """Else requests with a threshold of their own each would fill the memory of the engine."""
    there, key = Conversations(2), b"a" * 32
    conditions = [f"token:{i}" for i in range(MOST_CONDITIONS)]
    first = there.enter("one", key, 10, 0, conditions=conditions)
    assert there.enter("one", key, 10, 1, conditions=conditions[3:]) == first
    with pytest.raises(ValueError, match=r"'one' would have 257 conditions .* at most 256; "):
        there.enter("one", key, 10, 2, conditions=["token:0", "another"])
    assert there.described(2)["one"]["requests"] == 2
    there.enter("two", key, 10, 2, conditions=["another"])
    assert there.forget("one", 3)
    there.enter("one", key, 10, 3, conditions=["another"])
    [prompt] = prompts_of([4])
    with pytest.raises(ValueError, match=r"would have \d+ conditions .* at most 256; "):
        for i in range(MOST_CONDITIONS // 20 + 1):
            whens = [{**KEPT, "above": 1e6 + 20 * i + j} for j in range(20)]
            entries = [{"vector": V, "when": when} for when in whens]
            generate(llm, [prompt], greedy(1, **of(entries, conversation=named(name))))
    assert i == MOST_CONDITIONS // 20


def test_an_owner_has_so_many_conversations_and_others_have_theirs():
    there, key = Conversations(8), b"a" * 32
    first = there.enter("a1", key, 10, 0, "anna", 2)
    there.enter("a2", key, 20, 0, "anna", 2)
    with pytest.raises(ValueError, match=r"'a3' would be one more than the 2 that its owner"):
        there.enter("a3", key, 10, 1, "anna", 2)
    assert set(there.described(1)) == {"a1", "a2"}
    assert there.enter("a1", key, 10, 1, "anna", 2) == first  # it is there already
    there.enter("o1", key, 10, 1, "otto", 1)
    there.enter("free", key, 10, 1)
    there.enter("a3", key, 10, 11, "anna", 2)  # a1 has expired
    with pytest.raises(ValueError, match="one more than the 0"):
        there.enter("n1", key, 10, 11, "nobody", 0)
    assert there.forget("a2", 12)
    there.enter("a4", key, 10, 12, "anna", 2)
