"""The consumer as an engine drives it: predict, guide, train, finish, recycle."""

import re
from dataclasses import replace

import pytest
import torch
from esamp_driver import HIDDEN, Driver, forward, make_request
from torch.nn.functional import mse_loss

from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.consumers.esamp.distiller import Layout, Parameters
from tllm.consumers.esamp.norm import CallableNorm, Identity, RmsNorm

CONFIG = {"rank": 4, "beta": 0.5, "lr": 1e-2, "slots": 2}


UNKNOWN_NORM = {"final_norm": None, "final_norm_weight": None, "final_norm_eps": None}


def make_driver(seed=0, model=None, **changes):
    return Driver(ESampConsumerConfig(**CONFIG | changes), seed, **model or {})


def samples(prompt, n=2, first_slot=0, options=None):
    return [make_request(prompt, i, slot=first_slot + i, n=n, options=options) for i in range(n)]


class ExpectedDistiller:
    """One distiller by autograd and torch.optim, for a driver's model."""

    def __init__(self, driver, target_norm=None):
        config, model = driver.consumer.config, driver.ctx.model
        flat = Layout(HIDDEN, config.rank).initial(config.seed)
        self.head_norm = (
            RmsNorm(model.final_norm_weight, model.final_norm_eps)
            if model.final_norm_weight is not None
            else CallableNorm(model.final_norm, model.dtype)
        )
        self.target_norm = target_norm or self.head_norm
        self.weights = Parameters(
            *(p.clone().requires_grad_() for p in Layout(HIDDEN, config.rank).views(flat))
        )
        self.optimizer = torch.optim.AdamW(
            self.weights, config.lr, config.betas, config.eps, config.weight_decay
        )

    def predict(self, source):
        return forward(source, self.weights, self.head_norm).detach()

    def train(self, source, target):
        self.optimizer.zero_grad()
        value = mse_loss(forward(source, self.weights, self.target_norm), target)
        value.backward()
        self.optimizer.step()
        return value.item()


def expected_delta(candidates, predictions, beta):
    difference = candidates.logits - candidates.project(predictions)
    return beta * difference.masked_fill(~torch.isfinite(difference), 0)


def test_each_sample_is_guided_by_its_own_prediction_of_a_distiller_that_learned_from_all():
    driver = make_driver()
    a, b = samples("a", 3), samples("b", 2, first_slot=5)
    expected = {"a": ExpectedDistiller(driver), "b": ExpectedDistiller(driver)}
    rows = {"a": [0, 2, 4], "b": [1, 3]}
    running = [a[0], b[0], a[1], b[1], a[2]]
    driver.begin(*running)
    for _ in range(12):
        step = driver.step(running)
        predictions = torch.empty(5, HIDDEN)
        for prompt, distiller in expected.items():
            predictions[rows[prompt]] = distiller.predict(step.source[rows[prompt]])
        wanted = expected_delta(step.candidates, predictions, 0.5)
        torch.testing.assert_close(step.delta, wanted, rtol=1e-3, atol=1e-3)
        for prompt, distiller in expected.items():
            distiller.train(step.source[rows[prompt]], step.target[rows[prompt]])
    assert step.delta.any()


def test_the_final_norm_of_new_weights_is_taken_over():
    driver = make_driver()
    running = samples("a", 2)
    expected = ExpectedDistiller(driver)
    driver.begin(*running)
    for number in range(6):
        if number == 3:
            weight = torch.linspace(3.0, 0.2, HIDDEN)
            driver.ctx.model = replace(driver.ctx.model, final_norm_weight=weight)
            driver.consumer.on_weights_changed(driver.ctx)
            expected.head_norm = expected.target_norm = RmsNorm(weight.clone(), 1e-6)
        step = driver.step(running)
        predictions = expected.predict(step.source)
        wanted = expected_delta(step.candidates, predictions, 0.5)
        torch.testing.assert_close(step.delta, wanted, rtol=1e-3, atol=1e-3)
        expected.train(step.source, step.target)
    assert step.delta.any()


@pytest.mark.parametrize("target", ["lm_head_in", "post_block"])
def test_models_with_another_final_norm(target):
    layer_norm = torch.nn.LayerNorm(HIDDEN).requires_grad_(False)
    model = {"final_norm": layer_norm, "final_norm_weight": None, "final_norm_eps": None}
    driver = make_driver(model=model, target_site=target)
    expected = ExpectedDistiller(driver, None if target == "lm_head_in" else Identity())
    running = samples("a")
    for _ in range(4):
        step = driver.step(running)
        wanted = expected_delta(step.candidates, expected.predict(step.source), 0.5)
        torch.testing.assert_close(step.delta, wanted, rtol=1e-3, atol=1e-3)
        expected.train(step.source, step.target)


def test_a_model_whose_final_norm_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"final norm of the model.*guide=False"):
        make_driver(model=UNKNOWN_NORM)


def test_one_of_several_streams_cannot_guide():
    with pytest.raises(ValueError, match=r"target_site='post_block' cannot guide.*lm_head_in"):
        make_driver(model={"one_stream": False}, target_site="post_block")
    make_driver(model={"one_stream": False}, target_site="post_block", guide=False)
    driver = make_driver(model={"one_stream": False})
    assert driver.step(samples("a")).delta.any()


