"""Full disks, lost permissions, stalled disks, killed writers: really."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.stores.processes import FORKS, cut_off, hold, outcome, write_until_killed
from tests.stores.samples import (
    LAYOUTS,
    assert_same,
    assert_whole,
    payloads,
    record_of,
    rows_of,
)
from tllm import stores
from tllm.stores import RecordMeta, StoreError, StoreWriter, queue
from tllm.stores.queue import SpilledRows, SpillFile

ROOT = Path(__file__).parents[2]
JOB = [sys.executable, "-m", "tests.stores.processes"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: str | Path) -> list[dict[str, Any]]:
    """Run jobs to their end; the JSON that each prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_ordinary_user() -> list[str]:
    """In front of a command: permissions count, even for root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root ignores permissions, and there is no setpriv to give that up")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.fixture
def in_small_disk(tmp_path: Path) -> list[str]:
    """In front of a command: `tmp_path/disk` is a file system of its own, of 8 MiB."""
    (tmp_path / "disk").mkdir()
    shell = f'mount -t tmpfs -o size=8m tmpfs "{tmp_path}/disk" && exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", shell, "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    return prefix


def test_a_full_disk_fails_the_records_that_hit_it_and_nothing_else(
    tmp_path: Path, in_small_disk: list[str]
) -> None:
    results = run(*in_small_disk, *JOB, "fill", tmp_path / "disk", *LAYOUTS)
    assert len(results) == len(LAYOUTS)
    for found in results:
        check_full_disk(found)


def check_full_disk(found: dict[str, Any]) -> None:
    outcomes = found["outcomes"]
    stream = outcomes.pop("stream")
    kept = {name for name, result in outcomes.items() if result["status"] == "ok"}
    lost = {name: result for name, result in outcomes.items() if name not in kept}
    assert len(kept) > 3
    assert lost
    for result in lost.values():
        assert result["errno"] == errno.ENOSPC
        assert "No space left on device [ENOSPC]" in result["text"]
    # The writer lives on.
    assert {"after-0", "after-1", "after-2"} <= kept
    # Of what is begun, what fits stays, and says that something is missing.
    assert "No space left" in stream["text"]
    on_disk = {name: status for name, status in found["stored"].items() if name != "stream"}
    assert on_disk == dict.fromkeys(kept, "ok")
    if stream["status"] == "partial_error":
        assert found["stored"]["stream"] == "partial_error"
    assert found["problems"] == []
    assert found["unpublished"] == []
    assert found["stats"]["failed"] == len(lost) + (stream["status"] == "error")


def test_a_full_disk_leaves_no_half_index_export_or_writer(
    tmp_path: Path, in_small_disk: list[str]
) -> None:
    [found] = run(*in_small_disk, *JOB, "index_on_full_disk", tmp_path / "disk" / "root")
    assert found["refused"] == [errno.ENOSPC] * 6
    assert found["left"] == ["tllm-store.json", "writers"]
    assert (found["records"], found["ok"]) == (50, True)


def test_a_file_size_limit_fails_only_records_that_exceed_it(tmp_path: Path) -> None:
    results = run(*JOB, "exceed_file_size", tmp_path, *LAYOUTS)
    assert len(results) == len(LAYOUTS)
    for found in results:
        for name, result in found["outcomes"].items():
            if name.startswith("3000"):
                assert result["errno"] == errno.EFBIG
                assert "EFBIG" in result["text"]
            else:
                assert result["status"] == "ok"
        assert set(found["stored"]) == {"10-0", "10-2", "10-4"}
        assert found["problems"] == []
        assert found["unpublished"] == []


def test_a_lost_permission_fails_records_until_it_is_back(tmp_path: Path) -> None:
    results = run(*as_ordinary_user(), *JOB, "lose_permission", tmp_path, *LAYOUTS)
    assert len(results) == len(LAYOUTS)
    for found in results:
        assert found["outcomes"]["before"]["status"] == "ok"
        assert found["outcomes"]["during"]["errno"] == errno.EACCES
        assert "Permission denied [EACCES]" in found["outcomes"]["during"]["text"]
        assert found["outcomes"]["after"]["status"] == "ok"
        assert set(found["stored"]) == {"before", "after"}
        assert found["problems"] == []


def test_an_unwritable_root_is_refused_at_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    [found] = run(*as_ordinary_user(), *JOB, "open_unwritable", root)
    assert found["errno"] == errno.EACCES
    assert f"root='{root}' cannot be written" in found["refused"]


def test_a_root_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be a store"):
        StoreWriter(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be a store"):
        StoreWriter(tmp_path / "file" / "below")


@pytest.mark.parametrize("durability", ["rename", "fsync"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_writers_lose_nothing_that_was_published(
    tmp_path: Path, layout: str, durability: str
) -> None:
    random_wait = random.Random(f"{layout}{durability}")
    promised: set[str] = set()
    for number in range(3):
        listening, telling = FORKS.Pipe(duplex=False)
        arguments = telling, str(tmp_path), layout, durability, f"run{number}"
        writer = FORKS.Process(target=write_until_killed, args=arguments, daemon=True)
        writer.start()
        telling.close()
        with os.fdopen(os.dup(listening.fileno()), "rb") as lines:
            first = lines.readline()
            assert first.startswith(b"ok ")
            time.sleep(random_wait.uniform(0, 0.5))
            writer.kill()
            told = first + lines.read()
        listening.close()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        promised |= {line.split(" ")[1] for line in told.decode().splitlines()}
        store = stores.open(tmp_path)
        assert promised <= store.request_ids()
        assert_whole(store)
        published = {path for sidecar in tmp_path.rglob("*.json*") for path in named_by(sidecar)}
        for path in published:
            load_file(path)
    for name in random_wait.sample(sorted(promised), min(len(promised), 40)):
        found = stores.open(tmp_path).record(name)
        if not name.endswith("-stream"):
            number = int(name.rpartition("-")[2])
            wanted = record_of(name, rows=1 + number % 50, hidden=64)
            assert_same(found, wanted)
        else:
            assert found.shape("post_block", 0) == (40, 64)
            assert found.positions("post_block", 1).tolist() == list(range(40))
    # Whoever comes next cleans up, and goes on.
    with StoreWriter(tmp_path, layout=layout, on_collision="error") as writer:
        assert outcome(writer.submit(record_of("next")))["status"] == "ok"
        assert outcome(writer.submit(record_of(next(iter(promised)))))["reason"] == "collision"
    store = stores.open(tmp_path)
    assert not [path for path in store.verify().unpublished if "/staging/" in path]
    assert promised | {"next"} <= store.request_ids()


def named_by(sidecar: Path) -> Iterator[Path]:
    if sidecar.name == "tllm-store.json":
        return
    for line in sidecar.read_text().splitlines():
        for piece in json.loads(line)["arrays"]:
            yield sidecar.parent / piece["file"]


def test_a_record_cut_off_by_a_kill_is_pending_and_does_not_count(tmp_path: Path) -> None:
    writer = FORKS.Process(target=cut_off, args=(str(tmp_path),))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    store = stores.open(tmp_path)
    assert len(store) == 0
    assert not store.has("cut")
    pending = store.filter(status="pending")
    assert pending[0].shape("post_block", 0) == (5, 8)
    assert store.verify().pending == 1
    assert_whole(store)
    # Writing it again is no collision.
    with StoreWriter(tmp_path) as writer:
        assert outcome(writer.submit(record_of("cut")))["status"] == "ok"
    store = stores.open(tmp_path)
    assert store.has("cut")
    assert_same(store.record("cut"), record_of("cut"))


def test_a_script_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    [loaded] = run(*JOB, "leave_without_closing", tmp_path)
    assert len(stores.open(tmp_path)) == 20
    # Neither vLLM nor the runtime is needed.
    assert loaded == []


def test_one_writer_id_is_one_process_at_a_time(tmp_path: Path) -> None:
    listening, telling = FORKS.Pipe(duplex=False)
    other = FORKS.Process(target=hold, args=(telling, str(tmp_path), "rank0"), daemon=True)
    other.start()
    assert listening.recv() == "open"
    with pytest.raises(ValueError, match=rf"writer_id='rank0' .*process {other.pid}"):
        StoreWriter(tmp_path, writer_id="rank0")
    StoreWriter(tmp_path, writer_id="rank1").close()
    other.kill()
    other.join()
    StoreWriter(tmp_path, writer_id="rank0").close()


def test_a_forked_process_neither_writes_nor_waits(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=1000) as writer:
        future = writer.submit(record_of("r"))
        stream = writer.begin(RecordMeta("t"))
        for call in (
            lambda: writer.submit(record_of("s")),
            lambda: stream.append("post_block", 0, [0], torch.ones(1, 4)),
            stream.finish,
        ):
            pid = os.fork()
            if pid == 0:
                # What the interpreter does at its end, without pytest's.
                writer.close()
                try:
                    call()
                except StoreError as error:
                    os._exit(0 if "another one, under a writer_id of its own" in str(error) else 2)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        stream.abort()
        writer.flush()
        assert future.result(0).status == "ok"
    assert stores.open(tmp_path).request_ids() == {"r"}


def test_a_forked_process_that_lives_on_holds_no_lock(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    writer.close()
    try:
        StoreWriter(tmp_path).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class StalledDisk:
    """An ext4 file system on a loop device, which can be frozen: writes to it hang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        self._guard: subprocess.Popen[bytes] | None = None
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        for command in (
            ["mkfs.ext4", "-q", str(image)],
            ["mount", "-o", "loop", str(image), str(self.folder)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no disk that can be stalled: {' '.join(command)}: {done.stderr}")

    def freeze(self) -> None:
        # Thawed in any case: a frozen disk would hold this process for ever.
        command = f"sleep 60; fsfreeze -u {self.folder}"
        self._guard = subprocess.Popen(["sh", "-c", command], stderr=subprocess.DEVNULL)
        subprocess.run(["fsfreeze", "-f", self.folder], check=True)

    def thaw(self) -> None:
        if self._guard is not None:
            subprocess.run(["fsfreeze", "-u", self.folder], check=True)
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def close(self) -> None:
        self.thaw()
        # Lazily: a mapping that is not collected yet still holds it.
        subprocess.run(["umount", "-l", self.folder], check=True)


@pytest.fixture
def stalled_disk(tmp_path: Path) -> Iterator[StalledDisk]:
    if os.geteuid() != 0 or shutil.which("fsfreeze") is None:
        pytest.skip("only root can mount and freeze a disk, with fsfreeze")
    disk = StalledDisk(tmp_path)
    yield disk
    disk.close()


def test_a_stalled_disk_with_drop_costs_records_and_no_time(stalled_disk: StalledDisk) -> None:
    root = stalled_disk.folder / "root"
    with StoreWriter(root, overflow="drop", queue_bytes=100_000, publish_interval=0.01) as writer:
        assert outcome(writer.submit(record_of("before")))["status"] == "ok"
        stalled_disk.freeze()
        try:
            start = time.monotonic()
            stream = writer.begin(stores.RecordMeta("stream"))
            futures = []
            for number in range(50):
                futures.append(writer.submit(record_of(str(number), rows=100, hidden=64)))
                rows = rows_of(f"s{number}", 100, 64)
                stream.append("post_block", 0, range(number * 100, number * 100 + 100), rows)
            assert time.monotonic() - start < 10
            dropped = [f for f in futures if f.done()]
            assert len(dropped) >= 40
            for future in dropped:
                with pytest.raises(StoreError, match="queue of 100000 bytes was full") as caught:
                    future.result()
                assert caught.value.reason == "dropped"
            with pytest.raises(TimeoutError):
                writer.flush(timeout=0.2)
            ended = stream.finish()
        finally:
            stalled_disk.thaw()
        writer.flush()
        assert all(f.done() for f in futures)
        kept = [n for n, f in enumerate(futures) if f.exception() is None]
        told = outcome(ended)
        assert "dropped" in told["text"]
        stats = writer.stats()
        assert stats.dropped == len(dropped) + 1
        assert stats.peak_queued_bytes <= 100_000
    store = stores.open(root)
    assert {f"{n}" for n in kept} | {"before"} == store.request_ids()
    assert_whole(store)


def test_a_stalled_disk_with_block_costs_time_and_no_records(stalled_disk: StalledDisk) -> None:
    root = stalled_disk.folder / "root"
    with StoreWriter(root, queue_bytes=100_000, publish_interval=0.01) as writer:
        assert outcome(writer.submit(record_of("before")))["status"] == "ok"
        stalled_disk.freeze()
        try:
            submit = threading.Thread(
                target=lambda: [
                    writer.submit(record_of(str(n), rows=100, hidden=64)) for n in range(20)
                ]
            )
            submit.start()
            submit.join(1)
            assert submit.is_alive()
        finally:
            stalled_disk.thaw()
        submit.join()
        writer.flush()
        assert writer.stats().blocked_seconds > 0.5
        assert writer.stats().peak_queued_bytes <= 100_000
    assert len(stores.open(root)) == 21


def test_a_stalled_disk_with_spill_costs_neither(stalled_disk: StalledDisk, tmp_path: Path) -> None:
    root = stalled_disk.folder / "root"
    spill = tmp_path / "spill"
    spill.mkdir()
    with StoreWriter(
        root,
        overflow="spill",
        queue_bytes=100_000,
        spill_bytes=1_000_000,
        spill_folder=spill,
        publish_interval=0.01,
    ) as writer:
        assert outcome(writer.submit(record_of("before")))["status"] == "ok"
        stalled_disk.freeze()
        try:
            start = time.monotonic()
            stream = writer.begin(stores.RecordMeta("stream"))
            futures = []
            for number in range(20):
                futures.append(writer.submit(record_of(str(number), rows=100, hidden=64)))
                rows = rows_of(f"s{number}", 10, 64)
                stream.append("post_block", 0, range(number * 10, number * 10 + 10), rows)
            ended = stream.finish()
            # More than fits in memory and on the spill disk.
            beyond = [
                writer.submit(record_of(f"beyond{n}", rows=100, hidden=64)) for n in range(40)
            ]
            assert time.monotonic() - start < 10
        finally:
            stalled_disk.thaw()
        writer.flush()
        assert {outcome(future)["status"] for future in [*futures, ended]} == {"ok"}
        lost = [result for result in map(outcome, beyond) if result["status"] != "ok"]
        assert lost
        assert all("spill file had its 1000000 bytes" in result["text"] for result in lost)
        assert writer.stats().spilled > 10
    store = stores.open(root)
    for number in range(20):
        assert_same(store.record(str(number)), record_of(str(number), rows=100, hidden=64))
    assert store.record("stream").positions("post_block", 0).tolist() == list(range(200))
    assert_whole(store)
    assert list(spill.iterdir()) == []


def on_disk(spill: SpillFile) -> int:
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in spill._segments)


def pass_short_rows_beside_long(spill: SpillFile, nbytes: int, count: int) -> list[SpilledRows]:
    """Rows come and are read at once, `count` of them; of each 15 one stays, and is returned. Ends
    early where there is no room."""
    rows = torch.arange(nbytes) % 251
    kept = []
    for number in range(count):
        spilled = spill.put((rows + number % 5).to(torch.uint8))
        if spilled is None:
            break
        if number % 15:
            assert spill.pop(spilled).tolist() == (rows + number % 5).tolist()
        else:
            kept.append(spilled)
        assert on_disk(spill) <= spill.limit
    return kept


@pytest.mark.parametrize("nbytes", [64 << 10, 5000, 300])
def test_rows_that_were_read_take_no_disk_beside_those_that_were_not(
    tmp_path: Path, monkeypatch, nbytes: int
) -> None:
    monkeypatch.setattr(queue, "_SEGMENT_BYTES", 100 * nbytes)
    spill = SpillFile(tmp_path, limit=40 * nbytes + 40 * 2 * mmap.PAGESIZE)
    kept = pass_short_rows_beside_long(spill, nbytes, 450)
    assert len(kept) == 30
    # Whole pages, and those in which a file system notes where they are.
    assert on_disk(spill) <= 30 * (nbytes + 3 * mmap.PAGESIZE)
    assert 30 * nbytes <= spill.used
    for number, spilled in enumerate(kept):
        assert spill.pop(spilled)[:3].tolist() == [(15 * number) % 5 + i for i in range(3)]
    assert spill.used == on_disk(spill) == 0


def test_where_no_pages_can_be_given_back_the_limit_counts_whole_files(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(queue, "_punch_hole", lambda *place: False)
    spill = SpillFile(tmp_path, limit=1 << 20)
    kept = pass_short_rows_beside_long(spill, 5000, 10_000)
    assert 10 < len(kept) <= 32
    for spilled in kept[:-1]:
        spill.pop(spilled)
    # One request that goes on keeps one file, not all of the room.
    assert len(pass_short_rows_beside_long(spill, 5000, 150)) == 10
    assert spill.used <= spill.limit


def test_published_payloads_of_all_layouts_open_with_safetensors_alone(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        with StoreWriter(tmp_path, layout=layout) as writer:
            writer.submit(record_of(layout))
    found = payloads(tmp_path)
    assert len(found) == 4
    assert all(load_file(path) for path in found)
