"""What a request's steering is composed to, without an engine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from client.small_facts import small_facts

from tllm.client.composer import Composer
from tllm.client.request import RequestKind, Uses
from tllm.spec.condition_reading import parse_condition
from tllm.spec.conditions import ProbeCondition
from tllm.spec.groups import RequestSteering
from tllm.spec.request import Asked
from tllm.spec.selection import Selection
from tllm.spec.tiers import Tiers

LAYERS, WIDTH = 28, 8


@pytest.fixture
def composer():
    made = Composer({})
    made.facts = small_facts(LAYERS, WIDTH)
    return made


def steering(when: Any) -> RequestSteering:
    vector = np.ones(WIDTH, np.float32)
    entries = {layer: {"vector": vector, "when": when} for layer in range(LAYERS)}
    return RequestSteering(Tiers.parse(vectors={"post_block": entries}))


def probe(layer: int) -> dict[str, Any]:
    vector = np.eye(WIDTH, dtype=np.float32)[0]
    return {"probe": {"hook": "pre_attn", "layer": layer, "vector": vector}, "above": 0.5}


@pytest.mark.parametrize("layer", [0, -LAYERS])
def test_a_condition_that_layers_share_is_found_once(composer, monkeypatch, layer):
    asked = steering(probe(layer))
    looked = []
    find = ProbeCondition.found
    monkeypatch.setattr(
        ProbeCondition, "found", lambda self, known: looked.append(self) or find(self, known)
    )
    (group,) = composer.groups(asked)
    assert len(looked) == 1
    assert group.gates is not None and len(group.gates.gates) == 1


def test_a_monitor_that_layers_name_is_one_condition(composer):
    composer.monitors["mood"] = parse_condition(probe(0), "monitor")
    (group,) = composer.groups(steering("mood"))
    assert group.gates is not None and len(group.gates.gates) == 1


def test_a_shared_condition_is_refused_at_the_first_layer_before_its_probe(composer):
    with pytest.raises(ValueError, match=r"post_block.*computes after"):
        composer.groups(steering(probe(3)))


def test_vectors_of_which_the_dtype_keeps_nothing_are_refused(composer):
    """Float16 has no place for 1e-8, whatever scale comes after it."""

    def asked(value, scale):
        entry = {"vector": np.full(WIDTH, value), "scale": scale}
        return RequestSteering(Tiers.parse(vectors={"post_block": {1: entry}}))

    composer.facts = replace(composer.facts, dtype="float16", max_value=65504.0)
    with pytest.raises(ValueError, match=r"\[1\] has values of 1e-08 at most, of which"):
        composer.groups(asked(1e-8, 1e8))
    for fine in (asked(1e-8, 1.0), asked(1e-4, 1e4), asked(0.0, 1e8)):
        composer.groups(fine)
    composer.facts = replace(composer.facts, dtype="bfloat16", max_value=3e38)
    composer.groups(asked(1e-8, 1e8))


def test_a_module_whose_factor_is_too_large_is_named(composer):
    vector = np.ones(WIDTH, np.float32)
    composer.modules["calm"] = Tiers.parse(vectors={"post_block": {1: vector}})
    composer.modules["odd"] = Tiers.parse(vectors={"post_block": {1: vector}})
    for given, refused in (
        ((("calm", 1.0), ("odd", 1e30)), "steering_module_ref: module 'odd' times 1e+30 adds up"),
        ((("calm", -(2.0**63)),), "steering_module_ref: module 'calm' times -9.22e+18 adds up"),
        ((("calm", 4e18), ("odd", 4e18)), "the request with global steering adds up to 8e+18"),
    ):
        with pytest.raises(ValueError, match=re.escape(refused)):
            composer.groups(RequestSteering(Tiers(), given))


def registered(composer: Composer, **modules: Any) -> None:
    """Modules that are there, by name."""
    for name, given in modules.items():
        composer.modules[name] = composer.module_of(name, given)


VECTORS = {"post_block": {1: np.ones(WIDTH, np.float32)}}
AFTER_PROMPT = {**probe(0), "over": "prompt_last"}
CALM = {"post_block": {1: {"vector": np.ones(WIDTH), "when": AFTER_PROMPT}}}


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (RequestSteering(Tiers.parse(decode_vectors=VECTORS)), r"decode_vectors\['post_block'\]"),
        (steering(AFTER_PROMPT), r"vectors\['post_block'\]\[0\]"),
        (steering("once"), r"vectors\['post_block'\]\[0\]"),
        (RequestSteering(Tiers(), (("decoding", 1.0),)), "the module 'decoding'"),
        (RequestSteering(Tiers(), (("both", 1.0), ("calm", 2.0))), "the module 'calm'"),
        (RequestSteering(Tiers(), (("both", 1.0),)), ""),
        (steering(probe(0)), ""),
    ],
)
def test_what_steers_generated_tokens_alone_is_refused_for_pooling(composer, asked, refused):
    both = {"decode_vectors": VECTORS, "vectors": VECTORS}
    registered(composer, decoding={"decode_vectors": VECTORS}, both=both, calm=CALM)
    composer.monitors["once"] = composer.monitor_of("once", AFTER_PROMPT)
    what = Asked(steering=asked), composer.groups(asked), Uses(), composer
    RequestKind().check(*what)
    pooled = RequestKind(generates=False)
    if not refused:
        pooled.check(*what)
        return
    with pytest.raises(ValueError, match=f"^{refused}.* was given for pooling, which generates"):
        pooled.check(*what)


@pytest.mark.parametrize("positions", ["all_prompt", "last_prompt"])
def test_positions_of_the_prompt_are_refused_for_a_module_that_steers_after_it(composer, positions):
    mixed = {"vectors": CALM, "prefill_vectors": VECTORS}
    registered(composer, calm=CALM, mixed=mixed, later={"vectors": CALM, "decode_vectors": VECTORS})
    where = Selection.parse(positions)
    for name in ("calm", "later"):
        with pytest.raises(ValueError, match=f"module '{name}' .*the prompt.*over='prompt_last'"):
            composer.groups(RequestSteering(Tiers(), ((name, 1.0),), where))
    composer.groups(RequestSteering(Tiers(), (("mixed", 1.0),), where))
    composer.groups(RequestSteering(Tiers(), (("calm", 1.0),), Selection.parse([5])))
