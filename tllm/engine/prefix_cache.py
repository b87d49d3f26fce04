"""Prefix-cache rules: which blocks a request may reuse, and which keys its own blocks get."""

from __future__ import annotations

import hashlib
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tllm.engine.seams import uses
from tllm.spec.changes import Changes
from tllm.spec.request import RequestSpec
from tllm.spec.selection import stretches_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

Hasher = Callable[["Request"], list[Any]]

uses(
    "vllm.v1.request.Request",
    "_block_hasher block_hashes cache_salt num_tokens resumable update_block_hashes",
    "blocks whose rows were changed have keys of their own",
)
uses(
    "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "get_computed_blocks get_computed_blocks_for_connector",
    "rows that are read are computed, also when their block is cached",
    takes="request",
)
uses("vllm.v1.core.kv_cache_manager.KVCacheManager", "coordinator", "it finds cached blocks")
uses(
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
    "find_longest_cache_hit",
    "rows that are read are computed, also when their block is cached",
    takes="block_hashes max_cache_hit_length",
)


class BlockKeys:
    """The block hasher of a request whose rows are changed, in place of the engine's own.

    A block's key holds what was done to every token up to its end. So blocks before the first
    changed row have the plain key and are shared with everybody; the others are shared by requests
    that do the same to the same tokens, whichever phase they were in. Rows of a block that ends in
    the midst of an item that sees all of itself hang on the rest of it: the key holds what was done
    up to the item's end.

    Args:
        plain: the engine's hasher.
        block_size: tokens that one hash stands for.
        changes: what is done to the rows.
        whole: `(start, stop)` of the items of the prompt whose tokens see those after them.
    """

    def __init__(
        self,
        plain: Hasher,
        block_size: int,
        changes: Changes,
        whole: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._plain = plain
        self._block_size = block_size
        self._whole = whole
        self._starts = [start for start, _ in changes]
        self._digests = _digests_at(changes, block_size, [stop for _, stop in whole])
        self._first = next((start for start, done in changes if done), None)
        self._chain: list[Any] = []

    def begin(self, request: Request) -> None:
        """Put these keys in the place of the plain ones, which a new request has already."""
        self._chain = list(request.block_hashes)
        request.block_hashes[:] = [self._key(plain, i) for i, plain in enumerate(self._chain)]

    def __call__(self, request: Request) -> list[Any]:
        """The hashes of the blocks that have become full."""
        known = len(request.block_hashes)
        if (known + 1) * self._block_size > request.num_tokens:
            return []  # as the engine's own: this is asked for each request in each step
        del self._chain[known:]
        # The engine's hasher continues the list it finds: let it find the plain one.
        shown, request.block_hashes = request.block_hashes, self._chain
        try:
            new = self._plain(request)
        finally:
            request.block_hashes = shown
        self._chain.extend(new)
        return [self._key(value, known + i) for i, value in enumerate(new)]

    def _key(self, plain: Any, block: int) -> Any:
        end = (block + 1) * self._block_size
        end = next((stop for start, stop in self._whole if start < end < stop), end)
        if self._first is None or end <= self._first:
            return plain
        reached = bisect_left(self._starts, end)  # stretches that begin before there
        return type(plain)(hashlib.sha256(plain + self._digests[reached]).digest())


def _digests_at(changes: Changes, block_size: int, stops: Sequence[int]) -> Mapping[int, bytes]:
    """What the first of the changes do, by their number: for as many as begin before the end of a
    block, or before one of the stops."""
    starts = [start for start, _ in changes]
    ends = {*stops, *((start // block_size + 1) * block_size for start in starts)}
    told = {done: hashlib.sha256(done).digest() for done in {done for _, done in changes}}
    done = [told[done] for _, done in changes]
    digest, found = hashlib.sha256(), {}
    reached = {1 + stretch for stretch in stretches_of(starts, [end - 1 for end in ends])}
    for first, last in pairwise([0, *sorted(reached)]):
        digest.update(array("q", starts[first:last]).tobytes() + b"".join(done[first:last]))
        found[last] = digest.digest()
    return found


def apply(
    request: Request,
    spec: RequestSpec,
    changes: Changes,
    block_size: int,
    whole: Sequence[tuple[int, int]],
) -> None:
    """Give a new request the keys that its rows need.

    Args:
        block_size: tokens that one hash stands for.
        whole: as of `BlockKeys`.
    """
    changed = any(done for _, done in changes)
    streams = request.resumable and bool(spec.steering)
    salted = spec.isolated or (streams and not _same_in_all_phases(spec))
    if not salted and not changed:
        return
    if salted:
        # Changed rows change the cache: nobody else may read these blocks, nor this request those
        # of others. Of a streamed prompt, which tokens were generated is known to it alone.
        request.cache_salt = f"{request.cache_salt or ''}tllm-{uuid.uuid4().hex}"
        request.block_hashes.clear()
        request.update_block_hashes()
    hasher = request._block_hasher
    if changed and hasher is not None:
        request._block_hasher = keys = BlockKeys(hasher, block_size, changes, whole)
        keys.begin(request)


def _same_in_all_phases(spec: RequestSpec) -> bool:
    return all(use.phase == "any" and use.positions.everything for use in spec.steering)


def limit_reuse(manager: Any, limits: dict[str, int]) -> None:
    """Let cached blocks serve only the tokens below a limit, for the requests that have one.

    Args:
        manager: the scheduler's KV cache manager; methods of this instance are replaced.
        limits: by request id; may change later.
    """
    coordinator = manager.coordinator
    find_longest_cache_hit = coordinator.find_longest_cache_hit
    limit: list[int] = []

    def limited(get_computed_blocks: Callable[..., Any]) -> Callable[..., Any]:
        def limited_get_computed_blocks(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in limits:
                return get_computed_blocks(request, *args, **kwargs)
            limit.append(limits[request.request_id])
            try:
                return get_computed_blocks(request, *args, **kwargs)
            finally:
                limit.pop()

        return limited_get_computed_blocks

    def limited_find_longest_cache_hit(
        block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any
    ) -> Any:
        if limit:
            max_cache_hit_length = min(max_cache_hit_length, limit[-1])
        return find_longest_cache_hit(block_hashes, max_cache_hit_length, *args, **kwargs)

    # 0.33 has a second way in, for requests whose other tokens a connector brings.
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
        if hasattr(manager, name):
            setattr(manager, name, limited(getattr(manager, name)))
    coordinator.find_longest_cache_hit = limited_find_longest_cache_hit
