"""Captures to disk, read back with `tllm.stores`, against `transformers`."""

from __future__ import annotations

import pytest
from engine.asking import error_of, generate, greedy, prompts_of, sampled

import tllm.stores
from capture.truth import meant
from tllm import SamplingParams
from tllm.consumers.capture import capturing
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.registry import consumer_from_spec

PLACES = [("post_block", 1), ("mlp_out", 3), ("lm_head_in", None)]
HOOKS = {"post_block": [1], "mlp_out": [-1], "lm_head_in": "all"}


def filesystem(**spec):
    return {"filesystem": {"hooks": HOOKS, **spec}}


def check_record(record, output, completion, truth, positions):
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    assert list(record.token_ids) == tokens
    assert record.prompt_len == len(output.prompt_token_ids)
    for point, layer in PLACES:
        got = record.tensor(point, layer)
        assert record.positions(point, layer).tolist() == positions
        for mine, theirs in zip(
            got, truth.states(tokens[:-1])[point, layer][positions], strict=True
        ):
            assert error_of(mine, theirs) < 2e-5


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_records_are_the_rows_that_were_asked_for(llm, truth, tmp_path, layout):
    llm.register_consumer(FilesystemConsumer(tmp_path, publish_interval=0.1))
    asked = ["all", "last_prompt", "all_generated", [0, -1, 6]]
    params = [
        greedy(5, capture=filesystem(positions=p, tag="t", request_id=f"r/{i}", layout=layout))
        for i, p in enumerate(asked)
    ]
    outputs = generate(llm, prompts_of([9, 40, 30, 12]), params)
    store = tllm.stores.open(tmp_path)
    for i, (output, positions) in enumerate(zip(outputs, asked, strict=True)):
        result = output.capture_results["filesystem"]
        assert (result.status, result.error) == ("ok", None)
        assert result.payload.request_id == f"r/{i}"
        assert all(path.startswith(str(tmp_path)) for path in result.payload.paths)
        record = store.record(f"r/{i}", tag="t")
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        where = meant(positions, len(output.prompt_token_ids), tokens)
        check_record(record, output, output.outputs[0], truth, where)
        assert result.payload.rows == len(where) * len(PLACES)
    assert store.verify().ok


def test_samples_have_records_of_their_own_and_prompt_rows_once(llm, truth, tmp_path):
    llm.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    params = sampled(4, n=3, capture=filesystem(request_id="r"))
    [output] = generate(llm, prompts_of([40]), params)
    store = tllm.stores.open(tmp_path)
    for completion in output.outputs:
        assert completion.capture_results["filesystem"].status == "ok"
        record = store.record("r", sample_index=completion.index)
        positions = list(range(0 if completion.index == 0 else 40, 43))
        check_record(record, output, completion, truth, positions)


def test_a_global_consumer_sees_every_request(llm, truth, tmp_path):
    spec = f"filesystem:root={tmp_path},hooks=post_block:1 mlp_out:-1 lm_head_in,tag=all"
    llm.register_consumer(consumer_from_spec(f"{spec},publish_interval=0.1"))
    params = [greedy(4), greedy(4, consumers={"filesystem": {"enabled": False}})]
    outputs = generate(llm, prompts_of([9, 12]), params)
    [record] = tllm.stores.open(tmp_path)
    assert record.tag == "all"
    assert record.request_id.startswith(f"{outputs[0].request_id}-")
    check_record(record, outputs[0], outputs[0].outputs[0], truth, list(range(12)))
    assert outputs[0].consumer_results["filesystem"].payload.record_id == record.record_id


def test_rows_ahead_of_the_end_do_not_reach_the_disk(tight_llm, truth, tmp_path):
    tight_llm.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    prompts = prompts_of([9, 40])
    long = generate(tight_llm, prompts, greedy(12))
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=12,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=[output.outputs[0].token_ids[6]],
            capture=filesystem(request_id=str(i)),
        )
        for i, output in enumerate(long)
    ]
    outputs = generate(tight_llm, prompts, params)
    store = tllm.stores.open(tmp_path)
    for i, output in enumerate(outputs):
        count = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        record = store.record(str(i))
        check_record(record, output, output.outputs[0], truth, list(range(count)))


EARLY = []
"""Requests and positions of rows that were written while their request ran."""


class Early(FilesystemConsumer):
    def take_early(self, request, spec, places, rows):
        EARLY.append((request.options["request_id"], request.sample_index, rows.positions.tolist()))
        super().take_early(request, spec, places, rows)


