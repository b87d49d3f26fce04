"""Patched requests against `transformers`, in mixed batches; and what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from engine.asking import RELATIVE, error_of, generate, greedy, prompts_of, sampled, tokens_of
from engine.reference import HIDDEN, LAYERS, Addition, PatchedRow
from tllm import SamplingParams
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.hooks import HookPoint
from tllm.spec.patching import noise_rows

REQUESTS = 16 if INTERPRETED else 150
TOKENS = 3 if INTERPRETED else 6
NARROW = HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.ROUTER
POINTS = [point.value for point in HookPoint if point not in NARROW]
ZERO = {"hook": "post_block", "layer": 1, "positions": [2], "source": {"zero": True}}


def place_of(entry):
    return entry["hook"], entry.get("layer")


class Asked:
    """Random requests that share prefixes, and what `transformers` is to do for each."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.prefixes = prompts_of([33, 64, 40], seed)

    def rows(self, count):
        return 4 * torch.randn(count, HIDDEN, generator=self.generator)

    def place(self):
        point = self.pick.choice(POINTS[:-1])
        return point, self.pick.randrange(LAYERS) if HookPoint(point).has_layer else None

    def patch(self, prompt):
        """An entry, and the rows that it means."""
        pick, last = self.pick, len(prompt) + TOKENS - 2
        count = pick.randint(1, 4)
        start = pick.randint(0, last)
        positions = pick.choice(
            [pick.sample(range(last + 1), count), list(range(start, min(start + count, last + 1)))]
        )
        point = pick.choice(POINTS)
        entry = {"hook": point, "positions": positions, "alpha": pick.choice([1.0, 1.0, 0.4])}
        if HookPoint(point).has_layer:
            entry["layer"] = pick.randrange(LAYERS)
        if pick.random() < 0.3:
            entry["mask"] = pick.sample(range(HIDDEN), 40)
        kind = pick.choice(["rows", "row", "zero", "noise"])
        sources, keep = torch.zeros(len(positions), HIDDEN), 1 - entry["alpha"]
        if kind == "rows":
            sources = self.rows(len(positions))
            entry["source"] = {"tensor": sources}
        elif kind == "row":
            sources = self.rows(1).expand(len(positions), -1)
            entry["source"] = {"tensor": sources[0].tolist()}
        elif kind == "zero":
            entry["source"] = {"zero": True}
        else:
            sources, keep = torch.from_numpy(noise_rows(3.0, 7, positions, HIDDEN)), 1.0
            entry["source"] = {"noise": 3.0, "seed": 7}
        if pick.random() < 0.2 and kind != "noise":
            entry["positions"] = [p - len(prompt) if p < len(prompt) else p for p in positions]
        where = place_of(entry), entry["alpha"], entry.get("mask")
        expected = [
            PatchedRow(where[0], position, source, keep, where[1], where[2])
            for position, source in zip(positions, sources, strict=True)
        ]
        return entry, expected

    def request(self):
        pick = self.pick
        prompt = pick.choice(self.prefixes)[: pick.choice([20, 40, 64])]
        prompt = prompt + [pick.randrange(1, 250) for _ in range(pick.choice([0, 1, 9]))]
        asked, patches, additions, captured = {}, [], [], None
        if pick.random() < 0.75:
            entries = [self.patch(prompt) for _ in range(pick.randint(1, 3))]
            asked["patch"] = [entry for entry, _ in entries]
            patches = [row for _, rows in entries for row in rows]
        if pick.random() < 0.4:
            place, [vector] = self.place(), self.rows(1)
            point, layer = place
            asked["steering_vectors"] = {point: vector if layer is None else {layer: vector}}
            additions = [Addition(place, vector)]
        if pick.random() < 0.4:
            captured = self.place()
            hooks = {captured[0]: "all" if captured[1] is None else [captured[1]]}
            asked["capture"] = {"memory": {"hooks": hooks, "positions": "all"}}
        more = {"logprobs": 1, "n": pick.choice([1, 1, 2])}
        params = (greedy if more["n"] == 1 else sampled)(TOKENS, **asked, **more)
        return SimpleNamespace(
            prompt=prompt, params=params, patches=patches, additions=additions, captured=captured
        )


