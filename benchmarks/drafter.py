"""A drafter for a model with random weights, some of whose drafts come true.

The model's next token depends mostly on its last one: its blocks add little to the embedding. The
drafter, an EAGLE head of one block with the model's own embeddings and LM head, is given that
embedding and adds nothing, so it guesses what the model would draw without its blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload import DRAFTER, Shape

_OF_BLOCKS = ("o_proj.weight", "down_proj.weight")
_BLOCKS_SCALE = 0.02
_EMBEDDING_SCALE = 50.0  # of weights of standard deviation 0.02


def placed(speculative_config: dict[str, Any], shape: Shape, folder: Path) -> dict[str, Any]:
    """The same with the drafter's folder, which is made there, in the place of `DRAFTER`."""
    config = shape.config() | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    drafter = folder / DRAFTER
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config))
    return speculative_config | {"model": str(drafter)}


def depend_on_the_last_token(model: torch.nn.Module) -> None:
    """Change the model's random weights as above."""
    for name, parameter in model.named_parameters():
        if name.endswith(_OF_BLOCKS):
            parameter.data.mul_(_BLOCKS_SCALE)
        elif name.endswith("embed_tokens.weight"):
            parameter.data.mul_(_EMBEDDING_SCALE)


def draw_drafter(worker: Any) -> bool:
    """Sent to a worker, when the model is drawn; whether there was a drafter to draw."""
    drafter = worker.worker.model_runner.get_draft_model()
    if drafter is None:
        return False
    for name, parameter in drafter.model.named_parameters():
        if name.endswith("fc.weight"):  # of the token's embedding and the model's state
            parameter.data.zero_().fill_diagonal_(1.0)
        elif name.endswith(_OF_BLOCKS):
            parameter.data.zero_()
    return True
