"""Rows that the workers keep."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tllm.client.calls import LEAVING, Steps, WorkerCall
from tllm.client.generation import Generation, Work
from tllm.client.path_ways import Place
from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.params import SamplingParams, with_patch
from tllm.spec.patching import KEPT, KeptRows, RequestPatch

if TYPE_CHECKING:
    from tllm.client.registrations import Registrations


class RowKeeping:
    """Lets the workers keep rows, and every front end know of them."""

    def __init__(self, registered: Registrations) -> None:
        self._registered = registered

    def dropped(self, kept: KeptRows | str) -> Steps[None]:
        """See `PatchingControl.drop`."""
        name = kept.name if isinstance(kept, KeptRows) else kept
        found: KeptRows | None = None

        def removed() -> None:
            nonlocal found
            there = self._registered.patches.find(name, "drop")
            if isinstance(kept, KeptRows) and kept.uid != there.uid:
                raise ValueError(
                    f"drop: the rows that were given are not kept by this engine, where {name!r} "
                    "is the name of others; give the name to drop those"
                )
            found = there

        try:
            yield from self._registered.change(f"{KEPT}{name}", removed)
            assert found is not None
            yield WorkerCall("drop_rows", (found.uid,))
        except LEAVING:
            if found is not None:
                yield from self._withdrawn(found)
            raise

    def runs(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[Sequence[Place]],
        names: Sequence[str | None] | None = None,
        asked: Sequence[Mapping[str, Any]] | None = None,
        patches: Sequence[RequestPatch | None] | None = None,
        on_host: bool = False,
        adapter: Any = None,
    ) -> Work[tuple[list[KeptRows], list[Any]]]:
        """Compute prompts and keep their rows.

        Args:
            places: of each prompt; one without any is computed, and nothing of it is kept.
            names: of each run; None: one of its own.
            asked: what else each request asks of consumers.
            patches: of each.
            on_host: where rows are kept.
            adapter: that all are computed with; it is loaded.

        Returns:
            What is kept of each that has places, and the outputs of all.
        """
        registered = self._registered
        replicas = registered.replicas
        if replicas > 1:
            raise ValueError(
                f"this engine has {replicas} data-parallel replicas, and rows of a run stay "
                "in the one that computed it; start one with data_parallel_size=1"
            )
        yield from self._check_room(prompts, places, on_host)
        yield registered.ensure(PatchRunsConsumer())
        uids = [uuid.uuid4().hex for _ in prompts]
        params = []
        for i, (uid, at) in enumerate(zip(uids, places, strict=True)):
            wanted = {PatchRunsConsumer.consumer_id: {"uid": uid, "places": list(at)}} if at else {}
            consumers = {**wanted, **(asked[i] if asked else {})}
            one = SamplingParams(temperature=0, max_tokens=1, detokenize=False, consumers=consumers)
            patch = patches[i] if patches else None
            params.append(one if patch is None else with_patch(one, patch))
        kept: list[KeptRows] = []
        registered.patches.computed.update(uids)
        try:
            outputs = yield Generation(prompts, params, adapter)
            for i, (uid, output) in enumerate(zip(uids, outputs, strict=True)):
                _refuse_failed(output)
                if not places[i]:
                    continue
                answers = yield registered.ask(WorkerCall("keep_run", (uid, on_host)))
                size = sum(answer[1] for answer in answers if answer is not None)
                name = (names[i] if names else None) or f"run-{uid}"
                run = KeptRows(name, uid, "run", tuple(places[i]), len(prompts[i]), size, on_host)
                kept.append(run)
                yield self.register(run)
        except BaseException:
            yield from self.forget(kept)
            for uid in (uid for uid, at in zip(uids, places, strict=True) if at):
                yield registered.ask(WorkerCall("drop_rows", (uid,)))
            raise
        finally:
            registered.patches.computed.difference_update(uids)
        return kept, outputs

    def forget(self, kept: Iterable[KeptRows]) -> Work[None]:
        """Drop what is still kept of these; who leaves meanwhile does so when all are dropped."""
        left: BaseException | None = None
        for each in kept:
            try:
                with suppress(ValueError):  # somebody else has dropped it
                    yield self.dropped(each)
            except LEAVING as error:
                left = error
        if left is not None:
            raise left

    def room(self, tokens: int, places: Sequence[Place]) -> Work[int]:
        """How many runs of so many tokens the workers can keep now."""
        wanted = {place: count * tokens for place, count in Counter(places).items()}
        answers = yield self._registered.ask(WorkerCall("patch_room", (wanted,)))
        row_bytes = self._registered.facts.row_bytes
        return min(free // (rows * row_bytes) for rows, free in answers if rows)

    def _check_room(
        self, prompts: Sequence[Sequence[int]], places: Sequence[Sequence[Place]], on_host: bool
    ) -> Work[None]:
        """Refuse what there is no room for in some worker, before it is computed: tensor-parallel
        ranks keep the same rows, pipeline stages those of their own layers."""
        wanted = Counter[Place]()
        for prompt, at in zip(prompts, places, strict=True):
            for place in at:
                wanted[place] += len(prompt)
        answers = yield self._registered.ask(WorkerCall("patch_room", (wanted, on_host)))
        facts = self._registered.facts
        option = "max_patch_host_mib" if on_host else "max_patch_mib"
        most = facts.max_patch_host_mib if on_host else facts.max_patch_mib
        for rows, free in answers:
            if rows * facts.row_bytes > free:
                tokens = sum(len(one) for one, at in zip(prompts, places, strict=True) if at)
                raise ValueError(
                    f"the rows of {tokens} tokens at {max(map(len, places))} places take "
                    f"{rows * facts.row_bytes / 2**20:.1f} MiB in a worker, and of "
                    f"{option}={most} there are {free / 2**20:.1f} MiB left; drop what is not "
                    "needed with llm.patching.drop(name), keep fewer hooks or layers, or start "
                    f"the engine with a larger {option}"
                )

    def register(self, kept: KeptRows) -> Steps[None]:
        """Let every front end know of rows that the workers keep."""

        def registered() -> KeptRows:
            self.check_free(kept.name)
            return kept

        try:
            yield from self._registered.change(f"{KEPT}{kept.name}", registered)
        except LEAVING:
            yield from self._withdrawn(kept)
            raise

    def _withdrawn(self, kept: KeptRows) -> Steps[None]:
        """Nobody waits any more for a change of the name of these rows, of which the workers may
        not have heard: neither they nor the name are left."""
        # Once the workers have answered this call, the change is made or never will be, and is
        # known here.
        yield WorkerCall("drop_rows", (kept.uid,))
        with suppress(ValueError):  # the name is gone
            yield from self.dropped(kept)

    def check_free(self, name: Any) -> None:
        """Refuse a name that others have, or that is none."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: give a text that is not empty")
        if name in self._registered.patches.kept:
            raise ValueError(
                f"name={name!r} is taken by other rows; give another, or drop those first with "
                f"llm.patching.drop({name!r})"
            )


def _refuse_failed(output: Any) -> None:
    """Raise what a worker said of a run that it could not keep."""
    for result in output.outputs[0].consumer_results.values():
        if result.status != "ok":
            raise RuntimeError(f"the rows of the run are not all there: {result.error}")
