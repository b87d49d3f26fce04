"""`llm.patching`: rows that the workers keep, and what they are for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from tllm.client.calls import ALONE, Steps, WorkerCall
from tllm.client.generation import (
    AdapterLoading,
    AsyncGeneration,
    Generation,
    SyncGeneration,
    Work,
)
from tllm.client.path_ways import PathWays, Place
from tllm.client.sweeping import Progress, PromptPair, SweepForm, Sweeping, SweepWatch
from tllm.consumers.base import Consumer
from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.params import SamplingParams, with_patch
from tllm.patching.metrics import Answer, Measures
from tllm.patching.sweep import Sweep
from tllm.spec.hooks import HEAD_POINTS, HookPoint
from tllm.spec.layers import Layers, layer_numbered
from tllm.spec.patching import KEPT, KeptRows, RequestPatch
from tllm.spec.reading import (
    FloatArray,
    hook_named,
    numeric_array,
    one_or_several,
    require_bool,
    whole_number,
    whole_numbers,
)

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
            self._check_free(name)
            found = dict(self._mean_rows(rows))
            size = len(found) * self._registered.facts.row_bytes
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
        """Forget a run or a mean; requests that run still have its rows.

        Raises `ValueError` where nothing is kept under the name, and for a run or a mean that is of
        another engine, or was dropped before, and whose name others have now.
        """
        return self._client_run(self._dropped(kept))

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
                their own, such as lambdas.
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
            pairs = self._pairs(clean, corrupt)
            found = None if answers is None else self._answers(answers, len(pairs))
            measures = Measures.parse(metric, found)
            if at_once is not None:
                whole_number(at_once, "at_once=", 1)
            places = tuple(self.places(hooks, layers))
            form = SweepForm(
                places,
                _positions(positions),
                self._heads(heads, places),
                together,
                noising,
                window,
                self._ways(freeze, receivers),
            )
            watch = SweepWatch(progress, each, at_once)
            sweeping = Sweeping(self, pairs, form, measures, watch, lora_request)
            if lora_request is not None:
                yield AdapterLoading(lora_request)
            sweep: Sweep = yield from sweeping.work()
            return replace(sweep, single_pair=not _are_several(clean))

        return self._generation.do(work())

    def kept(self) -> Any:
        """All that the workers keep, by name."""

        def steps() -> Steps[dict[str, KeptRows]]:
            yield from self._registered.current()
            return dict(self._registered.patches.kept)

        return self._client_run(steps())

    def has_head(self, place: Place, head: int) -> bool:
        """Whether a layer has so many heads."""
        point, layer = place
        return head < self._registered.facts.points.heads[HookPoint(point), layer].num_heads

    # -- how --------------------------------------------------------------------------------------

    def _pairs(self, clean: Any, corrupt: Any) -> list[PromptPair]:
        """Prompts of both kinds, as token ids."""
        both = [
            [self.tokens(prompt) for prompt in (given if _are_several(given) else [given])]
            for given in (clean, corrupt)
        ]
        if len(both[0]) != len(both[1]):
            raise ValueError(
                f"{len(both[0])} clean prompts and {len(both[1])} corrupt ones were given; give as "
                "many of each"
            )
        return [PromptPair(*pair) for pair in zip(*both, strict=True)]

    def _heads(self, given: Any, places: Sequence[Place]) -> tuple[int, ...] | None:
        """The heads that a sweep patches one at a time."""
        if given is None:
            return None
        if other := [hook for hook, _ in places if hook not in HEAD_POINTS]:
            raise ValueError(
                f"heads is given with hooks={other[0]!r}; heads are of {', '.join(HEAD_POINTS)}"
            )
        splits = self._registered.facts.points.heads
        most = max(splits[HookPoint(point), layer].num_heads for point, layer in places)
        if isinstance(given, str) and given == "all":
            return tuple(range(most))
        return tuple(dict.fromkeys(whole_numbers(given, "heads", 0, most - 1)))

    def _ways(self, freeze: Any, receivers: Any) -> PathWays | None:
        """What a sweep keeps still, and where changes arrive."""
        places: list[Place] = []
        if not isinstance(receivers or (), Sequence):
            raise ValueError(
                f"receivers={receivers!r:.60}: give a list of pairs such as ('mlp_in', 3)"
            )
        for each in receivers or ():
            if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != 2:
                raise ValueError(
                    f"receivers: {each!r:.60} is no place; give pairs such as ('mlp_in', 3)"
                )
            hook, layer = each
            places += self.places(hook, layer, "receivers", "receivers")
        return PathWays.parse(self._registered.facts.points, freeze, places)

    def _answers(self, given: Any, count: int) -> list[Answer]:
        """Answers as token ids, for each pair of prompts."""
        if isinstance(given, (Mapping, Set)):
            raise ValueError(
                f"answers={given!r:.60} is {type(given).__name__}, which has no order; give "
                "(right, wrong), or a list with a pair for each pair of prompts"
            )
        nested = isinstance(given, Sequence) and not isinstance(given, str)
        several = nested and given and not isinstance(given[0], (str, Number))
        each = list(given) if several else [given] * count
        if len(each) != count:
            raise ValueError(f"answers has {len(each)} entries for {count} pairs of prompts")
        found = []
        for one in each:
            found.append(tuple(map(self._answer, one_or_several(one))))
        return found

    def _answer(self, given: Any) -> int:
        vocab = self._registered.facts.vocab_size
        if isinstance(given, str):
            tokens = self._generation.tokenizer.encode(given, add_special_tokens=False)
            if len(tokens) != 1:
                raise ValueError(
                    f"answers: {given!r} is {len(tokens)} tokens; give text of one token (with the "
                    "space before it, where the model's tokens have one), or a token id"
                )
            return int(tokens[0])
        plain = isinstance(given, Integral) and not isinstance(given, bool)
        if not plain or not 0 <= given < vocab:
            raise ValueError(f"answers: {given!r} is no token id from 0 to {vocab - 1}")
        return int(given)

    def _dropped(self, kept: KeptRows | str) -> Steps[None]:
        name = kept.name if isinstance(kept, KeptRows) else kept
        yield ALONE
        changed = False
        while not changed:
            yield from self._registered.current()
            found = self._registered.patches.find(name, "drop")
            if isinstance(kept, KeptRows) and kept.uid != found.uid:
                raise ValueError(
                    f"drop: the rows that were given are not kept by this engine, where {name!r} "
                    "is the name of others; give the name to drop those"
                )
            changed = yield from self._registered.change(f"{KEPT}{name}", None)
        yield WorkerCall("drop_rows", (found.uid,))

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
            self._check_free(name)
        places = self.places(hooks, layers)
        tokens = self.tokens(prompt)
        if adapter is not None:
            yield AdapterLoading(adapter)
        [kept], _ = yield from self.runs(
            [tokens], [places], [name], on_host=on_host, adapter=adapter
        )
        return kept

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
                yield self._register(run)
                kept.append(run)
        except BaseException:
            yield from self.forget(kept)
            known = {run.uid for run in kept}
            for uid in (uid for uid, at in zip(uids, places, strict=True) if at):
                if uid not in known:
                    yield registered.ask(WorkerCall("drop_rows", (uid,)))
            raise
        finally:
            registered.patches.computed.difference_update(uids)
        return kept, outputs

    def ensure(self, consumer: Consumer) -> Steps[None]:
        """Let a consumer be there that requests ask."""
        return self._registered.ensure(consumer)

    def forget(self, kept: Iterable[KeptRows]) -> Work[None]:
        """Drop what is still kept of these."""
        for each in kept:
            with suppress(ValueError):  # somebody else has dropped it
                yield self._dropped(each)

    def room(self, tokens: int, places: Sequence[Place]) -> Work[int]:
        """How many runs of so many tokens the workers can keep now."""
        answers = yield self._registered.ask(WorkerCall("free_patch_bytes"))
        return int(sum(answers)) // (tokens * len(places) * self._registered.facts.row_bytes)

    def _check_room(
        self, prompts: Sequence[Sequence[int]], places: Sequence[Sequence[Place]], on_host: bool
    ) -> Work[None]:
        """Refuse what there is no room for, before it is computed."""
        answers = yield self._registered.ask(WorkerCall("free_patch_bytes", (on_host,)))
        facts = self._registered.facts
        option = "max_patch_host_mib" if on_host else "max_patch_mib"
        most = facts.max_patch_host_mib if on_host else facts.max_patch_mib
        lengths = [(len(one), len(at)) for one, at in zip(prompts, places, strict=True) if at]
        needed = sum(tokens * count for tokens, count in lengths) * facts.row_bytes
        if needed > sum(answers):
            raise ValueError(
                f"the rows of {sum(tokens for tokens, _ in lengths)} tokens at "
                f"{max(count for _, count in lengths)} places take "
                f"{needed / 2**20:.1f} MiB, and of {option}={most} there are "
                f"{min(answers) / 2**20:.1f} MiB left; drop what is not needed with "
                "llm.patching.drop(name), keep fewer hooks or layers, or start the engine with a "
                f"larger {option}"
            )

    def _register(self, kept: KeptRows) -> Steps[None]:
        """Let every front end know of rows that the workers keep."""
        yield ALONE
        changed = False
        while not changed:
            yield from self._registered.current()
            self._check_free(kept.name)
            value = cloudpickle.dumps(kept)
            changed = yield from self._registered.change(f"{KEPT}{kept.name}", value)

    def _check_free(self, name: Any) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: give a text that is not empty")
        if name in self._registered.patches.kept:
            raise ValueError(
                f"name={name!r} is taken by other rows; give another, or drop those first with "
                f"llm.patching.drop({name!r})"
            )

    def places(
        self, hooks: Any, layers: Any, field: str = "hooks", of_layers: str = "layers"
    ) -> list[Place]:
        """Hook points by layer. Raises `ValueError` for what this engine does not have.

        Args:
            field, of_layers: where hook points and layers were given, for messages.
        """
        points = self._registered.facts.points
        asked = Layers.parse("all" if layers is None else layers, of_layers)
        named = [] if hooks is None else one_or_several(hooks)
        if not named:
            raise ValueError(f"{field} is empty; give one hook point or more")
        found: list[Place] = []
        for hook in named:
            point = hook_named(hook, field)
            chosen: Sequence[int | None] = points.layers(point)
            if point.has_layer and not asked.is_all:
                chosen = asked.of(points.num_layers, point, of_layers)
            if not chosen:
                raise ValueError(points.explain_missing(point, 0))
            for layer in chosen:
                point, at = points.check(point, layer)
                found.append((point.value, at))
        return list(dict.fromkeys(found))

    def layers_of(self, hook: str) -> tuple[int | None, ...]:
        return self._registered.facts.points.layers(HookPoint.parse(hook))

    def tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        elif isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return list(self._generation.tokenizer.encode(prompt))
        plain = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not plain or not prompt or not all(type(token) is int for token in prompt):
            raise ValueError(
                f"the prompt is {prompt!r:.60}; give text, or a list of token ids; prompts with "
                "images, embeddings or roles are neither kept nor swept"
            )
        vocab = self._registered.facts.vocab_size
        if other := [token for token in prompt if not 0 <= token < vocab]:
            raise ValueError(f"the prompt has {other[0]}, no token id from 0 to {vocab - 1}")
        return list(prompt)

    def _mean_rows(self, rows: Mapping[str, Any]) -> Iterable[tuple[Place, FloatArray]]:
        if not isinstance(rows, Mapping) or not rows:
            raise ValueError(f"rows is {rows!r:.60}; give {{hook: {{layer: row}}}}")
        facts = self._registered.facts
        for hook, layers in rows.items():
            point = hook_named(hook, "rows")
            if point.has_layer and not isinstance(layers, Mapping):
                raise ValueError(f"rows[{hook!r}] is {type(layers).__name__}; give {{layer: row}}")
            if point.has_layer and not layers:
                raise ValueError(f"rows[{hook!r}] is empty; give {{layer: row}}, or leave it out")
            for layer, row in layers.items() if point.has_layer else [(None, layers)]:
                number = None if layer is None else layer_numbered(layer, f"rows[{hook!r}]")
                point, at = facts.points.check(point, number)
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


def _positions(given: Any) -> tuple[int, ...] | None:
    """The positions that a sweep patches, each once; None for all."""
    if given is None or (isinstance(given, str) and given == "all"):
        return None
    return tuple(dict.fromkeys(whole_numbers(given, "positions")))


def _are_several(given: Any) -> bool:
    """Whether a list holds prompts, and not the tokens of one."""
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    return several and len(given) > 0 and type(given[0]) is not int
