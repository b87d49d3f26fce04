"""Speculative decoding: rows of accepted tokens are there once, those of rejected ones never were.

A tiny model hardly repeats itself. Requests that may draw few tokens do, so that some of what is
looked up in their own text comes true. What the drafters are made of is in `drafters.py`.
"""

import random
from collections import Counter
from itertools import product

import pytest
import torch
from beyond_interpreting import beyond_interpreting
from capture.truth import Truth
from packaging.version import Version
from vllm.v1.core.sched.interface import PauseState

import tllm.stores
from benchmarks.driven_lanes import DrivenLanes
from engine.adder import Adder
from engine.asking import (
    RELATIVE,
    assert_rows_match,
    error_of,
    generate,
    greedy,
    prompts_of,
    sampled,
)
from engine.drafters import DRAWN
from engine.drafting import INTERPRETED, METHODS, ON_V2, DraftedModel, however_drafted
from engine.guides import Guide
from engine.recorder import Recorder
from engine.reference import HIDDEN, Addition, GatedChange, PatchedRow, Reference
from engine.test_controllers import Gate, Watch, ends_of, watched
from engine.test_remembering import after, following, rest
from engine.test_remembering import of_prompt as of_prompt_rows
from engine.test_stopping import AT as WATCHED
from engine.test_stopping import WHEN, P
from tllm.consumers.base import Consumer
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.consumers.logging import LoggingConsumer
from tllm.consumers.next_token import NextTokenConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.engine import versions
from tllm.ports import ConsumerFlow, Logits, ResidualStream, Sampler, TokenTarget
from tllm.runtime.kernels import tap
from tllm.runtime.steps import Steps
from tllm.spec.request import RequestSpec

FEW = DRAWN
LENGTHS = [30, 20, 40, 25, 35, 3]
AT = ("post_block", 1)
GENERATOR = torch.Generator().manual_seed(11)
V, W = 5 * torch.randn(2, HIDDEN, generator=GENERATOR)


@pytest.fixture(scope="module", params=METHODS)
def drafting_model(request, tmp_path_factory, tiny_model):
    """How tokens are drafted, and for which model."""
    return DraftedModel.made(request.param, tmp_path_factory.mktemp("drafts"), tiny_model)


@pytest.fixture(scope="module")
def drafting_engine(drafting_model):
    return drafting_model.llm()


@pytest.fixture(scope="module")
def reference(drafting_model):
    return Reference(drafting_model.plain)


@pytest.fixture
def drafting(drafting_engine):
    yield drafting_engine
    drafting_engine.clear_consumers()
    drafting_engine.steering.clear()
    drafting_engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def truth(drafting_model):
    return Truth(drafting_model.plain)


@pytest.fixture
def preemptions(drafting, monkeypatch):
    counted = Counter()
    scheduler = drafting.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def count(request, *args, **kwargs):
        counted[request.request_id] += 1
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    return counted


@pytest.fixture
def guidable(drafting, drafting_model):
    if drafting_model.path.endswith("mimo"):
        pytest.skip("MiMo has no hook point lm_head_in, by whose rows candidates are guided")
    return drafting


class Drafts:
    """How many tokens an engine drafted, and accepted, since this was made."""

    def __init__(self, llm):
        self._llm = llm
        self._before = self._now()

    def _now(self):
        (stats,) = self._llm.intervention_stats()
        return stats["tokens_drafted"], stats["tokens_accepted"]

    def assert_some_came_true(self):
        drafted, accepted = (b - a for a, b in zip(self._before, self._now(), strict=True))
        assert 0 < accepted < drafted, (drafted, accepted)


@pytest.fixture
def drafts(drafting):
    return Drafts(drafting)


def few(count=40, **kwargs):
    return greedy(count, allowed_token_ids=FEW, **kwargs)


def assert_greedy(outputs, reference, additions=None):
    """Every token is the likeliest of the few, as `transformers` has it."""
    for output in outputs:
        for completion in output.outputs:
            prompt, tokens = list(output.prompt_token_ids), list(completion.token_ids)
            added = (additions or {}).get(output.request_id, [])
            logits, _ = reference.run([*prompt, *tokens][:-1], additions=added)
            likeliest = logits[len(prompt) - 1 :, FEW].argmax(-1)
            assert [FEW[i] for i in likeliest] == tokens, output.request_id


@beyond_interpreting
def test_each_token_of_the_output_gives_one_row_and_no_other_does(
    drafting, reference, preemptions, drafts
):
    windows = ["same_step", "next_step", "out_of_band", "background"]
    read = ResidualStream.read(layer=1, role="mid")
    recorders = [
        drafting.register_consumer(
            Recorder(ConsumerFlow(reads=[read], window=window), consumer_id=window)
        )
        for window in windows
    ]
    outputs = generate(drafting, prompts_of(LENGTHS, seed=2), few(36))
    drafting.synchronize()
    assert_rows_match(recorders[0], outputs, reference, {"mid": AT})
    first = recorders[0].rows("mid")
    for recorder in recorders[1:]:
        rows = recorder.rows("mid")
        assert rows.keys() == first.keys()
        assert all(torch.equal(rows[key], first[key]) for key in rows)
    assert_greedy(outputs, reference)
    drafts.assert_some_came_true()
    assert preemptions
    (stats,) = drafting.intervention_stats()
    assert stats["rows_dropped"] == 0
    assert stats["rows_captured"] >= len(first)


@beyond_interpreting
def test_logits_and_following_tokens_are_those_of_the_output(drafting, reference, drafts):
    reads = [ResidualStream.read(layer=1, role="mid"), TokenTarget.read(role="next")]
    recorder = drafting.register_consumer(
        Recorder(ConsumerFlow(reads=reads), ConsumerFlow(reads=[Logits.read()]))
    )
    outputs = generate(drafting, prompts_of(LENGTHS, seed=3), few(24))
    assert_rows_match(recorder, outputs, reference, {"mid": AT})
    following, logits = recorder.rows("next"), recorder.rows("logits", flow=1)
    expected = set()
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        tokens = [*prompt, *output.outputs[0].token_ids]
        found = [int(following[output.request_id, 0, i]) for i in range(len(tokens) - 1)]
        assert found == tokens[1:]
        truth, _ = reference.run(tokens[:-1])
        for position in range(len(prompt) - 1, len(tokens) - 1):
            key = (output.request_id, 0, position)
            expected.add(key)
            assert error_of(logits[key], truth[position]) < RELATIVE
    assert set(logits) == expected
    drafts.assert_some_came_true()


