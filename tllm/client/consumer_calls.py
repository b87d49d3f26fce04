"""Methods of consumers that are called in the user's process, by what a request asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow
from tllm.ports.payload import reason_of


class ConsumerError(RuntimeError):
    """A consumer did wrong in the user's process; the message says which, where, and what."""


def call(consumer: Consumer, method: str, *arguments: Any) -> Any:
    """What a method of a consumer returns.

    Raises a `ValueError` of the consumer's as it is, since that refuses the request, and
    `ConsumerError` with the names of both for whatever else it raises, `SystemExit` too: the
    process has other users.
    """
    return _heard(consumer, method, lambda: getattr(consumer, method)(*arguments))


def request_flows(
    consumer: Consumer, options: Mapping[str, Any], num_layers: int
) -> list[ConsumerFlow]:
    """What a consumer reads of a request beside its own flows.

    Raises what `call` raises, and `ConsumerError` for what is no list of flows that only read.
    """
    given = call(consumer, "request_flows", options, num_layers)
    listed = isinstance(given, Iterable)
    flows = _heard(consumer, "request_flows", lambda: list(given)) if listed else []
    if not listed or not all(isinstance(f, ConsumerFlow) for f in flows):
        raise ConsumerError(
            f"request_flows() of consumer {consumer.consumer_id!r} returned {given!r:.100}; let it "
            "return a list of ConsumerFlow"
        )
    if writing := [flow for flow in flows if flow.writes]:
        raise ConsumerError(
            f"request_flows() of consumer {consumer.consumer_id!r} returned a flow that writes "
            f"({writing[0].writes[0].port}); let it read alone, and declare what is written in "
            "flows()"
        )
    return flows


def _heard(consumer: Consumer, method: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (ValueError, ConsumerError):  # the latter of a consumer that uses the engine itself
        raise
    except (Exception, SystemExit) as error:
        raise ConsumerError(
            f"consumer {consumer.consumer_id!r} raised in {method}: {reason_of(error)}"
        ) from error


def consumer_error(error: BaseException) -> ConsumerError | None:
    """The fault of a consumer that an error comes from; None for any other."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ConsumerError):
        found = found.__cause__
    return found
