"""Random adapters of the demo model."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from logprobs.asking import MODEL
from tllm.logprobs import TransformersLM

HIDDEN, LAYERS, RANK = 128, 6, 4
_NAME = "base_model.model.model.layers.{}.self_attn.o_proj"


def save_adapter(path, seed):
    """A random adapter of the attention's output projections, as PEFT saves one."""
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = _NAME.format(layer)
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) / 4
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def merged(path):
    """The demo model with an adapter in its weights."""
    reference = TransformersLM.from_name(MODEL)
    tensors = load_file(f"{path}/adapter_model.safetensors")
    for layer, block in enumerate(reference._model.model.layers):
        name = _NAME.format(layer)
        delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        block.self_attn.o_proj.weight.data += delta
    return reference
