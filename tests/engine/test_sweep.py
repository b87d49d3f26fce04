"""Sweeps against a loop of `transformers`: every hook point, layer and position, one at a time."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.lora.request import LoRARequest

from engine.asking import prompts_of
from engine.reference import PatchedRow
from tllm.client.generation import SyncGeneration
from tllm.patching import Sweep
from tllm.patching.heatmap import Heatmap
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.hooks import HookPoint

PANDAS = importlib.util.find_spec("pandas") is not None
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


def test_functions_alone_measure_a_sweep(llm):
    """They need no answers. A partial function has no name of its own, and has its type's."""
    [clean], [corrupt] = pairs_of([12], first=5)
    asked = {"hooks": "post_block", "layers": [3], "positions": [-1]}
    alone = llm.patching.sweep(clean, corrupt, metric=third, **asked)
    beside = llm.patching.sweep(
        clean, corrupt, metric=[functools.partial(np.take, indices=3), "kl"], **asked
    )
    assert alone.metrics == ("third",) and beside.metrics == ("partial", "kl")
    assert alone.tensor.item() == beside.tensor.item() == alone.clean["third"].item() < 0


def test_a_metric_that_writes_into_what_it_is_given_changes_no_other(llm):
    """Centred in place, as users do: the next metric reads what the run gave."""

    def centred(logprobs):
        logprobs -= logprobs.max()
        return logprobs[3]

    asked = {"hooks": "post_block", "layers": [0], "positions": [-1]}
    (clean,), (corrupt,) = pairs_of([6], first=3)
    alone = llm.patching.sweep(clean, corrupt, metric="kl", **asked)
    beside = llm.patching.sweep(clean, corrupt, metric=[centred, "kl"], **asked)
    np.testing.assert_allclose(beside.values["kl"], alone.values["kl"], atol=1e-4)


def test_the_noise_floor_of_a_metric_that_gives_nan_is_none_that_can_be_trusted(llm):
    (clean,), (corrupt,) = pairs_of([6], first=3)
    nothing = {"nothing": lambda logprobs: float("nan"), "kl": "kl"}
    sweep = llm.patching.sweep(
        clean, corrupt, hooks="post_block", layers=[0], positions=[-1], metric=nothing
    )
    assert np.isnan(sweep.noise_floor["nothing"]) and sweep.noise_floor["kl"] < 1e-4


def test_experiments_that_gave_no_number_are_rows_all_the_same(llm, tmp_path):
    """Every second one: they come last, whichever end is asked for, and are counted."""
    clean, corrupt = pairs_of([6, 8], first=3)
    asked = {"hooks": ["post_block", "mlp_out"], "layers": [0, 1], "positions": None}
    for some in (False, True):
        measured = []

        def odd(logprobs, some=some, measured=measured):
            measured.append(1)
            return 1.5 if some and len(measured) % 2 else float("nan")

        sweep = llm.patching.sweep(clean, corrupt, **asked, metric={"odd": odd})
        lacking = sweep.not_numbers["odd"]
        assert len(sweep.rows) == len(sweep.frame if PANDAS else sweep.rows) == 4 * (6 + 8)
        assert lacking == sum(np.isnan(row["odd"]) for row in sweep.rows)
        assert lacking == 56 if not some else 0 < lacking < 56
        for smallest in (False, True):
            found = [row["odd"] for row in sweep.top(100, smallest=smallest)]
            assert len(found) == 56 and np.isnan(found[56 - lacking :]).all()
            assert found[: 56 - lacking] == [1.5] * (56 - lacking)
        sweep.heatmap(tmp_path / "nan.png", pair=0)


def test_the_top_rows_are_in_order_whichever_of_them_are_no_numbers():
    """A comparison with NaN orders nothing, not even the numbers beside it."""
    nan = np.nan
    values = {"kl": np.array([[[[0.1, nan, 0.9, 0.2, nan, 0.5]]]], np.float32)}
    ends = {"kl": np.zeros(1, np.float32)}
    sweep = Sweep(
        *(("post_block",), (0,), tuple(range(6)), values, ends, ends, ((7,) * 6,), False, 6),
        measured=np.ones((1, 1, 1, 6), np.bool_),
    )
    assert [row["position"] for row in sweep.top()] == [2, 5, 3, 0, 1, 4]
    assert [row["position"] for row in sweep.top(5, smallest=True)] == [0, 3, 5, 2, 1]