def assert_as_transformers(reference, request, output):
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        logits, states = reference.run(
            [*request.prompt, *tokens][:-1],
            [request.captured] if request.captured else [],
            request.additions,
            request.patches,
        )
        expected = logits[len(request.prompt) - 1 :].log_softmax(-1)
        ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-3), request
        if request.params.temperature == 0:
            assert tokens == expected.argmax(-1).tolist(), request
        if request.captured and sample.index == 0:
            rows = output.activations[request.captured[0]][request.captured[1]]
            assert rows.positions.tolist() == list(range(len(states[request.captured])))
            for row, state in zip(rows.tensor, states[request.captured], strict=True):
                assert error_of(row, state) < 3 * RELATIVE, request


def run_random(llm, reference, seed, count):
    asked = Asked(seed)
    for _ in range(0, count, 16):
        requests = [asked.request() for _ in range(min(16, count))]
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
        for request, output in zip(requests, outputs, strict=True):
            assert_as_transformers(reference, request, output)


def test_random_requests_are_as_transformers_has_them(llm, reference):
    """All hook points and sources; prompts in chunks, cached prefixes, two samples; beside plain,
    steered and captured requests."""
    run_random(llm, reference, 0, REQUESTS)
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["rows_patched"] > REQUESTS and stats["running_sequences"] == 0


def test_random_requests_that_preempt_each_other(tight_llm, reference):
    run_random(tight_llm, reference, 1, REQUESTS // 3)


def test_a_patch_comes_before_steering_at_one_point(llm, reference):
    """And after what is captured there: rows are as they arrive."""
    [prompt], vector = prompts_of([12]), 5 * torch.ones(HIDDEN)
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    params = greedy(
        TOKENS,
        patch=[{**ZERO, "source": {"tensor": row}}],
        steering_vectors={"post_block": {1: vector}},
        capture={"memory": {"hooks": {"post_block": [1], "pre_attn": [2]}, "positions": "all"}},
    )
    [output] = generate(llm, [prompt], params)
    tokens = [*prompt, *tokens_of([output])[0]][:-1]
    _, states = reference.run(tokens, [("post_block", 1)])
    seen = output.activations
    assert error_of(seen["post_block"][1].tensor[2], states["post_block", 1][2]) < RELATIVE
    assert error_of(seen["pre_attn"][2].tensor[2], row + vector) < RELATIVE


def test_causal_tracing_corrupts_what_enters_the_first_block(llm, reference):
    """ROME: noise on the subject's embeddings, then one clean state put back. A cached prefix and
    chunks of a prompt do not change it, and `pre_attn` of the first layer is what is left."""
    [prompt] = prompts_of([40], seed=21)
    noise = {"hook": "embed", "positions": [3, 4, 5], "source": {"noise": 4.0, "seed": 2}}
    noised = [
        PatchedRow(("embed", None), position, torch.from_numpy(row), keep=1.0)
        for position, row in zip(
            noise["positions"], noise_rows(4.0, 2, noise["positions"], HIDDEN), strict=True
        )
    ]
    clean = generate(llm, [prompt], greedy(1, capture=memory("post_block", [2])))
    state = clean[0].activations["post_block"][2].tensor[5]
    restored = {"hook": "post_block", "layer": 2, "positions": [5], "source": {"tensor": state}}
    for entries, rows in (
        ([noise], noised),
        ([noise, restored], [*noised, PatchedRow(("post_block", 2), 5, state)]),
    ):
        for _ in range(2):  # the second time from cached blocks
            [output] = generate(llm, [prompt], greedy(TOKENS, patch=entries, logprobs=1))
            request = SimpleNamespace(prompt=prompt, patches=rows, additions=[], captured=None)
            request.params = SimpleNamespace(temperature=0)
            assert_as_transformers(reference, request, output)
        assert output.num_cached_tokens == 32
    asked = {"memory": {"hooks": {"embed": "all", "pre_attn": [0]}, "positions": "all_prompt"}}
    [output] = generate(llm, [prompt], greedy(1, patch=[noise], capture=asked))
    _, states = reference.run(prompt, [("embed", None)])
    before = output.activations["embed"][None].tensor
    after = output.activations["pre_attn"][0].tensor
    torch.testing.assert_close(before, states["embed", None])
    for row in noised:
        torch.testing.assert_close(after[row.position], row.of(before[row.position]))
        before[row.position] = after[row.position]
    assert torch.equal(before, after)


def test_one_head_is_patched(llm, reference):
    """By number, or as the dimensions that it has; the other heads keep theirs."""
    [prompt], point = prompts_of([12], seed=22), ("attn_heads", 2)
    size = llm.steering.layers()["heads"]["attn_heads"][2]["head_dim"]
    dimensions = [*range(size, 2 * size), *range(3 * size, 4 * size)]
    entry = {"hook": "attn_heads", "layer": 2, "positions": [4, 7], "source": {"zero": True}}
    rows = [PatchedRow(point, p, torch.zeros(HIDDEN), dimensions=dimensions) for p in (4, 7)]
    for chosen in ({"heads": [1, 3]}, {"mask": dimensions}):
        [output] = generate(llm, [prompt], greedy(TOKENS, patch=[entry | chosen], logprobs=1))
        request = SimpleNamespace(prompt=prompt, patches=rows, additions=[], captured=None)
        request.params = SimpleNamespace(temperature=0)
        assert_as_transformers(reference, request, output)


def memory(point, layers):
    return {"memory": {"hooks": {point: layers}, "positions": "all"}}


def test_entries_at_one_place_are_done_in_the_order_given(llm, reference):
    [prompt] = prompts_of([12])
    one, two = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(4))
    for first, second in ((one, two), (two, one)):
        entries = [
            {**ZERO, "source": {"tensor": first}},
            {**ZERO, "source": {"tensor": second}, "alpha": 0.5, "mask": range(64)},
        ]
        at = ("post_block", 1), 2
        rows = [PatchedRow(*at, first), PatchedRow(*at, second, 0.5, 0.5, list(range(64)))]
        [output] = generate(llm, [prompt], greedy(TOKENS, patch=entries))
        assert reference.would_generate(prompt, tokens_of([output])[0], patches=rows)


