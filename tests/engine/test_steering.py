"""Steering as users ask for it: per request, globally and by module; and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_engines import TINY_ENGINE

from engine.reference import HIDDEN, LAYERS, Addition
from tllm import LLM, PoolingParams, SamplingParams
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.steering import SteeringModule

PROMPTS = [[5, 6, 7, 8, 9, 10], list(range(20, 60)), [200, 201]]
TOKENS = 3 if INTERPRETED else 8
GENERATOR = torch.Generator().manual_seed(11)
V, W = 5 * torch.randn(2, HIDDEN, generator=GENERATOR)
AT = ("post_block", 1)


@pytest.fixture(autouse=True)
def _nothing_is_left(llm):
    yield
    llm.steering.clear()
    for name in llm.steering.modules():
        llm.steering.unregister_module(name)
    generate(llm, [[1]], {})  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["steering_configurations"] == 0
    assert llm.steering.status()["requests"] == 0


def generate(llm, prompts, asked, **options):
    """Greedy tokens of each prompt; `asked` is one mapping of keywords, or one for each."""
    asked = asked if isinstance(asked, list) else [asked] * len(prompts)
    params = [
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **each)
        for each in asked
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.kernels
def test_taps_with_their_norms_and_without_compute_the_same(llm, tiny_model):
    """Everything else in this pass is computed with them, where the model's norms allow it."""
    apart = LLM(tiny_model, fuse_norms=False, **TINY_ENGINE)
    # Every layer has a norm before attention and one before the MLP; the first of all adds nothing
    # up, and the final one adds as the others do. Without a compiler, vLLM has kernels for a GPU.
    fused = [engine.intervention_stats()[0]["norms_fused"] for engine in (llm, apart)]
    assert fused == [0 if torch.cuda.is_available() else 2 * LAYERS, 0]
    asked = [{"steering_vectors": at(V)}, {}, {"steering_vectors": at(W, ("post_attn", 0))}]
    assert generate(llm, PROMPTS, asked) == generate(apart, PROMPTS, asked)


@pytest.fixture
def asked(llm, monkeypatch):
    """The methods that the workers are asked for."""
    methods, ask = [], llm._sync.calls.ask
    monkeypatch.setattr(
        llm._sync.calls, "ask", lambda call: (methods.append(call.method), ask(call))[1]
    )
    return methods


def test_vectors_of_a_request_that_is_refused_for_something_else_are_not_brought(llm, asked):
    vector = 2 * torch.randn(HIDDEN, generator=GENERATOR)
    wrong = {"steering_vectors": at(vector), "consumers": {"nobody": {}}}
    with pytest.raises(ValueError, match="no such consumer is registered"):
        generate(llm, PROMPTS[:1], [wrong])
    assert "update_steering" not in asked


def test_built_in_consumers_that_are_in_use_are_named_once(llm):
    generate(llm, PROMPTS[:1], [{"capture": {"memory": {"hooks": {"post_block": [1]}}}}])
    with pytest.raises(ValueError, match=r"registered are none \(beside the built-in memory, sig"):
        generate(llm, PROMPTS[:1], [{"consumers": {"nobody": {}}}])


def test_new_vectors_of_requests_that_come_together_are_brought_in_one_call(llm, reference, asked):
    vectors = [2 * torch.randn(HIDDEN, generator=GENERATOR) for _ in PROMPTS]
    found = generate(llm, PROMPTS, [{"steering_vectors": at(vector)} for vector in vectors])
    assert asked.count("update_steering") == 1
    assert found == [
        reference.greedy(prompt, TOKENS, [Addition(AT, vector)])
        for prompt, vector in zip(PROMPTS, vectors, strict=True)
    ]


