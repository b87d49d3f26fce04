"""Logit, tuned and Jacobian lenses against `transformers`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from engine.asking import generate, greedy, prompts_of, sampled
from engine.reference import HIDDEN, LAYERS, VOCAB
from tllm.consumers.lens import LensConsumer
from tllm.runtime.kernels.backend import INTERPRETED

LENGTHS = [5, 11, 3] if INTERPRETED else [5, 60, 3, 17]  # prompts are computed in chunks of 24
TOLERANCE = 2e-4
"""Of a log-probability: float32 sums in another order, through the norm and the LM head."""


def small_maps(count):
    """Maps near the identity, and offsets."""
    generator = torch.Generator().manual_seed(4)
    weights = 0.05 * torch.randn(count, HIDDEN, HIDDEN, generator=generator)
    return weights, torch.randn(count, HIDDEN, generator=generator)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder as `TunedLens.save` writes it."""
    folder = tmp_path_factory.mktemp("lens") / "tuned"
    folder.mkdir()
    weights, biases = small_maps(LAYERS)
    state = {}
    for layer in range(LAYERS):
        state |= {f"{layer}.weight": weights[layer], f"{layer}.bias": biases[layer]}
    torch.save(state, folder / "params.pt")
    config = {"base_model_name_or_path": "tiny", "d_model": HIDDEN, "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config | {"bias": True}))
    return folder


@pytest.fixture(scope="module")
def jacobian(tmp_path_factory):
    """A file as `JacobianLens.save` writes it: of all layers but the last."""
    path = tmp_path_factory.mktemp("lens") / "tiny_jacobian_lens.pt"
    weights = small_maps(LAYERS - 1)[0] + torch.eye(HIDDEN)
    matrices = {layer: weights[layer].half() for layer in range(LAYERS - 1)}
    layers = list(matrices)
    torch.save({"J": matrices, "n_prompts": 9, "source_layers": layers, "d_model": HIDDEN}, path)
    return path


@pytest.fixture(scope="module")
def expected(reference):
    """`expected(tokens, kind, layers)`: log-probabilities `[tokens, layers, vocab]`."""
    weights, biases = small_maps(LAYERS)
    matrices = (small_maps(LAYERS - 1)[0] + torch.eye(HIDDEN)).half().float()

    @torch.no_grad()
    def logprobs(tokens, kind, layers):
        site = "pre_attn" if kind == "tuned" else "post_block"
        _, states = reference.run(tokens, [(site, layer) for layer in layers])
        found = []
        for layer in layers:
            rows = states[site, layer]
            if kind == "tuned":
                rows = rows + rows @ weights[layer].T + biases[layer]
            if kind == "jacobian":
                rows = rows @ matrices[layer].T
            model = reference.model
            found.append(model.lm_head(model.model.norm(rows)).log_softmax(-1))
        return torch.stack(found, 1)

    return logprobs


def assert_best(payload, wanted, positions, top_k):
    """The best tokens of `wanted` `[tokens, layers, vocab]`, at these positions."""
    wanted = wanted[list(positions)]
    for part in (payload["token_ids"], payload["logprobs"]):
        assert part.positions.tolist() == list(positions)
        assert part.values.shape == (*wanted.shape[:2], top_k)
    found = torch.from_numpy(payload["logprobs"].values)
    best = wanted.topk(top_k).values
    assert float((found - best).abs().max()) < TOLERANCE
    # Of tokens that are as good to the last digits, either may be named.
    named = wanted.gather(2, torch.from_numpy(payload["token_ids"].values).long())
    assert float((found - named).abs().max()) < TOLERANCE


def tokens_of(output, sample):
    return [*output.prompt_token_ids, *sample.token_ids][:-1]


@pytest.mark.parametrize("window", ["out_of_band", "same_step"])
def test_the_logit_lens_of_a_mixed_batch(llm, expected, window):
    llm.register_consumer(LensConsumer(window=window, top_k=4))
    prompts = prompts_of(LENGTHS, seed=3)
    asked = [
        greedy(4, consumers={"lens": {}}),
        greedy(4, consumers={"lens": {"layers": "last,0", "top_k": 2}}),
        greedy(4),
        greedy(4, consumers={"lens": {"positions": "all_generated", "layers": 2}}),
    ][: len(prompts)]
    outputs = generate(llm, prompts, asked)
    first, second, plain = outputs[:3]
    payload = first.consumer_results["lens"].payload
    assert payload["layers"] == list(range(LAYERS))
    tokens = tokens_of(first, first.outputs[0])
    layers = list(range(LAYERS))
    assert_best(payload, expected(tokens, "logit", layers), range(len(tokens)), 4)
    payload = second.consumer_results["lens"].payload
    assert payload["layers"] == [3, 0]
    tokens = tokens_of(second, second.outputs[0])
    assert_best(payload, expected(tokens, "logit", [3, 0]), range(len(tokens)), 2)
    assert plain.consumer_results == {}
    for last in outputs[3:]:
        tokens = tokens_of(last, last.outputs[0])
        payload = last.consumer_results["lens"].payload
        positions = range(len(last.prompt_token_ids), len(tokens))
        assert_best(payload, expected(tokens, "logit", [2]), positions, 4)


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_a_fitted_lens_of_each_of_n_samples(llm, expected, kind, request):
    llm.register_consumer(LensConsumer(path=request.getfixturevalue(kind), top_k=3))
    prompts = prompts_of(LENGTHS[:2], seed=5)
    outputs = generate(llm, prompts, sampled(5, n=3, consumers={"lens": {}}))
    layers = list(range(LAYERS - (kind == "jacobian")))
    for output in outputs:
        assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
        for sample in output.outputs:
            tokens = tokens_of(output, sample)
            result = sample.consumer_results["lens"]
            assert (result.status, result.payload["layers"]) == ("ok", layers)
            wanted = expected(tokens, kind, layers)
            assert_best(result.payload, wanted, range(len(tokens)), 3)


def test_a_lens_of_sequences_that_are_preempted_and_share_a_prefix(tight_llm, expected):
    tight_llm.register_consumer(LensConsumer([1, 3], top_k=2, positions="all_generated"))
    common = prompts_of([33], seed=8)[0]
    prompts = [[*common, *tail] for tail in prompts_of([4] * (3 if INTERPRETED else 7), seed=9)]
    length = 4 if INTERPRETED else 40
    options = [{"lens": {}}, {"lens": {"positions": "last_prompt"}}]
    asked = [greedy(length, consumers=options[i % 2]) for i in range(len(prompts))]
    outputs = generate(tight_llm, prompts, asked)
    assert any(output.num_cached_tokens for output in outputs)
    for i, output in enumerate(outputs):
        tokens = tokens_of(output, output.outputs[0])
        start = len(output.prompt_token_ids)
        positions = [start - 1] if i % 2 else range(start, len(tokens))
        payload = output.consumer_results["lens"].payload
        assert_best(payload, expected(tokens, "logit", [1, 3]), positions, 2)


def test_positions_that_choose_no_token_are_no_rows_and_no_silence(llm):
    llm.register_consumer(LensConsumer(top_k=4))
    asked = [
        greedy(1, consumers={"lens": {"positions": "all_generated", "layers": [2], "top_k": 3}}),
        greedy(1, consumers={"lens": {"positions": "last_prompt", "layers": [2], "top_k": 3}}),
    ]
    nothing, something = generate(llm, prompts_of([5, 5]), asked)
    for output, count in ((nothing, 0), (something, 1)):
        result = output.outputs[0].consumer_results["lens"]
        assert (result.status, result.error, result.payload["layers"]) == ("ok", None, [2])
        assert result.payload.keys() == {"layers", "token_ids", "logprobs"}
        ids, logprobs = (result.payload[name] for name in ("token_ids", "logprobs"))
        assert (len(ids.positions), ids.values.shape) == (count, (count, 1, 3))
        assert (len(logprobs.positions), logprobs.values.shape) == (count, (count, 1, 3))
        assert (str(ids.values.dtype), str(logprobs.values.dtype)) == ("int32", "float32")


def test_many_rows_go_through_the_head_in_parts(llm, expected, monkeypatch):
    monkeypatch.setattr("tllm.consumers.lens._CHUNK_BYTES", 4 * VOCAB * 3)
    llm.register_consumer(LensConsumer(top_k=2))
    [output] = generate(llm, prompts_of([14]), greedy(2, consumers={"lens": {}}))
    tokens = tokens_of(output, output.outputs[0])
    wanted = expected(tokens, "logit", list(range(LAYERS)))
    assert_best(output.consumer_results["lens"].payload, wanted, range(len(tokens)), 2)


def test_what_a_request_cannot_have_is_refused_before_it_runs(llm, jacobian):
    llm.register_consumer(LensConsumer(np.array([0, 2]), top_k=np.int64(3)))
    llm.register_consumer(LensConsumer(path=jacobian, consumer_id="second"))
    for options, message in (
        ({"lens": {"layers": [1]}}, "registered with layers 0, 2; choose of these"),
        (
            {"lens": {"layers": 4}},
            "post_block has no layer 4; post_block needs a layer from 0 to 3",
        ),
        ({"lens": {"layers": "first"}}, "'first' is not a layer; give 'all', 'last', an index"),
        ({"lens": {"top_k": 4}}, "must be from 1 to 3"),
        ({"lens": {"positions": "last"}}, r"consumers\['lens'\]\['positions'\]='last'"),
        ({"lens": {"layer": 1}}, r"unknown options \['layer'\]; it takes enabled, positions"),
        ({"second": {"layers": [3]}}, "registered with layers 0, 1, 2; choose of these"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(llm, prompts_of([5]), greedy(2, consumers=options))
    options = {"lens": {"layers": np.array([2]), "top_k": np.int64(2), "positions": np.arange(3)}}
    [output] = generate(llm, prompts_of([5]), greedy(2, consumers=options))
    assert output.consumer_results["lens"].payload["token_ids"].values.shape == (3, 1, 2)


def test_lenses_that_are_not_understood_are_refused(llm, tuned, tmp_path):
    wide = tmp_path / "wide.pt"
    torch.save({"J": {0: torch.eye(64)}, "d_model": 64}, wide)
    short = tmp_path / "short.pt"
    torch.save({"J": {0: torch.eye(HIDDEN)}}, short)
    broken = tmp_path / "broken.pt"
    torch.save({"J": {0: torch.eye(HIDDEN), 1: torch.full((HIDDEN, HIDDEN), torch.nan)}}, broken)
    for lens, message in (
        (LensConsumer(path=wide), "is for hidden size 64, and the model's is 128"),
        (LensConsumer([0, 1], path=short), "has no layer 1; it has 0"),
        (LensConsumer(path=broken), "layer 1 of the lens in path=.* NaN or infinite in float32"),
        (LensConsumer([9]), "layers: post_block has no layer 9; post_block needs"),
        (LensConsumer(top_k=1000), "top_k=1000 must be from 1 to 256"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.register_consumer(lens)
    for site in ("k", "attn_heads", "router"):
        with pytest.raises(ValueError, match=f"site='{site}' has rows that the LM head cannot"):
            LensConsumer(site=site)
    checkpoint, more, empty = (tmp_path / name for name in ("fit.pt", "code.pt", "empty.pt"))
    torch.save({"sum": torch.eye(2), "count": 3}, checkpoint)
    torch.save({"J": {0: torch.eye(2)}, "made by": LensConsumer}, more)
    empty.write_bytes(b"")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"lens_type": "mlp_tuned_lens"}))
    torch.save({"0.weight": torch.eye(2)}, other / "params.pt")
    for arguments, message in (
        ({"path": tmp_path / "none.pt"}, "is no lens; give a folder of tuned-lens"),
        ({"path": checkpoint}, r"which has 'J' by layer; it has \['count', 'sum'\]"),
        ({"path": more}, "holds more than tensors"),
        ({"path": empty}, "cannot be read as a file of PyTorch|is no file of PyTorch"),
        ({"path": other}, "is of lens_type 'mlp_tuned_lens'; 'linear_tuned_lens' is known"),
        ({"path": tuned, "site": "post_block"}, "was fitted on pre_attn; leave site out"),
        ({"site": "lm_head_in"}, "belongs to no layer"),
        ({"site": "zz"}, "site: unknown hook point 'zz'"),
        ({"top_k": 0}, "top_k=0 must be 1 or more"),
        ({"window": "background"}, "window='background' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            LensConsumer(**arguments)


EYE = torch.eye(4)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({0: EYE, -1: EYE}, "layer -1 is negative; layers count from 0"),
        ({0: EYE, 1: torch.eye(3)}, r"rows of different widths: 4 \(layer 0\), 3 \(layer 1\)"),
        ({0: [1.0]}, r"layer 0 has \[1.0\] as its weight; a tensor \[hidden, hidden\] of floating"),
        (
            {0: EYE[0, 0]},
            r"layer 0 has a weight of shape \[\] and torch.float32; \[hidden, hidden\]",
        ),
        (
            {0: EYE.int()},
            r"of shape \[4, 4\] and torch.int32; \[hidden, hidden\] of floating-point",
        ),
    ],
)
def test_a_file_whose_layers_are_no_maps_of_rows_is_refused_by_name(tmp_path, matrices, message):
    torch.save({"J": matrices}, tmp_path / "fit.pt")
    with pytest.raises(ValueError, match=f"path=.*fit.pt'.*{message}"):
        LensConsumer(path=tmp_path / "fit.pt")


@pytest.mark.parametrize(
    ("state", "config", "message"),
    [
        ({"0.weight": 3.0}, b"{}", "layer 0 has 3.0 as its weight; a tensor"),
        ({"0.weight": EYE, "0.bias": [1]}, b"{}", r"layer 0 has \[1\] as its bias; a tensor"),
        ({"0.weight": EYE, "0.bias": EYE[0, :2]}, b"{}", r"has a bias of shape \[2\]"),
        ({"0.weight": EYE, 0: EYE}, b"{}", "has parameters 0; those of a linear tuned lens are"),
        ({"0.weight": EYE}, b"{", "config.json is damaged"),
        ({"0.weight": EYE}, b"\xff\xfe", "config.json is damaged"),
        ({"0.weight": EYE}, b"[]", "config.json is a list; it must be a JSON object"),
    ],
)
def test_a_damaged_folder_of_a_tuned_lens_is_refused_by_name(tmp_path, state, config, message):
    torch.save(state, tmp_path / "params.pt")
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ValueError, match=f"path=.*{message}"):
        LensConsumer(path=tmp_path)


class Faulty(LensConsumer):
    """A lens that fails when a sequence's result is made."""

    def given(self, options, found):
        raise RuntimeError("of no use")


def test_a_result_that_cannot_be_made_is_said_to_be_an_error(llm):
    llm.register_consumer(Faulty(consumer_id="faulty"))
    [output] = generate(llm, prompts_of([5]), greedy(2, consumers={"faulty": {}}))
    result = output.outputs[0].consumer_results["faulty"]
    assert result.status == "error"
    assert "of no use" in result.error
