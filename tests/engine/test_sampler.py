"""`Sampler.write`: the candidates a guide sees, and what its deltas do to the draw."""

import os

import pytest
import torch
from tiny_engines import TINY_ENGINE

from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.guides import GUIDES, Contrasting, Guide, processed
from engine.recorder import Recorder
from engine.reference import HIDDEN
from tllm import LLM
from tllm.ports import ConsumerFlow, Sampler

LENGTHS = [5, 3, 9]

PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.7, "top_k": 40},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.8, "top_p": 0.9},
    "bias": {"logit_bias": {7: 6.0, 11: -4.0}, "top_k": 20, "temperature": 0.8},
}


@pytest.mark.parametrize("name", PARAMS)
def test_candidates_are_what_the_filters_leave(llm, reference, name):
    """And projecting what the LM head read gives their logits."""
    guide = llm.register_consumer(Guide())
    params = sampled(6, **PARAMS[name])
    outputs = {o.request_id: o for o in generate(llm, prompts_of(LENGTHS, seed=1), params)}
    assert len(guide.seen) == 6 * len(LENGTHS)
    for row in guide.seen:
        output = outputs[row.request_id]
        prompt = list(output.prompt_token_ids)
        generated = list(output.outputs[0].token_ids)[: row.position + 1 - len(prompt)]
        logits, _ = reference.run([*prompt, *generated])
        expected = processed(logits[-1], params, prompt, generated)
        assert set(row.token_ids) == set(expected.isfinite().nonzero().flatten().tolist())
        torch.testing.assert_close(row.logits, expected[row.token_ids], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(row.projected, row.logits, rtol=1e-4, atol=1e-4)
    assert all(GUIDES["guide"].projected_unknown), "rows of -1 keep the engine's logits"


def test_penalties_of_one_request_do_not_reach_another(llm):
    guide = llm.register_consumer(Guide())
    params = [sampled(6, **PARAMS[n]) for n in ("repetition", "plain", "bias")]
    generate(llm, prompts_of(LENGTHS, seed=3), params)
    for row in guide.seen:
        torch.testing.assert_close(row.projected, row.logits, rtol=1e-4, atol=1e-4)


def test_deltas_decide_the_draw_and_compose(llm):
    one = llm.register_consumer(Guide(boost=1000.0))
    outputs = {o.request_id: o for o in generate(llm, prompts_of(LENGTHS), sampled(5, top_k=9))}
    for row in one.seen:
        output = outputs[row.request_id]
        drawn = output.outputs[0].token_ids[row.position + 1 - len(output.prompt_token_ids)]
        assert drawn == row.token_ids[int(row.logits.argmin())]
    two = llm.register_consumer(Guide(consumer_id="second"))
    generate(llm, prompts_of(LENGTHS), sampled(5, top_k=9))
    assert all(float(row.logits.max()) > 500 for row in two.seen)


@pytest.mark.parametrize(("phase", "drawn"), [("prefill", [0]), ("decode", [1, 2, 3])])
def test_phase_selects_the_first_token_or_the_later_ones(llm, phase, drawn):
    guide = llm.register_consumer(Guide(phase=phase))
    outputs = {o.request_id: o for o in generate(llm, prompts_of([5, 40]), sampled(4))}
    lengths = {name: len(o.prompt_token_ids) for name, o in outputs.items()}
    assert sorted((r.request_id, r.position) for r in guide.seen) == sorted(
        (name, length - 1 + i) for name, length in lengths.items() for i in drawn
    )


def test_greedy_rows_of_a_mixed_batch_are_not_guided(llm, reference):
    guide = llm.register_consumer(Guide(boost=1000.0))
    params = [greedy(5), sampled(5, top_k=9), greedy(5)]
    outputs = generate(llm, prompts_of(LENGTHS), params)
    for i in (0, 2):
        assert tokens_of(outputs)[i] == reference.greedy(outputs[i].prompt_token_ids, 5)
    assert {row.request_id for row in guide.seen} == {outputs[1].request_id}


def test_a_row_with_more_candidates_than_the_width_is_drawn_unguided_and_counted(llm, caplog):
    params = sampled(5, seed=4)
    plain = tokens_of(generate(llm, prompts_of(LENGTHS), params))
    guide = llm.register_consumer(Guide(boost=1000.0, width=4))
    before = guide.read_stats()["runtime"]["rows_with_too_many_candidates"]
    assert tokens_of(generate(llm, prompts_of(LENGTHS), params)) == plain
    assert all(row.token_ids == [] for row in guide.seen)
    assert guide.read_stats()["runtime"]["rows_with_too_many_candidates"] == before + 15
    told = [each for each in caplog.messages if "is sampled without them" in each]
    assert len(told) == 1 and "consumer 'guide'" in told[0], "once, and not for each row"


UNFILTERED = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "bias": {"logit_bias": {7: 6.0, 11: -4.0}},
}