def test_blocks_are_shared_up_to_the_first_patched_position_and_with_equal_patches(llm):
    """Blocks of 32 tokens; two before position 70."""
    [prompt] = prompts_of([100], seed=9)
    patch = [{**ZERO, "positions": [70, 71], "source": {"tensor": torch.ones(HIDDEN)}}]
    other = [{**ZERO, "positions": [71]}]
    llm.reset_prefix_cache()

    def cached(**asked):
        [output] = generate(llm, [prompt], greedy(1, **asked))
        return output.num_cached_tokens

    assert [cached(), cached()] == [0, 96]
    assert [cached(patch=patch), cached(patch=patch)] == [64, 96]
    assert [cached(patch=other), cached(), cached(patch=patch)] == [64, 96, 96]


def test_a_patched_block_is_never_given_to_a_plain_request(llm, reference):
    [prompt] = prompts_of([70], seed=10)
    llm.reset_prefix_cache()
    patched = greedy(TOKENS, patch=[{**ZERO, "positions": list(range(5, 40))}])
    for params in (patched, greedy(TOKENS), patched):
        [output] = generate(llm, [prompt], params)
        rows = [PatchedRow(("post_block", 1), p, torch.zeros(HIDDEN)) for p in range(5, 40)]
        wanted = rows if params is patched else []
        assert reference.would_generate(prompt, tokens_of([output])[0], patches=wanted)


