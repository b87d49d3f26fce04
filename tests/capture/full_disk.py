"""`python full_disk.py MODEL FOLDER`: capture into a file system of 1 MiB until it is full.

Run where mounting is allowed: `unshare -m`. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tllm.stores
from tllm import LLM, SamplingParams


def main(model: str, folder: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    root = Path(folder) / "store"
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        capture_consumers=[f"filesystem:root={root},layout=packed"],
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=2,
            ignore_eos=True,
            detokenize=False,
            capture={"filesystem": {"hooks": {"post_block": "all"}, "request_id": str(i)}},
        )
        for i in range(40)
    ]
    prompts = [{"prompt_token_ids": [5 + i] * 40} for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    results = [output.capture_results["filesystem"] for output in outputs]
    # The engine lives, and so does the writer once there is room again.
    first = next(result.payload for result in results if result.status == "ok")
    for path in first.paths:
        Path(path).unlink()
    again = params[0].clone()
    again.extra_args = {
        "tllm": {
            "consumers": {"filesystem": {"hooks": {"post_block": [0]}, "request_id": "again"}},
            "captures": ["filesystem"],
        }
    }
    [after] = llm.generate(prompts[:1], again, use_tqdm=False)
    store = tllm.stores.open(root)
    found = {
        "statuses": [result.status for result in results],
        "errors": sorted({result.error or "" for result in results}),
        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
        "after": after.capture_results["filesystem"].status,
        "stored": sorted(record.request_id for record in store),
        "whole": store.verify().ok,
        "consumers": llm.intervention_stats()[0]["consumers"],
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
