"""Conditions as users write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tllm.spec.conditions import (
    Condition,
    Edges,
    FeatureCondition,
    JointCondition,
    NamedCondition,
    ProbeCondition,
)
from tllm.spec.layers import layer_at
from tllm.spec.memory import Memory
from tllm.spec.probes import SCORES, MlpProbe
from tllm.spec.reading import (
    FloatArray,
    allow_keys,
    check_64_bits,
    check_text,
    float_array,
    hook_named,
    own_numbers,
    require_one_of,
    scalar,
)

_DEEPEST = 8
_LONGEST = 1e18
"""Of a probe's vector: a score beyond float32 is no number, and holds nowhere."""
_RANGES = ("above", "below", "between")


def parse_condition(given: Any, field: str, depth: int = 0) -> Condition:
    """A condition from what users write; `ValueError` naming the field that is wrong."""
    if isinstance(given, str):
        if not given:
            raise ValueError(f"{field} is empty; give the name of a registered monitor")
        return NamedCondition(field, given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{field}={given!r:.60} is {type(given).__name__}; give the name of a registered "
            "monitor, or a mapping with 'probe' and any of above, below, between"
        )
    memory = Memory.parse(given, field, joined=depth > 0)
    kinds = [kind for kind in ("probe", "all", "any") if given.get(kind) is not None]
    if len(kinds) != 1:
        raise ValueError(f"{field} has {kinds or 'none'} of probe, all and any; give one of them")
    name = given.get("name", "")
    if not isinstance(name, str) or ("name" in given and not name):
        raise ValueError(f"{field}['name']={name!r} is no name; give a text that is not empty")
    name = check_text(name, f"{field}['name']")
    if kinds == ["probe"]:
        return _probe_condition(given, field, name, memory)
    [kind] = kinds
    allow_keys(given, {kind, "name", "scope", "over"}, field, f"a condition with {kind!r}")
    terms = given[kind]
    if isinstance(terms, (str, Mapping)) or not isinstance(terms, Sequence) or not terms:
        raise ValueError(f"{field}[{kind!r}] is {terms!r:.60}; give a list of conditions")
    if depth == _DEEPEST:
        raise ValueError(f"{field} joins conditions more than {_DEEPEST} levels deep")
    parsed = [
        parse_condition(term, f"{field}[{kind!r}][{i}]", depth + 1) for i, term in enumerate(terms)
    ]
    return JointCondition(field, name, tuple(parsed), kind == "all", memory)


