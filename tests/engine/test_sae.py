"""Features of sparse autoencoders against the published formulas, in plain PyTorch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.asking import generate, greedy, prompts_of, sampled
from engine.reference import HIDDEN, LAYERS, GatedChange
from engine.test_conditions import run_random
from engine.test_remembering import Remembering
from tllm.consumers.sae import NO_FEATURE, SaeConsumer
from tllm.consumers.sparse_autoencoder import SparseAutoencoder
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.steering import steer_features

FEATURES, K = 40, 6
HOOK = "blocks.2.hook_resid_post"
PLACE = ("post_block", 2)


def weights_of(architecture):
    """Random weights, by the names in SAELens's files."""
    generator = torch.Generator().manual_seed(6)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    found = {
        "W_enc": 0.2 * normal(HIDDEN, FEATURES),
        "W_dec": normal(FEATURES, HIDDEN) * torch.linspace(0.2, 3, FEATURES)[:, None],
        "b_dec": normal(HIDDEN),
    }
    if architecture == "gated":
        return found | {name: normal(FEATURES) for name in ("b_gate", "b_mag", "r_mag")}
    found["b_enc"] = normal(FEATURES)
    if architecture == "jumprelu":
        found["threshold"] = normal(FEATURES).abs() + 0.5
    return found