@pytest.mark.parametrize("positions", ["all_prompt", "last_prompt"])
def test_positions_that_have_a_name(llm, reference, positions):
    """Prompts of several lengths, two samples each, beside plain requests; asked twice, so that
    blocks are cached."""
    prompts = prompts_of([21, 40, 33])
    params = [
        sampled(TOKENS, n=2, logprobs=1, patch=[{**ZERO, "positions": positions, "alpha": 0.5}]),
        greedy(TOKENS, logprobs=1),
        greedy(TOKENS, logprobs=1, patch=[{**ZERO, "positions": positions, "hook": "mlp_out"}]),
    ]
    for _ in range(2):
        outputs = generate(llm, prompts, params)
        for prompt, output, place, keep in zip(
            prompts, outputs, ("post_block", None, "mlp_out"), (0.5, 1.0, 0.0), strict=True
        ):
            first = 0 if positions == "all_prompt" else len(prompt) - 1
            at = range(first, len(prompt)) if place else ()
            rows = [PatchedRow((place, 1), p, torch.zeros(HIDDEN), keep) for p in at]
            for sample in output.outputs:
                tokens = list(sample.token_ids)
                logits, _ = reference.run([*prompt, *tokens][:-1], [], [], rows)
                expected = logits[len(prompt) - 1 :].log_softmax(-1)
                ours = [s[t].logprob for s, t in zip(sample.logprobs, tokens, strict=True)]
                theirs = [float(row[t]) for row, t in zip(expected, tokens, strict=True)]
                assert ours == pytest.approx(theirs, abs=1e-3)


NONE = {"tensor": [0.0] * HIDDEN}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hook": "post_blok"}, r"patch\[0\]: unknown hook point 'post_blok'"),
        ({"layer": 99}, r"patch\[0\]: post_block has no layer 99"),
        ({"layer": None}, r"patch\[0\]: post_block needs a layer"),
        ({"layer": 1.5}, r"patch\[0\]: 1.5 is not a layer"),
        ({"hook": "lm_head_in"}, "belongs to no layer"),
        ({"heads": [0]}, r"\['heads'\] is given at post_block; give heads at q, k, v, attn_heads"),
        ({"hook": "attn_heads", "heads": [4]}, r"has 4; layer 1 has heads 0 to 3"),
        ({"hook": "attn_heads", "heads": [0], "mask": [0]}, "is given with a mask"),
        ({"hook": "attn_heads", "heads": [-1]}, "has -1; heads count from 0"),
        ({"positions": [12 + TOKENS]}, f"position {12 + TOKENS} is out of range"),
        ({"positions": [12 + TOKENS - 1]}, f"give -12 to {12 + TOKENS - 2}"),
        ({"positions": [-13]}, "position -13 is out of range"),
        ({"positions": []}, r"\['positions'\] is empty"),
        ({"positions": [1, 1]}, "names a number twice"),
        ({"positions": "all"}, "a list of whole numbers"),
        ({"positions": "image"}, r"tokens of image, .* no such item \(it has text alone\)"),
        ({"source": {}}, "give one of"),
        ({"source": {"zero": True, "noise": 1.0}}, "give one of"),
        ({"source": {"zero": False}}, "give True"),
        ({"source": {"tensor": [1.0, 2.0]}}, "rows of 2 numbers; the model's hidden size is 128"),
        ({"source": {"tensor": torch.zeros(3, HIDDEN)}}, "and 1 positions are patched"),
        ({"source": {"tensor": [float("nan")] * HIDDEN}}, "NaN, infinite"),
        ({"source": {"tensor": [1e38] * HIDDEN}}, "this model can use rows up to"),
        ({"source": {"noise": -1.0}}, "0 or more"),
        ({"source": {"noise": 1.0, "seed": -1}}, "must be from 0 to"),
        ({"source": {"mean": "nobody"}}, "nothing is kept under the name 'nobody'"),
        ({"source": {"run": "nobody"}}, "nothing is kept under the name 'nobody'"),
        ({"source": {"run": "x", "positions": [1, 2]}}, "has 2 positions, and 1 are patched"),
        ({"source": {"zero": True, "positions": [1]}}, "unknown keys"),
        ({"alpha": float("inf")}, "not finite"),
        ({"alpha": "much"}, "is not a number"),
        ({"mask": [HIDDEN]}, f"dimensions go up to {HIDDEN - 1}"),
        ({"mask": [-1]}, "dimensions count from 0"),
        ({"beta": 1}, "unknown keys"),
    ],
)
def test_what_cannot_be_patched_is_refused_and_the_engine_goes_on(llm, change, sentence):
    [prompt] = prompts_of([12])
    with pytest.raises(ValueError, match=sentence):
        generate(llm, [prompt], greedy(TOKENS, patch=[{**ZERO, **change}]))
    assert generate(llm, [prompt], greedy(1))


