"""Steering on a condition against `transformers`, in mixed batches; and what is refused."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.drawn_methods import METHODS, drawn
from engine.reference import HIDDEN, LAYERS, Addition, GatedChange
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.server.fields import field_error
from tllm.spec.hooks import HookPoint

REQUESTS = 16 if INTERPRETED else 150
TOKENS = 3 if INTERPRETED else 6
NARROW = HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.ROUTER
IN_BLOCK = [p.value for p in HookPoint if p.has_layer and p not in NARROW]
IN_LAYERS = [(point, layer) for layer in range(LAYERS) for point in IN_BLOCK]
PLACES = [("embed", None), *IN_LAYERS, ("lm_head_in", None)]
BORDER = 1e-4
"""Scores this near to a threshold, relative to the row, may fall on either side of it."""


def at(place, entry):
    point, layer = place
    return {point: entry if layer is None else {layer: entry}}


def add(vector, scale):
    return lambda h: h + scale * vector


def dot(vector, bias):
    return lambda h: h @ vector + bias


def cosine(vector, bias):
    return lambda h: torch.cosine_similarity(h, vector[None]) + bias


def cast(vector, bias):
    v = vector / vector.norm()

    def score(h):
        return torch.cosine_similarity(h, torch.tanh((h @ v)[:, None] * v)) + bias

    return score


SCORES = {"dot": dot, "cosine": cosine, "cast": cast}


def small_mlp(pick):
    """Layers of a random MLP whose scores are about as large as those of a probe."""
    generator = torch.Generator().manual_seed(pick.randrange(10**6))
    sizes = [HIDDEN, *(pick.randint(1, 20) for _ in range(pick.choice([1, 1, 2, 3]))), 1]
    layers = [
        (
            1.5 * torch.randn(b, a, generator=generator) / a**0.5,
            torch.randn(b, generator=generator),
        )
        for a, b in pairwise(sizes)
    ]
    name = pick.choice(["relu", "gelu", "silu", "tanh"])
    between = {**vars(torch.nn.functional), "tanh": torch.tanh}[name]

    def score(h):
        for weight, bias in layers[:-1]:
            h = between(h @ weight.T + bias)
        return (h @ layers[-1][0].T + layers[-1][1])[:, 0]

    return {"layers": layers, "activation": name}, score


class Asked:
    """Random requests that share prefixes, and what `transformers` is to do for each.

    features: conditions on features of autoencoders at `features_at`, drawn like the others.
    """

    features = ()
    features_at = None

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.prefixes = prompts_of([33, 64, 40], seed)
        self.vectors = 3 * torch.randn(6, HIDDEN, generator=self.generator)
        self.names = 0

    def probe(self, last):
        """A condition on one probe at or before a place: as asked, and its score and strength."""
        pick = self.pick
        if self.features_at in PLACES[: last + 1] and pick.random() < 0.6:
            return self.feature()
        place = pick.choice(PLACES[: last + 1])
        vector, kind = pick.choice(self.vectors), pick.choice(["dot", "dot", *SCORES])
        bias = pick.choice([0.0, 0.05])
        probe = {"hook": place[0], "vector": vector, "score": kind, "bias": bias}
        score = SCORES[kind](vector, bias)
        if kind == "dot" and pick.random() < 0.4:
            given, score = small_mlp(pick)
            probe = {"hook": place[0], **given}
        if place[1] is not None:
            probe["layer"] = pick.choice([place[1], place[1] - LAYERS])
        low, high = {"dot": (-8.0, 9.0), "cosine": (-0.05, 0.06), "cast": (0.02, 0.3)}[kind]
        middle = {"dot": 0.5, "cosine": 0.01, "cast": 0.1}[kind]
        self.names += 1
        when, side = (
            {"probe": probe, "name": f"p{self.names}"},
            pick.choice(["above", "below", "between", "soft"]),
        )
        if side == "between":
            when["between"] = [low, high]

            def strength(s):
                return ((s > low) & (s < high)).float()
        elif side == "soft":
            when |= {"below": middle, "soft": 0.8}

            def strength(s):
                return torch.sigmoid(0.8 * (middle - s))
        else:
            when[side] = middle

            def strength(s):
                return ((s > middle) == (side == "above")).float()

        edges = {"between": [low, high], "soft": []}.get(side, [middle])
        return when, (place, score), strength, edges

    def feature(self):
        """Likewise, a condition on a feature."""
        self.names += 1
        gate = self.pick.choice(self.features)
        when = gate.when | {"name": f"p{self.names}"}
        probe = self.features_at, gate.score
        return when, probe, lambda scores: gate.strength([scores]), gate.edges

    def condition(self, last):
        """A condition: as asked, its probes, and the strength from their scores."""
        pick = self.pick
        if pick.random() < 0.7:
            when, probe, strength, edges = self.probe(last)
            return when, [probe], lambda scores: strength(scores[0]), [edges]
        parts = [self.probe(last) for _ in range(pick.randint(2, 3))]
        every = pick.random() < 0.5
        joined = torch.amin if every else torch.amax

        def strength(scores):
            each = [part[2](s) for part, s in zip(parts, scores, strict=True)]
            return joined(torch.stack(each), 0)

        terms = [part[0] for part in parts]
        self.names += 1
        return (
            {"all" if every else "any": terms, "name": f"p{self.names}"},
            [part[1] for part in parts],
            strength,
            [part[3] for part in parts],
        )

    def entry(self, prompt_len):
        """Gated steering: field, mapping of it, and what it means."""
        pick = self.pick
        last = pick.randrange(len(PLACES))
        place = PLACES[last]
        method = drawn(pick.choice(list(METHODS)), pick.randrange(30), HIDDEN, size=3.0)
        when, probes, strength, edges = self.condition(last)
        entry = {**method.entry, "when": when}
        prefix, start, stop = pick.choice(
            [
                ("", 0, None),
                ("", 0, None),
                ("prefill_", 0, prompt_len),
                ("decode_", prompt_len, None),
            ]
        )
        gated = GatedChange(place, method.change, probes, strength, start, stop)
        return f"{prefix}steering_vectors", at(place, entry), gated, edges, method

    def request(self, patched=None):
        """A request.

        Args:
            patched: draws entries of a patch, too, and the rows that they mean.
        """
        pick = self.pick
        prompt = pick.choice(self.prefixes)[: pick.choice([20, 40, 64])]
        prompt = prompt + [pick.randrange(1, 250) for _ in range(pick.choice([0, 1, 9]))]
        asked, gated, methods, edges, additions, whens = {}, [], [], [], [], []
        if pick.random() < 0.8:
            entries = [self.entry(len(prompt)) for _ in range(pick.randint(1, 3))]
            # As the tiers are done: both phases, prefill, decode.
            entries.sort(key=lambda entry: ["st", "pr", "de"].index(entry[0][:2]))
            for field, given, change, near, method in entries:
                place = next(iter(given))
                if place in asked.get(field, {}):
                    continue
                asked.setdefault(field, {}).update(given)
                gated.append(change)
                methods.append(method)
                edges.append(near)
                [entry] = given[place].values() if HookPoint(place).has_layer else [given[place]]
                whens.append(entry["when"])
        if pick.random() < 0.4:
            point, layer = pick.choice(IN_LAYERS)
            if point not in asked.get("steering_vectors", {}):
                vector = pick.choice(self.vectors)
                asked.setdefault("steering_vectors", {})[point] = {layer: vector}
                additions = [Addition((point, layer), vector)]
        rows = []
        if patched is not None and pick.random() < 0.6:
            entries = [patched.patch(prompt) for _ in range(pick.randint(1, 3))]
            asked["patch"] = [entry for entry, _ in entries]
            rows = [row for _, each in entries for row in each]
        more = {"logprobs": 1, "n": pick.choice([1, 1, 2])}
        params = (greedy if more["n"] == 1 else sampled)(TOKENS, **asked, **more)
        return SimpleNamespace(
            prompt=prompt,
            params=params,
            gated=gated,
            methods=methods,
            edges=edges,
            additions=additions,
            whens=whens,
            patches=rows,
        )


def is_near(request):
    """Whether a score of the last run of the reference, or what a method decides by, was so near to
    a threshold that rounding decides."""
    return any(
        method.is_near(change.seen, BORDER / 10)
        for change, method in zip(request.gated, request.methods, strict=True)
    ) or any(
        bool(((scores - edge).abs() < BORDER * scores.abs().clamp(min=1)).any())
        for change, edges in zip(request.gated, request.edges, strict=True)
        for scores, of_probe in zip(change.scores, edges, strict=True)
        for edge in of_probe
    )


def assert_as_transformers(reference, request, output):
    """Returns whether it was compared."""
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        logits, _ = reference.run(
            [*request.prompt, *tokens][:-1], (), request.additions, request.patches, request.gated
        )
        if is_near(request):
            return False
        expected = logits[len(request.prompt) - 1 :].log_softmax(-1)
        ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-3), request
        if request.params.temperature == 0:
            assert tokens == expected.argmax(-1).tolist(), request
        assert_signals(request, sample, output.num_cached_tokens)
    return True


def assert_signals(request, sample, cached):
    """Scores and strengths of every token that was computed, and of no other."""
    names = set()
    for change, when in zip(request.gated, request.whens, strict=True):
        terms, scores = [when], change.scores
        if "probe" not in when:
            terms = [*(when.get("all") or when["any"]), when]
            scores = [*scores, change.strength(scores)]
        for term, expected in zip(terms, scores, strict=True):
            names.add(term["name"])
            signal = sample.signals[term["name"]]
            judged = torch.arange(len(expected))[change.start : change.stop]
            if "over" in when:  # of the whole prompt, at its last token
                judged = judged[len(request.prompt) - 1 : len(request.prompt)]
            found = signal.positions.tolist()
            assert found == sorted(set(found)) and set(found) <= set(judged.tolist())
            missing = set(judged.tolist()) - set(found)
            # Of several samples, one computes the prompt, or each a part of it.
            shared = len(request.prompt) if request.params.n > 1 else cached
            assert missing <= set(range(shared))
            assert signal.scores == pytest.approx(
                expected[signal.positions].numpy(), rel=1e-4, abs=5e-3
            )
        strengths = change.strength(change.scores)[signal.positions]
        assert signal.strengths == pytest.approx(strengths.numpy(), abs=5e-3)
        assert signal.fired.tolist() == signal.positions[strengths.numpy() > 0.5].tolist()
    assert set(sample.signals) == names


GENERATOR = torch.Generator().manual_seed(11)
V, P = 5 * torch.randn(2, HIDDEN, generator=GENERATOR)
WHEN = {"probe": {"hook": "post_block", "layer": 0, "vector": P}, "above": 0.5}
ENTRY = {"vector": V, "when": WHEN}


def gated(change=None, place=("post_block", 1), start=0, stop=None, above=0.5):
    """What `ENTRY` means."""
    probes = [(("post_block", 0), dot(P, 0.0))]
    strength = lambda scores: (scores[0] > above).float()  # noqa: E731
    return GatedChange(place, change or add(V, 1.0), probes, strength, start, stop)


def run_random(llm, reference, seed, count, patched=None, kind=Asked):
    asked, compared = kind(seed), []
    fired = []
    for _ in range(0, count, 16):
        requests = [asked.request(patched) for _ in range(min(16, count))]
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
        for request, output in zip(requests, outputs, strict=True):
            compared.append(assert_as_transformers(reference, request, output))
            fired += [float(c.strength(c.scores).mean()) for c in request.gated]
    assert sum(compared) > 0.9 * len(compared) - 2  # others lie where a method jumps, or near it
    assert 0.2 < sum(fired) / len(fired) < 0.8  # conditions decide


def test_random_requests_are_as_transformers_has_them(llm, reference):
    """All hook points, scores and thresholds; prompts in chunks, cached prefixes, two samples;
    beside plain and always steered requests."""
    run_random(llm, reference, 0, REQUESTS)
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["steering_configurations"] == 0 and stats["running_sequences"] == 0


def test_random_requests_that_preempt_each_other(tight_llm, reference):
    run_random(tight_llm, reference, 1, REQUESTS // 3)


def test_a_condition_sees_the_row_before_steering_at_its_own_place(llm, reference):
    """And after all that was done before."""
    [prompt] = prompts_of([12])
    place = "post_block", 0
    asked = {"post_block": {0: [{"vector": V, "scale": 3}, ENTRY]}, "post_attn": {0: V}}
    [output] = generate(llm, [prompt], greedy(TOKENS, steering_vectors=asked))
    additions = [Addition(place, 3 * V), Addition(("post_attn", 0), V)]
    tokens = tokens_of([output])[0]
    change = gated(place=place)
    logits, _ = reference.run([*prompt, *tokens][:-1], (), additions, (), [change])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert 0 < float(change.strength(change.scores).mean()) < 1


def test_scores_that_nobody_read_are_not_the_next_requests(llm):
    [prompt] = prompts_of([20], seed=4)
    everywhere, some = ({"post_block": {1: e}} for e in (ENTRY, {**ENTRY, "positions": [0, 3]}))
    quiet = {"signals": {"enabled": False}}
    generate(llm, [prompt], greedy(1, steering_vectors=everywhere, consumers=quiet))
    [output] = generate(llm, [prompt], greedy(1, steering_vectors=some))
    assert output.signals["post_block:0"].positions.tolist() == [0, 3]


def test_which_signals_there_are_no_request_says(llm):
    """Numbers that there are not took the signals of all requests away."""
    [prompt] = prompts_of([20], seed=4)
    own = {"signals": {"names": {"x": 99}}}
    for more in ({}, {"steering_vectors": {"post_block": {1: ENTRY}}}):
        with pytest.raises(ValueError, match=r"unknown options \['names'\]; it takes enabled"):
            generate(llm, [prompt], greedy(1, consumers=own, **more))
    [output] = generate(llm, [prompt], greedy(1, steering_vectors={"post_block": {1: ENTRY}}))
    assert len(output.signals["post_block:0"].positions) == 20


@pytest.mark.parametrize("options", [{}, {"enabled": True}])
def test_signals_of_no_condition_are_refused(llm, options):
    """Who asked for them was given nothing, and not told."""
    [prompt] = prompts_of([20], seed=4)
    asked = {"consumers": {"signals": options}}
    for more in ({}, {"steering_vectors": {"post_block": {1: V}}}):
        with pytest.raises(ValueError, match=r"no condition to score; give steering with a 'when'"):
            generate(llm, [prompt], greedy(1, **asked, **more))
    conditional = {"steering_vectors": {"post_block": {1: ENTRY}}}
    [output] = generate(llm, [prompt], greedy(1, **asked, **conditional))
    assert len(output.signals["post_block:0"].positions) == 20
    off = {"consumers": {"signals": {"enabled": False}}}
    assert not generate(llm, [prompt], greedy(1, **off))[0].signals


@pytest.mark.parametrize("more", [{}, {"scope": "rest"}, {"over": "prompt_mean"}])
def test_a_scale_of_0_has_the_signals_of_any_other(llm, more):
    """As the plain request that others are compared with; its cached blocks are everybody's."""
    [prompt] = prompts_of([70], seed=4)
    plain = tokens_of(generate(llm, [prompt], greedy(6)))
    entry = {"vector": V, "scale": 0, "when": {**WHEN, **more, "name": "seen"}}
    never = {**entry, "scale": 1, "when": {**entry["when"], "above": 1e9}}
    asked = [greedy(6, steering_vectors={"post_block": {2: each}}) for each in (entry, never)]
    llm.reset_prefix_cache()
    seen, expected = (generate(llm, [prompt], params)[0] for params in asked)
    assert tokens_of([seen]) == tokens_of([expected]) == plain
    found, there = (output.outputs[0].signals["seen"] for output in (seen, expected))
    assert found.positions.tolist() == there.positions.tolist() != []
    assert found.scores == pytest.approx(there.scores, rel=1e-4, abs=1e-4)
    [off] = generate(llm, [prompt], greedy(6, steering_vectors={"post_block": {2: entry}}))
    assert len(off.outputs[0].signals["seen"].positions)
    [again] = generate(llm, [prompt], greedy(6))
    assert again.num_cached_tokens == 64, "what is only judged leaves the plain blocks"


