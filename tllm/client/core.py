"""The user's half: what every front end does with consumers and requests.

`Client` does no input or output itself. What takes answers of the workers is written as steps
(`tllm.client.calls`), which `LLM`, `AsyncLLM` and what is attached to an engine of vLLM's drive.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
from vllm import PoolingParams as VllmPoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from tllm.client import consumer_calls
from tllm.client.answers import SharedFolder
from tllm.client.calls import ALONE, Pause, Steps, WorkerCall
from tllm.client.checked_params import CheckedParams
from tllm.client.composer import Composer
from tllm.client.facts import Facts
from tllm.client.feature_probes import FeatureProbes
from tllm.client.held import HeldByWorkers, Upload
from tllm.client.patching import PatchComposer
from tllm.client.request import Prepared, Uses, collect, media_of
from tllm.client.request_kind import RequestKind
from tllm.client.results import LEFT, Samples, attach_results, samples_of, set_result
from tllm.consumers.base import Consumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.consumers.signals import SignalsConsumer
from tllm.engine.front import RefusedError
from tllm.engine.media import media_of_request
from tllm.engine.registered import STEERING_KEYS, WEIGHTS
from tllm.params import PoolingParams, asked_of, plain
from tllm.ports import ConsumerFlow
from tllm.ports.payload import reason_of
from tllm.registry import available_consumers, check
from tllm.shared_memory import FOLDER, SharedFile
from tllm.spec.conditions import signal_names
from tllm.spec.conversations import RequestConversation
from tllm.spec.groups import GroupUse, SteeringGroup, gates_of, use_of_conversation
from tllm.spec.hooks import HookPoint
from tllm.spec.media import PromptMedia
from tllm.spec.patching import KEPT, PATCHING, PatchUse, check_patch_positions
from tllm.spec.reading import allow_options, require_bool
from tllm.spec.request import CONVERSATION, EXTRA_ARG, Asked, RequestSpec, RowsRead, wire_of
from tllm.spec.selection import Selection

logger = logging.getLogger(__name__)

#: Consumers of every engine, made when a request names them for the first time.
BUILT_IN: Mapping[str, type[MemoryConsumer | SignalsConsumer]] = {
    "memory": MemoryConsumer,
    SignalsConsumer.consumer_id: SignalsConsumer,
}

_CONSUMER, _FRONT_ENDS = "consumer:", "front_ends"
_MAX_PLACED = 4096
_BROUGHT_AT_ONCE = 2**26
"""Bytes of vectors in one call, about; more of a single request."""
_PROMPT = Selection.parse({"phase": "prompt"})
_LONGEST_PAUSE_S = 0.1


class Client:
    """One front end of an engine: its consumers and requests.

    Args:
        consumers: to be registered as soon as the workers are asked anything.
        capturing: ids of those whose results are capture results.
        front_ends: how many share the engine's workers.
        workers: of each data-parallel replica.

    Attributes:
        consumers: those that are registered, by id, whichever front end did it.
        over: prompts that are over and that the workers have not heard of.
        replicas: data-parallel ones that this front end sends requests to.
    """

    _handle: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(
        self,
        consumers: Iterable[Consumer] = (),
        capturing: Iterable[str] = (),
        *,
        front_ends: int = 1,
        workers: int | None = None,
    ) -> None:
        self.consumers: dict[str, Consumer] = {}
        self._features = FeatureProbes(self.consumers, lambda: self.facts)
        self.composer = Composer(self._features.find)
        self.patches = PatchComposer()
        self.held = HeldByWorkers()
        self.shared = SharedFolder()
        self.over: list[str] = []
        self.replicas = 1
        self._holder = self.shared.token or uuid.uuid4().hex
        self._front_ends = front_ends
        self._workers = workers
        self._waiting = list(consumers)
        self._capturing = set(capturing)
        self._flows: dict[str, tuple[ConsumerFlow, ...]] = {}
        #: By id, what consumers were registered with here that were not heard of yet.
        self._own: dict[str, bytes] = {}
        #: Of the consumers that are there: each tells one from others of its id.
        self._registrations: dict[str, str] = {}
        self._params = CheckedParams()
        #: Groups that requests wait for, each under a key of its own.
        self._wanted: dict[object, Sequence[SteeringGroup]] = {}
        #: By prompt: requests that name tokens of items of a prompt that is not known yet.
        self._unplaced: WeakValueDictionary[str, Prepared] = WeakValueDictionary()
        #: Kinds of flows whose hook points were found to be in the engine.
        self._placed: set[ConsumerFlow] = set()
        self._attached = False
        self._version = 0
        self._versions: dict[str, int] = {}
        self._shown: memoryview | None = None
        for i, consumer in enumerate(self._waiting):
            _check(consumer)
            if consumer.consumer_id in [other.consumer_id for other in self._waiting[:i]]:
                raise ValueError(_taken(consumer.consumer_id))

    # -- what is registered ----------------------------------------------------------------------

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
        return self._front_ends == 1  # else there may be news, and nothing tells

    @property
    def steering_version(self) -> int:
        """Another number after each change of what steers, and of the model's weights."""
        if self._shown is not None:
            return self._shown[1]
        return max(
            (version for key, version in self._versions.items() if key.startswith(STEERING_KEYS)),
            default=0,
        )

    def current(self) -> Steps[None]:
        """Know all that is registered."""
        if self.is_current:
            return
        yield ALONE
        if not self._attached:
            answers = yield WorkerCall("attach", (self._holder,))
            self._learn_engine(answers)
        yield from self._fetch()
        self._attached = True
        while self._waiting:
            consumer = self._waiting[0]
            if consumer.consumer_id in self.consumers:  # another front end was first
                known = self._registrations[consumer.consumer_id]
                self._adopt(consumer, consumer.consumer_id in self._capturing, known)
            else:
                yield from self._add(consumer, consumer.consumer_id in self._capturing)
            self._waiting.pop(0)

    def change(self, key: str, value: bytes | None) -> Steps[bool]:
        """Register a value, if it was not changed since it was seen here; whether that went."""
        seen = self._versions.get(key, 0)
        answers = yield WorkerCall("change_registered", (key, seen, value))
        yield from self._fetch()
        return bool(answers[0])

    def _learn_engine(self, answers: Sequence[Mapping[str, Any]]) -> None:
        self.composer.facts = self.patches.facts = Facts.of_workers(answers)
        self.replicas = len(answers) // (self._workers or len(answers))
        self._placed.clear()
        if answers[0]["shared_file"] and self.shared.token:
            try:
                memory = SharedFile(FOLDER / answers[0]["shared_file"]).map()
            except OSError:  # the workers are on another host
                return
            self._shown = memory.data.cast("q")

    def _fetch(self) -> Steps[None]:
        answers = yield WorkerCall("registered_since", (self._version,))
        version, entries = answers[0]
        for key, (changed, value) in entries.items():
            self._versions[key] = changed
            if key.startswith(_CONSUMER):
                self._features.forget()
                self.composer.forget_composed()
                self._learn_consumer(key[len(_CONSUMER) :], value)
            elif key == _FRONT_ENDS:
                self._front_ends = max(self._front_ends, int(value or 1))
            elif key.startswith(KEPT):
                self.patches.learn(key, value)
            elif key != WEIGHTS:
                self.composer.learn(key, value)
        self._version = version

    def _learn_consumer(self, name: str, payload: bytes | None) -> None:
        own = self._own.pop(name, None)
        if payload is not None and payload == own:
            return
        gone = self.consumers.pop(name, None)
        self._capturing.discard(name)
        if gone is not None and gone.is_attached_to(self._handle()):
            gone.attach(None)
        if payload is not None:
            self._adopt(*cloudpickle.loads(payload))

    def _adopt(self, consumer: Consumer, capturing: bool, registration: str) -> None:
        """A consumer is registered: this object stands for its copies in the workers."""
        self.consumers[consumer.consumer_id] = consumer
        self._registrations[consumer.consumer_id] = registration
        self._flows[consumer.consumer_id] = tuple(consumer.flows())
        if capturing:
            self._capturing.add(consumer.consumer_id)
        consumer.attach(self._handle())

    def _add(self, consumer: Consumer, capturing: bool) -> Steps[bool]:
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
            added = any((yield WorkerCall("register", (name, payload))))
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

    # -- consumers -------------------------------------------------------------------------------

    def speak_for(self, handle: Any) -> None:
        """Let consumers reach the workers through what the user calls, which has this object."""
        self._handle = weakref.ref(handle)
        for consumer in self._waiting:
            consumer.attach(handle)

    def ask(self, call: WorkerCall) -> Steps[list[Any]]:
        yield from self.current()
        answers: list[Any] = yield call
        return answers

    def ensure(self, consumer: Consumer) -> Steps[None]:
        """Let a consumer of ours be there."""
        yield ALONE
        yield from self.current()
        if consumer.consumer_id not in self.consumers:
            yield from self._add(consumer, False)

    def register(self, consumer: Consumer) -> Steps[Consumer]:
        _check(consumer)
        yield ALONE
        yield from self.current()
        if consumer.consumer_id in self.consumers or not (yield from self._add(consumer, False)):
            raise ValueError(_taken(consumer.consumer_id))
        return consumer

    def unregister(self, consumer_id: str | None) -> Steps[None]:
        """Remove a consumer, or all of them."""
        yield ALONE
        yield from self.current()
        yield WorkerCall("unregister", (consumer_id,))
        yield from self._fetch()

    def read_stats(self, consumer: Consumer | str) -> Steps[Mapping[str, Any]]:
        """A consumer's statistics, over all workers of all data-parallel replicas."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
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

    # -- requests --------------------------------------------------------------------------------

    def admit(
        self,
        params: Any,
        request_id: str,
        *,
        results: bool = True,
        streamed: bool = False,
        first: Prepared | None = None,
        asked: Asked | None = None,
        generated: int = 0,
    ) -> Steps[Prepared]:
        """Make a request ready. What it is steered with is held for it until `release`.

        Args:
            params: of vLLM's or of ours, for sampling or pooling.
            results: whether somebody will come for what the consumers have to say.
            streamed: its prompt arrives in parts. Only the engine knows then where it ends.
            first: what the request asks of which this is a later input.
            asked: what it asks; by default what its parameters say.
            generated: how many of the last tokens of its prompt were generated.

        Raises `ValueError` naming what is wrong in it.
        """
        if not self.is_current:
            yield from self.current()
        if isinstance(params, BeamSearchParams):
            raise RefusedError(
                f"{type(params).__name__} was given for one request; give it to beam_search(), or "
                "tllm.SamplingParams to generate()"
            )
        if asked is None:
            try:
                asked = asked_of(params)
            except TypeError as error:  # what vLLM hands on of an `AsyncLLM`'s has no text
                raise RefusedError(str(error)) from None
        groups: tuple[SteeringGroup, ...] = () if first is None else first.groups
        if first is None and self.composer.concerns(asked.steering):
            groups = self.composer.groups(asked.steering)
        if SignalsConsumer.consumer_id in asked.consumers:
            _check_signals(asked.consumers[SignalsConsumer.consumer_id], groups)
        if results and groups:
            asked = _with_signals(asked, groups)
        for name, make in BUILT_IN.items():
            if name in asked.consumers and name not in self.consumers:
                yield ALONE
                if name not in self.consumers:  # it may have come meanwhile
                    yield from self._add(make(), False)
        kind = RequestKind(isinstance(params, VllmSamplingParams), streamed, generated, results)
        uses = self._checked_uses(kind, asked, groups)
        if first is None and not self.held.has(groups):
            yield from self.bring(groups)  # nothing is waited for until they are held, below
            uses = self._checked_uses(kind, asked, groups)  # with what was registered meanwhile
        patch: tuple[PatchUse, ...] = ()
        if asked.patch is not None and not asked.patch.names_media:
            patch = self.patches.uses(asked.patch)
        prompt_id = os.urandom(16).hex() if first is None else first.prompt_id
        prepared = self._prepare(params, asked, request_id, prompt_id, (groups, patch), kind, uses)
        if first is None:
            self.held.hold(prompt_id, groups)
        if _converses(asked, groups):  # last, since who is refused begins no conversation
            yield from self._enter(asked.conversation, prepared)
        return prepared

    def admit_now(self, params: VllmSamplingParams) -> VllmSamplingParams:
        """Parameters as the engine takes them, of requests that nobody steers and whose results
        nobody will look at, when all that is registered is known (`is_current`)."""
        try:
            next(self.admit(params, "", results=False))
        except StopIteration as done:
            prepared: Prepared = done.value
            return prepared.params  # type: ignore[no-any-return]
        raise RuntimeError("the workers have to be asked something before this request")

    def bring(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        """Let the workers hold groups. The caller goes on without waiting for anything else.

        A call waits for the step that is under way. So whoever comes meanwhile waits for one call
        more, which brings what all of them need.
        """
        if self.held.has(groups):
            return
        me = object()
        self._wanted[me] = groups
        try:
            while not self.held.has(groups):
                yield ALONE  # what is on its way is not there yet, and must not be given up again
                if self.held.has(groups):
                    return
                upload = self._upload(groups)
                operations = {digest: group.operations for digest, group in upload.groups.items()}
                gates = {d: group.gates for d, group in upload.groups.items() if group.gates}
                call = (self._holder, upload.packed, operations, upload.released, gates)
                arrived = False
                try:
                    yield WorkerCall("update_steering", call)
                    arrived = True
                finally:
                    self.held.sent(upload, arrived)
        finally:
            del self._wanted[me]

    def _upload(self, groups: Sequence[SteeringGroup]) -> Upload:
        """What brings groups, and those that others wait for: not those with conditions, which
        workers may refuse."""
        together = {group.digest: group for group in groups}
        if not any(group.gates for group in groups):
            size = 0
            for waiting in self._wanted.values():
                size += sum(v.nbytes for group in waiting for v in group.vectors.values())
                if size <= _BROUGHT_AT_ONCE and not any(group.gates for group in waiting):
                    together |= {group.digest: group for group in waiting}
        try:
            return self.held.upload([*together.values()], self.facts, self._front_ends)
        except ValueError:  # there is no room for all of them
            return self.held.upload(groups, self.facts, self._front_ends)

    def expect(self, params: Iterable[Any]) -> Steps[None]:
        """Requests are about to be added: let the workers hold what steers them, in few calls."""
        if not self.is_current:
            yield from self.current()
        new: dict[str, SteeringGroup] = {}
        size = 0
        for each in params:
            try:
                steering = asked_of(each).steering
                groups = () if steering is None else self.composer.groups(steering)
            except ValueError:  # the request will say so itself
                continue
            for group in groups:
                if group.gates is None and group.digest not in new and not self.held.has([group]):
                    new[group.digest] = group
                    size += sum(vector.nbytes for vector in group.vectors.values())
            if size > _BROUGHT_AT_ONCE:
                yield from self._bring_if_there_is_room([*new.values()])
                new, size = {}, 0
        if len(new) > 1:
            yield from self._bring_if_there_is_room([*new.values()])

    def _bring_if_there_is_room(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        try:
            yield from self.bring(groups)
        except ValueError as error:
            logger.debug("steering is brought with each request: %s", error)

    def _enter(self, named: RequestConversation | None, prepared: Prepared) -> Steps[None]:
        """Let a request, which is ready, take part in a conversation."""
        assert named is not None
        try:
            if self.replicas > 1:
                raise ValueError(
                    "conversation: a condition of steering has scope='conversation', and this "
                    f"engine has {self.replicas} data-parallel replicas, each with a memory of its "
                    "own; start it with data_parallel_size=1, or give scope='rest'"
                )
            kept = [gate.kept_as for gate in gates_of(prepared.groups).values() if gate.kept_as]
            given = (
                *(named.id, named.key_digest, named.expires_s, time.time()),
                *(named.owner, named.most, kept),
            )
            answers = yield WorkerCall("enter_conversation", given)
        except BaseException:
            self.release(prepared)
            raise
        use = use_of_conversation(prepared.groups, *answers[0])
        spec = RequestSpec.from_wire(wire_of(prepared.params))
        prepared.params.extra_args[EXTRA_ARG] = replace(spec, conversation=use).to_wire()

    def release(self, prepared: Prepared) -> None:
        """A request has ended, or did not begin."""
        self.held.release(prepared.prompt_id)

    def check_input(self, request: Prepared, later: Prepared) -> None:
        """Refuse a later input of a streamed prompt whose rows would be written to by a consumer
        that the request did without: its cached blocks are shared with others."""
        if wire_of(request.params).get("isolated"):
            return
        wanted = later.named | (request.unused - later.unused)
        for name in sorted(wanted & self.consumers.keys()):
            if any(w.port == "residual_stream" for flow in self._flows[name] for w in flow.writes):
                raise RefusedError(
                    f"consumers[{name!r}]: an input of a streamed prompt asks for it, and it "
                    "writes to rows; ask for it in the request, or begin another one"
                )

    def leave(self, prepared: Prepared) -> WorkerCall | None:
        """What the workers have to hear of a request that did not begin, beside that it is over."""
        if prepared.conversation is None:
            return None
        return WorkerCall("leave_conversation", prepared.conversation)

    def _prepare(
        self,
        params: Any,
        asked: Asked,
        request_id: str,
        prompt_id: str,
        changes: tuple[tuple[SteeringGroup, ...], tuple[PatchUse, ...]],
        kind: RequestKind,
        uses: Uses,
    ) -> Prepared:
        if kind.streamed and kind.results and len(uses.unused) < len(self.consumers):
            uses.wants_tokens = True
        groups, patch = changes
        stops, aborts = _ends(groups, params)
        if aborts:  # rows of cached blocks would not be judged
            uses.reads.append(RowsRead("abort_when", _PROMPT))
        media = media_of(asked, groups, uses)
        if needing := [group for group in groups if group.needs_prompt]:
            once = _converses(asked, groups) and all(g.needs_prompt_once for g in needing)
            uses.reads.append(RowsRead(CONVERSATION if once else "when", _PROMPT))
        spec = RequestSpec(
            request_id=request_id,
            prompt_id=prompt_id if kind.results else "",
            num_samples=params.n if kind.generates else 1,
            consumers=asked.consumers,
            registrations=self._registrations_of(asked, uses),
            reads=tuple(dict.fromkeys(uses.reads)),
            wants_tokens=uses.wants_tokens,
            acted=uses.acting is not None,
            steering_rows=tuple(dict.fromkeys(uses.steering_rows)),
            isolated=uses.writes,
            steering=tuple(group.use for group in groups),
            patch=patch,
            generated=kind.generated,
            streamed=kind.streamed,
            stops=stops,
            aborts=aborts,
            media=media,
        )
        prepared = Prepared(
            self._params.copy(params, spec.to_wire()) if kind.generates else _pooled(params, spec),
            prompt_id,
            {name: asked.consumers.get(name, {}) for name in uses.captures},
            wants_tokens=uses.wants_tokens,
            streamed=kind.streamed,
            unused=frozenset(uses.unused),
            named=frozenset(asked.consumers.keys() - uses.unused),
            groups=groups,
            patch=asked.patch,
            ended_by=frozenset(name for _, name in (*stops, *aborts)),
            keeps_results=kind.results,
            samples=Samples(deltas=params.output_kind == RequestOutputKind.DELTA),
        )
        if media is not None:
            self._unplaced[spec.prompt_id] = prepared
        return prepared

    def _registrations_of(self, asked: Asked, uses: Uses) -> dict[str, str]:
        """By which consumers a request was accepted, of those that it names and that are not of
        every engine: another may have the id of one when it begins."""
        named = asked.consumers.keys() - uses.unused - BUILT_IN.keys()
        return {name: self._registrations[name] for name in named}

    def _checked_uses(
        self, kind: RequestKind, asked: Asked, groups: Sequence[SteeringGroup]
    ) -> Uses:
        """What the consumers have to do with a request. Raises `ValueError` for what it asks and
        cannot have: all of it is found here, but for what hangs on its prompt (`check_prompt`)."""
        uses = self._uses(asked)
        kind.check(asked, groups, uses)
        return uses

    def _uses(self, asked: Asked) -> Uses:
        """What the consumers have to do with a request. Raises `ValueError` for what it asks of
        them and cannot have."""
        for name, chosen in asked.consumers.items():
            field = f"{'capture' if name in asked.captures else 'consumers'}[{name!r}]"
            if name not in self.consumers:
                raise ValueError(
                    f"{field}: no such consumer is registered; registered are "
                    f"{', '.join(self.consumers) or 'none'}{_hint(name, name in asked.captures)}"
                )
            enabled = chosen.get("enabled", True)
            require_bool(f"{field}['enabled']", enabled)
            consumer_calls.call(self.consumers[name], "validate_options", chosen)
            if name == PatchRunsConsumer.consumer_id:
                self.patches.check_run(chosen["uid"])
        uses = Uses()
        for name, consumer in self.consumers.items():
            chosen = asked.consumers.get(name, {})
            absent = consumer.on_request_only and name not in asked.consumers
            if absent or not chosen.get("enabled", True):
                uses.unused.add(name)
                continue
            if name in asked.captures or name in self._capturing:
                uses.captures.append(name)
            field = f"{'capture' if name in uses.captures else 'consumers'}[{name!r}]"
            wants_tokens = consumer_calls.call(consumer, "needs_tokens_of", chosen)
            uses.wants_tokens = uses.wants_tokens or wants_tokens
            for flow in self._flows[name]:
                _check_media(flow, {}, field)
                uses.add(flow, field)
            own = consumer.place_argument
            places = f"{own} of consumer {name!r}" if own else f"{field}['hooks']"
            num_layers = self.facts.points.num_layers
            for flow in consumer_calls.request_flows(consumer, chosen, num_layers):
                self._check_places(flow, places)
                _check_media(flow, chosen, field)
                uses.add(flow, field)
        return uses

    def asked_for_results(self, asked: Asked) -> Steps[list[str]]:
        """The fields by which a request asks for nothing but results: captures, and consumers that
        change nothing."""
        yield from self.current()
        return [f"capture[{name!r}]" for name in asked.captures] + [
            f"consumers[{name!r}]"
            for name, chosen in asked.consumers.items()
            if name in self.consumers
            and chosen.get("enabled", True)
            and self._only_tells(self.consumers[name], chosen)
        ]

    def _only_tells(self, consumer: Consumer, chosen: Mapping[str, Any]) -> bool:
        """Whether a consumer has a result for a request, and does nothing else with it."""
        flows = (
            *self._flows[consumer.consumer_id],
            *consumer_calls.request_flows(consumer, chosen, self.facts.points.num_layers),
        )
        acts = any(write.port != "cpu_export" for flow in flows for write in flow.writes)
        return not acts and type(consumer).on_request_finished is not Consumer.on_request_finished

    def _check_places(self, flow: ConsumerFlow, field: str) -> None:
        """Refuse hook points that this engine does not have."""
        if not flow.places or flow.kind in self._placed:
            return
        for site, layer in flow.places:
            try:
                self.facts.points.check(HookPoint(site), layer)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from None
        if len(self._placed) >= _MAX_PLACED:
            self._placed.clear()
        self._placed.add(flow.kind)

    def check_prompt(self, request: Any) -> None:
        """Put positions in the place of the items of the prompt that a request names, and refuse
        those that it cannot have, once its prompt is processed.

        Args:
            request: vLLM's `EngineCoreRequest`.
        """
        params = request.sampling_params or request.pooling_params
        wire = wire_of(params)
        try:
            if wire.get("media") is not None:
                if wire.get("streamed") and request.mm_features:
                    raise ValueError(
                        "what steers every request names the tokens of images, and this streamed "
                        "prompt has some: where they will be is not known; give it at once"
                    )
                wire = self._placed_in(wire, media_of_request(request))
                name = "extra_args" if request.sampling_params else "extra_kwargs"
                setattr(params, name, {**getattr(params, name), EXTRA_ARG: wire})
            _check_positions(wire, request)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _placed_in(self, wire: Mapping[str, Any], media: PromptMedia) -> dict[str, Any]:
        """What a request carries, with the positions of the items that it names."""
        spec = RequestSpec.from_wire(wire).in_prompt(media)
        asked = self._unplaced.get(spec.prompt_id)
        if asked is not None and asked.patch is not None and asked.patch.names_media:
            spec = replace(spec, patch=self.patches.uses(asked.patch.in_prompt(media)))
        return spec.to_wire()

    # -- results ---------------------------------------------------------------------------------

    def has_results(self, prepared: Prepared) -> bool:
        """Whether the workers may have anything to say about a request when it ends."""
        if not prepared.keeps_results:
            return False
        used = self.consumers.keys() - prepared.unused
        if prepared.patch is not None:  # rows may have been dropped before it began
            return True
        if prepared.named - self.consumers.keys():  # it asked for what has left
            return True
        return bool(used) or (bool(prepared.groups) and bool(self.consumers))

    def hear_who_left(self, requests: Iterable[Prepared]) -> Steps[None]:
        """Know which consumers other front ends have removed, before the results of requests that
        name some are gathered."""
        if self.is_current or not any(request.named for request in requests):
            return
        try:
            yield from self.current()
        except Exception as error:  # the engine is going down, and `gather` says so
            logger.warning("it is not known which consumers have left: %s", error)

    def gather(
        self, outputs: Sequence[Any], timeout_s: float | None, *, alone: bool
    ) -> Steps[None]:
        """Put results on outputs that are the last of their requests.

        Args:
            outputs: each with its request as `tllm_request`.
            timeout_s: how long to wait for consumers; what they have not made then is pending.
            alone: nobody else uses the engine meanwhile, so that workers may wait for consumers,
                and say of requests without results whether they could be steered.
        """
        late: list[Any] = []
        over: list[Any] = []
        for output in outputs:
            request = output.tllm_request
            # Of what is pending, a consumer that has left may still owe something.
            has = request.results.pending or self.has_results(request)
            (late if has else over).append(output)
        steered = [o.tllm_request.prompt_id for o in over if o.tllm_request.groups]
        if alone and steered:
            # Steering has no result, but a worker that could not steer says so. Hardly ever.
            failed = set().union(*(yield WorkerCall("not_steered", (steered,))))
            late += [o for o in over if o.tllm_request.prompt_id in failed]
            over = [o for o in over if o.tllm_request.prompt_id not in failed]
        for output in over:
            self._put_on(output)
            if alone:
                self.over.append(output.tllm_request.prompt_id)
        if late:
            yield from self._fetch_results(late, timeout_s, alone)
        for output in late:
            self._put_on(output)

    def _fetch_results(
        self, outputs: Sequence[Any], timeout_s: float | None, alone: bool
    ) -> Steps[None]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for output in outputs:
            output.tllm_request.samples.gather(output)
        requests = {o.tllm_request.prompt_id: o.tllm_request for o in outputs}
        tokens = {o.tllm_request.prompt_id: o.tllm_request.tokens(o) for o in outputs}
        pending, pause = list(requests), 0.001
        left = 1.0 if timeout_s is None else timeout_s
        while True:
            wait_s = min(1.0, left) if alone else 0.0
            try:
                answers = yield WorkerCall("take_results", (pending, tokens, wait_s))
            except Exception as error:  # the engine is going down; what was generated is here
                logger.warning("no results of consumers were to be had: %s", error)
                for prompt_id in pending:
                    requests[prompt_id].results.lost = reason_of(error)
                return
            pending = collect(requests, answers)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if not pending or left <= 0:
                return
            if not alone:
                yield Pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _put_on(self, output: Any) -> None:
        """Put what is known of a request's results on its output, and give them, each once, to the
        consumers of this process."""
        request: Prepared = output.tllm_request
        joined, lengths = request.results.joined(), request.samples.lengths
        missing = dict.fromkeys(request.named - self.consumers.keys(), LEFT)
        if request.results.lost:
            used = request.named | (self.consumers.keys() - request.unused)
            lost = f"the workers could not be asked for the result: {request.results.lost}"
            missing |= dict.fromkeys(used, lost)
        attach_results(
            output, joined, request.captures, missing, lengths, request.ended_by, request.patch
        )
        for index, sample in samples_of(output):
            for name, result in list(sample.consumer_results.items()):
                consumer, key = self.consumers.get(name), (index, name)
                if consumer is None or result.status == "pending" or key in request.handed_over:
                    continue
                request.handed_over.add(key)
                wrong = _wrong_in_on_result(consumer, output, index, result)
                if wrong:
                    set_result(output, sample, name, replace(result, status="error", error=wrong))


def _wrong_in_on_result(consumer: Consumer, output: Any, index: int, result: Any) -> str:
    """Give a consumer a result of an output; what went wrong, or nothing. The output keeps its
    samples: other consumers, and who asked, are given theirs out of it."""
    of_output, wrong = output.outputs, ""
    samples = list(of_output) if isinstance(of_output, list) else []
    try:
        consumer.on_result(output, index, result)
    except (Exception, SystemExit) as error:
        logger.exception("consumer %r raised in on_result", consumer.consumer_id)
        wrong = reason_of(error)
    is_changed = isinstance(of_output, list) and [*map(id, of_output)] != [*map(id, samples)]
    if is_changed or output.outputs is not of_output:
        output.outputs = of_output
        if is_changed:
            of_output[:] = samples
        told = "on_result changed which samples output.outputs has; they were put back"
        logger.error("consumer %r: %s", consumer.consumer_id, told)
        wrong = "; ".join(filter(None, (wrong, told)))
    return wrong


def _check(consumer: Any) -> None:
    """Refuse what cannot be registered, and what has the name of other results of ours."""
    check(consumer)
    name = consumer.consumer_id
    if name == PATCHING or not isinstance(consumer, BUILT_IN.get(name, Consumer)):
        raise ValueError(
            f"{type(consumer).__name__} has consumer_id={name!r}, by which outputs have results of "
            "tLLM's own; give it another consumer_id"
        )


def _check_signals(chosen: Mapping[str, Any], groups: Sequence[SteeringGroup]) -> None:
    """Refuse what a request may not say: which signals there are, its conditions say. Without any
    there would be none."""
    name = f"consumers[{SignalsConsumer.consumer_id!r}]"
    allow_options(chosen, ("enabled",), name)
    if chosen.get("enabled", True) and not gates_of(groups):
        raise ValueError(
            f"{name} is {dict(chosen)!r}, and the request has no condition to score; give "
            "steering with a 'when', 'stop_when' or 'abort_when', or leave the consumer out"
        )


def _with_signals(asked: Asked, groups: Sequence[SteeringGroup]) -> Asked:
    """What is asked, and what the conditions of its steering made of each token."""
    names = signal_names(gates_of(groups).values())
    if not names:
        return asked
    name = SignalsConsumer.consumer_id
    options = {**asked.consumers.get(name, {}), "names": names}
    return replace(asked, consumers={**asked.consumers, name: options})


def _check_positions(wire: Mapping[str, Any], request: Any) -> None:
    """Refuse positions at which the sequences of a request cannot have rows."""
    tokens = request.prompt_token_ids
    if tokens is None:
        _check_judged(wire)
    reads, patch = wire.get("reads", ()), wire.get("patch", ())
    if not reads and not patch:
        return
    prompt_len = len(request.prompt_embeds if tokens is None else tokens)
    max_tokens = 1 if request.sampling_params is None else request.sampling_params.max_tokens
    if wire.get("streamed"):  # a later part of the prompt may reach the position
        max_tokens = None
    check_patch_positions(map(PatchUse.from_wire, patch), prompt_len, max_tokens)
    for read in map(RowsRead.from_wire, reads):
        read.positions.check(prompt_len, max_tokens, read.name)


def _check_judged(wire: Mapping[str, Any]) -> None:
    """Refuse conditions that end a request whose prompt is embeddings, where nobody knows which of
    its tokens are steered: a worker would judge none of them."""
    name = next((name for name in ("stop", "abort") if wire.get(f"{name}s")), None)
    if name is None:
        return
    if any(use.names_prompt_tokens for use in map(GroupUse.from_wire, wire["steering"])):
        raise ValueError(
            f"{name}_when was given with steering by token_ids, which cannot be found in a prompt "
            "that was given as embeddings; give positions"
        )


def _check_media(flow: ConsumerFlow, options: Mapping[str, Any], field: str) -> None:
    """Refuse items of a prompt that a flow names though the request does not."""
    if flow.selection.media and "positions" not in options:
        raise ValueError(
            f"{field}: by default it is given the tokens of {flow.selection.media[0]}, which only "
            "a request can ask for; give 'positions' with the request, and another default"
        )


def _converses(asked: Asked, groups: Sequence[SteeringGroup]) -> bool:
    return asked.conversation is not None and any(group.is_kept for group in groups)


def _ends(
    groups: Sequence[SteeringGroup], params: Any
) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    """Number and name of the conditions that end a sample, and of those that refuse a prompt."""
    if not any(group.ends for group in groups):
        return (), ()
    names: dict[int, str] = {}
    for name, number in signal_names(gates_of(groups).values()).items():
        names.setdefault(number, name)
    stops, aborts = (
        tuple(
            (number, name or names[number])
            for group in groups
            if group.phase == phase
            for number, name in group.ends
        )
        for phase in ("decode", "prefill")
    )
    given = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    for field, (_, name) in [
        *(("stop_when", end) for end in stops),
        *(("abort_when", end) for end in aborts),
    ]:
        if name in given:
            raise ValueError(
                f"{field}: the condition {name!r} is called as one of the stop strings, and "
                "stop_reason could not tell them apart; give it another 'name'"
            )
    return stops, aborts


def _pooled(params: Any, spec: RequestSpec) -> VllmPoolingParams:
    """A copy of pooling parameters that carries a spec."""
    own = (plain(params) if isinstance(params, PoolingParams) else params).clone()
    own.extra_kwargs = {**(own.extra_kwargs or {}), EXTRA_ARG: spec.to_wire()}
    return own


def _taken(consumer_id: str) -> str:
    return (
        f"a consumer with consumer_id={consumer_id!r} is registered; unregister it first, or give "
        "this one another consumer_id"
    )


def _hint(name: str, captures: bool) -> str:
    """How to come by a consumer that is not registered."""
    if name in available_consumers():
        example = f"{name}:root=DIRECTORY" if name == "filesystem" else name
        given = "capture_consumers" if captures else "consumers"
        return (
            f"; start the engine with {given}=[{example!r}], or the server with "
            f"--{given.replace('_', '-').removesuffix('s')} {example}"
        )
    if captures and name in ("hooks", "positions", "reduction", "dtype"):
        return f"; {name!r} is an option of one: give {{'memory': {{{name!r}: ...}}}}"
    return f" (beside the built-in {', '.join(BUILT_IN)})"
