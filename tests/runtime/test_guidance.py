"""Whom a guide is told of, in steps of a batch whose guided rows are found once."""

import numpy as np
import pytest
import torch

from runtime.test_session import HIDDEN, PROMPT, Engine
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow, ResidualStream, Sampler
from tllm.runtime.sampling import LmHead, SamplerStep
from tllm.spec.request import RequestSpec
from tllm.spec.turns import StepTurns

VOCAB = 10


class Guiding(Consumer):
    """Keeps the prompt's length, and the options, of each sequence that it may guide."""

    consumer_id = "guiding"

    def __init__(self):
        self.told = []

    def flows(self):
        write = Sampler.write(phase="any", width=4)
        reads = [ResidualStream.read(layer=0)]
        return [ConsumerFlow(reads=reads, writes=[write], window="same_step")]

    def consume_bundle(self, bundle, ctx):
        pass

    def guide(self, candidates, ctx):
        self.told += [(each.prompt_len, dict(each.options)) for each in candidates.meta.requests]


class AllAlike(SamplerStep):
    """Every token is as likely as every other."""

    def __init__(self, rows):
        self.logits = torch.zeros(rows, VOCAB)
        self.temperature = torch.ones(rows)
        self.penalizes = False
        self.unfiltered = np.ones(rows, bool)

    def penalize(self, full):
        return full


class ThreeTokens(AllAlike):
    """Three tokens are as likely as each other, and all others were filtered out."""

    def __init__(self, rows):
        super().__init__(rows)
        self.logits[:, 3:] = -torch.inf


class Biased(Guiding):
    """Adds the same deltas in each step."""

    def __init__(self, deltas):
        super().__init__()
        self.deltas = torch.tensor(deltas)

    def guide(self, candidates, ctx):
        return self.deltas.expand(len(candidates.counts), -1)


class Drawing(Engine):
    """An engine that draws tokens."""

    def __init__(self):
        super().__init__()
        head = LmHead(torch.zeros(VOCAB, HIDDEN), None, 0, 1.0, None, None)
        self.session.consumers.guidance.set_head(head)

    def draw(self, count=1, greedy=False, step=None):
        """A step of the one sequence there is; whether it goes on from the last."""
        (name,) = self.computed
        ids, _ = self.begin({name: count})
        steps = self.session.steps
        goes_on = steps.goes_on
        steps.before_sampling(None)
        if steps.guidance_width:
            steps.guide(step or AllAlike(1), np.array([greedy]))
        steps.after_sampling(torch.zeros(1, dtype=torch.int64), ids)
        steps.end()
        return goes_on

    def turn(self, length, options):
        """The prompt has grown by a token, in the running batch."""
        (name,) = self.computed
        turns = StepTurns([name], [1], [length], [length - 1], {name: {"guiding": options}})
        self.session.sequences.take_turns(turns)

    def come_again(self, length):
        """The engine schedules the sequence anew, as it does with more of a streamed prompt and
        after a preemption."""
        (name,) = self.computed
        spec, computed = RequestSpec(name, name), self.computed[name]
        self.session.sequences.start(name, [1] * length, length, spec, 0, computed)


@pytest.fixture
def engine():
    return Drawing()


@pytest.fixture
def guiding(engine):
    consumer = Guiding()
    engine.session.consumers.register(consumer)
    engine.start("a")
    engine.draw(PROMPT)
    consumer.told.clear()
    return consumer


def test_a_guide_is_told_of_a_lane_as_it_is_in_each_turn(engine, guiding):
    went_on = []
    for number in range(4):
        engine.turn(PROMPT + 1 + number, {"turn": number})
        went_on.append(engine.draw())
    assert guiding.told == [(PROMPT + 1 + number, {"turn": number}) for number in range(4)]
    assert all(went_on[1:])


@pytest.mark.parametrize("grown", [0, 1], ids=["preempted", "with more of a prompt"])
def test_what_the_sampler_is_asked_is_asked_anew_when_a_sequence_is_scheduled_anew(
    engine, guiding, grown
):
    """With more of a prompt come other parameters, and a place of its own in the sampler's tables,
    though the batch is of the same sequence, a token further on."""
    for number in range(3):
        engine.come_again(PROMPT + grown * (number + 1))
        assert not engine.draw()
    assert len(guiding.told) == 3
    engine.come_again(PROMPT + grown * 4)
    engine.draw(greedy=True)
    assert len(guiding.told) == 3


def test_a_prompt_that_is_computed_a_token_at_a_time_is_guided_at_its_end(engine):
    consumer = Guiding()
    engine.session.consumers.register(consumer)
    engine.start("a")
    for _ in range(PROMPT - 1):
        engine.draw()
    assert not consumer.told
    assert engine.draw()
    assert consumer.told == [(PROMPT, {})]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "deltas", [[NAN, 0, 0, 0], [0, INF, 0, 0], [-INF, -INF, -INF, 0]], ids=["nan", "inf", "nothing"]
)
def test_deltas_that_no_token_can_be_drawn_from_are_refused(engine, deltas):
    engine.session.consumers.register(Biased(deltas))
    engine.start("a")
    step = ThreeTokens(1)
    engine.draw(PROMPT, step=step)
    assert torch.equal(step.logits, ThreeTokens(1).logits)
    assert "guide() returned deltas that are NaN" in engine.session.stats()["consumers"]["guiding"]


def test_deltas_that_are_no_tensor_are_refused_with_what_to_give(engine):
    class Arrays(Biased):
        def guide(self, candidates, ctx):
            return self.deltas.numpy()

    engine.session.consumers.register(Arrays([0.0] * 4))
    engine.start("a")
    engine.draw(PROMPT, step=ThreeTokens(1))
    error = engine.session.stats()["consumers"]["guiding"]
    assert "guide() returned ndarray; let it return a tensor [rows, width] = [1, 4], or" in error


def test_what_stands_beyond_the_candidates_of_a_row_means_nothing(engine):
    engine.session.consumers.register(Biased([1.0, -INF, 0.5, NAN]))
    engine.start("a")
    step = ThreeTokens(1)
    engine.draw(PROMPT, step=step)
    assert step.logits[0].tolist() == [1.0, -INF, 0.5] + [-INF] * 7
    assert engine.session.stats()["consumers"]["guiding"] == "ok"
