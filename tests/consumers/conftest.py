"""A tiny random Qwen2, once as transformers has it and once in an engine with tLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen2 of 4 layers, hidden size 128."""
    from engine.reference import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen2")


@pytest.fixture(scope="session")
def reference(tiny_qwen2: Path) -> Any:
    """`reference(token_ids)`: `[tokens, hidden]` after every layer, from transformers."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32).eval()

    @torch.inference_mode()
    def post_block(token_ids: list[int]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out)[0])
            )
            for layer in model.model.layers
        ]
        model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return [rows.reshape(len(token_ids), -1) for rows in seen]

    return post_block


@pytest.fixture(scope="session")
def llm(tiny_qwen2: Path, reference: Any) -> Any:
    """An engine in this process, without consumers; the reference model was built before it."""
    from tiny_engines import SHARE

    from tllm import LLM

    return LLM(
        str(tiny_qwen2),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        **SHARE,
        max_model_len=256,
        max_num_seqs=8,
        # Small, so that long prompts arrive in chunks, in one batch with decoding rows.
        max_num_batched_tokens=32,
        num_gpu_blocks_override=512,
        hook_points=["pre_attn", "post_block", "mlp_out", "lm_head_in"],
        disable_log_stats=True,
    )


@pytest.fixture
def with_consumer(llm: Any) -> Iterator[Any]:
    """`with_consumer(consumer)`: registers it for one test and returns it."""
    yield llm.register_consumer
    llm.clear_consumers()
