"""What the requests of a capture benchmark ask for, and how fast the disk is."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import Benchmark, Shape
from tllm.consumers.base import Consumer

FOLDER = "TLLM_BENCHMARK_FOLDER"
"""Environment variable: where captures to disk go; a temporary folder without it."""

_CHUNK = 8 << 20


class Capturing:
    """The options of each prompt's request, and the store they go to.

    Attributes:
        consumer: to be registered; None for captures to memory.
        params: arguments of `SamplingParams`, dealt out to the prompts in turn.
    """

    def __init__(self, benchmark: Benchmark, shape: Shape) -> None:
        captured = benchmark.captured
        assert captured is not None
        first = (shape.layers - captured.layers) // 2
        hooks = {"post_block": list(range(first, first + captured.layers))}
        spec = {"hooks": hooks, "positions": captured.positions}
        self.consumer: Consumer | None = None
        self._root: Path | None = None
        name = "memory"
        if captured.to_disk:
            from tllm.consumers.capture.filesystem import FilesystemConsumer

            name = "filesystem"
            self._root = Path(tempfile.mkdtemp(prefix="tllm-capture-", dir=os.environ.get(FOLDER)))
            self._synced = captured.synced
            self.consumer = FilesystemConsumer(
                self._root / "store",
                threads=4,
                durability="fsync" if self._synced else "rename",
            )
        asking: dict[str, Any] = {"capture": {name: spec}}
        self.params = [asking, *({} for _ in range(captured.one_in - 1))]
        self._name = name

    def counters(self, outputs: list[Any], seconds: float) -> dict[str, Any]:
        """What was captured in a round; an error where it was not."""
        results = [
            sample.capture_results[self._name]
            for output in outputs
            for sample in output.outputs
            if sample.capture_results
        ]
        if not results or any(result.status != "ok" for result in results):
            raise SystemExit(f"captures failed: {[r.error for r in results if r.error][:3]}")
        if self._root is None:
            nbytes = sum(
                found.tensor.numel() * found.tensor.element_size()
                for result in results
                for layers in result.payload.values()
                for found in layers.values()
            )
        else:
            nbytes = sum(result.payload.bytes for result in results)
        counted = {"results": len(results), "megabytes_per_second": nbytes / seconds / 1e6}
        if self._root is not None:
            # What is on its way to the device, or takes up room, is not the next round's.
            for path in (self._root / "store").rglob("*.safetensors"):
                path.unlink()
            os.sync()
            speed = disk_speed(self._root, nbytes, self._synced)
            os.sync()
            counted["disk_megabytes_per_second"] = speed / 1e6
            counted["share_of_disk"] = (
                counted["megabytes_per_second"] / counted["disk_megabytes_per_second"]
            )
        return counted

    def close(self) -> None:
        """Remove the store."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)


def disk_speed(folder: Path, nbytes: int, synced: bool) -> float:
    """Bytes a second that plain sequential writes of as many bytes reach; until they are on the
    device, or not, as the store writes by default."""
    block = os.urandom(_CHUNK)
    path = folder / "speed"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, nbytes // _CHUNK)):
            file.write(block)
        if synced:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return max(1, nbytes // _CHUNK) * _CHUNK / seconds