@pytest.mark.parametrize("given", [{}, [], "post_block", [7]])
def test_what_is_no_list_of_patches_is_refused(given):
    with pytest.raises(ValueError, match="patch"):
        SamplingParams(patch=given)


def test_plain_data_asks_the_same(llm, reference):
    """As a request over HTTP does, and one whose parameters are vLLM's own."""
    import vllm

    [prompt] = prompts_of([12])
    row = [0.5] * HIDDEN
    asked = {"patch": [{**ZERO, "source": {"tensor": row}}]}
    params = vllm.SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, extra_args={"tllm": asked}
    )
    [output] = generate(llm, [prompt], params)
    rows = [PatchedRow(("post_block", 1), 2, torch.tensor(row))]
    assert reference.would_generate(prompt, tokens_of([output])[0], patches=rows)


RUN_HOOKS = ["post_block", "attn_out", "lm_head_in"]


@pytest.fixture
def nothing_kept(llm):
    yield
    for name in llm.patching.kept():
        llm.patching.drop(name)
    assert llm.intervention_stats()[0]["patch_mib"] == 0


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("on_host", [False, True])
def test_rows_of_a_run_are_those_of_transformers_and_are_named_by_requests(llm, reference, on_host):
    """A prompt in chunks whose blocks were cached; at other positions, and at the same."""
    clean, corrupt = prompts_of([40, 40], seed=20)
    generate(llm, [clean], greedy(1))
    with pytest.raises(ValueError, match="on_host='no' must be True or False"):
        llm.patching.run(clean, hooks=RUN_HOOKS, on_host="no")
    run = llm.patching.run(clean, hooks=RUN_HOOKS, layers=[0, -1], name="clean", on_host=on_host)
    patching = llm.llm_engine.model_executor.driver_worker.worker.session.patching
    assert patching.kept_bytes(on_host=on_host) == run.num_bytes
    assert patching.kept_bytes(on_host=not on_host) == 0
    assert run.num_positions == 40 and run.num_bytes == 40 * 5 * HIDDEN * 4
    assert llm.patching.kept() == {"clean": run}
    places = [("post_block", 0), ("post_block", 3), ("attn_out", 0), ("lm_head_in", None)]
    _, states = reference.run(clean, places)
    requests = [
        (places[0], [5, 6, 39], None, run),
        (places[2], [38, 39], [3, 0], "clean"),
        (places[1], [-1], [-2], run),
        (places[3], [39], None, "clean"),
        (places[1], [41], [7], "clean"),
    ]
    params, patches = [], []
    for (hook, layer), positions, of_run, named in requests:
        source = {"run": named} | ({"positions": of_run} if of_run else {})
        entry = {"hook": hook, "layer": layer, "positions": positions, "source": source}
        params.append(greedy(4, patch=[entry]))
        pairs = zip(positions, of_run or positions, strict=True)
        rows = [(p % 40 if p < 0 else p, states[hook, layer][q]) for p, q in pairs]
        patches.append([PatchedRow((hook, layer), p, row) for p, row in rows])
    for output, rows in zip(generate(llm, [corrupt] * 5, params), patches, strict=True):
        assert reference.would_generate(corrupt, tokens_of([output])[0], patches=rows)


