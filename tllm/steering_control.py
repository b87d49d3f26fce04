"""`llm.steering`: global steering and modules of a running engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tllm.steering_state import SteeringState


class SteeringControl:
    """Global steering of an `LLM`: it applies to every request that is added from then on.

    A request keeps what was set when it was added. Vector specs are as `SamplingParams` takes them:
    `{hook: {layer: vector | {"vector": ..., "scale": ..., "method": ..., "positions": ...}}}`.

    Args:
        ready: gets the engine's facts, once.
        send: brings what is set to the workers.
    """

    def __init__(
        self, state: SteeringState, ready: Callable[[], None], send: Callable[[], object]
    ) -> None:
        self._state = state
        self._ready = ready
        self._send = send

    def set(
        self,
        vectors: Mapping[Any, Any] | None = None,
        prefill_vectors: Mapping[Any, Any] | None = None,
        decode_vectors: Mapping[Any, Any] | None = None,
        clamps: Mapping[Any, Any] | None = None,
        prefill_clamps: Mapping[Any, Any] | None = None,
        decode_clamps: Mapping[Any, Any] | None = None,
        *,
        positions: Any = None,
        replace: bool = False,
    ) -> None:
        """Steer all requests from now on.

        Args:
            vectors, clamps: in both phases; the `prefill_` and `decode_` forms in one.
            positions: tokens, for entries that say none (default: all).
            replace: forget what was set before. Otherwise only entries at the same hook point and
                layer, in the same tier, are replaced.

        Raises `ValueError` naming the field that is wrong; nothing has changed then.
        """
        given = _given(
            vectors, prefill_vectors, decode_vectors, clamps, prefill_clamps, decode_clamps
        )
        self._ready()
        self._state.set(given, positions, replace)
        self._send()

    def clear(self) -> None:
        """Stop steering globally. Registered modules stay."""
        self._state.clear()

    def status(self) -> dict[str, Any]:
        """What is set, which modules there are, and what is in use."""
        self._ready()
        return self._state.status()

    def layers(self) -> dict[str, Any]:
        """Where the model can be steered: its hook points, layers and hidden size."""
        self._ready()
        return self._state.layers()

    def register_module(self, name: str, spec: Any) -> None:
        """Give steering a name, for `SamplingParams(steering_module_ref=(name, scale))`.

        Args:
            spec: a vector spec, a mapping with any of the fields of `set`, or anything with a
                `to_spec()` that returns one. A name that exists is defined anew: requests that
                are added later get the new one.
        """
        self._ready()
        self._state.register_module(name, spec)

    def unregister_module(self, name: str) -> None:
        """Forget a module."""
        self._state.unregister_module(name)

    def modules(self) -> dict[str, dict[str, Any]]:
        """What each registered module does."""
        return self._state.modules()


class AsyncSteeringControl:
    """`SteeringControl` of an `AsyncLLM`: the same, to be awaited."""

    def __init__(
        self,
        state: SteeringState,
        ready: Callable[[], Awaitable[None]],
        send: Callable[[], Awaitable[object]],
    ) -> None:
        self._state = state
        self._ready = ready
        self._send = send

    @property
    def version(self) -> int:
        """Another number after each change of what is global, or of a module."""
        return self._state.version

    async def set(
        self,
        vectors: Mapping[Any, Any] | None = None,
        prefill_vectors: Mapping[Any, Any] | None = None,
        decode_vectors: Mapping[Any, Any] | None = None,
        clamps: Mapping[Any, Any] | None = None,
        prefill_clamps: Mapping[Any, Any] | None = None,
        decode_clamps: Mapping[Any, Any] | None = None,
        *,
        positions: Any = None,
        replace: bool = False,
    ) -> None:
        """As `SteeringControl.set`."""
        given = _given(
            vectors, prefill_vectors, decode_vectors, clamps, prefill_clamps, decode_clamps
        )
        await self._ready()
        self._state.set(given, positions, replace)
        await self._send()

    async def clear(self) -> None:
        """As `SteeringControl.clear`."""
        self._state.clear()

    async def status(self) -> dict[str, Any]:
        """As `SteeringControl.status`."""
        await self._ready()
        return self._state.status()

    async def layers(self) -> dict[str, Any]:
        """As `SteeringControl.layers`."""
        await self._ready()
        return self._state.layers()

    async def register_module(self, name: str, spec: Any) -> None:
        """As `SteeringControl.register_module`."""
        await self._ready()
        self._state.register_module(name, spec)

    async def unregister_module(self, name: str) -> None:
        """As `SteeringControl.unregister_module`."""
        self._state.unregister_module(name)

    async def modules(self) -> dict[str, dict[str, Any]]:
        """As `SteeringControl.modules`."""
        return self._state.modules()


def _given(*tiers: Mapping[Any, Any] | None) -> dict[str, Any]:
    """The fields that were given, by name."""
    names = (
        "vectors",
        "prefill_vectors",
        "decode_vectors",
        "clamps",
        "prefill_clamps",
        "decode_clamps",
    )
    return {name: tier for name, tier in zip(names, tiers, strict=True) if tier is not None}
