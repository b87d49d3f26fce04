"""`ResidualStream.write` adds what a forward hook would add, to the rows it was asked for only."""

import pytest
import torch
from beyond_interpreting import beyond_interpreting

from engine.adder import WRITTEN, Adder
from engine.asking import assert_rows_match, generate, greedy, prompts_of, tokens_of
from engine.recorder import Recorder
from engine.reference import HIDDEN, LAYERS, Addition
from tllm.ports import ConsumerFlow, ResidualStream

SEEN = {"last": ("post_block", LAYERS - 1), "final": ("lm_head_in", None)}


def vector(seed: int) -> torch.Tensor:
    return 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def watched(llm):
    """The engine, with a recorder downstream of every write."""
    reads = [
        ResidualStream.read(layer=layer or 0, site=point, role=role)
        for role, (point, layer) in SEEN.items()
    ]
    return llm, llm.register_consumer(Recorder(ConsumerFlow(reads=reads)))


def assert_added(watched, params, lengths, added) -> None:
    """Generate, and compare tokens and downstream rows with additions `added(output)`."""
    llm, recorder = watched
    outputs = generate(llm, prompts_of(lengths), params)
    additions = {o.request_id: added(i, o) for i, o in enumerate(outputs)}
    assert_rows_match(recorder, outputs, llm.reference, SEEN, additions=additions)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        added_here = additions[output.request_id]
        assert llm.reference.would_generate(output.prompt_token_ids, tokens, added_here)


@pytest.fixture(autouse=True)
def _reference(llm, reference):
    llm.reference = reference
    WRITTEN.clear()


@pytest.mark.parametrize(
    "place",
    [
        ("embed", None),
        *((p, 1) for p in ("pre_attn", "attn_in", "attn_heads", "attn_out", "post_attn")),
    ],
)
def test_a_write_at_an_early_point_equals_a_hook(watched, place):
    v = vector(1)
    watched[0].register_consumer(Adder(place, v))
    assert_added(watched, greedy(4), [5, 40], lambda i, o: [Addition(place, v)])


@pytest.mark.parametrize(
    "place", [("mlp_in", 2), ("mlp_out", 0), ("post_block", 1), ("lm_head_in", None)]
)
def test_a_write_at_a_later_point_equals_a_hook(watched, place):
    v = vector(2)
    watched[0].register_consumer(Adder(place, v))
    # A capture reads what arrives at a point, before the writes there.
    assert_added(watched, greedy(4), [5, 40], lambda i, o: [Addition(place, v)])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_write_reaches_the_rows_of_its_phase(watched, phase):
    place, v = ("post_block", 1), vector(3)
    watched[0].register_consumer(Adder(place, v, phase=phase))

    def added(i, output):
        length = len(output.prompt_token_ids)
        return [Addition(place, v, *((0, length) if phase == "prefill" else (length, None)))]

    assert_added(watched, greedy(5), [7, 30], added)


@pytest.mark.parametrize("moment", ["same_step", "next_step"])
def test_a_write_made_in_a_window_reaches_the_next_forward_pass(watched, moment):
    place, v = ("post_block", 0), vector(4)
    watched[0].register_consumer(Adder(place, v, moment=moment))
    assert_added(
        watched, greedy(5), [7, 3], lambda i, o: [Addition(place, v, len(o.prompt_token_ids))]
    )


class Waiter(Recorder):
    """Holds the engine until a background `Adder` has written."""

    def consume_bundle(self, bundle, ctx) -> None:
        if (bundle.meta.positions >= 7).any():
            assert WRITTEN.wait(timeout=60)


def test_a_write_from_a_background_thread_reaches_whole_forward_passes(watched):
    llm = watched[0]
    place, v = ("post_block", 0), vector(5)
    llm.register_consumer(Adder(place, v, moment="background"))
    flow = ConsumerFlow(reads=[ResidualStream.read(layer=0, phase="decode")])
    llm.register_consumer(Waiter(flow, consumer_id="waiter"))
    (output,) = generate(llm, prompts_of([7]), greedy(6))
    possible = [
        llm.reference.greedy(output.prompt_token_ids, 6, [Addition(place, v, start)])
        for start in (7, 8)
    ]
    assert tokens_of([output])[0] in possible