def test_a_source_that_is_dropped_in_the_middle_leaves_no_other_kept(llm):
    clean, corrupt = pairs_of([6, 8, 7], first=3)

    def drop_one(done, total):
        if not done:
            llm.patching.drop(next(iter(llm.patching.kept())))

    with pytest.raises(ValueError, match=r"patch\['source'\]\['run'\]: nothing is kept under"):
        llm.patching.sweep(clean, corrupt, hooks=HOOKS, metric="kl", progress=drop_one)
    assert llm.patching.kept() == {} and not llm.llm_engine.has_unfinished_requests()


def test_an_adapter_is_refused_where_there_is_none(llm):
    (clean,), (corrupt,) = pairs_of([6], first=3)
    asked = {"hooks": "post_block", "metric": "kl"}
    with pytest.raises(ValueError, match=r"lora_request='one' is str; give .*LoRARequest\("):
        llm.patching.sweep(clean, corrupt, **asked, lora_request="one")
    lora = LoRARequest("one", 1, "/nowhere")
    with pytest.raises(ValueError, match=r"takes none; start it with enable_lora=True"):
        llm.patching.sweep(clean, corrupt, **asked, lora_request=lora)
    with pytest.raises(ValueError, match=r"takes none; start it with enable_lora=True"):
        llm.patching.run(clean, hooks="post_block", lora_request=lora)


def test_numbers_of_numpy_are_answers_and_positions(llm):
    """As `argmax` gives them; a position alone is one, as a layer alone is."""
    [clean], [corrupt] = pairs_of([12], first=5)
    asked = {"hooks": "post_block", "layers": 3, "metric": "logit_diff"}
    plain = llm.patching.sweep(clean, corrupt, positions=[-1], answers=(5, 9), **asked)
    for answers in (tuple(np.array([5, 9])), np.array([5, 9]), [tuple(np.array([5, 9]))]):
        found = llm.patching.sweep(clean, corrupt, positions=np.int64(-1), answers=answers, **asked)
        assert torch.equal(found.tensor, plain.tensor)


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


def head_of(head):
    """The dimensions of one of four heads."""
    return list(range(32 * head, 32 * head + 32))


def test_heads_are_patched_one_at_a_time(llm, reference):
    """By position, and all positions in one experiment."""
    [clean], [corrupt] = pairs_of([7], first=4)
    asked = {"hooks": "attn_heads", "layers": [1, 3], "metric": "logit_diff", "answers": (5, 9)}
    each = llm.patching.sweep(clean, corrupt, heads="all", positions=[2, 4, -1], **asked)
    whole = llm.patching.sweep(clean, corrupt, heads=[3, 0], together=True, **asked)
    assert each.tensor.shape == (2, 4, 3) and whole.tensor.shape == (2, 2)
    assert (each.computed, whole.computed) == (2 * 4 * 2, 2 * 2)
    assert whole.heads == (3, 0) and whole.top(1)[0]["position"] is None
    assert [row["head"] for row in each.rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] * 2
    places = [("attn_heads", layer) for layer in (1, 3)]
    _, states = reference.run(clean, places)

    def expected(place, head, positions):
        rows = [PatchedRow(place, p, states[place][p], 0.0, 1.0, head_of(head)) for p in positions]
        found = logprobs_of(reference, corrupt, rows)
        return found[5] - found[9]

    for layer, place in enumerate(places):
        for head in range(4):
            for column, position in enumerate([2, 4, 6]):
                found = float(each.tensor[layer, head, column])
                assert found == pytest.approx(expected(place, head, [position]), abs=2e-3)
        for column, head in enumerate([3, 0]):
            found = float(whole.tensor[layer, column])
            assert found == pytest.approx(expected(place, head, range(7)), abs=2e-3)
    assert float(each.tensor.max() - each.tensor.min()) > 0.1