def test_new_conditions_of_requests_that_come_together_are_brought_in_one_call(
    llm, reference, asked
):
    vectors = [2 * torch.randn(HIDDEN, generator=GENERATOR) for _ in PROMPTS]
    probes = [torch.randn(HIDDEN, generator=GENERATOR) for _ in PROMPTS]
    opens = [number % 2 == 0 for number in range(len(PROMPTS))]
    given = [
        {
            "vector": vector,
            "when": {"probe": {"hook": AT[0], "layer": AT[1], "vector": probe}, side: -1e9},
        }
        for vector, probe, side in zip(
            vectors, probes, ["above" if each else "below" for each in opens], strict=True
        )
    ]
    found = generate(llm, PROMPTS, [{"steering_vectors": at(each)} for each in given])
    assert asked.count("update_steering") == 1
    assert found == [
        reference.greedy(prompt, TOKENS, [Addition(AT, vector)] if each else [])
        for prompt, vector, each in zip(PROMPTS, vectors, opens, strict=True)
    ]


def at(vector, place=AT):
    return {place[0]: {place[1]: vector}}


def test_steered_and_unsteered_requests_of_one_batch(llm, reference):
    asked = [{"steering_vectors": at(V)}, {}, {"steering_vectors": at(W)}]
    expected = [
        reference.greedy(prompt, TOKENS, [Addition(AT, vector)] if vector is not None else [])
        for prompt, vector in zip(PROMPTS, (V, None, W), strict=True)
    ]
    assert generate(llm, PROMPTS, asked) == expected
    assert len({*map(tuple, expected), *map(tuple, generate(llm, PROMPTS, {}))}) > 3


def test_tiers_add_up_over_global_request_and_module(llm, reference):
    """(global base + global phase) + (request base + request phase), and modules."""
    parts = list(3 * torch.randn(6, HIDDEN, generator=GENERATOR))
    llm.steering.set(at(parts[0]), decode_vectors=at(parts[1]))
    llm.steering.register_module("module", {"decode_vectors": at(parts[2])})
    asked = {
        "steering_vectors": at({"vector": parts[3], "scale": -0.5}),
        "prefill_steering_vectors": at(parts[4]),
        "decode_steering_vectors": at(parts[5]),
        "steering_module_ref": ("module", 1.5),
    }
    for prompt, tokens in zip(PROMPTS, generate(llm, PROMPTS, asked), strict=True):
        n = len(prompt)
        prefill = parts[0] - 0.5 * parts[3] + parts[4]
        decode = parts[0] + parts[1] + 1.5 * parts[2] - 0.5 * parts[3] + parts[5]
        additions = [Addition(AT, prefill, stop=n), Addition(AT, decode, start=n)]
        assert tokens == reference.greedy(prompt, TOKENS, additions)


def test_positions_of_the_request_hold_for_its_modules_too(llm, reference):
    llm.steering.register_module("module", at(V))
    asked = {"steering_module_ref": "module", "steering_positions": "last_prompt"}
    for prompt, tokens in zip(PROMPTS, generate(llm, PROMPTS, asked), strict=True):
        n = len(prompt)
        assert tokens == reference.greedy(prompt, TOKENS, [Addition(AT, V, n - 1, n)])


def test_positions_at_which_a_module_steers_nothing_are_refused(llm, reference):
    llm.steering.register_module("decode", {"decode_vectors": at(V)})
    llm.steering.register_module("both", {"decode_vectors": at(W), "prefill_vectors": at(V)})
    asked = {"steering_module_ref": ["both", "decode"], "steering_positions": "last_prompt"}
    with pytest.raises(ValueError, match="steering_positions: the module 'decode' steers no token"):
        generate(llm, [PROMPTS[0]], asked)
    asked["steering_module_ref"] = "both"
    n = len(PROMPTS[0])
    steered = reference.greedy(PROMPTS[0], TOKENS, [Addition(AT, V, n - 1, n)])
    assert generate(llm, [PROMPTS[0]], asked) == [steered]
    where = {"decode_vectors": at(V), "positions": "last_prompt"}
    with pytest.raises(ValueError, match="for generated tokens, steers no token"):
        llm.steering.register_module("never", where)
    with pytest.raises(ValueError, match="for generated tokens, steers no token"):
        llm.steering.set(**where)
    when = {"probe": {"hook": "post_block", "layer": 0, "vector": W}, "above": 0.0}
    after = at({"vector": V, "when": {**when, "over": "prompt_last"}})
    llm.steering.register_monitor("once", {**when, "over": "prompt_last"})
    for asked in (
        {"decode_steering_vectors": at(V)},
        {"steering_vectors": after},
        {"steering_vectors": at({"vector": V, "when": "once"})},
        {"steering_module_ref": "decode"},
    ):
        pooled = PoolingParams(task="embed", **asked)
        with pytest.raises(ValueError, match="and was given for pooling, which generates nothing"):
            llm.llm_engine.add_request("pooled", {"prompt_token_ids": PROMPTS[0]}, pooled)
    llm.steering.unregister_monitor("once")


