"""A quantized model: its rows are those of the same quantized model in plain vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.reference import HIDDEN, LAYERS, save_tiny_model

PROMPT = [7, 30, 12, 55, 21, 3, 90, 41]
GROUP = 32

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
}
PARAMS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "detokenize": False}


def _eight_bits(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def _four_bits(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale for each group of inputs; eight numbers in a word, the first in its lowest bits."""
    outputs, inputs = weight.shape
    groups = weight.view(outputs, -1, GROUP)
    scale = groups.abs().amax(2) / 7
    numbers = (groups / scale[..., None]).round().long().view(outputs, -1, 8) + 8
    words = (numbers << (4 * torch.arange(8))).sum(2)
    return {
        f"{name}_packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
        f"{name}_scale": scale.to(torch.bfloat16),
        f"{name}_shape": torch.tensor([outputs, inputs]),
    }


_INT = {"type": "int", "symmetric": True}
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "W8A8": (
        _eight_bits,
        "int-quantized",
        {
            "weights": {**_INT, "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT, "num_bits": 8, "strategy": "token", "dynamic": True},
        },
    ),
    "W4A16": (
        _four_bits,
        "pack-quantized",
        {"weights": {**_INT, "num_bits": 4, "strategy": "group", "group_size": GROUP}},
    ),
}
"""Formats of `compressed-tensors`: how a weight is written, the format's name, and its parts."""


def quantize(folder: Path, kind: str) -> None:
    """Quantize the weights of a checkpoint."""
    written, name, parts = KINDS[kind]
    file = folder / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(file).items():
        is_linear = "_proj." in key and key.endswith(".weight")
        weights |= written(key, tensor.float()) if is_linear else {key: tensor}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], **parts}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    (folder / "config.json").write_text(json.dumps(config))


def plain(folder: Path) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Tokens, and what leaves each block for the prompt, in vLLM with forward hooks alone."""
    import vllm

    llm = vllm.LLM(str(folder), **OPTIONS)
    rows: dict[int, torch.Tensor] = {}

    def watch(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):

            def hook(_: Any, __: Any, output: Any, number: int = number) -> None:
                rows.setdefault(number, output[0].float() + output[1].float())

            layer.register_forward_hook(hook)

    llm.apply_model(watch)
    params = vllm.SamplingParams(**PARAMS)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_quantized_model_are_those_of_plain_vllm(kind: str, tmp_path: Path) -> None:
    from tllm import LLM, SamplingParams

    folder = Path(save_tiny_model(tmp_path))
    quantize(folder, kind)
    tokens, expected = plain(folder)
    llm = LLM(str(folder), **OPTIONS, hook_points="all")
    assert llm.llm_engine.model_config.quantization == "compressed-tensors"
    capture = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}

    def run(**asked: Any) -> Any:
        params = SamplingParams(**PARAMS, capture=capture, **asked)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return output

    output = run()
    assert list(output.outputs[0].token_ids) == tokens
    rows = output.activations["post_block"]
    for layer in range(LAYERS):
        # The sum of branch and residual is rounded to bfloat16 once.
        torch.testing.assert_close(
            rows[layer].tensor.float(), expected[layer], rtol=2**-8, atol=1e-6
        )
    steered = run(steering_vectors={"post_block": {0: [3.0] * HIDDEN}}).activations["post_block"]
    assert torch.equal(steered[0].tensor, rows[0].tensor)
    assert not torch.allclose(steered[1].tensor, rows[1].tensor, atol=0.5)
