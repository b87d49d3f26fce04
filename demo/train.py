"""Trains the demo model on the text of `demo.text`, from nothing: `python -m demo.train`.

The tokenizer, the corpus, the weights and the order of the batches all follow from `seed`; on
another device or library version the weights differ in rounding only at first, then more.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.text import ASSISTANT, END_OF_TEXT, USER, documents

PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{{{- '{USER}' if message['role'] == 'user' else '{ASSISTANT}' -}}}}"
    "{{- message['content'] -}}"
    f"{{%- if message['role'] == 'assistant' -%}}{{{{- '{END_OF_TEXT}' -}}}}{{%- endif -%}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that fixes the trained model."""

    seed: int = 0
    steps: int = 2000
    batch_rows: int = 128
    row_tokens: int = 512
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    # Corpus size: shards are made in parallel, and each has its own seed.
    shards: int = 64
    documents_per_shard: int = 8000

    def learning_rate(self, step: int) -> float:
        """Linear warm-up to the peak, then a half cosine to zero."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * (1 + math.cos(math.pi * progress)) / 2


def train_tokenizer(seed: int, vocabulary: int = 1408, sample: int = 40_000) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer on `sample` documents; it can encode any text.

    The text has merges for fewer tokens than the limit, so that every word of the grammar is one
    token; of a number, each digit is one. A `Qwen2Tokenizer` and no bare fast tokenizer, because
    `AutoTokenizer` loads what lies beside a Qwen2 model as that class, whose way of splitting text
    must be the trained one.
    """
    tokenizer = Qwen2Tokenizer(
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PAD, USER, ASSISTANT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = itertools.islice(documents(f"tokenizer {seed}", "train"), sample)
    tokenizer.backend_tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 of 1.8 million weights: 6 layers of width 128, 4 query and 2 key heads of 32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def pack(encoded: Iterator[list[int]], end: int, row_tokens: int) -> Iterator[list[int]]:
    """Rows of `row_tokens` token ids, each of which begins with the first token of a document.

    A document that runs over its row is cut there and not continued: a row that began in the
    middle of one would teach the model that position 0 is no beginning.
    """
    row: list[int] = []
    for ids in encoded:
        row += [*ids, end]
        if len(row) >= row_tokens:
            yield row[:row_tokens]
            row = []


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of the corpus, made by one process."""

    tokenizer: Qwen2Tokenizer
    recipe: Recipe
    index: int

    def rows(self) -> torch.Tensor:
        """The shard's packed rows, [rows, row_tokens], int16."""
        seed = f"corpus {self.recipe.seed} {self.index}"
        texts = list(itertools.islice(documents(seed, "train"), self.recipe.documents_per_shard))
        encoded = iter(self.tokenizer(texts)["input_ids"])
        rows = pack(encoded, self.tokenizer.eos_token_id, self.recipe.row_tokens)
        return torch.tensor(list(rows), dtype=torch.int16)


def corpus(tokenizer: Qwen2Tokenizer, recipe: Recipe) -> torch.Tensor:
    """The training corpus, [rows, row_tokens], int16; the same for any number of processes."""
    shards = [Shard(tokenizer, recipe, index) for index in range(recipe.shards)]
    # spawn: the tokenizer's Rust threads do not survive a fork.
    with get_context("spawn").Pool(min(len(shards), os.cpu_count() or 1)) as pool:
        return torch.cat(pool.map(Shard.rows, shards))


def batches(rows: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Shuffled batches without end, [batch_rows, row_tokens], int64 and on the rows' device."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order.split(recipe.batch_rows):
            if len(chosen) == min(recipe.batch_rows, len(rows)):
                yield rows[chosen.to(rows.device)].long()


def train(model: Qwen2ForCausalLM, rows: torch.Tensor, recipe: Recipe) -> None:
    """Train `model` in place on `rows`, both on one device; bfloat16 arithmetic on a GPU."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    started = time.monotonic()
    model.train()
    for step, ids in enumerate(itertools.islice(batches(rows, recipe), recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:6.1f} s", flush=True)
    model.eval()


def main() -> None:
    """Make the tokenizer and the corpus, train, and save a directory that transformers loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch-rows", type=int, default=Recipe.batch_rows)
    parser.add_argument("--shards", type=int, default=Recipe.shards)
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps, batch_rows=arguments.batch_rows, shards=arguments.shards)

    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    tokenizer = train_tokenizer(recipe.seed)
    rows = corpus(tokenizer, recipe)
    seconds = time.monotonic() - started
    print(f"{len(tokenizer)} tokens, {len(rows)} rows, {seconds:.1f} s", flush=True)

    model = build_model(tokenizer)
    print(f"{model.num_parameters()} weights", flush=True)
    train(model.to(arguments.device), rows.to(arguments.device), recipe)
    model.to("cpu").save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
