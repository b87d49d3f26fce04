"""Who leaves while the workers are called, or interrupts a call, leaves nothing behind."""

import asyncio
import sys
import time
from types import SimpleNamespace

import cloudpickle
import pytest

from tllm.answers import AnswerWriter
from tllm.client import calls
from tllm.client.attached import Client
from tllm.client.calls import AsyncCalls, WorkerCall, drive
from tllm.client.kept_rows import RowKeeping
from tllm.engine.conversations import Conversations
from tllm.engine.registered import Registered
from tllm.spec.conversations import RequestConversation
from tllm.spec.patching import KeptRows

STEP_S = 0.02


class Workers:
    """What the workers remember, and one that is called; a call is answered after a step."""

    def __init__(self):
        self.rows = {}
        self.registered = Registered()
        self.conversations = Conversations(2)
        self.client = Client()
        token = self.client.shared.token
        self.calls, self._writer, self._token = AsyncCalls(None, token), AnswerWriter(), token
        self.keeping = RowKeeping(self.client.registered)
        self.client.registered._attached = True
        self.registered.show()
        self.client.registered._shown = memoryview(self.registered._shown)

    async def ask(self, engine, arguments):
        method, payload, _ = arguments
        await asyncio.sleep(STEP_S)
        try:
            answer = "ok", getattr(self, method)(*cloudpickle.loads(payload))
        except ValueError as error:
            answer = "error", error
        return [self._writer.encode(answer, self._token)]

    def change_registered(self, *args):
        return self.registered.change(*args)

    def registered_since(self, version):
        return self.registered.since(version)

    def keep_rows(self, uid):
        self.rows[uid] = "rows"

    def drop_rows(self, uid):
        self.rows.pop(uid, None)

    def enter_conversation(self, *args):
        return self.conversations.enter(*args)

    def leave_conversation(self, *where):
        self.conversations.leave(*where)

    async def run(self, steps, leaves_after_s):
        """Run steps whose caller leaves after so many seconds, and look at what is registered then;
        whether the caller left before the end."""
        try:
            await asyncio.wait_for(self.calls.run(steps), leaves_after_s)
            return False
        except asyncio.TimeoutError:
            await asyncio.sleep(2 * STEP_S)
            await self.calls.run(self.client.registered._fetch())
            return True

    def interrupt(self, steps, number, heard):
        """Run steps of a caller who waits, and interrupt a call of the workers; whether there were
        as many.

        Args:
            number: of the call.
            heard: whether the workers do what they are asked in it.
        """
        made = 0

        def do(step):
            nonlocal made
            if not isinstance(step, WorkerCall):
                return None
            made += 1
            answers = [getattr(self, step.method)(*step.args)] if made != number or heard else []
            if made == number:
                raise KeyboardInterrupt
            return answers

        try:
            drive(steps, do)
        except KeyboardInterrupt:
            return True
        return False

    def kept(self, name):
        """Steps that keep rows under a name, as `register_mean` does."""
        rows = KeptRows(name, f"uid-{name}", "mean", (("post_block", 0),), 1, 100)
        try:
            yield WorkerCall("keep_rows", (rows.uid,))
            yield from self.keeping.register(rows)
        except BaseException:
            yield WorkerCall("drop_rows", (rows.uid,))
            raise


@pytest.fixture
def workers(monkeypatch):
    there = Workers()
    monkeypatch.setattr(calls, "ask_all_workers", there.ask)
    return there


def test_rows_are_kept_under_their_name_or_not_at_all(workers):
    def names():
        return list(workers.client.registered.patches.kept)

    async def run(calls_before):
        after_s = (calls_before + 0.5) * STEP_S
        left = await workers.run(workers.kept("a"), after_s)
        assert [list(workers.rows), names()] == ([[], []] if left else [["uid-a"], ["a"]])
        if left:
            await workers.calls.run(workers.kept("a"))
        left_dropping = await workers.run(workers.keeping.dropped("a"), after_s)
        assert not workers.rows and not names()
        return left, left_dropping

    found = [asyncio.run(run(calls_before)) for calls_before in (0, 1, 2, 3, 100)]
    assert found[0] == (True, True) and found[-1] == (False, False)


@pytest.mark.parametrize("heard", [False, True])
def test_rows_of_a_call_that_was_interrupted_are_kept_under_their_name_or_not_at_all(
    workers, heard
):
    def names():
        workers.interrupt(workers.client.registered._fetch(), 0, True)
        return list(workers.client.registered.patches.kept)

    def all_of(name):
        yield from workers.kept(name)
        yield from workers.keeping.dropped(name)

    found = []
    for number in range(1, 12):
        found.append(workers.interrupt(all_of("a"), number, heard))
        assert not workers.rows and not names()
    assert found[0] and not found[-1]


def test_an_interrupt_waits_until_all_rows_are_dropped(workers):
    for name in "abc":
        workers.interrupt(workers.kept(name), 0, True)
    kept = list(workers.client.registered.patches.kept.values())
    numbers = iter([1, 0, 0])

    def do(steps):
        if workers.interrupt(steps, next(numbers), False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(workers.keeping.forget(kept), do)
    assert len(kept) == 3 and not workers.rows and not workers.client.registered.patches.kept


def interrupted(run, frame_of, line):
    """Run, with an interrupt as this line of a function's frame begins; whether there was one."""
    lines = 0

    def of_lines(frame, event, arg):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == line:
                raise KeyboardInterrupt
        return of_lines

    sys.settrace(lambda frame, event, arg: of_lines if frame.f_code is frame_of.__code__ else None)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= line


def test_an_interrupt_between_two_steps_is_theirs():
    asked, ended, abandoned = [], [], []

    def steps():
        try:
            yield 0
            yield 1
            yield 2
        except GeneratorExit:
            abandoned.append(line)
            raise
        finally:
            ended.append(True)
            yield "the last"

    def do(step):
        asked.append(step)
        return step

    line = 1
    while interrupted(lambda: drive(steps(), do), drive, line):
        assert bool(ended) == bool(asked), (line, asked)
        del asked[:], ended[:]
        line += 1
    assert line > 10 and asked == [0, 1, 2, "the last"] and not abandoned


def test_a_conversation_that_nobody_entered_takes_no_place(workers, monkeypatch):
    monkeypatch.setattr("tllm.client.admission.gates_of", lambda groups: {})
    prepared = SimpleNamespace(prompt_id="p", groups=(), params=None)

    def entering(name):
        named = RequestConversation.parse({"id": name, "key": "k" * 16})
        return workers.client.admission._enter(named, prepared)

    def entered(name):
        return workers.conversations.enter(name, b"k", 60.0, time.time())

    async def run():
        for name in "abc":
            assert await workers.run(entering(name), STEP_S / 2)
            assert not workers.conversations.described(0.0)
        entered("d"), entered("e")
        assert await workers.run(entering("f"), STEP_S / 2)  # there is no room for it
        assert sorted(workers.conversations.described(0.0)) == ["d", "e"]

    asyncio.run(run())
