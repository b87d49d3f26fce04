"""`llm.patching`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tllm.client.calls import Steps, WorkerCall
from tllm.client.experiments import Experiments
from tllm.client.generation import AdapterLoading, AsyncGeneration, SyncGeneration, Work
from tllm.client.kept_rows import RowKeeping
from tllm.client.patching_arguments import PatchingArguments, are_several, positions_of
from tllm.client.path_ways import Place
from tllm.client.sweep_form import SweepForm
from tllm.client.sweeping import Progress, Sweeping, SweepWatch
from tllm.consumers.next_token import NextTokenConsumer
from tllm.patching.sweep import Sweep
from tllm.spec.patching import KeptRows
from tllm.spec.reading import require_bool, whole_number

if TYPE_CHECKING:
    from tllm.client.registrations import Registrations


class PatchingControl:
    """Runs whose rows the workers keep, mean rows, and sweeps. On an `AsyncLLM` every method is to
    be awaited.

    What is kept belongs to the engine: every front end that shares its workers can refer to it.
    """

    def __init__(
        self, registered: Registrations, generation: SyncGeneration | AsyncGeneration
    ) -> None:
        self._registered = registered
        self._generation = generation
        self._arguments = PatchingArguments(registered, generation)
        self._keeping = RowKeeping(registered)

    def run(
        self,
        prompt: Any,
        *,
        hooks: str | Sequence[str],
        layers: Any = None,
        name: str | None = None,
        on_host: bool = False,
        lora_request: Any = None,
    ) -> Any:
        """Compute a prompt and keep its rows on the workers, for
        `patch=[{..., "source": {"run": run, "positions": [...]}}]`.

        Args:
            prompt: text or token ids.
            hooks: hook points whose rows are kept.
            layers: of those that belong to layers, as `tllm.spec.layers.Layers` reads them. None or
                `"all"`: all.
            name: what requests may call it, in place of the run itself.
            on_host: keep the rows in the host's memory, up to `max_patch_host_mib`; a request takes
                those that it names to the device.
            lora_request: the adapter that the prompt is computed with, as `LLM.generate` takes it.
                Requests with another one, or with none, may refer to its rows.

        Returns:
            The run (`KeptRows`). It stays until `drop`.

        Raises `ValueError` for what the model does not have, for a name that is taken, and where
        `max_patch_mib` or `max_patch_host_mib` has no room.
        """
        return self._generation.do(self._run_of(prompt, hooks, layers, name, on_host, lora_request))

    def register_mean(self, name: str, rows: Mapping[str, Any]) -> Any:
        """Give rows a name, for `patch=[{..., "source": {"mean": name}}]`: one for each place, put
        at whatever position is patched there.

        Args:
            rows: `{hook: {layer: row}}` with rows `[hidden]`; `{"lm_head_in": row}`.

        Returns:
            What is kept (`KeptRows`).
        """

        def steps() -> Steps[KeptRows]:
            yield from self._registered.current()
            self._keeping.check_free(name)
            found = dict(self._arguments.mean_rows(rows))
            size = len(found) * self._registered.facts.row_bytes
            kept = KeptRows(name, uuid.uuid4().hex, "mean", tuple(found), 1, size)
            try:
                yield WorkerCall("keep_rows", (kept.uid, found))
                yield from self._keeping.register(kept)
            except BaseException:
                yield WorkerCall("drop_rows", (kept.uid,))
                raise
            return kept

        return self._client_run(steps())

    def drop(self, kept: KeptRows | str) -> Any:
        """Forget a run or a mean; requests that run still have its rows.

        Raises `ValueError` where nothing is kept under the name, and for a run or a mean that is of
        another engine, or was dropped before, and whose name others have now.
        """
        return self._client_run(self._keeping.dropped(kept))

    def sweep(
        self,
        clean: Any,
        corrupt: Any,
        *,
        hooks: str | Sequence[str],
        layers: Any = None,
        positions: Sequence[int] | str | None = None,
        heads: Any = None,
        together: bool = False,
        metric: Any = "recovered",
        answers: Any = None,
        noising: bool = False,
        window: int = 1,
        freeze: str | Sequence[str] = (),
        receivers: Sequence[Place] = (),
        at_once: int | None = None,
        progress: Progress | None = None,
        each: Callable[[dict[str, Any]], None] | None = None,
        lora_request: Any = None,
    ) -> Any:
        """Patch one row at a time, at every hook point, layer and position, and measure the next
        token. Rows of the clean run are put into the corrupt one (denoising).

        Args:
            clean, corrupt: a prompt each, text or token ids, or a list of as many prompts each;
                the two of a pair have as many tokens.
            hooks, layers: as `run` takes them.
            positions: negative ones count from the end of the prompt. None or `"all"`: all.
            heads: with `hooks="attn_heads"` (or `q`, `k`, `v`), patch one head at a time: numbers,
                or `"all"`.
            together: patch all positions in one experiment.
            metric: a name of `tllm.patching.METRICS`, a function of the log-probabilities
                `[vocab]`, a list of these, or `{name: function}` for functions without names of
                their own, such as lambdas. `{"logit_diff": (right, wrong)}` has `answers` too.
            answers: `(right, wrong)` next tokens, ids or text of one token each, or a list with a
                pair for each pair of prompts; of `logprob` the right one is enough.
            noising: put rows of the corrupt run into the clean one instead.
            window: rows of so many consecutive layers are patched together, at one position; the
                layer in the result is the middle one.
            freeze: path patching: `"attn_out"`, `"mlp_out"`, both, or `"all"`. These branches of
                later layers keep the rows of the run that is patched, so that only what goes
                through the residual stream (and through the other branch) counts.
            receivers: `(hook, layer)` pairs: what arrives there is put into a run in which nothing
                else is changed. None: the logits receive.
            at_once: the most requests that are computed at a time.
            progress: called with how many experiments are done, and of how many; with 0 first.
            each: called with every experiment as it is computed, a row of `Sweep.rows`.
            lora_request: the adapter that all prompts are computed with, as `LLM.generate` takes
                it.

        Returns:
            A `tllm.patching.Sweep`.
        """

        def work() -> Work[Sweep]:
            yield self._registered.current()
            pairs = self._arguments.pairs(clean, corrupt)
            measures = self._arguments.measures(metric, answers, len(pairs))
            if at_once is not None:
                whole_number(at_once, "at_once=", 1)
            places = tuple(self._arguments.places(hooks, layers))
            form = SweepForm(
                places,
                positions_of(positions),
                self._arguments.heads(heads, places),
                together,
                noising,
                window,
                self._arguments.ways(freeze, receivers),
            )
            watch = SweepWatch(progress, each, at_once)
            experiments = Experiments(self._registered.facts.points, pairs, form)
            sweeping = Sweeping(self._keeping, experiments, measures, watch, lora_request)
            if lora_request is not None:
                yield AdapterLoading(lora_request)
            yield self._registered.ensure(NextTokenConsumer())
            sweep: Sweep = yield from sweeping.work()
            return replace(sweep, single_pair=not are_several(clean))

        return self._generation.do(work())

    def kept(self) -> Any:
        """All that the workers keep, by name."""

        def steps() -> Steps[dict[str, KeptRows]]:
            yield from self._registered.current()
            return dict(self._registered.patches.kept)

        return self._client_run(steps())

    def _client_run(self, steps: Steps[Any]) -> Any:
        def work() -> Work[Any]:
            return (yield steps)

        return self._generation.do(work())

    def _run_of(
        self, prompt: Any, hooks: Any, layers: Any, name: str | None, on_host: bool, adapter: Any
    ) -> Work[KeptRows]:
        require_bool("on_host", on_host)
        yield self._registered.current()
        if name is not None:
            self._keeping.check_free(name)
        places = self._arguments.places(hooks, layers)
        tokens = self._arguments.tokens(prompt)
        if adapter is not None:
            yield AdapterLoading(adapter)
        [kept], _ = yield from self._keeping.runs(
            [tokens], [places], [name], on_host=on_host, adapter=adapter
        )
        return kept
