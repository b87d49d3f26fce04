"""The model that all peers load, and what it must give: plain `transformers`, with plain hooks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.work import HIDDEN, LAYERS, Work

_TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
CHECKED = 16
"""Tokens whose log-probabilities are compared."""


def save_model(folder: Path) -> Any:
    """Qwen2 of 28 layers, random weights, float32, with the demo's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for path in _TOKENIZER.glob("tokenizer*"):
        shutil.copy(path, folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1348,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


class Reference:
    """Answers of one prompt at a time, without a cache of keys and values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocab: int = model.config.vocab_size

    @torch.inference_mode()
    def answer(self, work: Work, number: int) -> Any:
        """What a peer should have said in a round: tokens, or values."""
        if work.doing == "capture":
            rows = [self._rows(prompt) for prompt in work.tokens(self.vocab, number)]
            return summary(torch.stack(rows))
        if work.doing == "query":
            prompt = work.tokens(self.vocab, number)[0]
            ids = torch.tensor([prompt + fed for fed in work.fed(self.vocab, number)])
            logits = self._model(ids).logits[:, len(prompt) :]
            return logits.log_softmax(-1)[..., :CHECKED].tolist()
        return self._steered(work, torch.tensor(work.tokens(self.vocab, number)), number)

    def _rows(self, prompt: list[int]) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, out: kept.append(first(out)[0].clone()))
            for layer in self._model.model.layers
        ]
        self._model(torch.tensor([prompt]))
        for hook in hooks:
            hook.remove()
        return torch.stack(kept)

    def _steered(self, work: Work, ids: torch.Tensor, number: int) -> list[list[int]]:
        added = torch.tensor([work.vectors(i, number).tolist() for i in range(len(ids))])

        def add(vector: torch.Tensor) -> Any:
            def hook(_: Any, __: Any, out: Any) -> Any:
                rows = first(out) + vector[:, None]
                return rows if torch.is_tensor(out) else (rows, *out[1:])

            return hook

        hooks = [
            self._model.model.layers[layer].register_forward_hook(add(added[:, index]))
            for index, layer in enumerate(work.steered_layers)
        ]
        start = ids.shape[1]
        for _ in range(work.max_tokens):
            following = self._model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, following), 1)
        for hook in hooks:
            hook.remove()
        found: list[list[int]] = ids[:, start:].tolist()
        return found


def first(output: Any) -> Any:
    """What a decoder layer gives: a tensor, or a tuple that begins with it."""
    return output if torch.is_tensor(output) else output[0]


def summary(rows: torch.Tensor) -> Any:
    """Rows `[prompts, layers, tokens, hidden]` as few numbers that depend on all of them."""
    weights = torch.linspace(-1, 1, rows.shape[-1])
    return (rows.float() @ weights).tolist()


def compare(answer: Any, expected: Any) -> str:
    """`equal`, or what share of the tokens, or by how much the values differ."""
    found, wanted = torch.tensor(answer), torch.tensor(expected)
    if found.shape != wanted.shape:
        return f"shape {[*found.shape]} where {[*wanted.shape]} was asked"
    if not found.is_floating_point():
        same = (found == wanted).all(1).sum().item()
        return "equal" if same == len(wanted) else f"{same} of {len(wanted)} answers equal"
    error = ((found - wanted).abs().max() / wanted.std()).item()
    return "equal" if error < 1e-3 else f"differs by {error:.2g} of the spread"