WRITTEN = torch.zeros(160, pin_memory=torch.cuda.is_available())
"""By position, whether `Writer` was given its logits, and the device has come to note it."""


class Writer(Consumer):
    """Keeps the device busy for a while, and then has it note on the host what was given."""

    consumer_id = "writer"

    def flows(self):
        return [ConsumerFlow(reads=[Logits.read()], delivery="device_lease")]

    def consume_bundle(self, bundle, ctx):
        if ctx.device.type == "cuda":
            torch.cuda._sleep(20_000_000)
        for position in bundle.meta.positions.tolist():
            WRITTEN[position].copy_(bundle.entries["logits"].new_ones(()), non_blocking=True)


def test_what_is_written_to_the_host_is_there_when_the_tokens_are(drafting, drafts):
    """As in a step without drafts, where consumers are called before the tokens are on their way:
    who is told of them may look."""
    drafting.register_consumer(Writer())
    WRITTEN.zero_()
    prompt = FEW * 5
    drafting.llm_engine.add_request("seen", {"prompt_token_ids": prompt}, few(36))
    told = []
    while drafting.llm_engine.has_unfinished_requests():
        for output in drafting.llm_engine.step():
            told.append(len(output.outputs[0].token_ids))
            assert WRITTEN[len(prompt) - 1 :][: told[-1]].all(), told
    assert told[-1] == 36
    drafts.assert_some_came_true()


@beyond_interpreting
@pytest.mark.parametrize("asked", [{"temperature": 0.4}, {"temperature": 1.4, "top_k": 2}])
def test_sampled_tokens_are_as_often_drawn_as_without_drafts(drafting, reference, drafts, asked):
    """On a CPU vLLM verifies drafts at any temperature, and a request with `top_k` ends it."""
    allowed = [*range(2, 6)]
    prompts = [random.Random(seed).choices(allowed, k=12) for seed in range(3)]
    # Seeds of their own: sample i of each prompt would be drawn with the same random numbers.
    params = [sampled(6, n=60, seed=1000 * i, allowed_token_ids=allowed, **asked) for i in range(3)]
    found, expected, variance = torch.zeros(3, len(allowed))
    known = {}
    for output in generate(drafting, prompts, params):
        for sample in output.outputs:
            tokens = list(sample.token_ids)
            before = (*output.prompt_token_ids, *tokens[:-1])
            if before not in known:
                logits = reference.run(before)[0][len(output.prompt_token_ids) - 1 :, allowed]
                if "top_k" in asked:
                    least = logits.topk(asked["top_k"]).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -torch.inf)
                known[before] = (logits / asked["temperature"]).softmax(-1)
            chances = known[before][1:]  # the first token is drawn without drafts
            expected += chances.sum(0)
            variance += (chances * (1 - chances)).sum(0)
            found += torch.bincount(torch.tensor(tokens[1:]) - allowed[0], minlength=len(allowed))
    assert ((found - expected).abs() < 4 * variance.sqrt() + 1).all(), (found, expected)
    drafts.assert_some_came_true()


def test_a_sequence_that_ends_among_accepted_tokens_has_no_rows_beyond(drafting, reference, drafts):
    read = ResidualStream.read(layer=1, role="mid")
    recorder = drafting.register_consumer(Recorder(ConsumerFlow(reads=[read])))
    many = [*range(2, 8)]
    pick = random.Random(4)  # what will be drawn stands in the prompts, too
    prompts = [pick.choices(many, k=length) for length in (25, 19, 24, 17, 20, 13)]
    outputs = generate(drafting, prompts, greedy(24, allowed_token_ids=many))
    by_length, by_token = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        together = accepted_positions(recorder, output.request_id, len(prompt))
        # A token whose row was computed, and which others followed, in one step with others.
        by_length += [(prompt, p - len(prompt) + 1) for p in together]
        by_token += [
            (prompt, tokens[p - len(prompt)])
            for p in together
            if tokens.index(tokens[p - len(prompt)]) == p - len(prompt)
        ]
    assert by_length
    assert by_token
    drafting.clear_consumers()
    recorder = drafting.register_consumer(Recorder(ConsumerFlow(reads=[read])))
    by_length, by_token = by_length[:6], by_token[:6]
    params = [greedy(length, allowed_token_ids=many) for _, length in by_length]
    params += [greedy(24, allowed_token_ids=many, stop_token_ids=[t]) for _, t in by_token]
    ended = generate(drafting, [p for p, _ in (*by_length, *by_token)], params)
    assert {output.outputs[0].finish_reason for output in ended} == {"length", "stop"}
    assert_rows_match(recorder, ended, reference, {"mid": AT})


def accepted_positions(recorder, request_id, prompt_len):
    """Generated tokens that were accepted, with another accepted after them in the same step."""
    steps = {}
    for call in recorder.log.calls:
        for name, position in zip(call.meta.request_ids, call.meta.positions, strict=True):
            if name == request_id:
                steps[int(position)] = call.step
    return [p for p in steps if p > prompt_len and steps[p] == steps.get(p - 1)]


@beyond_interpreting
def test_captures_are_of_the_tokens_of_the_output(drafting, truth, tmp_path, preemptions, drafts):
    (stats,) = drafting.intervention_stats()
    drafting.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    hooks = {"post_block": [0, -1], "mlp_out": "1:3"}
    if "lm_head_in" in stats["points"]:
        hooks["lm_head_in"] = "all"
    positions = [
        "all",
        "all_generated",
        "last_prompt",
        [0, 2, -1, 18],
        {"phase": "generation", "windows": [[1, 13]]},
        {"phase": "generation", "token_ids": [3]},
        {"token_ids": [*range(0, 256, 3)], "positions": [1]},
        "all_prompt",
    ]
    specs = [
        {"hooks": hooks, "positions": each, "reduction": how}
        for each, how in product(positions, ["none", "mean", "max", "last"])
    ]
    lengths = [9, 40, 30, 12, 33, 20, 5, 28]
    prompts = prompts_of([lengths[i % 8] for i in range(len(specs))], seed=5)
    params = [
        few(16, capture={"memory": spec, "filesystem": spec | {"request_id": f"r{i}"}})
        for i, spec in enumerate(specs)
    ]
    outputs = generate(drafting, prompts, params)
    store = tllm.stores.open(tmp_path)
    for i, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
        truth.check(output, spec)
        assert output.capture_results["filesystem"].status == "ok"
        kept = output.activations["post_block"][0].tensor
        assert torch.equal(store.record(f"r{i}").tensor("post_block", 0), kept)
    drafts.assert_some_came_true()