def test_a_scale_of_0_has_its_own_tokens_beside_an_entry_with_the_same_condition(llm):
    """Which tokens a condition is judged for does not hang on what else has it."""
    [prompt] = prompts_of([40], seed=4)
    when = {**WHEN, "scope": "rest", "name": "seen"}
    few = {"vector": -V, "positions": [-3], "when": when}
    found = []
    for scale in (0, 1e-9):
        entries = [{"vector": V, "scale": scale, "when": when}, few]
        asked = greedy(6, steering_vectors={"post_block": {2: entries}})
        [output] = generate(llm, [prompt], asked)
        found.append((tokens_of([output]), output.outputs[0].signals["seen"].positions.tolist()))
    assert found[0] == found[1]
    assert found[0][1] == list(range(45))


def test_a_monitor_that_no_request_could_name_is_refused(llm):
    llm.steering.register_monitor("sad", WHEN)
    other = {**WHEN, "above": 9.0}
    with pytest.raises(ValueError, match="two conditions of monitor 'sad' are called 'sad'"):
        llm.steering.register_monitor("sad", {"any": ["sad", other]})
    with pytest.raises(ValueError, match="monitor 'many' has 33 distinct probes"):
        many = [{**WHEN, "above": i} for i in range(32)]
        llm.steering.register_monitor("many", {"any": many})
    assert llm.steering.monitors()["sad"]["above"] == 0.5
    llm.steering.unregister_monitor("sad")


