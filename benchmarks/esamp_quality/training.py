"""Trains the model that is asked, from nothing: minutes on a GPU.

Its right answers come one in a few samples: the checkpoint is kept whose Pass@1 is nearest to
`Recipe.skill`. A model that has learned all there is to learn would have nothing to explore for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.esamp_quality.problems import (
    END,
    VOCABULARY,
    chain_length,
    draw,
    problems,
    prompt_length,
    read_solution,
)


@dataclass(frozen=True)
class Recipe:
    """Everything that fixes the model, but rounding.

    Attributes:
        numbers: of a problem.
        skill: the Pass@1 that is aimed at, at temperature 1.
        seconds: no step begins after so long.
    """

    numbers: int = 6
    hidden: int = 256
    layers: int = 8
    batch: int = 2048
    steps: int = 6000
    peak: float = 1e-3
    warm_up: int = 200
    skill: float = 0.25
    seconds: float = 150.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Linear warm-up, then a half cosine to a tenth."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_model(recipe: Recipe) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights; heads of 64, which FlashAttention 3 takes."""
    torch.manual_seed(recipe.seed)
    heads = recipe.hidden // 64
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=recipe.hidden,
            intermediate_size=4 * recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=END,
            eos_token_id=END,
        )
    )


def train(recipe: Recipe, out: Path, device: str, say: Callable[[str], None] = print) -> float:
    """Train, and save the checkpoint of the wanted skill; returns its Pass@1."""
    model = make_model(recipe).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.peak, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator = torch.Generator(device).manual_seed(recipe.seed)
    asked = prompt_length(recipe.numbers)
    every = max(1, recipe.steps // 24)
    begin, nearest, skill = time.monotonic(), math.inf, math.nan
    for step in range(1, recipe.steps + 1):
        tokens = draw(recipe.batch, recipe.numbers, generator, device)
        labels = tokens.clone()
        labels[:, :asked] = -100  # the problem is given
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent = time.monotonic() - begin
        if step % every == 0 or step == recipe.steps or spent > recipe.seconds:
            valid, right = measured_skill(model, recipe, device)
            say(f"step {step}, loss {loss.item():.4f}, valid {valid:.3f}, Pass@1 {right:.3f}")
            # Of chains that are valid: a model that cannot calculate explores nothing.
            distance = abs(right - recipe.skill) + (1 - valid)
            if distance < nearest:
                nearest, skill = distance, right
                model.to(torch.bfloat16 if device != "cpu" else torch.float32)
                model.save_pretrained(out)
                model.float()
        if spent > recipe.seconds:
            break
    return skill


@torch.no_grad()
def measured_skill(
    model: Qwen2ForCausalLM, recipe: Recipe, device: str, count: int = 512
) -> tuple[float, float]:
    """Shares of valid and of right samples at temperature 1, of problems seen nowhere else."""
    asked = problems(count, recipe.numbers, seed=recipe.seed + 1)
    prompts = torch.tensor([problem.tokens for problem in asked], device=device)
    model.eval()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
        sequences: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=chain_length(recipe.numbers),
            pad_token_id=END,
        )
    model.train()
    found = [
        read_solution(problem, _until_end(row))
        for problem, row in zip(asked, sequences[:, prompts.shape[1] :].tolist(), strict=True)
    ]
    return sum(each.valid for each in found) / count, sum(each.right for each in found) / count


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(END) + 1] if END in row else row
