"""Consumers before an engine exists: registration, entry points, and `name:key=value` specs."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow
from tllm.spec.reading import typed

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "tllm.consumers"

_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
"""Commas between the options of a spec string; those of a list are inside."""


class Registry:
    """Consumers that the next engine starts with."""

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}

    def add(self, consumer: Consumer | str) -> Consumer:
        """Register a consumer or a spec string; refuses a second one of the same id."""
        made = consumer_from_spec(consumer) if isinstance(consumer, str) else consumer
        check(made)
        if made.consumer_id in self._consumers:
            raise ValueError(
                f"a consumer with consumer_id={made.consumer_id!r} is registered; call "
                "clear_consumers() first, or give this one another consumer_id"
            )
        self._consumers[made.consumer_id] = made
        return made

    def clear(self) -> None:
        """Forget all."""
        self._consumers.clear()

    def all(self) -> list[Consumer]:
        """In the order of registration."""
        return list(self._consumers.values())


def check(consumer: Any) -> None:
    """Raise `TypeError` or `ValueError` for what cannot be registered."""
    require_consumer(consumer)
    given: object = consumer.consumer_id
    if not isinstance(given, str):
        raise TypeError(
            f"{type(consumer).__name__} has consumer_id={given!r}; give a text, by which requests "
            'name it (in a spec, consumer_id="3" for what would be a number)'
        )
    if not given:
        raise ValueError(f"{type(consumer).__name__} has no consumer_id; set the class attribute")
    raised = f"flows() of consumer {given!r} raised"
    flows = _called(raised, consumer.flows)
    found = _called(raised, lambda: list(flows)) if isinstance(flows, Iterable) else []
    if not isinstance(flows, Iterable) or not all(isinstance(f, ConsumerFlow) for f in found):
        raise TypeError(
            f"flows() of consumer {consumer.consumer_id!r} returned {flows!r:.100}; let it return "
            "a list of ConsumerFlow"
        )
    _check_methods(consumer, found)


_GIVEN_TO = {"actions": "decide", "sampler": "guide", "cpu_export": "on_export"}
"""By port that is written to, the method that it calls."""

_METHODS = [name for name, own in vars(Consumer).items() if callable(own) and name[0] != "_"]

_MAY_YIELD = ("flows", "request_flows", "decide")


def _check_methods(consumer: Consumer, flows: Iterable[ConsumerFlow]) -> None:
    """Raise `TypeError` for a consumer that would be given what it has no method for, or whose
    methods would be called and do nothing."""
    for flow in flows:
        ports = {write.port for write in flow.writes}
        for port, name in _GIVEN_TO.items():
            if port in ports and _is_inherited(consumer, name):
                raise TypeError(
                    f"a flow of consumer {consumer.consumer_id!r} needs a method {name} of its "
                    f"own, and {type(consumer).__name__} has none; define one, or leave out what "
                    "the flow writes"
                )
        if flow.reads and "actions" not in ports and _is_inherited(consumer, "consume_bundle"):
            logger.warning(
                "a flow of consumer %r reads rows, and %s has no consume_bundle of its own: nobody "
                "is given them",
                consumer.consumer_id,
                type(consumer).__name__,
            )
    for attribute in ("remote_methods", "one_prompt_options", "lasting_options"):
        if isinstance(names := getattr(consumer, attribute), str):
            raise TypeError(
                f"{attribute}={names!r} of consumer {consumer.consumer_id!r} is one text; give a "
                f"sequence of names: ({names!r},)"
            )
    remote = consumer.remote_methods
    for name in remote:
        if not callable(getattr(consumer, name, None)):
            raise TypeError(
                f"remote_methods of consumer {consumer.consumer_id!r} names {name!r}, and "
                f"{type(consumer).__name__} has no such method; define it, or leave out its name"
            )
    for name in (*_METHODS, *remote):
        method = inspect.unwrap(getattr(consumer, name))
        waits = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if waits or (inspect.isgeneratorfunction(method) and name not in _MAY_YIELD):
            kind = "async" if waits else "a generator"
            raise TypeError(
                f"{name} of consumer {consumer.consumer_id!r} is {kind}: tLLM calls it, and it "
                "would do nothing; make it a plain method"
            )


def _is_inherited(consumer: Consumer, name: str) -> bool:
    """Whether a method is the one of the base, which does nothing."""
    return getattr(getattr(consumer, name), "__func__", None) is getattr(Consumer, name)


def require_consumer(given: Any) -> None:
    """Raise `TypeError` for what is no consumer."""
    if not isinstance(given, Consumer):
        raise TypeError(
            f"{given!r} is not a consumer; give an instance of a subclass of "
            "tllm.consumers.base.Consumer, or a spec such as 'esamp:beta=0.2'"
        )


def available_consumers() -> dict[str, Any]:
    """Names that spec strings may use, from the entry points of installed packages."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def consumer_from_spec(spec: str) -> Consumer:
    """A consumer from `name` or `name:key=value,key=value`.

    The name is one of the entry-point group `tllm.consumers`; it names a function that takes the
    keys as keyword arguments and returns a consumer. Values are JSON (numbers, `true`, `false`,
    `null`, lists such as `[0,4]`), or text.
    """
    name, _, rest = spec.partition(":")
    known = available_consumers()
    if name not in known:
        raise ValueError(
            f"unknown consumer {name!r} in {spec!r}; installed are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    _check_declared_once(name)
    options = _options_of(spec, rest)
    factory = _called(
        f"consumer {name!r} cannot be loaded from {known[name].value}", known[name].load
    )
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise ValueError(
            f"consumer {name!r} is {factory!r:.100} ({known[name].value}), which is no function or "
            "class with parameters of its own; let its entry point name one"
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(set(options) - set(parameters))):
        raise ValueError(
            f"consumer {name!r} has no options {unknown}; it takes "
            f"{', '.join(parameters) or 'none'}"
        )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters.values() if p.kind in by_name and p.default is p.empty]
    if missing := [option for option in needed if option not in options]:
        raise ValueError(
            f"consumer {name!r} needs {' and '.join(missing)}, and {spec!r} does not give it; "
            f"write {name}:{','.join(f'{option}=...' for option in needed)}"
        )
    consumer = _called(f"consumer {name!r} cannot be made of {spec!r}", lambda: factory(**options))
    if not isinstance(consumer, Consumer):
        raise ValueError(
            f"consumer {name!r} cannot be made of {spec!r}: {known[name].value} returned "
            f"{consumer!r:.100}, which is not an instance of a subclass of "
            "tllm.consumers.base.Consumer"
        )
    check(consumer)
    return consumer


