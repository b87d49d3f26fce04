"""Steering with every method against `transformers`, in mixed batches; and what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from engine.asking import generate, greedy, prompts_of, tokens_of
from engine.drawn_methods import METHODS, drawn
from engine.reference import HIDDEN, LAYERS, GatedChange
from tllm import SamplingParams
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.hooks import HookPoint

REQUESTS = 16 if INTERPRETED else 96
TOKENS = 3 if INTERPRETED else 6
NARROW = HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.ROUTER
IN_BLOCK = [p.value for p in HookPoint if p.has_layer and p not in NARROW]
PLACES = [(point, layer) for layer in range(LAYERS) for point in IN_BLOCK]
PLACES = [("embed", None), *PLACES, ("lm_head_in", None)]
FIELDS = {
    "steering_vectors": (0, 0, None),
    "prefill_steering_vectors": (1, 0, "prompt"),
    "decode_steering_vectors": (2, "prompt", None),
    "steering_clamps": (3, 0, None),
}
"""Order in which they are done, and which tokens they mean."""
BORDER = 1e-5


class Requests:
    """Random requests that share prefixes."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.prefixes = prompts_of([33, 64, 40], seed)

    def draw(self):
        """Two places with one to three operations each, of any methods; or nothing."""
        pick = self.pick
        prompt = pick.choice(self.prefixes)[: pick.choice([20, 40, 64])]
        prompt = prompt + [pick.randrange(1, 250) for _ in range(pick.choice([0, 1, 9]))]
        asked, changes = {}, []
        for point, layer in pick.sample(PLACES, pick.choice([0, 1, 2, 2])):
            for field in pick.sample(list(FIELDS), pick.randint(1, 2)):
                _, start, stop = (len(prompt) if e == "prompt" else e for e in FIELDS[field])
                drawn_here = [
                    drawn(pick.choice(list(METHODS)), pick.randrange(30), HIDDEN, size=3.0)
                    for _ in range(pick.randint(1, 2))
                ]
                entries = [method.entry for method in drawn_here]
                if start == 0 and stop is None and pick.random() < 0.4:
                    start, stop = 3, len(prompt) + 1
                    entries = [e | {"positions": {"ranges": [[start, stop]]}} for e in entries]
                of_field = asked.setdefault(field, {})
                if layer is None:
                    of_field[point] = entries
                else:
                    of_field.setdefault(point, {})[layer] = entries
                changes += [
                    (
                        FIELDS[field][0],
                        GatedChange((point, layer), m.change, [], None, start, stop),
                        m,
                    )
                    for m in drawn_here
                ]
        changes.sort(key=lambda change: change[0])
        return SimpleNamespace(prompt=prompt, asked=asked, changes=changes)


def assert_as_transformers(reference, request, output):
    """Returns whether it was compared."""
    tokens, changes = tokens_of([output])[0], [change for _, change, _ in request.changes]
    logits, _ = reference.run([*request.prompt, *tokens][:-1], gated=changes)
    if any(method.is_near(change.seen, BORDER) for _, change, method in request.changes):
        return False
    expected = logits[len(request.prompt) - 1 :].log_softmax(-1)
    steps = output.outputs[0].logprobs
    ours = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
    theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-3), request
    assert tokens == expected.argmax(-1).tolist(), request
    return True


def run_random(llm, reference, seed, count):
    drawing, compared = Requests(seed), []
    for _ in range(0, count, 16):
        requests = [drawing.draw() for _ in range(16)]
        params = [greedy(TOKENS, logprobs=1, **request.asked) for request in requests]
        outputs = generate(llm, [request.prompt for request in requests], params)
        compared += [
            assert_as_transformers(reference, request, output)
            for request, output in zip(requests, outputs, strict=True)
        ]
    assert sum(compared) > 0.9 * len(compared)
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["steering_configurations"] == 0 and stats["running_sequences"] == 0


def test_random_requests_are_as_transformers_has_them(llm, reference):
    """Beside each other and plain requests; prompts in chunks, and cached prefixes."""
    run_random(llm, reference, 0, REQUESTS)


