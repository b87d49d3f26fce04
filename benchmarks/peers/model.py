"""The model that all peers load, and what it must give: plain `transformers`, with plain hooks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.work import Size, Work

_TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
CHECKED = 16
"""Tokens whose log-probabilities are compared."""


def save_model(folder: Path, size: Size) -> Any:
    """Qwen2 with random weights and the demo's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for path in _TOKENIZER.glob("tokenizer*"):
        shutil.copy(path, folder)
    torch.manual_seed(0)
    config = Qwen2Config(**size.config(), pad_token_id=1)
    with torch.device(size.device):
        model = Qwen2ForCausalLM(config).to(getattr(torch, size.shape.dtype)).eval()
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
        prompts = work.tokens(self.vocab, number)[: work.checked]
        if work.doing == "capture":
            return summary(torch.stack([self._rows(prompt) for prompt in prompts]))
        if work.doing == "query":
            fed = work.fed(self.vocab, number)[: work.checked]
            logits = self._model(self._tensor([prompts[0] + each for each in fed])).logits
            found = logits[:, len(prompts[0]) :].float().log_softmax(-1)
            return found[..., :CHECKED].tolist()
        return self._steered(work, self._tensor(prompts), number)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self._model.device)

    def _rows(self, prompt: list[int]) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, out: kept.append(first(out)[0].clone()))
            for layer in self._model.model.layers
        ]
        self._model(self._tensor([prompt]))
        for hook in hooks:
            hook.remove()
        return torch.stack(kept)

    def _steered(self, work: Work, ids: torch.Tensor, number: int) -> list[list[int]]:
        added = self._tensor([work.vectors(i, number).tolist() for i in range(len(ids))])
        added = added.to(self._model.dtype)

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
    weights = torch.linspace(-1, 1, rows.shape[-1], device=rows.device)
    return (rows.float() @ weights).tolist()


def compare(answer: Any, expected: Any) -> str:
    """`equal`, or what share of the tokens, or by how much the values differ."""
    found, wanted = torch.tensor(answer), torch.tensor(expected)
    if found.shape != wanted.shape:
        return f"shape {[*found.shape]} where {[*wanted.shape]} was asked"
    if not found.is_floating_point():
        same = found == wanted
        if same.all():
            return "equal"
        whole, first_ones = same.all(1).sum().item(), same[:, 0].sum().item()
        return f"{whole} of {len(wanted)} answers equal, {first_ones} of the first tokens"
    error = ((found - wanted).abs().max() / wanted.std()).item()
    return "equal" if error < 1e-3 else f"differs by {error:.2g} of the spread"