def test_of_a_sequence_alone_only_the_tokens_that_an_entry_names_have_signals(llm):
    """Which they are is known when they are drawn: the plan of its steps goes on unchanged."""
    [prompt] = prompts_of([9], seed=4)
    tokens = tokens_of(generate(llm, [prompt], greedy(12)))[0]
    named = tokens[1::3]
    entry = {
        "vector": V,
        "when": {**WHEN, "above": 1e9, "name": "never"},
        "positions": {"phase": "generation", "token_ids": named},
    }
    asked = greedy(12, steering_vectors={"post_block": {1: entry}})
    [output] = generate(llm, [prompt], asked)
    assert tokens_of([output])[0] == tokens
    expected = [9 + i for i, token in enumerate(tokens[:-1]) if token in named]
    assert len(expected) < 11
    assert output.outputs[0].signals["never"].positions.tolist() == expected


@pytest.mark.parametrize("join", ["all", "any"])
def test_a_condition_joined_with_itself_is_the_condition(llm, join):
    [prompt] = prompts_of([30], seed=3)
    llm.steering.register_monitor("same", WHEN)
    joined = {join: [WHEN, "same", {**WHEN, "name": "again"}], "name": "joined"}
    once, twice = (
        generate(llm, [prompt], greedy(TOKENS, steering_vectors=at(("post_block", 1), entry)))[0]
        for entry in (ENTRY, {"vector": V, "when": joined})
    )
    llm.steering.unregister_monitor("same")
    assert tokens_of([once]) == tokens_of([twice])
    fired = once.signals["post_block:0"].fired.tolist()
    assert [p for p in twice.signals["joined"].fired if p >= 30] == [p for p in fired if p >= 30]
    assert set(twice.signals) == {"same", "again", "joined"}


