"""`python killed_worker.py MODEL ROOT`: kill a worker's process while it captures to disk.

Prints what the user saw as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from vllm.v1.engine.exceptions import EngineDeadError

from tllm import LLM, SamplingParams


def params(name: str, max_tokens: int):
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        capture={"filesystem": {"hooks": {"post_block": "all"}, "request_id": name}},
    )


def main(model: str, root: str) -> None:
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        disable_log_stats=True,
        distributed_executor_backend="mp",
        capture_consumers=[f"filesystem:root={root},publish_interval=0.1"],
    )
    prompts = [{"prompt_token_ids": [5 + i] * 20} for i in range(6)]
    before = llm.generate(prompts, [params(f"a{i}", 3) for i in range(6)], use_tqdm=False)
    statuses = [output.capture_results["filesystem"].status for output in before]
    [engine] = [p for p in psutil.Process().children() if p.children()]
    worker = max(engine.children(), key=lambda process: process.memory_info().rss)

    def kill() -> None:
        time.sleep(1)
        os.kill(worker.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    try:
        for turn in range(1000):
            llm.generate(prompts, [params(f"b{turn}-{i}", 100) for i in range(6)], use_tqdm=False)
        error = "none"
    except EngineDeadError as dead:
        error = type(dead).__name__
    print("FOUND " + json.dumps({"statuses": statuses, "error": error}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    assert Path(sys.argv[2]).is_dir()
    main(*sys.argv[1:])
