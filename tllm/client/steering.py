"""Global steering, modules, monitors and conversations, as the user has them in hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tllm.client.calls import Steps, WorkerCall
from tllm.client.composer import GLOBAL, MODULE, MONITOR
from tllm.spec.conditions import condition_described
from tllm.spec.groups import compose
from tllm.spec.tiers import TIER_FIELDS, Tiers

if TYPE_CHECKING:
    from tllm.client.attached import Client


class SteeringControl:
    """Global steering of an engine: it applies to every request that is added from then on.

    A request keeps what was set when it was added. Vector specs are as `SamplingParams` takes them:
    `{hook: {layer: vector | {"vector": ..., "scale": ..., "method": ..., "positions": ...}}}`.
    What is set belongs to the engine: every front end that shares its workers has it.

    On an `AsyncLLM` every method is to be awaited.
    """

    def __init__(self, client: Client, run: Callable[[Steps[Any]], Any]) -> None:
        self._client = client
        self._registered = client.registered
        self._run = run

    @property
    def version(self) -> int:
        """Another number after each change of what is global, of a module or a monitor, and of the
        model's weights: kept answers of another one are not given."""
        return self._registered.steering_version

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
    ) -> Any:
        """Steer all requests from now on.

        Args:
            vectors, clamps: in both phases; the `prefill_` and `decode_` forms in one.
            positions: tokens, for entries that say none (default: all).
            replace: forget what was set before. Otherwise only entries at the same hook point and
                layer, in the same tier, are replaced.

        Raises `ValueError` naming the field that is wrong; nothing has changed then.
        """
        tiers = (vectors, prefill_vectors, decode_vectors, clamps, prefill_clamps, decode_clamps)
        named = zip(TIER_FIELDS, tiers, strict=True)
        given = {name: tier for name, tier in named if tier is not None}
        composer = self._registered.composer
        merged = partial(composer.with_more, given, positions, replace)

        def bring(tiers: Tiers) -> Steps[None]:
            """What the workers have no room for would be refused with every request."""
            return self._client.uploads.bring(compose([tiers]))

        return self._run(self._registered.change(GLOBAL, merged, bring))

    def clear(self) -> Any:
        """Stop steering globally. Registered modules stay."""
        return self._run(self._registered.change(GLOBAL, lambda: None))

    def status(self) -> Any:
        """What is set, which modules there are, and what is in use."""

        def steps() -> Steps[dict[str, Any]]:
            yield from self._registered.current()
            vectors = yield WorkerCall("vectors_on_device")
            composer, facts = self._registered.composer, self._registered.facts
            return {
                "enabled": facts.max_configs > 0,
                "global": _described(composer.everywhere),
                "modules": sorted(composer.modules),
                "monitors": sorted(composer.monitors),
                "vectors_on_device": vectors[0],
                "requests": self._client.held.num_requests,
                "max_steering_configs": facts.max_configs,
                "max_steering_mib": facts.max_mib,
            }

        return self._run(steps())

    def layers(self) -> Any:
        """Where the model can be steered: its hook points, layers and hidden size."""

        def described() -> dict[str, Any]:
            facts = self._registered.facts
            sizes = {"hidden_size": facts.hidden_size, "row_bytes": facts.row_bytes}
            return {**sizes, **facts.points.described()}

        return self._run(self._known(described))

    def register_module(self, name: str, spec: Any) -> Any:
        """Give steering a name, for `SamplingParams(steering_module_ref=(name, scale))`.

        Args:
            name: 1 to 256 printable characters, without spaces at the ends.
            spec: a vector spec, a mapping with any of the fields of `set`, or anything with a
                `to_spec()` that returns one, and perhaps `num_layers`, which must be the model's
                then. A name that exists is defined anew: requests that are added later get the new
                one.
        """
        made = partial(self._registered.composer.module_of, name, spec)
        return self._run(self._registered.change(f"{MODULE}{name}", made))

    def unregister_module(self, name: str) -> Any:
        """Forget a module; requests that run keep it."""

        def removed() -> None:
            self._registered.composer.module(name, "")

        return self._run(self._registered.change(f"{MODULE}{name}", removed))

    def modules(self) -> Any:
        """What each registered module does."""
        modules = self._registered.composer.modules
        return self._run(
            self._known(lambda: {name: _described(tiers) for name, tiers in modules.items()})
        )

    def register_monitor(self, name: str, condition: Any) -> Any:
        """Give a condition a name, for entries of steering that say `"when": name`.

        Args:
            name: as of a module.
            condition: `{"probe": {"hook", "layer", "vector", "bias", "score"}, "above": 0.5}` or
                another that an entry's `when` may be. A name that exists is defined anew: what
                steers already keeps the old one, and so do modules and global steering, which have
                it as it was when they were set.
        """
        made = partial(self._registered.composer.monitor_of, name, condition)
        return self._run(self._registered.change(f"{MONITOR}{name}", made))

    def unregister_monitor(self, name: str) -> Any:
        """Forget a monitor; what steers with it keeps it."""

        def removed() -> None:
            self._registered.composer.check_monitor(name)

        return self._run(self._registered.change(f"{MONITOR}{name}", removed))

    def monitors(self) -> Any:
        """What each registered monitor judges."""
        monitors = self._registered.composer.monitors
        return self._run(
            self._known(
                lambda: {name: condition_described(each) for name, each in monitors.items()}
            )
        )

    def conversations(self) -> Any:
        """The conversations that conditions are remembered for (`scope: "conversation"`), by id:
        when each `begun` (seconds since the epoch), `expires_in_s`, and its `requests` so far."""

        def steps() -> Steps[dict[str, dict[str, Any]]]:
            answers = yield from self._registered.ask(WorkerCall("conversations", (time.time(),)))
            return dict(answers[0])

        return self._run(steps())

    def forget_conversation(self, name: str) -> Any:
        """Forget a conversation: a request that names its id begins another one. Requests of it
        that run go on as they began, and nothing is remembered of them.

        Raises `ValueError` for one that is not there.
        """

        def steps() -> Steps[None]:
            call = WorkerCall("forget_conversation", (name, time.time()))
            answers = yield from self._registered.ask(call)
            if not answers[0]:
                raise ValueError(
                    f"no conversation {name!r:.80} is remembered; llm.steering.conversations(), or "
                    "GET /v1/steering/conversations, says which are"
                )

        return self._run(steps())

    def _known(self, tell: Callable[[], dict[str, Any]]) -> Steps[dict[str, Any]]:
        """What `tell` gives when everything that is registered is known."""
        yield from self._registered.current()
        return tell()


def _described(tiers: Tiers) -> dict[str, Any]:
    """Tiers for people: which hooks and layers, and how long the vectors are."""
    described: dict[str, Any] = {}
    for kind, phases in (("vectors", tiers.vectors), ("clamps", tiers.clamps)):
        for phase, entries in phases.items():
            name = kind if phase == "any" else f"{phase}_{kind}"
            places = described.setdefault(name, {})
            for entry in entries:
                hook = places.setdefault(entry.point.value, {})
                told = {
                    "norm": float(np.linalg.norm(entry.vector)),
                    "coefficients": dict(vars(entry.coefficients)),
                    "positions": entry.positions.to_wire(),
                }
                if entry.when is not None:
                    told["when"] = condition_described(entry.when)
                hook.setdefault(entry.layer, []).append(told)
    return described
