"""Captures to memory, against `transformers`."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from engine.asking import generate, greedy, prompts_of, sampled
from engine.recorder import Recorder
from engine.reference import LAYERS, VOCAB

import tllm.stores
from capture.truth import POINTS, WITHOUT_LAYER, meant, reduced
from tllm import SamplingParams, answers, result_memory
from tllm.consumers.capture import landing
from tllm.consumers.capture.activations import Activations
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.ports import ConsumerFlow, ResidualStream

EVERYTHING = dict.fromkeys(POINTS, "all")
POSITIONS = {
    "all": "all",
    "all_prompt": "all_prompt",
    "all_generated": "all_generated",
    "last_prompt": "last_prompt",
    "indices": [0, 2, -1, 7],
    "ranges": {"ranges": [[1, 3], [-2, None]]},
    "windows": {"phase": "generation", "windows": [[1, 3]]},
    "tokens": {"phase": "prompt", "token_ids": list(range(0, VOCAB, 2))},
    "exclusions": {"exclude": {"positions": [-1], "ranges": [[0, 2]]}},
    "tokens of both": {"token_ids": list(range(0, VOCAB, 3)), "positions": [1]},
    "generated tokens": {"phase": "generation", "token_ids": list(range(0, VOCAB, 2))},
    "all but some tokens": {"windows": [[2, 50]], "exclude": {"token_ids": [*range(0, VOCAB, 2)]}},
}


def memory(**spec):
    return {"memory": spec}


def test_every_hook_point_at_every_form_of_positions(llm, truth):
    specs = [{"hooks": EVERYTHING, "positions": positions} for positions in POSITIONS.values()]
    lengths = [9, 40, 30, 12]
    prompts = prompts_of([lengths[i % 4] for i in range(2 * len(specs))])
    params = [greedy(6, capture=memory(**spec)) for spec in specs * 2]
    outputs = generate(llm, prompts, params)
    for output, spec in zip(outputs, specs * 2, strict=True):
        assert truth.check(output, spec) > 0
        assert output.activations is output.outputs[0].activations


@pytest.mark.parametrize("how", ["mean", "max", "last"])
def test_reductions_are_those_of_the_rows(tight_llm, truth, how):
    hooks = {"post_block": [0, -1], "mlp_out": "1:3"}
    specs = [
        {"hooks": hooks, "positions": positions, "reduction": how}
        for positions in POSITIONS.values()
    ]
    lengths = [9, 40, 30, 12, 60, 33]
    prompts = prompts_of([lengths[i % 6] for i in range(len(specs))])
    params = [greedy(14, capture=memory(**spec)) for spec in specs]
    for output, spec in zip(generate(tight_llm, prompts, params), specs, strict=True):
        truth.check(output, spec)


@pytest.mark.parametrize("how", ["none", "mean", "max", "last"])
def test_captures_of_a_request_may_overlap_in_part(llm, truth, tmp_path, how):
    """Rows that another capture wants too leave the ring apart from the others."""
    llm.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    hooks = {"post_block": [1, 3]}
    pairs = [
        ("all_prompt", [0]),
        ("all", "all_generated"),
        ({"ranges": [[2, 30]]}, [28, 3]),
        ([7, -1, 0], [-1]),
        ("all_generated", {"phase": "generation", "windows": [[1, 2]]}),
    ]
    params = []
    for number, (mine, other) in enumerate(pairs):
        own = {"hooks": hooks, "positions": mine, "reduction": how}
        stored = {"hooks": hooks, "positions": other, "request_id": f"a{number}"}
        params.append(greedy(5, capture={"memory": own, "filesystem": stored}))
        own, stored = own | {"positions": other}, stored | {"positions": mine, "reduction": how}
        stored["request_id"] = f"b{number}"
        params.append(greedy(5, capture={"memory": own, "filesystem": stored}))
    outputs = generate(llm, prompts_of([9, 40, 33, 12, 30, 31, 60, 9, 24, 26]), params)
    llm.wait_for_results(outputs)
    store = tllm.stores.open(tmp_path)
    for output, asked in zip(outputs, params, strict=True):
        captures = asked.asked.consumers
        truth.check(output, captures["memory"])
        stored = captures["filesystem"]
        record = store.record(stored["request_id"])
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        positions = meant(stored["positions"], len(output.prompt_token_ids), tokens)
        for layer in hooks["post_block"]:
            expected = truth.states(tokens)["post_block", layer][positions]
            at = record.positions("post_block", layer).tolist()
            if stored.get("reduction", "none") == "none":
                assert at == positions
            else:
                expected = reduced(expected, how)
                assert at == positions[-1:]
            found = record.tensor("post_block", layer)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), stored


def test_samples_share_the_prompt_rows_which_are_captured_once(llm, truth):
    spec = {"hooks": {"post_block": [1]}}
    params = sampled(5, n=3, capture=memory(**spec))
    before = llm.intervention_stats()[0]["rows_captured"]
    outputs = generate(llm, prompts_of([40, 12]), params)
    for output in outputs:
        assert len(output.outputs) == 3
        truth.check(output, spec)
    captured = llm.intervention_stats()[0]["rows_captured"] - before
    assert captured == 40 + 12 + 2 * 3 * 4


def test_generated_rows_alone_leave_the_prompt_to_the_prefix_cache(llm, truth):
    prompts = prompts_of([96])
    generate(llm, prompts, greedy(2))
    for positions, cached in (("all_generated", 64), ("last_prompt", 64), ("all", 0), ([40], 32)):
        spec = {"hooks": {"post_block": [1]}, "positions": positions}
        [output] = generate(llm, prompts, greedy(4, capture=memory(**spec)))
        assert output.num_cached_tokens == cached, positions
        truth.check(output, spec)


def test_rows_cross_in_shared_memory_without_being_copied(tight_llm, truth, monkeypatch):
    """With few rows: as captures of a MiB and more do. Memory is used again when the results that
    were in it are gone, and not before; rows then land there by sequence."""
    monkeypatch.setattr(result_memory, "WORTHWHILE", 256)
    session = tight_llm.llm_engine.model_executor.driver_worker.worker.session
    linked = []
    link = answers.AnswerWriter._link

    def counted(self, file, *rest):
        linked.append(file.path)
        return link(self, file, *rest)

    monkeypatch.setattr(answers.AnswerWriter, "_link", counted)
    monkeypatch.setattr(landing, "_LEAST_BYTES", 1024)
    landed = []
    find = landing.Landing.parts

    def noted(self, kind, meta, rows):
        parts = find(self, kind, meta, rows)
        landed.extend(part.stop - part.first for part in parts if part.into is not None)
        return parts

    monkeypatch.setattr(landing.Landing, "parts", noted)
    specs = [
        {"hooks": EVERYTHING},
        {"hooks": {"post_block": [1]}, "positions": "all_generated"},
        {"hooks": {"post_block": "all"}, "positions": "last_prompt"},
    ]
    params = [greedy(40, capture=memory(**spec)) for spec in specs * 2]
    kept, paths, rows_landed = [], [], []
    for number in range(4):
        outputs = generate(tight_llm, prompts_of([60, 30, 40, 9, 20, 50], seed=number), params)
        for output, spec in zip([*outputs, *kept], specs * 4, strict=False):
            truth.check(output, spec)
        paths.append(set(linked))
        rows_landed.append(sum(landed))
        linked.clear()
        landed.clear()
        kept = outputs if number == 0 else []
        del outputs, output
        gc.collect()
    assert paths[0] and paths[2] & (paths[0] | paths[1])
    assert rows_landed[3] > 100 and not rows_landed[0]
    assert not session.consumers.result_memory._pieces


def test_rows_are_not_joined_before_somebody_looks(tight_llm, truth, monkeypatch):
    """Joining copies all of them, in the user's process, while the engine waits to be asked."""
    spec = {"hooks": EVERYTHING}
    prompts = prompts_of([60, 30], seed=5)
    [output] = generate(tight_llm, prompts[:1], greedy(12, capture=memory(**spec)))
    stop = [output.outputs[0].token_ids[5]]
    asked = [greedy(12, stop_token_ids=ids, capture=memory(**spec)) for ids in ([], stop)]
    joined = []
    values = Activations._values

    def noted(self, block):
        joined.append(block)
        return values(self, block)

    monkeypatch.setattr(Activations, "_values", noted)
    outputs = generate(tight_llm, [prompts[0]] * 2, asked)
    assert outputs[1].outputs[0].finish_reason == "stop"
    assert not joined
    for output in outputs:
        truth.check(output, spec)


