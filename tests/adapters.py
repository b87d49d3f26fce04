"""Random adapters, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

RANK = 4
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def save_adapter(path: Path, model: str, seed: int, *, head: bool = False) -> Path:
    """One of the output projections of attention, or of the LM head, in a folder that is new or
    empty."""
    path.mkdir(exist_ok=True)
    config = AutoConfig.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    layers = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(config.num_hidden_layers)]
    width = config.vocab_size if head else config.hidden_size
    tensors = {}
    for module in ["lm_head"] if head else layers:
        down = torch.randn(RANK, config.hidden_size, generator=generator)
        tensors[_PREFIX + module + _DOWN] = down
        tensors[_PREFIX + module + _UP] = torch.randn(width, RANK, generator=generator) / 8
    save_file(tensors, path / "adapter_model.safetensors")
    targets = ["lm_head" if head else "o_proj"]
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(said))
    return path


def merge(path: Path, model: torch.nn.Module) -> None:
    """Add an adapter to the weights of a model in `transformers`."""
    tensors = load_file(path / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(_DOWN)]:
        module = name.removeprefix(_PREFIX).removesuffix(_DOWN)
        weight = model.get_parameter(f"{module}.weight")
        delta = tensors[name.replace(_DOWN, _UP)] @ tensors[name]
        weight.data = weight.data + delta  # the tensor that was there stays as it was