@pytest.mark.parametrize("width", [4, 10_000], ids=["wide rows", "narrow rows"])
@pytest.mark.parametrize("name", UNFILTERED)
def test_contrast_guides_every_row(llm, reference, name, width):
    """The state's own logits are what is drawn from; cold, that is the largest of them."""
    state = 30 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
    consumer = llm.register_consumer(Contrasting(state, width=width))
    params = sampled(6, temperature=0.5, seed=3, **UNFILTERED[name])
    own = reference.model.lm_head(state).detach()
    before = consumer.read_stats()["runtime"]["rows_with_too_many_candidates"]
    for output in generate(llm, prompts_of(LENGTHS, seed=8), params):
        prompt, drawn = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        for i, token in enumerate(drawn):
            expected = processed(own, params, prompt, drawn[:i])
            likeliest = expected.topk(2).values
            assert float(likeliest[0] - likeliest[1]) > 3, "the test's state decides nothing"
            assert token == int(expected.argmax())
    stats = consumer.read_stats()
    assert stats["tally"][1] > 0
    assert stats["runtime"]["rows_with_too_many_candidates"] == before, "all rows were guided"


def test_contrast_guides_a_wide_row_and_the_narrow_ones_beside_it(llm):
    """Cold, the likeliest token of the fixed state is drawn: of three, or of all."""
    state = 30 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
    asked = [sampled(5, seed=i, top_k=3) for i in range(2)] + [sampled(5, seed=2)]
    plain = tokens_of(generate(llm, prompts_of(LENGTHS), asked))
    llm.register_consumer(Contrasting(state, width=4))
    tokens = tokens_of(generate(llm, prompts_of(LENGTHS), asked))
    assert all(guided != unguided for guided, unguided in zip(tokens, plain, strict=True))
    assert len(set(tokens[2])) == 1  # nothing filters it: one token is the likeliest each time
    llm.clear_consumers()
    assert tokens_of(generate(llm, prompts_of(LENGTHS), asked)) == plain


def test_a_filtered_row_that_contrast_leaves_alone_beside_penalties_is_told_once(llm, caplog):
    state = 30 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
    llm.register_consumer(Contrasting(state, width=4))

    def told() -> list[str]:
        return [each for each in caplog.messages if "was drawn unguided" in each]

    penalized = {"seed": 2, "repetition_penalty": 1.2}
    for asked in (penalized, {"seed": 2, "top_k": 9}, penalized | {"top_k": 4}):
        generate(llm, prompts_of(LENGTHS), sampled(5, **asked))
    assert told() == [], "these are guided"
    for _ in range(3):
        generate(llm, prompts_of(LENGTHS), sampled(5, **penalized, top_k=9))
    (sentence,) = told()
    assert "'contrast': 4" in sentence


def test_seeded_requests_draw_the_same_when_nothing_is_added(llm):
    params = [sampled(8, seed=5, top_k=20), sampled(8, seed=6, top_p=0.9), sampled(8, seed=7)]
    plain = tokens_of(generate(llm, prompts_of(LENGTHS), params))
    llm.register_consumer(Guide())
    assert tokens_of(generate(llm, prompts_of(LENGTHS), params)) == plain


def test_unguided_requests_of_a_mixed_batch_draw_as_without_a_guide(llm):
    plain_params = [sampled(8, seed=i, top_k=20) for i in range(3)]
    plain = tokens_of(generate(llm, prompts_of(LENGTHS), plain_params))
    llm.register_consumer(Guide(boost=1000.0))
    mixed = [
        sampled(8, seed=i, top_k=20, consumers={"guide": {"enabled": i == 1}}) for i in range(3)
    ]
    tokens = tokens_of(generate(llm, prompts_of(LENGTHS), mixed))
    assert (tokens[0], tokens[2]) == (plain[0], plain[2])
    assert tokens[1] != plain[1]


def test_seeded_guided_requests_are_reproducible(llm):
    llm.register_consumer(Guide(boost=1.5))
    params = [sampled(8, seed=i, top_k=20) for i in range(3)]
    first = tokens_of(generate(llm, prompts_of(LENGTHS), params))
    assert tokens_of(generate(llm, prompts_of(LENGTHS), params)) == first