def deliver_each_step(llm, monkeypatch):
    """Let every step end when its rows are with the consumers: rows of a request that has ended
    before the delivery thread came to them are not early."""
    step = llm.llm_engine.step

    def step_and_deliver():
        outputs = step()
        llm.synchronize()
        return outputs

    monkeypatch.setattr(llm.llm_engine, "step", step_and_deliver)


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_long_prompts_are_written_while_they_are_computed(
    tight_llm, truth, tmp_path, monkeypatch, layout
):
    monkeypatch.setattr(capturing, "_EARLY_BYTES", 1)
    deliver_each_step(tight_llm, monkeypatch)
    EARLY.clear()
    tight_llm.register_consumer(
        Early(tmp_path, layout=layout, publish_interval=0.05, shard_bytes=1 << 20)
    )
    where = ["all", "all_prompt", [0, 20, -1], "all_generated", "all"]
    lengths = [90, 70, 60, 20, 50]
    params = [
        sampled(20, n=2, capture=filesystem(positions=p, request_id=f"{i}"))
        for i, p in enumerate(where)
    ]
    outputs = generate(tight_llm, prompts_of(lengths), params)
    store = tllm.stores.open(tmp_path)
    early: dict = {}
    for name, sample, positions in EARLY:
        early.setdefault((name, sample), []).extend(positions)
    for i, (output, positions) in enumerate(zip(outputs, where, strict=True)):
        prompt = len(output.prompt_token_ids)
        for completion in output.outputs:
            result = completion.capture_results["filesystem"]
            assert (result.status, result.error) == ("ok", None)
            record = store.record(f"{i}", sample_index=completion.index)
            assert record.status == "ok"
            tokens = [*output.prompt_token_ids, *completion.token_ids][:-1]
            expected = meant(positions, prompt, tokens)
            if completion.index:
                expected = [position for position in expected if position >= prompt]
            check_record(record, output, completion, truth, expected)
        written = [position for position in meant(positions, prompt, tokens) if position < prompt]
        assert early.get((f"{i}", 0), []) == written
    assert {sample for _, sample, _ in EARLY} == {0}
    assert store.verify().ok


@pytest.mark.parametrize("room", [0, 40_000])
def test_what_the_queue_has_no_room_for_waits_in_memory(
    tight_llm, truth, tmp_path, monkeypatch, room
):
    monkeypatch.setattr(capturing, "_EARLY_BYTES", 1)
    deliver_each_step(tight_llm, monkeypatch)
    monkeypatch.setattr(tllm.stores.StoreWriter, "room", room)
    EARLY.clear()
    tight_llm.register_consumer(Early(tmp_path, overflow="drop", publish_interval=0.05))
    params = [greedy(6, capture=filesystem(request_id=f"{i}")) for i in range(3)]
    outputs = generate(tight_llm, prompts_of([90, 3, 50]), params)
    for i, output in enumerate(outputs):
        record = tllm.stores.open(tmp_path).record(f"{i}")
        count = len(output.prompt_token_ids) + 5
        check_record(record, output, output.outputs[0], truth, list(range(count)))
    row = 4 * len(PLACES) * (128 + 1)
    assert all(len(positions) * row <= room for *_, positions in EARLY)
    assert bool(EARLY) == bool(room)


def give_up(llm, prompt, params, *, steps):
    """A request that is aborted after some steps."""
    engine = llm.llm_engine
    engine.add_request("gone", {"prompt_token_ids": prompt}, params)
    for _ in range(steps):
        engine.step()
    engine.abort_request(["gone"])
    generate(llm, prompts_of([5]), greedy(2))  # the workers hear of it


def test_of_an_aborted_request_what_was_written_early_stays(
    tight_llm, truth, tmp_path, monkeypatch
):
    monkeypatch.setattr(capturing, "_EARLY_BYTES", 1)
    deliver_each_step(tight_llm, monkeypatch)
    EARLY.clear()
    tight_llm.register_consumer(Early(tmp_path, publish_interval=0.05))
    [prompt] = prompts_of([60])
    give_up(tight_llm, prompt, greedy(30, capture=filesystem(request_id="gone")), steps=6)
    tight_llm.clear_consumers()  # nobody will come for the result
    record = tllm.stores.open(tmp_path).record("gone")
    assert record.status == "partial_error" and "aborted" in record.error
    assert sum(len(positions) for *_, positions in EARLY) == 60
    for point, layer in PLACES:
        positions, rows = record.positions(point, layer), record.tensor(point, layer)
        assert len(positions) > 60 or point != "post_block"
        assert positions.tolist() == list(range(len(positions)))
        for mine, theirs in zip(rows[:60], truth.states(prompt)[point, layer], strict=True):
            assert error_of(mine, theirs) < 2e-5
    assert tllm.stores.open(tmp_path).verify().ok