def test_two_writers_at_one_point_add_up(watched):
    place, v, w = ("post_block", 1), vector(6), vector(7).double()
    watched[0].register_consumer(Adder(place, v, consumer_id="one"))
    watched[0].register_consumer(Adder(place, w, phase="decode", consumer_id="two"))
    assert_added(
        watched,
        greedy(4),
        [6, 9],
        lambda i, o: [
            Addition(place, v),
            Addition(place, w.float(), len(o.prompt_token_ids)),
        ],
    )


def test_writers_at_different_points_do_not_mix(watched):
    v, w = vector(8), vector(9)
    watched[0].register_consumer(Adder(("post_block", 0), v, consumer_id="one"))
    watched[0].register_consumer(Adder(("mlp_out", 2), w, phase="prefill", consumer_id="two"))
    assert_added(
        watched,
        greedy(4),
        [6, 9],
        lambda i, o: [
            Addition(("post_block", 0), v),
            Addition(("mlp_out", 2), w, 0, len(o.prompt_token_ids)),
        ],
    )


def test_other_requests_of_the_batch_are_not_touched(watched):
    place, v = ("pre_attn", 2), vector(10)
    watched[0].register_consumer(Adder(place, v))
    params = [
        greedy(5),
        greedy(5, consumers={"adder": {"enabled": False}}),
        greedy(5),
        greedy(5, consumers={"adder": {"enabled": False}}),
    ]
    assert_added(watched, params, [8, 8, 30, 2], lambda i, o: [] if i % 2 else [Addition(place, v)])


def test_a_cleared_vector_is_not_added_any_more(watched):
    place, v = ("post_block", 1), vector(11)
    watched[0].register_consumer(Adder(place, v, clear_after=9))
    assert_added(watched, greedy(6), [8], lambda i, o: [Addition(place, v, 0, 10)])


def test_unregistering_a_writer_ends_its_additions(watched):
    llm, _ = watched
    adder = llm.register_consumer(Adder(("post_block", 1), vector(12)))
    plain = llm.reference.greedy(prompts_of([8])[0], 4)
    assert tokens_of(generate(llm, prompts_of([8]), greedy(4)))[0] != plain
    llm.unregister_consumer(adder)
    assert tokens_of(generate(llm, prompts_of([8]), greedy(4)))[0] == plain


class RaisesAtTheEnd(Adder):
    """Raises when a request has ended, and so after the last step."""

    def on_request_finished(self, request, ctx):
        raise RuntimeError("mistaken")


def test_who_comes_in_the_place_of_a_writer_that_raised_writes(llm, reference):
    """No step lies between the error and the other one, who has the same id."""
    place, v = ("post_block", 1), vector(9)
    wrong = llm.register_consumer(RaisesAtTheEnd(place, v))
    (output,) = generate(llm, prompts_of([7]), greedy(3))
    assert output.consumer_results["adder"].error == "RuntimeError: mistaken"
    llm.unregister_consumer(wrong)
    llm.register_consumer(Adder(place, v))
    for output in generate(llm, prompts_of([7, 30]), greedy(5)):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert output.consumer_results["adder"].status == "ok"
        assert reference.would_generate(prompt, tokens, [Addition(place, v)])
        assert not reference.would_generate(prompt, tokens)


