"""`python killed_user.py MODEL ROOT SAID`: a user who is killed while an engine process works for
him.

He says the ids of all his processes in the file SAID when his last requests have run for some
steps, and waits.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
from tiny_engines import TINY_ENGINE

from tllm import LLM, SamplingParams
from tllm.consumers.capture.filesystem import FilesystemConsumer

PROMPT = list(range(5, 35))
PLACES = {"hooks": {"post_block": "all"}}


def asked(name: str, tokens: int) -> SamplingParams:
    capture = {"memory": PLACES, "filesystem": PLACES | {"request_id": name}}
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, capture=capture
    )


def main(model: str, root: str, said: str) -> None:
    llm = LLM(model, consumers=[FilesystemConsumer(root, publish_interval=0.05)], **TINY_ENGINE)
    prompt = {"prompt_token_ids": PROMPT}
    llm.generate([prompt], asked("whole", 3), use_tqdm=False)
    step, steps = llm.llm_engine.step, 0

    def told():
        nonlocal steps
        steps += 1
        if steps == 10:
            others = psutil.Process().children(recursive=True)
            Path(f"{said} in part").write_text(" ".join(str(each.pid) for each in others))
            Path(f"{said} in part").rename(said)
            signal.pause()
        return step()

    llm.llm_engine.step = told
    cut = [asked(f"cut-{number}", 220) for number in range(4)]
    llm.generate([prompt] * len(cut), cut, use_tqdm=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
