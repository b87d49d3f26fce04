"""Patches: rows put in the place of a request's own."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
from capture.truth import POINTS, WITHOUT_LAYER
from engine.reference import HIDDEN, LAYERS, VOCAB

from fuzz.asks import Ask

ROWS = np.random.default_rng(50).standard_normal((6, HIDDEN)).astype(np.float32) * 3

MEAN = "average"
MEANS: Mapping[str, Any] = {
    point: ROWS[0] if point in WITHOUT_LAYER else {layer: ROWS[layer] for layer in range(LAYERS)}
    for point in POINTS
}
"""The rows that every engine of the attack keeps under `MEAN`."""

RUN, RUN_PROMPT = "story", [Random(51).randrange(1, VOCAB) for _ in range(40)]
"""And the run, with its prompt, at all places."""


def _source(pick: Random, count: int) -> dict[str, Any]:
    return pick.choice(
        [
            {"zero": True},
            {"tensor": ROWS[pick.randrange(6)]},
            {"tensor": ROWS[[pick.randrange(6) for _ in range(count)]].tolist()},
            {"mean": MEAN},
            {"noise": pick.choice([0.0, 0.5]), "seed": pick.randrange(3)},
            {"run": RUN, "positions": [pick.randrange(-40, 40) for _ in range(count)]},
        ]
    )


def _patch(pick: Random, ask: Ask) -> dict[str, Any]:
    """One entry."""
    length = len(ask.prompt)
    last = length + ask.options["max_tokens"] - 1
    positions = pick.sample(range(last), min(last, pick.randint(1, 5)))
    from_end = {at for at in positions if at < length and pick.random() < 0.5}
    positions = [at - length if at in from_end else at for at in positions]
    point = pick.choice(ask.points)
    entry = {"hook": point, "positions": positions, "source": _source(pick, len(positions))}
    if point not in WITHOUT_LAYER:
        entry["layer"] = pick.randrange(-LAYERS, LAYERS)
    if pick.random() < 0.4:
        entry["alpha"] = pick.choice([0.0, 0.3, -0.5])
    if pick.random() < 0.3:
        entry["mask"] = pick.sample(range(HIDDEN), 40)
    return entry


def patch(pick: Random, ask: Ask) -> None:
    """Some entries, which may be at one place."""
    ask.options["patch"] = [_patch(pick, ask) for _ in range(pick.randint(1, 3))]