class Changing(Recorder):
    """Adds the number of a row to the rows after it, by one write a step; others in two parts."""

    def __init__(self, window, *, parts):
        read = ResidualStream.read(layer=0, site="pre_attn", role="h")
        write = ResidualStream.write(layer=1, phase="decode", role="add")
        super().__init__(ConsumerFlow(reads=[read], writes=[write], window=window))
        self._parts = parts

    def consume_bundle(self, bundle, ctx):
        super().consume_bundle(bundle, ctx)
        meta = bundle.meta
        last = {
            slot: int(position) for slot, position in zip(meta.slots, meta.positions, strict=True)
        }
        vectors = torch.tensor([[float(last[r.slot])] for r in meta.requests]).expand(-1, HIDDEN)
        if not self._parts:
            ctx.writer("add").set(meta.requests, vectors / 8)
            return
        for request, vector in zip(meta.requests, vectors, strict=True):
            ctx.writer("add").set([request], vector / 8)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(False, id="together", marks=beyond_interpreting),
        pytest.param(True, id="one by one"),
    ],
)
def test_who_writes_anew_hears_that_rows_were_computed_again(tight_llm, reference, parts):
    """All rows that are computed again get the vectors of then; who is not preempted gets those of
    each row."""
    changing = tight_llm.register_consumer(Changing("next_step", parts=parts))
    outputs = generate(tight_llm, prompts_of([30, 20, 40, 25, 35], seed=2), greedy(40))
    told = 0
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        result = output.consumer_results[changing.consumer_id]
        if result.status == "partial_error":
            assert "the request was preempted" in result.error
            told += 1
            continue
        added = [
            Addition(("post_block", 1), torch.full((HIDDEN,), (at - 1) / 8), at, at + 1)
            for at in range(len(prompt), len(prompt) + len(tokens) - 1)
        ]
        assert reference.would_generate(prompt, tokens, added)
    assert 0 < told < len(outputs)


def test_a_writer_never_leaves_changed_blocks_in_the_prefix_cache(llm):
    (prompt,) = prompts_of([100], seed=3)
    plain = llm.reference.greedy(prompt, 4)
    adder = llm.register_consumer(Adder(("post_block", 0), vector(13)))
    steered = tokens_of(generate(llm, [prompt], greedy(4)))[0]
    assert steered == llm.reference.greedy(prompt, 4, [Addition(("post_block", 0), vector(13))])
    assert steered != plain
    llm.unregister_consumer(adder)
    assert tokens_of(generate(llm, [prompt], greedy(4)))[0] == plain
    llm.register_consumer(Adder(("post_block", 0), vector(13)))
    assert tokens_of(generate(llm, [prompt], greedy(4)))[0] == steered


def test_a_vector_of_another_size_is_an_error_that_names_the_shapes(llm):
    llm.register_consumer(Adder(("post_block", 0), torch.zeros(3)))
    (output,) = generate(llm, prompts_of([4]), greedy(2))
    error = output.consumer_results["adder"].error
    assert "[3]" in error and f"[{HIDDEN}]" in error


def test_a_consumer_that_writes_nan_is_detached_and_spoils_no_block(llm):
    """Attention multiplies what a block's last owner left in it by zero, which keeps NaN."""
    prompts = prompts_of([7, 30])
    before = tokens_of(generate(llm, prompts, greedy(6)))
    llm.register_consumer(Adder(("post_block", 0), torch.full((HIDDEN,), torch.nan)))
    for output in generate(llm, prompts, greedy(6)):
        assert "NaN" in output.outputs[0].consumer_results["adder"].error
    llm.clear_consumers()
    llm.reset_prefix_cache()
    assert tokens_of(generate(llm, prompts, greedy(6))) == before


@pytest.mark.parametrize("steps", [pytest.param(0, marks=beyond_interpreting), 4])
def test_who_comes_to_write_serves_no_request_whose_blocks_are_shared(llm, reference, steps):
    """Blocks with rows that were written to would be found by requests that nobody writes to."""
    place, v = ("post_block", 1), vector(12)
    (prompt,) = prompts_of([40], seed=12)
    llm.llm_engine.add_request("early", {"prompt_token_ids": prompt}, greedy(60))
    for _ in range(steps):
        llm.llm_engine.step()
    adder = llm.register_consumer(Adder(place, v))
    llm.llm_engine.add_request("late", {"prompt_token_ids": [*prompt, 1]}, greedy(3))
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        ended |= {o.request_id: list(o.outputs[0].token_ids) for o in llm.llm_engine.step()}
    assert ended["early"] == reference.greedy(prompt, 60)
    assert ended["late"] == reference.greedy([*prompt, 1], 3, [Addition(place, v)])
    llm.unregister_consumer(adder)
    again = [*prompt, *ended["early"][:50]]
    (output,) = generate(llm, [again], greedy(3))
    assert output.num_cached_tokens == 64
    assert tokens_of([output]) == [reference.greedy(again, 3)]
