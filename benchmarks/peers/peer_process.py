"""A peer in its own environment: JSON lines in, JSON lines out.

python -m benchmarks.peers.peer_process {"peer": ..., "model": ..., "vocab": ...}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TextIO

import torch

from benchmarks.peers import eager, serving
from benchmarks.peers.work import Work

PEERS = {
    "vLLM": serving.Vllm,
    "tLLM": serving.Tllm,
    "tLLM, queries": serving.TllmQuery,
    "vllm-lens": serving.VllmLens,
    "vLLM's hidden-state extraction": serving.VllmExtraction,
    "nnsight": eager.NnSight,
    "TransformerLens": eager.TransformerLens,
    "genlm-backend": eager.Genlm,
}


def main() -> None:
    """Serve until standard input ends."""
    # Libraries print to standard output: keep the answers apart.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    command = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    peer = PEERS[command["peer"]](command["model"], command["vocab"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = Work(**asked["work"])
        begin = time.perf_counter()
        answer = getattr(peer, asked["doing"])(work, asked["number"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "answer": answer()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