@however_drafted
@beyond_interpreting
def test_samples_have_rows_of_their_own_and_share_the_prompt(drafting, truth, drafts):
    spec = {"hooks": {"post_block": [2]}, "positions": "all_generated"}
    params = sampled(16, n=3, allowed_token_ids=FEW[-2:], capture={"memory": spec})
    for _ in range(2):  # the second time, prompts come from the prefix cache
        for output in generate(drafting, prompts_of([33, 64], seed=6), params):
            truth.check(output, spec)
    drafts.assert_some_came_true()


def test_drafts_are_verified_by_the_steered_model(drafting, reference, drafts):
    recorder = drafting.register_consumer(
        Recorder(ConsumerFlow(reads=[ResidualStream.read(layer=2, role="later")]))
    )
    drafting.steering.set(decode_vectors={AT[0]: {AT[1]: 0.3 * W}})
    drafting.steering.register_module("module", {"decode_vectors": {AT[0]: {AT[1]: W}}})
    asked = [
        {"steering_vectors": {AT[0]: {AT[1]: V}}},
        {},
        {"decode_steering_vectors": {AT[0]: {AT[1]: V}}},
        {"prefill_steering_vectors": {AT[0]: {AT[1]: V}}, "steering_module_ref": "module"},
        {"steering_vectors": {AT[0]: {AT[1]: {"vector": V, "positions": {"ranges": [[41, 47]]}}}}},
        {"steering_vectors": {AT[0]: {AT[1]: {"vector": V, "positions": GENERATED_SEVENS}}}},
    ]
    everyone = 0.3 * W
    outputs = generate(drafting, prompts_of(LENGTHS, seed=7), [few(24, **each) for each in asked])
    additions = {}
    for i, output in enumerate(outputs):
        prompt_len = len(output.prompt_token_ids)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        added = [Addition(AT, everyone, start=prompt_len)]
        added += {
            0: [Addition(AT, V)],
            1: [],
            2: [Addition(AT, V, start=prompt_len)],
            3: [Addition(AT, V, stop=prompt_len), Addition(AT, W, start=prompt_len)],
            4: [Addition(AT, V, start=41, stop=47)],
            5: [
                Addition(AT, V, start=p, stop=p + 1)
                for p in range(prompt_len, len(tokens))
                if tokens[p] == 7
            ],
        }[i]
        additions[output.request_id] = added
    assert_greedy(outputs, reference, additions)
    assert_rows_match(
        recorder, outputs, reference, {"later": ("post_block", 2)}, additions=additions
    )
    drafts.assert_some_came_true()


@pytest.mark.skipif(not ON_V2, reason="the V1 runner has a step's tokens when the step ends")
def test_steps_that_go_on_alike_are_waited_for_by_nobody(
    drafting, drafting_model, reference, drafts, monkeypatch
):
    """The same is done to their rows wherever they begin. Which drafts were accepted is asked when
    later steps are under way, also where requests begin and end meanwhile."""
    begun, begin = Counter(), Steps.begin_undecided

    def counted(*args):
        alike = begin(*args)
        begun[alike] += 1
        return alike

    monkeypatch.setattr(Steps, "begin_undecided", counted)
    places = [("post_block", 0), ("post_block", 3), ("mlp_out", 1)]
    capture = {"memory": {"hooks": {"post_block": [0, 3], "mlp_out": [1]}}}
    steered = {"decode_steering_vectors": {AT[0]: {AT[1]: V}}}
    asked = [few(n, capture=capture) for n in (30, 9, 18, 24)]
    asked = [few(50, capture=capture, **steered), *asked]
    outputs = generate(drafting, prompts_of([20, 24, 11, 7, 15], seed=21), asked)
    additions = {outputs[0].request_id: [Addition(AT, V, start=20)]}
    assert_greedy(outputs, reference, additions)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        added = additions.get(output.request_id, [])
        _, states = reference.run(tokens, places, additions=added)
        for point, layer in places:
            rows = output.activations[point][layer]
            assert rows.positions.tolist() == list(range(len(tokens)))
            for mine, theirs in zip(rows.tensor, states[point, layer], strict=True):
                assert error_of(mine, theirs) < RELATIVE, (point, layer)
    drafts.assert_some_came_true()
    if drafting_model.speculative_config["method"] != "ngram":  # as many drafts in each step
        assert begun[True] > 6 * begun[False], begun


def test_a_request_that_is_steered_begins_beside_others_that_are_not(drafting, reference, drafts):
    """Nobody has waited for the steps before, in which nothing was done, nor does for those after:
    where the others are is asked of the device once."""
    prompts, engine, ended = prompts_of([20, 9, 14], seed=23), drafting.llm_engine, {}

    def step():
        ended.update({output.request_id: output for output in engine.step() if output.finished})

    def add(number, count, **asked):
        prompt = {"prompt_token_ids": prompts[number]}
        engine.add_request(str(number), prompt, few(count, **asked))

    add(0, 40)
    add(1, 24)
    for _ in range(5):
        step()
    add(2, 12, decode_steering_vectors={AT[0]: {AT[1]: V}})
    while engine.has_unfinished_requests():
        step()
    outputs = [ended[str(number)] for number in range(3)]
    assert_greedy(outputs, reference, {"2": [Addition(AT, V, start=14)]})
    drafts.assert_some_came_true()


GENERATED_SEVENS = {"phase": "generation", "token_ids": [7]}


def test_blocks_of_steered_drafts_are_found_by_nobody_else(drafting, reference, drafts):
    steered = {"decode_steering_vectors": {AT[0]: {AT[1]: V}}}
    prompts = prompts_of([33, 20], seed=8)
    outputs = generate(drafting, prompts, few(**steered))
    additions = {o.request_id: [Addition(AT, V, start=len(o.prompt_token_ids))] for o in outputs}
    assert_greedy(outputs, reference, additions)
    answered = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    assert_greedy(generate(drafting, answered, few(20)), reference)
    again = generate(drafting, prompts, few(**steered))
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    drafts.assert_some_came_true()


