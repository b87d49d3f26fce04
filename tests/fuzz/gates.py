"""Conditions of steering: how they are drawn, and which scores lie on their edges."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from capture.truth import POINTS, WITHOUT_LAYER
from engine.reference import HIDDEN, LAYERS
from safetensors.torch import save_file

from fuzz.asks import Ask
from tllm.spec.selection import Selection

Places = list[tuple[str, int | None]]
IN_LAYERS: Places = [
    (point, layer) for layer in range(LAYERS) for point in POINTS if point not in WITHOUT_LAYER
]
PLACES: Places = [("embed", None), *IN_LAYERS, ("lm_head_in", None)]
"""In the order of the network."""

PROBES = [
    (np.random.default_rng(seed).standard_normal(HIDDEN) * 0.4).astype(np.float32)
    for seed in range(40, 45)
]
SMALL_MLPS: tuple[dict[str, Any], ...] = tuple(
    {
        "layers": [
            [np.stack(PROBES[:units]), np.linspace(-0.3, 0.3, units)],
            *([[np.eye(3, units) + 0.2, np.zeros(3)]] if deep else []),
            [np.array([[0.7, -0.7, 0.3, -0.2][: 3 if deep else units]]), [0.05]],
        ],
        "activation": activation,
    }
    for units, deep, activation in ((4, False, "relu"), (4, True, "gelu"), (3, True, "silu"))
)
"""Their scores are about as large as those of the probes."""
THRESHOLDS: Mapping[str, tuple[float, ...]] = {
    "dot": (-2.0, 0.1, 1.5),
    "cosine": (-0.06, 0.01, 0.07),
    "cast": (0.04, 0.1, 0.25),
    "feature": (0.3, 1.5, 4.0),
}
RARE: Mapping[str, tuple[float, ...]] = {
    "dot": (3.0, 6.0, 12.0, 30.0),
    "cosine": (0.1, 0.2, 0.3),
    "cast": (0.3, 0.5, 0.7),
}
"""Few rows of a prompt, or of an answer, have scores above these."""
BORDER: Mapping[str, float] = {"dot": 1e-4, "cosine": 2e-5, "cast": 2e-5}
"""Scores so near to an edge, relative to what is above 1, may fall on either side of it."""

SAE, SAE_PLACE, SAE_FEATURES = "sae", ("post_block", 2), 40
"""The autoencoder that every engine of the attack has; its features have no jumps."""


def save_autoencoder(folder: Path) -> Path:
    """Its file, as SAELens has it."""
    pick = np.random.default_rng(60)
    weights = {
        "W_enc": 0.2 * pick.standard_normal((HIDDEN, SAE_FEATURES)),
        "b_enc": pick.standard_normal(SAE_FEATURES),
        "W_dec": pick.standard_normal((SAE_FEATURES, HIDDEN)),
        "b_dec": 0.3 * pick.standard_normal(HIDDEN),
    }
    config = {
        "architecture": "standard",
        "d_in": HIDDEN,
        "d_sae": SAE_FEATURES,
        "dtype": "float32",
        "metadata": {"hook_name": f"blocks.{SAE_PLACE[1]}.hook_resid_post"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.from_numpy(array).float() for name, array in weights.items()}
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


MONITORS: Mapping[str, Mapping[str, Any]] = {
    "glad": {"probe": {"hook": "post_attn", "layer": 0, "vector": PROBES[0]}, "above": 0.2},
    "both": {
        "any": [
            "glad",
            {
                "probe": {"hook": "mlp_in", "layer": 0, "vector": PROBES[1], "score": "cosine"},
                "between": [-0.03, 0.05],
                "name": "term",
            },
        ]
    },
}
"""Monitors that every engine of the attack has, of layer 0."""

Edges = dict[str, list[tuple[float, float]]]
"""By the name of a signal, where its strength jumps, and the `BORDER` there; by "" for the signals
that have no name of their own."""


def _probe(pick: Random, before: Places, names: Iterator[str]) -> dict[str, Any]:
    """A condition on one probe, at one of the last of these places."""
    point, layer = pick.choice(before[-15:])
    score = pick.choice(["dot", "dot", "cosine", "cast"])
    probe: dict[str, Any] = {"hook": point, "vector": pick.choice(PROBES)}
    if layer is not None:
        probe["layer"] = pick.choice([layer, layer - LAYERS])
    if score != "dot" or pick.random() < 0.5:
        probe |= {"score": score, "bias": pick.choice([0.0, 0.02])}
    if score == "dot" and "bias" not in probe and pick.random() < 0.5:
        del probe["vector"]
        probe |= pick.choice(SMALL_MLPS)
    if SAE_PLACE in before and pick.random() < 0.2:
        score, probe = "feature", {"sae": SAE, "feature": pick.randrange(SAE_FEATURES)}
    low, middle, high = THRESHOLDS[score]
    side = pick.choice(["above", "below", "between", "soft"])
    when: dict[str, Any] = {"probe": probe}
    if side == "between":
        when["between"] = pick.choice([[low, high], [low, middle]])
    elif side == "soft":
        when |= {pick.choice(["above", "below"]): middle, "soft": pick.choice([0.3, 1.0])}
    else:
        when[side] = pick.choice([low, middle, high])
    return when | ({"name": next(names)} if pick.random() < 0.7 else {})


def _condition(pick: Random, before: Places, names: Iterator[str], depth: int = 0) -> Any:
    """A condition of any form, known once these places are computed."""
    chance = pick.random()
    if chance < 0.15 and ("mlp_in", 0) in before:
        return pick.choice([*MONITORS])
    if chance < 0.75 or depth == 2:
        return _probe(pick, before, names)
    terms = [_condition(pick, before, names, depth + 1) for _ in range(pick.randint(1, 3))]
    named = {"name": next(names)} if pick.random() < 0.7 else {}
    return {pick.choice(["all", "any"]): terms, **named}


def _remembering(pick: Random, field: str, places: Places, last: int, names: Iterator[str]) -> Any:
    """A condition that decides on other tokens than the one it is judged for, for an entry of this
    field at a place; None where there can be none. Nobody names a conversation: what is kept for
    later requests of one is as `rest`."""
    overs = [] if field.startswith("prefill") else ["prompt_last", "prompt_mean"]
    kind = pick.choice(["rest", "rest", "next", "conversation", *overs])
    alone = field.startswith("decode") or kind in overs
    # Tokens of a prompt pass a place together, and two places may be one tensor.
    before = places if alone else places[: max(0, last - 1)]
    # A monitor that remembers here and not there would be two signals of one name.
    before = [place for place in before if place != ("mlp_in", 0)]
    if not before:
        return None
    when = _condition(pick, before, names)
    if kind not in overs:
        return {**when, "scope": kind}
    scope = pick.choice([{}, {"scope": "rest"}, {"scope": "conversation"}])
    return {**when, "over": kind, **scope}


def gate(
    pick: Random,
    tier: dict[str, Any],
    names: Iterator[str],
    chance: float,
    points: Sequence[str] = POINTS,
    field: str = "",
) -> None:
    """Give entries of a tier conditions at these points, some the same.

    Args:
        field: the request's; without one no condition remembers.
    """
    known: list[tuple[int, Any]] = []
    places = [(point, layer) for point, layer in PLACES if point in points]
    for point, layers in tier.items():
        at = {None: [layers]} if point in WITHOUT_LAYER else layers
        for layer, entries in at.items():
            last = places.index((point, None if layer is None else layer % LAYERS))
            for entry in entries:
                if pick.random() > chance:
                    continue
                if field and pick.random() < 0.4 and not _of_prompt(entry):
                    when = _remembering(pick, field, places, last, names)
                    if when is not None and not _decides_on_none(entry, when):
                        entry["when"] = when
                        continue
                again = [when for place, when in known if place <= last]
                if not again or pick.random() < 0.7:
                    known.append((last, _condition(pick, places[: last + 1], names)))
                    again = [known[-1][1]]
                entry["when"] = pick.choice(again)


def _of_prompt(entry: Mapping[str, Any]) -> bool:
    """Whether it may be for tokens of the prompt alone."""
    where = entry.get("positions")
    return where is not None and "generation" not in Selection.parse(where).phases


def _decides_on_none(entry: Mapping[str, Any], when: Mapping[str, Any]) -> bool:
    """Whether a condition may decide on no token that its entry is for, and be refused."""
    listed = Selection.parse(entry.get("positions", "all")).single_tokens
    if listed is None or "over" in when or when["scope"] == "conversation":
        return False
    return len(listed) == 1 or when["scope"] == "next"


def remembers(options: Mapping[str, Any]) -> bool:
    """Whether any condition decides on other tokens than the one it is judged for."""
    given = conditions_in(options)
    return any(not isinstance(when, str) and {"scope", "over"} & {*when} for when in given)


def names_of(prefix: str) -> Iterator[str]:
    """Names that differ."""
    number = 0
    while True:
        number += 1
        yield f"{prefix}{number}"


def gate_all(pick: Random, ask: Ask) -> None:
    """Conditions in all tiers that a request brings."""
    names = names_of("gate")
    for name, tier in ask.options.items():
        if name.endswith(("vectors", "clamps")):
            gate(pick, tier, names, 0.7, ask.points, name)
    if pick.random() < 0.1:
        ask.consumers["signals"] = {"enabled": False}


def end_all(pick: Random, ask: Ask) -> None:
    """Conditions that end samples, or refuse the prompt; some hold for few rows only."""
    if ask.guided or any("stop" in name for name in ask.consumers):
        return
    names = names_of("end")
    places = [(point, layer) for point, layer in PLACES if point in ask.points]
    for field, chance in (("stop_when", 0.8), ("abort_when", 0.4)):
        if pick.random() > chance:
            continue
        given = [_ending(pick, places, names) for _ in range(pick.choice([1, 1, 2]))]
        ask.options[field] = given[0] if len(given) == 1 else given


def _ending(pick: Random, places: Places, names: Iterator[str]) -> Any:
    if pick.random() < 0.3:
        return _condition(pick, places, names)
    probe = _probe(pick, places[pick.randrange(len(places)) :], names)["probe"]
    edge = pick.choice(RARE[probe.get("score", "dot")])
    return {"probe": probe, "above": edge, "name": next(names)}


# -- where they jump -------------------------------------------------------------------------------


def conditions_in(given: Any) -> Iterator[Any]:
    """All conditions of entries, anywhere in what a request, or the engine, is given."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if key in ("when", "stop_when", "abort_when"):
                yield from value if isinstance(value, list) else [value]
            else:
                yield from conditions_in(value)
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from conditions_in(each)


def edges_of(conditions: Iterator[Any] | Sequence[Any], name: str = "") -> Edges:
    """Where the strengths of conditions, and of those that they join, jump."""
    found: Edges = {}
    for when in conditions:
        called = name
        if isinstance(when, str):
            when, called = MONITORS[when], when
        called = called or when.get("name", "")
        if "probe" not in when:
            more = edges_of(when.get("all") or when["any"])
        else:
            border = BORDER[when["probe"].get("score", "dot")]
            edges = when.get("between") or [when.get("above", when.get("below"))]
            more = {called: [(edge, border) for edge in edges]}
        for key, values in more.items():
            found.setdefault(key, []).extend(values)
    return found


def is_near(signals: Mapping[str, Any], edges: Edges) -> bool:
    """Whether a score lies so near to an edge that rounding decides, and with it all that follows.

    A signal that nobody named may be that of any condition without a name; conditions that judge
    alike are one, with the names that it has.
    """
    for name, signal in signals.items():
        scores = torch.from_numpy(np.asarray(signal.scores, np.float64))
        for edge, border in edges.get(name, edges.get("", [])):
            if bool(((scores - edge).abs() < border * scores.abs().clamp(min=1)).any()):
                return True
    return False