@pytest.mark.usefixtures("nothing_kept")
def test_a_mean_is_put_at_any_position(llm, reference):
    [prompt] = prompts_of([12])
    one, two = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5))
    llm.patching.register_mean("mean", {"post_block": {1: one, -1: two.tolist()}})
    entries = [
        {**ZERO, "positions": [3, 12], "source": {"mean": "mean"}},
        {**ZERO, "layer": 3, "source": {"mean": "mean"}},
    ]
    [output] = generate(llm, [prompt], greedy(TOKENS, patch=entries))
    rows = [PatchedRow(("post_block", 1), p, one) for p in (3, 12)]
    rows += [PatchedRow(("post_block", 3), 2, two)]
    assert reference.would_generate(prompt, tokens_of([output])[0], patches=rows)
    for source, sentence in (
        ({"run": "mean"}, "'mean' is a mean"),
        ({"mean": "other"}, "kept are mean"),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate(llm, [prompt], greedy(1, patch=[{**ZERO, "source": source}]))
    with pytest.raises(ValueError, match=r"no rows of 'post_block' at layer 0"):
        generate(llm, [prompt], greedy(1, patch=[{**entries[0], "layer": 0}]))


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({}, "rows is {}; give"),
        ({"post_block": {}}, r"rows\['post_block'\] is empty; give {layer: row}"),
        ({"post_block": {1: [1.0] * HIDDEN}, "mlp_out": {}}, r"rows\['mlp_out'\] is empty"),
        ({"zz": {1: [1.0] * HIDDEN}}, "rows: unknown hook point 'zz'"),
        (
            {"post_block": {2: [1.0] * HIDDEN, -2: [2.0] * HIDDEN}},
            r"rows\['post_block'\]\[2\] and rows\['post_block'\]\[-2\] are of the same place",
        ),
    ],
)
def test_means_that_say_nothing_are_refused(llm, rows, sentence):
    with pytest.raises(ValueError, match=sentence):
        llm.patching.register_mean("m", rows)
    assert llm.patching.kept() == {}


@pytest.mark.usefixtures("nothing_kept")
def test_runs_that_cannot_be_kept_are_refused_and_leave_nothing(llm):
    [prompt] = prompts_of([12])
    run = llm.patching.run(prompt, hooks="post_block", layers=0, name="run")
    for arguments, sentence in (
        ({"hooks": "post_block", "name": "run"}, "'run' is taken"),
        ({"hooks": "post_blok"}, "unknown hook point"),
        ({"hooks": []}, "hooks is empty"),
        ({"hooks": "post_block", "layers": [9]}, "has no layer 9"),
    ):
        with pytest.raises(ValueError, match=sentence):
            llm.patching.run(prompt, **arguments)
    with pytest.raises(ValueError, match="give text, or a list of token ids"):
        llm.patching.run(7, hooks="post_block")
    with pytest.raises(ValueError, match=r"the prompt=.* has lone surrogates; leave them out"):
        llm.patching.run("a \ud800", hooks="post_block")
    beyond = {**ZERO, "layer": 0, "source": {"run": run, "positions": [12]}}
    with pytest.raises(ValueError, match="position 12 is out of range for run 'run' of 12 tokens"):
        generate(llm, [prompt], greedy(1, patch=[beyond]))
    with pytest.raises(ValueError, match=r"for llm\.patching\.run alone"):
        generate(llm, [prompt], greedy(1, consumers={"patch_runs": {}}))
    for uid in ("mine", ["mine"]):  # what nobody takes would stay on the device
        own = {"patch_runs": {"uid": uid, "places": [["post_block", 0]]}}
        with pytest.raises(ValueError, match=r"for llm\.patching\.run alone"):
            generate(llm, [prompt], greedy(1, consumers=own))
    patching = llm.llm_engine.model_executor.driver_worker.worker.session.patching
    patching._max_bytes, before = run.num_bytes + 100, patching._max_bytes
    try:
        with pytest.raises(ValueError, match=r"take 0\.0 MiB.*drop what is not needed"):
            llm.patching.run(prompt, hooks="post_block", layers=0)
        llm.patching.drop(llm.patching.run(prompt, hooks="post_block", layers=0, on_host=True))
    finally:
        patching._max_bytes = before
    patching._max_host_bytes, before = run.num_bytes - 100, patching._max_host_bytes
    try:
        with pytest.raises(ValueError, match=r"max_patch_host_mib=8192 there are 0\.0 MiB left"):
            llm.patching.run(prompt, hooks="post_block", layers=0, on_host=True)
    finally:
        patching._max_host_bytes = before
    llm.patching.drop(run)
    with pytest.raises(ValueError, match="nothing is kept under the name 'run'"):
        generate(llm, [prompt], greedy(1, patch=[{**ZERO, "layer": 0, "source": {"run": run}}]))
    with pytest.raises(ValueError, match="drop: nothing is kept"):
        llm.patching.drop("run")
    llm.patching.run(prompt, hooks="post_block", layers=0, name="run")
    with pytest.raises(ValueError, match="is the name of another now"):
        generate(llm, [prompt], greedy(1, patch=[{**ZERO, "layer": 0, "source": {"run": run}}]))


