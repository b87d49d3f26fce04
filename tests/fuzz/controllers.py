"""Controllers: what they are asked to do is drawn, and the same is said by conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from capture.truth import WITHOUT_LAYER
from engine.reference import LAYERS

from fuzz.asks import Ask
from fuzz.gates import PROBES, THRESHOLDS
from tllm.consumers.base import Consumer
from tllm.ports import Actions, ConsumerFlow, Note, ResidualStream, Steer, Stop, Window


class Controller(Consumer):
    """Notes the score of each row of a generated token, and acts where it is above a threshold.

    Args:
        does: how it acts.
        window: of those in which it can, the one in which a condition can do the same.
        site, layer: which rows it is given.
    """

    on_request_only = True

    def __init__(
        self, does: Literal["steer", "stop", "note"], window: Window, site: str, layer: int
    ) -> None:
        self.consumer_id = f"controller that may {does}"
        self.does = does
        self.place = site, layer
        self._window = window

    def flows(self) -> list[ConsumerFlow]:
        """One."""
        site, layer = self.place
        read = ResidualStream.read(layer=layer, site=site, phase="decode", role="h")
        write = Actions.write(*dict.fromkeys((self.does, "note")))
        return [ConsumerFlow(reads=[read], writes=[write], window=self._window)]

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """They are drawn."""

    def decide(self, rows: Any, ctx: Any) -> Iterator[Any]:
        """Row by row."""
        states, positions = rows.entries["h"].float().cpu(), rows.meta.positions.tolist()
        for request, position, state in zip(rows.owners, positions, states, strict=True):
            asked = request.options
            score = float(state @ torch.from_numpy(PROBES[asked["probe"]]))
            yield Note(request, {"at": position, "score": score})
            if score <= asked["above"]:
                continue
            if self.does == "stop":
                yield Stop(request, reason=self.consumer_id)
            elif self.does == "steer":
                yield Steer(request, _tier(asked), tokens=asked["tokens"])


def made() -> list[Controller]:
    """What every engine of the attack has."""
    return [
        Controller("steer", "next_step", "post_block", 1),
        Controller("stop", "same_step", "mlp_out", 2),
        Controller("note", "background", "attn_in", 3),
    ]


CONTROLLERS: Mapping[str, Controller] = {each.consumer_id: each for each in made()}


def controllers(pick: Random, ask: Ask) -> None:
    """What a request asks of one or two of them."""
    _ask(pick, ask, [*CONTROLLERS])


def controllers_of_drafts(pick: Random, ask: Ask) -> None:
    """The same, of those that do as a condition does where tokens are drafted: what steers begins
    with the next pass, which may be some tokens later."""
    _ask(pick, ask, [name for name, each in CONTROLLERS.items() if each.does != "steer"])


def _ask(pick: Random, ask: Ask, names: list[str]) -> None:
    if ask.guided:  # its rows are compared as those of a prompt
        return
    free = _free_places(ask)
    for name in pick.sample(names, pick.randint(1, 2)):
        does = CONTROLLERS[name].does
        # The selection of a request is none of a controller's; and it does not forget a stop that
        # came before there were tokens enough, as a condition does.
        if does == "steer" and (not free or "steering_positions" in ask.options):
            continue
        if does == "stop" and ask.options.get("min_tokens"):
            continue
        ask.consumers[name] = {
            "probe": pick.randrange(len(PROBES)),
            "above": pick.choice(THRESHOLDS["dot"]),
        }
        if does == "steer":
            ask.consumers[name] |= {
                "at": pick.choice(free),
                "vector": pick.randrange(len(PROBES)),
                "tokens": pick.choice([None, 1]),
            }


def controlled(ask: Ask) -> dict[str, dict[str, Any]]:
    """What a request asks of each controller that it uses."""
    return {name: asked for name, asked in ask.consumers.items() if name in CONTROLLERS}


def _free_places(ask: Ask) -> list[tuple[str, int | None]]:
    """Where the request steers nothing itself: what a controller steers is done after all else."""
    taken = set()
    for name, tier in ask.options.items():
        if name.endswith(("vectors", "clamps")):
            for point, layers in tier.items():
                at = [None] if point in WITHOUT_LAYER else [layer % LAYERS for layer in layers]
                taken.update((point, layer) for layer in at)
    places = [(p, n) for p in ask.points for n in ([None] if p in WITHOUT_LAYER else range(LAYERS))]
    return [place for place in places if place not in taken]


def _tier(asked: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    point, layer = asked["at"]
    entry = {"vector": PROBES[asked["vector"]], "scale": 0.7, **more}
    return {point: entry if layer is None else {layer: entry}}


def declared(ask: Ask) -> dict[str, Any]:
    """Options of `SamplingParams` that say by conditions what controllers do."""
    found: dict[str, Any] = {}
    for name, asked in controlled(ask).items():
        site, layer = CONTROLLERS[name].place
        probe = {"hook": site, "layer": layer, "vector": PROBES[asked["probe"]]}
        when: dict[str, Any] = {"probe": probe, "above": asked["above"], "name": name}
        if CONTROLLERS[name].does == "stop":
            found["stop_when"] = when
        elif CONTROLLERS[name].does == "steer":
            when["scope"] = "next" if asked["tokens"] else "rest"
            tier = found["decode_steering_vectors"] = dict(
                ask.options.get("decode_steering_vectors", {})
            )
            for point, at in _tier(asked, when=when).items():
                tier[point] = at if point in WITHOUT_LAYER else {**tier.get(point, {}), **at}
    return found


def wrong_about(name: str, ask: Ask, completion: Any, alone: Any) -> str | None:
    """What is wrong about the rows that a controller was given of a sample; None for nothing."""
    result = completion.consumer_results.get(name)
    if result is not None and (result.status, result.error) != ("ok", None):
        return f"{name!r} is {result.status}: {result.error}"
    notes = [] if result is None else result.payload.notes
    found, scores = [note["at"] for note in notes], [note["score"] for note in notes]
    first = len(ask.prompt)
    if name not in alone.signals:
        # The row of the last token is there only where something that was seen in it is the end.
        stopped = completion.stop_reason in {*CONTROLLERS, *alone.signals}
        expected, wanted = list(range(first, len(alone.tokens) - (not stopped))), scores
    else:
        signal = alone.signals[name]
        generated = signal.positions >= first
        expected, wanted = signal.positions[generated].tolist(), signal.scores[generated]
    if found != expected:
        return f"{name!r} was given the rows {found}, and should have been {expected}"
    if not np.allclose(scores, wanted, rtol=1e-4, atol=1e-3):
        return f"{name!r} noted the scores {scores}, and a condition {wanted}"
    return None
