"""Sweeps against a loop of `transformers`: every hook point, layer and position, one at a time."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import os

import numpy as np
import pytest
import torch
from PIL import Image

from engine.asking import prompts_of
from engine.reference import PatchedRow
from tllm.client.generation import SyncGeneration
from tllm.patching import Sweep
from tllm.patching.heatmap import Heatmap

INTERPRETED = os.environ["TLLM_TEST_RUNNER"] == "v2"
HOOKS = ["post_block", "mlp_out"]
LAYERS = [0, 2]
ANSWERS = [(5, 9), (100, 7)]


def pairs_of(lengths, first):
    """Prompts whose tokens differ at position `first` and one later."""
    clean = prompts_of(lengths, seed=30)
    corrupt = [list(prompt) for prompt in clean]
    for prompt in corrupt:
        for position in (first, first + 2):
            prompt[position] = prompt[position] % 250 + 1
    return clean, corrupt


def logprobs_of(reference, prompt, patches=()):
    logits, _ = reference.run(prompt, patches=patches)
    return logits[-1].double().log_softmax(-1).numpy()


def by_transformers(reference, source, base):
    """`[hooks, layers, positions, vocab]`, the log-probabilities after each experiment."""
    places = [(hook, layer) for hook in HOOKS for layer in LAYERS]
    _, states = reference.run(source, places)
    found = [
        logprobs_of(reference, base, [PatchedRow(place, p, states[place][p])])
        for place in places
        for p in range(len(base))
    ]
    return np.array(found).reshape(len(HOOKS), len(LAYERS), len(base), -1)


def measures_of(clean, corrupt, answers):
    right, wrong = answers

    def difference(logprobs):
        return logprobs[right] - logprobs[wrong]

    low = difference(corrupt)
    return {
        "logit_diff": difference,
        "logprob": lambda logprobs: logprobs[right],
        "recovered": lambda logprobs: (difference(logprobs) - low) / (difference(clean) - low),
        "kl": lambda logprobs: (np.exp(clean) * (clean - logprobs)).sum(),
        "third": lambda logprobs: logprobs[3],
    }


def third(logprobs):
    return logprobs[3]


@pytest.mark.parametrize("noising", [False, True])
def test_a_sweep_of_two_pairs_is_a_loop_of_transformers(llm, reference, noising):
    lengths = [6, 7] if INTERPRETED else [11, 26]  # the engine's prompts are in chunks of 24
    clean, corrupt = pairs_of(lengths, first=3)
    names = ["logit_diff", "logprob", "recovered", "kl", third]
    sweep = llm.patching.sweep(
        clean, corrupt, hooks=HOOKS, layers=LAYERS, metric=names, answers=ANSWERS, noising=noising
    )
    assert sweep.tensor.shape == (2, 2, 2, max(lengths))
    assert sweep.computed == sum(4 * (length - 3) for length in lengths)
    for i, length in enumerate(lengths):
        runs = [logprobs_of(reference, prompt) for prompt in (clean[i], corrupt[i])]
        source, base = (corrupt[i], clean[i]) if noising else (clean[i], corrupt[i])
        loop = by_transformers(reference, source, base)
        for name, measure in measures_of(*runs, ANSWERS[i]).items():
            expected = np.apply_along_axis(measure, -1, loop)
            np.testing.assert_allclose(
                sweep.values[name][i, :, :, :length], expected, rtol=2e-3, atol=2e-3
            )
            assert np.isnan(sweep.values[name][i, :, :, length:]).all()
            assert sweep.clean[name][i] == pytest.approx(measure(runs[0]), abs=1e-3)
            assert sweep.corrupt[name][i] == pytest.approx(measure(runs[1]), abs=1e-3)
    assert llm.patching.kept() == {}, "what was kept for the sweep is gone"


def test_where_the_last_token_leaves_the_last_block_all_is_recovered(llm):
    """And of the positions that are asked for, those before the first difference change nothing."""
    [clean], [corrupt] = pairs_of([12], first=5)
    sweep = llm.patching.sweep(
        clean, corrupt, hooks="post_block", positions=[2, -1], answers=(5, 9)
    )
    assert sweep.layers == (0, 1, 2, 3) and sweep.metrics == ("recovered",)
    assert sweep.tensor.shape == (4, 2), "layers and positions, of one pair and one hook point"
    assert sweep.tensor[3, 1] == pytest.approx(1.0, abs=1e-4)
    assert not sweep.tensor[:, 0].any()
    [best] = sweep.top(1)
    assert (best["position"], best["token"]) == (11, corrupt[11])
    assert best["recovered"] == float(sweep.tensor.max())
    assert len(sweep.rows) == 8 and sweep.top(2, smallest=True)[0]["recovered"] <= 0
    with pytest.raises(ValueError, match="metric='kl' was not measured"):
        sweep.top(metric="kl")


def test_windows_of_layers_are_patched_together(llm, reference):
    """Of three layers; those at the ends have fewer. The bar hears of every experiment."""
    [clean], [corrupt] = pairs_of([7], first=4)
    told = []
    sweep = llm.patching.sweep(
        clean, corrupt, hooks="mlp_out", positions=[4, 6], metric=["logit_diff", "kl"],
        answers=(5, 9), window=3, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told[-1] == (9, 9) and sweep.computed == 8 and sweep.window == 3
    places = [("mlp_out", layer) for layer in range(4)]
    _, states = reference.run(clean, places)
    runs = [logprobs_of(reference, prompt) for prompt in (clean, corrupt)]
    for name, measure in measures_of(*runs, (5, 9)).items():
        if name not in sweep.values:
            continue
        for layer in range(4):
            window = [place for place in places if abs(place[1] - layer) <= 1]
            for column, position in enumerate([4, 6]):
                patches = [PatchedRow(place, position, states[place][position]) for place in window]
                expected = measure(logprobs_of(reference, corrupt, patches))
                found = sweep.values[name][0, 0, layer, column]
                assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert 0 <= sweep.noise_floor["logit_diff"] < 1e-3
    assert np.abs(sweep.values["logit_diff"] - sweep.corrupt["logit_diff"]).max() > 0.05


def test_a_heatmap_has_a_cell_for_each_experiment(tmp_path):
    values = {"kl": np.array([[[[0, 1.0], [-2.0, np.nan]]]], np.float32).repeat(2, 0)}
    ends = {"kl": np.zeros(2, np.float32)}
    tokens = ((7, 8), (7, 9))
    sweep = Sweep(("post_block",), (0, 3), (0, 1), values, ends, ends, tokens, False, 8)
    sweep.heatmap(tmp_path / "mean.png", labels=["a story", "of two"])
    sweep.heatmap(tmp_path / "one.png", pair=1)
    drawn = Heatmap("kl", ("post_block",), (0, 3), ("0", "1"), values["kl"][0])
    with Image.open(tmp_path / "one.png") as picture:
        cells = [
            [picture.getpixel(drawn.cell(0, layer, position)) for position in range(2)]
            for layer in range(2)
        ]
    white, half, blue, grey = (247, 247, 247), cells[0][1], (33, 102, 172), (220, 220, 220)
    assert cells == [[white, half], [blue, grey]]
    assert half[0] > half[2], "red above 0"
    none = np.full((2, 1, 2, 3), np.nan, np.float32)
    longer = dataclasses.replace(sweep, positions=(0, 1, 2), values={"kl": none})
    none[..., :2] = values["kl"]
    longer.heatmap(tmp_path / "longer.png", pair=1)
    assert (tmp_path / "longer.png").read_bytes() == (tmp_path / "one.png").read_bytes()
    for arguments, message in (
        ({"labels": ["one"]}, "labels has 1 entries for 2 positions"),
        ({"metric": "logprob"}, "was not measured; measured were kl"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep.heatmap(tmp_path / "no.png", **arguments)
    uneven = dataclasses.replace(sweep, tokens=((7, 8), (7, 8, 9)))
    with pytest.raises(ValueError, match=r"different numbers of tokens.*give pair=, from 0 to 1"):
        uneven.heatmap(tmp_path / "no.png")


def test_the_prefix_before_the_patched_position_is_computed_once(llm, monkeypatch):
    """Blocks of 32 tokens: two before the first difference, three before the last token."""
    [clean], [corrupt] = pairs_of([100], first=70)
    llm.reset_prefix_cache()
    computed, seen = SyncGeneration._computed, []

    def noted(self, asked):
        outputs = computed(self, asked)
        seen.append([output.num_cached_tokens for output in outputs])
        return outputs

    monkeypatch.setattr(SyncGeneration, "_computed", noted)
    llm.patching.sweep(
        clean, corrupt, hooks="post_block", layers=0, positions=[70, 99], metric="kl"
    )
    # The last one patches the row before the first difference, which changes nothing.
    assert seen == [[0], [64], [64, 96, 64]], "the clean run, the corrupt one, the experiments"


def test_a_frame_is_of_pandas_or_says_what_to_do(monkeypatch):
    values = {"kl": np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)}
    ends = {"kl": np.zeros(1, np.float32)}
    sweep = Sweep(("post_block",), (0, 1), (0, -1), values, ends, ends, ((7, 8),), False, 4)
    assert [row["position"] for row in sweep.rows] == [0, 1, 0, 1]
    try:
        frame = sweep.frame
    except ImportError:  # the suite's environment has no pandas; a user's may
        assert importlib.util.find_spec("pandas") is None
    else:
        columns = ["pair", "hook", "layer", "position", "token", "kl"]
        assert list(frame.columns) == columns and frame["kl"].tolist() == [0, 1, 2, 3]
    assert torch.equal(sweep.tensor.flatten(), torch.arange(4.0))
    find = builtins.__import__

    def without_pandas(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"pip install pandas, or use \.rows"):
        sweep.frame  # noqa: B018


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"corrupt": [1, 2, 3]}, "has 12 tokens and the corrupt one 3"),
        ({"corrupt": "same"}, "are the same"),
        ({"corrupt": [[1] * 12, [2] * 12]}, "1 clean prompts and 2 corrupt"),
        ({"metric": "accuracy"}, "choose of logit_diff, logprob, recovered, kl"),
        ({"metric": []}, "names nothing"),
        ({"answers": None}, r"give answers=\(right, wrong\)"),
        ({"answers": (5, 9000)}, "no token id from 0 to 255"),
        ({"answers": [(5, 9)] * 3}, "answers has 3 entries for 1 pairs"),
        ({"positions": [12]}, "12 is out of range"),
        ({"hooks": "lm_head_in"}, "belongs to no layer"),
        ({"layers": 7}, "has no layer 7"),
        ({"window": 0}, "window=0 is not allowed; give 1 or more layers"),
    ],
)
def test_what_cannot_be_swept_is_refused(llm, change, sentence):
    [clean], [corrupt] = pairs_of([12], first=3)
    asked = {"clean": clean, "corrupt": corrupt, "hooks": "post_block", "answers": (5, 9)} | change
    if asked["corrupt"] == "same":
        asked["corrupt"] = clean
    with pytest.raises(ValueError, match=sentence):
        llm.patching.sweep(**asked)
    assert llm.patching.kept() == {}
