"""A tiny model, and drafters of each kind for it, some of whose drafts come true.

The model draws few tokens, of the others its LM head gives nothing, and what it draws depends most
on the last token. Drafters add up the embedding of that token and what they are given of the
model's state, but for the token before, and read it by the same LM head. So they guess well, and
not always, and with a steered state otherwise than with a plain one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2ForCausalLM

from engine.reference import HIDDEN, VOCAB, save_tiny_model

DRAWN = [*range(2, 8), 11]
"""The tokens that the model draws."""
_KV = HIDDEN // 2
_EMBEDDED = 1.2
"""How large the model's embeddings are."""


def save_drafted_model(path: Path) -> Path:
    """The model that drafts are made for."""
    save_tiny_model(path)
    model = Qwen2ForCausalLM.from_pretrained(path)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[DRAWN] = False
    head = model.lm_head.weight.data
    head[DRAWN] -= head[DRAWN].mean(0)  # one of them is always likelier than the others
    head[others] = 0
    model.model.embed_tokens.weight.data *= 8
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    model.save_pretrained(path)
    return path


def save_mimo(path: Path, model: Path) -> Path:
    """The same model with a module that predicts a token more, as MiMo has it."""
    path.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    target = Qwen2ForCausalLM.from_pretrained(model)
    names = "input_layernorm post_attention_layernorm token_layernorm hidden_layernorm"
    module = {
        **_block("", biased=True),
        **_norms("", names + " final_layernorm"),
        "input_proj.weight": torch.cat([_without_tokens(target), 0.3 * torch.eye(HIDDEN)], 1),
    }
    weights = target.state_dict()
    weights |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in module.items()}
    _save(path, weights)
    return path


def save_eagle(path: Path, model: Path) -> Path:
    """A drafter that is given the model's last state, and shares its embeddings and LM head."""
    state = _without_tokens(Qwen2ForCausalLM.from_pretrained(model))
    mixed = torch.cat([0.3 / _EMBEDDED * torch.eye(HIDDEN), state], 1)
    weights = _block("layers.0.") | _norms("layers.0.", "post_attention_layernorm")
    return _save_drafter(path, "LlamaForCausalLM", weights | {"fc.weight": mixed})


def save_eagle3(path: Path, model: Path) -> Path:
    """A drafter that is given the states of three layers, with an LM head of its own for the first
    tokens only. The last token comes in by its attention, which looks at one position."""
    target = Qwen2ForCausalLM.from_pretrained(model)
    head = target.lm_head.weight.data[: max(DRAWN) + 1]
    block = _block("midlayer.", inputs=2 * HIDDEN)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    query, key, value, output = (block[f"midlayer.self_attn.{name}.weight"] for name in names)
    key.mul_(10)
    query.copy_(key.view(2, 1, -1, 2 * HIDDEN).expand(2, 2, -1, -1).reshape(HIDDEN, -1))
    value.zero_()
    value[: len(head), :HIDDEN] = _EMBEDDED * head
    output[:, : len(head)] = torch.linalg.pinv(head)
    nothing = torch.zeros(HIDDEN, 2 * HIDDEN)
    weights = {
        **block,
        **_norms("", "norm midlayer.input_layernorm midlayer.hidden_norm"),
        **_norms("", "midlayer.post_attention_layernorm"),
        "fc.weight": torch.cat([nothing, _without_tokens(target)], 1),
        "lm_head.weight": head,
        "d2t": torch.zeros(len(head), dtype=torch.int64),
    }
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "draft_vocab_size": len(head)}
    return _save_drafter(path, "LlamaForCausalLMEagle3", weights, **layers)


def _without_tokens(model: Qwen2ForCausalLM) -> torch.Tensor:
    """`[hidden, hidden]`, what takes the embeddings of tokens that are drawn out of a state."""
    directions, _ = torch.linalg.qr(model.model.embed_tokens.weight.data[[0, *DRAWN]].T)
    return torch.eye(HIDDEN) - directions @ directions.T


def _block(prefix: str, *, inputs: int = HIDDEN, biased: bool = False) -> dict[str, torch.Tensor]:
    """A decoder block that adds nothing to what it is given."""
    shapes = {
        "self_attn.q_proj": (HIDDEN, inputs),
        "self_attn.k_proj": (_KV, inputs),
        "self_attn.v_proj": (_KV, inputs),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }
    generator = torch.Generator().manual_seed(5)
    block = {}
    for name, shape in shapes.items():
        last = name.endswith(("o_proj", "down_proj"))
        weight = torch.zeros(shape) if last else 0.1 * torch.randn(shape, generator=generator)
        block[f"{prefix}{name}.weight"] = weight
        if biased and name.endswith(("q_proj", "k_proj", "v_proj")):
            block[f"{prefix}{name}.bias"] = torch.zeros(shape[0])
    return block


def _norms(prefix: str, names: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in names.split()}


def _save_drafter(
    path: Path, architecture: str, weights: dict[str, torch.Tensor], **more: Any
) -> Path:
    path.mkdir()
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        **more,
    }
    (path / "config.json").write_text(json.dumps(config))
    _save(path, weights)
    return path


def _save(path: Path, weights: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors")
