"""Many clients at once, by hand: `python -m tests.server.load --seconds 300 --clients 64`.

Good requests, steered or not, streamed or not, with captures and scores, are compared with
`transformers`; between them clients leave and ask what cannot be had. In the end nothing may be
left of them: sequences, ring rows, ways of steering, shared memory, threads, descriptors, memory.
With `--plain` it is vLLM alone, which says what grows in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from conftest import MODEL, Server
from test_serving import decoded, states, steered_tokens

from tllm.shared_memory import FOLDER, NAME

PROMPTS = [
    "One day Mia went to the garden.",
    "Ben had a red kite.",
    "Tara felt merry at the harbor.",
    "Leo and Rosa walked to the bakery.",
    "Olga went to the mountain. All day",
    "Ivy took a black key",
]
TOKENS = 12
LAYER = 3
BAD = (
    ({"steering_vectors": {"post_blok": {"2": [1.0]}}}, 400),
    ({"steering_vectors": {"post_block": {"2": [1.0]}}}, 400),
    ({"capture": {"memory": {"hooks": {"post_block": [99]}}}}, 400),
    ({"capture": 7}, 400),
    ({"consumers": {"nobody": {}}}, 400),
    ({"stop_when": "x"}, 400),
    ({"model": "demo:nobody"}, 404),
    ({"max_tokens": "many"}, 400),
)


class Truth:
    """What `transformers` says, computed once for each prompt and vector."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
        self._model = loaded, AutoTokenizer.from_pretrained(MODEL)
        vectors = 2.0 * torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
        self.vectors = [torch.zeros(128), *vectors]
        self._tokens: dict[tuple[int, int], list[int]] = {}
        self._rows: dict[int, torch.Tensor] = {}

    def compute(self) -> None:
        for prompt, text in enumerate(PROMPTS):
            ids = self._model[1](text)["input_ids"]
            self._rows[prompt] = states(self._model, ids, 1)
            for number, vector in enumerate(self.vectors):
                found = steered_tokens(self._model, ids, LAYER, vector, TOKENS)
                self._tokens[prompt, number] = found

    def check(self, prompt: int, vector: int, choice: dict, captured: bool) -> None:
        assert choice["token_ids"] == self._tokens[prompt, vector], (prompt, vector, choice)
        if captured:
            result = choice["capture_results"]["memory"]
            assert result["status"] == "ok", result
            rows = decoded(result["payload"]["post_block"]["1"]["tensor"])
            torch.testing.assert_close(rows, self._rows[prompt], rtol=1e-4, atol=1e-4)


async def good(client: httpx.AsyncClient, truth: Truth, choose: random.Random, plain: bool) -> str:
    """A request that must be answered, and rightly."""
    prompt, vector = choose.randrange(len(PROMPTS)), choose.randrange(len(truth.vectors))
    captured, streamed, n = choose.random() < 0.4, choose.random() < 0.5, 1
    if plain:
        vector, captured = 0, False
    body = {"model": "demo", "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": streamed, "n": n}
    if vector:
        spec = {"post_block": {str(LAYER): truth.vectors[vector].tolist()}}
        body["steering_vectors"] = spec
    if captured:
        options = {"hooks": {"post_block": [1]}, "positions": "all_prompt"}
        body["capture"] = {"memory": options}
    if choose.random() < 0.3 and not plain:
        body["consumers"] = {"probe": {}}
    if not streamed:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
    else:
        choices = [{"token_ids": []} for _ in range(n)]
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                for each in event.get("choices", ()):
                    choices[each["index"]]["token_ids"] += each.get("token_ids") or []
                for choice, results in zip(choices, event.get("samples", ()), strict=False):
                    choice.update(results)
    assert len(choices) == n
    for choice in choices:
        truth.check(prompt, vector, choice, captured)
    return "good"