def test_conditions_of_global_steering_of_modules_and_of_monitors(llm, reference):
    [prompt] = prompts_of([30], seed=3)
    plain = tokens_of(generate(llm, [prompt], greedy(TOKENS)))
    llm.steering.register_monitor("refusal", WHEN)
    assert llm.steering.monitors()["refusal"]["above"] == 0.5
    named = {"post_block": {1: {"vector": V, "when": "refusal"}}}
    twice = {"post_block": {1: ENTRY, -1: {**ENTRY, "scale": 2.0}}}
    llm.steering.register_module("calm", {"vectors": named})
    changes = [gated()]
    found = [tokens_of(generate(llm, [prompt], greedy(TOKENS, steering_vectors=named)))]
    found.append(tokens_of(generate(llm, [prompt], greedy(TOKENS, steering_module_ref="calm"))))
    llm.steering.register_monitor("refusal", {**WHEN, "above": 1e9})
    never = tokens_of(generate(llm, [prompt], greedy(TOKENS, steering_vectors=named)))
    assert never == plain
    found.append(tokens_of(generate(llm, [prompt], greedy(TOKENS, steering_module_ref="calm"))))
    llm.steering.unregister_module("calm")
    llm.steering.unregister_monitor("refusal")
    llm.steering.set(vectors=twice)
    assert llm.steering.status()["global"]["vectors"]["post_block"][1][0]["when"]["above"] == 0.5
    both = tokens_of(generate(llm, [prompt], greedy(TOKENS)))
    llm.steering.clear()
    changes = {0: [gated()], 1: [gated(), gated(add(V, 2.0), ("post_block", 3))]}
    for number, [tokens] in enumerate([found[0], both]):
        logits, _ = reference.run([*prompt, *tokens][:-1], (), (), (), changes[number])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert found[0] == found[1] == found[2]
    with pytest.raises(ValueError, match="no monitor 'refusal' is registered; registered are none"):
        generate(llm, [prompt], greedy(1, steering_vectors=named))
    with pytest.raises(ValueError, match="no monitor 'refusal' is registered"):
        llm.steering.unregister_monitor("refusal")