def test_a_capture_leaves_tokens_and_cache_of_others_alone(llm):
    prompts = prompts_of([70, 33])
    plain = [o.outputs[0].token_ids for o in generate(llm, prompts, greedy(8))]
    llm.reset_prefix_cache()
    spec = memory(hooks=EVERYTHING)
    captured = [o.outputs[0].token_ids for o in generate(llm, prompts, greedy(8, capture=spec))]
    after = generate(llm, prompts, greedy(8))
    assert captured == plain == [o.outputs[0].token_ids for o in after]
    assert [o.num_cached_tokens for o in after] == [64, 32]


def test_captures_and_plain_requests_share_batches(llm, truth):
    spec = {"hooks": {"attn_out": [2]}, "positions": "all"}
    params = [greedy(6, capture=memory(**spec)), greedy(6)] * 3
    outputs = generate(llm, prompts_of([5, 40, 30, 9, 11, 25]), params)
    for output in outputs[::2]:
        truth.check(output, spec)
    for output in outputs[1::2]:
        assert output.activations is None
        assert output.capture_results == {}


def test_rows_of_tokens_computed_ahead_of_the_end_are_cut(tight_llm, truth):
    """An end-of-sequence token is noticed a step late where steps are scheduled ahead."""
    prompts = prompts_of([9, 40, 30])
    long = generate(tight_llm, prompts, greedy(12))
    for spec in (
        {"hooks": {"post_block": [1]}},
        {"hooks": {"post_block": [1]}, "reduction": "mean", "positions": "all_generated"},
    ):
        params = []
        for output in long:
            stop = SamplingParams(
                temperature=0,
                max_tokens=12,
                detokenize=False,
                stop_token_ids=[output.outputs[0].token_ids[6]],
                ignore_eos=True,
                capture=memory(**spec),
            )
            params.append(stop)
        for output in generate(tight_llm, prompts, params):
            assert len(output.outputs[0].token_ids) < 12
            truth.check(output, spec)


