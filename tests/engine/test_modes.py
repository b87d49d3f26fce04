"""The same answers from one process, an engine process, two ranks, two stages, compiled or not."""

import json
import os
from pathlib import Path

import pytest
import torch
from child_process import run_script
from two_workers import skip_without_two_workers

from engine import modes, two_hosts
from engine.asking import RELATIVE, error_of
from engine.reference import HIDDEN, Addition, GatedChange, PatchedRow
from engine.test_remembering import after, following, of_prompt, rest

MODES = {
    "engine process": ({"enforce_eager": True}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "compiled": ({"enforce_eager": False}, {}),
    "two tensor-parallel ranks": (
        {"enforce_eager": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "two pipeline stages": (
        # Stages on a CPU need a traced model; what Inductor makes of it is "compiled".
        {
            "compilation_config": {"backend": "eager"},
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}
if os.environ.get("TLLM_TEST_FOUR_WORKERS"):  # four processes, and minutes on two cores
    MODES["two pipeline stages of two ranks"] = (
        {**MODES["two pipeline stages"][0], "tensor_parallel_size": 2},
        {**MODES["two pipeline stages"][1], "VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"},
    )

TWO_HOSTS = {
    "two tensor-parallel ranks": {"enforce_eager": True, "tensor_parallel_size": 2},
    "two pipeline stages": {
        "compilation_config": {"backend": "eager"},
        "pipeline_parallel_size": 2,
    },
}

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "1",
    reason="the interpreted V2 runner is set up in this process only",
)


def asked_additions(prompt):
    early, late, middle = modes.vectors(HIDDEN)
    return [
        Addition(("post_block", 0), early),
        Addition(("pre_attn", 3), late, start=len(prompt)),
        Addition(("post_block", 2), middle),
    ]


def gated_change(layer, probed, scale=1.0):
    """What a condition of `modes` means."""
    vector, probe = modes.gates(HIDDEN)
    return GatedChange(
        ("post_block", layer),
        lambda h: h + scale * vector,
        [(("pre_attn", probed), lambda h: h @ probe)],
        lambda scores: (scores[0] > 1.0).float(),
    )


def check_conditions(saved, mode, reference, changes):
    """Scores, strengths and where it fired, of the last run of the reference; a probe on a later
    stage than what it decides on is refused."""
    signals = saved["signals"][modes.GATED]
    assert set(signals) == {f"gate {layer}" for layer in modes.GATES}
    for layer, change in zip(modes.GATES, changes, strict=True):
        signal, [scores] = signals[f"gate {layer}"], change.scores
        assert 0 < float(change.strength([scores]).mean()) < 1
        assert set(range(len(modes.PROMPTS[modes.GATED]), len(scores))) <= {*signal.positions}
        assert signal.scores == pytest.approx(scores[signal.positions].numpy(), rel=1e-3, abs=5e-3)
        fired = [p for p in signal.positions.tolist() if scores[p] > 1.0]
        assert signal.fired.tolist() == fired
    assert all(not each for i, each in enumerate(saved["signals"]) if i != modes.GATED)
    prompt = modes.PROMPTS[modes.GATED]
    later, mean, begun, goes_on = (gated_change(n, n) for n in (1, 3, 1, 1))
    later.recall = begun.recall = rest
    mean.recall, mean.strength = after(len(prompt)), lambda scores: (scores[0] < 1.0).float()
    mean.probes = [(at, of_prompt(score, len(prompt), "prompt_mean")) for at, score in mean.probes]
    goes_on.recall = torch.ones_like
    assert saved["remembered"] == reference.greedy(prompt, modes.TOKENS, gated=[later, mean])
    far, back = gated_change(2, 0, modes.FAR), gated_change(0, 3)
    back.recall, back.start = rest, len(prompt)
    turns = {"across": far, "across later": back, "told": begun, "told again": goes_on}
    if mode.startswith("two pipeline stages"):
        assert "on a later pipeline stage, than what it decides on" in saved["across later"]
        del turns["across later"]
    for name, change in turns.items():
        assert saved[name] == reference.greedy(prompt, modes.TOKENS, gated=[change]), name


def far_changes(prompt_len):
    """What `modes.across_remembered` means."""
    for_rest, for_next = gated_change(2, 0), gated_change(3, 1)
    for_rest.recall, for_next.recall = rest, following
    last, mean = gated_change(2, 1), gated_change(3, 0)
    last.recall = mean.recall = after(prompt_len)
    last.strength = lambda scores: torch.ones_like(scores[0])
    mean.strength = lambda scores: (scores[0] < 1.0).float()
    for change, over in ((last, "prompt_last"), (mean, "prompt_mean")):
        change.probes = [(at, of_prompt(of, prompt_len, over)) for at, of in change.probes]
    return [for_rest, for_next, last, mean]


def check_mixed(found, reference):
    """Conditions whose probes are on an earlier stage than what they decide on, in one batch with
    requests that ask nothing."""
    asked = {
        modes.across_remembered: far_changes,
        modes.across: lambda _: [gated_change(2, 0, modes.FAR)],
    }
    for (tokens, signals), (i, of) in zip(found, modes.MIXED.items(), strict=True):
        prompt = modes.PROMPTS[i]
        changes = [] if of is None else asked[of](len(prompt))
        assert tokens == reference.greedy(prompt, modes.TOKENS, gated=changes)
        assert len(signals or {}) == len(changes)
        if of is modes.across_remembered:
            for name, change in zip(("far rest", "far next"), changes[:2], strict=True):
                signal, [scores] = signals[name], change.scores
                assert signal.positions.tolist() == list(range(len(scores)))
                assert signal.scores == pytest.approx(scores.numpy(), rel=1e-3, abs=5e-3)
                assert 0 < len(signal.fired) < len(scores)
            assert signals["far last"].positions.tolist() == [len(prompt) - 1]
            assert signals["far mean"].positions.tolist() == [len(prompt) - 1]


def check_lens(payload, mode, reference):
    """Ranks that share the LM head give the lens together; stages are refused."""
    if mode.startswith("two pipeline stages"):
        assert (
            "this engine has 2 pipeline stages; start it with pipeline_parallel_size=1" in payload
        )
        return
    prompt = modes.PROMPTS[0]
    tokens = [*prompt, *reference.greedy(prompt, 1)]
    places = [("post_block", 1), ("post_block", 3)]
    _, states = reference.run(tokens, places)
    model = reference.model
    with torch.no_grad():
        rows = torch.stack([states[place] for place in places], 1)
        logprobs = model.lm_head(model.model.norm(rows)).log_softmax(-1)
    assert payload["token_ids"].positions.tolist() == list(range(len(tokens)))
    found = torch.from_numpy(payload["logprobs"].values)
    named = logprobs.gather(2, torch.from_numpy(payload["token_ids"].values).long())
    for wanted in (logprobs.topk(2).values, named):
        assert abs(found - wanted).max() < 2e-4


def check_ended(ended, reference):
    """A condition that always holds ends a sample after `min_tokens`, and refuses a prompt."""
    prompt, stopped, refused = modes.PROMPTS[0], *ended
    fired = list(range(len(prompt), len(prompt) + 3))
    assert stopped == (reference.greedy(prompt, 3), "stop", "always", fired)
    assert refused[:3] == ([], "abort", "always")


def check_diced(diced, mode, reference):
    """Ranks steer by what the first one decides; stages are refused."""
    if mode.startswith("two pipeline stages"):
        assert "Actions.write is not possible: this engine has 2 pipeline stages" in diced
        return
    prompt, vector = modes.PROMPTS[0], torch.linspace(-1, 1, HIDDEN)
    *ended, error, notes = diced
    additions = [
        Addition(("post_block", 2), n["scale"] * vector, n["at"] + 1, n["at"] + 2) for n in notes
    ]
    assert error is None
    assert [n["at"] - len(prompt) for n in notes] == [0, 1, 2, 3]
    assert ended == [reference.greedy(prompt, 4, additions), "stop", "enough"]


@pytest.mark.parametrize("mode", MODES)
def test_rows_tokens_and_steering_are_those_of_transformers(mode, tiny_model, reference, tmp_path):
    options, environment = MODES[mode]
    if mode.startswith("two"):
        skip_without_two_workers()
    output = tmp_path / "saved.pt"
    run_script(
        modes,
        *(tiny_model, output, json.dumps(options)),
        log=tmp_path / "log",
        environment=environment,
        cwd=Path(modes.__file__).parents[2],
        timeout=270,
        attempts=2,
        forks=True,
    )
    check(torch.load(output, weights_only=False), mode, reference)


@pytest.mark.skipif(
    not os.environ.get("TLLM_TEST_TWO_HOSTS"),
    reason="two hosts on this machine are made by root, with TLLM_TEST_TWO_HOSTS=1",
)
@pytest.mark.parametrize("mode", TWO_HOSTS)
def test_two_hosts_are_as_one(mode, tiny_model, reference, tmp_path):
    output, options = tmp_path / "saved.pt", two_hosts.layout(TWO_HOSTS[mode])
    arguments = {**modes.ARGUMENTS, **options}
    with (
        two_hosts.two_hosts(),
        two_hosts.other_half(tiny_model, arguments, tmp_path / "other log", os.environ),
    ):
        run_script(
            modes,
            *(tiny_model, output, json.dumps(options)),
            log=tmp_path / "log",
            environment=two_hosts.environment("a"),
            cwd=Path(modes.__file__).parents[2],
            timeout=400,
            prefix=two_hosts.on("a"),
        )
    check(torch.load(output, weights_only=False), mode, reference)


def check(saved, mode, reference):
    """What `modes` saved is what `transformers` has."""
    assert saved["errors"] == []
    steering = Addition(("post_block", 2), torch.linspace(-3, 3, HIDDEN))
    _, run = reference.run(modes.PROMPTS[modes.RUN], [("post_block", 0), ("post_block", 3)])
    patched = [
        PatchedRow(("post_block", layer), position, run["post_block", layer][row])
        for (layer, position), row in modes.FROM.items()
    ]
    for i, prompt in enumerate(modes.PROMPTS):
        additions = {modes.STEERED: [steering], modes.ASKED: asked_additions(prompt)}.get(i, [])
        patches = patched if i == modes.PATCHED else []
        gated = [gated_change(n, n) for n in modes.GATES] if i == modes.GATED else []
        tokens = reference.greedy(prompt, modes.TOKENS, additions, patches, gated)
        assert [run[i] for run in saved["tokens"]] == [tokens] * 3
        passed = [*prompt, *tokens][:-1]
        places = {"early": ("post_block", 0), "late": ("lm_head_in", None)}
        logits, states = reference.run(passed, list(places.values()), additions, patches, gated)
        expected = {name: states[place] for name, place in places.items()} | {"logits": logits}
        for name, (positions, rows) in saved["rows"][i].items():
            first = len(prompt) - 1 if name == "logits" else 0
            assert positions == list(range(first, len(passed)))
            for position, row in zip(positions, rows, strict=True):
                assert error_of(row, expected[name][position]) < RELATIVE
        assert set(saved["rows"][i]) == {*modes.READERS}
        if gated:
            check_conditions(saved, mode, reference, gated)
    check_lens(saved["lens"], mode, reference)
    check_ended(saved["ended"], reference)
    check_mixed(saved["mixed"], reference)
    check_diced(saved["diced"], mode, reference)
    for tokens, finished, reason in saved["patched too late"]:
        assert (tokens, finished) == ([], "error")
        assert "dropped before the request began" in reason
    assert saved["unsent"] == 0
    assert all(worker["running_sequences"] == 0 for worker in saved["stats"])
    in_process = mode == "compiled"
    assert saved["dead"] == (None if in_process else "EngineDeadError")