def test_deltas_of_another_shape_are_an_error_that_names_the_shapes(llm):
    class Wrong(Recorder):
        def guide(self, candidates, ctx):
            return torch.zeros(1, 1)

    llm.register_consumer(Wrong(ConsumerFlow(writes=[Sampler.write(phase="any", width=8)])))
    (output,) = generate(llm, prompts_of([4]), sampled(3, top_k=4))
    assert len(output.outputs[0].token_ids) == 3
    assert "[1, 8]" in output.consumer_results["recorder"].error


def test_a_seeded_request_draws_the_same_when_its_prompt_is_computed_in_chunks(llm, plain_engine):
    """On a CPU, vLLM's V1 runner ends with an exception here."""
    prompts = prompts_of([5, 60, 40], seed=9)
    params = [sampled(6, temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    expected = tokens_of(generate(plain_engine, prompts, params))
    for _ in range(2):
        assert tokens_of(generate(llm, prompts, params)) == expected


TAKES_PROCESSORS = True
if os.environ["TLLM_TEST_RUNNER"] == "v2":
    try:
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
    except ModuleNotFoundError:
        TAKES_PROCESSORS, LogitsProcessor = False, object
else:
    from vllm.v1.sample.logits_processor import LogitsProcessor


class Boost(LogitsProcessor):
    """A logits processor as users give to an engine: token 33 has 6 more."""

    def __init__(self, *_):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits, *_):
        logits[:, 33] += 6.0
        return logits


@pytest.fixture(scope="module")
def boosting(tiny_model):
    """An engine with a logits processor of the user's, whose log-probabilities are those of what
    tokens are drawn from."""
    if not TAKES_PROCESSORS:
        pytest.skip("vLLM 0.30's V2 runner takes no logits processors")
    options = {"logits_processors": [Boost], "logprobs_mode": "processed_logprobs"}
    return LLM(tiny_model, max_num_batched_tokens=24, **options, **TINY_ENGINE)


def test_logits_processors_of_the_users_own_apply_to_what_a_guide_projects(boosting):
    """As vLLM's bias does: of a contrast, their part is not counted twice."""
    guide = boosting.register_consumer(Guide())
    outputs = generate(boosting, prompts_of(LENGTHS, seed=1), sampled(4, seed=1))
    boosting.clear_consumers()
    assert any(33 in tokens for tokens in tokens_of(outputs))
    for row in guide.seen:
        torch.testing.assert_close(row.projected, row.logits, rtol=1e-4, atol=1e-4)
    assert len(guide.seen) == 4 * len(LENGTHS)


def test_processed_logprobs_are_of_what_a_guided_token_was_drawn_from(boosting, reference):
    """As a policy's ratio wants them: by deltas, and by a contrast over the whole vocabulary."""
    guide = boosting.register_consumer(Guide(boost=3.0))
    params = sampled(5, temperature=0.7, top_k=9, seed=1, logprobs=0)
    outputs = generate(boosting, prompts_of(LENGTHS, seed=2), params)
    boosting.clear_consumers()
    by_id = {output.request_id: output for output in outputs}
    changed = 0
    for row in guide.seen:
        output = by_id[row.request_id]
        drawn = output.outputs[0].logprobs[row.position + 1 - len(output.prompt_token_ids)]
        ((token, found),) = drawn.items()
        guided = row.logits.clone()
        guided[guided.argmin()] += 3.0
        at = row.token_ids.index(token)
        assert found.logprob == pytest.approx(float(guided.log_softmax(0)[at]), abs=1e-4)
        changed += abs(found.logprob - float(row.logits.log_softmax(0)[at])) > 0.01
    assert changed > 0 and len(guide.seen) == 5 * len(LENGTHS)

    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
    boosting.register_consumer(Contrasting(state, width=4))
    params = sampled(5, temperature=0.7, seed=1, logprobs=0)
    outputs = generate(boosting, prompts_of(LENGTHS, seed=2), params)
    boosting.clear_consumers()
    of_state = reference.model.lm_head(state).detach()
    of_state[33] += 6.0
    expected = processed(of_state, params, [], []).log_softmax(0)
    for output in outputs:
        for drawn in output.outputs[0].logprobs:
            ((token, found),) = drawn.items()
            assert found.logprob == pytest.approx(float(expected[token]), abs=1e-3)
