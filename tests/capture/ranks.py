"""`python ranks.py MODEL ROOT OUTPUT OPTIONS`: captures by several ranks; saves what came back."""

from __future__ import annotations

import json
import sys

import torch

from tllm import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [200]]
HOOKS = {"post_block": "all", "mlp_out": [0, 3], "lm_head_in": "all"}
ASKED = [
    {"hooks": HOOKS},
    {"hooks": HOOKS, "positions": [0, -1], "reduction": "mean"},
    {"hooks": {"post_block": [3]}, "positions": "all_generated"},
]


def main(model: str, root: str, output: str, options: str) -> None:
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        disable_log_stats=True,
        hook_points="all",
        capture_consumers=[f"filesystem:root={root},publish_interval=0.1"],
        **json.loads(options),
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=5,
            ignore_eos=True,
            detokenize=False,
            capture={"memory": spec, "filesystem": {**spec, "request_id": str(i)}},
        )
        for i, spec in enumerate(ASKED)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    saved = [
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
    torch.save(saved, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
