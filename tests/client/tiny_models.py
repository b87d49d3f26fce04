"""A tiny model of each kind that vLLM serves: it generates, embeds, classifies, compares texts."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    Qwen2ForSequenceClassification,
)

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
"""Generates; embeds with `convert="embed"`. It has a tokenizer."""


def save_classifier(path: Path) -> Path:
    """A random Qwen2 with three labels, and the demonstration model's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    config.num_labels, config.initializer_range = 3, 0.15
    Qwen2ForSequenceClassification(config).float().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path / name)
    return path


def save_cross_encoder(path: Path) -> Path:
    """A random BERT with one label, which it gives to two texts; its tokens are characters."""
    torch.manual_seed(0)
    characters = string.ascii_lowercase + string.digits
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    vocab = path / "vocab.txt"
    vocab.write_text("\n".join([*words, *(f"##{character}" for character in characters)]))
    BertTokenizerFast(str(vocab)).save_pretrained(path)
    config = BertConfig(
        vocab_size=len(vocab.read_text().split()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.15,
        num_labels=1,
    )
    BertForSequenceClassification(config).float().eval().save_pretrained(path)
    return path
