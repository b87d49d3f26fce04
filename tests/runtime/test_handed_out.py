"""What consumers are handed out, in every window, while sequences come, grow, are preempted and
end: each row once, with its values, and told as it was in its step."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.test_session import HIDDEN, PROMPT, Engine
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow, ResidualStream
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.request import RequestSpec
from tllm.spec.turns import StepTurns

FLOWS = {
    "lent in the step": {"window": "same_step", "delivery": "device_lease"},
    "by request": {"window": "same_step", "bundle_key": ("request_id",)},
    "in the next step": {"window": "next_step", "delivery": "device_lease"},
    "on the side": {"window": "out_of_band", "bundle_key": ("engine_step_id",)},
    "every third step": {"window": "out_of_band", "dispatch_every_n_steps": 3},
    "lent to a thread": {"window": "background", "delivery": "device_lease"},
    "given to a thread": {"window": "background"},
}


class Keeping(Consumer):
    """Keeps of each row whose it is, where, and how long its prompt was; checks its values."""

    def __init__(self, name, phase):
        self.consumer_id = name
        self.phase = phase
        self.slow = FLOWS[name]["window"] == "background"
        self.seen = []

    def flows(self):
        reads = [ResidualStream.read(layer=n, role=str(n), phase=self.phase) for n in (1, 2)]
        return [ConsumerFlow(reads=reads, **FLOWS[self.consumer_id])]

    def consume_bundle(self, bundle, ctx):
        if self.slow:
            time.sleep(0.001)  # sequences go on meanwhile
        meta = bundle.meta
        rows = zip(meta.request_index.tolist(), meta.positions.tolist(), strict=True)
        for row, (index, position) in enumerate(rows):
            for layer in (1, 2):
                values = bundle.entries[str(layer)][row].tolist()
                assert values == [100.0 * layer + position] * HIDDEN
            request = meta.requests[index]
            self.seen.append((request.request_id, position, request.prompt_len))
        if "phase" in bundle.key:
            assert set(meta.is_prefill.tolist()) == {bundle.key["phase"] == "prefill"}


class Modelled(Engine):
    """An engine, and what its consumers are to be handed out.

    Attributes:
        prompt_lens, delivered: of each sequence.
        consumers: with what each is to be handed.
    """

    def __init__(self):
        super().__init__(layers=3)
        self.session._ring._allocate(12)  # so that it grows
        self.prompt_lens, self.delivered, self.consumers = {}, {}, {}

    def come(self, name, phase):
        consumer = Keeping(name, phase)
        self.session.consumers.register(consumer)
        self.consumers[name] = consumer, []

    def go(self, name):
        """It leaves, and is to have had all."""
        consumer, expected = self.consumers.pop(name)
        owner = self.session.consumers.by_id[name]
        self.session.unregister(name)
        assert owner.error is None
        assert sorted(consumer.seen) == sorted(expected)

    def begin_sequence(self, name):
        self.start(name)
        self.prompt_lens[name], self.delivered[name] = PROMPT, 0

    def end_sequence(self, name):
        self.finish(name)
        del self.prompt_lens[name], self.delivered[name]

    def compute(self, counts):
        before = dict(self.computed)
        if counts:
            self.step(**counts)
        for name, count in counts.items():
            length = self.prompt_lens[name]
            for position in range(max(before[name], self.delivered[name]), before[name] + count):
                phases = "any", "prefill" if position < length else "decode"
                for consumer, expected in self.consumers.values():
                    if consumer.phase in phases:
                        expected.append((name, position, length))
            self.delivered[name] = max(self.delivered[name], before[name] + count)

    def lengthen(self, name, length):
        """Tokens from the last computed one on are others than before."""
        own = max(self.computed[name], self.prompt_lens[name])
        self.delivered[name] = min(self.delivered[name], own)
        self.prompt_lens[name] = length

    def grow(self, name, tokens):
        """More of a streamed prompt."""
        if self.computed[name] >= self.prompt_lens[name]:
            computed, length = self.computed[name], self.computed[name] + tokens
            self.lengthen(name, length)
            spec = RequestSpec(name, name)
            self.session.sequences.start(name, [1] * length, length, spec, 0, computed)

    def take_turns(self):
        """Lanes: the prompts of all sequences that have been computed grow by a token."""
        names = [name for name in self.computed if self.computed[name] >= self.prompt_lens[name]]
        if names:
            computed = [self.computed[name] for name in names]
            lengths = [each + 1 for each in computed]
            for name, length in zip(names, lengths, strict=True):
                self.lengthen(name, length)
            turns = StepTurns(names, [1] * len(names), lengths, computed, {})
            self.session.sequences.take_turns(turns)


ACTIONS = st.one_of(
    st.just(("begin",)),
    st.tuples(st.sampled_from(["end", "preempt", "grow"]), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.sampled_from(["decode", "decode", "lanes"]), st.integers(1, 5)),
    st.tuples(st.just("step"), st.permutations("abcd"), st.lists(st.integers(0, 2), min_size=4)),
    st.just(("skip",)),
    st.tuples(
        st.just("consumer"),
        st.sampled_from(sorted(FLOWS)),
        st.sampled_from(["any", "prefill", "decode"]),
    ),
)


@settings(max_examples=50 if INTERPRETED else 150)
@given(st.lists(ACTIONS, min_size=10, max_size=40))
def test_each_row_is_handed_out_once_and_as_it_was_whatever_happens(actions):
    engine = Modelled()
    engine.come("in the next step", "any")
    engine.begin_sequence("a")
    for action, *details in actions:
        names = sorted(engine.computed)
        free = [name for name in "abcd" if name not in names]
        if action == "begin" and free:
            engine.begin_sequence(free[0])
        elif action in ("end", "preempt", "grow") and names:
            name = names[details[0] % len(names)]
            if action == "grow":
                engine.grow(name, details[1])
            else:
                (engine.end_sequence if action == "end" else engine.preempt)(name)
        elif action in ("decode", "lanes"):
            for _ in range(details[0]):
                if action == "lanes":
                    engine.take_turns()
                engine.compute(dict.fromkeys(engine.computed, 1))
        elif action == "step":
            asked = zip(*details, strict=False)
            engine.compute({name: n for name, n in asked if n and name in engine.computed})
        elif action == "skip":
            engine.session.steps.skip()
        elif action == "consumer" and details[0] != "in the next step":
            if details[0] in engine.consumers:
                engine.go(details[0])
            else:
                engine.come(*details)
    for name in list(engine.consumers):
        engine.go(name)