def test_random_requests_that_preempt_each_other(tight_llm, reference):
    run_random(tight_llm, reference, 1, REQUESTS // 3)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("add", "clamp")])
def test_a_module_and_global_steering_take_every_method(llm, reference, method):
    """A module's factor multiplies the whole effect."""
    [prompt] = prompts_of([30], seed=7)
    first, second = (drawn(method, seed, HIDDEN, size=3.0) for seed in (100, 101))
    llm.steering.register_module("module", {"post_block": {1: first.entry}})
    llm.steering.set(decode_vectors={"mlp_out": {-1: second.entry}})
    try:
        asked = {"steering_module_ref": ("module", 0.5)}
        [output] = generate(llm, [prompt], greedy(TOKENS, logprobs=1, **asked))
        assert llm.steering.status()["global"]["decode_vectors"]
    finally:
        llm.steering.clear()
        llm.steering.unregister_module("module")
    half = GatedChange(("post_block", 1), lambda h: h + 0.5 * (first.change(h) - h), [], None)
    other = GatedChange(("mlp_out", LAYERS - 1), second.change, [], None, len(prompt))
    request = SimpleNamespace(prompt=prompt, changes=[(0, half, first), (0, other, second)])
    assert assert_as_transformers(reference, request, output)


ONES = [1.0] * HIDDEN
NET = {"method": "k_steering", "weight1": [ONES, ONES], "last_weight": [[1.0, 2.0], [3.0, 4.0]]}
WIDE = {"weight1": torch.ones(HIDDEN, HIDDEN), "last_weight": torch.ones(1, HIDDEN)}
SAE = {"encoder": [ONES, ONES], "decoder": [ONES, ONES]}
PLANE = [[1.0, *ONES[1:]], [-1.0, *ONES[1:]]]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"method": "rotate", "degrees": 90}, "[1] has no 'plane'"),
        ({"method": "rotate", "plane": PLANE}, "[1] gives no degrees"),
        ({"method": "rotate", "plane": [ONES, ONES], "degrees": 1}, "['plane'] has two vectors of"),
        (
            {"method": "rotate", "plane": [ONES], "degrees": 1},
            "[1]['plane'] has shape [1, 128]; give [2, hidden]",
        ),
        (
            {"method": "rotate", "plane": PLANE, "degrees": 1, "adaptive": 2},
            "['adaptive']=2 is no switch; give True or False",
        ),
        ({"method": "rotate", "plane": [[0.0] * 128, ONES], "degrees": 1}, "is all zeros"),
        (
            {"method": "rotate", "plane": torch.eye(2, 3), "degrees": 1},
            "[1] has 3 numbers; the model's hidden size is 128",
        ),
        ({"method": "affine"}, "[1] gives no map; give weight, shift or both"),
        ({"method": "affine", "vector": ONES}, "[1] has unknown keys ['vector']"),
        (
            {"method": "affine", "weight": ONES, "shift": [1.0]},
            "[1]['shift'] has shape [1]; give one vector [hidden] with hidden=128",
        ),
        (
            {"method": "affine", "source_mean": ONES, "weight": ONES},
            "gives source_mean; give all of source_mean, source_std, target_mean, target_std",
        ),
        (
            {
                "method": "affine",
                **dict.fromkeys(["source_mean", "target_mean", "target_std"], ONES),
                "source_std": [0.0, *ONES[1:]],
            },
            "has a standard deviation of 0 or less",
        ),
        ({"method": "affine", "shift": ONES, "low": ONES}, "gives one bound; give low and high"),
        (
            {"method": "affine", "shift": ONES, "low": ONES, "high": [0.0, *ONES[1:]]},
            "has numbers of low above those of high",
        ),
        ({"method": "scale_dimensions", "mask": ONES}, "[1] gives no scale"),
        (
            {"method": "scale_dimensions", "mask": ONES, "scale": 1e30},
            "adds up to 2e+30 to the numbers of a row",
        ),
        ({"method": "low_rank", "rotation": PLANE}, "[1] has no 'weight'"),
        (
            {"method": "low_rank", "rotation": PLANE, "weight": [ONES]},
            "[1]['weight'] has shape [1, 128]; give [rank, hidden] with rank=2, hidden=128",
        ),
        (
            {"method": "low_rank", "rotation": [ONES] * 129, "weight": [ONES] * 129},
            "has 129 features; at most 128 are allowed at one place",
        ),
        ({"method": "sae_features", **SAE}, "gives nothing to do; give value"),
        (
            {"method": "sae_features", **SAE, "value": [1.0, 2.0], "factor": [1.0, 2.0]},
            "gives value, factor; give value (what features are set to), factor",
        ),
        (
            {"method": "sae_features", **SAE, "min": [1.0, 2.0], "max": [1.0, 1.0]},
            "has a feature with min above max",
        ),
        (
            {"method": "sae_features", **SAE, "value": [1.0]},
            "[1]['value'] has shape [1]; give [features] with features=2",
        ),
        (NET, "[1] names no labels; give target, avoid or both, rows of last_weight"),
        (NET | {"target": [2]}, "['target'] names labels ['2']; give whole numbers from 0 to 1"),
        (NET | {"avoid": [0.5]}, "['avoid'] names labels ['0.5']; give whole numbers from 0 to 1"),
        (NET | {"target": [0], "bias2": [1.0]}, "[1] gives bias2 without weight2; give both"),
        (
            NET | {"target": [0], "weight2": [[1.0, 1.0]]},
            "['last_weight'] has shape [2, 2]; give [labels, 1]",
        ),
        (
            NET | {"target": [0], "weight2": [[1.0]]},
            "['weight2'] has shape [1, 1]; give [outer, units] with units=2",
        ),
        (
            NET | {"target": [0], "weight1": torch.ones(129, HIDDEN)},
            "has hidden layers of 129 units; each may have at most 128",
        ),
        (
            [{"method": "k_steering", "target": [0], **WIDE, "alpha": 0.1}] * 5,
            "the request with global steering has 640 units of k_steering at 'post_block' of",
        ),
        (NET | {"target": [0], "alpha": 1e37}, "adds up to 3e+37 to the numbers of a row"),
    ],
)
def test_what_is_wrong_is_refused(llm, entry, says):
    with pytest.raises(ValueError) as refused:
        generate(llm, [[1]], SamplingParams(steering_vectors={"post_block": {1: entry}}))
    assert says in str(refused.value)
