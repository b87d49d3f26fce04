"""What a request may ask. A row of `FEATURES` is a feature, and all rows are combined at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from capture.truth import POINTS, WITHOUT_LAYER
from engine.reference import HIDDEN, LAYERS, VOCAB
from oldest_vllm import ON_0_30
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from fuzz.asks import Ask
from fuzz.controllers import controlled, controllers, controllers_of_drafts
from fuzz.gates import SAE, end_all, gate_all, remembers
from fuzz.patches import patch
from tllm.spec.selection import Selection

VECTORS = [
    (np.random.default_rng(seed).standard_normal(HIDDEN) * 0.4).astype(np.float32)
    for seed in range(6)
]
"""As long as a row is, nearly: what is steered says something else."""

WITH_SEVERAL_VECTORS: tuple[dict[str, Any], ...] = (
    {"method": "rotate", "plane": np.stack(VECTORS[:2]), "degrees": 70.0, "strength": 0.6},
    {"method": "affine", "weight": 1 + 0.2 * VECTORS[2], "shift": 0.2 * VECTORS[3]},
    {"method": "scale_dimensions", "mask": (VECTORS[4] > 0.4).astype(np.float32), "scale": -0.5},
    {
        "method": "low_rank",
        "rotation": np.stack(VECTORS[2:5]) / 4.5,
        "weight": np.stack(VECTORS[:3]) / 20,
        "bias": np.array([1.0, -1.0, 0.5], np.float32),
    },
    {
        "method": "sae_features",
        "encoder": np.stack(VECTORS[3:5]) / 4.5,
        "decoder": np.stack(VECTORS[:2]),
        "value": np.array([0.5, 0.0], np.float32),
    },
    {
        "method": "sae_features",
        "encoder": np.stack(VECTORS[2:5]) / 4.5,
        "decoder": np.stack(VECTORS[:3]),
        "encoder_bias": np.array([0.5, -0.5, 0.1], np.float32),
        "decoder_bias": 0.1 * VECTORS[5],
        "min": np.array([0.2, 0.0, 0.1], np.float32),
        "max": np.array([1.0, 0.5, 0.1], np.float32),
        "strength": 0.7,
    },
    {
        "method": "k_steering",
        "weight1": np.stack(VECTORS[:3]),
        "bias1": np.array([1e3, -1e3, 1e3], np.float32),
        "last_weight": np.array([[0.5, 1.0, -0.3], [-0.2, 0.4, 0.6]], np.float32),
        "target": [0],
        "avoid": [1],
    },
)
"""Entries of methods that take more than one vector; none of them jumps at an edge."""

MODULES: Mapping[str, Mapping[str, Any]] = {
    "calm": {"vectors": {"post_block": {1: VECTORS[0]}}},
    "late": {
        "decode_vectors": {"mlp_out": {-1: {"vector": VECTORS[1], "method": "norm_match"}}},
        "clamps": {"pre_attn": {2: {"vector": VECTORS[2], "max": 0.5}}},
    },
    "gated": {
        "vectors": {
            "post_block": {0: {"vector": VECTORS[3], "when": "both"}},
            "mlp_out": {2: {"vector": VECTORS[4], "method": "ablate", "when": "glad"}},
        },
    },
}
"""Modules that every engine of the attack has."""


# -- which tokens --------------------------------------------------------------------------------


def _indices(pick: Random, ask: Ask) -> list[int]:
    low, high = -len(ask.prompt), len(ask.prompt) + ask.options["max_tokens"] - 1
    return pick.sample(range(low, high), min(high - low, pick.randint(1, 6)))


def _ranges(pick: Random, ask: Ask) -> dict[str, Any]:
    start = pick.randrange(len(ask.prompt) + 3)
    stop = pick.choice([None, start + pick.randint(1, 9)])
    return {
        "ranges": [[start, stop], [-pick.randint(1, len(ask.prompt)), None]][: pick.randint(1, 2)]
    }


def _windows(pick: Random, ask: Ask) -> dict[str, Any]:
    start = pick.randrange(4)
    phase = pick.choice(["any", "prompt", "generation"])
    return {"phase": phase, "windows": [[start, start + pick.randint(1, 5)]]}


def _tokens(pick: Random, ask: Ask) -> dict[str, Any]:
    phase = pick.choice(["any", "prompt", "generation"])
    return {"phase": phase, "token_ids": pick.sample(range(VOCAB), VOCAB // 3)}


def _all_but(pick: Random, ask: Ask) -> dict[str, Any]:
    beyond = len(ask.prompt) + 1000
    return {"exclude": {"positions": [*_indices(pick, ask), beyond], "ranges": [[0, 2]]}}


POSITIONS: tuple[Callable[[Random, Ask], Any], ...] = (
    lambda pick, ask: "all",
    lambda pick, ask: "all_prompt",
    lambda pick, ask: "all_generated",
    lambda pick, ask: "last_prompt",
    _indices,
    _ranges,
    _windows,
    _tokens,
    _all_but,
)


def positions(pick: Random, ask: Ask) -> Any:
    """A selection, in any of its forms."""
    return pick.choice(POSITIONS)(pick, ask)


# -- captures ------------------------------------------------------------------------------------


def _layers(pick: Random) -> Any:
    return pick.choice(["all", [pick.randrange(LAYERS)], [-1, 0], "1:3", [2, pick.choice([0, 1])]])


def _capture(pick: Random, ask: Ask) -> dict[str, Any]:
    points = pick.sample(ask.points, pick.randint(1, 3))
    return {
        "hooks": {p: "all" if p in WITHOUT_LAYER else _layers(pick) for p in points},
        "positions": positions(pick, ask),
        "reduction": pick.choice(["none", "none", "mean", "max", "last"]),
        "dtype": pick.choice(["model", "model", "float32", "float16"]),
    }


def _memory(pick: Random, ask: Ask) -> None:
    ask.options.setdefault("capture", {})["memory"] = _capture(pick, ask)


def _filesystem(pick: Random, ask: Ask) -> None:
    layout = pick.choice(["per_file", "packed", "sharded"])
    asked = _capture(pick, ask) | {"layout": layout, "metadata": {"n": [1, {"a": None}]}}
    ask.options.setdefault("capture", {})["filesystem"] = asked


def _overlap(pick: Random, ask: Ask) -> None:
    """Two captures of the same points, of tokens that overlap in part."""
    hooks = _capture(pick, ask)["hooks"]
    for name, reduction in (
        ("memory", pick.choice(["last", "mean", "none"])),
        ("filesystem", "none"),
    ):
        both = {"hooks": hooks, "positions": positions(pick, ask), "reduction": reduction}
        ask.options.setdefault("capture", {})[name] = both


# -- steering ------------------------------------------------------------------------------------


def _steers(field: str, where: Any) -> bool:
    """Whether a field steers any token at these positions; it is refused where it does not."""
    phases = Selection.parse(where).phases
    kind = {"prefill": {"prompt"}, "decode": {"generation"}}.get(field.split("_")[0], phases)
    return bool(kind & phases)


def _entry(pick: Random, ask: Ask, field: str) -> dict[str, Any]:
    vector, clamp = pick.choice(VECTORS), "clamps" in field
    entries: list[dict[str, Any]] = (
        [{"min": -0.5, "max": 0.5}, {"value": 1.0, "strength": 0.5}, {"max": 0.0}]
        if clamp
        else [
            {"scale": pick.choice([0.5, -1.0, 0.0])},
            {"method": "norm_match", "scale": 0.1},
            {"method": "ablate"},
            {"method": "project", "value": 2.0},
            {"method": "multiply", "factor": pick.choice([0.0, 2.0])},
            {"method": "clamp", "max": 1.0},
        ]
    )
    entry = {"vector": vector, **pick.choice(entries)}
    if not clamp and pick.random() < 0.3:
        entry = dict(pick.choice(WITH_SEVERAL_VECTORS))
    if pick.random() < 0.5:
        return entry
    if len(ask.selections) < 3:  # more ways of choosing tokens than an engine takes are refused
        ask.selections.append(positions(pick, ask))
    where = pick.choice(ask.selections)
    return entry | {"positions": where} if _steers(field, where) else entry


def tier(pick: Random, ask: Ask, field: str = "steering_vectors") -> dict[str, Any]:
    """Entries at one or two hook points."""
    points = pick.sample(
        [point for point in ask.points if point not in WITHOUT_LAYER], pick.randint(1, 2)
    )
    found: dict[str, Any] = {}
    for point in points:
        entries = [_entry(pick, ask, field) for _ in range(pick.randint(1, 2))]
        found[point] = {pick.randrange(-LAYERS, LAYERS): entries}
    if pick.random() < 0.2:
        found[pick.choice(WITHOUT_LAYER)] = _entry(pick, ask, field)
    return found


def _steer(field: str) -> Callable[[Random, Ask], None]:
    def draw(pick: Random, ask: Ask) -> None:
        ask.options[field] = tier(pick, ask, field)

    return draw


def _module(pick: Random, ask: Ask) -> None:
    ask.options["steering_module_ref"] = pick.choice(
        ["calm", "gated", ("gated", -0.5), ["late", ("calm", 2)], ["gated", ("late", 0.0)]]
    )


def _where(pick: Random, ask: Ask) -> None:
    if ask.steered and not remembers(ask.options):  # which may be refused for a prompt's tokens
        where = positions(pick, ask)
        if all(_steers(field, where) for field in ask.options):
            ask.options["steering_positions"] = where


# -- consumers -----------------------------------------------------------------------------------


def _esamp(pick: Random, ask: Ask) -> None:
    if ask.steered or ask.patched:  # its rows are compared as those of a prompt, where it is not so
        return
    ask.consumers["esamp"] = pick.choice(
        [{}, {"beta": 1.0}, {"beta": 0.0}, {"group": "shared"}, {"train": False}]
    )
    ask.guided = True


def _probe(pick: Random, ask: Ask) -> None:
    ask.consumers["probe"] = {}


def _features(pick: Random, ask: Ask) -> None:
    ask.consumers[SAE] = pick.choice([{}, {"top_k": 2}])


def _unlogged(pick: Random, ask: Ask) -> None:
    ask.consumers["logging"] = {"enabled": False}


# -- sampling ------------------------------------------------------------------------------------


def _option(**choices: list[Any]) -> Callable[[Random, Ask], None]:
    """One of the values of each of these options of vLLM."""

    def draw(pick: Random, ask: Ask) -> None:
        ask.options |= {name: pick.choice(values) for name, values in choices.items()}

    return draw


def _samples(pick: Random, ask: Ask) -> None:
    ask.options |= {"temperature": 0.9, "n": pick.choice([1, 2, 3]), "seed": pick.randrange(10**6)}


def _stop(pick: Random, ask: Ask) -> None:
    ask.options["ignore_eos"] = False
    ask.options["stop_token_ids"] = pick.sample(range(1, VOCAB), VOCAB // 4)
    ask.options["min_tokens"] = pick.randint(0, ask.options["max_tokens"])


def _strings(pick: Random, ask: Ask) -> None:
    letters = "!#$%&()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    ask.options["detokenize"] = True
    ask.options["stop"] = pick.sample(letters, 20)
    ask.options["include_stop_str_in_output"] = pick.choice([True, False])


def _structured(pick: Random, ask: Ask) -> None:
    if ask.options.keys() & {"allowed_token_ids", "logit_bias", "stop_token_ids", "stop"}:
        return  # no token might be left
    ask.options["ignore_eos"] = False
    ask.options["structured_outputs"] = pick.choice(
        [
            StructuredOutputsParams(regex="[a-f]{2,9}"),
            StructuredOutputsParams(choice=["yes", "no", "not yet"]),
            StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}}),
        ]
    )


def _bias(pick: Random, ask: Ask) -> None:
    tokens = pick.sample(range(1, VOCAB), 8)
    ask.options["logit_bias"] = {token: pick.choice([-4.0, 4.0]) for token in tokens}


def _drafted(pick: Random, ask: Ask) -> None:
    """Few tokens, of which n-grams come again. vLLM 0.32 keeps the tokens that end a sequence from
    the one behind accepted drafts, also where these are `min_tokens` already."""
    ask.options.pop("min_tokens", None)
    if pick.random() < 0.8:
        ask.options["allowed_token_ids"] = pick.choice([[3, 5], [2, 3, 4, 7, 11]])


def _priority(pick: Random, ask: Ask) -> None:
    ask.priority = pick.randint(-3, 3)


def _kind(pick: Random, ask: Ask) -> None:
    ask.options["output_kind"] = pick.choice(list(RequestOutputKind))


def _streamed(pick: Random, ask: Ask) -> None:
    """The prompt in parts, each answered by one token, which the next part takes the place of: the
    whole is as if it had been given at once. So which tokens are meant must not depend on where the
    prompt ends, and what vLLM cannot do of streamed prompts is not asked. Nor is a seed: vLLM's V1
    runner draws the answers to all parts from one generator, with or without us."""
    impossible = {"stop", "structured_outputs", "prompt_logprobs", "steering_positions", "patch"}
    impossible |= {"stop_when", "abort_when"}
    phases = any(name.startswith(("prefill", "decode")) for name in ask.options)
    if (
        remembers(ask.options)
        or controlled(ask)
        or ask.options.keys() & impossible
        or ask.options.get("n", 1) > 1
        or ask.selections
        or phases
    ):
        return
    if ask.options.pop("seed", None) is not None:
        ask.options["temperature"] = 0.0
    ask.parts = pick.randint(2, 3)
    if ask.options.get("output_kind", RequestOutputKind.FINAL_ONLY) == RequestOutputKind.FINAL_ONLY:
        ask.options["output_kind"] = RequestOutputKind.CUMULATIVE
    for capture in ask.captures.values():
        capture["positions"] = pick.choice(["all", "all_prompt", "all_generated", [0, 1]])


def _cancel(pick: Random, ask: Ask) -> None:
    ask.abort_after = pick.randint(1, 5)
    ask.cancel = pick.choice(["abort", "leave", "task"])


def _abort(pick: Random, ask: Ask) -> None:
    ask.abort_after = pick.randint(1, 12)


SHARED = 0.2
"""How likely a request has the same parameters as the one before."""

Kind = Literal[
    "any", "seeded", "priority", "text", "structured", "served", "abort", "drafted", "undrafted"
]


@dataclass(frozen=True)
class Feature:
    """Something that a request may ask.

    Attributes:
        chance: how likely a request has it.
        draw: puts it into a request.
        needs: what the engine must allow: seeds, priorities, text, structured outputs, streams,
            aborts, what is (or is not) done where tokens are drafted, or nothing in particular.
    """

    name: str
    chance: float
    draw: Callable[[Random, Ask], None]
    needs: Kind = "any"


FEATURES: tuple[Feature, ...] = (
    Feature("samples", 0.6, _samples, needs="seeded"),
    Feature(
        "truncated",
        0.3,
        _option(top_k=[0, 5, 40], top_p=[1.0, 0.9], min_p=[0.0, 0.05]),
        needs="undrafted",
    ),
    Feature("stop", 0.3, _stop),
    Feature(
        "penalties",
        0.2,
        _option(
            presence_penalty=[0.0, 0.5],
            frequency_penalty=[-0.2, 0.3],
            repetition_penalty=[0.9, 1.2],
        ),
    ),
    Feature("bias", 0.15, _bias, needs="undrafted"),
    Feature(
        "allowed",
        0.0 if ON_0_30 else 0.1,  # there who comes later is held to it
        _option(allowed_token_ids=[list(range(5, 90)), list(range(40, 250))]),
    ),
    Feature("drafted", 1.0, _drafted, needs="drafted"),
    Feature("strings", 0.2, _strings, needs="text"),
    Feature("structured", 0.5, _structured, needs="structured"),
    Feature("logprobs", 0.15, _option(logprobs=[0, 3])),
    Feature("prompt_logprobs", 0.05, _option(prompt_logprobs=[1])),
    Feature("priority", 0.5, _priority, needs="priority"),
    Feature("memory", 0.5, _memory),
    Feature("filesystem", 0.35, _filesystem),
    Feature("overlap", 0.2, _overlap),
    Feature("vectors", 0.3, _steer("steering_vectors")),
    Feature("prefill_vectors", 0.1, _steer("prefill_steering_vectors")),
    Feature("decode_vectors", 0.15, _steer("decode_steering_vectors")),
    Feature("clamps", 0.15, _steer("steering_clamps")),
    Feature("prefill_clamps", 0.05, _steer("prefill_steering_clamps")),
    Feature("decode_clamps", 0.05, _steer("decode_steering_clamps")),
    Feature("gates", 0.6, gate_all),
    Feature("module", 0.2, _module),
    Feature("where", 0.2, _where),
    Feature("patches", 0.25, patch),
    Feature("esamp", 0.2, _esamp, needs="undrafted"),
    Feature("esamp", 0.03, _esamp, needs="drafted"),  # beside it nothing is drafted
    Feature("controllers", 0.25, controllers, needs="undrafted"),
    Feature("controllers", 0.25, controllers_of_drafts, needs="drafted"),
    Feature("endings", 0.25, end_all),
    Feature("probe", 0.3, _probe),
    Feature("features", 0.2, _features),
    Feature("unlogged", 0.3, _unlogged),
    Feature("abort", 0.08, _abort, needs="abort"),
    Feature("kind", 0.7, _kind, needs="served"),
    Feature("streamed", 0.6, _streamed, needs="served"),
    Feature("cancel", 0.15, _cancel, needs="served"),
)


def draw(pick: Random, allowed: frozenset[str], points: Sequence[str] = POINTS) -> Ask:
    """A random request for an engine that allows these kinds of features, and has these points."""
    length = pick.choice([1, 2, pick.randint(3, 12), pick.randint(13, 40), pick.randint(41, 90)])
    ask = Ask([pick.randrange(1, VOCAB) for _ in range(length)], points=points)
    ask.options = {
        "temperature": 0.0,
        "max_tokens": pick.choice([1, 2, 5, pick.randint(6, 20)]),
        "ignore_eos": True,
        "detokenize": False,
        "consumers": {"probe": {"enabled": False}},
    }
    ask.consumers["esamp"] = {"enabled": False}
    for feature in FEATURES:
        if feature.needs in ("any", *allowed) and pick.random() < feature.chance:
            feature.draw(pick, ask)
            ask.drawn.append(feature.name)
    return ask


def draw_together(
    pick: Random, allowed: frozenset[str], count: int, points: Sequence[str] = POINTS
) -> list[Ask]:
    """Random requests, some of which share their parameters with another."""
    asks = [draw(pick, allowed, points) for _ in range(count)]
    for number in range(1, count):
        if pick.random() < SHARED:
            asks[number] = asks[number - 1].twin(pick)
    return asks