SINCE_6 = {"d_in": HIDDEN, "d_sae": FEATURES, "dtype": "float32", "metadata": {"hook_name": HOOK}}
BEFORE_6 = {
    "d_in": HIDDEN,
    "d_sae": FEATURES,
    "dtype": "float32",
    "hook_name": HOOK,
    "hook_layer": 2,
    "activation_fn_str": "relu",
    "finetuning_scaling_factor": False,
}
CONFIGS = {
    "standard": SINCE_6 | {"architecture": "standard"},
    "of old, without its name": BEFORE_6 | {"normalize_activations": False},
    "jumprelu": SINCE_6 | {"architecture": "jumprelu", "apply_b_dec_to_input": False},
    "topk": SINCE_6 | {"architecture": "topk", "k": K},
    "topk, scaled": SINCE_6
    | {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True},
    "topk of old": BEFORE_6 | {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
    "gated": SINCE_6 | {"architecture": "gated"},
    "layer norm": SINCE_6 | {"architecture": "standard", "normalize_activations": "layer_norm"},
    "rescaled": SINCE_6
    | {"architecture": "jumprelu", "normalize_activations": "constant_norm_rescale"},
}


def architecture_of(config):
    if config.get("activation_fn_str") == "topk":
        return "topk"
    return config.get("architecture", "standard")


def saved(folder, config, weights=None):
    folder.mkdir()
    weights = weights_of(architecture_of(config)) if weights is None else weights
    save_file(weights, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def published(config, x):
    """What SAELens's classes compute."""
    architecture, weights = architecture_of(config), weights_of(architecture_of(config))
    if config.get("normalize_activations") == "layer_norm":
        x = x - x.mean(dim=-1, keepdim=True)
        x = x / (x.std(dim=-1, keepdim=True) + 1e-5)
    if config.get("normalize_activations") == "constant_norm_rescale":
        x = x * (HIDDEN**0.5 / x.norm(dim=-1, keepdim=True))
    x = x - weights["b_dec"] * config.get("apply_b_dec_to_input", True)
    if architecture == "gated":
        active = (x @ weights["W_enc"] + weights["b_gate"] > 0).float()
        scaled = weights["W_enc"] * weights["r_mag"].exp()
        return active * (x @ scaled + weights["b_mag"]).relu()
    before = x @ weights["W_enc"] + weights["b_enc"]
    if config.get("rescale_acts_by_decoder_norm"):
        before = before * weights["W_dec"].norm(dim=-1)
    if architecture == "topk":
        best = before.topk(K, dim=-1)
        return torch.zeros_like(before).scatter_(-1, best.indices, best.values.relu())
    found = before.relu()
    if architecture == "jumprelu":
        found = found * (before > weights["threshold"]).float()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_encoders_compute_the_published_formulas(name, tmp_path):
    config = CONFIGS[name]
    found = SparseAutoencoder.load(saved(tmp_path / "sae", config))
    assert found.config.place == PLACE
    rows = 3 * torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    wanted = published(config, rows)
    assert 0 < (wanted > 0).float().mean() < 1
    torch.testing.assert_close(found.encode(rows), wanted, rtol=1e-5, atol=1e-4)
    if architecture_of(config) != "topk":
        some = found.only([7, 3])
        torch.testing.assert_close(some.encode(rows), wanted[:, [7, 3]], rtol=1e-5, atol=1e-4)


def test_float16_weights_take_rows_whose_norm_float16_does_not_hold(tmp_path):
    rows = 1e4 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    for name in ("layer norm", "rescaled"):
        weights = weights_of(architecture_of(CONFIGS[name]))
        halves = {each: tensor.half() for each, tensor in weights.items()}
        found = SparseAutoencoder.load(saved(tmp_path / name, CONFIGS[name], halves)).encode(rows)
        wanted = published(CONFIGS[name], rows)
        torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_that_is_not_finite_has_no_features_that_are_told(name, tmp_path):
    folder = saved(tmp_path / "sae", CONFIGS[name])
    rows = torch.ones(2, HIDDEN)
    rows[1, 5] = torch.nan
    for given in ({"top_k": 3}, {"features": [7, 3]}):
        consumer = SaeConsumer(folder, **given)
        consumer._autoencoder, consumer._centered = SparseAutoencoder.load(folder), False
        consumer._columns = torch.tensor([7, 3])
        plain, broken = consumer._read_part(rows)["values"]
        assert plain.isfinite().all() and broken.isnan().any()
    found = SaeConsumer(folder, top_k=3)
    found._autoencoder, found._centered = consumer._autoencoder, False
    assert (found._read_part(rows)["features"][1] != NO_FEATURE).all()


def test_only_a_threshold_may_be_infinite(tmp_path):
    """By it a feature is never active."""
    config, rows = CONFIGS["jumprelu"], 9 * torch.ones(1, HIDDEN)
    never = weights_of("jumprelu")
    never["threshold"][3] = torch.inf
    found = SparseAutoencoder.load(saved(tmp_path / "never", config, never)).encode(rows)
    assert found.isfinite().all() and found[0, 3] == 0
    for name, number in (("threshold", -torch.inf), ("threshold", torch.nan), ("W_enc", torch.inf)):
        weights = weights_of("jumprelu")
        weights[name].view(-1)[0] = number
        folder = saved(tmp_path / f"{name}{number}", config, weights)
        with pytest.raises(ValueError, match=f"{name} has numbers that are NaN or infinite"):
            SparseAutoencoder.load(folder)
    config = CONFIGS["topk, scaled"]
    weights = weights_of("topk")
    weights["W_dec"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="W_dec has numbers that are NaN or infinite"):
        SparseAutoencoder.load(saved(tmp_path / "scaled", config, weights))


def assert_active(payload, wanted, positions, top_k):
    """The most active features of `wanted` `[tokens, features]`, at these positions."""
    wanted = wanted[list(positions)]
    for part in payload.values():
        assert part.positions.tolist() == list(positions)
    values = torch.from_numpy(payload["values"].values)
    features = torch.from_numpy(payload["features"].values).long()
    torch.testing.assert_close(values, wanted.topk(top_k).values, rtol=1e-4, atol=1e-3)
    named = wanted.gather(1, features.clamp(min=0)).where(features != NO_FEATURE, 0.0)
    torch.testing.assert_close(values, named, rtol=1e-4, atol=1e-3)
    assert ((features == NO_FEATURE) == (values == 0)).all()
    # What lies at a threshold to the last digits may be counted or not.
    counted = torch.from_numpy(payload["active"].values)
    assert ((counted - (wanted > 0).sum(-1)).abs() <= 1).all()


@pytest.fixture
def truth(reference):
    """`truth(tokens, config)`: how active each feature is in each token."""

    def features(tokens, config, place=PLACE):
        _, states = reference.run(tokens, [place])
        return published(config, states[place])

    return features


def tokens_of(output, sample):
    return [*output.prompt_token_ids, *sample.token_ids][:-1]


@pytest.mark.parametrize("name", ["jumprelu"] if INTERPRETED else ["topk", "jumprelu", "gated"])
def test_active_features_of_a_mixed_batch(llm, truth, name, tmp_path):
    config = CONFIGS[name]
    llm.register_consumer(SaeConsumer(saved(tmp_path / "sae", config), top_k=8))
    prompts = prompts_of([5, 30, 4], seed=1)
    asked = [
        sampled(4, n=2, consumers={"sae": {}}),
        greedy(3, consumers={"sae": {"top_k": 3, "positions": "all_prompt"}}),
        greedy(3),
    ]
    several, prompt_only, plain = generate(llm, prompts, asked)
    for sample in several.outputs:
        tokens = tokens_of(several, sample)
        payload = sample.consumer_results["sae"].payload
        assert_active(payload, truth(tokens, config), range(len(tokens)), 8)
    payload = prompt_only.consumer_results["sae"].payload
    assert_active(payload, truth(prompts[1], config), range(len(prompts[1])), 3)
    assert plain.consumer_results == {}


def test_positions_that_choose_no_token_are_no_rows_and_no_silence(llm, tmp_path):
    folder = saved(tmp_path / "sae", CONFIGS["jumprelu"])
    llm.register_consumer(SaeConsumer(folder, top_k=8))
    llm.register_consumer(SaeConsumer(folder, features=[3, 1], consumer_id="chosen"))
    for positions, count in (("all_generated", 0), ("last_prompt", 1)):
        options = {"positions": positions}
        both = {"sae": options | {"top_k": 3}, "chosen": options}
        [output] = generate(llm, prompts_of([5]), greedy(1, consumers=both))
        active, chosen = (output.consumer_results[name] for name in ("sae", "chosen"))
        assert (active.status, active.error, chosen.status) == ("ok", None, "ok")
        shapes = {
            name: (each.values.shape, each.values.dtype) for name, each in active.payload.items()
        }
        assert shapes == {
            "features": ((count, 3), np.int32),
            "values": ((count, 3), np.float32),
            "active": ((count,), np.int32),
        }
        assert chosen.payload["features"] == [3, 1]
        assert chosen.payload["values"].values.shape == (count, 2)


def test_chosen_features_of_sequences_that_are_preempted(tight_llm, truth, tmp_path, monkeypatch):
    monkeypatch.setattr("tllm.consumers.sae._CHUNK_BYTES", 4 * FEATURES * 3)  # three rows at once
    for name in ("standard", "topk"):
        folder = saved(tmp_path / name, CONFIGS[name])
        tight_llm.register_consumer(
            SaeConsumer(folder, features=np.array([9, 2, 31]), consumer_id=name)
        )
    wanted = {"standard": {"positions": "all_generated"}, "topk": {}}
    prompts = prompts_of([33] * (3 if INTERPRETED else 7), seed=7)
    outputs = generate(tight_llm, prompts, greedy(3 if INTERPRETED else 40, consumers=wanted))
    for output in outputs:
        tokens = tokens_of(output, output.outputs[0])
        for name, start in (("standard", len(output.prompt_token_ids)), ("topk", 0)):
            payload = output.consumer_results[name].payload
            assert payload["features"] == [9, 2, 31]
            assert payload["values"].positions.tolist() == list(range(start, len(tokens)))
            expected = truth(tokens, CONFIGS[name])[start:, [9, 2, 31]]
            found = torch.from_numpy(payload["values"].values)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_the_layer_and_hook_point_may_be_told(llm, truth, tmp_path):
    config = SINCE_6 | {"architecture": "standard", "metadata": {"hook_name": "model.layers.2"}}
    folder = saved(tmp_path / "sae", config)
    with pytest.raises(ValueError, match=r"'model\.layers\.2', which is no hook point here; give"):
        SaeConsumer(folder)
    llm.register_consumer(SaeConsumer(folder, layer=-1, site="mlp_out", top_k=2))
    [output] = generate(llm, prompts_of([6]), greedy(2, consumers={"sae": {}}))
    tokens = tokens_of(output, output.outputs[0])
    wanted = truth(tokens, config, ("mlp_out", LAYERS - 1))
    assert_active(output.consumer_results["sae"].payload, wanted, range(len(tokens)), 2)


def test_files_that_are_not_understood_are_refused_by_name(tmp_path):
    more = weights_of("standard") | {"W_skip": torch.ones(2)}
    less = {name: w for name, w in weights_of("standard").items() if name != "b_enc"}
    other = weights_of("standard") | {"b_enc": torch.zeros(3)}
    broken = weights_of("standard") | {"b_enc": torch.full((40,), torch.nan)}
    mixed = {n: w.half() if n == "W_enc" else w for n, w in weights_of("standard").items()}
    whole = {name: w.int() for name, w in weights_of("standard").items()}
    plain = CONFIGS["standard"]
    for number, (config, weights, message) in enumerate(
        (
            (
                plain | {"architecture": "matching_pursuit"},
                None,
                "architecture='matching_pursuit' is not known",
            ),
            (plain | {"activation_fn": "tanh-relu"}, None, "activation_fn='tanh-relu'"),
            (plain | {"normalize_activations": True}, None, "whose factor is not in the file"),
            (plain | {"reshape_activations": "hook_z"}, None, "reshape_activations='hook_z'"),
            (plain | {"architecture": "topk"}, None, "k=None is not known"),
            (plain | {"d_sae": "many"}, None, "d_sae='many'; a whole number was expected"),
            (plain, more, "not known is W_skip"),
            (plain, less, "missing is b_enc"),
            (plain, broken, "b_enc has numbers that are NaN"),
            (
                plain,
                mixed,
                r"have the dtypes \{'W_enc': 'float16'.*save all of them in one of float32",
            ),
            (plain, whole, r"have the dtypes \{'W_enc': 'int32'"),
            ([plain], None, "cfg.json is a list; it must be a JSON object"),
            (plain | {"metadata": "x"}, None, "metadata='x'; an object of JSON was expected"),
            (plain | {"metadata": {"hook_name": 5}}, None, "hook_name=5; a text was expected"),
            (plain | {"activation_fn_kwargs": [1]}, None, r"activation_fn_kwargs=\[1\]; an object"),
            (plain | {"model_from_pretrained_kwargs": "x"}, None, "from_pretrained_kwargs='x'; an"),
            (plain | {"d_sae": 0}, None, "d_sae=0; a whole number was expected, 1 or more"),
            (plain, other, r"b_enc has shape \[3\], and cfg.json says d_in=128, d_sae=40"),
        )
    ):
        folder = saved(tmp_path / str(number), config, weights or weights_of("standard"))
        with pytest.raises(ValueError, match=message):
            SparseAutoencoder.load(folder)
    (folder / "cfg.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"path=.*: cfg\.json is damaged"):
        SaeConsumer(folder)
    with pytest.raises(ValueError, match=r"is no folder of SAELens; give one with cfg\.json"):
        SaeConsumer(tmp_path)


def test_what_cannot_be_had_is_refused(llm, tmp_path):
    folder = saved(tmp_path / "sae", CONFIGS["standard"])
    narrow = SINCE_6 | {"d_in": 64, "architecture": "standard"}
    weights = weights_of("standard")
    weights |= {"W_enc": weights["W_enc"][:64].clone(), "b_dec": weights["b_dec"][:64].clone()}
    for consumer, message in (
        (SaeConsumer(folder, layer=7), "post_block has no layer 7"),
        (SaeConsumer(saved(tmp_path / "narrow", narrow, weights)), "is for rows of 64 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.register_consumer(consumer)
    for arguments, message in (
        ({"features": [40]}, "features: 40 must be from 0 to 39"),
        ({"features": []}, "features is empty; give one number"),
        ({"top_k": 0}, "top_k=0 must be 1 or more"),
        ({"layer": 1.5}, "layer: 1.5 is not a layer"),
        ({"features": [1], "top_k": 10}, r"top_k=10 was given with features=\[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            SaeConsumer(folder, **arguments)
    llm.register_consumer(SaeConsumer(folder, top_k=3))
    llm.register_consumer(SaeConsumer(folder, features=[1], consumer_id="one"))
    llm.register_consumer(SaeConsumer(folder, site="router", consumer_id="none"))
    with pytest.raises(ValueError, match=r"^site of consumer 'none': qwen2 has no"):
        generate(llm, prompts_of([5]), greedy(1, consumers={"none": {}}))
    for options, message in (
        ({"sae": {"top_k": 4}}, "must be from 1 to 3"),
        ({"one": {"top_k": 1}}, r"registered with features=\[1\], which are all given"),
        ({"sae": {"features": [1]}}, r"unknown options \['features'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(llm, prompts_of([5]), greedy(2, consumers=options))


STEERED = {
    "value": lambda f: torch.tensor([4.0, 2.0]).expand_as(f),
    "factor": lambda f: torch.tensor([-1.0, 3.0]) * f,
    "minimum": lambda f: f.clamp(min=torch.tensor([1.0, 0.5])),
}


@pytest.mark.parametrize("only_if_active", [False, True])
@pytest.mark.parametrize("given", STEERED)
@pytest.mark.parametrize("name", ["standard", "jumprelu"])
def test_features_are_set_scaled_and_clamped(llm, reference, tmp_path, name, given, only_if_active):
    """The rest of the row, which the autoencoder does not reconstruct, stays."""
    config = CONFIGS[name]
    folder, weights = saved(tmp_path / "sae", config), weights_of(name)
    features = [3, 7]
    numbers = {"value": [4.0, 2.0], "factor": [-1.0, 3.0], "minimum": [1.0, 0.5]}[given]
    asked = {given: dict(zip(features, numbers, strict=True))}
    spec = steer_features(folder, only_if_active=only_if_active, **asked)
    assert list(spec) == [PLACE[0]]

    def change(rows):
        found = published(config, rows)[:, features]
        target = STEERED[given](found)
        if only_if_active:
            target = torch.where(found > 0, target, found)
        return rows + (target - found) @ weights["W_dec"][features]

    [prompt] = prompts_of([30], seed=8)
    [output] = generate(llm, [prompt], greedy(3, logprobs=1, steering_vectors=spec))
    tokens = list(output.outputs[0].token_ids)
    logits, _ = reference.run([*prompt, *tokens][:-1], gated=[GatedChange(PLACE, change, [], None)])
    expected = logits[len(prompt) - 1 :].log_softmax(-1)
    ours = [
        step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)
    ]
    theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_layer_or_a_hook_point_alone_says_where_features_are_steered(tmp_path):
    folder = saved(tmp_path / "sae", CONFIGS["standard"])
    hook, layer = PLACE
    for given, expected in (
        ({}, (hook, layer)),
        ({"layer": 1}, (hook, 1)),
        ({"layer": 0}, (hook, 0)),
        ({"hook": "mlp_out"}, ("mlp_out", layer)),
        ({"hook": "mlp_out", "layer": 3}, ("mlp_out", 3)),
    ):
        [(point, layers)] = steer_features(folder, value={1: 1.0}, **given).items()
        assert (point, *layers) == expected


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (
            "topk",
            {"value": {1: 1.0}},
            "a topk autoencoder with normalize_activations='none' cannot",
        ),
        ("gated", {"value": {1: 1.0}}, "standard and jumprelu ones without normalisation can"),
        ("standard", {}, "given are none; give one of value, factor, or minimum and maximum"),
        ("standard", {"minimum": {1: 1.0}, "maximum": {2: 1.0}}, "the same features in both"),
        (
            "standard",
            {"minimum": {1: 0.0, 2: 3.0}, "maximum": {1: 0.0, 2: 1.0}},
            "feature 2 has minimum=3.0 above maximum=1.0; give the smaller one as minimum",
        ),
        ("standard", {"value": {9999: 1.0}}, "it has no feature 9999, only 0 to"),
        ("standard", {"value": [1.0]}, "given are value; give one of value, factor, or minimum"),
        ("standard", {"value": {1: 1.0}, "factor": {1: 2.0}}, "given are value, factor; give one"),
        ("standard", {"value": {3: 6.0, "4": 1.0}}, "the feature '4' is not a whole number"),
        ("standard", {"value": {3: None}}, "the number of feature 3=None is not a number"),
        ("standard", {"value": {3: 1.0}, "hook": "middle"}, "hook: unknown hook point 'middle'"),
    ],
)
def test_features_that_cannot_be_steered_are_refused(tmp_path, name, given, says):
    config = next(c for c in CONFIGS.values() if architecture_of(c) == name)
    with pytest.raises(ValueError) as refused:
        steer_features(saved(tmp_path / "sae", config), **given)
    assert says in str(refused.value)


class FeatureGate:
    """A condition on a feature that decides: about half of the rows of a prompt are above."""

    def __init__(self, name, feature, reference, tokens, side="above", soft=0.0):
        self.config, self.feature, self.side, self.soft = CONFIGS[name], feature, side, soft
        _, states = reference.run(tokens, [PLACE])
        self.edge = float(self.score(states[PLACE]).median()) + 0.01
        self.edges = [self.edge, self.edge + 9.0]
        edge = self.edges if side == "between" else self.edge
        self.when = {"probe": {"sae": name, "feature": np.int64(feature)}, side: edge, "name": name}
        if soft:
            self.when["soft"] = soft

    def score(self, rows):
        return published(self.config, rows)[:, self.feature]

    def strength(self, scores):
        off = scores[0] - self.edge if self.side != "below" else self.edge - scores[0]
        if self.soft:
            return torch.sigmoid(self.soft * off)
        return ((off > 0) & (off < 9)).float()


def busiest(config, rows):
    """The feature that is nearest to being active in half of the rows."""
    return int(((published(config, rows) > 0).float().mean(0) - 0.5).abs().argmin())


@pytest.fixture
def probed(llm, reference, tmp_path):
    """Autoencoders of every kind that can be a probe, registered; and a gate of each."""
    [tokens] = prompts_of([64], seed=12)
    _, states = reference.run(tokens, [PLACE])
    names = ["standard", "jumprelu", "gated", "layer norm", "rescaled"]
    sides = dict(zip(names, ["above", "below", "above", "between", "above"], strict=True))
    for name in names:
        llm.register_consumer(SaeConsumer(saved(tmp_path / name, CONFIGS[name]), consumer_id=name))
    return {
        name: FeatureGate(
            name,
            busiest(CONFIGS[name], states[PLACE]),
            reference,
            tokens,
            sides[name],
            soft=2.0 if name == "gated" else 0.0,
        )
        for name in names
    }


def logprobs_are(reference, prompt, sample, changes, positions=None):
    tokens = list(sample.token_ids)
    logits, _ = reference.run([*prompt, *tokens][:-1], gated=changes)
    expected = logits[len(prompt) - 1 :].log_softmax(-1)
    ours = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
    theirs = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_features_are_probes(llm, reference, probed):
    """In a batch of requests with a feature each, two of them joined, chunked and cached prompts;
    the scores are what the consumer reports of the same rows."""
    vector = 3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    add = lambda rows: rows + vector  # noqa: E731
    later = ("post_block", 3)
    [shared] = prompts_of([64], seed=12)
    prompts, params, changes = [], [], []
    for name, gate in probed.items():
        entry = {"vector": vector, "when": gate.when}
        prompts.append([*shared, len(prompts) + 2])
        asked = {name: {"top_k": 10}} if name == "jumprelu" else {}
        params.append(
            greedy(3, logprobs=1, steering_vectors={"post_block": {3: entry}}, consumers=asked)
        )
        changes.append(GatedChange(later, add, [(PLACE, gate.score)], gate.strength))
    one, two = probed["standard"], probed["rescaled"]
    joined = {"any": [one.when, two.when], "name": "joined"}
    prompts.append(shared[:40])
    entry = {"vector": vector, "when": joined}
    params.append(greedy(3, logprobs=1, steering_vectors={"post_block": {3: entry}}))
    either = lambda s: torch.maximum(one.strength(s[:1]), two.strength(s[1:]))  # noqa: E731
    changes.append(GatedChange(later, add, [(PLACE, one.score), (PLACE, two.score)], either))
    outputs = generate(llm, prompts, params)
    for prompt, output, change, name in zip(
        prompts, outputs, changes, [*probed, "joined"], strict=True
    ):
        [sample] = output.outputs
        logprobs_are(reference, prompt, sample, [change])
        assert 0.1 < float(change.strength(change.scores).mean()) < 0.9
        signal = sample.signals[name]
        if name != "joined":
            wanted = change.scores[0][signal.positions]
            torch.testing.assert_close(
                torch.from_numpy(signal.scores), wanted, rtol=1e-4, atol=1e-3
            )
            assert (signal.scores == 0).any()
    found = outputs[1].outputs[0]
    assert_reported(found, probed["jumprelu"].feature)


def test_random_requests_with_features_are_as_transformers_has_them(llm, reference, probed):
    """Joined with other probes, in all scopes, gating all methods, mixed with plain requests."""

    class Drawn(Remembering):
        features = tuple(probed.values())
        features_at = PLACE

    run_random(llm, reference, 31, 12, kind=Drawn)


def assert_reported(sample, feature):
    """The scores of a signal are the activations that the consumer reports of the same rows."""
    payload, signal = sample.consumer_results["jumprelu"].payload, sample.signals["jumprelu"]
    scores = dict(zip(signal.positions.tolist(), signal.scores.tolist(), strict=True))
    seen = 0
    for position, features, values in zip(
        payload["features"].positions.tolist(),
        payload["features"].values,
        payload["values"].values,
        strict=True,
    ):
        if position in scores and feature in features.tolist():
            [value] = values[features == feature]
            assert scores[position] == pytest.approx(float(value), rel=1e-4, abs=1e-3)
            seen += 1
    assert seen


def test_a_feature_stops_is_a_monitor_and_judges_prompts(llm, reference, probed):
    gate = probed["standard"]
    [prompt] = prompts_of([30], seed=4)
    llm.steering.register_monitor("feature", gate.when)
    told = llm.steering.monitors()["feature"]["probe"]
    assert (told["sae"], told["feature"]) == ("standard", gate.feature)
    [free] = generate(llm, [prompt], greedy(12))
    tokens = list(free.outputs[0].token_ids)
    _, states = reference.run([*prompt, *tokens][:-1], [PLACE])
    scores = gate.score(states[PLACE])
    held = (scores[len(prompt) :] > gate.edge).tolist()
    [ended] = generate(llm, [prompt], greedy(12, stop_when="feature"))
    assert any(held)
    assert list(ended.outputs[0].token_ids) == tokens[: held.index(True) + 1]
    assert ended.outputs[0].stop_reason == "feature"
    of_prompt = (scores[: len(prompt)] > gate.edge).any()
    assert of_prompt
    for refuses, edge in ((True, gate.edge), (False, 1e9)):
        when = {**gate.when, "above": edge}
        [asked] = generate(llm, [prompt], greedy(4, abort_when=when))
        assert asked.outputs[0].stop_reason == ("standard" if refuses else None)
        assert list(asked.outputs[0].token_ids) == ([] if refuses else tokens[:4])
    mean = {**gate.when, "over": "prompt_mean", "name": "mean"}
    entry = {"vector": torch.ones(HIDDEN), "when": mean}
    for name in ("standard", "layer norm", "rescaled"):
        probe = {"sae": name, "feature": probed[name].feature}
        entry = {"vector": torch.ones(HIDDEN), "when": {**mean, "probe": probe}}
        asked = greedy(2, decode_steering_vectors={"post_block": {1: entry}})
        [output] = generate(llm, [prompt], asked)
        row = states[PLACE][: len(prompt)].mean(0, keepdim=True)
        [score] = output.outputs[0].signals["mean"].scores
        assert score == pytest.approx(float(probed[name].score(row)), rel=1e-4, abs=1e-3)
    llm.unregister_consumer("standard")
    assert generate(llm, [prompt], greedy(2, stop_when="feature"))  # as it was registered
    llm.steering.unregister_monitor("feature")


def test_features_without_a_name_at_one_place_have_signals_of_their_own(llm, reference, probed):
    """Each with its own scores, beside a probe there and one that is called as the place is."""
    gates = [probed[name] for name in ("standard", "jumprelu")]
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(8))
    whens = [{k: v for k, v in gate.when.items() if k != "name"} for gate in gates]
    place = f"{PLACE[0]}:{PLACE[1]}"
    probe = {"hook": PLACE[0], "layer": PLACE[1], "vector": row}
    whens += [{"probe": probe, "above": 1e9}, {"probe": probe, "above": 2e9, "name": place}]
    entries = [{"vector": torch.zeros(HIDDEN) + 1e-6, "when": when} for when in whens]
    [prompt] = prompts_of([30], seed=4)
    asked = greedy(2, steering_vectors={"post_block": {3: entries}})
    [sample] = generate(llm, [prompt], asked)[0].outputs
    assert set(sample.signals) == {place, *(f"{place}#{i}" for i in (2, 3, 4))}
    _, states = reference.run([*prompt, *sample.token_ids][:-1], [PLACE])
    rows = states[PLACE]
    wanted = [rows @ row, *(gate.score(rows) for gate in gates), rows @ row]
    for name, scores in zip((place, *(f"{place}#{i}" for i in (2, 3, 4))), wanted, strict=True):
        signal = sample.signals[name]
        ours = torch.from_numpy(signal.scores)
        torch.testing.assert_close(ours, scores[signal.positions], rtol=1e-4, atol=2e-3)
    never = [{**when, "above": 1e9} for when in whens[:1]]
    stops = [{k: v for k, v in whens[1].items() if k not in ("above", "below")} | {"above": -1.0}]
    [ended] = generate(llm, [prompt], greedy(4, stop_when=[*never, *stops]))
    assert ended.outputs[0].stop_reason == f"{place}#2"


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        ({"sae": "nobody", "feature": 1}, "no autoencoder 'nobody' is registered; registered are"),
        ({"sae": "signals", "feature": 1}, "no autoencoder 'signals' is registered"),
        ({"sae": "sae", "feature": 40}, "has features 0 to 39, and feature=40 was given"),
        ({"sae": "best", "feature": 1}, "in which a feature's activation depends on all others"),
        ({"sae": "sae"}, r"\['feature'\]=None; give the number of a feature"),
        ({"sae": "sae", "feature": -1}, "give the number of a feature"),
        ({"sae": 3, "feature": 1}, r"\['sae'\]=3 is no name; give the consumer_id"),
        ({"sae": "sae", "feature": 1, "layer": 2}, r"unknown keys \['layer'\]"),
        ({"sae": "late", "feature": 1}, "which the network computes after post_block of layer 2"),
    ],
)
def test_what_is_no_feature_is_refused(llm, tmp_path, probe, sentence):
    folder = saved(tmp_path / "sae", CONFIGS["standard"])
    llm.register_consumer(SaeConsumer(folder))
    llm.register_consumer(SaeConsumer(folder, layer=3, consumer_id="late"))
    llm.register_consumer(
        SaeConsumer(saved(tmp_path / "best", CONFIGS["topk"]), consumer_id="best")
    )
    entry = {"vector": torch.ones(HIDDEN), "when": {"probe": probe, "above": 0.5}}
    with pytest.raises(ValueError, match=sentence):
        generate(llm, [[1, 2]], greedy(1, steering_vectors={"post_block": {2: entry}}))
