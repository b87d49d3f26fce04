"""`llm.patching`: rows that the workers keep, and what they are for."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from tllm.client.calls import ALONE, Steps, WorkerCall
from tllm.client.generation import AsyncGeneration, Generation, SyncGeneration, Work
from tllm.client.patching import KEPT
from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.params import SamplingParams
from tllm.spec.hooks import HookPoint
from tllm.spec.patching import KeptRows
from tllm.spec.tiers import FloatArray, numeric_array

if TYPE_CHECKING:
    from tllm.client.core import Client

Place = tuple[str, "int | None"]


class PatchingControl:
    """Runs whose rows the workers keep, mean rows, and sweeps. On an `AsyncLLM` every method is to
    be awaited.

    What is kept belongs to the engine: every front end that shares its workers can refer to it.
    """

    def __init__(self, client: Client, generation: SyncGeneration | AsyncGeneration) -> None:
        self._client = client
        self._generation = generation

    def run(
        self,
        prompt: Any,
        *,
        hooks: str | Sequence[str],
        layers: int | Sequence[int] | None = None,
        name: str | None = None,
    ) -> Any:
        """Compute a prompt and keep its rows on the workers, for
        `patch=[{..., "source": {"run": run, "positions": [...]}}]`.

        Args:
            prompt: text or token ids.
            hooks: hook points whose rows are kept.
            layers: of those that belong to layers; negative ones count from the end. None: all.
            name: what requests may call it, in place of the run itself.

        Returns:
            The run (`KeptRows`). It stays until `drop`.

        Raises `ValueError` for what the model does not have, for a name that is taken, and where
        `max_patch_mib` has no room.
        """
        return self._generation.do(self._run_of(prompt, hooks, layers, name))

    def register_mean(self, name: str, rows: Mapping[str, Any]) -> Any:
        """Give rows a name, for `patch=[{..., "source": {"mean": name}}]`: one for each place, put
        at whatever position is patched there.

        Args:
            rows: `{hook: {layer: row}}` with rows `[hidden]`; `{"lm_head_in": row}`.

        Returns:
            What is kept (`KeptRows`).
        """

        def steps() -> Steps[KeptRows]:
            yield from self._client.current()
            self._check_free(name)
            found = dict(self._mean_rows(rows))
            size = len(found) * self._client.facts.row_bytes
            kept = KeptRows(name, uuid.uuid4().hex, "mean", tuple(found), 1, size)
            try:
                yield WorkerCall("keep_rows", (kept.uid, found))
                yield from self._register(kept)
            except BaseException:
                yield WorkerCall("drop_rows", (kept.uid,))
                raise
            return kept

        return self._client_run(steps())

    def drop(self, kept: KeptRows | str) -> Any:
        """Forget a run or a mean; requests that run still have its rows."""
        name = kept.name if isinstance(kept, KeptRows) else kept

        def steps() -> Steps[None]:
            yield ALONE
            changed = False
            while not changed:
                yield from self._client.current()
                found = self._client.patches.find(name, "drop")
                changed = yield from self._client.change(f"{KEPT}{name}", None)
            yield WorkerCall("drop_rows", (found.uid,))

        return self._client_run(steps())

    def kept(self) -> Any:
        """All that the workers keep, by name."""

        def steps() -> Steps[dict[str, KeptRows]]:
            yield from self._client.current()
            return dict(self._client.patches.kept)

        return self._client_run(steps())

    # -- how --------------------------------------------------------------------------------------

    def _client_run(self, steps: Steps[Any]) -> Any:
        def work() -> Work[Any]:
            return (yield steps)

        return self._generation.do(work())

    def _run_of(self, prompt: Any, hooks: Any, layers: Any, name: str | None) -> Work[KeptRows]:
        yield self._client.current()
        uid = uuid.uuid4().hex
        name = f"run-{uid[:12]}" if name is None else name
        self._check_free(name)
        places = self.places(hooks, layers)
        [kept], _ = yield from self.runs([self.tokens(prompt)], places, [name])
        yield self._register(kept)
        return kept

    def runs(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[Place],
        names: Sequence[str],
        **asked: Any,
    ) -> Work[tuple[list[KeptRows], list[Any]]]:
        """Compute prompts and keep their rows; nobody is told of them.

        Args:
            asked: what else the requests ask of consumers.

        Returns:
            What is kept of each, and the outputs.
        """
        client = self._client
        if client.replicas > 1:
            raise ValueError(
                f"this engine has {client.replicas} data-parallel replicas, and rows of a run stay "
                "in the one that computed it; start one with data_parallel_size=1"
            )
        yield from self._check_room(prompts, places)
        yield client.ensure(PatchRunsConsumer())
        uids = [uuid.uuid4().hex for _ in prompts]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                consumers={PatchRunsConsumer.consumer_id: {"uid": uid, "places": places}, **asked},
            )
            for uid in uids
        ]
        try:
            outputs = yield Generation(prompts, params)
            kept = []
            for uid, name, tokens, output in zip(uids, names, prompts, outputs, strict=True):
                _refuse_failed(output)
                answers = yield client.ask(WorkerCall("keep_run", (uid,)))
                size = sum(answer[1] for answer in answers if answer is not None)
                kept.append(KeptRows(name, uid, "run", tuple(places), len(tokens), size))
        except BaseException:
            yield from self.forget(uids)
            raise
        return kept, outputs

    def forget(self, uids: Iterable[str]) -> Work[None]:
        """Drop rows that nobody was told of."""
        for uid in uids:
            with suppress(Exception):  # an engine that is going down keeps nothing
                yield self._client.ask(WorkerCall("drop_rows", (uid,)))

    def _check_room(self, prompts: Sequence[Sequence[int]], places: Sequence[Place]) -> Work[None]:
        """Refuse what there is no room for, before it is computed."""
        answers = yield self._client.ask(WorkerCall("free_patch_bytes"))
        facts = self._client.facts
        needed = sum(map(len, prompts)) * len(places) * facts.row_bytes
        if needed > sum(answers):
            raise ValueError(
                f"the rows of {sum(map(len, prompts))} tokens at {len(places)} places take "
                f"{needed / 2**20:.1f} MiB, and of max_patch_mib={facts.max_patch_mib} there are "
                f"{min(answers) / 2**20:.1f} MiB left; drop what is not needed with "
                "llm.patching.drop(name), keep fewer hooks or layers, or start the engine with a "
                "larger max_patch_mib"
            )

    def _register(self, kept: KeptRows) -> Steps[None]:
        """Let every front end know of rows that the workers keep."""
        yield ALONE
        changed = False
        while not changed:
            yield from self._client.current()
            self._check_free(kept.name)
            changed = yield from self._client.change(f"{KEPT}{kept.name}", cloudpickle.dumps(kept))

    def _check_free(self, name: Any) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: give a text that is not empty")
        if name in self._client.patches.kept:
            raise ValueError(
                f"name={name!r} is taken by other rows; give another, or drop those first with "
                f"llm.patching.drop({name!r})"
            )

    def places(self, hooks: Any, layers: Any) -> list[Place]:
        """Hook points by layer. Raises `ValueError` for what this engine does not have."""
        points = self._client.facts.points
        if isinstance(hooks, (str, HookPoint)):
            hooks = [hooks]
        if not hooks:
            raise ValueError("hooks is empty; give one hook point or more")
        found: list[Place] = []
        for hook in hooks:
            point = HookPoint.parse(hook)
            chosen = points.layers(point) if layers is None else layers
            if not point.has_layer:
                chosen = [None]
            elif isinstance(chosen, int):
                chosen = [chosen]
            if not list(chosen):
                raise ValueError(
                    points.explain_missing(point, 0) if layers is None else "layers is empty"
                )
            for layer in chosen:
                point, at = points.check(point, layer)
                found.append((point.value, at))
        return list(dict.fromkeys(found))

    def tokens(self, prompt: Any) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        elif isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return list(self._generation.tokenizer.encode(prompt))
        plain = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not plain or not prompt or not all(type(token) is int for token in prompt):
            raise ValueError(f"the prompt is {prompt!r:.60}; give text, or a list of token ids")
        return list(prompt)

    def _mean_rows(self, rows: Mapping[str, Any]) -> Iterable[tuple[Place, FloatArray]]:
        if not isinstance(rows, Mapping) or not rows:
            raise ValueError(f"rows is {rows!r:.60}; give {{hook: {{layer: row}}}}")
        facts = self._client.facts
        for hook, layers in rows.items():
            point = HookPoint.parse(hook)
            if point.has_layer and not isinstance(layers, Mapping):
                raise ValueError(f"rows[{hook!r}] is {type(layers).__name__}; give {{layer: row}}")
            for layer, row in layers.items() if point.has_layer else [(None, layers)]:
                point, at = facts.points.check(point, layer)
                with np.errstate(over="ignore"):
                    array = np.array(numeric_array(row, f"rows[{hook!r}][{layer}]"), np.float32)
                if array.shape != (facts.hidden_size,):
                    raise ValueError(
                        f"rows[{hook!r}][{layer}] has shape {list(array.shape)}; give "
                        f"[{facts.hidden_size}]"
                    )
                if not abs(array).max() <= min(facts.max_value, facts.max_reach):
                    raise ValueError(
                        f"rows[{hook!r}][{layer}] has values that are not finite, or larger than "
                        "the rows of this model"
                    )
                yield (point.value, at), array


def _refuse_failed(output: Any) -> None:
    """Raise what a worker said of a run that it could not keep."""
    for result in output.outputs[0].consumer_results.values():
        if result.status != "ok":
            raise RuntimeError(f"the rows of the run are not all there: {result.error}")
