"""The tokenizer that an engine will have, before there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm.tokenizers import cached_get_tokenizer


def tokenizer_of(model: str, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer of an engine that is started with such arguments; made once.

    Args:
        arguments: of `tllm.LLM`, beside the model.
    """
    return cached_get_tokenizer(
        arguments.get("tokenizer") or model,
        tokenizer_mode=arguments.get("tokenizer_mode", "auto"),
        revision=arguments.get("tokenizer_revision"),
        trust_remote_code=arguments.get("trust_remote_code", False),
    )


def encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, as the tokenizer's own `encode` gives them.

    A fast tokenizer encodes them together, on all cores.
    """
    if texts and isinstance(tokenizer, PreTrainedTokenizerFast):
        together = tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False)
        return list(together["input_ids"])
    return [list(tokenizer.encode(text)) for text in texts]
