"""A vector at one layer of the demo model, and what `transformers` says with it."""

from __future__ import annotations

import torch

LAYER, HIDDEN = 2, 128
VECTOR = torch.linspace(-2, 2, HIDDEN)
STEERED = {"steering_vectors": {"post_block": {LAYER: VECTOR}}}


def steered_by(reference, tokens, vector=VECTOR):
    """What a `TransformersLM` says when a vector is added to every token at one block's end."""
    block = reference._model.model.layers[LAYER]

    def add(module, args, output):
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    with block.register_forward_hook(add):
        return reference.next_token_logprobs_sync(tokens)