WAYS = [
    ("attn_heads", "all", [], True),  # the direct effect of each head
    ("attn_heads", "attn_out", [("mlp_in", 2), ("attn_in", 3)], True),  # as of the IOI circuit
    ("mlp_out", "all", [("attn_heads", 3)], False),
    ("post_block", "mlp_out", [("pre_attn", 2), ("mlp_out", 3)], False),
    ("attn_in", "all", [], False),
]


def later(sender, place):
    """Whether a place comes after a sender; what leaves a block enters the next one."""
    names = [point.value for point in HookPoint]

    def order(hook, layer):
        linked = hook == "pre_attn"
        return (layer - 1, names.index("post_block")) if linked else (layer, names.index(hook))

    return order(*place) > order(*sender)


def paths_by_transformers(reference, source, base, sender, head, position, freeze, receivers):
    """Log-probabilities where only the ways from a sender that are not frozen count: three runs
    with hooks."""
    frozen = ["attn_out", "mlp_out"] if freeze == "all" else [freeze]
    branches = [(hook, layer) for hook in frozen for layer in range(4)]
    _, still = reference.run(base, branches)
    _, new = reference.run(source, [sender])
    own = {"attn_heads": "attn_out", "attn_in": "attn_out", "mlp_in": "mlp_out"}.get(sender[0])
    kept = [each for each in branches if later(sender, each) and each != (own, sender[1])]
    positions = range(len(base)) if position is None else [position]
    dimensions = None if head is None else head_of(head)
    patches = [PatchedRow(sender, p, new[sender][p], 0.0, 1.0, dimensions) for p in positions]
    patches += [PatchedRow(each, p, still[each][p]) for each in kept for p in range(len(base))]
    if not receivers:
        return logprobs_of(reference, base, patches)
    # What arrives there is seen before it is frozen.
    _, arrived = reference.run(base, receivers, patches=patches)
    rows = [PatchedRow(to, p, arrived[to][p]) for to in receivers for p in range(len(base))]
    return logprobs_of(reference, base, rows)


