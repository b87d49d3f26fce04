"""How a request is made ready for the engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vllm import PoolingParams as VllmPoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from tllm.client.calls import ALONE, LEAVING, TOGETHER, Steps, WorkerCall
from tllm.client.checked_params import CheckedParams
from tllm.client.consumer_uses import ConsumerUses
from tllm.client.held import HeldByWorkers, VectorUploads
from tllm.client.prompt_check import PromptCheck
from tllm.client.registrations import BUILT_IN, Registrations
from tllm.client.request import Prepared, RequestKind, Uses, media_of
from tllm.client.results import Samples
from tllm.consumers.signals import SignalsConsumer
from tllm.engine.refusals import RefusedError
from tllm.params import PoolingParams, asked_of, plain
from tllm.spec.conversations import RequestConversation
from tllm.spec.gates import signal_names
from tllm.spec.groups import SteeringGroup, gates_of, use_of_conversation
from tllm.spec.patching import PatchUse, RequestPatch
from tllm.spec.reading import allow_options
from tllm.spec.request import CONVERSATION, EXTRA_ARG, Asked, RequestSpec, RowsRead, wire_of
from tllm.spec.selection import Selection

_MOST_KEPT = 1024
_PROMPT = Selection.parse({"phase": "prompt"})


class NewsError(RuntimeError):
    """Something was registered that is not known here yet."""

    def __init__(self) -> None:
        super().__init__("the workers have to be asked something before this request")


@dataclass(frozen=True, eq=False)
class _Made:
    """What is made of what a request asks, whichever request it is.

    Attributes:
        wire: a `RequestSpec` without ids, as plain data.
        groups, patch, captures, wants_tokens, unused, named, lasting: as of `Prepared`.
    """

    wire: Mapping[str, Any]
    patch: RequestPatch | None
    groups: tuple[SteeringGroup, ...]
    captures: Mapping[str, Mapping[str, Any]]
    wants_tokens: bool
    unused: frozenset[str]
    named: frozenset[str]
    lasting: Mapping[str, Mapping[str, Any]]

    @property
    def ended_by(self) -> frozenset[str]:
        ends = *self.wire.get("stops", ()), *self.wire.get("aborts", ())
        return frozenset(name for _, name in ends)


class RequestAdmission:
    """Makes requests ready, or refuses them.

    Args:
        registered: what is known of the engine.
        held: what the workers hold for requests that run.
        uploads: brings them what they do not hold.
        uses: finds what consumers have to do with a request.
        prompts: checks what can be checked only when the prompt is known.
    """

    def __init__(
        self,
        registered: Registrations,
        held: HeldByWorkers,
        uploads: VectorUploads,
        uses: ConsumerUses,
        prompts: PromptCheck,
    ) -> None:
        self._registered = registered
        self._held = held
        self._uploads = uploads
        self._uses = uses
        self._prompts = prompts
        self._params = CheckedParams()
        #: What was made of what is asked, for one number of samples each, while somebody has that.
        self._kept: dict[tuple[int, int], tuple[weakref.ref[Asked], _Made]] = {}
        self._changes = 0  # of what is registered, when these were made

    def admit(
        self,
        params: Any,
        request_id: str,
        *,
        results: bool = True,
        streamed: bool = False,
        first: Prepared | None = None,
        asked: Asked | None = None,
        generated: int | None = None,
    ) -> Steps[Prepared]:
        """Make a request ready. What it is steered with is held for it until
        `HeldByWorkers.release`.

        Args:
            params: of vLLM's or of ours, for sampling or pooling.
            results: whether somebody will come for what the consumers have to say.
            streamed: its prompt arrives in parts. Only the engine knows then where it ends.
            first: what the request asks of which this is a later input.
            asked: what it asks; by default what its parameters say.
            generated: how many of the last tokens of its prompt were generated, where it is a
                step of a beam.

        Raises `ValueError` naming what is wrong in it.
        """
        if not self._registered.is_current:
            yield from self._registered.current()
            yield TOGETHER
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
        kind = RequestKind(isinstance(params, VllmSamplingParams), streamed, generated, results)
        if first is None and kind.is_plain and (known := self._known(asked, params.n)) is not None:
            return self._begin(params, request_id, os.urandom(16).hex(), kind, known)
        given, groups = asked, () if first is None else first.groups
        if first is None and self._registered.composer.concerns(asked.steering):
            groups = self._registered.composer.groups(asked.steering)
        if SignalsConsumer.consumer_id in asked.consumers:
            _check_signals(asked.consumers[SignalsConsumer.consumer_id], groups)
        if results and groups:
            asked = _with_signals(asked, groups)
        # Nothing is waited for after this until the groups are held, below.
        uses = yield from self._uses_when_there(kind, asked, groups, held=first is not None)
        patch: tuple[PatchUse, ...] = ()
        if asked.patch is not None and not asked.patch.unplaced:
            patch = self._registered.patches.uses(asked.patch)
        prompt_id = os.urandom(16).hex() if first is None else first.prompt_id
        made = self._made(params, asked, (groups, patch), kind, uses)
        prepared = self._begin(params, request_id, prompt_id, kind, made, hold=first is None)
        if first is None and kind.is_plain:
            self._keep(given, params.n, made)
        if _converses(asked, groups):  # last, since who is refused begins no conversation
            yield from self._enter(asked.conversation, prepared)
        return prepared

    def _uses_when_there(
        self, kind: RequestKind, asked: Asked, groups: tuple[SteeringGroup, ...], *, held: bool
    ) -> Steps[Uses]:
        """What the consumers have to do with a request, once those of every engine that it names
        are there, and the workers hold its groups, as they do where `held`."""
        while True:  # others register and remove consumers while something is waited for
            for name, make in BUILT_IN.items():
                if name in asked.consumers and name not in self._registered.consumers:
                    yield ALONE
                    if name not in self._registered.consumers:  # it may have come meanwhile
                        yield from self._registered.add(make(), False)
                    yield TOGETHER  # what requests bring is brought for all that wait
            uses = self._uses.checked(kind, asked, groups)
            if held or self._held.has(groups):
                return uses
            yield from self._uploads.bring(groups)

    def admit_now(self, params: VllmSamplingParams, *, streamed: bool) -> VllmSamplingParams:
        """Parameters as the engine takes them, of requests that nobody steers and whose results
        nobody will look at, when all that is registered is known (`is_current`); else a
        `NewsError`, since another process may register something at any time."""
        try:
            next(self.admit(params, "", results=False, streamed=streamed))
        except StopIteration as done:
            prepared: Prepared = done.value
            return prepared.params  # type: ignore[no-any-return]
        raise NewsError

    def _enter(self, named: RequestConversation | None, prepared: Prepared) -> Steps[None]:
        """Let a request, which is ready, take part in a conversation."""
        assert named is not None
        try:
            replicas = self._registered.replicas
            if replicas > 1:
                raise ValueError(
                    "conversation: a condition of steering has scope='conversation', and this "
                    f"engine has {replicas} data-parallel replicas, each with a memory of its "
                    "own; start it with data_parallel_size=1, or give scope='rest'"
                )
            kept = [gate.kept_as for gate in gates_of(prepared.groups).values() if gate.kept_as]
            given = (
                *(named.id, named.key_digest, named.expires_s, time.time()),
                *(named.owner, named.most, kept),
            )
            answers = yield WorkerCall("enter_conversation", given)
        except LEAVING:
            self._held.release(prepared.prompt_id)
            # Nobody hears where it is, and the workers have entered it all the same: entering it
            # again says where, and both leave.
            with suppress(ValueError):  # it was refused, as it is now
                answers = yield WorkerCall("enter_conversation", given)
                for _ in range(2):
                    yield WorkerCall("leave_conversation", tuple(answers[0]))
            raise
        except BaseException:
            self._held.release(prepared.prompt_id)
            raise
        use = use_of_conversation(prepared.groups, *answers[0])
        spec = RequestSpec.from_wire(wire_of(prepared.params))
        prepared.params.extra_args[EXTRA_ARG] = replace(spec, conversation=use).to_wire()

    def check_input(self, request: Prepared, later: Prepared) -> None:
        """Refuse a later input of a streamed prompt that asks a consumer otherwise than an earlier
        one for what is one result; and one whose rows would be written to by a consumer that the
        request did without: its cached blocks are shared with others."""
        for name, options in later.lasting.items():
            before = request.lasting.get(name, options)
            if options != before:
                raise RefusedError(
                    f"consumers[{name!r}]: an input of a streamed prompt asks otherwise than an "
                    f"earlier one ({dict(options)} and {dict(before)}), and their rows are one "
                    "result; ask the same of every input, or begin another request"
                )
        if wire_of(request.params).get("isolated"):
            return
        wanted = later.named | (request.unused - later.unused)
        for name in sorted(wanted & self._registered.consumers.keys()):
            flows = self._registered.flows[name]
            if any(w.port == "residual_stream" for flow in flows for w in flow.writes):
                raise RefusedError(
                    f"consumers[{name!r}]: an input of a streamed prompt asks for it, and it "
                    "writes to rows; ask for it in the request, or begin another one"
                )

    def _lasting(self, asked: Asked, uses: Uses) -> dict[str, dict[str, Any]]:
        """By consumer, the options that every input of a streamed prompt has to give alike."""
        return {
            name: {
                option: asked.consumers.get(name, {}).get(option)
                for option in consumer.lasting_options
            }
            for name, consumer in self._registered.consumers.items()
            if consumer.lasting_options and name not in uses.unused
        }

    def leave(self, prepared: Prepared) -> WorkerCall | None:
        """What the workers have to hear of a request that did not begin, beside that it is over."""
        if prepared.conversation is None:
            return None
        return WorkerCall("leave_conversation", prepared.conversation)

    def _made(
        self,
        params: Any,
        asked: Asked,
        changes: tuple[tuple[SteeringGroup, ...], tuple[PatchUse, ...]],
        kind: RequestKind,
        uses: Uses,
    ) -> _Made:
        if kind.streamed and kind.results and len(uses.unused) < len(self._registered.consumers):
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
            num_samples=params.n if kind.generates else 1,
            consumers=asked.consumers,
            registrations=self._registrations_of(asked, uses),
            reads=tuple(dict.fromkeys(uses.reads)),
            wants_tokens=uses.wants_tokens,
            acted=uses.acting is not None,
            steering_rows=tuple(dict.fromkeys(uses.steering_rows)),
            isolated=uses.writes,
            guided=uses.guides,
            steering=tuple(group.use for group in groups),
            patch=patch,
            generated=kind.generated or 0,
            streamed=kind.streamed,
            stops=stops,
            aborts=aborts,
            media=media,
        )
        return _Made(
            spec.to_wire(),
            asked.patch,
            groups,
            {name: asked.consumers.get(name, {}) for name in uses.captures},
            wants_tokens=uses.wants_tokens,
            unused=frozenset(uses.unused),
            named=frozenset(asked.consumers.keys() - uses.unused),
            lasting=self._lasting(asked, uses) if kind.streamed else {},
        )

    def _begin(
        self,
        params: Any,
        request_id: str,
        prompt_id: str,
        kind: RequestKind,
        made: _Made,
        *,
        hold: bool = True,
    ) -> Prepared:
        """A request of which it is known what it asks; the workers hold its groups."""
        prompt = prompt_id if kind.results else ""
        wire = {**made.wire, "request_id": request_id, "prompt_id": prompt}
        prepared = Prepared(
            self._params.copy(params, wire) if kind.generates else _pooled(params, wire),
            prompt_id,
            made.captures,
            wants_tokens=made.wants_tokens,
            streamed=kind.streamed,
            unused=made.unused,
            named=made.named,
            lasting=made.lasting,
            groups=made.groups,
            patch=made.patch,
            ended_by=made.ended_by,
            keeps_results=kind.results,
            samples=Samples(deltas=params.output_kind == RequestOutputKind.DELTA),
        )
        if wire.get("media") is not None:
            self._prompts.expect(prepared)
        if hold:
            self._held.hold(prompt_id, made.groups)
        return prepared

    def _known(self, asked: Asked, samples: int) -> _Made | None:
        """What was made of the same before, if all of it holds still."""
        if self._changes != self._registered.changes:
            self._changes = self._registered.changes
            self._kept.clear()
        kept = self._kept.get((id(asked), samples))
        if kept is None or kept[0]() is not asked or not self._held.has(kept[1].groups):
            return None
        return kept[1]

    def _keep(self, given: Asked, samples: int, made: _Made) -> None:
        """Others ask the same, by the same parameters. Consumers that are not of every engine are
        asked each time."""
        if given.patch is not None or given.conversation is not None or made.ended_by:
            return
        consumers = self._registered.consumers
        if any(type(each) is not BUILT_IN.get(name) for name, each in consumers.items()):
            return
        key, kept = (id(given), samples), self._kept
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[key] = weakref.ref(given, lambda _: kept.pop(key, None)), made

    def _registrations_of(self, asked: Asked, uses: Uses) -> dict[str, str]:
        """By which consumers a request was accepted, of those that it names and that are not of
        every engine: another may have the id of one when it begins."""
        named = asked.consumers.keys() - uses.unused - BUILT_IN.keys()
        return {name: self._registered.ids[name] for name in named}


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


def _pooled(params: Any, wire: Mapping[str, Any]) -> VllmPoolingParams:
    """A copy of pooling parameters that carries this."""
    own = (plain(params) if isinstance(params, PoolingParams) else params).clone()
    own.extra_kwargs = {**(own.extra_kwargs or {}), EXTRA_ARG: wire}
    return own