@pytest.mark.parametrize("how", ["none", "mean", "last"])
def test_positions_that_choose_no_token_are_said_when_printed(llm, how):
    """The one token that is generated never passes the model."""
    spec = {"hooks": {"post_block": [1]}, "positions": "all_generated", "reduction": how}
    for max_tokens, rows in ((1, 0), (2, 1)):
        [output] = generate(llm, prompts_of([9]), greedy(max_tokens, capture=memory(**spec)))
        assert output.activations["post_block"][1].tensor.shape[0] == rows
        assert ("no rows, since no token" in repr(output.activations)) is (rows == 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("how", ["none", "mean"])
def test_dtype_is_of_what_is_kept(llm, dtype, how):
    hooks = {"post_block": [1]}
    params = [
        greedy(4, capture=memory(hooks=hooks, reduction=how)),
        greedy(4, capture=memory(hooks=hooks, reduction=how, dtype=dtype)),
    ]
    exact, kept = generate(llm, prompts_of([9]) * 2, params)
    tensor = kept.activations["post_block"][1].tensor
    assert tensor.dtype == getattr(torch, dtype)
    expected = exact.activations["post_block"][1].tensor.to(tensor.dtype)
    assert torch.allclose(tensor, expected, rtol=1e-3)


def test_names_of_the_result(llm):
    hooks = {"block_output": [-1], "lm_head_in": "all"}
    [output] = generate(llm, prompts_of([5]), greedy(2, capture=memory(hooks=hooks)))
    found = output.activations
    assert list(found) == ["post_block", "lm_head_in"]
    assert list(found["post_block"]) == [LAYERS - 1]
    assert found["block_output"][-1] is found["post_block"][LAYERS - 1]
    assert found["lm_head_in"][None].tensor.shape == (6, 128)
    with pytest.raises(KeyError, match=r"mlp_out.*captured were post_block"):
        found["mlp_out"]
    with pytest.raises(KeyError, match="layer 0 was not captured"):
        found["post_block"][0]


REFUSED = {
    r"capture\['memory'\]\['hooks'\]: unknown hook point 'middle'": {"hooks": {"middle": [1]}},
    r"capture\['memory'\]\['hooks'\]: post_block has no layer 4": {"hooks": {"post_block": [4]}},
    r"capture\['memory'\]\['hooks'\]: post_block has no layer -5": {"hooks": {"post_block": [-5]}},
    r"\['hooks'\]: post_block has no layers 2:9": {"hooks": {"post_block": "2:9"}},
    r"capture\['memory'\]\['hooks'\] is empty": {"hooks": {}},
    r"\['hooks'\]\['post_block'\]: 'x' is not a layer": {"hooks": {"post_block": ["x"]}},
    r"\['hooks'\]\['post_block'\] is empty": {"hooks": {"post_block": []}},
    r"lm_head_in belongs to no layer": {"hooks": {"lm_head_in": [2]}},
    r"capture\['memory'\] has no 'hooks'": {"positions": "all"},
    r"capture\['memory'\]\['positions'\]='most' is not known": {
        "hooks": {"post_block": [1]},
        "positions": "most",
    },
    r"capture\['memory'\]\['positions'\]: position 8 is out of range": {
        "hooks": {"post_block": [1]},
        "positions": [8],
    },
    r"capture\['memory'\]\['positions'\]: position -6 is out of range": {
        "hooks": {"post_block": [1]},
        "positions": [-6],
    },
    r"capture\['memory'\]\['positions'\]: positions=\[0\] of a prompt of 5 tokens and phase=": {
        "hooks": {"post_block": [1]},
        "positions": {"phase": "generation", "positions": [0]},
    },
    r"\['positions'\] names the tokens of image, and the prompt has no such item": {
        "hooks": {"post_block": [1]},
        "positions": "image",
    },
    r"capture\['memory'\]\['reduction'\]='sum'": {"hooks": {"post_block": [1]}, "reduction": "sum"},
    r"capture\['memory'\]\['dtype'\]='int8'": {"hooks": {"post_block": [1]}, "dtype": "int8"},
    r"capture\['memory'\] has unknown options \['tag'\]": {
        "hooks": {"post_block": [1]},
        "tag": "a",
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_refused_by_name_and_the_engine_goes_on(llm, message):
    with pytest.raises(ValueError, match=message):
        generate(llm, prompts_of([5]), greedy(4, capture=memory(**REFUSED[message])))
    assert generate(llm, prompts_of([5]), greedy(2))[0].outputs[0].token_ids


def test_refusals_that_need_no_engine():
    with pytest.raises(ValueError, match=r"capture\['memory'\] is list"):
        SamplingParams(capture={"memory": [1]})
    with pytest.raises(ValueError, match="capture='all' is str"):
        SamplingParams(capture="all")
    with pytest.raises(ValueError, match=r"capture\['memory'\]\['positions'\] is object"):
        SamplingParams(capture={"memory": {"positions": object()}})
    with pytest.raises(ValueError, match=r"capture\['a'\] and consumers\['a'\] were both"):
        SamplingParams(capture={"a": {}}, consumers={"a": {}})


def test_unknown_consumers_are_refused(llm):
    with pytest.raises(ValueError, match=r"capture\['disc'\]: no such consumer.*built-in memory"):
        generate(llm, prompts_of([5]), greedy(2, capture={"disc": {"hooks": "post_block:1"}}))


def test_other_forms_of_the_same(llm, truth):
    spec = {"hooks": {"post_block": [0, 1]}, "positions": [0, 3]}
    for other in (
        {"hooks": "post_block:0,1", "positions": range(0, 6, 3)},
        {"hooks": ["post_block:0+1"], "positions": np.array([0, 3])},
        {"hooks": {"post_block": ":2"}, "positions": {"positions": (0, 3)}},
    ):
        [output] = generate(llm, prompts_of([5]), greedy(4, capture=memory(**other)))
        truth.check(output, spec)


def test_thousands_of_distinct_captures_in_one_engine(llm, truth):
    """Programs are found again, and made anew when the numbers run out."""
    session = llm.llm_engine.model_executor.driver_worker.worker.session
    programs, capacity = session._programs, session._programs.capacity
    pick = random.Random(3)
    try:
        programs.capacity = 40
        for _ in range(6):
            specs = []
            for _ in range(20):
                points = pick.sample(POINTS, 2)
                hooks = {
                    p: "all" if p in WITHOUT_LAYER else sorted(pick.sample(range(LAYERS), 2))
                    for p in points
                }
                specs.append({"hooks": hooks, "positions": [pick.randrange(9), -1]})
            params = [greedy(2, capture=memory(**spec)) for spec in specs]
            for output, spec in zip(
                generate(llm, prompts_of([9] * 20), params), specs, strict=True
            ):
                truth.check(output, spec)
    finally:
        programs.capacity = capacity
    assert len(programs) == 0
    assert not any(programs._captured.values())


def test_more_programs_than_there_are_is_an_error_of_the_request(llm, truth):
    recorder = Recorder(ConsumerFlow(reads=[ResidualStream.read(layer=0)]))
    llm.register_consumer(recorder)
    session = llm.llm_engine.model_executor.driver_worker.worker.session
    programs, capacity = session._programs, session._programs.capacity
    specs = [{"hooks": {"post_block": [i % 4], "attn_in": [i // 4]}} for i in range(8)]
    try:
        programs.capacity = 9
        params = [greedy(2, capture=memory(**spec)) for spec in specs]
        outputs = generate(llm, prompts_of([5] * 8), params)
    finally:
        programs.capacity = capacity
    errors = [output.capture_results["memory"].error for output in outputs]
    assert any(error and "distinct combinations" in error for error in errors)
    for output, spec, error in zip(outputs, specs, errors, strict=True):
        if error is None:
            truth.check(output, spec)
    assert {k[0]: len(v) for k, v in recorder.positions("hidden").items()} == {
        output.request_id: 6 for output in outputs
    }


def test_nothing_is_left_when_all_is_over(llm):
    worker = llm.llm_engine.model_executor.driver_worker.worker
    kept = worker.session.consumers.results._kept
    before = list(kept)  # other tests' on this engine, who left them there
    generate(llm, prompts_of([5, 40]), greedy(4, capture=memory(hooks=EVERYTHING)))
    consumer = worker.session.consumers.by_id["memory"].consumer
    assert not consumer._specs
    rows = consumer._rows
    assert not (rows._unsorted or rows._pieces or rows._numbers or rows._sequences)
    assert list(kept) == before
    gc.collect()


@pytest.mark.parametrize("seed", [0])
def test_fuzz_of_random_captures(tight_llm, truth, seed, runner):
    """Random requests in an engine that chunks, caches, preempts and schedules ahead."""
    pick = random.Random(seed)
    count = 500 if runner == "v1" else 60
    shared = prompts_of([64], seed=9)[0]
    pool = [
        *prompts_of([1, 7, 24, 25, 33, 60]),
        *([*shared[:32], *p] for p in prompts_of([5, 20], seed=1)),
        *([*shared, *p] for p in prompts_of([1, 14], seed=2)),
    ]
    asks = []
    for _ in range(count):
        prompt = pick.choice(pool)
        max_tokens = pick.choice([1, 2, 5, 12])
        if pick.random() < 0.15:
            asks.append((prompt, None, greedy(max_tokens)))
            continue
        spec = random_spec(pick, len(prompt), max_tokens)
        if pick.random() < 0.1:
            params = sampled(max_tokens, n=3, capture=memory(**spec))
        else:
            params = greedy(max_tokens, capture=memory(**spec))
        asks.append((prompt, spec, params))
    rows = 0
    outputs = generate(tight_llm, [p for p, _, _ in asks], [params for _, _, params in asks])
    for output, (_, spec, _) in zip(outputs, asks, strict=True):
        if spec is None:
            assert output.activations is None
        else:
            rows += truth.check(output, spec)
    assert rows > 20 * count
    stats = tight_llm.intervention_stats()[0]
    assert stats["rows_dropped"] == 0


def random_spec(pick, prompt_len, max_tokens):
    hooks = {}
    for point in pick.sample(POINTS, pick.randint(1, 4)):
        layers = pick.choice(["all", "some", ":2", "-2:"])
        if layers == "some":
            layers = pick.sample([0, 1, 2, -1], pick.randint(1, 3))
        hooks[point] = "all" if point in WITHOUT_LAYER else layers
    end = prompt_len + max_tokens - 1

    def place():
        return pick.choice([pick.randrange(-prompt_len, 0), pick.randrange(end)])

    def criteria():
        return {
            "positions": [place() for _ in range(pick.randint(1, 4))],
            "ranges": [[pick.randrange(prompt_len), None]],
            "windows": [[pick.randint(0, 3), pick.randint(4, 9)]],
        }

    def some():
        every = criteria()
        return {key: every[key] for key in pick.sample(sorted(every), pick.randint(1, 2))}

    form = pick.choice(["named", "list", "mapping", "tokens"])
    if form == "named":
        positions = pick.choice(["all", "all_prompt", "all_generated", "last_prompt"])
    elif form == "list":
        positions = [place() for _ in range(pick.randint(1, 6))]
    elif form == "mapping":
        positions = {"phase": pick.choice(["any", "prompt", "generation"])}
        if pick.random() < 0.7:
            positions |= some()
        if "positions" in positions and len(positions) == 2:
            del positions["phase"]  # in which there may be none of them
        if pick.random() < 0.4:
            positions["exclude"] = some()
    else:
        phase = pick.choice(["any", "prompt", "generation"])
        positions = {"phase": phase, "token_ids": pick.sample(range(VOCAB), 90)}
    spec = {"hooks": hooks, "positions": positions}
    if pick.random() < 0.3:
        spec["reduction"] = pick.choice(["mean", "max", "last"])
    return spec


def test_an_engine_keeps_no_tables_of_requests_that_ended(llm):
    """Every request has a set of places of its own."""
    generate(llm, prompts_of([5]), greedy(1, capture={"memory": {"hooks": {"post_block": [0]}}}))
    session = llm.llm_engine.model_executor.driver_worker.worker.session
    memory = session.consumers.by_id["memory"].consumer
    params = [
        greedy(
            2 + number % 3,
            capture={
                "memory": {
                    "hooks": {"post_block": [number % 4], "mlp_out": [number // 4 % 4]},
                    "positions": "all_generated",
                    "reduction": ("mean", "max", "last")[number % 3],
                }
            },
        )
        for number in range(96)
    ]
    outputs = generate(llm, prompts_of([3 + number % 4 for number in range(96)]), params)
    for output in outputs:
        assert output.capture_results["memory"].status == "ok"
    assert not memory._reductions
