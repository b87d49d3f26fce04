"""`python -m benchmarks.peers`: tLLM and others, each against untouched vLLM, on the same requests.

Each peer is installed in an environment of its own, with its versions pinned; one that cannot be
is skipped with the reason. A peer runs in a process of its own, beside untouched vLLM, in turn with
it, on one thread each; warm. What it answers is compared with plain `transformers` with hooks.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.__main__ import environment
from benchmarks.peers.environment import ENVIRONMENTS
from benchmarks.peers.model import Reference, compare, save_model
from benchmarks.peers.peer_process import PEERS
from benchmarks.peers.work import SIZES, Size, Work

RESULTS = Path(__file__).parents[1] / "results"
_CACHE = Path("~/.cache/tllm/peers").expanduser()
_BASE = "vLLM"
_ERROR = re.compile(r"\b\w+(Error|Exception): ")
_QUERIES = "tLLM, queries"
"""Ours, in another engine: one row of the table."""


class PeerProcess:
    """The other end of `benchmarks.peers.peer_process`.

    Attributes:
        versions: of what it runs with.
    """

    versions: dict[str, str]

    def __init__(self, peer: str, python: Path, model: str, size: Size) -> None:
        self.peer = peer
        one_thread = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                str(python), "-m", "benchmarks.peers.peer_process",
                json.dumps({"peer": peer, "model": model, "size": size.name}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                **(one_thread if size.device == "cpu" else {}),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "HF_HUB_OFFLINE": "1",
            },
        )  # fmt: skip
        self.versions = self._answer()["versions"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(_reason(self._log.read()))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, work: Work, doing: str, number: int) -> dict[str, Any]:
        """Seconds, and the answer."""
        assert self._process.stdin is not None
        asked = {"work": work.described(), "doing": doing, "number": number}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _reason(log: str) -> str:
    """The line of a log that says what went wrong first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    reason = (errors or lines[-1:] or ["it said nothing"])[0]
    said = _ERROR.search(reason)
    return reason[said.start() if said else 0 :][:300]


def expected_of(size: Size, folder: Path) -> dict[str, Any]:
    """Right answers of the first round, by the name of the work. Saves the model into a folder, and
    leaves nothing of it in memory, which peers need."""
    reference = Reference(save_model(folder, size))
    expected = {work.name: reference.answer(work, 1) for work in size.works}
    del reference
    if size.device == "cuda":
        torch.cuda.empty_cache()
    return expected


@contextmanager
def opened(peer: str, model: str, size: Size, cache: Path) -> Iterator[PeerProcess]:
    """A peer that runs.

    Raises:
        RuntimeError: it cannot be installed, or does not start; says why.
    """
    python = ENVIRONMENTS[peer].python(peer.replace(" ", "-"), cache)
    process = PeerProcess(peer, python, model, size)
    try:
        yield process
    finally:
        process.close()


def measured(
    base: PeerProcess, peer: PeerProcess, work: Work, expected: Any, rounds: int
) -> dict[str, Any]:
    """Rounds of a peer in turn with untouched vLLM; one of each to warm up."""
    unsteered = "query" if work.doing == "query" else "plain"
    ratios, seconds, of_base = [], [], []
    answers: list[str] = []
    for number in range(rounds + 1):
        plain = base.round(work, unsteered, number)
        found = peer.round(work, work.doing, number)
        if number:
            ratios.append(plain["seconds"] / found["seconds"])
            seconds.append(found["seconds"])
            of_base.append(plain["seconds"])
            if number == 1:
                answers.append(compare(found["answer"][: work.checked], expected))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "seconds": round(statistics.median(seconds), 4),
        "vllm_seconds": round(statistics.median(of_base), 4),
        "answers": answers[0],
    }


def compared(
    peer: str,
    base: PeerProcess,
    expected: Mapping[str, Any],
    model: str,
    size: Size,
    cache: Path,
    rounds: int,
) -> dict[str, Any]:
    """What a peer offers, measured; or why it is skipped.

    Args:
        expected: the answers of the first round, by the name of the work.
    """
    kind, found = PEERS.get(peer), {}
    try:
        with opened(peer, model, size, cache) as process:
            found["versions"] = process.versions
            for work in size.works:
                if not hasattr(kind, work.doing):
                    continue
                found[work.name] = measured(base, process, work, expected[work.name], rounds)
                print(json.dumps({peer: {work.name: found[work.name]}}), flush=True)
    except RuntimeError as error:
        print(f"{peer}: {error}", flush=True)
        return {"skipped": str(error), **found}
    return found


def table(results: dict[str, Any], names: Sequence[str]) -> str:
    """In Markdown: vLLM's time divided by the peer's, the median and the middle half of the rounds,
    and whether its answers are right."""
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for peer, found in results.items():
        if not any(name in found for name in names):
            continue
        cells = []
        for name in names:
            cell = found.get(name)
            if cell is None:
                cells.append("failed" if "skipped" in found else "not offered")
                continue
            ratios, outside = sorted(cell["ratios"]), len(cell["ratios"]) // 4
            low, high = ratios[outside], ratios[-1 - outside]
            note = "" if cell["answers"] == "equal" else f", {cell['answers']}"
            cells.append(f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]{note}")
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    for peer, found in results.items():
        if "skipped" in found:
            lines.append(f"\n{peer}: {found['skipped']}")
    return "\n".join(lines)


def main(
    peer: Annotated[
        list[str] | None, typer.Option(help=f"Among {', '.join(ENVIRONMENTS)}; all without.")
    ] = None,
    size: Annotated[
        str, typer.Option(help=f"What is asked of which model: {' or '.join(SIZES)}.")
    ] = "small",
    rounds: Annotated[int, typer.Option(help="Rounds of each, in turn.", min=1)] = 3,
    cache: Annotated[Path, typer.Option(help="Folder of the environments.")] = _CACHE,
    out: Annotated[
        Path, typer.Option(help="Folder of the result, in which other peers stay.")
    ] = RESULTS,
) -> None:
    """Measure, write the result, and print a table."""
    chosen = [each for each in peer or ENVIRONMENTS if each != _BASE]
    if unknown := [each for each in chosen if each not in ENVIRONMENTS]:
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(ENVIRONMENTS)}")
    if size not in SIZES:
        raise typer.BadParameter(f"size={size!r} is not known; choose among {', '.join(SIZES)}")
    asked = SIZES[size]
    path = out / ("peers.json" if size == "small" else f"peers-{size}.json")
    before = json.loads(path.read_text())["peers"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as model:
        expected = expected_of(asked, Path(model))
        with opened(_BASE, model, asked, cache) as base:
            for each in chosen:
                before[each] = compared(each, base, expected, model, asked, cache, rounds)
                result = {**environment(), "peers": before}
                path.write_text(json.dumps(result, indent=1) + "\n")
    found = {name: before[name] for name in ENVIRONMENTS if name in before}
    if queries := found.pop(_QUERIES, None):
        found["tLLM"] = queries | found.get("tLLM", {})
    print(table(found, [work.name for work in asked.works]))


if __name__ == "__main__":
    typer.run(main)