def test_global_steering_is_set_merged_replaced_and_cleared(llm, reference):
    def greedy(*additions):
        return [reference.greedy(p, TOKENS, [Addition(*a) for a in additions]) for p in PROMPTS]

    llm.steering.set(at(V))
    assert generate(llm, PROMPTS, {}) == greedy((AT, V))
    llm.steering.set(at(W, ("pre_attn", 3)))
    assert generate(llm, PROMPTS, {}) == greedy((AT, V), (("pre_attn", 3), W))
    llm.steering.set(at(2 * V))
    assert generate(llm, PROMPTS, {}) == greedy((AT, 2 * V), (("pre_attn", 3), W))
    llm.steering.set(at(W), replace=True)
    assert generate(llm, PROMPTS, {}) == greedy((AT, W))
    status = llm.steering.status()
    assert list(status["global"]["vectors"]) == ["post_block"]
    assert status["global"]["vectors"]["post_block"][1][0]["norm"] == pytest.approx(float(W.norm()))
    llm.steering.clear()
    assert llm.steering.status()["global"] == {}
    assert generate(llm, PROMPTS, {}) == greedy()


def test_a_running_request_keeps_the_steering_it_began_with(llm, reference):
    """Global steering is changed between two steps of a request."""
    llm.steering.set(at(V))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    engine.add_request("early", {"prompt_token_ids": PROMPTS[0]}, params)
    for _ in range(TOKENS // 2):
        engine.step()
    llm.steering.set(at(W), replace=True)
    engine.add_request("late", {"prompt_token_ids": PROMPTS[0]}, params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
    assert tokens == {
        "early": reference.greedy(PROMPTS[0], TOKENS, [Addition(AT, V)]),
        "late": reference.greedy(PROMPTS[0], TOKENS, [Addition(AT, W)]),
    }
    llm.generate([{"prompt_token_ids": [3]}], params, use_tqdm=False)  # settles the two


def test_every_sample_is_steered(llm, reference):
    sampled = SamplingParams(
        n=3,
        temperature=1.0,
        logprobs=0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        steering_vectors=at(V),
    )
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampled, use_tqdm=False)
    for sample in output.outputs:
        tokens = [*PROMPTS[0], *sample.token_ids]
        logits, _ = reference.run(tokens, additions=[Addition(AT, V)])
        expected = logits.log_softmax(-1)
        for i, token in enumerate(sample.token_ids):
            found = sample.logprobs[i][token].logprob
            assert found == pytest.approx(float(expected[len(PROMPTS[0]) - 1 + i, token]), abs=1e-3)
    assert sampled.clone().asked is sampled.asked, "vectors are not copied"


def test_a_request_that_the_workers_cannot_steer_says_so_and_no_other(llm):
    asked = [{"steering_vectors": at(V)}, {"steering_vectors": at(W)}, {}]
    steered = generate(llm, PROMPTS, asked)
    # The workers lose a vector that the user's process believes them to have.
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **a) for a in asked]
    (lost,) = params[0].asked.steering.groups
    steering = llm.llm_engine.model_executor.driver_worker.worker.session.steering
    steering.drop([lost.digest], [])
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        steering.put(lost.vectors, {lost.digest: lost.operations})
    assert outputs[0].consumer_results["steering"].status == "error"
    assert "is not in this worker" in outputs[0].consumer_results["steering"].error
    assert [output.consumer_results for output in outputs[1:]] == [{}, {}]
    assert [list(output.outputs[0].token_ids) for output in outputs[1:]] == steered[1:]
    assert generate(llm, PROMPTS, asked) == steered


