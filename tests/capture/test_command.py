"""`tllm capture`: the whole job, interrupted and gone on with."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from child_process import TLLM, run_command, script_process
from engine.asking import error_of, prompts_of
from rich.console import Console
from tiny_engines import SHARE

import tllm.stores
from tllm.cli import capture as capturing
from tllm.engine.tokenizer import encoded, tokenizer_of
from tllm.stores.writer_root import owner_of

DEMO = Path(__file__).parents[2] / "demo" / "model"
ENGINE = {
    **SHARE,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "num_gpu_blocks_override": 512,
}


@pytest.fixture
def arguments(tiny_model, tmp_path, runner):
    """`arguments(lines, *options)`: those of `tllm`."""
    if runner == "v2":
        pytest.skip("commands do not know the test harness")

    def made(lines, *options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        engine = [f"--engine-arg={name}={json.dumps(value)}" for name, value in ENGINE.items()]
        return [
            *("capture", "--model", tiny_model, "--input", str(path)),
            *("--out", str(tmp_path / "store"), *options, *engine),
        ]

    return made


@pytest.fixture
def here(invoke):
    """`here(arguments)`: exit status and output of `tllm` in this process, without the frames of
    tables and boxes."""

    def call(arguments):
        status, out, err = invoke(*arguments)
        return status, re.sub(r"[\s│]+", " ", out + err)

    return call


@pytest.fixture
def as_a_user(tmp_path):
    """The same of the installed command."""

    def call(arguments):
        log, environment = tmp_path / "log", {"COLUMNS": "120"}
        status, text = run_command(TLLM, *arguments, log=log, environment=environment)
        return status, re.sub(r"[\s│]+", " ", text)

    return call


def test_a_job_goes_on_where_it_stopped(here, as_a_user, arguments, truth, tmp_path):
    prompts = prompts_of([9, 20, 5, 13, 7])
    lines = [{"id": f"p{i}", "prompt_token_ids": p} for i, p in enumerate(prompts)]
    options = ("--hooks", "post_block:1", "--hooks", "mlp_out:0,-1", "--tag", "run")
    status, text = here(arguments(lines[:3], *options, "--batch", "2"))
    assert (status, "captured 3 prompts" in text) == (0, True), text
    status, text = as_a_user(arguments(lines, *options))
    assert status == 0, text
    assert "captured 2 prompts" in text
    assert "there before 3 prompts" in text
    rows = 3 * (13 + 7)
    assert f"rows {rows} (" in text
    # Other rows of the same prompts are no job to go on with.
    for other, sentence in (
        (("--hooks", "post_block:1-2"), "5 of them lack post_block:2"),
        (("--hooks", "post_block:2"), "5 of these prompts with the tag 'run', and 5 of them lack"),
        (("--hooks", "attn_out:all"), "lack attn_out, which is asked for now; give another --tag"),
        (("--hooks", "post_block:1", "--reduction", "mean"), "the reduction 'none', and 'mean'"),
        (("--hooks", "post_block:1", "--dtype", "float16"), "rows of float32, and float16 is"),
        (
            ("--hooks", "post_block:1", "--positions", "last_prompt"),
            "with rows of other positions, and",
        ),
        (("--hooks", "post_block:1", "--engine-arg=served_model_name=other"), "and 'other' is"),
    ):
        status, text = here(arguments(lines, *other, "--tag", "run"))
        assert status == 2
        assert sentence in text
    # Nor are the same names of other prompts, as where lines without ids were put in front.
    moved = [line | {"id": f"p{i}"} for i, line in enumerate(lines[1:])]
    status, text = here(arguments(moved, *options))
    assert status == 2
    assert re.search(r"a record of 'p\d' with the tag 'run' of another prompt, and that of", text)
    store = tllm.stores.open(tmp_path / "store")
    assert sorted(record.request_id for record in store) == [f"p{i}" for i in range(5)]
    for record, prompt in ((store.record(f"p{i}"), p) for i, p in enumerate(prompts)):
        for place in (("post_block", 1), ("mlp_out", 0), ("mlp_out", 3)):
            got = record.tensor(*place)
            assert len(got) == len(prompt)
            for mine, theirs in zip(got, truth.states(prompt)[place], strict=True):
                assert error_of(mine, theirs) < 2e-5


def test_texts_of_records_that_are_there_are_encoded_together_and_compared_one_by_one(tmp_path):
    tokenizer = tokenizer_of(str(DEMO), {})
    texts = [f"Puzzle {i}: name a tool, {'please ' * (i % 5)}" for i in range(600)]
    texts += ["", "<|im_end|>", "straße 東京 \U0001f600"]
    alone = [list(tokenizer.encode(text)) for text in texts]
    assert encoded(tokenizer, texts) == alone
    assert encoded(tokenizer, []) == []

    prompts = dict(zip((f"p{i}" for i in range(600)), texts, strict=False))
    with tllm.stores.StoreWriter(tmp_path, layout="sharded") as writer:
        for (name, _), tokens in zip(prompts.items(), alone, strict=False):
            meta = tllm.stores.RecordMeta(
                name, prompt_len=len(tokens), token_ids=[*tokens, 1], model=str(DEMO)
            )
            rows = tllm.stores.Rows(torch.zeros(1, 4), [len(tokens) - 1])
            writer.submit(tllm.stores.Record(meta, {("post_block", 1): rows}))
    prompts["p7"] = {"prompt_token_ids": alone[7]}
    job = capturing.Job(
        str(DEMO), Path(__file__), tmp_path, {"hooks": "post_block:1", "positions": "last_prompt"}
    )
    assert capturing._earlier_run(job).captured(prompts) == set(prompts)
    ids = {name: {"prompt_token_ids": each} for name, each in zip(prompts, alone, strict=False)}
    without = replace(
        job, model=str(tmp_path / "no tokenizer"), engine={"served_model_name": job.model}
    )
    assert capturing._earlier_run(without).captured(ids) == set(ids)
    prompts["p555"] = prompts["p554"]
    with pytest.raises(ValueError, match="'p555' with the tag '' of another prompt"):
        capturing._earlier_run(job).captured(prompts)


def test_reduced_rows_of_other_positions_are_no_job_to_go_on_with(tmp_path):
    def job(positions):
        capture = {"hooks": "post_block:1", "reduction": "mean", "positions": positions}
        return capturing.Job(str(DEMO), Path(__file__), tmp_path, capture)

    without_first = {"exclude": {"positions": [0]}}
    with tllm.stores.StoreWriter(tmp_path) as writer:
        meta = tllm.stores.RecordMeta(
            "p",
            prompt_len=4,
            token_ids=[5, 6, 7, 8, 9],
            model=str(DEMO),
            reduction="mean",
            metadata=capturing._options(job(without_first))["metadata"],
        )
        rows = tllm.stores.Rows(torch.zeros(1, 4), [3])
        writer.submit(tllm.stores.Record(meta, {("post_block", 1): rows}))
    prompts = {"p": {"prompt_token_ids": [5, 6, 7, 8]}}
    for same in (without_first, [1, 2, 3]):
        assert capturing._earlier_run(job(same)).captured(prompts) == {"p"}
    with pytest.raises(ValueError, match="'p' with the tag '' with rows of other positions"):
        capturing._earlier_run(job("all")).captured(prompts)


@pytest.mark.parametrize(
    ("before", "same", "others"),
    [
        ("0,1", ("0,1", "0:2", "1"), ("all", "0:", "-1", "0,-1", "1:")),
        ("0,-1", ("0,-1", "-1,0", "0", "-1"), ("all", "1:", "-2:")),
        ("all", ("all", "-1", "0:", "0,1"), ()),
    ],
)
def test_layers_that_a_store_does_not_know_are_no_job_to_go_on_with(tmp_path, before, same, others):
    """Such as all of them, where the record has two: it was said to be there."""

    def job(layers):
        return capturing.Job(str(DEMO), Path(__file__), tmp_path, {"hooks": {"post_block": layers}})

    with tllm.stores.StoreWriter(tmp_path) as writer:
        meta = tllm.stores.RecordMeta(
            "p",
            prompt_len=2,
            token_ids=[5, 6, 7],
            model=str(DEMO),
            metadata=capturing._options(job(before))["metadata"],
        )
        rows = tllm.stores.Rows(torch.zeros(2, 4), [0, 1])
        writer.submit(tllm.stores.Record(meta, {("post_block", n): rows for n in (0, 1)}))
    prompts = {"p": {"prompt_token_ids": [5, 6]}}
    for layers in same:
        assert capturing._earlier_run(job(layers)).captured(prompts) == {"p"}
    for layers in others:
        with pytest.raises(ValueError, match=f"of the layers {before} of post_block, and {layers}"):
            capturing._earlier_run(job(layers)).captured(prompts)


def test_a_job_that_is_told_to_end_ends_with_its_engine_and_goes_on(here, arguments, tmp_path):
    """As `timeout` and cluster schedulers do; the engine went on alone, and had the store."""
    prompts = prompts_of([5 + number % 20 for number in range(400)])
    lines = [{"id": f"p{i}", "prompt_token_ids": p} for i, p in enumerate(prompts)]
    given = arguments(lines, "--hooks", "post_block:1", "--batch", "1")
    run = script_process(TLLM, *given, log=tmp_path / "log", environment={})
    run.start()
    store = tmp_path / "store"
    while run.exitcode is None and not any(store.glob("writers/*/sharded/*.jsonl")):
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGSTOP)  # it is not done before it is told
    status, text = here(given)
    assert status == 2
    assert f"out '{store}' is written into by process " in text
    os.kill(run.pid, signal.SIGTERM)
    os.kill(run.pid, signal.SIGCONT)
    run.join(60)
    assert run.exitcode == 128 + signal.SIGTERM
    assert not any(owner_of(store, folder.name) for folder in store.glob("writers/*"))
    status, text = here(given)
    assert status == 0, text
    done, before = map(int, re.findall(r"(?:captured|there before) (\d+) prompts", text))
    assert (done + before, done > 0, before > 0) == (400, True, True)
    rows = {
        record.request_id: len(record.tensor("post_block", 1)) for record in tllm.stores.open(store)
    }
    assert rows == {f"p{i}": len(prompt) for i, prompt in enumerate(prompts)}


def test_a_job_that_another_one_overtook_is_refused_by_what_its_user_gave(
    tiny_model, tmp_path, runner
):
    """Both had looked for others before their engines started."""
    job = capturing.Job(
        tiny_model, Path(__file__), tmp_path / "store", {"hooks": "post_block:1"}, engine=ENGINE
    )
    writer = "dp0-pp0-tp0-filesystem-sharded"
    prompts = [("a", {"prompt_token_ids": [1, 2]})]
    with (
        tllm.stores.StoreWriter(job.out, layout="sharded", writer_id=writer),
        pytest.raises(ValueError) as refused,
    ):
        capturing._capture(job, prompts, capturing.Summary(), Console(quiet=True))
    assert re.match(
        r"out '.*/store' is written into by process .* another --out", str(refused.value)
    )
    assert "consumer_id" not in str(refused.value)
    raised = refused.value.__context__.__cause__
    assert isinstance(raised, tllm.stores.WriterInUseError), "as it was in the worker"
    assert f"process {os.getpid()}" in raised.owner
    assert "consumer_id='filesystem' is that of another engine's captures" in str(raised)


def test_a_prompt_that_is_refused_costs_no_other_its_rows(here, arguments, tmp_path):
    """Neither does a first batch of which nothing is left."""
    prompts = prompts_of([200, 9, 200, 5])
    lines = [{"id": f"p{i}", "prompt_token_ids": p} for i, p in enumerate(prompts)]
    status, text = here(arguments(lines, "--hooks", "post_block:1", "--batch", "1"))
    assert (status, "captured 2 prompts" in text) == (1, True), text
    assert "failed 2 prompts 1 x p0 was refused: " in text
    assert len(tllm.stores.open(tmp_path / "store")) == 2


def test_a_capture_that_no_prompt_can_have_ends_the_job(here, arguments):
    lines = [{"prompt_token_ids": p} for p in prompts_of([9, 5])]
    status, text = here(arguments(lines, "--hooks", "post_block:99"))
    assert status == 2
    assert "line-1 was refused: capture['filesystem']['hooks']: post_block has no layer" in text


def test_a_folder_with_other_files_is_no_store_to_go_on_with(here, arguments, tmp_path):
    given = arguments(["hello"], "--hooks", "post_block:1")
    other = tmp_path / "store" / "mine.txt"
    other.parent.mkdir()
    other.write_text("mine")
    status, text = here(given)
    assert status == 2
    assert "has other files, and no store; give a new or an empty folder" in text
    assert list(other.parent.iterdir()) == [other]


def test_what_is_wrong_is_said_before_the_engine_starts(here, arguments, tmp_path):
    status, text = here(arguments(["hello", {"no": 1}], "--hooks", "post_block:1"))
    assert status == 2
    assert "line 2: give a text, or an object" in text
    same = [{"id": text, "prompt": "hello"} for text in ("\u00e9", "e\u0301")]
    status, text = here(arguments(same, "--hooks", "post_block:1"))
    assert status == 2
    assert "line 2: the id '\u00e9' is that of line 1 too" in text
    both = {"prompt": "hello", "prompt_token_ids": [1, 2]}
    status, text = here(arguments([{"id": None, "prompt": "a"}, both], "--hooks", "post_block:1"))
    assert status == 2
    assert "line 2: both 'prompt' and 'prompt_token_ids' were given; give one" in text
    status, text = here(arguments([{"id": ["a"], "prompt": "b"}], "--hooks", "post_block:1"))
    assert (status, "line 1: the id ['a'] is neither text nor a number" in text) == (2, True)
    picture = {"prompt": "hello", "multi_modal_data": {"image": ["data:image/png;base64,"]}}
    status, text = here(arguments(["hello", picture], "--hooks", "post_block:1"))
    assert status == 2
    assert "line 2 has ['multi_modal_data'], and these prompts are text alone" in text
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'"hello"\n{"no": 1}\n')  # as some editors write it
    with pytest.raises(ValueError, match="line 2: give a text"):
        list(capturing._read(path))
    named = ("--hooks", "post_block:1", "--engine-arg", "served_model_name=5")
    status, text = here(arguments(["hello"], *named))
    assert status == 2
    assert "--engine-arg served_model_name=5: give a text, or a list of texts" in text
    status, text = here(arguments([], "--hooks", "post_block:1"))
    assert status == 2
    assert "has no prompts" in text
    status, text = here(arguments([], "--hooks", "middle:1"))
    assert status == 2
    assert "unknown hook point 'middle'" in text
    for positions, sentence in (
        ("0,x", "--positions '0,x': give whole numbers with commas between"),
        ("[1,", "--positions '[1,' is no JSON: "),
        ("", "capture['positions']='' is not known"),
    ):
        status, text = here(arguments([], "--hooks", "post_block:1", "--positions", positions))
        assert status == 2
        assert sentence in text
    status, text = here([*arguments(["hello"], "--hooks", "post_block:1"), "--model", "no-model"])
    assert status == 2
    assert "no engine with the model 'no-model' (there is no such folder here): " in text
    status, text = here(arguments(["hello"], "--hooks", "post_block:1", "--enforce-eager"))
    assert status == 2
    assert "tllm capture has no option --enforce-eager; arguments of the engine are given" in text
    for option in ("--max-tokens", "--batch"):
        status, text = here(arguments(["hello"], "--hooks", "post_block:1", option, "0"))
        assert (status, f"{option} 0 must be 1 or more" in text) == (2, True)
    lines = tmp_path / "lines.txt"
    lines.write_text("Once upon a time\n")
    asked = [*arguments(["hello"], "--hooks", "post_block:1"), "--input", str(lines)]
    status, text = here(asked)
    assert status == 2
    assert "line 1 is not JSON: Expecting value" in text and "text with quotation marks" in text
