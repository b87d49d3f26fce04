"""`tllm verify`: it certifies what is right, and finds what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closed_output import nobody_reads
from rich.console import Console
from transformers import LlamaConfig

from tllm.cli.verify import engine_options, render
from tllm.ports import Phase
from tllm.verify import job as verify_job
from tllm.verify.batches import Ask
from tllm.verify.certificate import Certificate, row_errors
from tllm.verify.comparison import Comparison
from tllm.verify.gated import Judged
from tllm.verify.job import VerifyJob, exact_float32, run
from tllm.verify.memory import available, needs
from tllm.verify.reference import Reference
from tllm.verify.served import Served
from tllm.verify.steered import Steered
from tllm.verify.tolerance import Tolerance
from tllm.verify.verifier import Verifier

pytestmark = pytest.mark.usefixtures("forked_processes")  # for that of plain `transformers`

POINTS = ("attn_out", "post_block", "lm_head_in")


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


def examined(llm: Any, reference: Reference, **options: Any) -> Certificate:
    certificate = Certificate("tiny", "transformers")
    given = {"points": POINTS, "steered_layers": 1, **options}
    Verifier(llm, certificate, **given).compare(reference)
    return certificate


def test_a_model_that_does_not_generate_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        architectures=["LlamaForSequenceClassification"],
    )
    config.save_pretrained(tmp_path)
    problem = r"\(LlamaForSequenceClassification\) is a model for pooling, and what `tllm verify`"
    told: list[str] = []
    with pytest.raises(ValueError, match=problem):
        run(VerifyJob(str(tmp_path)), told.append)
    assert told == []


@pytest.mark.parametrize("dtype", ["float32", "float", torch.float32])
def test_float32_is_verified_with_all_bits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    with exact_float32(dtype):
        assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in os.environ
    with exact_float32("bfloat16"):
        assert "TRITON_F32_DEFAULT" not in os.environ
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    with exact_float32(dtype):  # as the user has it
        assert os.environ["TRITON_F32_DEFAULT"] == "tf32"
    assert os.environ["TRITON_F32_DEFAULT"] == "tf32"


def test_an_engine_that_is_right_is_certified(llm: Any, reference: Reference) -> None:
    certificate = examined(llm, reference, given=[[5, 6, 7]])
    assert certificate.differences == []
    assert certificate.unchecked == []
    assert certificate.exit_status == 0
    assert list(certificate.points) == [*POINTS, "logits"]
    assert certificate.points["post_block"].layers == [0, 1, 2, 3]
    assert all(figures.rows for figures in certificate.points.values())
    assert all(certificate.points[point].seen for point in POINTS)
    assert all(certificate.points[point].patches_seen for point in POINTS)
    assert all(certificate.points[point].gates_seen for point in POINTS)
    batches = {batch.name: batch for batch in certificate.batches}
    assert batches["mixed"].cached_tokens
    assert batches["mixed"].chunked
    assert batches["mixed, again"].preemptions and not batches["patched"].preemptions
    assert batches["prompts"].samples == 3


def test_each_request_that_was_preempted_counts(llm: Any) -> None:
    verifier = Verifier(llm, Certificate("tiny", "transformers"), points=POINTS)
    asks = [Ask([5, 6, 7], None), Ask([8, 9], None), Ask([5, 8], None, max_tokens=1)]
    counted = [
        verifier.serve("mixed", given, preempts=preempts)[0].preemptions
        for given, preempts in ((asks, True), (asks, False), (asks[-1:], True))
    ]
    assert counted == [2, 0, 0]


def test_a_point_that_was_named_and_is_not_there_is_not_checked(llm: Any) -> None:
    certificate = Certificate("tiny", "transformers")
    verifier = Verifier(llm, certificate, points=["block_output", "router"])
    assert verifier.points == ["post_block"]
    [what] = certificate.unchecked
    assert what == f"router: {certificate.lacking['router']}" and "mixture of experts" in what
    assert (certificate.verdict, certificate.exit_status) == ("incomplete", 3)
    certificate = Certificate("tiny", "transformers")
    Verifier(llm, certificate)
    assert "router" in certificate.lacking and certificate.exit_status == 0


def test_steering_that_the_reference_has_not_is_a_difference_with_its_place(
    llm: Any, reference: Reference
) -> None:
    llm.steering.set({"post_block": {1: [0.01] * 128}})
    try:
        certificate = examined(llm, reference, points=["pre_attn", "post_block"])
    finally:
        llm.steering.clear()
    assert certificate.exit_status == 1
    rows = [found for found in certificate.differences if found.where in ("pre_attn", "post_block")]
    # A point is read before it is steered there: the next block is the first to be off.
    assert {found.layer for found in rows if found.where == "post_block"} == {2, 3}
    assert {found.layer for found in rows if found.where == "pre_attn"} <= {2, 3}
    first = rows[0]
    assert first.batch == "mixed"
    assert first.request == 0
    assert first.position is not None
    assert first.size > first.limit
    certificate.engine = dict.fromkeys(
        ("architecture", "tllm", "vllm", "runner", "dtype", "device"), "x"
    ) | {"num_layers": 4}
    certificate.model = "models/" + 10 * "name-"
    console = Console(record=True, width=50)
    render(certificate, console)
    heading = console.export_text(clear=False).split("engine")[0]
    assert "".join(heading.removeprefix("model").split()) == f"{certificate.model}(x)"
    console.width = 100
    render(certificate, console)
    text = console.export_text()
    assert f"post_block of layer {first.layer}" in text or "pre_attn of layer 2" in text
    assert "do not trust" in text
    assert json.loads(certificate.to_json())["verdict"] == "differs"


def test_log_probabilities_are_compared_where_there_are_no_rows(
    llm: Any, reference: Reference
) -> None:
    for shift, status in ((0.0, 3), (0.1, 1)):
        certificate = Certificate("tiny", "plain vLLM")
        verifier = Verifier(llm, certificate, points=POINTS)
        served = verifier.serve_plainly("it is too large")
        found = []
        for each in served:
            expected = torch.log_softmax(reference.run(each.passed)[1], -1)
            tokens = torch.tensor(each.tokens[1:])[:, None]
            found.append((expected.gather(1, tokens)[:, 0] + shift).tolist())
        verifier.compare_plainly(served, found)
        assert certificate.exit_status == status
        assert any("too large" in what for what in certificate.unchecked)


def test_the_command_finds_a_model_that_is_computed_otherwise(
    tiny_model: str, invoke: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "certificate.json"
    options = "--points post_block --steered-layers 1 --enforce-eager --block-size 32"
    override = '{"rms_norm_eps": 0.001}'
    status, report, errors = invoke(
        *("verify", tiny_model, "--json", str(path), "--hf-overrides", override), *options.split()
    )
    assert status == 1, report + errors
    found = json.loads(path.read_text())
    assert found["verdict"] == "differs"
    assert found["differences"][0]["where"] == "post_block"
    assert found["differences"][0]["layer"] == 0
    assert "differs: post_block of layer 0: mixed request 0, sample 0, position" in report


def test_the_certificate_is_written_though_nobody_reads_what_is_printed(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = ("architecture", "tllm", "vllm", "runner", "dtype", "device", "num_layers")
    certificate = Certificate("tiny", "transformers", dict.fromkeys(said, "1"), unchecked=["rows"])
    monkeypatch.setattr(verify_job, "run", lambda *given: certificate)
    path = tmp_path / "certificate.json"
    with nobody_reads():
        invoke("verify", "tiny", "--json", str(path))
    assert json.loads(path.read_text())["verdict"] == "incomplete"


def test_a_file_that_could_not_be_written_is_refused_before_the_work(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    status, _, error = invoke("verify", "no-model", "--json", str(tmp_path / "lost" / "c.json"))
    assert status == 2
    assert "not verified: --json" in error and "there is no folder" in error
    status, _, error = invoke("verify", "no-model", "--points", "post_blck")
    assert status == 2
    assert "not verified: unknown hook point 'post_blck'" in error


def test_what_cannot_be_asked_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown hook point 'nowhere'"):
        VerifyJob("model", points=("nowhere",))
    with pytest.raises(ValueError, match="is no file"):
        VerifyJob("model", prompts=tmp_path / "absent")
    lines = tmp_path / "prompts.jsonl"
    for content, sentence in (
        ("Once upon a time", "line 1 is not JSON: .* a text with quotation marks"),
        ('"a"\n{"promt": "b"}', "line 2: give a text, or an object with 'prompt' or"),
        (
            '{"prompt": "a", "prompt_token_ids": [1]}',
            "line 1: both 'prompt' and 'prompt_token_ids'",
        ),
        ('{"prompt": 3}', "line 1: give a text"),
        (
            '{"prompt": "a", "prompt_token_ids": [3]}',
            "line 1: both 'prompt' and 'prompt_token_ids'",
        ),
        (
            '{"prompt": "a", "multi_modal_data": {}}',
            r"line 1 has \['multi_modal_data'\], and these",
        ),
        ('{"prompt_token_ids": ["3"]}', "line 1: give a text"),
        ("\n", "has none; give one or more, each a line"),
    ):
        lines.write_text(content)
        with pytest.raises(ValueError, match=sentence):
            VerifyJob("model", prompts=lines)
    lines.write_text('"a"\n{"prompt_token_ids": [3]}')
    VerifyJob("model", prompts=lines)
    with pytest.raises(ValueError, match="unknown options --no-such-thing"):
        engine_options(["--no-such-thing"])
    assert engine_options(["--tensor-parallel-size", "2", "--enforce-eager"]) == {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
    }


def test_models_that_transformers_cannot_run_say_why(tiny_model: str, tmp_path: Path) -> None:
    assert not needs(tiny_model, {}).unknown
    assert needs(tiny_model, {}).bytes > 4 * 4 * 128 * 256 * 3
    config = json.loads((Path(tiny_model) / "config.json").read_text())
    for changed, why in (
        ({"model_type": "no_such_kind"}, "does not know it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        assert why in needs(str(tmp_path), {}).unknown


def test_a_large_row_hides_no_errors_of_others() -> None:
    expected = torch.ones(4, 8)
    expected[0] = 1e4
    got = expected.clone()
    got[2, 3] += 0.5
    assert row_errors(got, expected).tolist() == [0.0, 0.0, 0.5, 0.0]
    assert row_errors(torch.zeros(2, 8), torch.zeros(2, 8)).tolist() == [0.0, 0.0]


def test_scores_that_are_wrong_or_no_numbers_are_beyond_the_limit() -> None:
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    states = {"post_block": {0: rows}}
    when = Judged(("post_block", 0), torch.ones(8), threshold=0.0)
    found = when.scores(states)[[1, 2, 3]] + torch.tensor([1e-9, 0.5, torch.nan])
    errors = when.errors(found, [1, 2, 3], states, limit=1e-4)
    assert (errors > 1e-4).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("reads", "cached", "scored_from", "is_right"),
    [
        ("decode", 4, 4, True),
        ("decode", 4, 0, True),
        ("decode", 4, 5, False),
        ("decode", 0, 4, False),
        (None, 4, 4, True),
        ("any", 0, 0, True),
        ("any", 4, 4, False),
        ("prefill", 4, 4, False),
    ],
)
def test_only_what_the_prefix_cache_served_may_lack_scores(
    reads: Phase | None, cached: int, scored_from: int, is_right: bool
) -> None:
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    when = Judged(("post_block", 0), torch.ones(8), threshold=0.0)
    steered = Steered(when.place, "add", torch.ones(8), when=when)
    ask = Ask([*range(6)], reads, max_tokens=3, steering=(steered,))
    states = {"post_block": {0: rows}}
    found = SimpleNamespace(
        positions=torch.arange(scored_from, 8), scores=when.scores(states)[scored_from:].numpy()
    )
    completion = SimpleNamespace(token_ids=[6, 7, 8], index=0, signals={when.name: found})
    certificate = Certificate("tiny", "transformers")
    comparison = Comparison(None, certificate, Tolerance.of(torch.float32), [when.place], 8)
    comparison._compare_signal(Served("gated", 0, ask, completion, 6, cached), when, states)
    assert (certificate.differences == []) is is_right


@pytest.mark.parametrize("device", ["cuda:99", "banana", "cpu:0"])
def test_a_device_that_the_reference_cannot_use_is_named(device):
    """It was said that torch was compiled without CUDA, and not of what."""
    with pytest.raises(ValueError, match=f"the reference device '{device}' cannot be used: .* cpu"):
        available(device)