def test_a_limit_that_is_met_early_is_said(tight_llm, truth, tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "_EARLY_BYTES", 1)
    deliver_each_step(tight_llm, monkeypatch)
    row = 4 * len(PLACES) * (128 + 1)
    tight_llm.register_consumer(Early(tmp_path, publish_interval=0.05, max_bytes=50 * row))
    params = [greedy(4, capture=filesystem(request_id=f"{i}")) for i in range(2)]
    outputs = generate(tight_llm, prompts_of([90, 10]), params)
    result = outputs[0].capture_results["filesystem"]
    assert result.status == "partial_error" and "max_bytes" in result.error
    record = tllm.stores.open(tmp_path).record("0")
    tokens = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids][:-1]
    for point, layer in PLACES:
        positions, rows = record.positions(point, layer), record.tensor(point, layer)
        assert 0 < len(positions) <= 50
        for mine, theirs in zip(rows, truth.states(tokens)[point, layer][positions], strict=True):
            assert error_of(mine, theirs) < 2e-5


def test_a_name_that_is_taken_is_found_early(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "_EARLY_BYTES", 1)
    deliver_each_step(llm, monkeypatch)
    EARLY.clear()
    llm.register_consumer(Early(tmp_path, layout="packed"))
    params = greedy(2, capture=filesystem(request_id="same"))
    first, second = generate(llm, prompts_of([15, 16]), [params, params])
    assert [positions[0] for *_, positions in EARLY].count(0) == 2
    results = [o.capture_results["filesystem"] for o in (first, second)]
    assert sorted(result.status for result in results) == ["error", "ok"]
    assert "same" in next(r.error for r in results if r.error)


def test_both_consumers_at_once(llm, truth, tmp_path):
    llm.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    capture = {
        **filesystem(positions="all_generated"),
        "memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"},
    }
    [output] = generate(llm, prompts_of([30]), greedy(4, capture=capture))
    assert set(output.capture_results) == {"memory", "filesystem"}
    truth.check(output, capture["memory"])
    [record] = tllm.stores.open(tmp_path)
    check_record(record, output, output.outputs[0], truth, [30, 31, 32])


def test_a_name_that_is_taken_is_an_error_of_the_result(llm, tmp_path):
    llm.register_consumer(FilesystemConsumer(tmp_path, layout="packed"))
    params = greedy(2, capture=filesystem(request_id="same"))
    first, second = generate(llm, prompts_of([5, 6]), [params, params])
    results = [o.capture_results["filesystem"] for o in (first, second)]
    assert sorted(result.status for result in results) == ["error", "ok"]
    assert "same" in next(r.error for r in results if r.error)


def test_an_incomplete_record_is_captured_anew_where_whole_ones_are_skipped(llm, tmp_path):
    llm.register_consumer(FilesystemConsumer(tmp_path, on_collision="skip"))
    [prompt] = prompts_of([9])
    asked = greedy(8, capture=filesystem(request_id="r"))
    give_up(llm, prompt, asked, steps=3)
    llm.synchronize()
    assert tllm.stores.open(tmp_path).record("r").status == "partial_error"
    for skipped in (False, True):
        [output] = generate(llm, [prompt], asked)
        result = output.capture_results["filesystem"]
        assert (result.status, result.payload.skipped) == ("ok", skipped)
        record = tllm.stores.open(tmp_path).record("r")
        assert (record.status, record.generation) == ("ok", 2)
        assert record.num_tokens == 9 + 8


@pytest.mark.parametrize("policy", ["error", "skip", "overwrite", "suffix"])
def test_a_name_is_taken_in_all_layouts(llm, tmp_path, policy):
    for start in (0, 2):  # and it is when the store is opened again
        llm.register_consumer(FilesystemConsumer(tmp_path, on_collision=policy))
        for i, layout in enumerate(("packed", "sharded", "per_file", "packed", "sharded")):
            if start and not i:
                continue
            asked = filesystem(request_id="same", layout=layout)
            length = 5 + start + i
            [output] = generate(llm, prompts_of([length]), greedy(2, capture=asked))
            result = output.capture_results["filesystem"]
            first = (start, i) == (0, 0)
            assert result.status == ("error" if policy == "error" and not first else "ok")
            if policy == "skip":
                assert result.payload.skipped == (not first)
        llm.clear_consumers()
    store = tllm.stores.open(tmp_path)
    lengths = {
        "error": [5],
        "skip": [5],
        "overwrite": [11],
        "suffix": [5, 6, 7, 8, 9, 8, 9, 10, 11],
    }
    records = sorted(store, key=lambda record: record.generation)
    assert [record.prompt_len for record in records] == lengths[policy]
    assert len({record.name for record in records}) == len(records)
    assert store.verify().ok
    if policy == "overwrite":
        assert not list(tmp_path.rglob("same@0*"))  # what shards replaced is gone