def parse_conditions(given: Any, field: str) -> tuple[Condition, ...]:
    """One condition or a list of them, any of which decides; `ValueError` as `parse_condition`."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        return (parse_condition(given, field),)
    if not given:
        raise ValueError(f"{field} is an empty list; give a condition, or leave it out")
    return tuple(parse_condition(each, f"{field}[{i}]") for i, each in enumerate(given))


def _probe_condition(
    given: Mapping[str, Any], field: str, name: str, memory: Memory
) -> ProbeCondition | FeatureCondition:
    allow_keys(given, {"probe", "name", "scope", "over", "soft", *_RANGES}, field, "a condition")
    probe = given["probe"]
    if not isinstance(probe, Mapping):
        raise ValueError(
            f"{field}['probe'] is {type(probe).__name__}; give a mapping with hook, layer and "
            "vector, or with hook, layer and layers, or with sae and feature"
        )
    inner = f"{field}['probe']"
    if probe.get("sae") is not None:
        return _feature_condition(given, field, name, memory)
    mlp = MlpProbe.parse(probe, inner) if probe.get("layers") is not None else None
    if mlp is None:
        allow_keys(probe, {"hook", "layer", "vector", "bias", "score"}, inner, "a probe")
    else:
        allow_keys(probe, _OF_MLPS, inner, "a probe that is a small MLP")
    for key in ("hook", "vector"):
        if probe.get(key) is None and (mlp is None or key == "hook"):
            raise ValueError(f"{inner} has no {key!r}; give a hook point, a layer and a vector")
    point = hook_named(probe["hook"], inner)
    layer = layer_at(point, probe.get("layer"), inner)
    score = probe.get("score", SCORES[0])
    edges = _range(given, field)
    if mlp is not None:
        if score != SCORES[0]:
            raise ValueError(
                f"{inner}['score']={score!r:.60} with layers: the score is what the last layer "
                "gives; leave score out"
            )
        weights, bias, kind = mlp.packed, mlp.bias, mlp.kind
        made = ProbeCondition(field, name, point, layer, weights, bias, kind, edges, memory)
        return replace(made, widths=mlp.widths)
    require_one_of(f"{inner}['score']", score, SCORES)
    vector = _vector(probe["vector"], f"{inner}['vector']", unit=score != "dot")
    bias = scalar(probe.get("bias", 0.0), f"{inner}['bias']")
    return ProbeCondition(field, name, point, layer, vector, bias, score, edges, memory)


_OF_MLPS = frozenset(("hook", "layer", "layers", "activation", "score"))


def _feature_condition(
    given: Mapping[str, Any], field: str, name: str, memory: Memory
) -> FeatureCondition:
    probe, inner = given["probe"], f"{field}['probe']"
    allow_keys(probe, {"sae", "feature"}, inner, "a probe that is a feature of an autoencoder")
    sae, feature = probe["sae"], own_numbers(probe.get("feature"))
    if not isinstance(sae, str) or not sae:
        raise ValueError(
            f"{inner}['sae']={sae!r:.60} is no name; give the consumer_id of an SaeConsumer that "
            "is registered"
        )
    if type(feature) is not int or feature < 0:
        raise ValueError(f"{inner}['feature']={feature!r:.60}; give the number of a feature")
    check_64_bits(feature, f"{inner}['feature']")
    edges = _range(given, field)
    if edges.high <= 0 and not edges.soft:
        raise ValueError(
            f"{field} is for scores below {edges.high:g}, and how active a feature is, is 0 or "
            "more: it would hold nowhere; give a small number above 0, such as 1e-6, for rows "
            "where the feature is not active"
        )
    return FeatureCondition(field, name, str(sae), feature, edges, memory)


def _range(given: Mapping[str, Any], field: str) -> Edges:
    """Which scores fire."""
    chosen = [key for key in _RANGES if given.get(key) is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"{field} has {chosen or 'none'} of above, below and between; give one of them"
        )
    [key] = chosen
    soft = 0.0
    if given.get("soft") is not None:
        soft = scalar(given["soft"], f"{field}['soft']")
        if soft <= 0 or key == "between":
            raise ValueError(
                f"{field}['soft']={soft:g} with {key}: give a number above 0, and the threshold as "
                "above or below"
            )
    if key == "between":
        edges = float_array(given[key], f"{field}['between']")
        if edges.shape != (2,) or not edges[0] < edges[1]:
            raise ValueError(
                f"{field}['between'] is {given[key]!r:.60}; give two numbers, the smaller first"
            )
        return Edges(float(edges[0]), float(edges[1]))
    threshold = scalar(given[key], f"{field}[{key!r}]")
    if key == "above":
        return Edges(threshold, math.inf, soft, threshold)
    return Edges(-math.inf, threshold, -soft, threshold)


def _vector(given: Any, name: str, *, unit: bool) -> FloatArray:
    array = float_array(given, name)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {list(array.shape)}; give one vector [hidden]")
    wide = array.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    if length == 0:
        raise ValueError(f"{name} is all zeros, which tells no rows apart")
    if length > _LONGEST and not unit:
        raise ValueError(
            f"{name} has length {length:.3g}, and scores of rows may be beyond float32; give one "
            f"of length {_LONGEST:g} or less, and a smaller threshold"
        )
    if unit:
        array = (wide / length).astype(np.float32)
    array.setflags(write=False)
    return array