@pytest.mark.parametrize(("hook", "freeze", "receivers", "by_head"), WAYS)
def test_paths_are_patched_as_by_hooks_of_transformers(
    llm, reference, hook, freeze, receivers, by_head
):
    """Everything but the path keeps the rows of the run that is patched."""
    [clean], [corrupt] = pairs_of([7], first=4)
    layers = [0, 2] if INTERPRETED else [0, 1, 2, 3]
    more = {"heads": [1, 2], "together": True} if by_head else {"positions": [3, 4, 6]}
    sweep = llm.patching.sweep(
        clean, corrupt, hooks=hook, layers=layers, freeze=freeze, receivers=receivers,
        metric=["logit_diff", third], answers=(5, 9), **more,
    )  # fmt: skip
    assert llm.patching.kept() == {}
    changed = set()
    for at in np.ndindex(sweep.values["third"].shape):
        layer, head, column = at[2], at[3] if by_head else None, at[-1]
        place = hook, layers[layer]
        position = None if by_head else [3, 4, 6][column]
        expected = logprobs_of(reference, corrupt)
        if not receivers or any(later(place, each) for each in receivers):
            expected = paths_by_transformers(
                reference, clean, corrupt, place, None if head is None else [1, 2][head],
                position, freeze, receivers,
            )  # fmt: skip
        assert sweep.values["third"][at] == pytest.approx(third(expected), abs=2e-3), at
        found = sweep.values["logit_diff"][at]
        assert found == pytest.approx(expected[5] - expected[9], abs=2e-3), at
        changed.add(round(float(found), 2))
    assert len(changed) > 2, "paths carry something"
    assert sweep.noise_floor["logit_diff"] < 1e-3


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
        ({"labels": ["one"]}, "labels has 1 entries for 2 columns"),
        ({"metric": "logprob"}, "was not measured; measured were kl"),
        ({"pair": 2}, "pair=2 was not swept; give one from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep.heatmap(tmp_path / "no.png", **arguments)
    with pytest.raises(ValueError, match=r"no.svg': a heatmap's name ends in .png, .jpg"):
        sweep.heatmap(tmp_path / "no.svg")
    sweep.heatmap(tmp_path / "one.pdf", pair=1)
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    uneven = dataclasses.replace(sweep, tokens=((7, 8), (7, 8, 9)))
    with pytest.raises(ValueError, match=r"different numbers of tokens.*give pair=, from 0 to 1"):
        uneven.heatmap(tmp_path / "no.png")
    # Counted from the end, positions are the same of all pairs.
    ends_alone = dataclasses.replace(uneven, positions=(-2, -1))
    ends_alone.heatmap(tmp_path / "ends.png", labels=["a story", "of two"])
    assert (tmp_path / "ends.png").read_bytes() == (tmp_path / "mean.png").read_bytes()


def test_a_heatmap_has_a_part_for_each_head_of_each_hook_point(tmp_path, monkeypatch):
    """Of keys there are fewer."""
    values = np.arange(16, dtype=np.float32).reshape(1, 2, 2, 2, 2)
    values[:, 1, :, 1] = np.nan
    ends = {"kl": np.zeros(1, np.float32)}
    sweep = Sweep(
        ("q", "k"), (0, 3), (0, 1), {"kl": values}, ends, ends, ((7, 8),), False, 12, heads=(0, 1)
    )
    drawn = []
    monkeypatch.setattr(Heatmap, "save", lambda self, path: drawn.append(self))
    sweep.heatmap(tmp_path / "heads.png")
    assert drawn[0].hooks == ("q, head 0", "q, head 1", "k, head 0")
    parts = values[0, 0, :, 0], values[0, 0, :, 1], values[0, 1, :, 0]
    np.testing.assert_array_equal(drawn[0].values, np.stack(parts))


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
    assert seen == [[0, 64], [64, 96, 64]], "the clean run with the corrupt one, the experiments"


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


def test_functions_of_one_name_are_told_apart_by_names_that_they_are_given(llm):
    """Two lambdas were refused as the same twice, and there was no way to give them."""
    [clean], [corrupt] = pairs_of([12], first=5)
    asked = {"hooks": "post_block", "layers": [3], "positions": [-1]}
    own = {"a": lambda logprobs: logprobs[3], "b": lambda logprobs: logprobs[4]}
    sentence = r"two different ones are called '<lambda>'.*metric=\{'name': function"
    with pytest.raises(ValueError, match=sentence):
        llm.patching.sweep(clean, corrupt, metric=list(own.values()), **asked)
    sweep = llm.patching.sweep(clean, corrupt, metric={**own, "kl": "kl"}, **asked)
    assert sweep.metrics == ("a", "b", "kl")
    third_alone = llm.patching.sweep(clean, corrupt, metric=third, **asked)
    assert sweep.values["a"].item() == third_alone.tensor.item() != sweep.values["b"].item()


def test_a_metric_may_be_given_with_the_answers_that_it_compares(llm):
    """As `metric={"logit_diff": (right, wrong)}`."""
    [clean], [corrupt] = pairs_of([12], first=9)
    asked = {"hooks": ["pre_attn"], "layers": "all", "positions": "all"}
    own = llm.patching.sweep(
        clean, corrupt, metric={"logit_diff": (5, 9), "kl": "kl", "third": third}, **asked
    )
    beside = llm.patching.sweep(
        clean, corrupt, metric=["logit_diff", "kl", third], answers=(5, 9), **asked
    )
    assert own.metrics == beside.metrics == ("logit_diff", "kl", "third")
    for name in own.metrics:
        np.testing.assert_allclose(own.values[name], beside.values[name], atol=1e-5)


async def told_later(done, of):
    """Nobody would await it."""


def returned(logprobs):
    """No metric."""
    return logprobs


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"corrupt": [1, 2, 3]}, "has 12 tokens and the corrupt one 3"),
        ({"corrupt": "same"}, "are the same"),
        ({"corrupt": [[1] * 12, [2] * 12]}, "1 clean prompts and 2 corrupt"),
        ({"metric": "accuracy"}, "choose of logit_diff, logprob, recovered, kl"),
        ({"metric": []}, "names nothing"),
        ({"metric": {}}, "names nothing"),
        ({"metric": ["kl", "kl"]}, "or the same twice"),
        ({"metric": {"a": "kl"}}, r"metric\['a'\] is 'kl'; .* each has its own name"),
        ({"metric": {"kl": returned}}, r"metric\['kl'\] is <function returned"),
        ({"metric": {"a": 5}}, r"metric\['a'\] is 5; give a function"),
        ({"metric": {3: returned}}, "metric has the key 3; give each function a name"),
        ({"metric": {"logit_diff": (5, 7)}}, r"metric\['logit_diff'\] and answers are different"),
        ({"metric": {"logit_diff": 5}, "answers": None}, r"give answers=\(right, wrong\)"),
        ({"metric": {"kl": (5, 9)}}, r"metric\['kl'\] is \(5, 9\); give a function"),
        ({"answers": None}, r"give answers=\(right, wrong\)"),
        ({"answers": (5, 9000)}, "no token id from 0 to 255"),
        ({"answers": [(5, 9)] * 3}, "answers has 3 entries for 1 pairs"),
        ({"answers": (5, 9, 7)}, r"answers: \(5, 9, 7\) are 3 answers .* \[\(right,\), ...\]"),
        ({"answers": [(5, 9, 7)]}, "are 3 answers for a pair of prompts"),
        ({"answers": (5, 5), "metric": "logit_diff"}, "has token 5 as the right answer and as the"),
        ({"answers": (5.0, 9)}, "5.0 is no token id from 0 to 255"),
        ({"positions": [12]}, "12 is out of range"),
        ({"positions": []}, "positions is empty; give one number or more"),
        ({"positions": [1.5]}, "positions: 1.5 is not a whole number"),
        ({"hooks": "lm_head_in"}, "belongs to no layer"),
        ({"layers": 7}, "has no layer 7"),
        ({"heads": "all"}, "heads is given with hooks='post_block'; heads are of q, k, v, attn_h"),
        ({"heads": [4], "hooks": "attn_heads"}, "heads: 4 must be from 0 to 3"),
        ({"heads": [], "hooks": "attn_heads"}, "heads is empty"),
        ({"freeze": "post_block"}, "post_block is no branch that a layer adds"),
        ({"together": "no"}, "together='no' must be True or False"),
        ({"noising": 1}, "noising=1 must be True or False"),
        ({"freeze": "all", "window": 2}, "window=2 was given with freeze or receivers"),
        ({"freeze": "all", "receivers": [("lm_head_in", None)]}, "leave receivers out"),
        ({"receivers": ["mlp_in"]}, "'mlp_in' is no place; give pairs such as"),
        ({"hooks": "zz"}, "hooks: unknown hook point 'zz'"),
        ({"hooks": 5}, "hooks: unknown hook point 5"),
        ({"layers": "zz"}, "layers: 'zz' is not a layer; give 'all'"),
        ({"layers": 1.5}, "layers: 1.5 is not a layer"),
        ({"layers": ["a"]}, "layers: 'a' is not a layer"),
        ({"positions": 1.5}, "positions: 1.5 is not a whole number"),
        ({"freeze": "zz"}, "freeze: unknown hook point 'zz'"),
        ({"freeze": 5}, "freeze: unknown hook point 5"),
        ({"layers": "0-4"}, "layers: post_block has no layers 0:5"),
        ({"receivers": [("mlp_in", 9)]}, "receivers: mlp_in has no layer 9"),
        ({"receivers": [("zz", 1)]}, "receivers: unknown hook point 'zz'"),
        ({"receivers": 5}, "receivers=5: give a list of pairs"),
        ({"receivers": np.array([1, 2])}, "receivers=array.*: give a list of pairs"),
        ({"metric": None}, "metric=None is not known; choose of logit_diff"),
        ({"metric": [[]]}, r"metric=\[\] is not known"),
        ({"metric": returned}, r"metric: returned returned array\(.*let it return one number"),
        ({"answers": {}}, r"answers={} is dict, which has no order; give \(right, wrong\)"),
        ({"answers": {5, 9}}, "answers={.*} is set, which has no order"),
        ({"answers": [None]}, "answers: None is no token id"),
        ({"at_once": "a"}, "at_once='a' is not a whole number"),
        ({"at_once": 0}, "at_once=0 must be 1 or more"),
        ({"window": 0}, "window=0 must be 1 or more"),
        ({"progress": told_later}, "progress=<function told_later.* is an async function"),
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
