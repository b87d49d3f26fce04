"""`extract` on the demo model against transformers, and what files and vectors do in an engine."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_engines import SHARE
from transformers import AutoModelForCausalLM, AutoTokenizer

import tllm
from demo import moods as told
from demo.text import mood, mood_pair, neutral_opening
from tllm import LLM, SamplingParams
from tllm.steering import ExtractedModule, SteeringModule, extract, fit_probe, load, sweep
from tllm.steering.directions import FINDERS, find_direction

MODEL = str(Path(__file__).parents[2] / "demo" / "model")
LAYERS, HIDDEN = 6, 128

PAIRS = [mood_pair(Random(seed)) for seed in range(24)]
HAPPY = [happy for happy, _ in PAIRS]
SAD = [sad for _, sad in PAIRS]


class Reference:
    """The demo model in transformers: its rows, and its logits when something is added."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def module(self, hook: str, layer: int) -> tuple[Any, bool]:
        """The module at whose boundary a hook point lies, and whether it is its input."""
        block = self.model.model.layers[layer]
        return {
            "pre_attn": (block, True),
            "attn_out": (block.self_attn, False),
            "mlp_out": (block.mlp, False),
            "post_block": (block, False),
        }[hook]

    @torch.inference_mode()
    def run(
        self,
        prompt: str | list[int],
        read: tuple[str, int] | None = None,
        add: Mapping[tuple[str, int], Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities after the last token, and the rows `[tokens, hidden]` at `read`."""
        seen: list[torch.Tensor] = []

        def changed(vector: Any) -> Any:
            def touch(tensor: torch.Tensor) -> torch.Tensor:
                if vector is None:
                    seen.append(tensor[0].clone())
                    return tensor
                return tensor + torch.as_tensor(vector)

            return touch

        def on_input(touch: Any) -> Any:
            def hook(_: Any, args: Any, kwargs: Any) -> Any:
                if args:
                    return (touch(args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": touch(kwargs["hidden_states"])}

            return hook

        def on_output(touch: Any) -> Any:
            def hook(_: Any, __: Any, out: Any) -> Any:
                return (touch(out[0]), *out[1:]) if isinstance(out, tuple) else touch(out)

            return hook

        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        with ExitStack() as stack:
            asked = [(place, changed(vector)) for place, vector in (add or {}).items()]
            for (hook, layer), touch in asked + ([(read, changed(None))] if read else []):
                module, is_input = self.module(hook, layer)
                handle = (
                    module.register_forward_pre_hook(on_input(touch), with_kwargs=True)
                    if is_input
                    else module.register_forward_hook(on_output(touch))
                )
                stack.enter_context(handle)
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        return logits.log_softmax(-1), seen[0] if seen else None

    def rows(self, prompts: Any, hook: str, layer: int) -> list[torch.Tensor]:
        found = [self.run(prompt, read=(hook, layer))[1] for prompt in prompts]
        return [rows for rows in found if rows is not None]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        MODEL,
        dtype="float32",
        enforce_eager=True,
        **SHARE,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=512,
        hook_points="all",
        disable_log_stats=True,
    )


@pytest.fixture(scope="module")
def mood_module(llm: LLM) -> ExtractedModule:
    return extract(llm, HAPPY, SAD)


# -- extract ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FINDERS)
@pytest.mark.parametrize("hook", ["post_block", "pre_attn", "mlp_out"])
def test_the_vectors_are_those_of_the_rows_in_transformers(
    llm: LLM, reference: Reference, method: str, hook: str
):
    module = extract(llm, HAPPY[:12], SAD[:12], method=method, hook=hook, layers=[2, -1])
    assert module.layers == [2, 5]
    for layer in module.layers:
        happy, sad = (
            torch.stack([rows[-1] for rows in reference.rows(prompts[:12], hook, layer)])
            for prompts in (HAPPY, SAD)
        )
        expected = find_direction(happy, sad, method)
        entry = module.vectors[hook][layer]
        assert float(entry["vector"] @ expected.vector) == pytest.approx(1, abs=1e-4)
        assert entry["scale"] == pytest.approx(expected.scale, rel=1e-3)


def test_the_layers_that_have_read_the_word_tell_the_moods_apart(mood_module: ExtractedModule):
    assert mood_module.layers == list(range(LAYERS))
    # After the first block the last token, a full stop, has hardly seen the mood word.
    assert mood_module.separation[0] < 0.9
    assert all(mood_module.separation[layer] > 0.99 for layer in range(1, LAYERS))
    assert mood_module.best_layer in (1, 2, 3)


def test_every_token_of_a_prompt_can_be_a_row(llm: LLM, reference: Reference):
    module = extract(llm, HAPPY[:6], SAD[:8], positions="all_prompt", layers=3, paired=False)
    happy, sad = (
        torch.cat(reference.rows(prompts, "post_block", 3)) for prompts in (HAPPY[:6], SAD[:8])
    )
    expected = find_direction(happy, sad, paired=False)
    entry = module.vectors["post_block"][3]
    np.testing.assert_allclose(entry["vector"], expected.vector, atol=1e-4)
    assert entry["scale"] == pytest.approx(expected.scale, rel=1e-3)


def test_the_tokens_of_a_prompt_can_be_averaged(llm: LLM, reference: Reference):
    module = extract(
        llm, HAPPY[:6], SAD[:6], positions="all_prompt", reduction="mean", layers=3, method="pca"
    )
    happy, sad = (
        torch.stack([rows.mean(0) for rows in reference.rows(prompts[:6], "post_block", 3)])
        for prompts in (HAPPY, SAD)
    )
    expected = find_direction(happy, sad, "pca")
    np.testing.assert_allclose(
        module.vectors["post_block"][3]["vector"], expected.vector, atol=1e-4
    )


def test_prompts_may_be_token_ids_and_come_in_batches(llm: LLM, reference: Reference):
    ids = [[reference.tokenizer(text).input_ids for text in side[:7]] for side in (HAPPY, SAD)]
    module = extract(llm, *ids, layers=2, batch_size=3)
    expected = extract(llm, HAPPY[:7], SAD[:7], layers=2)
    got, wanted = (each.vectors["post_block"][2] for each in (module, expected))
    np.testing.assert_allclose(got["vector"], wanted["vector"], atol=1e-5)
    assert got["scale"] == pytest.approx(wanted["scale"], rel=1e-5)
    assert module.separation.keys() == expected.separation.keys() == {2}


def test_a_unit_scale(llm: LLM):
    module = extract(llm, HAPPY[:4], SAD[:4], layers=[1, 2], scale="unit")
    assert [entry["scale"] for entry in module.vectors["post_block"].values()] == [1.0, 1.0]


def test_an_extracted_module_can_be_saved(llm: LLM, mood_module: ExtractedModule, tmp_path: Path):
    again = load(mood_module.save(tmp_path / "mood.safetensors"))
    assert isinstance(again, ExtractedModule)
    assert again.separation == mood_module.separation
    assert again.metadata == mood_module.metadata
    assert again.best_layer == mood_module.best_layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svm"}, "choose one of diffmean, pca, lat, probe"),
        ({"hook": "nowhere"}, "unknown hook point"),
        ({"hook": "lm_head_in"}, "belongs to no layer"),
        ({"layers": 6}, "^layers: post_block has no layer 6; post_block needs a layer from 0 to 5"),
        ({"layers": [0, 9]}, "^layers: post_block has no layer 9"),
        ({"layers": "some"}, "^layers: 'some' is not a layer; give 'all', 'last', an index"),
        ({"hook": "router"}, "^hook: qwen2 has no hook point router"),
        ({"positions": [99]}, "^positions: position 99"),
        ({"reduction": "sum"}, "^reduction='sum' is not known; choose one of none, mean"),
        ({"positions": "last"}, "'last' is not known"),
        ({"positions": "all_generated"}, "put the texts into the prompts"),
        ({"positions": "all_prompt"}, r"different numbers of rows for positive\[1\]"),
        (
            {"positions": {"phase": "prompt", "token_ids": [1]}, "paired": False},
            "selects no token of prompt 0",
        ),
        ({"scale": 2.0}, "choose one of natural, unit"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
        ({"negative": SAD[:2]}, "no pairs; give as many of each"),
        ({"negative": SAD[:1]}, "at least two prompts"),
        ({"negative": "It was a sad day."}, "negative=.* is str; give a list"),
        ({"negative": (text for text in SAD)}, "negative=.* is generator; give a list"),
        ({"negative": set(SAD[:3])}, "negative=.* is set; give a list"),
        ({"negative": None}, "negative=None is NoneType; give a list"),
        ({"negative": [*SAD[:2], 3]}, r"negative\[2\]=3 is neither a text nor a list of token ids"),
        ({"negative": [[1], [2], [1.5]]}, r"negative\[2\]=\[1.5\] is neither"),
        ({"batch_size": "a"}, "batch_size='a' is not a whole number"),
        ({"seed": None}, "seed=None is not a whole number"),
        ({"paired": "no"}, "paired='no' must be True or False"),
        ({"negative": HAPPY[:3]}, "post_block of layer 0: the positive and the negative rows"),
    ],
)
def test_what_cannot_be_extracted_is_refused(llm: LLM, options: dict[str, Any], message: str):
    # The second happy prompt is longer than its partner.
    happy = [HAPPY[0], HAPPY[1] + " She smiled.", HAPPY[2]]
    if options.get("negative") == HAPPY[:3]:
        happy = HAPPY[:3]
    asked: dict[str, Any] = {"positive": happy, "negative": SAD[:3]} | options
    with pytest.raises(ValueError, match=message):
        extract(llm, **asked)


def test_vectors_are_not_made_while_queued_requests_wait(llm: LLM):
    """They would end among those that are made, and nobody would have their outputs."""
    queued = llm.enqueue(HAPPY[:2], tllm.SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="unfinished, and their outputs would be lost in making"):
        extract(llm, HAPPY, SAD)
    with pytest.raises(ValueError, match="unfinished, and their outputs would be lost in making"):
        sweep(llm, {"post_block": {0: np.ones(128)}}, [1.0], HAPPY[:1], len)
    assert len(llm.wait_for_completion(use_tqdm=False)) == len(queued)


def test_an_engine_whose_calls_are_awaited_is_refused():
    engine = tllm.AsyncLLM.__new__(tllm.AsyncLLM)  # that it is one is all that is looked at
    for ask in (
        lambda: extract(engine, HAPPY[:2], SAD[:2]),
        lambda: fit_probe(engine, HAPPY[:2], SAD[:2]),
        lambda: sweep(engine, {"post_block": {1: [1.0]}}, [0.0], HAPPY[:1], len),
    ):
        with pytest.raises(
            TypeError, match=r"with a tllm\.LLM, and a .* was given; make them with"
        ):
            ask()


# -- what files do in an engine --------------------------------------------------------------------


def logprobs(llm: LLM, prompt: str, **steering: Any) -> dict[int, float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, **steering)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    (first,) = output.outputs[0].logprobs
    return {token: entry.logprob for token, entry in first.items()}


def files(folder: Path) -> Iterator[tuple[SteeringModule, dict[tuple[str, int], Any]]]:
    """Modules from files, and what they say shall be added where."""
    random = torch.Generator().manual_seed(0)

    def vector() -> torch.Tensor:
        return 2 * torch.randn(HIDDEN, generator=random)

    directions = {1: vector(), 4: vector()}
    writer = gguf.GGUFWriter(folder / "cv.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "qwen2")
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield load(folder / "cv.gguf"), {("post_block", n): v for n, v in directions.items()}

    tensors = {
        "blocks.2.hook_resid_pre": vector(),
        "blocks.3.hook_attn_out": vector(),
        "model.layers.0": vector(),
    }
    safetensors.torch.save_file(tensors, folder / "lens.safetensors")
    yield (
        load(folder / "lens.safetensors", scale=0.5),
        {
            ("pre_attn", 2): 0.5 * tensors["blocks.2.hook_resid_pre"],
            ("attn_out", 3): 0.5 * tensors["blocks.3.hook_attn_out"],
            ("post_block", 0): 0.5 * tensors["model.layers.0"],
        },
    )

    (folder / "sae").mkdir()
    config = {"metadata": {"hook_name": "blocks.3.hook_mlp_out"}}
    (folder / "sae" / "cfg.json").write_text(json.dumps(config))
    decoder = torch.randn(32, HIDDEN, generator=random)
    safetensors.torch.save_file({"W_dec": decoder}, folder / "sae" / "sae_weights.safetensors")
    module = load(folder / "sae", features={7: 3.0, 9: -2.0})
    yield module, {("mlp_out", 3): 3.0 * decoder[7] - 2.0 * decoder[9]}


def test_a_file_steers_as_adding_its_vectors_in_transformers_does(
    llm: LLM, reference: Reference, tmp_path: Path
):
    prompt = "One morning Mia walked to the market."
    plain = reference.run(prompt)[0]
    for number, (module, added) in enumerate(files(tmp_path)):
        expected = reference.run(prompt, add=added)[0]
        assert float((expected - plain).abs().max()) > 0.1
        llm.steering.register_module(f"file {number}", module)
        for steering in (
            {"steering_vectors": module},
            {"steering_vectors": module.vectors},
            {"steering_module_ref": f"file {number}"},
        ):
            got = logprobs(llm, prompt, **steering)
            for token, value in got.items():
                assert value == pytest.approx(float(expected[token]), abs=1e-3), (number, steering)


# -- the mood --------------------------------------------------------------------------------------


def test_the_mood_vector_makes_neutral_openings_happy_or_sad(
    llm: LLM, mood_module: ExtractedModule
):
    openings = [neutral_opening(Random(seed)) for seed in range(40)]
    shares = {}
    for scale in (-1.0, 0.0, 1.0):
        # No seeds: with them, vLLM on a CPU cannot cut a prompt into chunks.
        params = SamplingParams(
            max_tokens=48,
            temperature=0.8,
            decode_steering_vectors=mood_module.select(3).scaled(scale),
        )
        outputs = llm.generate(openings, params, use_tqdm=False)
        moods = [mood(output.outputs[0].text) for output in outputs]
        shares[scale] = moods.count("happy") / len(moods)
    assert shares[-1.0] < 0.2 < 0.3 < shares[0.0] < 0.7 < 0.8 < shares[1.0]


# -- what `make demo` shows with them --------------------------------------------------------------


def test_the_demo_steers_moods_and_tells_them_apart_token_by_token(llm: LLM):
    module = told.mood_module(llm)
    way = told.Way(module.best_layer, "all")
    sad, plain, happy = told.measure(llm, module, [way], 16, scales=(-0.5, 0.0, 0.5))
    assert happy.happy > 0.7 > plain.happy > sad.happy
    assert sad.sad > 0.7
    probe, right = told.mood_probe(llm, pairs=40)
    assert right > 0.8
    llm.register_consumer(probe)
    try:
        stories = told.tell(llm, mood_pair(Random(5)), max_tokens=24)
    finally:
        llm.unregister_consumer(probe)
    for story in stories:
        assert len(story.tokens) == len(story.scores) + 1
    happily, sadly = (np.mean(story.scores) for story in stories)
    assert happily > sadly + 0.5


# -- conditions that are learned -------------------------------------------------------------------


def test_a_probe_is_fitted_with_a_threshold_and_used_as_a_condition(llm, reference):
    fitted = fit_probe(llm, HAPPY[:16], SAD[:16], name="happy", method="diffmean")
    assert fitted.auroc[fitted.layer] == max(fitted.auroc.values()) > 0.9
    assert set(fitted.auroc) == set(range(LAYERS))
    first, last = fitted.roc[0], fitted.roc[-1]
    assert (first.true_positives, first.false_positives) == (0, 0)
    assert (last.true_positives, last.false_positives) == (1, 1)
    for shares in zip(*((p.true_positives, p.false_positives) for p in fitted.roc), strict=True):
        assert list(shares) == sorted(shares)
    gain = max(p.true_positives - p.false_positives for p in fitted.roc)
    assert fitted.chosen.true_positives - fitted.chosen.false_positives == gain
    # Told apart by the engine, as transformers' rows say, on prompts that it has not seen.
    vector = torch.zeros(HIDDEN)
    vector[0] = 1e-3
    entry = {"vector": vector, "when": fitted.condition}
    asked = {"post_block": {-1: entry}}
    params = SamplingParams(max_tokens=1, temperature=0, prefill_steering_vectors=asked)
    prompts = [*HAPPY[16:], *SAD[16:]]
    probe, right = fitted.condition["probe"], 0
    for i, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        score = float(output.signals["happy"].scores[-1])
        _, rows = reference.run(output.prompt, read=("post_block", fitted.layer))
        expected = float(rows[-1] @ torch.from_numpy(probe["vector"])) + probe["bias"]
        assert score == pytest.approx(expected, abs=1e-3)
        right += (score > fitted.condition["above"]) == (i < len(HAPPY) - 16)
    assert right >= 0.9 * len(prompts)


def test_a_threshold_for_few_false_positives(llm):
    loose, strict = (
        fit_probe(llm, HAPPY[:8], SAD[:8], layers=0, max_false_positives=share)
        for share in (0.9, 0.0)
    )
    assert strict.chosen.false_positives == 0 < loose.chosen.false_positives <= 0.9
    assert strict.chosen.true_positives <= loose.chosen.true_positives
    with pytest.raises(ValueError, match=r"max_false_positives=2; give a share of .* below 1"):
        fit_probe(llm, HAPPY, SAD, max_false_positives=2)


# -- strengths -------------------------------------------------------------------------------------


def log_probabilities(reference, tokens, entry=None, layer=0):
    """Of each token but the first, with a vector added after a layer."""

    def added(module, args, output):
        rows = output[0] if isinstance(output, tuple) else output
        changed = rows + torch.from_numpy(entry["vector"]) * entry["scale"]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with ExitStack() as stack, torch.inference_mode():
        if entry is not None:
            block = reference.model.model.layers[layer]
            stack.enter_context(block.register_forward_hook(added))
        logits = reference.model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_strength_is_swept_against_effect_and_perplexity(llm, reference, mood_module, tmp_path):
    before = llm.steering.modules()
    prompts = [neutral_opening(Random(seed)) for seed in range(4)]
    texts = [reference.tokenizer(text).input_ids for text in (HAPPY[0], SAD[1])]
    written: list[str] = []

    def happy(text: str) -> float:
        written.append(text)
        return float(mood(text) == "happy")

    module = mood_module.select(np.int64(3))
    swept = sweep(llm, module, [0.0, 4.0], prompts, happy, texts=texts, max_tokens=24)
    plain, strong = swept.rows
    assert [row.strength for row in swept.rows] == [0.0, 4.0]
    assert plain.effect == pytest.approx(np.mean([mood(t) == "happy" for t in written[:4]]))
    share = plain.effect  # of four texts that are happy, or are not
    assert plain.effect_error == pytest.approx(math.sqrt(share * (1 - share) / 3))
    assert strong.perplexity > plain.perplexity > 1
    entry = module.vectors["post_block"][3]
    for row in swept.rows:
        scaled = {"vector": entry["vector"], "scale": row.strength * entry["scale"]}
        of_texts = torch.cat([log_probabilities(reference, text, scaled, 3) for text in texts])
        assert row.text_perplexity == pytest.approx(float(torch.exp(-of_texts.mean())), rel=1e-3)
    params = SamplingParams(max_tokens=24, temperature=0)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        start = len(output.prompt_token_ids)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found.append(log_probabilities(reference, tokens)[start - 1 :])
    assert plain.perplexity == pytest.approx(float(torch.exp(-torch.cat(found).mean())), rel=1e-3)
    assert swept.best(1.0) == plain
    with pytest.raises(ValueError, match=r"max_perplexity_ratio=0\.5 must be 1 or more"):
        swept.best(0.5)
    picture = swept.plot(tmp_path / "sweep.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 3
    with pytest.raises(ValueError, match=r"rows\.docx' must end in \.svg"):
        swept.plot(tmp_path / "rows.docx")
    assert llm.steering.modules() == before
    probe = {"hook": "post_block", "layer": 0, "vector": entry["vector"]}
    llm.steering.register_monitor("once", {"probe": probe, "above": 0.0, "over": "prompt_last"})
    for wrong, says in (
        (
            {"vectors": {"post_block": {3: entry | {"when": "once"}}}, "texts": texts},
            r"vectors\['post_block'\]\[3\] steers generated tokens alone: its condition has 'over'",
        ),
        ({"strengths": []}, "give at least one strength"),
        ({"strengths": ["1"]}, r"strengths\[0\]='1' is not a number"),
        ({"strengths": 1.0}, "strengths=1.0 is float; give a list"),
        ({"prompts": "one"}, "prompts='one' is str; give a list"),
        ({"prompts": []}, "a list of at least one prompt"),
        ({"prompts": ["one", 3]}, r"prompts\[1\]=3 is neither a text nor a list of token ids"),
        ({"effect": 3}, "effect=3 is no function"),
        ({"effect": lambda text: math.nan}, "effect said nan of .*; let it return a finite number"),
        ({"phase": "later"}, "phase='later' is not known"),
        ({"texts": "one"}, "texts='one' is str; give a list"),
        ({"texts": [[5, 6], [7]]}, r"texts\[1\]=\[7\] is one token, which nothing predicts"),
        ({"strengths": [0.0, math.nan]}, r"strengths\[1\]=nan is not finite"),
        ({"effect": lambda text: "sad"}, "effect said 'sad' of .*; let it return a finite"),
    ):
        given = {"vectors": module, "strengths": [1.0], "prompts": prompts, "effect": happy} | wrong
        with pytest.raises(ValueError, match=says):
            sweep(llm, **given)
    llm.steering.unregister_monitor("once")


def test_what_fills_the_context_has_a_perplexity(llm, reference, mood_module):
    context = llm.llm_engine.model_config.max_model_len
    opening = reference.tokenizer(HAPPY[0]).input_ids
    prompt = (opening * context)[: context - 2]
    (row,) = sweep(llm, mood_module.select(3), [0.0], [prompt], len, max_tokens=8).rows
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    written = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    assert len(written.token_ids) == 2
    first = log_probabilities(reference, [*prompt, written.token_ids[0]])[-1]
    assert row.perplexity == pytest.approx(float(torch.exp(-first)), rel=1e-3)
    assert math.isnan(row.effect_error)
    prompt.append(written.token_ids[0])
    full = sweep(llm, mood_module.select(3), [0.0], [prompt], len, max_tokens=8)
    with pytest.raises(ValueError, match=r"strength 0\.0 has no perplexity to compare with"):
        full.best()


EFFECTS = """
def letters(text): return float(len(text))
def none(text): return None
def raises(text): raise KeyError("mood")
"""


def test_the_command_tells_what_a_strength_sweep_returns(
    llm, mood_module, invoke, monkeypatch, tmp_path
):
    engines: list[Any] = []

    def shared(model: str, **engine: Any) -> LLM:
        engines.append((model, engine))
        return llm

    monkeypatch.setattr(tllm, "LLM", shared)
    names = ("mood.safetensors", "effects.py", "more.jsonl", "rows.json", "rows.csv", "rows.svg")
    vectors, effects, more, rows, table, picture = (tmp_path / name for name in names)
    mood_module.save(vectors)
    effects.write_text(EFFECTS)
    prompts = [neutral_opening(Random(0)), llm.get_tokenizer().encode(neutral_opening(Random(1)))]
    more.write_text(json.dumps({"prompt_token_ids": prompts[1]}))

    def call(effect: str, *options: str | Path) -> tuple[int, str, str]:
        asked = ["--vectors", vectors, "--layers", "3", "--strengths", "-4,0", "--prompt"]
        asked += [prompts[0], "--prompts", more, "--max-tokens", "8", *options]
        asked += ["--effect", f"{effects}:{effect}", "--engine-arg", "dtype=float32"]
        return invoke("strength-sweep", MODEL, *map(str, asked))

    status, text, error = call("letters", "--texts", more, "--out", rows, "--plot", picture)
    assert status == 0, text + error
    assert engines == [(MODEL, {"dtype": "float32"})]
    module = mood_module.select(3)
    expected = sweep(
        llm,
        module,
        [-4.0, 0.0],
        prompts,
        lambda text: float(len(text)),
        texts=prompts[1:],
        max_tokens=8,
    )
    told = json.loads(rows.read_text())
    assert [list(row.values()) for row in told["rows"]] == [
        pytest.approx(list(vars(row).values())) for row in expected.rows
    ]
    assert (told["phase"], told["layers"], told["best"]) == (
        "decode",
        [3],
        expected.best().strength,
    )
    assert picture.read_text() == expected.plot(tmp_path / "expected.svg").read_text()
    assert "2/2" in text and f"best: strength {told['best']:g}" in text
    assert all(f"{row.text_perplexity:.4g}" in text for row in expected.rows)

    assert call("letters", "--out", table)[0] == 0
    with table.open() as file:
        first = next(csv.DictReader(file))
    assert float(first["effect"]) == pytest.approx(expected.rows[0].effect)
    assert first["text_perplexity"] == "", "no texts were given"

    for effect, says in (("none", "None is not a number"), ("raises", "raised KeyError: 'mood'")):
        status, _, error = call(effect)
        assert status == 2 and says in " ".join(error.split()) and "Traceback" not in error
    assert not [name for name in llm.steering.modules() if "sweep" in name]
