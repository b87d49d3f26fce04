"""The survey of architectures: a few of them whole, and what it writes."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import vllm
from oldest_vllm import ON_0_30

from .survey import DOCUMENT, Finding, document, examined, kept

#: One of each kind of block, or router, that the other tests of the oracle have not.
FAST = ("gpt_oss", "granitemoehybrid", "nemotron_h", "deepseek_v3", "lfm2", "hunyuan_v1_moe")
if ON_0_30:  # it computes gpt_oss on a CPU in bfloat16 alone
    FAST = FAST[1:]


@pytest.mark.skipif(
    os.environ["TLLM_TEST_RUNNER"] == "v2", reason="points do not depend on the runner"
)
def test_architectures_are_tapped_and_right() -> None:
    findings = list(examined(FAST, "v1"))
    assert [finding.family for finding in findings] == list(FAST)
    for finding in findings:
        assert finding.is_right, finding
        assert finding.rows
        assert finding.tokens


def test_document_says_what_was_found_and_where() -> None:
    found = Finding(
        "hybrid",
        "V1 CPU",
        "HybridForCausalLM",
        "hybrid",
        num_layers=3,
        layers={"pre_attn": [0, 1, 2], "attn_out": [0, 2], "post_block": [0, 1, 2]},
        reasons=dict.fromkeys(("attn_in", "post_attn", "mlp_in", "mlp_out", "lm_head_in"), "."),
        worst={"pre_attn": 1e-6, "attn_out": 2e-6},
    )
    findings = [
        found,
        Finding("hybrid", "V2 CPU", failure="no kernel"),
        Finding("loops", "V1 CPU", "LoopsForCausalLM", refusal="it runs its blocks twice"),
        Finding(
            "wrong", "V1 CPU", "WrongForCausalLM", worst={"logits": 0.1}, problems=["."], plain=0.2
        ),
        Finding("absent", "V1 CPU", failure="no kernel"),
    ]
    text = document(findings)
    points = "all but attn_in, post_attn, mlp_in, mlp_out, lm_head_in; attn_out in layers 0, 2"
    assert f"| `HybridForCausalLM` (hybrid) | hybrid | {points} | 2e-06 | not run |  |" in text
    assert "compared in every row, but for these, which are older: hybrid. `router`" in text
    assert "in these rows: none." in text
    more = {**found.worst, "embed": 1e-6, "router": 1e-6}
    again = document([replace(found, worst=more), *findings[1:]])
    assert "compared in every row. `router`" in again and "in these rows: hybrid." in again
    assert "| `LoopsForCausalLM` (loops) | it runs its blocks twice |" in text
    assert "| `WrongForCausalLM` (wrong) | 1e-01 | 2e-01 |" in text
    assert "| absent | no kernel |" in text
    assert "`SolarForCausalLM`" in text
    said = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| no reference here \|$", text, re.MULTILINE))
    by_its_row = "TeleChat2", "MistralLarge3", "SarvamMoE", "LongcatFlashNgram", "Step3p5"
    assert {said[f"{name}ForCausalLM"] for name in by_its_row} == {"tapped, by its row"}
    at_load = "SarvamMLA", "K2Horizon", "HCXVisionV2"
    assert {said[f"{name}ForCausalLM"] for name in at_load} == {"looked at when it is loaded"}


@pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="the page lists the architectures of vLLM 0.32"
)
def test_page_is_what_was_found() -> None:
    assert DOCUMENT.read_text() == document(kept()), "python -m tests.oracle.survey --write"