@pytest.mark.parametrize("steered", [False, True])
def test_the_session_hears_of_plain_requests_when_the_device_is_at_work(llm, monkeypatch, steered):
    session = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.session
    steps, start, heard = session.steps, session.sequences.start, []
    for name in ("begin_idle", "begin"):  # a step begins with one or the other
        begin = getattr(steps, name)
        monkeypatch.setattr(
            steps, name, lambda *a, of=begin, **k: (heard.append("step"), of(*a, **k))[1]
        )
    monkeypatch.setattr(
        session.sequences, "start", lambda *a, **k: (heard.append("start"), start(*a, **k))[1]
    )
    generate(llm, [PROMPTS[0]], {"steering_vectors": at(V)} if steered else {})
    assert heard[:2] == (["start", "step"] if steered else ["step", "start"])
    assert heard.count("start") == 1


def test_the_engine_samples_as_ever_where_nobody_observes(llm):
    """Whatever is steered: our methods are in its sampler for steps of a consumer only."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    overrides = worker._attachment._when_observed
    assert overrides

    def ours():
        return {getattr(each.owner, each.name) == each.ours for each in overrides}

    generate(llm, PROMPTS, {"steering_vectors": at(V)})
    assert ours() == {False}
    plain = generate(llm, PROMPTS, {})
    assert generate(llm, PROMPTS, {"capture": {"memory": {"hooks": {"post_block": [1]}}}}) == plain
    assert ours() == {True}
    assert generate(llm, PROMPTS, {}) == plain
    assert ours() == {False}


@pytest.fixture(scope="module")
def narrow(tiny_model):
    """Room for three ways of steering at once, and for six vectors."""
    options = TINY_ENGINE | {"max_num_batched_tokens": 256}
    return LLM(tiny_model, max_steering_configs=3, max_steering_mib=1, **options)


def test_requests_wait_while_too_many_ways_of_steering_run(narrow, reference, monkeypatch):
    vectors = 5 * torch.randn(12, HIDDEN, generator=GENERATOR)
    core = narrow.llm_engine.engine_core.engine_core
    session = core.model_executor.driver_worker.worker.session
    begin, seen, held_back = session.steps.begin, [], []

    def observed(*args, **kwargs):
        held_back.append(session.stats()["requests_held_back"])
        seen.append(session.steering.rows_in_use)
        begin(*args, **kwargs)

    monkeypatch.setattr(session.steps, "begin", observed)
    count = 13 if INTERPRETED else 26
    prompts = [[7, 8, 9, i] for i in range(count)]
    asked = [{} if i % 3 == 2 else {"steering_vectors": at(vectors[i % 12])} for i in range(count)]
    found = generate(narrow, prompts, asked)
    assert max(seen) == 3
    assert max(held_back) > 3
    assert session.stats()["requests_held_back"] == 0
    for i, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        additions = [] if i % 3 == 2 else [Addition(AT, vectors[i % 12])]
        assert tokens == reference.greedy(prompt, TOKENS, additions)
    scheduler = core.scheduler
    generate(narrow, [[1]], {})
    assert not scheduler._tllm_configurations
    assert not scheduler._tllm_admitted


@pytest.mark.skipif(INTERPRETED, reason="interpreted, 60 operations a row are slow; V1 runs it")
def test_unused_vectors_make_room_and_used_ones_do_not(narrow, reference):
    room = 2**20 // (4 * HIDDEN)

    def many(first):
        """240 vectors of their own, 60 in each layer."""
        return {
            "post_block": {
                layer: [{"vector": V * (first + layer + i / 64), "scale": 1e-3} for i in range(60)]
                for layer in range(LAYERS)
            }
        }

    for turn in range(room // 240 + 3):
        asked = {"steering_vectors": many(10 * turn)}
        additions = [
            Addition(
                ("post_block", layer), V * sum(10 * turn + layer + i / 64 for i in range(60)) / 1e3
            )
            for layer in range(LAYERS)
        ]
        (tokens,) = generate(narrow, [PROMPTS[0]], asked)
        assert tokens == reference.greedy(PROMPTS[0], TOKENS, additions)
    (stats,) = narrow.intervention_stats()
    assert stats["steering_mib"] < 1.1  # with the sums
    asked = [{"steering_vectors": many(1000 + 10 * k)} for k in range(room // 240 + 1)]
    probe = {"hook": "post_block", "layer": 0, "vector": V.tolist()}
    when = {"probe": probe, "above": 0.0, "scope": "conversation"}
    asked[-1]["steering_vectors"]["post_block"][1][0]["when"] = when
    asked[-1]["conversation"] = {"id": "late", "key": "a secret of this test"}
    with pytest.raises(ValueError, match="max_steering_mib=1; start the engine with a larger"):
        generate(narrow, [[k, 2] for k in range(len(asked))], asked)
    assert not narrow.steering.conversations(), "nobody begins one who is refused"
    assert generate(narrow, [PROMPTS[0]], {}) == [reference.greedy(PROMPTS[0], TOKENS)]


def test_global_steering_that_there_is_no_room_for_changes_nothing(narrow, reference):
    """Every request would be refused that comes after it."""
    room = 2**20 // (4 * HIDDEN)
    asked = [SamplingParams(steering_vectors=at(V * (3 + i / room))) for i in range(room - 1)]
    for i, params in enumerate(asked):
        narrow.llm_engine.add_request(f"{i}", {"prompt_token_ids": [1]}, params)
    three = {"post_block": {layer: V * (2 + layer) for layer in range(3)}}
    with pytest.raises(ValueError, match="max_steering_mib=1; start the engine with a larger"):
        narrow.steering.set(three)
    assert narrow.steering.status()["global"] == {}
    narrow.llm_engine.abort_request([f"{i}" for i in range(room - 1)])
    assert generate(narrow, [PROMPTS[0]], {}) == [reference.greedy(PROMPTS[0], TOKENS)]
    narrow.steering.set(three)
    additions = [Addition(("post_block", layer), V * (2 + layer)) for layer in range(3)]
    found = generate(narrow, [PROMPTS[0]], {})
    narrow.steering.clear()
    assert found == [reference.greedy(PROMPTS[0], TOKENS, additions)]


def test_a_refusal_names_some_of_many_modules(llm):
    """And not all of ten thousand, to whoever misspells one."""
    names = [f"name {number:02}" for number in range(22)]
    condition = {"probe": {"hook": "post_block", "layer": 0, "vector": V}, "above": 0}
    for name in names:
        llm.steering.register_module(name, at(V))
        llm.steering.register_monitor(name, condition)
    some = f"registered are {', '.join(names[:20])} and 2 more. Use"
    try:
        for asked in ({"steering_module_ref": "absent"}, {"stop_when": "absent"}):
            with pytest.raises(ValueError, match=some):
                generate(llm, [[1, 2]], asked)
        with pytest.raises(ValueError, match=some.removesuffix(". Use")):
            llm.steering.unregister_monitor("absent")
    finally:  # modules are taken away behind each test
        for name in names:
            llm.steering.unregister_monitor(name)


GOOD = [0.0] * HIDDEN
LAST = {"positions": [-1]}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steering_vectors": {"middle": {0: GOOD}}}, "unknown hook point 'middle'"),
        (
            {"steering_vectors": at(V, ("post_block", LAYERS))},
            "steering_vectors['post_block'][4]: post_block has no layer 4; post_block needs",
        ),
        (
            {"decode_steering_vectors": at(V, ("post_block", -LAYERS - 1))},
            "decode_steering_vectors['post_block'][-5]: post_block has no layer -5",
        ),
        (
            {"steering_vectors": {"post_block": torch.ones(LAYERS - 1, HIDDEN)}},
            "['post_block'][0]: the vector is one of 3 rows that say no layer, and the model has 4",
        ),
        ({"steering_vectors": at([1.0] * 7)}, "has 7 numbers; the model's hidden size is 128"),
        ({"steering_vectors": at([math.nan] * HIDDEN)}, "NaN, infinite"),
        ({"steering_vectors": {}}, "steering_vectors is empty"),
        (
            {"steering_clamps": at({"vector": V, "value": 1, "min": 0})},
            "steering_clamps['post_block'][1] gives both value and min or max",
        ),
        (
            {"steering_module_ref": "absent"},
            "no module 'absent' is registered; registered are none",
        ),
        (
            {"steering_clamps": at([{"vector": V, "value": i} for i in range(17)])},
            "17 clamps (operations on a component) at 'post_block' of layer 1; at most 16",
        ),
        ({"steering_positions": "last_prompt"}, "nothing to steer with was given"),
        (
            {"decode_steering_vectors": at({"vector": V, "positions": "last_prompt"})},
            "decode_steering_vectors['post_block'][1], for generated tokens, steers no token at "
            "the positions that it was given, by itself or for all entries: they are of the prompt",
        ),
        (
            {"prefill_steering_vectors": at(V), "steering_positions": "all_generated"},
            "prefill_steering_vectors['post_block'][1], for tokens of the prompt, steers no token",
        ),
        (
            {"steering_vectors": at({"vector": V, "positions": {"phase": "generation", **LAST}})},
            "negative ones count from the end of the prompt, and the phase is 'generation'",
        ),
        (
            {"steering_vectors": at({"vector": [1e30, *GOOD[1:]], "scale": 1e30})},
            "steering_vectors['post_block'][1] adds up to 1e+60 to the numbers of a row",
        ),
        (
            {"steering_vectors": at([{"vector": [1e18, *GOOD[1:]]}] * 2)},
            "adds up to 2e+18 to the numbers of a row at 'post_block' of layer 1",
        ),
        (
            {"steering_clamps": at({"vector": V, "value": 1e30})},
            "steering_clamps['post_block'][1] adds up to",
        ),
    ],
)
def test_mistakes_are_refused_before_a_worker_sees_them(llm, reference, asked, says):
    with pytest.raises(ValueError) as refused:
        generate(llm, [PROMPTS[0]], asked)
    assert says in str(refused.value)
    assert generate(llm, [PROMPTS[0]], {}) == [reference.greedy(PROMPTS[0], TOKENS)]


def test_a_module_is_refused_whose_factor_is_beyond_what_the_model_can_use(llm, reference):
    llm.steering.register_module("one", at([1.0, *GOOD[1:]]))
    with pytest.raises(
        ValueError, match=r"module 'one' times 1e.30 adds up to 1e.30 .* at 'post_block' of layer"
    ):
        generate(llm, [PROMPTS[0]], {"steering_module_ref": ("one", 1e30)})
    with pytest.raises(ValueError, match=r"vectors.*adds up to 1e.30"):
        llm.steering.set(at({"vector": [1.0, *GOOD[1:]], "scale": 1e30}))
    assert generate(llm, [PROMPTS[0]], {}) == [reference.greedy(PROMPTS[0], TOKENS)]


def of_rows(count):
    """A module read from an array with so many rows."""
    layers = {i: V.numpy() for i in range(count)}
    return SteeringModule({"post_block": layers}, num_layers=count)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.set(), "nothing to steer with: give any of vectors, prefill_vectors"),
        (lambda s: s.set({"post_block": {9: V}}), "post_block has no layer 9"),
        (lambda s: s.set({"post_block": torch.ones(5, HIDDEN)}), "one of 5 rows that say no layer"),
        (lambda s: s.register_module("m", of_rows(3)), "one of 3 rows that say no layer"),
        (lambda s: s.register_module("", at(V)), "module name '': give 1 to 256 printable chara"),
        (lambda s: s.register_module("  ", at(V)), "module name '  ': give 1 to 256 printable ch"),
        (lambda s: s.register_module("a\0b", at(V)), "module name 'a\\x00b': give 1 to 256 print"),
        (lambda s: s.register_module(257 * "a", at(V)), "give 1 to 256 printable characters"),
        (lambda s: s.register_module(7, at(V)), "module name 7: give 1 to 256 printable"),
        (lambda s: s.register_monitor("a\n", {}), "monitor name 'a\\n': give 1 to 256 printable"),
        (lambda s: s.register_module("m", {"vectors": at(V), "wrong": 1}), "unknown fields"),
        (lambda s: s.register_module("m", None), "module 'm' is None; give {hook point: {layer"),
        (lambda s: s.unregister_module("absent"), "no module 'absent'"),
    ],
)
def test_mistakes_in_global_steering_change_nothing(llm, reference, call, says):
    with pytest.raises(ValueError) as refused:
        call(llm.steering)
    assert says in str(refused.value)
    assert "steering_module_ref" not in str(refused.value), "a field of requests"
    assert llm.steering.status()["global"] == {}
    assert generate(llm, [PROMPTS[0]], {}) == [reference.greedy(PROMPTS[0], TOKENS)]


@pytest.mark.parametrize(
    ("options", "place", "says"),
    [
        (
            {"max_steering_configs": 0},
            AT,
            "steering is not enabled in this engine; start it with max_steering_configs",
        ),
        (
            {"hook_points": ["post_block"]},
            ("mlp_out", 0),
            "start it with hook_points=[..., 'mlp_out'] or hook_points='all' (tllm serve: --hook-",
        ),
    ],
)
def test_an_engine_that_cannot_steer_there_says_what_to_start(tiny_model, options, place, says):
    engine = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    llm = LLM(tiny_model, **engine, **options)
    with pytest.raises(ValueError) as refused:
        generate(llm, [[1]], {"steering_vectors": at(V, place)})
    assert says in str(refused.value)
    assert llm.steering.status()["enabled"] is ("hook_points" in options)


def test_an_engine_of_vllms_own_refuses_what_it_would_not_do(plain_engine):
    """Parameters of ours that ask for nothing are as its own."""
    steering = {"post_block": {1: [1.0] * HIDDEN}}
    asked = SamplingParams(max_tokens=1, steering_vectors=steering)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    plain_engine.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match=r"steering_vectors was asked of .*tllm.attach\(engine\)"):
        plain_engine.generate([prompt], asked, use_tqdm=False)
    with pytest.raises(ValueError, match="steering_vectors was asked of an engine of vLLM's own"):
        PoolingParams(steering_vectors=steering).verify(plain_engine.model_config)


def test_parameters_that_are_used_again_meet_what_was_registered_since(llm):
    """What was made of them is kept only while all of it holds."""
    llm.steering.register_module("module", at(V))
    asked = SamplingParams(
        top_k=1,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        capture={"memory": {"hooks": {"post_block": [1]}}},
        steering_module_ref="module",
    )
    prompt = {"prompt_token_ids": PROMPTS[0]}

    def tokens(n=1):
        asked.n = n
        [output] = llm.generate([prompt], asked, use_tqdm=False)
        captured = [each.activations["post_block"][1] for each in output.outputs]
        assert len(captured) == n and all(len(each.positions) >= TOKENS - 1 for each in captured)
        return [list(each.token_ids) for each in output.outputs]

    first = tokens()
    assert tokens() == first == generate(llm, PROMPTS[:1], {"steering_vectors": at(V)})
    assert tokens(n=2) == 2 * first
    llm.clear_consumers()  # those of every engine come again when they are asked for
    assert tokens() == first
    llm.steering.set(at(W))
    assert tokens() == generate(llm, PROMPTS[:1], {"steering_vectors": at(V)}) != first
    llm.steering.clear()
    llm.steering.unregister_module("module")
    with pytest.raises(ValueError, match="no module 'module' is registered"):
        tokens()
    llm.steering.register_module("module", at(W))
    assert tokens() == generate(llm, PROMPTS[:1], {"steering_vectors": at(W)})
