"""What the consumers of an engine have to do with a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tllm.client import consumer_calls
from tllm.client.calls import Steps
from tllm.client.registrations import BUILT_IN, Registrations
from tllm.client.request import RequestKind, Uses
from tllm.consumers.base import Consumer
from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.ports import ConsumerFlow
from tllm.registry import available_consumers
from tllm.spec.groups import SteeringGroup
from tllm.spec.hooks import HookPoint
from tllm.spec.reading import require_bool, said_of
from tllm.spec.request import Asked

_MAX_PLACED = 4096


class ConsumerUses:
    """Finds what consumers have to do with requests, and refuses what they cannot have.

    Args:
        registered: the consumers that are there.
    """

    def __init__(self, registered: Registrations) -> None:
        self._registered = registered
        #: Kinds of flows whose hook points were found to be in the engine.
        self._placed: set[ConsumerFlow] = set()

    def checked(self, kind: RequestKind, asked: Asked, groups: Sequence[SteeringGroup]) -> Uses:
        """What the consumers have to do with a request. Raises `ValueError` for what it asks and
        cannot have: all of it is found here, but for what hangs on its prompt (`PromptCheck`)."""
        uses = self._of(asked)
        kind.check(asked, groups, uses, self._registered.composer)
        return uses

    def _of(self, asked: Asked) -> Uses:
        """What the consumers have to do with a request. Raises `ValueError` for what it asks of
        them and cannot have."""
        for name, chosen in asked.consumers.items():
            field = f"{'capture' if name in asked.captures else 'consumers'}[{name!r}]"
            if name not in self._registered.consumers:
                others = [each for each in self._registered.consumers if each not in BUILT_IN]
                known = ", ".join(others) or "none"
                raise ValueError(
                    f"{field}: no such consumer is registered; registered are {known}"
                    f"{_hint(name, name in asked.captures)}"
                )
            enabled = chosen.get("enabled", True)
            require_bool(f"{field}['enabled']", enabled)
            if enabled:
                options = {option: chosen[option] for option in chosen if option != "enabled"}
                consumer_calls.call(self._registered.consumers[name], "validate_options", options)
            if name == PatchRunsConsumer.consumer_id:
                self._registered.patches.check_run(chosen["uid"])
        uses = Uses()
        for name, consumer in self._registered.consumers.items():
            chosen = asked.consumers.get(name, {})
            absent = consumer.on_request_only and name not in asked.consumers
            if absent or not chosen.get("enabled", True):
                uses.unused.add(name)
                continue
            if name in asked.captures or name in self._registered.capturing:
                uses.captures.append(name)
            field = f"{'capture' if name in uses.captures else 'consumers'}[{name!r}]"
            wants_tokens = consumer_calls.call(consumer, "needs_tokens_of", chosen)
            uses.wants_tokens = uses.wants_tokens or wants_tokens
            for flow in self._registered.flows[name]:
                _check_media(flow, {}, field)
                uses.add(flow, field)
            own = consumer.place_argument
            places = f"{own} of consumer {name!r}" if own else f"{field}['hooks']"
            num_layers = self._registered.facts.points.num_layers
            for flow in consumer_calls.request_flows(consumer, chosen, num_layers):
                self._check_places(flow, places)
                _check_media(flow, chosen, field)
                uses.add(flow, field)
        return uses

    def asked_for_results(self, asked: Asked) -> Steps[list[str]]:
        """The fields by which a request asks for nothing but results: captures, and consumers that
        change nothing."""
        yield from self._registered.current()
        return [f"capture[{name!r}]" for name in asked.captures] + [
            f"consumers[{name!r}]"
            for name, chosen in asked.consumers.items()
            if name in self._registered.consumers
            and chosen.get("enabled", True)
            and self._only_tells(name, chosen)
        ]

    def guiding(self, asked: Asked) -> Steps[list[str]]:
        """The fields by which a request asks for consumers that guide which token is drawn."""
        yield from self._registered.current()
        return [
            f"consumers[{name!r}]"
            for name, chosen in asked.consumers.items()
            if name in self._registered.consumers
            and chosen.get("enabled", True)
            and any(w.port == "sampler" for f in self._flows(name, chosen) for w in f.writes)
        ]

    def _flows(self, name: str, chosen: Mapping[str, Any]) -> tuple[ConsumerFlow, ...]:
        """All flows of a consumer for a request."""
        consumer = self._registered.consumers[name]
        num_layers = self._registered.facts.points.num_layers
        own = consumer_calls.request_flows(consumer, chosen, num_layers)
        return (*self._registered.flows[name], *own)

    def _only_tells(self, name: str, chosen: Mapping[str, Any]) -> bool:
        """Whether a consumer has a result for a request, and does nothing else with it."""
        flows = self._flows(name, chosen)
        acts = any(write.port != "cpu_export" for flow in flows for write in flow.writes)
        tells = type(self._registered.consumers[name]).on_request_finished
        return not acts and tells is not Consumer.on_request_finished

    def _check_places(self, flow: ConsumerFlow, field: str) -> None:
        """Refuse hook points that this engine does not have."""
        if not flow.places or flow.kind in self._placed:
            return
        for site, layer in flow.places:
            with said_of(field):
                self._registered.facts.points.check(HookPoint(site), layer)
        if len(self._placed) >= _MAX_PLACED:
            self._placed.clear()
        self._placed.add(flow.kind)


def _check_media(flow: ConsumerFlow, options: Mapping[str, Any], field: str) -> None:
    """Refuse items of a prompt that a flow names though the request does not."""
    if flow.selection.media and "positions" not in options:
        raise ValueError(
            f"{field}: by default it is given the tokens of {flow.selection.media[0]}, which only "
            "a request can ask for; give 'positions' with the request, and another default"
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
