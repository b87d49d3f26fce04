"""`tllm sweep`: one pair in an engine, and what is asked wrongly."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from closed_output import nobody_reads
from PIL import Image
from rich.console import Console

from tllm.cli import sweep as sweeping
from tllm.cli.sweep import draw, read_pairs, render, write
from tllm.patching import Sweep

ENGINE = [
    *("--engine-arg", "dtype=float32", "--engine-arg", "enforce_eager=true"),
    *("--engine-arg", "max_model_len=64", "--engine-arg", "num_gpu_blocks_override=64"),
    *("--engine-arg", "disable_log_stats=true"),
]

KL = ["--clean", "a", "--corrupt", "b", "--metric", "kl"]


def test_a_pair_is_swept_written_and_drawn(invoke, tiny_model, tmp_path):
    out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    asked = ["--clean", "a story", "--corrupt", "a stXry", "--right", "a", "--wrong", "b"]
    more = ["--metric", "logit_diff, kl", "--layers", "0, -1", "--out", str(out), "--top", "3"]
    status, text, error = invoke(
        "sweep", tiny_model, *asked, *more, "--heatmap", str(picture), *ENGINE
    )
    assert (status, error.count("Error")) == (0, 0), text + error
    assert "logit_diff: clean" in text and "experiments" in text
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 7
    last = rows[-1]
    assert (last["layer"], last["position"], last["text"]) == (3, 6, "y")
    assert last["kl"] == pytest.approx(0, abs=1e-4), "the last token of the last block is the clean"
    assert max(abs(row["kl"]) for row in rows) > 1e-3
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"


def test_paths_of_heads_are_swept(invoke, tiny_model, tmp_path):
    out, picture = tmp_path / "heads.jsonl", tmp_path / "heads.png"
    asked = ["--clean", "a story", "--corrupt", "a stXry", "--right", "a", "--wrong", "b"]
    more = ["--hooks", "attn_heads", "--heads", "all", "--together", "--freeze", "all"]
    more += ["--receivers", "mlp_in:2, attn_in:3", "--out", str(out), "--heatmap", str(picture)]
    # The command starts its engine with the hook points that are asked for.
    status, text, error = invoke("sweep", tiny_model, *asked, *more, *ENGINE)
    assert (status, error.count("Error")) == (0, 0), text + error
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4 * 4 and rows[5] | {"recovered": 0} == {
        "pair": 0, "hook": "attn_heads", "layer": 1, "head": 1, "position": None, "token": None,
        "recovered": 0, "text": None,
    }  # fmt: skip
    assert all(row["recovered"] == 0 for row in rows if row["layer"] == 3), "after the receivers"
    assert any(row["recovered"] != 0 for row in rows)
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"


def test_an_answer_alone_is_no_list_of_letters(tmp_path):
    """With `logprob` the right answer is enough."""
    lines = tmp_path / "pairs.jsonl"
    lines.write_text(
        '{"clean": "a", "corrupt": "b", "answers": " was"}\n'
        '{"clean": "a", "corrupt": "b", "answers": 5}\n'
        '{"clean": "a", "corrupt": "b", "answers": [" was", 7]}\n'
    )
    assert read_pairs(lines)[2] == [[" was"], [5], [" was", 7]]
    for wrong in ("null", "[]", "[1.5]", '{"right": " was"}'):
        lines.write_text(f'{{"clean": "a", "corrupt": "b", "answers": {wrong}}}')
        with pytest.raises(ValueError, match=r"line 1: 'answers' is .*; give \[right, wrong\]"):
            read_pairs(lines)


def test_experiments_without_a_number_are_told(tmp_path):
    """JSON has no NaN, and others could not read the file."""
    ends, values = np.zeros(1, np.float32), np.array([[[[0.5, np.nan, np.nan]]]], np.float32)
    sweep = Sweep(
        *(("mlp_out",), (3,), (0, 1, 2), {"kl": values}, {"kl": ends}, {"kl": ends}),
        *(((7, 8, 9),), False, 3),
        noise_floor={"kl": 0.0},
        measured=np.ones_like(values, np.bool_),
    )
    text = io.StringIO()
    render(sweep, ["abc"], 2, Console(file=text, width=80))
    assert "kl: 2 of 3 experiments gave NaN" in text.getvalue()
    assert text.getvalue().index("0.500") < text.getvalue().index("nan")
    write(sweep, ["abc"], tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=str)["kl"] for line in lines] == [0.5, None, None]


def test_the_first_of_pairs_of_different_length_is_drawn_and_the_user_told(tmp_path):
    """The rows of minutes of work are there, and the picture cannot be refused any more."""
    ends, values = np.zeros(2, np.float32), np.full((2, 1, 1, 3), np.nan, np.float32)
    values[0, ..., :2], values[1] = [0.5, -1.0], 7.0
    sweep = Sweep(
        *(("mlp_out",), (3,), (0, 1, 2), {"kl": values}, {"kl": ends}, {"kl": ends}),
        *(((7, 8), (7, 8, 9)), False, 5),
    )
    text = io.StringIO()
    draw(sweep, ["ab", "abc"], tmp_path / "rows.png", Console(file=text, width=80))
    assert "heatmap: of pair 0 alone, since the pairs have different" in text.getvalue()
    sweep.heatmap(tmp_path / "first.png", pair=0, labels=["0 a", "1 b", ""])
    assert (tmp_path / "rows.png").read_bytes() == (tmp_path / "first.png").read_bytes()


def test_what_is_to_be_written_is_there_though_nobody_reads_what_is_printed(
    invoke, monkeypatch, tmp_path
):
    """As with `| head`: the rows of minutes of work were lost."""
    ends, values = np.zeros(1, np.float32), np.full((1, 1, 1, 1), 0.5, np.float32)
    shape = ("mlp_out",), (3,), (0,), {"kl": values}, {"kl": ends}, {"kl": ends}, ((7,),), False, 1
    sweep = Sweep(*shape, noise_floor={"kl": 0.0}, measured=np.ones_like(values, np.bool_))
    monkeypatch.setattr(sweeping, "run", lambda *given: (sweep, [["a"]]))
    out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    with nobody_reads():
        invoke("sweep", "demo", *KL, "--out", str(out), "--heatmap", str(picture))
    assert json.loads(out.read_text())["kl"] == 0.5
    assert picture.exists()


def test_what_is_asked_wrongly_is_refused(invoke, tmp_path):
    lines = tmp_path / "pairs.jsonl"
    lines.write_text('{"clean": "a", "corrupt": "b", "answers": ["c"]}\n{"clean": "a"}\n')
    some = tmp_path / "some.jsonl"
    some.write_text(
        '{"clean": "a", "corrupt": "b", "answers": ["c"]}\n{"clean": "a", "corrupt": "d"}'
    )
    for asked, message in (
        ([], "give --clean and --corrupt, or --pairs"),
        (["--pairs", str(lines)], "line 2: give an object with 'clean' and 'corrupt'"),
        (["--pairs", "lost.jsonl"], "--pairs 'lost.jsonl' is not there"),
        (["--pairs", str(tmp_path)], "is a folder; give a file of JSON Lines"),
        (["--top", "-5"], "greater than or equal to 1"),
        (["--pairs", str(some)], "1 of 2 lines have 'answers'; give all"),
        (["--pairs", str(lines), "--right", "a"], "--pairs has all prompts and answers"),
        (["--clean", "a", "--corrupt", "b", "--layers", "first"], "is not a layer; give"),
        (["--clean", "a", "--corrupt", "b", "--wrong", "c"], "--wrong was given without --right"),
        (["--clean", "a", "--corrupt", "b", "--receivers", "mlp_in"], "'mlp_in' has no layer"),
        (["--out", str(tmp_path / "lost" / "rows.jsonl")], "--out .*: there is no folder"),
        (["--out", str(tmp_path)], "is a folder; give the name of a file"),
        (["--heatmap", "mood.svg"], "--heatmap 'mood.svg' must end in .png"),
        (["--clean", "a", "--corrupt", "b", "--metric", "top"], "metric='top' is not known"),
        (["--clean", "a", "--corrupt", "b"], "compares answers; .*tllm sweep: --right and --wr"),
        ([*KL, "--hooks", "mlp_out, post_blck"], "--hooks: unknown hook point 'post_blck'"),
        ([*KL, "--freeze", "mlp_out, attn_ou"], "--freeze: unknown hook point 'attn_ou'"),
        ([*KL, "--freeze", "all,attn_out"], "--freeze: unknown hook point 'all'"),
        ([*KL, "--receivers", "mlp_inn:3"], "--receivers: unknown hook point 'mlp_inn'"),
        ([*KL, "--enforce-eager"], "no option --enforce-eager; .* --engine-arg enforce_eager=true"),
        ([*KL, "--layer", "2"], r"no option --layer \(did you mean --layers\?\); arguments of the"),
        ([*KL, "post_block"], "tllm sweep takes no 'post_block' there; did an option lose its"),
    ):
        status, _, error = invoke("sweep", "no-model", *asked)
        assert status == 2
        assert re.search(message, " ".join(error.split()))


def test_an_empty_prompt_is_refused_before_an_engine_starts(invoke, tmp_path):
    demo = str(Path(__file__).parents[2] / "demo" / "model")
    empty = ["--clean", "", "--corrupt", "", "--metric", "kl"]
    status, _, error = invoke("sweep", demo, *empty, "--engine-arg", "no_such_argument=1")
    assert (status, "pair 0: the clean prompt is empty; give a text that" in error) == (2, True)
    status, _, error = invoke("sweep", demo, *KL, "--engine-arg", "no_such_argument=1")
    assert (status, "'no_such_argument' is no argument of an engine" in error) == (2, True)
