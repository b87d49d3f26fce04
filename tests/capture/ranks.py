"""What several ranks are asked to capture, and what came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tiny_engines import SHARE

PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [200]]
HOOKS = {"post_block": "all", "mlp_out": [0, 3], "lm_head_in": "all"}
ASKED: list[dict[str, Any]] = [
    {"hooks": HOOKS},
    {"hooks": HOOKS, "positions": [0, -1], "reduction": "mean"},
    {"hooks": {"post_block": [3]}, "positions": "all_generated"},
]
ENGINE: dict[str, Any] = {
    **SHARE,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 512,
    "disable_log_stats": True,
    "hook_points": "all",
    "distributed_executor_backend": "mp",
}
"""Arguments of the engines with several ranks."""


def captures() -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Each prompt, and what is captured of it."""
    for number, (prompt, spec) in enumerate(zip(PROMPTS, ASKED, strict=True)):
        yield prompt, {"memory": spec, "filesystem": {**spec, "request_id": str(number)}}


def saved(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    """Tokens, results, files and rows of each output."""
    return [
        {
            "tokens": [*o.prompt_token_ids, *o.outputs[0].token_ids],
            "results": {n: (r.status, r.error) for n, r in o.capture_results.items()},
            "paths": o.capture_results["filesystem"].payload.paths,
            "rows": {
                (point, layer): (found.tensor, found.positions.tolist())
                for point, layers in o.activations.items()
                for layer, found in layers.items()
            },
        }
        for o in outputs
    ]