def test_guidance_is_finite_where_there_are_no_candidates():
    driver = make_driver()
    step = driver.step(samples("a", 4))
    padding = torch.isinf(step.candidates.logits)
    assert padding.any()
    assert torch.isfinite(step.delta).all()
    assert not step.delta[padding].any()


def test_a_state_that_is_not_finite_leaves_its_row_unguided():
    driver = make_driver()
    running = samples("a", 2) + samples("b", 1, first_slot=4)
    source = driver.rows(3)
    source[0, 0] = float("nan")
    first = driver.step(running, source=source)
    assert not first.delta[0].any()
    assert first.delta[1].any()
    assert first.delta[2].any()
    assert driver.stats["steps_skipped"] == {"non_finite_loss": 1}
    assert torch.isfinite(driver.step(running).delta).all()


def test_candidate_rows_are_matched_by_sequence_not_by_order():
    driver = make_driver()
    running = samples("a", 3)
    stranger = make_request("prefill", slot=9)
    step = driver.step(running, sampled=[running[2], stranger, running[0]])
    expected = ExpectedDistiller(driver).predict(step.source)
    wanted = expected_delta(step.candidates, expected[[2, 0, 0]], 0.5)
    wanted[1] = 0
    torch.testing.assert_close(step.delta, wanted, rtol=1e-4, atol=1e-4)


def test_beta_is_each_requests_own():
    driver = make_driver()
    plain = make_request("a", slot=0)
    strong = make_request("b", slot=1, options={"beta": 2.0})
    off = make_request("c", slot=2, options={"beta": 0.0})
    step = driver.step([plain, strong, off])
    predictions = ExpectedDistiller(driver).predict(step.source)
    wanted = expected_delta(step.candidates, predictions, torch.tensor([[0.5], [2.0], [0.0]]))
    torch.testing.assert_close(step.delta, wanted, rtol=1e-4, atol=1e-4)


def test_nothing_is_projected_when_no_row_is_guided():
    driver = make_driver(beta=0.0)
    assert driver.step(samples("a")).delta is None


def test_predictions_of_an_earlier_step_guide_nothing():
    driver = make_driver()
    running = samples("a")
    candidates = driver.step(running).candidates
    driver.ctx.step += 1
    candidates.delta = None
    driver.consumer.guide(candidates, driver.ctx)
    assert candidates.delta is None


def test_a_request_may_be_guided_without_teaching():
    driver = make_driver()
    quiet = make_request("a", slot=0, options={"train": False})
    for _ in range(3):
        step = driver.step([quiet])
        untrained = ExpectedDistiller(driver).predict(step.source)
        torch.testing.assert_close(step.delta, expected_delta(step.candidates, untrained, 0.5))
    assert driver.stats["steps_skipped"] == {"train_off": 3}
    assert driver.stats["rows_trained"] == 0
    assert driver.stats["predictions"] == 3


def test_nothing_leaks_from_one_generate_to_the_next():
    used, new = make_driver(seed=1), make_driver(seed=1)
    for prompt in ("a", "b", "c"):
        first = samples(prompt)
        used.begin(*first)
        for _ in range(5):
            used.step(first)
        used.finish(*first)
    used.generator.set_state(new.generator.get_state())
    later = samples("later")
    for _ in range(5):
        assert torch.equal(used.step(later).delta, new.step(later).delta)


def test_the_same_seed_guides_in_the_same_way():
    first, second, other = make_driver(), make_driver(), make_driver()
    other.consumer = ESampConsumer(ESampConsumerConfig(**CONFIG, seed=1))
    other.consumer.start(other.ctx)
    deltas = []
    for driver in (first, second, other):
        for _ in range(4):
            step = driver.step(samples("a"))
        deltas.append(step.delta)
    assert torch.equal(deltas[0], deltas[1])
    assert not torch.equal(deltas[0], deltas[2])


@pytest.mark.parametrize("persist", [False, True])
def test_a_group_goes_on_learning_only_when_it_persists(persist):
    driver = make_driver(persist=persist)
    member = make_request("a", slot=0, options={"group": "x"})
    driver.step([member])
    driver.step([member])
    driver.finish(member)
    step = driver.step([make_request("b", slot=0, options={"group": "x"})])
    new = ExpectedDistiller(driver)
    wanted = expected_delta(step.candidates, new.predict(step.source), 0.5)
    assert torch.allclose(step.delta, wanted, atol=1e-4) is not persist


def test_a_full_bank_grows_and_everyone_keeps_learning():
    driver, roomy = make_driver(slots=1), make_driver(slots=16)
    running = []
    for number in range(9):
        running.append(make_request(f"p{number}", slot=number))
        small, big = driver.step(running), roomy.step(running)
        torch.testing.assert_close(small.delta, big.delta, rtol=1e-4, atol=1e-4)
    assert driver.stats["slots"] == 16
    assert driver.stats["distillers_refused"] == 0
    assert driver.stats["loss_per_prompt"]["req-p0"]["count"] == 9


