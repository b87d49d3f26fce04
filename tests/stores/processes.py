"""Writers in processes of their own: killed, starved, shut out, or beside each other.

`FORKS.Process(target=write_many, ...)` costs no imports: its server has done them. What needs a
file system or a user of its own is started as `python -m tests.stores.processes JOB ROOT LAYOUT`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.stores.samples import record_of, rows_of
from tllm.stores import RecordMeta, StoreError, StoreWriter, export
from tllm.stores import open as open_store

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "tllm.stores", "tests.stores.samples"])


def outcome(future: Any) -> dict[str, Any]:
    """What became of a record, as JSON."""
    try:
        result = future.result(60)
    except StoreError as error:
        return {"status": "error", "reason": error.reason, "errno": error.errno, "text": str(error)}
    return {"status": result.status, "text": result.error}


def write_until_killed(told: Connection, root: str, layout: Any, durability: Any, run: str) -> None:
    """Write records of all kinds without end; tell each id once it is published."""
    writer = StoreWriter(
        root,
        layout=layout,
        durability=durability,
        shard_bytes=200_000,
        publish_interval=0.05,
        queue_bytes=1 << 20,
    )

    def tell(request_id: str, future: Any) -> None:
        # One system call: never half a line.
        future.add_done_callback(
            lambda f: os.write(told.fileno(), f"{f.result().status} {request_id}\n".encode())
        )

    number = 0
    while True:
        name = f"{run}-{number}"
        if number % 5 == 0:
            stream = writer.begin(RecordMeta(f"{name}-stream", token_ids=range(40)))
            for start in range(0, 40, 10):
                positions = torch.arange(start, start + 10)
                rows = rows_of(f"{name}{start}", 10, 64)
                stream.append("post_block", 0, positions, rows)
                stream.append("post_block", 1, positions, rows)
            tell(f"{name}-stream", stream.finish())
        tell(name, writer.submit(record_of(name, rows=1 + number % 50, hidden=64)))
        number += 1


def cut_off(root: str) -> None:
    """Be killed in the middle of a record."""
    writer = StoreWriter(root, publish_interval=1000)
    stream = writer.begin(RecordMeta("cut"))
    stream.append("post_block", 0, range(5), torch.ones(5, 8))
    writer.flush()
    stream.append("post_block", 0, range(5, 9), torch.ones(4, 8))
    os.kill(os.getpid(), signal.SIGKILL)


def fill(root: str, layout: Any) -> None:
    """Write until the disk is full; then make room, and write again."""
    ballast = Path(root).parent / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    writer = StoreWriter(root, layout=layout, shard_bytes=1 << 20, publish_interval=0.05, threads=1)
    outcomes = {}
    stream = writer.begin(RecordMeta("stream"))
    for number in range(60):
        name = f"before-{number}"
        outcomes[name] = outcome(writer.submit(record_of(name, rows=200, hidden=512)))
        rows = rows_of(f"stream{number}", 20, 512)
        stream.append("post_block", 0, range(number * 20, number * 20 + 20), rows)
        # Published as it is: else its rows would wait for a whole block.
        writer.flush()
    outcomes["stream"] = outcome(stream.finish())
    ballast.unlink()
    for number in range(3):
        name = f"after-{number}"
        outcomes[name] = outcome(writer.submit(record_of(name, rows=200, hidden=512)))
    report(writer, outcomes)
    shutil.rmtree(root)


def index_on_full_disk(root: str) -> None:
    """Save an index, export, and open writers where there is no room at all."""
    with StoreWriter(root, layout="packed") as writer:
        for number in range(50):
            writer.submit(record_of(str(number)))
    store, beside = open_store(root), Path(root).parent
    ballast = os.open(beside / "ballast", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(ballast, bytes(4096))
    os.close(ballast)
    refused = []
    for job in (
        store.index,
        *(partial(export, store, beside / "out", each) for each in ("parquet", "npz")),
        partial(export, store, beside / "out", "safetensors"),
        partial(StoreWriter, root, writer_id="other"),
        partial(StoreWriter, beside / "another"),
    ):
        try:
            job()
        except OSError as error:
            refused.append(error.errno)
    left = sorted(path.name for folder in (Path(root), beside / "out") for path in folder.iterdir())
    (beside / "ballast").unlink()
    store.index()
    whole = open_store(root).verify()
    told = {"refused": refused, "left": left, "records": whole.records, "ok": whole.ok}
    print(json.dumps(told), flush=True)
    # Now and then (2 of 75 times on a busy machine) such a process aborts after Python has ended,
    # where threads of a library in C++ are torn down. All that is tested is over by then.
    os._exit(0)


def exceed_file_size(root: str, layout: Any) -> None:
    """Write records of which some are larger than files may be."""
    writer = StoreWriter(root, layout=layout, publish_interval=0.05, threads=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    outcomes = {}
    for number, rows in enumerate((10, 3000, 10, 3000, 10)):
        name = f"{rows}-{number}"
        outcomes[name] = outcome(writer.submit(record_of(name, rows=rows, hidden=512, layers=1)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    report(writer, outcomes)


def lose_permission(root: str, layout: Any) -> None:
    """Write while the folders may not be written for a time."""
    writer = StoreWriter(root, layout=layout, publish_interval=0.05, threads=1)
    outcomes = {"before": outcome(writer.submit(record_of("before")))}
    folders = [path for path in Path(root).rglob("*") if path.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    outcomes["during"] = outcome(writer.submit(record_of("during")))
    for folder in folders:
        folder.chmod(0o700)
    outcomes["after"] = outcome(writer.submit(record_of("after")))
    report(writer, outcomes)


def open_unwritable(root: str) -> None:
    """Open a writer where it may not write."""
    Path(root).chmod(0o500)
    try:
        StoreWriter(root)
    except PermissionError as error:
        print(json.dumps({"refused": str(error), "errno": error.errno}))
    else:
        print(json.dumps({"refused": None}))
    finally:
        Path(root).chmod(0o700)


def write_many(root: str, layout: Any, writer_id: str, count: str) -> None:
    """Write some records under an id, beside other processes."""
    with StoreWriter(
        root, layout=layout, writer_id=writer_id, shard_bytes=50_000, on_collision="suffix"
    ) as writer:
        for number in range(int(count)):
            # Some names are the same in all of them.
            writer.submit(record_of(f"{writer_id}-{number}"))
            writer.submit(record_of("shared", tag=str(number)))


def hold(told: Connection, root: str, writer_id: str) -> None:
    """Keep a writer open until it is killed."""
    with StoreWriter(root, writer_id=writer_id):
        told.send("open")
        signal.pause()


def leave_without_closing(root: str) -> None:
    """Submit and end, as a script does whose author forgot; print what it did not need to load."""
    rooms = ("vllm", "tllm.runtime", "tllm.engine", "tllm.consumers")
    print([name for name in sys.modules if name.startswith(rooms)])
    writer = StoreWriter(root, publish_interval=1000)
    for number in range(20):
        writer.submit(record_of(str(number)))


def report(writer: StoreWriter, outcomes: dict[str, Any]) -> None:
    """Print what happened and what is on disk."""
    stats = writer.stats()
    writer.close()
    store = open_store(writer.paths.root)
    result = store.verify()
    print(
        json.dumps(
            {
                "outcomes": outcomes,
                "stored": {record.request_id: record.status for record in store},
                "problems": [str(problem) for problem in result.problems],
                "unpublished": result.unpublished,
                "stats": stats.to_dict(),
            }
        )
    )


if __name__ == "__main__":
    name, root, *layouts = sys.argv[1:]
    jobs = (
        fill,
        index_on_full_disk,
        exceed_file_size,
        lose_permission,
        open_unwritable,
        leave_without_closing,
    )
    [job] = [job for job in jobs if job.__name__ == name]
    for arguments in [(f"{root}/{layout}", layout) for layout in layouts] or [(root,)]:
        job(*arguments)