def test_requests_added_to_the_engine_itself_are_judged(llm, reference):
    """And a signal that is asked not to come does not, nor do those of plain requests."""
    engine, outputs = llm.llm_engine, {}
    [prompt] = prompts_of([30], seed=3)
    asked = {"steering_vectors": {"post_block": {1: ENTRY}}}
    quiet = {"consumers": {"signals": {"enabled": False}}}
    for name, more in {"mine": asked, "quiet": asked | quiet, "plain": {}}.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, greedy(TOKENS, **more))
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    change = gated()
    [tokens] = tokens_of([outputs["mine"]])
    logits, _ = reference.run([*prompt, *tokens][:-1], (), (), (), [change])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert tokens_of([outputs["quiet"]]) == [tokens] != tokens_of([outputs["plain"]])
    signal, [scores] = outputs["mine"].signals["post_block:0"], change.scores
    assert signal.scores == pytest.approx(scores[signal.positions].numpy(), rel=1e-4, abs=5e-3)
    assert {*range(len(prompt), len(scores))} <= {*signal.positions.tolist()}
    assert outputs["quiet"].signals == outputs["plain"].signals == {}


def test_signals_do_not_hang_on_what_other_requests_have(llm):
    """One begins alone; requests with more conditions come, and go before it ends."""
    engine, outputs = llm.llm_engine, {}
    first, second = prompts_of([20, 30], seed=5)

    def asking(**limits):
        whens = [{**WHEN, "name": name, "above": above} for name, above in limits.items()]
        return {"steering_vectors": {"post_block": {1: [{**ENTRY, "when": w} for w in whens]}}}

    one, many = asking(one=0.5), asking(low=0.1, middle=0.2, high=0.5)
    alone = {
        name: generate(llm, [prompt], greedy(count, **asked))[0]
        for name, prompt, count, asked in (("a", first, 40, one), ("b", second, 5, many))
    }
    llm.reset_prefix_cache()
    engine.add_request("a", {"prompt_token_ids": first}, greedy(40, **one))
    for step in range(100):
        if step == 7:
            engine.add_request("b", {"prompt_token_ids": second}, greedy(5, **many))
        outputs |= {output.request_id: output for output in engine.step()}
        if not engine.has_unfinished_requests():
            break
    for name, output in alone.items():
        expected, found = output.outputs[0].signals, outputs[name].outputs[0].signals
        assert expected.keys() == found.keys()
        for signal in expected:
            assert found[signal].positions.tolist() == expected[signal].positions.tolist()
            assert found[signal].scores == pytest.approx(
                expected[signal].scores, rel=1e-4, abs=1e-3
            )
    assert len(outputs["a"].outputs[0].signals["one"].positions) == len(first) + 39