async def leaving(client: httpx.AsyncClient, choose: random.Random, plain: bool) -> str:
    """A request whose client leaves after some events."""
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 200, "stream": True}
    body["ignore_eos"] = True
    if not plain:
        body["capture"] = {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}
        body["steering_vectors"] = {"post_block": {"2": [choose.random()] * 128}}
    count = choose.randrange(6)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            count -= 1
            if count < 0:
                break
    return "left"


async def bad(client: httpx.AsyncClient, choose: random.Random, plain: bool) -> str:
    """A request that must be refused."""
    asked, status = choose.choice(BAD[-2:] if plain else BAD)
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 4} | asked
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == status, (asked, answer.text)
    return "refused"


async def work(server: Server, truth: Truth, seed: int, until: float, counts: Counter[str]) -> None:
    choose = random.Random(seed)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        while time.monotonic() < until:
            kind = choose.random()
            if kind < 0.7:
                done = await good(client, truth, choose, server.plain)
            elif kind < 0.85:
                done = await leaving(client, choose, server.plain)
            else:
                done = await bad(client, choose, server.plain)
            counts[done] += 1


def held(server: Server) -> dict[str, float]:
    """What the server's processes hold, and what the workers say is in use."""
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    own = {title(each): each.memory_full_info().uss / 2**20 for each in processes}
    found = {
        **{f"MiB {name}": size for name, size in own.items()},
        "MiB": sum(own.values()),
        "threads": sum(each.num_threads() for each in processes),
        "descriptors": sum(each.num_fds() for each in processes),
        "shared files": len(shared_files({each.pid for each in processes})),
    }
    if server.plain:
        return found
    workers = server.get("/v1/interventions").json()
    in_use = ("running_sequences", "ring_rows_in_use", "steering_configurations", "results_kept")
    found |= {name: sum(stats[name] for stats in workers) for name in in_use}
    return found | {"requests": server.get("/v1/steering").json()["requests"]}


def shared_files(processes: set[int]) -> list[Path]:
    """Files in shared memory that some processes own."""
    found = [(path, NAME.fullmatch(path.name)) for path in FOLDER.iterdir()]
    return [path for path, told in found if told and int(told.group(2)) in processes]


def title(process: psutil.Process) -> str:
    """A name for a process, as vLLM titles it."""
    first = process.cmdline()[:1] or [process.name()]
    return Path(first[0]).name if first[0].startswith("/") else first[0].replace("VLLM::", "")


def settled(server: Server) -> dict[str, float]:
    """The same once the last clients are gone."""
    for _ in range(100):
        found = held(server)
        if not (found.get("running_sequences") or found.get("requests")):
            return found
        time.sleep(0.2)
    return found


async def run(server: Server, truth: Truth, clients: int, seconds: float, seed: int) -> Counter:
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(
        *(work(server, truth, clients * seed + i, until, counts) for i in range(clients))
    )
    return counts


def check(first: dict[str, float], last: dict[str, float]) -> None:
    """Nothing is left of requests that have ended.

    Args:
        first: what was held once pools, caches and threads were there.
    """
    for name in ("requests", "running_sequences", "ring_rows_in_use", "results_kept"):
        assert not last.get(name), name
    assert last["threads"] <= first["threads"] + 4, "threads are left"
    assert last["descriptors"] <= first["descriptors"] + 16, "descriptors are left"
    assert last["shared files"] <= first["shared files"] + 2, "shared memory is left"
    assert last["MiB"] <= 1.05 * first["MiB"] + 32, "memory grows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="vLLM alone, and plain requests")
    arguments, more = parser.parse_known_args()
    truth = Truth()
    truth.compute()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *more, plain=arguments.plain)
        try:
            server.wait()
            seen = []
            for number in range(arguments.rounds):
                part = arguments.seconds / arguments.rounds
                counts = asyncio.run(run(server, truth, arguments.clients, part, number))
                seen.append(settled(server))
                rounded = {name: round(value) for name, value in seen[-1].items()}
                print(dict(counts), rounded, flush=True)
            check(seen[1], seen[-1])
            print("all answers were right, and nothing is left of them")
        finally:
            server.process.terminate()
            server.process.wait(60)


if __name__ == "__main__":
    main()