@beyond_interpreting
def test_what_a_consumer_adds_reaches_drafts_too(drafting, reference, drafts):
    drafting.register_consumer(Adder(AT, V, phase="decode"))
    read = ResidualStream.read(layer=2, role="later")
    recorder = drafting.register_consumer(Recorder(ConsumerFlow(reads=[read])))
    outputs = generate(drafting, prompts_of(LENGTHS, seed=9), few(24))
    additions = {o.request_id: [Addition(AT, V, start=len(o.prompt_token_ids))] for o in outputs}
    assert_greedy(outputs, reference, additions)
    later = {"later": ("post_block", 2)}
    assert_rows_match(recorder, outputs, reference, later, additions=additions)
    drafts.assert_some_came_true()


@beyond_interpreting
def test_drafts_are_verified_by_the_patched_model(drafting, reference, drafts):
    """Of positions that are generated, too, which a step may compute among its drafts."""
    prompts = prompts_of([20, 31, 12, 25], seed=10)
    places = {"post_block": ("post_block", 1), "mlp_out": ("mlp_out", 2)}
    params, patches = [], {}
    for i, (prompt, place) in enumerate(zip(prompts, [*places.values()] * 2, strict=True)):
        positions = [len(prompt) - 1, *range(len(prompt) + 1, len(prompt) + 12)][:: 1 + i // 2]
        source = {"tensor": 3 * torch.randn(HIDDEN, generator=GENERATOR)}
        entry = {"hook": place[0], "layer": place[1], "positions": positions, "source": source}
        params.append(few(24, patch=[entry]))
        patches[i] = [PatchedRow(place, p, source["tensor"]) for p in positions]
    outputs = generate(drafting, prompts, params)
    for i, output in enumerate(outputs):
        prompt, tokens = prompts[i], list(output.outputs[0].token_ids)
        logits, _ = reference.run([*prompt, *tokens][:-1], patches=patches[i])
        likeliest = logits[len(prompt) - 1 :, FEW].argmax(-1)
        assert [FEW[i] for i in likeliest] == tokens
    drafts.assert_some_came_true()


@beyond_interpreting
def test_shipped_consumers_count_and_score_accepted_tokens_only(
    drafting, truth, reference, preemptions, drafts
):
    weights = torch.randn(2, HIDDEN, generator=GENERATOR)
    drafting.register_consumer(ProbeConsumer(weights.numpy(), layer=2))
    drafting.register_consumer(NextTokenConsumer())
    logging = drafting.register_consumer(LoggingConsumer(layers=[1]))
    asked = {"next_token": {"token_ids": FEW}}
    outputs = generate(drafting, prompts_of(LENGTHS, seed=12), few(36, consumers=asked))
    norms = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        states, prompt_len = truth.states(tokens), len(output.prompt_token_ids)
        scored = output.consumer_results["probe"].payload
        assert scored.positions.tolist() == list(range(len(tokens)))
        scores = states["post_block", 2] @ weights.T
        torch.testing.assert_close(torch.as_tensor(scored.values), scores, rtol=2e-5, atol=2e-3)
        said = output.consumer_results["next_token"].payload
        assert said.positions.tolist() == list(range(prompt_len - 1, len(tokens)))
        logits, _ = reference.run(tokens)
        expected = logits.log_softmax(-1)[prompt_len - 1 :, FEW]
        torch.testing.assert_close(torch.as_tensor(said.values), expected, rtol=2e-5, atol=2e-4)
        norms += states["post_block", 1][prompt_len:].norm(dim=-1).tolist()
    counted = logging.read_stats()["layers"][1]["decode"]
    assert counted["rows"] == len(norms)
    assert counted["mean_norm"] == pytest.approx(sum(norms) / len(norms), rel=2e-5)
    drafts.assert_some_came_true()
    assert preemptions


@pytest.mark.skipif(ON_V2, reason="there, drafters are inside what the runner calls")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has no PyTorch reference of the tap to count"
)
def test_a_drafter_runs_no_tap(drafting, drafting_model, monkeypatch):
    """Neither as it is nor in the graph that it is compiled to, which is another than the model's,
    with the modules that they share."""
    core = drafting.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    graphs = {
        name
        for name, model in (("model", runner.get_model()), ("drafter", runner.get_draft_model()))
        for module in ([] if model is None else model.modules())
        if not getattr(module, "do_not_compile", True)
    }
    drafter = set() if runner.get_draft_model() is None else {"drafter"}
    assert graphs == ({"model"} | drafter if drafting_model.compiled else set())
    now, tapped_in = "model", Counter()
    propose, reference = runner.drafter.propose, tap.reference

    def drafts(*args, **kwargs):
        nonlocal now
        now = "drafter"
        try:
            return propose(*args, **kwargs)
        finally:
            now = "model"
            tapped_in["proposals"] += 1

    def counted(*args):
        tapped_in[now] += 1
        return reference(*args)

    monkeypatch.setattr(runner.drafter, "propose", drafts)
    monkeypatch.setattr(tap, "reference", counted)
    drafting.register_consumer(LoggingConsumer(layers="0-3"))
    generate(drafting, prompts_of([9, 20], seed=14), few(8))
    assert tapped_in["model"] > 0 and tapped_in["proposals"] > 0
    assert tapped_in["drafter"] == 0


