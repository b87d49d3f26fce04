"""Random walks of lanes: whatever is done to them and between them, an answer is that of its
tokens."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest
import torch

from logprobs.asking import OTHER_ENGINE, VOCAB, agrees, left_in

FORMS = [{}, {}, {"top_k": 5}, {"only": [3, 99, 7]}]
STEPS = 120
LONGEST = 150


class Walk:
    """Lanes of one caller, to which something is done at each step.

    Attributes:
        answers: tokens, form and what came, of steps that were answered.
        aborted: steps that ended with the engine's pause.
    """

    def __init__(self, lm, seed):
        self.lm = lm
        self.lanes = []
        self.answers = []
        self.aborted = 0
        self._draw = random.Random(seed)

    def _token(self):
        return self._draw.randrange(2, 40)

    async def run(self, steps=STEPS):
        for _ in range(steps):
            doing = self._draw.choices(
                (self._open, self._fork, self._close, self._step, self._step_together),
                (10, 18, 8, 30, 34),
            )[0]
            await (doing() if self.lanes else self._open())
        for lane in self.lanes:
            await lane.close()

    async def _open(self):
        if len(self.lanes) < 6:
            length = self._draw.choice([1, 5, 33, 70])
            self.lanes.append(self.lm.open([self._token() for _ in range(length)]))

    async def _fork(self):
        if len(self.lanes) < 8:
            self.lanes.append(self._draw.choice(self.lanes).fork())

    async def _close(self):
        lane = self.lanes.pop(self._draw.randrange(len(self.lanes)))
        if self._draw.random() < 0.7:  # else it is dropped
            await lane.close()

    async def _step(self):
        """One lane's, which may be cancelled, or closed meanwhile."""
        lane, form = self._draw.choice(self.lanes), self._draw.choice(FORMS)
        if self._draw.random() < 0.8 and len(lane) < LONGEST:
            lane.feed(*(self._token() for _ in range(self._draw.choice([1, 1, 1, 3]))))
        step, tokens = asyncio.ensure_future(lane.next(**form)), lane.tokens
        if self._draw.random() < 0.75:
            await self._answered([tokens], form, step)
            return
        await asyncio.sleep(self._draw.choice([0, 0.001, 0.01]))
        if self._draw.random() < 0.3:
            self.lanes.remove(lane)
            await lane.close()
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)

    async def _step_together(self):
        lanes = self._draw.sample(self.lanes, self._draw.randint(1, len(self.lanes)))
        form = self._draw.choice(FORMS)
        for lane in lanes:
            if self._draw.random() < 0.9 and len(lane) < LONGEST:
                lane.feed(self._token())
        tokens = [lane.tokens for lane in lanes]
        await self._answered(tokens, form, self.lm.batch_next(lanes, **form))

    async def _answered(self, tokens, form, step):
        try:
            found = await asyncio.wait_for(step, 60)
        except RuntimeError:
            self.aborted += 1
            return
        rows = zip(*found, strict=True) if isinstance(found, tuple) and len(tokens) > 1 else found
        rows = [found] if len(tokens) == 1 else rows
        self.answers += [(*of, form) for of in zip(tokens, rows, strict=True)]


def is_right(found, form, expected):
    """Whether an answer, in its form, is that of `transformers`."""
    if "top_k" in form:
        values, ids = (part.reshape(-1) for part in found)
        best = expected.topk(form["top_k"]).values
        return torch.allclose(values, best, rtol=OTHER_ENGINE) and torch.allclose(
            values, expected[ids.long()], rtol=OTHER_ENGINE
        )
    if "only" in form:
        return torch.allclose(found.reshape(-1), expected[form["only"]], rtol=OTHER_ENGINE)
    return agrees(found.reshape(VOCAB), expected, OTHER_ENGINE)


async def pause(engine):
    await engine.pause_generation(mode="abort")
    await engine.resume_generation()


async def preempt(engine):
    await engine.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize(
    ("disturb", "every_s"),
    [(None, 0.0), (pause, 0.7), (preempt, 0.05)],
    ids=["served", "paused now and then", "preempted now and then"],
)
def test_an_answer_is_that_of_its_tokens(lm, reference, disturb, every_s):
    seed = 100 * {None: 0, pause: 1, preempt: 2}[disturb]
    walks = [Walk(lm, seed + number) for number in range(3)]

    async def disturbing():
        while disturb is not None:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(lambda: lm.run(disturb(lm.engine)))

    async def run():
        beside = asyncio.ensure_future(disturbing())
        await asyncio.gather(*(walk.run() for walk in walks))
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)

    asyncio.run(run())
    lm.run(lm.engine.resume_generation())
    answers = [each for walk in walks for each in walk.answers]
    assert len(answers) > 300
    assert disturb is pause or not any(walk.aborted for walk in walks)
    known = {}
    for tokens, found, form in answers:
        if tokens not in known:
            known[tokens] = reference.next_token_logprobs_sync(list(tokens))
        assert is_right(found, form, known[tokens]), (tokens, form)
    walks.clear()
    gc.collect()
    assert not left_in(lm)