def test_a_run_that_is_gone_does_not_drop_another_of_its_name(llm):
    prompt = prompts_of([6])[0]
    gone = llm.patching.run(prompt, hooks="post_block", layers=0, name="run")
    llm.patching.drop(gone)
    run = llm.patching.run(prompt, hooks="post_block", layers=0, name="run")
    with pytest.raises(ValueError, match="drop: the rows that were given are not kept by this"):
        llm.patching.drop(gone)
    assert llm.patching.kept()["run"].uid == run.uid
    llm.patching.drop(run)


def test_rows_dropped_before_a_request_began_are_told_with_its_output(llm):
    [prompt] = prompts_of([12])
    run = llm.patching.run(prompt, hooks="post_block", layers=1)
    params = greedy(2, patch=[{**ZERO, "source": {"run": run}}])
    engine = llm.llm_engine
    engine.add_request("late", {"prompt_token_ids": prompt}, params)
    llm.patching.drop(run)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    [sample] = outputs[0].outputs
    result = sample.consumer_results["patching"]
    assert result.status == "error" and "dropped before the request began" in result.error
    assert (sample.finish_reason, sample.stop_reason) == ("error", result.error)
    assert not sample.token_ids


def test_positions_that_a_sample_does_not_reach_are_told_with_its_output(llm):
    [prompt] = prompts_of([12])
    [free] = generate(llm, [prompt], greedy(6))
    stop = tokens_of([free])[0][2]
    length = tokens_of([free])[0].index(stop) + 1
    last = 12 + length - 2  # the last token never passes the model
    entries = [
        {**ZERO, "positions": [last], "alpha": 0.0},
        {**ZERO, "layer": 2, "positions": [last, last + 1, 16], "alpha": 0.0},
    ]
    params = greedy(6, patch=entries, stop_token_ids=[stop])
    [output] = generate(llm, [prompt], params)
    assert len(tokens_of([output])[0]) == length
    result = output.outputs[0].consumer_results["patching"]
    assert result.status == "partial_error" and "patch[0]" not in result.error
    assert f"patch[1]['positions']: {last + 1}" in result.error
    assert result.error.endswith(f"is that of position {last}")
    reached = greedy(6, patch=entries)
    assert generate(llm, [prompt], reached)[0].outputs[0].consumer_results == {}


def test_a_position_whose_row_was_judged_last_is_reached(llm):
    [prompt] = prompts_of([12])
    probe = {"hook": "pre_attn", "layer": 0, "vector": [1.0] * HIDDEN}
    always = {"probe": probe, "above": -1e9, "name": "always"}
    asked = {"patch": [{**ZERO, "positions": [12], "alpha": 0.0}], "stop_when": always}
    [output] = generate(llm, [prompt], greedy(6, **asked))
    assert output.outputs[0].stop_reason == "always"
    assert len(output.outputs[0].token_ids) == 1
    assert "patching" not in output.outputs[0].consumer_results


def test_a_run_waits_for_no_requests_of_others_that_it_would_lose(llm):
    [prompt] = prompts_of([12])
    engine = llm.llm_engine
    engine.add_request("theirs", {"prompt_token_ids": prompt}, greedy(1))
    with pytest.raises(ValueError, match="requests of this engine are unfinished"):
        llm.patching.run(prompt, hooks="post_block")
    while engine.has_unfinished_requests():
        engine.step()
    assert llm.patching.kept() == {}