def test_max_bytes_holds_for_all_layouts_together(llm, tmp_path):
    one = 8 * (4 * 128 + 4)
    layouts = ["sharded", "packed", "per_file"]
    for start, layout in enumerate(layouts):
        llm.register_consumer(FilesystemConsumer(tmp_path, layout=layout, max_bytes=2 * one))
        for i, chosen in enumerate(layouts):
            asked = filesystem(hooks="post_block:1", request_id=f"{start}-{i}", layout=chosen)
            [output] = generate(llm, prompts_of([5]), greedy(4, capture=asked))
            result = output.capture_results["filesystem"]
            if start or i == 2:
                assert result.status == "error" and f"max_bytes={2 * one}" in result.error
            else:
                assert (result.status, result.payload.bytes) == ("ok", one)
        llm.clear_consumers()
    assert tllm.stores.open(tmp_path).nbytes == 2 * one


REFUSED = {
    r"capture\['filesystem'\]\['tag'\].*control characters": {"tag": "a\nb"},
    r"capture\['filesystem'\]\['tag'\]=3 is not text": {"tag": 3},
    r"capture\['filesystem'\]\['layout'\]='zip' is not known": {"layout": "zip"},
    r"capture\['filesystem'\]\['metadata'\] must be plain JSON data": {
        "metadata": {"loss": float("nan")}
    },
    r"capture\['filesystem'\] has unknown options \['path'\]": {"path": "x"},
    r"capture\['filesystem'\]\['hooks'\]: unknown hook point": {"hooks": {"middle": [0]}},
    r"capture\['filesystem'\]\['positions'\]: position 99": {"positions": [99]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_refused_by_name(llm, tmp_path, message):
    llm.register_consumer(FilesystemConsumer(tmp_path))
    with pytest.raises(ValueError, match=message):
        generate(llm, prompts_of([5]), greedy(2, capture=filesystem(**REFUSED[message])))


def test_without_a_root_there_is_a_hint(llm):
    with pytest.raises(ValueError, match=r"capture_consumers=\['filesystem:root=DIRECTORY'\]"):
        generate(llm, prompts_of([5]), greedy(2, capture=filesystem()))


def test_a_root_that_cannot_be_written_is_refused_at_registration(llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="root="):
        llm.register_consumer(FilesystemConsumer(tmp_path / "file"))
    with pytest.raises(ValueError, match="root="):
        llm.register_consumer(FilesystemConsumer("/proc/1/nothing"))
    assert generate(llm, prompts_of([5]), greedy(2))


def test_a_root_of_another_engine_s_captures_is_refused_with_what_to_give(llm, tight_llm, tmp_path):
    llm.register_consumer(FilesystemConsumer(tmp_path))
    with pytest.raises(ValueError, match=r"consumer_id='filesystem' is that of another engine's"):
        tight_llm.register_consumer(FilesystemConsumer(tmp_path))
    tight_llm.register_consumer(FilesystemConsumer(tmp_path, consumer_id="second"))


@pytest.mark.parametrize("named", [True, False], ids=["names", "one name"])
def test_two_consumers_write_into_one_root(llm, tmp_path, named):
    llm.register_consumer(FilesystemConsumer(tmp_path))
    llm.register_consumer(FilesystemConsumer(tmp_path, consumer_id="second"))
    asked = {
        "filesystem": {"hooks": {"post_block": [1]}},
        "second": {"hooks": {"attn_out": [0, 2]}, "positions": "last_prompt"},
    }
    for name, capture in asked.items():
        capture |= {"request_id": name if named else "r", "tag": name if named else ""}
    [output] = generate(llm, prompts_of([9]), greedy(4, capture=asked))
    store = tllm.stores.open(tmp_path)
    records = {record.record_id: record for record in store}
    assert len(store) == len(records) == 2
    for name, rows in (("filesystem", [12]), ("second", [1, 1])):
        result = output.capture_results[name]
        assert (result.status, result.payload.rows) == ("ok", sum(rows))
        record = records[result.payload.record_id]
        assert record.writer.endswith(f"-{name}-sharded")
        assert (record.request_id, record.tag) == ((name, name) if named else ("r", ""))
        assert [record.shape(*key)[0] for key in record.keys] == rows
    assert store.verify().ok