def test_blocks_are_shared_where_conditions_are_the_same(llm):
    """Blocks of 32 tokens; what differs is only the condition."""
    [prompt] = prompts_of([100], seed=9)
    llm.reset_prefix_cache()

    def cached(**when):
        asked = {"steering_vectors": {"post_block": {1: {**ENTRY, "when": {**WHEN, **when}}}}}
        [output] = generate(llm, [prompt], greedy(1, **asked if when else {}))
        return output.num_cached_tokens

    assert [cached(), cached()] == [0, 96]
    assert [cached(above=0.5), cached(above=0.5, name="other")] == [0, 96]
    assert [cached(above=0.6), cached(above=0.5), cached()] == [0, 96, 96]
    assert [cached(soft=2.0), cached(soft=2.0), cached(probe={**WHEN["probe"], "bias": 1})] == [
        0,
        96,
        0,
    ]


PROBE = WHEN["probe"]


def mlp(widths, hidden=HIDDEN, out=1, **more):
    """A probe that is a small MLP of ones."""
    sizes = [hidden, *widths, out]
    layers = [(torch.ones(b, a), torch.ones(b)) for a, b in pairwise(sizes)]
    return {"hook": "post_block", "layer": 0, "layers": layers if widths else [], **more}


@pytest.mark.parametrize(
    ("when", "sentence"),
    [
        ({"probe": {**PROBE, "layer": 2}}, "computes after post_block of layer 1; give a probe at"),
        ({"probe": {**PROBE, "hook": "lm_head_in", "layer": None}}, "which the network computes"),
        ({"probe": {**PROBE, "layer": 9}}, r"\['when'\]\['probe'\]: post_block has no layer 9"),
        ({"probe": {**PROBE, "layer": None}}, "post_block needs a layer"),
        ({"probe": {**PROBE, "hook": "middle"}}, "unknown hook point 'middle'"),
        ({"probe": {**PROBE, "vector": [1.0, 2.0]}}, "has 2 numbers; the model's hidden size"),
        ({"probe": {**PROBE, "vector": [0.0] * HIDDEN}}, "all zeros"),
        ({"probe": {**PROBE, "vector": None}}, "has no 'vector'"),
        ({"probe": {**PROBE, "bias": "x"}}, r"\['bias'\]='x' is not a number"),
        ({"probe": {**PROBE, "score": "sum"}}, "choose one of"),
        ({"probe": {**PROBE, "sae": "x"}}, "a probe that is a feature of an autoencoder takes"),
        ({"probe": mlp([])}, r"\['layers'\] is \[\]; give a list of at least two layers"),
        ({"probe": mlp([8] * 5)}, "has 5 hidden layers; a probe may have at most 4"),
        ({"probe": mlp([65])}, r"\['layers'\]\[0\] has 65 outputs; hidden layers of a probe may"),
        ({"probe": mlp([8], out=2)}, r"\['layers'\]\[1\] has 2 outputs; the last layer of a probe"),
        ({"probe": mlp([8], hidden=7)}, r"\['layers'\]\[0\] takes 7 numbers; the model's hidden"),
        ({"probe": mlp([8], activation="sine")}, "choose one of relu, gelu, silu, tanh"),
        ({"probe": mlp([8], score="cosine")}, "the score is what the last layer gives; leave"),
        ({"probe": mlp([8], vector=[1.0])}, r"unknown keys \['vector'\]; a probe that is a small"),
        ({"probe": mlp([8], layers=[[[[1.0]], [1.0, 2.0]]] * 2)}, "give a weight .outputs, inputs"),
        ({"probe": mlp([8], layers=[[1.0]] * 2)}, r"\[0\] is \[1.0\]; give \[weight, bias\]"),
        ({"probe": {**PROBE, "more": 1}}, r"unknown keys \['more'\]; a probe takes"),
        ({"probe": [1.0]}, "give a mapping with hook, layer and vector"),
        ({"above": None}, r"none of above, below and between; give one"),
        ({"below": 1.0}, r"\['above', 'below'\] of above, below and between"),
        ({"above": None, "between": [2, 1]}, "give two numbers, the smaller first"),
        ({"above": None, "between": [1, 2], "soft": 1.0}, "the threshold as above or below"),
        ({"soft": -1.0}, "give a number above 0"),
        ({"probe": {**PROBE, "vector": 1e30 * P}}, "scores of rows may be beyond float32"),
        ({"above": None, "below": 0, "probe": {"sae": "s", "feature": 1}}, "would hold nowhere"),
        ({"above": float("nan")}, "is not finite"),
        ({"scope": "somewhere"}, r"\['scope'\]='somewhere' is not known; choose one of"),
        ({"over": 1}, r"\['over'\]=1 is not known; choose one of token, prompt_last"),
        ({"scope": "next", "over": "prompt_last"}, "decides for all tokens after it"),
        (
            {"scope": "rest", "probe": {**PROBE, "layer": 1}},
            "pass it together. Give a probe at an earlier place, or decode_steering_vectors",
        ),
        (
            {"scope": "next", "probe": {**PROBE, "layer": 2}},
            "at or before the place that it gates, or decode_steering_vectors",
        ),
        ({"name": ""}, "is no name"),
        ({"more": 1}, r"unknown keys \['more'\]; a condition takes"),
        ({"all": [WHEN]}, r"has \['probe', 'all'\] of probe, all and any; give one of them"),
    ],
)
def test_what_cannot_be_a_condition_is_refused_and_the_engine_goes_on(llm, when, sentence):
    [prompt] = prompts_of([12])
    asked = {"post_block": {1: {**ENTRY, "when": {**WHEN, **when}}}}
    with pytest.raises(ValueError, match=sentence):
        generate(llm, [prompt], greedy(TOKENS, steering_vectors=asked))
    assert generate(llm, [prompt], greedy(1))


