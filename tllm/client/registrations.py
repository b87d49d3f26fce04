"""What is registered with an engine, whichever of its front ends did it."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from tllm.answers import SharedFolder
from tllm.client import consumer_calls
from tllm.client.calls import ALONE, Pause, Steps, WorkerCall
from tllm.client.composer import Composer
from tllm.client.facts import Facts
from tllm.client.patching import PatchComposer
from tllm.consumers.base import Consumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.consumers.signals import SignalsConsumer
from tllm.engine.registered import STEERING_KEYS, WEIGHTS
from tllm.ports import ConsumerFlow
from tllm.ports.payload import reason_of
from tllm.registry import check
from tllm.shared_memory import FOLDER, SharedFile
from tllm.spec.patching import KEPT, PATCHING
from tllm.spec.reading import registered_names

BUILT_IN: Mapping[str, type[MemoryConsumer | SignalsConsumer]] = {
    "memory": MemoryConsumer,
    SignalsConsumer.consumer_id: SignalsConsumer,
}
"""Consumers of every engine, by id: each is made when a request names it for the first time."""

_CONSUMER, _FRONT_ENDS = "consumer:", "front_ends"

_UNTIL_EVERYWHERE_S, _TRIES = 0.05, 200
"""How long, and how often, a front end waits for replicas to do what another one asked of them."""


class Registrations:
    """What one front end knows of its engine: the consumers, what steers every request, named
    modules and rows that are kept, which all front ends of the engine register.

    Args:
        consumers: to be registered as soon as the workers are asked anything.
        capturing: ids of those whose results are capture results.
        shared: the folder in which the workers leave answers.
        front_ends: how many share the engine's workers.
        workers: of each data-parallel replica.

    Attributes:
        consumers: those that are registered, by id, whichever front end did it.
        capturing: ids of those whose results are capture results.
        flows: of each consumer, by id, those that every request has.
        ids: of the consumers that are there: each tells one from others of its id.
        composer: composes what steers a request.
        patches: finds what a request's patches name.
        holder: by which the workers know this front end.
        front_ends: how many share the engine's workers, as far as is known here.
        changes: another number after each change of what is known here.
        replicas: data-parallel ones that this front end sends requests to.
    """

    _handle: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(
        self,
        consumers: Iterable[Consumer],
        capturing: Iterable[str],
        shared: SharedFolder,
        *,
        front_ends: int,
        workers: int | None,
    ) -> None:
        self.consumers: dict[str, Consumer] = {}
        self.capturing = set(capturing)
        self.flows: dict[str, tuple[ConsumerFlow, ...]] = {}
        self.ids: dict[str, str] = {}
        self.composer = Composer(self.consumers)
        self.patches = PatchComposer()
        self.holder = shared.token or uuid.uuid4().hex
        self.front_ends = front_ends
        self.replicas = 1
        self.changes = 0
        self._shared = shared
        self._workers = workers
        self._waiting = list(consumers)
        #: By id, what consumers were registered with here that were not heard of yet.
        self._own: dict[str, bytes] = {}
        self._attached = False
        self._version = self._steering_version = 0
        #: Of each key that has a value.
        self._versions: dict[str, int] = {}
        self._shown: memoryview | None = None
        for i, consumer in enumerate(self._waiting):
            _check(consumer)
            if consumer.consumer_id in [other.consumer_id for other in self._waiting[:i]]:
                raise ValueError(_taken(consumer.consumer_id))

    @property
    def facts(self) -> Facts:
        """What the workers told of the engine."""
        assert self.composer.facts is not None
        return self.composer.facts

    @property
    def is_current(self) -> bool:
        """Whether all that is registered, here or by other front ends, is known here."""
        if not self._attached or self._waiting:
            return False
        if self._shown is not None:
            return self._shown[0] == self._version
        return self.front_ends == 1  # else there may be news, and nothing tells

    @property
    def steering_version(self) -> int:
        """Another number after each change of what steers, and of the model's weights."""
        if self._shown is not None:
            return self._shown[1]
        return self._steering_version

    def current(self) -> Steps[None]:
        """Know all that is registered."""
        if self.is_current:
            return
        yield ALONE
        if self.is_current:  # by now
            return
        if not self._attached:
            answers = yield WorkerCall("attach", (self.holder,))
            self._learn_engine(answers)
        yield from self._fetch()
        self._attached = True
        while self._waiting:
            consumer = self._waiting[0]
            if consumer.consumer_id in self.consumers:  # another front end was first
                known = self.ids[consumer.consumer_id]
                self._adopt(consumer, consumer.consumer_id in self.capturing, known)
            else:
                yield from self.add(consumer, consumer.consumer_id in self.capturing)
            self._waiting.pop(0)

    def change(
        self,
        key: str,
        made: Callable[[], Any],
        bring: Callable[[Any], Steps[None]] | None = None,
    ) -> Steps[None]:
        """Register what `made` gives, or forget what is registered where that is None. It is called
        when all that others have registered is known, and again where one of them was faster.

        Args:
            bring: brings the workers what they need for it.
        """
        yield ALONE
        changed = False
        while not changed:
            yield from self.current()
            content = made()
            if bring is not None:
                yield from bring(content)
            value = None if content is None else cloudpickle.dumps(content)
            seen = self._versions.get(key, 0)
            answers = yield WorkerCall("change_registered", (key, seen, value))
            yield from self._fetch()
            changed = answers[0]

    def _learn_engine(self, answers: Sequence[Mapping[str, Any]]) -> None:
        self.composer.facts = self.patches.facts = Facts.of_workers(answers)
        self.replicas = len(answers) // (self._workers or len(answers))
        if answers[0]["shared_file"] and self._shared.token:
            try:
                memory = SharedFile(FOLDER / answers[0]["shared_file"]).map()
            except OSError:  # the workers are on another host
                return
            self._shown = memory.data.cast("q")

    def _fetch(self) -> Steps[None]:
        answers = yield WorkerCall("registered_since", (self._version,))
        version, entries, whole = answers[0]
        if self.replicas > 1 and (news := [key for key in entries if key.startswith(_CONSUMER)]):
            yield from self._until_everywhere([key[len(_CONSUMER) :] for key in news])
        if whole:  # what steers may be among what was removed, and weights may be others
            self._steering_version = version
            gone = self._versions.keys() - entries.keys()
            entries = {**dict.fromkeys(gone, (version, None)), **entries}
        for key, (changed, value) in entries.items():
            self._learn(key, changed, value)
        self._version = version

    def _until_everywhere(self, names: Sequence[str]) -> Steps[None]:
        """Wait until other replicas have the consumers that the first one has: what another front
        end asks reaches each of them in its own time, and a request must not be faster."""
        for _ in range(_TRIES):
            there = yield WorkerCall("registered_consumers")
            if all(each.get(name) == there[0].get(name) for each in there for name in names):
                return
            yield Pause(_UNTIL_EVERYWHERE_S)
        raise RuntimeError(
            f"consumers {', '.join(map(repr, names))} are in some replicas only; unregister them, "
            "and register them again"
        )

    def _learn(self, key: str, changed: int, value: bytes | None) -> None:
        """Know what somebody has registered, or removed."""
        self.changes += 1
        if value is None:
            self._versions.pop(key, None)
        else:
            self._versions[key] = changed
        if key.startswith(STEERING_KEYS):
            self._steering_version = max(self._steering_version, changed)
        if key.startswith(_CONSUMER):
            self.composer.forget_features()
            self._learn_consumer(key[len(_CONSUMER) :], value)
        elif key == _FRONT_ENDS:
            self.front_ends = max(self.front_ends, int(value or 1))
        elif key.startswith(KEPT):
            self.patches.learn(key, value)
        elif key != WEIGHTS:
            self.composer.learn(key, value)

    def _learn_consumer(self, name: str, payload: bytes | None) -> None:
        own = self._own.pop(name, None)
        if payload is not None and payload == own:
            return
        gone = self.consumers.pop(name, None)
        self.capturing.discard(name)
        if gone is not None:
            gone.detach(self._handle())
        if payload is not None:
            self._adopt(*cloudpickle.loads(payload))

    def _adopt(self, consumer: Consumer, capturing: bool, registration: str) -> None:
        """A consumer is registered: this object stands for its copies in the workers."""
        self.changes += 1
        self.consumers[consumer.consumer_id] = consumer
        self.ids[consumer.consumer_id] = registration
        self.flows[consumer.consumer_id] = tuple(consumer.flows())
        if capturing:
            self.capturing.add(consumer.consumer_id)
        if (handle := self._handle()) is not None:
            consumer.attach(handle)

    def add(self, consumer: Consumer, capturing: bool) -> Steps[bool]:
        """Register a consumer, unless one of its id is there; whether it was."""
        name, registration = consumer.consumer_id, os.urandom(8).hex()
        try:
            payload = cloudpickle.dumps((consumer, capturing, registration))
        except Exception as error:
            raise TypeError(
                f"consumer {name!r} cannot be copied to the workers: {reason_of(error)}; make what "
                "cannot be copied in start(ctx), which is called there"
            ) from error
        try:
            added = yield from self._added_everywhere(name, registration, payload)
        except (ValueError, RuntimeError) as error:  # of several, which one it is
            yield WorkerCall("withdraw", (name, registration))  # other workers may have it
            yield from self._fetch()
            if type(error) not in (ValueError, RuntimeError) or repr(name) in str(error):
                raise
            raise type(error)(f"consumer {name!r} cannot begin: {error}") from error
        if added:
            self._own[name] = payload
            self._adopt(consumer, capturing, registration)
        yield from self._fetch()
        return added

    def _added_everywhere(self, name: str, registration: str, payload: bytes) -> Steps[bool]:
        """Let all workers add a consumer, unless one of its id is there; whether they did. Of two
        front ends that ask at one moment replicas may hear in different orders: it is the first
        replica's that counts, and the other front end takes its own back."""
        added = yield WorkerCall("register", (name, payload))
        if not added[0]:
            if any(added):
                yield WorkerCall("withdraw", (name, registration))
            return False
        for _ in range(_TRIES):
            if all(added):
                return True
            yield Pause(_UNTIL_EVERYWHERE_S)
            again = yield WorkerCall("register", (name, payload))
            added = [before or now for before, now in zip(added, again, strict=True)]
        raise RuntimeError(
            f"consumer {name!r} is in some workers only, since others have one of its id; "
            "unregister that, and register it again"
        )

    def speak_for(self, handle: Any) -> None:
        """Let consumers reach the workers through what the user calls, which has this object."""
        self._handle = weakref.ref(handle)
        for consumer in (*self._waiting, *self.consumers.values()):
            consumer.attach(handle)

    def check_expected(self, given: Iterable[Consumer]) -> None:
        """Refuse consumers that are neither registered nor waiting to be: they are given to what
        registers none."""
        expected = {*self.consumers, *(consumer.consumer_id for consumer in self._waiting)}
        for consumer in given:
            if consumer.consumer_id not in expected:
                raise ValueError(
                    f"consumer {consumer.consumer_id!r} was given for an engine that is attached "
                    "already, and does not have it; leave it out, and give it to "
                    "register_consumer() of what attach(engine) returns"
                )

    def ask(self, call: WorkerCall) -> Steps[list[Any]]:
        yield from self.current()
        answers: list[Any] = yield call
        return answers

    def ensure(self, consumer: Consumer) -> Steps[None]:
        """Let a consumer of ours be there."""
        yield ALONE
        yield from self.current()
        if consumer.consumer_id not in self.consumers:
            yield from self.add(consumer, False)

    def register(self, consumer: Consumer) -> Steps[Consumer]:
        _check(consumer)
        yield ALONE
        yield from self.current()
        if consumer.consumer_id in self.consumers or not (yield from self.add(consumer, False)):
            raise ValueError(_taken(consumer.consumer_id))
        return consumer

    def unregister(self, consumer_id: str | None) -> Steps[None]:
        """Remove a consumer, or all of them."""
        yield ALONE
        yield from self.current()
        yield WorkerCall("unregister", (consumer_id,))
        yield from self._fetch()

    def synchronize(self, consumer: Consumer | str | None) -> Steps[list[Any]]:
        """Wait for all consumers; the one that is named must be there."""
        if consumer is not None:
            yield from self._registered_name(consumer)
        return (yield from self.ask(WorkerCall("synchronize")))

    def call(self, consumer: Consumer | str, method: str, *args: Any) -> Steps[list[Any]]:
        """Call one of a consumer's `remote_methods` in every worker."""
        name = yield from self._registered_name(consumer)
        consumer_calls.call(self.consumers[name], "validate_call", method, args)
        return (yield from self.ask(WorkerCall("call_consumer", (name, method, *args))))

    def _registered_name(self, consumer: Consumer | str) -> Steps[str]:
        """The id of a consumer that is there; `ValueError` for one that is not."""
        name = name_of(consumer)
        yield from self.current()
        if name not in self.consumers:
            others = registered_names(each for each in self.consumers if each not in BUILT_IN)
            raise ValueError(
                f"no consumer {name!r} is registered; registered are {others}. Use "
                "llm.register_consumer(consumer), or start the engine with consumers=[...], the "
                "server with --consumer"
            )
        return name

    def read_stats(self, consumer: Consumer | str) -> Steps[Mapping[str, Any]]:
        """A consumer's statistics, over all workers of all data-parallel replicas."""
        name = yield from self._registered_name(consumer)
        found = yield from self.ask(WorkerCall("consumer_stats", (name,)))
        if isinstance(consumer, str):
            consumer = self.consumers[name]
        size = self._workers or len(found)
        replicas = [
            consumer_calls.call(consumer, "merge_stats", found[first : first + size])
            for first in range(0, len(found), size)
        ]
        if len(replicas) == 1:
            return replicas[0]
        return consumer_calls.call(consumer, "merge_replicas", replicas)


def name_of(consumer: Consumer | str) -> str:
    """The id of a consumer, which is given by itself or by its id."""
    if isinstance(consumer, str):
        return consumer
    if not isinstance(consumer, Consumer):
        raise TypeError(f"{consumer!r:.60} is no consumer; give one, or its consumer_id")
    return consumer.consumer_id


def _check(consumer: Any) -> None:
    """Refuse what cannot be registered, and what has the name of other results of ours."""
    check(consumer)
    name = consumer.consumer_id
    if name == PATCHING or not isinstance(consumer, BUILT_IN.get(name, Consumer)):
        raise ValueError(
            f"{type(consumer).__name__} has consumer_id={name!r}, by which outputs have results of "
            "tLLM's own; give it another consumer_id"
        )


def _taken(consumer_id: str) -> str:
    return (
        f"a consumer with consumer_id={consumer_id!r} is registered; unregister it first, or give "
        "this one another consumer_id"
    )
