"""Samples that a condition ends, and prompts that it refuses, against `transformers`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMClientError

import tllm.stores
from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.modes import Reader
from engine.reference import HIDDEN, Addition
from engine.test_conditions import BORDER, PLACES, SCORES, small_mlp
from tllm import BeamSearchParams, PoolingParams, SamplingParams
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.lens import LensConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.ports import ResidualStream
from tllm.runtime.kernels.backend import INTERPRETED

REQUESTS = 12 if INTERPRETED else 80
TOKENS = 6 if INTERPRETED else 14
CHANGE = 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))


@dataclass
class Probe:
    """One probe with a threshold: as asked, and what it says of rows."""

    asked: dict[str, Any]
    place: tuple[str, int | None]
    score: Any
    edge: float

    def holds(self, states):
        return self.score(states[self.place]) > self.edge

    def is_near(self, states):
        scores = self.score(states[self.place])
        return (scores - self.edge).abs() < BORDER * scores.abs().clamp(min=1)


@dataclass
class Request:
    """Conditions in the order in which they are asked, each joined of probes: all must hold."""

    prompt: list[int]
    stops: dict[str, list[Probe]] = field(default_factory=dict)
    aborts: dict[str, list[Probe]] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    additions: list[Addition] = field(default_factory=list)
    params: SamplingParams | None = None

    @property
    def places(self):
        joined = (*self.stops.values(), *self.aborts.values())
        return [probe.place for probes in joined for probe in probes]


class Maker:
    """Random requests that share prefixes."""

    def __init__(self, seed, reference):
        self.pick = random.Random(seed)
        self.vectors = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed))
        self.prefixes = prompts_of([33, 64, 40], seed)
        self.reference = reference
        self.names = 0

    def probe(self, prompt, share):
        """One that holds for about this share of the rows of a prompt."""
        place, vector = self.pick.choice(PLACES), self.pick.choice(self.vectors)
        kind = self.pick.choice(["dot", "dot", "cosine"])
        score = SCORES[kind](vector, 0.0)
        _, states = self.reference.run(prompt, [place])
        ordered = score(states[place]).unique()  # of equal tokens once
        below = int((1 - share) * (len(ordered) - 1))
        edge = float(ordered[below : below + 2].mean())
        probe = {"hook": place[0], "vector": vector, "score": kind}
        if place[1] is not None:
            probe["layer"] = place[1]
        return Probe({"probe": probe, "above": edge}, place, score, edge)

    def condition(self, prompt, share):
        self.names += 1
        name = f"c{self.names}"
        count = self.pick.choice([1, 1, 2])
        probes = [self.probe(prompt, share if count == 1 else share**0.5) for _ in range(count)]
        terms = [probe.asked for probe in probes]
        return name, ({"all": terms} if count > 1 else terms[0]) | {"name": name}, probes

    def request(self):
        pick = self.pick
        prompt = pick.choice(self.prefixes)[: pick.choice([20, 40, 64])]
        prompt = prompt + [pick.randrange(1, 250) for _ in range(pick.choice([0, 1, 9]))]
        request = Request(prompt)
        for kind, chance, share in (("stop", 0.7, 0.15), ("abort", 0.25, 0.02)):
            if pick.random() < chance:
                made = [self.condition(prompt, share) for _ in range(pick.choice([1, 1, 2]))]
                given = [asked for _, asked, _ in made]
                request.asked[f"{kind}_when"] = given[0] if len(given) == 1 else given
                getattr(request, f"{kind}s").update({name: probes for name, _, probes in made})
        if pick.random() < 0.3:
            request.asked["steering_vectors"] = {"post_block": {1: CHANGE}}
            request.additions = [Addition(("post_block", 1), CHANGE)]
        n = pick.choice([1, 1, 3])
        more = {"min_tokens": pick.choice([0, 0, 4]), "n": n, "logprobs": 1}
        make = greedy if n == 1 else sampled
        request.params = make(TOKENS, **request.asked, **more)
        return request


def fired(conditions, states, rows):
    """The first of `rows` for which a condition holds, and that condition; None for none."""
    held = {
        name: torch.stack([probe.holds(states) for probe in probes]).all(0)
        for name, probes in conditions.items()
    }
    for row in rows:
        for name, where in held.items():
            if where[row]:
                return row, name
    return None


def assert_ended_rightly(reference, request, sample):
    """How it ended; None where rounding decides."""
    prompt, tokens = request.prompt, list(sample.token_ids)
    logits, states = reference.run([*prompt, *tokens], request.places, request.additions)
    every = [*request.stops.values(), *request.aborts.values()]
    if any(bool(probe.is_near(states).any()) for probes in every for probe in probes):
        return None
    refused = fired(request.aborts, states, range(len(prompt)))
    if sample.finish_reason == "abort":
        names = [
            n for n in request.aborts if fired({n: request.aborts[n]}, states, range(len(prompt)))
        ]
        assert (tokens, sample.stop_reason) == ([], names[0])
        assert refused is not None and refused[0] in sample.signals[refused[1]].fired
        return "abort"
    assert refused is None
    if request.params.temperature == 0:
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(sample.logprobs) == len(tokens)
    first = len(prompt) + max(request.params.min_tokens, 1) - 1
    last = len(prompt) + len(tokens) - 1
    if sample.finish_reason == "stop":
        assert fired(request.stops, states, range(first, last + 1)) == (last, sample.stop_reason)
        signal = sample.signals[sample.stop_reason]
        assert signal.positions[-1] == signal.fired[-1] == last
        return "stop"
    assert (sample.finish_reason, len(tokens), sample.stop_reason) == ("length", TOKENS, None)
    # The last token of a sample that ends by its length passes through no model.
    assert fired(request.stops, states, range(first, last)) is None
    return "length"


def run_random(llm, reference, seed, count):
    maker, ended = Maker(seed, reference), []
    for _ in range(0, count, 12):
        requests = [maker.request() for _ in range(12)]
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
        for request, output in zip(requests, outputs, strict=True):
            ended += [assert_ended_rightly(reference, request, each) for each in output.outputs]
    kinds = ("stop", "length") if INTERPRETED else ("stop", "length", "abort")  # of few requests
    assert min(map(ended.count, kinds)) > len(ended) / 25
    assert ended.count(None) < len(ended) / 2
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["steering_configurations"] == 0 and stats["running_sequences"] == 0


def test_random_requests_end_where_transformers_says(llm, reference):
    """Prompts in chunks and cached, three samples, beside plain and steered requests."""
    run_random(llm, reference, 0, REQUESTS)


def test_random_requests_that_preempt_each_other_ahead_of_their_tokens(tight_llm, reference):
    """The next step is under way when a condition holds."""
    run_random(tight_llm, reference, 1, REQUESTS // 2)


PROMPT = prompts_of([30], seed=4)[0]
AT = "post_block", 2
P = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
WHEN = {"probe": {"hook": AT[0], "layer": AT[1], "vector": P}, "name": "turned"}


def threshold_that_ends(reference, after):
    """Tokens of the greedy answer, and a threshold that the row of its token `after`, and of none
    before, is above; the token must be the highest of those until then."""
    tokens = reference.greedy(PROMPT, TOKENS)
    _, states = reference.run([*PROMPT, *tokens], [AT])
    scores = (states[AT] @ P)[len(PROMPT) :]
    highest = [i for i in range(1, TOKENS - 1) if scores[i] > scores[:i].max()]
    end = min(highest, key=lambda i: abs(i - after))
    edge = float((scores[end] + scores[:end].max()) / 2)
    return tokens, end, edge


def test_ten_lines_that_a_user_writes(llm, reference):
    tokens, end, edge = threshold_that_ends(reference, 3)
    llm.steering.register_monitor("turned", {**WHEN, "above": edge})
    capture = {"memory": {"hooks": {"post_block": [2]}, "positions": "all"}}
    params = greedy(TOKENS, stop_when="turned", capture=capture)
    plain, output = generate(llm, [PROMPT, PROMPT], [greedy(TOKENS), params])
    llm.steering.unregister_monitor("turned")
    assert tokens_of([plain, output]) == [tokens, tokens[: end + 1]]
    (sample,) = output.outputs
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "turned")
    assert sample.signals["turned"].fired.tolist() == [len(PROMPT) + end]
    # As ever, the last token's row is not captured: of other ends it was never computed.
    rows = sample.activations["post_block"][2]
    assert len(rows) == len(PROMPT) + end


def test_a_prompt_is_refused_in_chunks_and_for_each_sample(llm, reference):
    """Of 60 tokens, 24 at a time, one fires; a request beside it that does not, is as ever."""
    [prompt] = prompts_of([60], seed=6)
    _, states = reference.run(prompt, [AT])
    ordered = (states[AT] @ P).sort()
    fires, edge = int(ordered.indices[-1]), float(ordered.values[-2:].mean())
    asked = {"abort_when": [{**WHEN, "above": 1e9, "name": "never"}, {**WHEN, "above": edge}]}
    beside = {"abort_when": {**WHEN, "above": edge + 100}}
    params = [sampled(3, n=3, **asked), greedy(3, **beside), greedy(3)]
    refused, *others = generate(llm, [prompt] * 3, params)
    for sample in refused.outputs:
        assert (list(sample.token_ids), sample.finish_reason) == ([], "abort")
        assert sample.stop_reason == "turned"
        assert sample.signals["turned"].fired.tolist() == [fires]
        assert sample.signals["turned"].positions.tolist() == list(range(60))
        assert sample.consumer_results["signals"].status == "ok"
    assert tokens_of(others) == [reference.greedy(prompt, 3)] * 2


def test_a_prompt_that_is_refused_ahead_of_its_tokens_has_signals_of_itself_alone(tight_llm):
    """The row of the token that was computed ahead is of no output."""
    [prompt] = prompts_of([5], seed=6)
    asked = {"abort_when": {**WHEN, "above": -1e9, "name": "unwanted"}}
    asked["stop_when"] = {**WHEN, "above": 1e9, "name": "never"}
    when = {**WHEN, "above": -1e9, "name": "turned"}
    asked["steering_vectors"] = {"post_block": {2: {"vector": P, "when": when}}}
    for n in (1, 2):
        [output] = generate(tight_llm, [prompt], sampled(8, n=n, **asked))
        for sample in output.outputs:
            assert (sample.token_ids, sample.stop_reason) == ([], "unwanted")
            positions = {name: each.positions.tolist() for name, each in sample.signals.items()}
            before = [*range(5)]
            assert positions == {"unwanted": before, "turned": before, "never": []}


@pytest.mark.parametrize("to_disk", [False, True], ids=["", "and a store"])
def test_each_row_of_a_prompt_that_is_refused_is_given_to_all_who_read(llm, tmp_path, to_disk):
    """Nothing was drawn, so no token is without a row; also where the engine tells which tokens
    there are, as it does for a store."""
    llm.register_consumer(FilesystemConsumer(tmp_path))
    llm.register_consumer(ProbeConsumer(P.numpy(), layer=1))
    names = ["memory", "filesystem"] if to_disk else ["memory"]
    capture = {name: {"hooks": {"post_block": [1]}} for name in names}
    asked = {"abort_when": {**WHEN, "above": -1e9}, "capture": capture}
    [output] = generate(llm, [PROMPT], greedy(4, **asked))
    (sample,) = output.outputs
    assert (sample.token_ids, sample.stop_reason) == ([], "turned")
    every = list(range(len(PROMPT)))
    rows = sample.activations["post_block"][1]
    assert rows.positions.tolist() == every
    scored = sample.consumer_results["probe"].payload
    assert scored.positions.tolist() == every
    torch.testing.assert_close(torch.as_tensor(scored.values), rows.tensor @ P)
    if to_disk:
        payload = sample.capture_results["filesystem"].payload
        record = tllm.stores.open(tmp_path).record(payload.request_id, tag=payload.tag)
        assert record.positions("post_block", 1).tolist() == every


def test_conditions_that_only_judge_share_blocks_with_everybody(llm, reference):
    llm.reset_prefix_cache()
    [prompt] = prompts_of([100], seed=9)
    stop = {"stop_when": {**WHEN, "above": 1e9}}
    cached = [
        output.num_cached_tokens
        for asked in (stop, {}, stop, {"abort_when": {**WHEN, "above": 1e9}}, {})
        for output in generate(llm, [prompt], greedy(2, **asked))
    ]
    assert cached == [0, 96, 96, 0, 96]


def test_a_step_at_a_time_and_a_request_that_asks_at_its_end(llm, reference):
    tokens, end, edge = threshold_that_ends(reference, 3)
    engine = llm.llm_engine
    for name, asked in (("a", {"stop_when": {**WHEN, "above": edge}}), ("b", {})):
        engine.add_request(name, {"prompt_token_ids": PROMPT}, greedy(TOKENS, **asked))
    given = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (sample,) = output.outputs
            given.setdefault(output.request_id, []).append(list(sample.token_ids))
            if output.finished:
                given[output.request_id].append(sample.stop_reason)
    assert given["a"][-3:] == [tokens[: end + 1], tokens[: end + 1], "turned"]
    assert given["b"][-2:] == [tokens, None]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"stop_when": "nobody"}, "stop_when: no monitor 'nobody' is registered"),
        ({"abort_when": ["nobody"]}, r"abort_when\[0\]: no monitor 'nobody' is registered"),
        ({"stop_when": []}, "stop_when is an empty list"),
        ({"stop_when": 3}, "stop_when=3 is int"),
        ({"stop_when": WHEN}, "stop_when has none of above, below and between"),
        (
            {"stop_when": {"probe": {**WHEN["probe"], "layer": 77}, "above": 1}},
            "post_block has no layer 77",
        ),
        (
            {"stop_when": {"probe": {**WHEN["probe"], "vector": [1.0]}, "above": 1}},
            "has 1 numbers; the model's hidden size",
        ),
        (
            {"stop_when": [{**WHEN, "above": 1}, {**WHEN, "above": 2}]},
            "two conditions of the request with global steering are called 'turned'",
        ),
        (
            {"stop_when": {**WHEN, "above": 1, "scope": "rest"}},
            "judged for each token .* leave scope out",
        ),
    ],
)
def test_what_cannot_end_a_request_is_refused(llm, asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(llm, [PROMPT], greedy(2, **asked))
    assert tokens_of(generate(llm, [PROMPT], greedy(1)))


def test_a_small_mlp_ends_samples_and_refuses_prompts(llm, reference):
    place = ("post_block", 1)
    probe, score = small_mlp(random.Random(2))
    probe |= {"hook": place[0], "layer": place[1]}
    [prompt] = prompts_of([30], seed=4)
    [free] = generate(llm, [prompt], greedy(8))
    tokens = list(free.outputs[0].token_ids)
    _, states = reference.run([*prompt, *tokens][:-1], [place])
    scores = score(states[place])
    of_prompt, generated = scores[:30], scores[30:]
    edge = float(generated.sort().values[-2:].mean())  # between the largest and the one before it
    [ended] = generate(llm, [prompt], greedy(8, stop_when={"probe": probe, "above": edge}))
    assert ended.outputs[0].stop_reason == "post_block:1"
    assert list(ended.outputs[0].token_ids) == tokens[: int(generated.argmax()) + 1]
    edges = of_prompt.sort().values[-2:].mean(), of_prompt.max() + 1
    for edge, refused in zip(map(float, edges), (True, False), strict=True):
        asked = greedy(8, abort_when={"probe": probe, "above": edge})
        [output] = generate(llm, [prompt], asked)
        assert output.outputs[0].stop_reason == ("post_block:1" if refused else None)
        assert list(output.outputs[0].token_ids) == ([] if refused else tokens)


def test_parameters_of_beams_are_refused_where_no_beams_are_searched(llm):
    with pytest.raises(VLLMClientError, match=r"BeamSearchParams was given.*to beam_search\(\)"):
        generate(llm, [PROMPT], BeamSearchParams(beam_width=2, max_tokens=2))
    assert not llm.llm_engine.has_unfinished_requests()


def test_beams_and_prompts_that_only_are_pooled_cannot_end(llm):
    beams = BeamSearchParams(beam_width=2, max_tokens=2, stop_when={**WHEN, "above": 1})
    with pytest.raises(VLLMClientError, match="a beam is computed by many requests"):
        llm.beam_search([{"prompt_token_ids": PROMPT}], beams)
    rows = ResidualStream.read(layer=0, site="post_block")
    for consumer in (LensConsumer([0]), Reader("rows", rows)):
        llm.register_consumer(consumer)
    for name in ("lens", "rows"):
        beams = BeamSearchParams(beam_width=2, max_tokens=1, consumers={name: {}})
        with pytest.raises(
            VLLMClientError, match=rf"consumers\['{name}'\] was asked, but a beam is"
        ):
            llm.beam_search([{"prompt_token_ids": PROMPT}], beams)
    for name in ("stop_when", "abort_when"):
        pooled = PoolingParams(task="embed", **{name: {**WHEN, "above": 1}})
        with pytest.raises(ValueError, match=f"{name} was given for pooling"):
            llm.llm_engine.add_request("pooled", {"prompt_token_ids": PROMPT}, pooled)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_condition_is_not_called_as_a_stop_string(llm):
    """Of a sample that ends by either, `stop_reason` would say the same."""
    for name in ("stop_when", "abort_when"):
        for stop in ("turned", ["over", "turned"]):
            params = SamplingParams(max_tokens=2, stop=stop, **{name: {**WHEN, "above": 1e9}})
            with pytest.raises(ValueError, match=f"{name}: the condition 'turned' is called as"):
                generate(llm, [PROMPT], params)
