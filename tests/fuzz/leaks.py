"""What an engine must have given back after a round.

A round is run again. Every cache knows then what it was asked, so that whatever there is more of
each time is kept for requests that are over.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import _lru_cache_wrapper
from typing import Any

import numpy as np
import torch

from tllm.shared_memory import FOLDER

Footprint = Counter[str]
"""How much there is of everything, by name."""

KEPT = {
    "tllm.stores.ledger.Ledger": "a store's writer knows every record of its store by name",
    "tllm.stores.ledger.Claim": "as the ledger, of which it is a part",
    "stores.publish.ShardPublisher._spare": "one block of memory for each of a writer's threads",
    "batch_layout.BatchLayout.on_device": "of the last batch, for 16 places in the ring at most",
    "esamp.bank.DistillerBank._predict_passes": "one for each shape of a batch, in powers of two",
    "esamp.bank.DistillerBank._train_passes": "as these",
    "esamp.bank._Pass": "of these",
    "esamp.bank._TrainPass": "of these",
    "esamp.graphs.Replays": "recordings for CUDA, by sizes and addresses: so many at most",
    "runtime.results.Results._given_up": "the last 4096 prompts that were given up, by their ids",
    "esamp.stats.Statistics": "the last thousand prompts are remembered, at 20 bytes each",
}
"""What grows with what was done, and why it may."""
SLACK = {"bytes of tensors": 2000}
"""How much more there may be of something."""
STILL_S, PATIENCE_S = 0.5, 5.0
"""How long what there is more of must stay the same, and how long that is waited for."""

_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_DEEPEST = 3


def footprint(llm: Any) -> Footprint:
    """What an engine in this process, and the process, hold."""
    return of_process() + _of_engine(llm)


def of_process() -> Footprint:
    """What this process holds: objects of tLLM, tensors, threads, descriptors, shared files."""
    gc.collect()
    found: Footprint = Counter()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind in (torch.Tensor, torch.nn.Parameter):
            if each.device.type != "meta" and each.layout == torch.strided:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif kind is _lru_cache_wrapper:
            if (each.__module__ or "").startswith("tllm"):
                found[f"kept by {each.__module__}.{each.__qualname__}"] = each.cache_info().currsize
        elif str(kind.__module__).startswith("tllm."):
            found[f"objects {kind.__module__}.{kind.__qualname__}"] += 1
            for name, value in _attributes(each):
                if size := _size(value, 0):
                    found[f"entries {kind.__module__}.{kind.__qualname__}.{name}"] += size
    found["bytes of tensors"] = sum(storages.values())
    for thread in threading.enumerate():
        found[f"thread {thread.name.rstrip('0123456789_-')}"] += 1
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found[f"descriptor {_kind_of(os.readlink(f'/proc/self/fd/{descriptor}'))}"] += 1
        except OSError:  # the listing's own
            continue
    ours = re.compile(rf"tllm-\d+-{os.getpid()}-")
    found["shared files"] = sum(bool(ours.match(name)) for name in os.listdir(FOLDER))
    return found


def _of_engine(llm: Any) -> Footprint:
    """What vLLM and our workers say that they hold for requests."""
    found: Footprint = Counter()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found["requests of the scheduler"] = len(scheduler.requests)
    pool = scheduler.kv_cache_manager.block_pool
    found["blocks in use"] = pool.num_gpu_blocks - pool.get_num_free_blocks()
    found["requests that are steered"] = llm.steering.status()["requests"]
    for worker in llm.intervention_stats():
        for name in (
            "running_sequences",
            "steering_configurations",
            "steering_mib",
            "rows_dropped",
        ):
            found[name] += worker[name]
    return found


def _attributes(each: Any) -> list[tuple[str, Any]]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(each).__mro__]
    names = [name for of in slots for name in ([of] if isinstance(of, str) else of)]
    found = [(name, getattr(each, name)) for name in names if hasattr(each, name)]
    return [*found, *vars(each).items()] if hasattr(each, "__dict__") else found


def _size(value: Any, depth: int) -> int:
    """Entries of a container and of those in it; numbers of an array."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return int(np.prod(value.shape))
    if not isinstance(value, _CONTAINERS) or depth == _DEEPEST:
        return 0
    inside = list(value.values()) if isinstance(value, Mapping) else list(value)
    return len(inside) + sum(_size(each, depth + 1) for each in inside)


def _kind_of(target: str) -> str:
    """Of what a descriptor is, without what differs from one to the next."""
    return target.partition(":[")[0] if ":[" in target else target


def more_than(before: Footprint, after: Footprint) -> list[str]:
    """What there is more of."""
    return [
        f"{name}: {before[name]} and {count - before[name]} more"
        for name, count in sorted(after.items())
        if count > before[name] + SLACK.get(name, 0) and not any(kept in name for kept in KEPT)
    ]


class Rest:
    """Whether threads that work on after a round have come to rest."""

    def __init__(self) -> None:
        self._begun = self._changed = time.monotonic()
        self._more: list[str] = []

    def reached(self, more: list[str]) -> bool:
        """Whether what there is more of has not changed for long, or never stays the same."""
        now = time.monotonic()
        if more != self._more:
            self._more, self._changed = more, now
        return now - self._changed > STILL_S or now - self._begun > PATIENCE_S


def grown(measure: Callable[[], Footprint], before: Footprint) -> list[str]:
    """What there is more of than before, when threads had time to come to rest."""
    rest = Rest()
    while (more := more_than(before, measure())) and not rest.reached(more):
        time.sleep(0.1)
    return more
