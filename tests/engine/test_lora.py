"""Adapters: rows belong to the request, and to the adapter, that they were computed for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_engines import TINY_ENGINE
from vllm.lora.request import LoRARequest

from engine.asking import RELATIVE, greedy, prompts_of
from engine.modes import Reader
from engine.reference import HIDDEN, LAYERS, Addition, GatedChange, Reference
from tllm import LLM, SamplingParams
from tllm.ports import ResidualStream

RANK = 4
VECTOR = 5 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(21))


def save_adapter(path: Path, seed: int) -> Path:
    """A random adapter of the attention's output projections, as PEFT saves one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) / 8
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"), 3)


@pytest.fixture(scope="module")
def lora_engine(tiny_model):
    return LLM(
        tiny_model, max_num_batched_tokens=24, enable_lora=True, max_lora_rank=8, **TINY_ENGINE
    )


def merged(reference: Reference, adapter) -> None:
    """Add the adapter to the reference's weights."""
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    for layer, block in enumerate(reference.model.model.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        block.self_attn.o_proj.weight.data += delta


def test_rows_belong_to_the_request_and_its_adapter(tiny_model, lora_engine, adapter):
    """One adapter a batch: vLLM 0.32 on a CPU gives a batch's adapter to its plain requests too."""
    read = ResidualStream.read(layer=LAYERS - 2, site="post_block", role="hidden")
    llm = lora_engine
    llm.register_consumer(Reader("reader", read))
    prompts = [list(range(10, 40)), [7, 8, 9]]
    plain, changed = Reference(tiny_model), Reference(tiny_model)
    merged(changed, adapter)
    for lora, reference in ((LoRARequest("adapter", 1, str(adapter)), changed), (None, plain)):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False),
            lora_request=lora,
            use_tqdm=False,
        )
        for output, prompt in zip(outputs, prompts, strict=True):
            tokens = [*prompt, *output.outputs[0].token_ids]
            with torch.no_grad():
                states = reference.model(torch.tensor([tokens]), output_hidden_states=True)
            rows = output.consumer_results["reader"].payload
            assert rows.positions.tolist() == list(range(len(tokens) - 1))
            expected = states.hidden_states[LAYERS - 1][0, :-1]
            assert (rows.values - expected).abs().max() < 2e-5 * expected.abs().max()
            likeliest = states.logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert likeliest.tolist() == list(output.outputs[0].token_ids)

    steered = SamplingParams(
        max_tokens=6,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        steering_vectors={"post_block": {1: VECTOR}, "attn_heads": {2: VECTOR}},
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        steered,
        lora_request=LoRARequest("adapter", 1, str(adapter)),
        use_tqdm=False,
    )
    for output, prompt in zip(outputs, prompts, strict=True):
        places = ("post_block", 1), ("attn_heads", 2)  # what the adapter changes reads the heads
        expected = changed.greedy(prompt, 6, [Addition(place, VECTOR) for place in places])
        assert list(output.outputs[0].token_ids) == expected

    probe = {"hook": "pre_attn", "layer": 1, "vector": VECTOR}
    entry = {"vector": VECTOR, "when": {"probe": probe, "above": 0.0, "name": "gate"}}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        greedy(6, steering_vectors={"post_block": {1: entry}}),
        lora_request=LoRARequest("adapter", 1, str(adapter)),
        use_tqdm=False,
    )
    for output, prompt in zip(outputs, prompts, strict=True):
        change = GatedChange(
            ("post_block", 1),
            lambda h: h + VECTOR,
            [(("pre_attn", 1), lambda h: h @ VECTOR)],
            lambda scores: (scores[0] > 0).float(),
        )
        assert list(output.outputs[0].token_ids) == changed.greedy(prompt, 6, gated=[change])
        signal, [scores] = output.outputs[0].signals["gate"], change.scores
        assert signal.scores == pytest.approx(scores[signal.positions].numpy(), rel=1e-4, abs=5e-3)
    llm.clear_consumers()


def test_adapters_take_turns_at_prompts_that_are_cached(tiny_model, lora_engine, adapter, tmp_path):
    """Requests with steering, capture, both and neither; each adapter begins and comes again."""
    other = save_adapter(tmp_path, 5)
    references = [Reference(tiny_model) for _ in range(3)]
    merged(references[0], adapter)
    merged(references[1], other)
    loras = [LoRARequest("one", 1, str(adapter)), LoRARequest("two", 2, str(other)), None]
    [prompt] = prompts_of([70])
    place = ("post_block", LAYERS - 2)
    capture = {"memory": {"hooks": {"post_block": [LAYERS - 2]}, "positions": "all"}}
    steering = {"post_block": {1: VECTOR}}
    asked = [
        {"capture": c, "steering_vectors": s} for c in (None, capture) for s in (None, steering)
    ]
    for turn in (0, 1, 2, 0):
        outputs = lora_engine.generate(
            [{"prompt_token_ids": prompt}] * len(asked),
            [greedy(4, **each) for each in asked],
            lora_request=loras[turn],
            use_tqdm=False,
        )
        for output, each in zip(outputs, asked, strict=True):
            additions = [Addition(("post_block", 1), VECTOR)] if each["steering_vectors"] else []
            [sample], reference = output.outputs, references[turn]
            assert list(sample.token_ids) == reference.greedy(prompt, 4, additions)
            if each["capture"]:
                tokens = [*prompt, *sample.token_ids][:-1]
                rows = sample.activations["post_block"][LAYERS - 2].tensor
                expected = reference.run(tokens, [place], additions)[1][place]
                assert (rows - expected).norm() < RELATIVE * expected.norm()