@pytest.mark.parametrize("count", [3 if INTERPRETED else 14])
def test_nothing_is_drafted_beside_requests_that_are_guided(
    guidable, reference, drafts, monkeypatch, caplog, count
):
    """So each of their tokens is drawn of candidates, and others are as ever."""
    drafting = guidable
    monkeypatch.setattr(
        drafting.llm_engine.engine_core.engine_core.scheduler, "_tllm_told_of_guides", False
    )
    guide = drafting.register_consumer(Guide(boost=1000.0))
    lengths = LENGTHS[: 2 if INTERPRETED else None]
    alone = {"consumers": {"guide": {"enabled": False}}}
    params = [sampled(count, top_k=9), few(count, **alone)]
    scheduler = drafting.llm_engine.engine_core.engine_core.scheduler
    steps, schedule = [], scheduler.schedule

    def noted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append((output.num_scheduled_tokens, output.scheduled_spec_decode_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    prompts = prompts_of(lengths, seed=31)
    outputs = generate(drafting, prompts, [params[i % 2] for i in range(len(prompts))])
    guided = {o.request_id: o for o in outputs[::2]}
    beside = [drafted for tokens, drafted in steps if {i.split("-")[0] for i in tokens} & {*guided}]
    assert len(beside) >= count and not any(beside)
    assert caplog.text.count("speculative decoding drafts nothing for any request") == 1
    assert_greedy(outputs[1::2], reference)
    assert len(guide.seen) == count * len(guided)
    for row in guide.seen:
        output = guided[row.request_id]
        drawn = output.outputs[0].token_ids[row.position + 1 - len(output.prompt_token_ids)]
        assert drawn == row.token_ids[int(row.logits.argmin())]
    assert_greedy(generate(drafting, prompts, few(6 if INTERPRETED else 40, **alone)), reference)
    drafts.assert_some_came_true()


class Guiding(Consumer):
    """Says after which rows it was shown candidates, and reads none itself."""

    consumer_id = "guiding"

    def start(self, ctx):
        self.positions = []

    def flows(self):
        return [ConsumerFlow(writes=[Sampler.write(phase="any", width=64)])]

    def guide(self, candidates, ctx):
        self.positions += candidates.meta.positions.tolist()

    def on_request_finished(self, request, ctx):
        return self.positions


def test_a_guided_request_whose_prompt_is_cached_is_guided_from_its_first_token(
    drafting, drafting_model, reference
):
    """To one of which a single token is to be computed vLLM gives drafts that nobody has made."""
    [prompt] = prompts_of([33], seed=34)
    assert_greedy(generate(drafting, [prompt], few(2)), reference)
    drafting.register_consumer(Guiding())
    [output] = generate(drafting, [prompt], sampled(3, top_k=9))
    if drafting_model.speculative_config["method"] == "ngram":  # the last block is the drafter's
        assert output.num_cached_tokens == 32
    assert output.consumer_results["guiding"].payload == [32, 33, 34]


def test_a_guide_that_comes_later_leaves_requests_alone_that_are_drafted(
    guidable, reference, drafts
):
    """What came before it is drafted to its end."""
    engine, count = guidable.llm_engine, 12 if INTERPRETED else 30
    [prompt] = prompts_of([20], seed=32)
    engine.add_request("drafted", {"prompt_token_ids": prompt}, few(count))
    guide = None
    outputs = []
    for step in range(100):
        if not engine.has_unfinished_requests():
            break
        if step == 3:
            guide = guidable.register_consumer(Guide(boost=1000.0))
        outputs += [output for output in engine.step() if output.finished]
    assert guide is not None and not guide.seen
    assert_greedy(outputs, reference)
    drafts.assert_some_came_true()


@beyond_interpreting
def test_esamp_trains_and_guides_where_others_are_drafted(guidable):
    esamp = guidable.register_consumer(ESampConsumer(ESampConsumerConfig(width=16, rank=8)))
    outputs = generate(guidable, prompts_of(LENGTHS, seed=33), sampled(12, top_k=9))
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    stats = esamp.read_stats()
    assert stats["rows_trained"] > 0
    assert stats["candidates_seen"] >= 11 * 9 * len(LENGTHS) and stats["candidates_changed"] > 0


@beyond_interpreting
def test_conditions_judge_each_token_and_tell_of_none_that_was_rejected(
    drafting, reference, drafts
):
    """Some of the requests have one; a rejected draft was judged, and is nobody's."""
    prompts = prompts_of(LENGTHS, seed=7)
    probe = {"hook": "post_block", "layer": 0, "vector": W}
    when = {"probe": probe, "above": 0.5, "name": "gate"}
    asked = {"post_block": {1: {"vector": 0.3 * V, "when": when}}}
    params = [few(36, steering_vectors=asked if i % 2 else None) for i in range(len(prompts))]
    for i, output in enumerate(generate(drafting, prompts, params)):
        tokens = [*prompts[i], *output.outputs[0].token_ids][:-1]
        change = GatedChange(
            AT, lambda h: h + 0.3 * V, [(("post_block", 0), lambda h: h @ W)], fires_above_half
        )
        logits, _ = reference.run(tokens, gated=[change] if i % 2 else [])
        likeliest = logits[len(prompts[i]) - 1 :, FEW].argmax(-1)
        assert [FEW[token] for token in likeliest] == list(output.outputs[0].token_ids)
        if i % 2:
            signal = output.outputs[0].signals["gate"]
            assert signal.positions.tolist() == list(range(len(tokens)))
            assert signal.scores == pytest.approx(change.scores[0].numpy(), abs=2e-3)
        else:
            assert output.outputs[0].signals == {}
    drafts.assert_some_came_true()


PROBED = ("post_block", 1)
REMEMBERING = [
    # What decides, on what, for which tokens: before its probe in the network, at it, and after it.
    ({"scope": "rest"}, ("post_block", 0), "decode_steering_vectors"),
    ({"scope": "next"}, ("attn_out", 0), "decode_steering_vectors"),
    ({"scope": "rest"}, ("post_block", 1), "decode_steering_vectors"),
    ({"scope": "next"}, ("post_block", 2), "steering_vectors"),
    ({"scope": "rest"}, ("mlp_out", 2), "steering_vectors"),
    ({"over": "prompt_mean"}, ("post_block", 0), "decode_steering_vectors"),
    ({"over": "prompt_last", "scope": "conversation"}, ("attn_in", 2), "steering_vectors"),
    ({"scope": "conversation"}, ("pre_attn", 1), "decode_steering_vectors"),
]
REMEMBERED = 10 if INTERPRETED else 36


@however_drafted
def test_conditions_that_remember_decide_as_without_drafts(
    drafting, reference, preemptions, drafts
):
    """Of accepted tokens alone, and from the very next token on, which may be drafted already."""
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(len(REMEMBERING))]
    prompts = prompts_of(lengths, seed=17)
    params, changes = [], []
    for prompt, case in zip(prompts, REMEMBERING, strict=True):
        asked, change = remembered(reference, prompt, *case)
        capture = {"memory": {"hooks": {"post_block": [2]}}}
        params.append(few(REMEMBERED, **asked, capture=capture, logprobs=1))
        changes.append(change)
    late = 0
    for prompt, output, change in zip(
        prompts, generate(drafting, prompts, params), changes, strict=True
    ):
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        logits, states = reference.run([*prompt, *tokens][:-1], [("post_block", 2)], gated=[change])
        drawn_from = logits[len(prompt) - 1 :]
        assert [FEW[i] for i in drawn_from[:, FEW].argmax(-1)] == tokens
        ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        theirs = drawn_from.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ours == pytest.approx(theirs.tolist(), abs=1e-3)
        rows = sample.activations["post_block"][2]
        assert rows.positions.tolist() == list(range(len(prompt) + len(tokens) - 1))
        for row, expected in zip(rows.tensor, states["post_block", 2], strict=True):
            assert error_of(row, expected) < RELATIVE
        signal = sample.signals["turns"]
        assert signal.scores == pytest.approx(
            change.scores[0][signal.positions].numpy(), rel=1e-4, abs=5e-3
        )
        late += len(signal.fired) > 0 and signal.fired[0] > len(prompt)
    assert late
    drafts.assert_some_came_true()
    assert INTERPRETED or preemptions


def remembered(reference, prompt, when, place, field):
    """A request with a condition that holds for some tokens and not for others; and its meaning."""
    plain, of_prompt = list(prompt), "over" in when
    for _ in range(REMEMBERED):
        logits, states = reference.run(plain, [PROBED])
        plain.append(FEW[int(logits[-1, FEW].argmax())])
    start = len(prompt) if field.startswith("decode") else 0
    scores, kind = (states[PROBED] @ W)[start:], when.get("over", when.get("scope"))
    early, highest = scores[: len(prompt) - start + 4].max(), scores.max()
    # What lasts should hold late, if it can.
    edge = float(scores.median() if kind == "next" else (early + highest) / 2)
    if early == highest:
        edge = float(scores.topk(2).values.mean())
    score = (
        (lambda h: h @ W) if not of_prompt else of_prompt_rows(lambda h: h @ W, len(prompt), kind)
    )
    if of_prompt:
        edge = float(score(states[PROBED])[0]) - 1
        start = 0
    recall = {"rest": rest, "conversation": rest, "next": following}.get(kind, after(len(prompt)))
    probe = {"hook": PROBED[0], "layer": PROBED[1], "vector": W}
    condition = {"probe": probe, "above": edge, "name": "turns", **when}
    change = GatedChange(
        place,
        lambda h: h + 0.3 * V,
        [(PROBED, score)],
        lambda found: (found[0] > edge).float(),
        start,
        recall=recall,
    )
    entry = {"vector": 0.3 * V, "when": condition}
    return {field: {place[0]: {place[1]: entry}}}, change


@however_drafted
@beyond_interpreting
@pytest.mark.parametrize("ending", [False, True], ids=["", "that may end it"])
def test_a_conversation_hears_nothing_of_rejected_drafts(drafting, reference, drafts, ending):
    """Nor of rows beyond the end of a sequence that ends among accepted tokens, also where a
    condition would end it there."""
    [prompt] = prompts_of([20], seed=18)
    whole = list(generate(drafting, [prompt], few(36))[0].outputs[0].token_ids)
    _, states = reference.run([*prompt, *whole][:-1], [PROBED])
    scores = (states[PROBED] @ W)[len(prompt) :]
    counts, params = range(2, 36), []
    for count in counts:
        name, probe = f"until {count}", {"hook": PROBED[0], "layer": PROBED[1], "vector": W}
        judged = scores[: count - 1]  # the last token's row is not judged
        # Holds for no token of the output; scores are hundreds, and a GPU adds up in another order.
        when = {"probe": probe, "above": float(judged.max()) + 0.05, "scope": "conversation"}
        asked = {"decode_steering_vectors": {"post_block": {0: {"vector": 30 * V, "when": when}}}}
        asked["conversation"] = {"id": name, "key": "a secret of this test"}
        if ending:
            asked["stop_when"] = {"probe": probe, "above": when["above"], "name": "beyond"}
        params.append(few(count, **asked))
    for turn in ("first", "second"):  # each of all conversations at once
        outputs = generate(drafting, [prompt] * len(counts), params)
        for count, output in zip(counts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == whole[:count], (turn, count)
    for count in counts:
        drafting.steering.forget_conversation(f"until {count}")
    drafts.assert_some_came_true()


@however_drafted
@beyond_interpreting
def test_a_conversation_hears_nothing_of_one_whose_place_it_has(drafting, reference, drafts):
    """A conversation is forgotten while a request of it runs, and what holds for that request is
    not remembered by the one that begins then."""
    prompts = prompts_of([20, 31], seed=19)
    plain = [list(o.outputs[0].token_ids) for o in generate(drafting, prompts, few(36))]
    highest = []
    for prompt, tokens in zip(prompts, plain, strict=True):
        _, states = reference.run([*prompt, *tokens][:-1], [PROBED])
        highest.append(float((states[PROBED] @ W)[len(prompt) :].max()))
    holds, quiet = sorted(range(2), key=lambda i: -highest[i])
    edge = (highest[holds] + highest[quiet]) / 2
    probe = {"hook": PROBED[0], "layer": PROBED[1], "vector": W}
    when = {"probe": probe, "above": edge, "scope": "conversation", "name": "turned"}

    def begin(name, conversation, which):
        asked = {"decode_steering_vectors": {"post_block": {0: {"vector": 30 * V, "when": when}}}}
        asked["conversation"] = {"id": conversation, "key": f"a secret of {conversation}"}
        prompt = {"prompt_token_ids": prompts[which]}
        drafting.llm_engine.add_request(name, prompt, few(36, **asked))

    def run():
        while drafting.llm_engine.has_unfinished_requests():
            for output in drafting.llm_engine.step():
                (ended[output.request_id],) = output.outputs

    ended = {}
    begin("forgotten", "old one", holds)
    drafting.steering.forget_conversation("old one")
    begin("first", "new one", quiet)
    run()
    begin("second", "new one", quiet)
    run()
    drafting.steering.forget_conversation("new one")
    assert len(ended["forgotten"].signals["turned"].fired)
    for name in ("first", "second"):
        assert list(ended[name].token_ids) == plain[quiet], name
        assert not len(ended[name].signals["turned"].fired)
    drafts.assert_some_came_true()


@however_drafted
@beyond_interpreting
def test_a_condition_ends_samples_among_tokens_that_were_accepted_at_once(
    drafting, reference, drafts
):
    prompts = prompts_of(LENGTHS, seed=7)
    plain = generate(drafting, prompts, few(36))
    params, expected = [], []
    for prompt, output in zip(prompts, plain, strict=True):
        tokens = list(output.outputs[0].token_ids)
        _, states = reference.run([*prompt, *tokens][:-1], [AT])
        scores = (states[AT] @ W)[len(prompt) :]
        end = max(i for i in range(len(scores)) if scores[i] == scores[: i + 1].max())
        edge = float(scores[end] + scores[:end].max()) / 2 if end else float(scores[0]) - 1
        probe = {"hook": AT[0], "layer": AT[1], "vector": W}
        stop = {"probe": probe, "above": edge, "name": "highest"}
        capture = {"memory": {"hooks": {AT[0]: [AT[1]]}}}
        params.append(few(36, stop_when=stop, capture=capture))
        expected.append(tokens[: end + 1])
    drafting.register_consumer(ProbeConsumer(W.numpy(), layer=2))  # is given rows beyond the end
    outputs = generate(drafting, prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    for prompt, tokens, output in zip(prompts, expected, outputs, strict=True):
        (sample,) = output.outputs
        assert (sample.finish_reason, sample.stop_reason) == ("stop", "highest")
        last = len(prompt) + len(tokens) - 1
        assert sample.signals["highest"].positions.tolist() == list(range(len(prompt), last + 1))
        assert sample.signals["highest"].fired.tolist() == [last]
        assert sample.activations[AT[0]][AT[1]].positions.tolist() == list(range(last))
        scored = output.consumer_results["probe"].payload
        assert scored.positions.tolist() == list(range(last))
    drafts.assert_some_came_true()


def fires_above_half(scores):
    return (scores[0] > 0.5).float()


def edges_of(reference, outputs):
    """For each sample a threshold that one to four of its rows are above."""
    found = []
    for number, output in enumerate(outputs):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        _, states = reference.run(tokens, [WATCHED])
        ordered = (states[WATCHED] @ P)[len(output.prompt_token_ids) : -1].sort().values
        at = len(ordered) - 1 - number % 4
        found.append(float((ordered[at] + ordered[at - 1]) / 2))
    return found


@however_drafted
@beyond_interpreting
def test_a_rule_in_python_ends_a_sample_where_a_condition_does(drafting, reference, drafts):
    """Also where that token is followed by others that came true in the same pass."""
    prompts = prompts_of(LENGTHS, seed=23)
    edges = edges_of(reference, generate(drafting, prompts, few(36)))
    asked = [few(36, stop_when={**WHEN, "above": edge}) for edge in edges]
    declared = ends_of(generate(drafting, prompts, asked))
    drafting.register_consumer(Watch("same_step"))
    outputs = generate(drafting, prompts, [few(36, **watched(edge)) for edge in edges])
    assert ends_of(outputs) == declared
    assert {reason for _, reason, _ in declared} == {"stop"}
    for output in outputs:
        (sample,) = output.outputs
        last = len(output.prompt_token_ids) + len(sample.token_ids) - 1
        note, stop = sample.consumer_results["watch"].payload.actions
        assert (note.position, note.data["at"]) == (last, last)
        assert (stop.position, stop.acts_from, stop.lag_steps) == (last, last, 0)
    least = [few(36, min_tokens=9, **watched(edge)) for edge in edges]
    for output, (tokens, _, _) in zip(generate(drafting, prompts, least), declared, strict=True):
        (sample,) = output.outputs
        assert list(sample.token_ids)[: len(tokens)] == tokens
        assert len(sample.token_ids) == max(9, len(tokens))
        assert sample.stop_reason == "turned"
    drafts.assert_some_came_true()


@however_drafted
@beyond_interpreting
@pytest.mark.parametrize("window", ["next_step", "background"])
def test_a_rule_in_python_ends_a_sample_in_a_later_pass(drafting, reference, drafts, window):
    prompts = prompts_of(LENGTHS, seed=23)
    plain = generate(drafting, prompts, few(36))
    edges = edges_of(reference, plain)
    drafting.register_consumer(Watch(window))
    outputs = generate(drafting, prompts, [few(36, **watched(edge)) for edge in edges])
    lags = set()
    for output, whole in zip(outputs, plain, strict=True):
        (sample,) = output.outputs
        kept = list(sample.token_ids)
        assert kept == list(whole.outputs[0].token_ids)[: len(kept)]
        if sample.finish_reason == "length":
            continue
        assert sample.stop_reason == "turned"
        stops = [a for a in sample.consumer_results["watch"].payload.actions if a.action == "stop"]
        last = len(output.prompt_token_ids) + len(kept) - 1
        assert stops[0].acts_from == last > stops[0].position
        assert all(each.acts_from is None for each in stops[1:])
        lags.add(stops[0].lag_steps)
    assert lags == {1} if window == "next_step" else lags
    drafts.assert_some_came_true()


@however_drafted
@pytest.mark.parametrize("lasts", [None, 1], ids=["to the end", "for a token"])
def test_a_rule_in_python_steers_from_the_next_pass_on(drafting, reference, drafts, lasts):
    """Which token that is, it says itself; rows and tokens are those of a model that is changed
    there."""
    prompts = prompts_of(LENGTHS[: 2 if INTERPRETED else None], seed=29)
    edges = edges_of(reference, generate(drafting, prompts, few(12)))
    drafting.register_consumer(Gate())
    vectors = {AT[0]: {str(AT[1]): (0.3 * V).tolist()}}
    capture = {"memory": {"hooks": {AT[0]: [AT[1]]}}}
    count = 10 if INTERPRETED else 40
    outputs = generate(
        drafting,
        prompts,
        [
            few(count, capture=capture, **watched(edge, vectors=vectors, tokens=lasts))
            for edge in edges
        ],
    )
    additions = {}
    for output in outputs:
        result = output.outputs[0].consumer_results.get("watch")
        actions = [] if result is None else result.payload.actions
        acted = [each for each in actions if each.acts_from is not None]
        assert all(each.acts_from > each.position and each.lag_steps == 1 for each in acted)
        begins = sorted({each.acts_from for each in acted})
        if lasts is None:
            additions[output.request_id] = [
                Addition(AT, 0.3 * V, start=each) for each in begins[:1]
            ]
        else:
            additions[output.request_id] = [
                Addition(AT, 0.3 * V, start=each, stop=each + 1) for each in begins
            ]
    assert sum(map(bool, additions.values())) > len(prompts) / 2
    assert_greedy(outputs, reference, additions)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        _, states = reference.run(tokens, [AT], additions=additions[output.request_id])
        rows = output.activations[AT[0]][AT[1]]
        assert rows.positions.tolist() == list(range(len(tokens)))
        norms = states[AT].norm(dim=-1)
        assert ((rows.tensor - states[AT]).norm(dim=-1) <= RELATIVE * norms).all()
    generate(drafting, [[1]], few(2))
    (stats,) = drafting.intervention_stats()
    assert stats["steering_configurations"] == 0 and stats["running_sequences"] == 0
    drafts.assert_some_came_true()


def test_a_consumer_that_comes_while_sequences_run_sees_them_where_they_are(
    drafting, reference, drafts
):
    """Nobody waited for the tokens of the steps before."""
    prompts = prompts_of([20, 9], seed=13)
    engine = drafting.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, few(40))
    outputs = {}
    recorder = None
    for step in range(200):
        if not engine.has_unfinished_requests():
            break
        if step == 6:
            read = ResidualStream.read(layer=1, role="mid")
            recorder = drafting.register_consumer(Recorder(ConsumerFlow(reads=[read])))
        for output in engine.step():
            outputs[output.request_id] = output
    drafting.synchronize()
    rows = recorder.rows("mid")
    assert len(rows) > 20
    for i, prompt in enumerate(prompts):
        tokens = [*prompt, *outputs[f"r{i}"].outputs[0].token_ids]
        _, states = reference.run(tokens[:-1], [AT])
        seen = sorted(p for name, _, p in rows if name == f"r{i}")
        assert seen == list(range(seen[0], len(tokens) - 1))
        assert seen[0] > len(prompt)
        for position in seen:
            assert error_of(rows[f"r{i}", 0, position], states[AT][position]) < RELATIVE
    drafts.assert_some_came_true()


def test_sequences_go_on_behind_a_step_without_tokens(drafting, reference, drafts):
    """While the engine is paused, its workers hear in one that a request has ended."""
    read = ResidualStream.read(layer=1, role="mid")
    recorder = drafting.register_consumer(Recorder(ConsumerFlow(reads=[read])))
    engine, outputs = drafting.llm_engine, {}
    scheduler = engine.engine_core.engine_core.scheduler
    short, long = prompts_of([9, 12], seed=14)
    engine.add_request("short", {"prompt_token_ids": short}, few(3))
    engine.add_request("long", {"prompt_token_ids": long}, few(25))

    def step():
        for output in engine.step():
            outputs[output.request_id] = output

    while "short" not in outputs or not outputs["short"].finished:
        step()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)  # as the mode "keep" does
    for _ in range(3):
        step()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    while engine.has_unfinished_requests():
        step()
    drafting.synchronize()
    assert_greedy(outputs.values(), reference)
    assert_rows_match(recorder, list(outputs.values()), reference, {"mid": AT})
    drafts.assert_some_came_true()


def test_a_turn_that_ends_among_accepted_tokens_goes_on_behind_them(
    drafting, drafting_model, reference
):
    """vLLM before 0.33 has computed tokens that it drops where a turn ends, and counts them."""
    lanes, scheduler = DrivenLanes(drafting), drafting.llm_engine.engine_core.engine_core.scheduler
    allowed = FEW[:4]
    pick = random.Random(3)
    sessions = {f"session-{i}": pick.choices(allowed, k=20) for i in range(4)}
    counted = 0
    for turn in range(3 if INTERPRETED else 6):
        asked = greedy(3 + turn, allowed_token_ids=allowed)
        for name, tokens in sessions.items():
            said = pick.choices(allowed, k=1 + turn % 2) if turn else tokens
            lanes.add(lanes.request(name, said, asked, resumable=True))
            sessions[name] = [*tokens, *said] if turn else tokens
        drawn = {name: [] for name in sessions}
        for output in lanes.run():
            drawn[output.request_id] += output.new_token_ids
        for name, tokens in sessions.items():
            logits, _ = reference.run([*tokens, *drawn[name]][:-1])
            likeliest = logits[len(tokens) - 1 :, allowed].argmax(-1)
            assert [allowed[i] for i in likeliest] == drawn[name]
            sessions[name] = [*tokens, *drawn[name][:-1]]
            counted += scheduler.requests[name].num_computed_tokens > len(sessions[name])
    assert counted or drafting_model.ahead or versions.probe().version >= Version("0.33")
    lanes.abort(*sessions)
    while scheduler.has_requests():
        lanes.step()
    lanes.close()


def test_rows_of_drafts_that_the_engine_drops_are_nobodys(drafting, reference, drafts):
    """A reset of the prefix cache drops what the step under way draws: other tokens take the places
    of the drafts that were accepted in it."""
    engine, outputs, steps = drafting.llm_engine, {}, 0
    hooks = {"hooks": {AT[0]: [AT[1]]}}
    asked = sampled(24, temperature=0.7, allowed_token_ids=FEW, capture={"memory": hooks})
    pick = random.Random(5)
    for i in range(4):
        engine.add_request(f"r{i}", {"prompt_token_ids": pick.choices(FEW, k=12)}, asked)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        steps += 1
        # Who fetches a result has all rows handed out.
        if steps % 4 == 0 and not any(output.finished for output in outputs.values()):
            drafting.reset_prefix_cache(reset_running_requests=True)
    for output in outputs.values():
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        _, states = reference.run(tokens, [AT])
        rows = output.outputs[0].activations[AT[0]][AT[1]]
        assert sorted(rows.positions.tolist()) == list(range(len(tokens)))
        for position, row in zip(rows.positions.tolist(), rows.tensor, strict=True):
            assert error_of(row, states[AT][position]) < RELATIVE
    drafts.assert_some_came_true()


def test_an_input_that_a_guide_serves_is_guided_also_where_the_first_one_was_not(guidable):
    guide = guidable.register_consumer(Guide(boost=1000.0))
    lanes, scheduler = DrivenLanes(guidable), guidable.llm_engine.engine_core.engine_core.scheduler
    [prompt] = prompts_of([12], seed=41)

    def add(tokens, enabled):
        spec = RequestSpec("session", consumers={"guide": {"enabled": enabled}}, guided=enabled)
        asked = sampled(4, top_k=9, extra_args={"tllm": spec.to_wire()})
        lanes.add(lanes.request("session", tokens, asked, resumable=True))

    add(prompt, False)
    lanes.run()
    assert not guide.seen
    add([5, 6], True)
    lanes.run()
    first = scheduler.requests["session"].num_prompt_tokens - 1
    assert [row.position for row in guide.seen] == list(range(first, first + 4))
    lanes.abort("session")
    while scheduler.has_requests():
        lanes.step()
    lanes.close()