@pytest.mark.parametrize(
    ("when", "sentence"),
    [
        (7, "is int; give the name of a registered monitor, or a mapping"),
        ("", "is empty"),
        ({}, "has none of probe, all and any"),
        ({"all": []}, "give a list of conditions"),
        ({"any": [{}]}, r"\['any'\]\[0\] has none of probe"),
        ({"any": [WHEN, "nobody"]}, "no monitor 'nobody' is registered"),
        ({"any": [WHEN], "above": 1}, r"unknown keys \['above'\]"),
    ],
)
def test_what_is_no_condition_is_refused(llm, when, sentence):
    [prompt] = prompts_of([12])
    with pytest.raises(ValueError, match=sentence):
        asked = {"post_block": {1: {"vector": V, "when": when}}}
        generate(llm, [prompt], greedy(TOKENS, steering_vectors=asked))


def test_so_many_conditions_that_a_row_has_no_room_are_refused(llm):
    [prompt] = prompts_of([12])
    entries = [{"vector": V, "when": {**WHEN, "above": i}} for i in range(33)]
    with pytest.raises(ValueError, match=r"33 distinct probes .* at most 32 are allowed"):
        generate(llm, [prompt], greedy(1, steering_vectors={"post_block": {1: entries}}))
    named = [{"vector": V, "when": {**WHEN, "above": i, "name": "sad"}} for i in range(2)]
    with pytest.raises(ValueError, match="are called 'sad'; give each its own"):
        generate(llm, [prompt], greedy(1, steering_vectors={"post_block": {1: named}}))
    both = {"post_block": {1: entries[:32]}}
    assert generate(llm, [prompt], greedy(1, steering_vectors=both))


def test_a_condition_with_the_name_of_a_global_one_is_refused_by_its_own_field(llm):
    [prompt] = prompts_of([12])
    entry = {"vector": V, "when": {**WHEN, "name": "sad"}}
    other = {**WHEN, "above": 77, "name": "sad"}
    own = {"post_block": {1: {"vector": V, "when": other}}}
    called = "two conditions of the request with global steering are called 'sad'"
    llm.steering.set({"post_block": {2: entry}})
    try:
        for field, asked, place in (
            ("steering_vectors", own, "steering_vectors['post_block'][1]['when']"),
            ("decode_steering_vectors", own, "decode_steering_vectors['post_block'][1]['when']"),
            ("stop_when", other, "stop_when"),
            ("abort_when", [other], "abort_when[0]"),
        ):
            with pytest.raises(ValueError) as refused:
                generate(llm, [prompt], greedy(1, **{field: asked}))
            assert str(refused.value) == f"{place}: {called}; give each its own 'name'"
            assert field_error(refused.value, {field: asked}).field == field
    finally:
        llm.steering.clear()