def _check_declared_once(name: str) -> None:
    """Refuse a name under which packages mean different consumers."""
    points = [p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == name]
    if len({point.value for point in points}) > 1:
        told = [f"{p.value} of {p.dist.name if p.dist else 'an unknown package'}" for p in points]
        raise ValueError(
            f"consumer {name!r} is {' and '.join(told)}; remove one of these packages, or register "
            "an instance in Python"
        )


def _options_of(spec: str, given: str) -> dict[str, Any]:
    """The options of a spec string."""
    options: dict[str, Any] = {}
    for item in filter(None, _OUTSIDE_BRACKETS.split(given)):
        key, separator, value = item.partition("=")
        if not separator:
            raise ValueError(f"{item!r} in {spec!r} is not key=value")
        if (key := key.strip()) in options:
            raise ValueError(f"{spec!r} gives {key} twice; give it once")
        options[key] = typed(value)
        if value.startswith("[") and options[key] is value:
            raise ValueError(f'{value!r} is no list; give one as JSON: [0,4] or ["a","b"]')
    return options


def _called(what: str, call: Callable[[], Any]) -> Any:
    """What somebody else's code returns; whatever it raises, `sys.exit` too, is a `ValueError` that
    begins with `what`. A `ValueError` of its own stays."""
    try:
        return call()
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