def test_a_full_bank_leaves_further_prompts_unguided_and_counts_them(caplog):
    driver = make_driver(slots=1, on_full="unguided")
    running = [make_request(name, slot=slot) for slot, name in enumerate("abc")]
    for _ in range(3):
        step = driver.step(running)
        assert step.delta[0].any()
        assert not step.delta[1:].any()
    stats = driver.stats
    assert stats["slots"] == stats["slots_in_use"] == 1
    assert stats["distillers_refused"] == 2
    assert stats["steps_skipped"] == {"no_free_slot": 6}
    assert stats["rows_trained"] == stats["predictions"] == 3
    guided, *unguided = driver.finish(*running)
    assert guided is None
    assert [(result.status, "slots=1" in result.error) for result in unguided] == [
        ("error", True)
    ] * 2
    (sentence,) = caplog.messages
    assert "request 'req-b' was not guided" in sentence and "slots=1" in sentence, "once"


@pytest.mark.parametrize("persist", [False, True])
def test_who_is_unguided_hears_that_groups_that_ended_keep_their_distillers(persist):
    driver = make_driver(slots=1, on_full="unguided", persist=persist)
    for name in ("a", "b"):
        member = make_request(name, slot=0, options={"group": name})
        driver.step([member])
        (result,) = driver.finish(member)
    assert (result is not None) is persist
    if persist:
        assert (
            "persist=True keeps those of groups until they are forgotten (forget_group)"
            in result.error
        )


def test_running_out_of_memory_leaves_further_prompts_unguided(monkeypatch):
    driver = make_driver(slots=1)

    def no_memory(slots):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(driver.consumer._worker._bank, "grow", no_memory)
    step = driver.step([make_request("a", slot=0), make_request("b", slot=1)])
    assert step.delta[0].any()
    assert not step.delta[1].any()
    assert driver.stats["distillers_refused"] == 1


def test_statistics_say_what_happened():
    driver = make_driver()
    expected = ExpectedDistiller(driver)
    running = samples("a", 3)
    losses, seen, changed = [], 0, 0
    for _ in range(4):
        step = driver.step(running)
        losses.append(expected.train(step.source, step.target))
        seen += int(step.candidates.counts.sum())
        changed += int((step.delta != 0).sum())
    driver.consumer.synchronize()
    stats = driver.stats
    assert stats["loss_mean"] == pytest.approx(sum(losses) / 4, rel=1e-3)
    assert stats["loss_last"] == pytest.approx(losses[-1], rel=1e-3)
    assert stats["loss_count"] == 4
    assert stats["loss_per_prompt"]["req-a"]["count"] == 4
    assert stats["rows_trained"] == stats["predictions"] == 12
    assert (stats["candidates_seen"], stats["candidates_changed"]) == (seen, changed)
    assert stats["steps_skipped"] == {}
    driver.finish(*running)
    for name in ("b", "c"):
        driver.step(samples(name))
    assert driver.stats["loss_count"] == 6
    assert set(driver.stats["loss_per_prompt"]) == {"req-a", "req-b", "req-c"}


def test_statistics_before_any_work():
    alone = ESampConsumer()
    for call, told in (
        (alone.read_stats, "llm.register_consumer"),
        (lambda: alone.forget_group("x"), "llm.call_consumer('esamp', 'forget_group', NAME)"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(told)):
            call()
    stats = make_driver().stats
    assert stats["loss_mean"] is None
    assert stats["loss_count"] == 0
    idle, busy = stats, stats | {"predictions": 5}
    assert ESampConsumer().merge_stats([idle, busy]) is busy


def test_rows_on_a_rank_without_the_lm_head_are_an_error_that_says_what_to_do():
    driver = make_driver(model=UNKNOWN_NORM | {"num_stages": 2})
    driver.begin(*samples("a"))
    assert driver.stats == {}
    with pytest.raises(RuntimeError, match="choose a source_layer of the last rank"):
        driver.step(samples("a"))


def test_training_on_inner_layers_needs_no_lm_head():
    driver = make_driver(model=UNKNOWN_NORM, guide=False, target_site="post_block")
    driver.step(samples("a"))
    assert driver.stats["loss_count"] == 1


def test_training_alone_and_guiding_alone():
    training = make_driver(guide=False)
    training.step(samples("a"))
    assert training.stats["rows_trained"] == 2
    assert training.stats["predictions"] == 0
    guiding = make_driver(train=False)
    assert guiding.step(samples("a")).delta.any()
    assert guiding.stats["rows_trained"] == 0


def test_half_precision_models():
    driver = make_driver(model={"dtype": torch.float16})
    for _ in range(3):
        step = driver.step(samples("a"))
    assert step.delta.any()
    assert driver.stats["loss_count"] == 3


def test_ids_that_come_again_get_a_new_distiller():
    driver = make_driver()
    running = samples("a")
    for _ in range(3):
        driver.step(running)
    driver.finish(*running)
    step = driver.step(running)
    untrained = ExpectedDistiller(driver).predict(step.source)
    torch.testing.assert_close(step.delta, expected_delta(step.candidates, untrained, 0.5))
