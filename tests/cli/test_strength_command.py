"""`tllm strength-sweep`: what is asked wrongly is refused before an engine starts.

What it does in an engine is shown in `tests/steering/test_extract.py`, beside the call's own test.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tllm.cli import strength_sweep as strengthening
from tllm.steering import SteeringModule, StrengthSweep
from tllm.steering.strength_sweep import StrengthPoint


@pytest.fixture
def asked(tmp_path):
    """What is right up to the model, which is none."""
    path = tmp_path / "mood.safetensors"
    SteeringModule({"post_block": {3: np.ones(8)}}).save(path)
    return {
        "--vectors": str(path),
        "--strengths": "-1,0,1",
        "--prompt": "One day",
        "--matches": "happy",
    }


FUNCTIONS = """
def sad(text): return -1.0
LENGTH = 3
"""


def test_what_is_asked_wrongly_is_refused(invoke, asked, tmp_path):
    functions, broken, lines = (tmp_path / name for name in ("f.py", "b.py", "lines.jsonl"))
    functions.write_text(FUNCTIONS)
    broken.write_text("import no_such_module")
    lines.write_text('"One day"\n{"promt": "One day"}\n')
    (tmp_path / "none.jsonl").touch()
    both, ending = tmp_path / "both.jsonl", tmp_path / "e.py"
    both.write_text('{"prompt": "One day", "prompt_token_ids": [3, 4]}\n')
    ending.write_text("import sys\nsys.exit(0)\n")
    for changed, message in (
        ({"--strengths": "0,much"}, "--strengths '0,much': give numbers with commas between"),
        ({"--strengths": "0,inf"}, "--strengths=inf is not finite"),
        ({"--prompt": None}, "give at least one --prompt, or --prompts"),
        ({"--prompts": lines}, "line 2: give a text, or an object with 'prompt'"),
        ({"--prompts": both}, "line 1: both 'prompt' and 'prompt_token_ids' were given; give one"),
        ({"--texts": tmp_path / "none.jsonl"}, "none.jsonl has no lines"),
        ({"--texts": tmp_path / "lost.jsonl"}, "lost.jsonl' is not there"),
        ({"--matches": None}, "give --matches REGEX"),
        ({"--effect": f"{functions}:sad"}, "one of the two"),
        ({"--matches": "(happy"}, "is no regular expression: missing )"),
        ({"--matches": None, "--effect": "f:sad"}, "is not FILE.py:NAME"),
        ({"--matches": None, "--effect": "lost.py:sad"}, "'lost.py' is no file"),
        ({"--matches": None, "--effect": f"{functions}:LENGTH"}, "has no function 'LENGTH'"),
        ({"--matches": None, "--effect": f"{broken}:sad"}, "the file raised ModuleNotFoundError"),
        ({"--matches": None, "--effect": f"{ending}:sad"}, "the file raised SystemExit: 0"),
        ({"--phase": "later"}, "--phase='later' is not known; choose one of any, prefill, decode"),
        ({"--max-tokens": "0"}, "--max-tokens 0 must be 1 or more"),
        ({"--temperature": "-1"}, "--temperature -1.0 must be 0 or more"),
        ({"--max-perplexity-ratio": "0.5"}, "--max-perplexity-ratio 0.5 must be 1 or more"),
        ({"--out": tmp_path / "rows.txt"}, "must end in .json or .csv"),
        ({"--plot": tmp_path / "rows.png"}, "must end in .svg"),
        ({"--out": tmp_path / "lost" / "rows.csv"}, "there is no folder"),
        ({"--vectors": tmp_path / "lost.gguf"}, "lost.gguf' is not there"),
        ({"--layers": "3:"}, "--layers: which layers 3: are is not known without the model"),
        ({"--layers": "2"}, "has vectors for the layers [3]"),
        ({"--features": "2"}, "features= is for sparse autoencoders"),
        ({"--engine-arg": "dtype"}, "--engine-arg 'dtype' is not NAME=VALUE"),
        ({"--engine-arg": "model=x"}, "--engine-arg 'model' is the command's own; leave it out"),
        (
            {"--engine-arg": "max_num_seq=4"},
            "'max_num_seq' is no argument of an engine; did you mean max_num_seqs",
        ),
        (
            {"--enforce-eager": "true"},
            "tllm strength-sweep has no option --enforce-eager; argument",
        ),
        ({}, "no engine with the model 'no-model' (there is no such folder here): "),
    ):
        given = {name: str(value) for name, value in (asked | changed).items() if value is not None}
        options = [part for option in given.items() for part in option]
        status, out, error = invoke("strength-sweep", "no-model", *options)
        assert status == 2, changed
        assert message in " ".join(error.split()), (changed, error)
        assert "Traceback" not in out + error


def test_an_empty_prompt_is_refused_before_an_engine_starts(invoke, asked, tmp_path):
    demo = str(Path(__file__).parents[2] / "demo" / "model")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"One day"\n""\n')
    for changed, name in (
        ({"--prompt": ""}, "--prompt"),
        ({"--prompts": lines}, "a line of --prompts"),
        ({"--texts": lines}, "a line of --texts"),
    ):
        given = asked | changed | {"--engine-arg": "no_such_argument=1"}
        options = [str(part) for option in given.items() for part in option]
        status, _, error = invoke("strength-sweep", demo, *options)
        assert status == 2
        assert f"{name} is empty; give a text that has tokens" in error


def test_a_sweep_without_a_best_strength_is_written_and_shown(invoke, asked, tmp_path, monkeypatch):
    """What the weakest strength wrote fills the context."""
    points = [StrengthPoint(0.0, 0.1, np.nan, np.nan, np.nan), StrengthPoint(1.0, 0.9, *[2.0] * 3)]
    monkeypatch.setattr(strengthening, "run", lambda *_: StrengthSweep(tuple(points)))
    demo = str(Path(__file__).parents[2] / "demo" / "model")
    for name in ("rows.json", "rows.csv"):
        given = asked | {"--out": str(tmp_path / name), "--plot": str(tmp_path / "rows.svg")}
        options = [part for option in given.items() for part in option]
        status, out, _ = invoke("strength-sweep", demo, *options)
        assert status == 0
        assert "best: not known: strength 0.0 has no perplexity to compare with" in out
    told = json.loads((tmp_path / "rows.json").read_text())
    assert told["best"] is None and [row["effect"] for row in told["rows"]] == [0.1, 0.9]
    assert (tmp_path / "rows.csv").read_text().count("\n") == 3
    assert (tmp_path / "rows.svg").exists()
