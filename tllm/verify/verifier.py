"""Serves batches of requests, and compares all that comes back."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.sampling_params import RequestOutputKind

from tllm.client.llm import LLM
from tllm.params import SamplingParams
from tllm.verify.batches import (
    Ask,
    Prompts,
    as_computed,
    gated_batch,
    given_batch,
    mixed_batch,
    patched_batch,
    plainly_steered_batch,
    steered_batch,
)
from tllm.verify.certificate import (
    BatchFigures,
    Certificate,
    Difference,
    PointFigures,
    row_errors,
)
from tllm.verify.gated import Judged
from tllm.verify.patched import Patched
from tllm.verify.places import WITHOUT_LAYER
from tllm.verify.reference import Layer, States, Steers
from tllm.verify.steered import Place, Steered, changes, steering_fields
from tllm.verify.tolerance import Tolerance

PREEMPTED_AT = (3, 9, 21, 45, 93)
"""Steps of the engine before which all that runs is preempted: later and later, so that requests
get on."""
STEERED_LAYERS = 8
"""At each hook point, unless told."""
_POSITIONS = {"any": "all", "prefill": "all_prompt", "decode": "all_generated"}


class Answers(Protocol):
    """Whoever says what is right, as `Reference` does."""

    def places(self) -> list[tuple[str, Layer]]:
        """The hook points there are, each with every layer that has it."""
        ...

    def doubts(self) -> str:
        """Why the places may be wrong, or nothing."""
        ...

    def run(self, token_ids: list[int], steers: Steers | None = None) -> tuple[States, Tensor]:
        """What arrives at every hook point, and the logits."""
        ...


@dataclass(frozen=True)
class Served:
    """A sequence as the engine gave it.

    log_probabilities: of its generated tokens.
    first: how many of its tokens are the prompt's.
    """

    batch: str
    request: int
    ask: Ask
    completion: Any
    first: int

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated."""
        return [*self.ask.prompt, *self.completion.token_ids]

    @property
    def passed(self) -> list[int]:
        """Those that passed the model: the last one never does."""
        return self.tokens[:-1]

    @property
    def log_probabilities(self) -> Tensor:
        """Of the generated tokens."""
        given = zip(self.completion.token_ids, self.completion.logprobs or (), strict=True)
        return torch.tensor([found[token].logprob for token, found in given])

    def difference(self, where: str, what: str, **more: Any) -> Difference:
        """Something that is wrong with it."""
        index = self.completion.index
        return Difference(self.batch, self.request, index, str(self.ask), where, what, **more)


class Verifier:
    """Looks at one engine.

    Args:
        llm: the engine, with everything that it is to be verified with.
        certificate: gets what is found.
        points: the hook points to look at; by default all that are tapped.
        tolerance: by default what rounding in the engine's dtype explains.
        given: the user's own prompts.
        steered_layers: how many layers are steered, on a condition too, and patched, at each hook
            point.
        progress: hears what is done.
    """

    def __init__(
        self,
        llm: LLM,
        certificate: Certificate,
        *,
        points: Sequence[str] | None = None,
        tolerance: Tolerance | None = None,
        given: Sequence[list[int]] = (),
        steered_layers: int = STEERED_LAYERS,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.llm = llm
        self.certificate = certificate
        self.given = given
        self.steered_layers = steered_layers
        self.progress = progress
        self.config = llm.llm_engine.vllm_config
        self.dtype: torch.dtype = self.config.model_config.dtype
        described = llm.steering.layers()
        self.layers: int = described["num_layers"]
        self.hidden: int = described["hidden_size"]
        self.tolerance = tolerance or Tolerance.of(self.dtype, self.layers)
        self.prompts = self._prompts()
        tapped: list[str] = described["hook_points"]
        self.points = [point for point in tapped if points is None or point in points]
        self.found = {point: self._layers(point, described) for point in self.points}
        wanted = points if points is not None else described["missing"]
        certificate.lacking = {
            point: why
            for point, why in described["missing"].items()
            if point in wanted and point not in self.points
        }
        for point in [*self.points, "logits"]:
            certificate.points[point] = PointFigures(self.tolerance.points[point])

    def _layers(self, point: str, described: Mapping[str, Any]) -> list[Layer]:
        if point in WITHOUT_LAYER:
            return [None]
        return list(described["layers"].get(point, range(self.layers)))

    def _prompts(self) -> Prompts:
        """What random prompts are made of."""
        config = self.config.model_config
        special = [
            value
            for source in (config.hf_config, config.hf_text_config)
            for name, value in source.to_dict().items()
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        ]
        longest = config.max_model_len - 8
        return Prompts(config.get_vocab_size(), self._block, longest, frozenset(special))

    @property
    def _block(self) -> int:
        return int(self.config.cache_config.block_size)

    @property
    def _chunk(self) -> int:
        return int(self.config.scheduler_config.max_num_batched_tokens)

    # -- against transformers --------------------------------------------------------------------

    def compare(self, reference: Answers) -> None:
        """Rows, tokens, log-probabilities, steering, its conditions and patching, against a
        reference."""
        if not self.points:
            self._unchecked("the model has no hook points here")
            return
        places = self._places(reference)
        states, _ = reference.run(self.prompts.pick(random.Random(4), 24))
        for name, asks, preempts in self._batches(places, states):
            self.progress(f"{name}: {len(asks)} requests")
            figures, sequences = self.serve(name, asks, preempts=preempts)
            for number, served in enumerate(sequences):
                self._compare_sequence(figures, served, places, reference)
                if number % 10 == 9:
                    self.progress(f"{name}: {number + 1} of {len(sequences)} sequences compared")
        self._note_power()
        self._note_engine()

    def _places(self, reference: Answers) -> list[Place]:
        """What both have; what only one has is said."""
        theirs = reference.places()
        if doubts := reference.doubts():
            self._unchecked(
                f"where this kind of model's hook points are in transformers is not known: {doubts}"
            )
        places: list[Place] = []
        for point, layers in self.found.items():
            both = [layer for layer in layers if (point, layer) in theirs]
            places += [(point, layer) for layer in both]
            self.certificate.points[point].layers = [each for each in both if each is not None]
            if len(both) < len(layers):
                without = [layer for layer in layers if layer not in both]
                self._unchecked(f"{point} in layers {without}: the reference has no such place")
        return places

    def _sizes(self, states: States, places: Sequence[Place]) -> dict[Place, float]:
        """How large numbers of rows are at each place: steering is to be as large."""
        return {
            (point, layer): float(states[point][layer].square().mean(1).sqrt().median())
            for point, layer in places
        }

    def _batches(self, places: list[Place], states: States) -> list[tuple[str, list[Ask], bool]]:
        """Name, requests, and whether running requests are preempted on the way.

        Args:
            states: the reference's, of some tokens.
        """
        sizes = self._sizes(states, places)
        mixed = mixed_batch(self.prompts, self._chunk)
        steered = self._steered_places(places)
        generator = torch.Generator().manual_seed(5)
        vector = (3 * torch.randn(self.hidden, generator=generator)).to(self.dtype).float()
        steering = steered_batch(steered, self.prompts, vector, sizes)
        patching = patched_batch(steered, self.prompts, vector, sizes)
        gating = gated_batch(steered, self.prompts, vector, states, places)
        middles = [self._middle(places, point) for point in self.points]
        alone = [place for place in middles if place is not None]
        simple = plainly_steered_batch(alone, self.prompts, vector, sizes)
        given = [("prompts", given_batch(self.given), False)] if self.given else []
        return [
            ("mixed", mixed, False),
            ("mixed, again", mixed, True),
            *given,
            ("every point", simple, False),
            ("steered", steering, False),
            ("steered, again", steering[-8:], True),
            ("patched", patching, False),
            ("patched, again", patching[-8:], True),
            ("gated", gating, False),
            ("gated, again", gating[-8:], True),
        ]

    def _middle(self, places: Sequence[Place], point: str) -> Place | None:
        """The place of a point in the middle of those that have it."""
        having = [place for place in places if place[0] == point]
        return having[len(having) // 2] if having else None

    def _steered_places(self, places: list[Place]) -> list[Place]:
        """Those that are steered, on a condition too, and patched: of every hook point some
        layers, from the first to the last."""
        chosen: list[Place] = []
        for point in self.points:
            having = [place for place in places if place[0] == point]
            count = min(len(having), self.steered_layers)
            spread = [round(i * (len(having) - 1) / max(count - 1, 1)) for i in range(count)]
            chosen += [having[i] for i in spread]
            if count < len(having):
                layers = ", ".join(str(having[i][1]) for i in spread)
                self.certificate.notes.append(
                    f"{point}: steered and patched in layers {layers}; "
                    f"--steered-layers {len(having)} for all"
                )
        return chosen

    # -- against plain vLLM ----------------------------------------------------------------------

    def serve_plainly(self, why: str) -> list[Served]:
        """Serve the mixed batches and the given prompts, where there is no reference for rows.

        Args:
            why: there is none.
        """
        points = ", ".join(self.points)
        rows = (
            f"rows at {points}, steering, conditions and patching there" if self.points else "rows"
        )
        self._unchecked(f"{rows}: {why}")
        mixed = mixed_batch(self.prompts, self._chunk)
        served = []
        for name, asks, preempts in (
            ("mixed", mixed, False),
            ("mixed, again", mixed, True),
            ("prompts", given_batch(self.given), False),
        ):
            if asks:
                self.progress(f"{name}: {len(asks)} requests")
                served += self.serve(name, asks, preempts=preempts)[1]
        for point in self.points:
            del self.certificate.points[point]
        for each in served:
            self._compare_status(each)
        self._note_engine()
        return served

    def compare_plainly(self, served: Sequence[Served], found: Sequence[Sequence[float]]) -> None:
        """Compare log-probabilities of generated tokens with untouched vLLM's.

        Args:
            found: of each sequence, those of all tokens but the first.
        """
        expected = [
            torch.tensor(values[each.first - 1 :])
            for each, values in zip(served, found, strict=True)
        ]
        scale = max(float(each.abs().max()) for each in expected)
        for each, values in zip(served, expected, strict=True):
            errors = (each.log_probabilities - values).abs() / scale
            self._judge(each, "logits", None, errors, each.first)

    # -- serving ---------------------------------------------------------------------------------

    def serve(
        self, name: str, asks: Sequence[Ask], *, preempts: bool = False
    ) -> tuple[BatchFigures, list[Served]]:
        """Serve requests all at once.

        Args:
            preempts: preempt all that runs, several times.
        """
        figures = BatchFigures(name, len(asks))
        self.certificate.batches.append(figures)
        engine = self.llm.llm_engine
        begin = time.time_ns()
        names = [f"verify-{begin}-{number}" for number in range(len(asks))]
        for request_id, ask in zip(names, asks, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": ask.prompt}, self._params(ask))
        ended: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
            steps += 1
            if preempts and steps in PREEMPTED_AT and engine.has_unfinished_requests():
                engine.reset_prefix_cache(reset_running_requests=True)
                figures.preemptions += 1
        self.llm.wait_for_results(ended.values())
        sequences = []
        for number, (request_id, ask) in enumerate(zip(names, asks, strict=True)):
            output = ended[request_id]
            figures.cached_tokens += output.num_cached_tokens or 0
            figures.chunked += len(ask.prompt) > self._chunk
            for completion in output.outputs:
                sequences.append(Served(name, number, ask, completion, len(ask.prompt)))
                figures.tokens += len(completion.token_ids)
        figures.samples = len(sequences)
        return figures, sequences

    def _params(self, ask: Ask) -> SamplingParams:
        capture = None
        if ask.reads is not None:
            hooks = {
                point: "all" if layers == [None] else layers for point, layers in self.found.items()
            }
            capture = {"memory": {"hooks": hooks, "positions": _POSITIONS[ask.reads]}}
        return SamplingParams(
            n=ask.n,
            seed=ask.seed,
            temperature=0.0 if ask.seed is None else 1.0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            capture=capture,
            patch=[patched.entry for patched in ask.patches] or None,
            **steering_fields(ask.steering),
        )

    # -- comparing -------------------------------------------------------------------------------

    def _compare_sequence(
        self,
        figures: BatchFigures,
        served: Served,
        places: Sequence[Place],
        reference: Answers,
    ) -> None:
        new = list(served.completion.token_ids)
        if len(new) != served.ask.max_tokens:
            self._differs(served.difference("token", f"{len(new)} tokens were generated"))
        done = served.ask.changes(served.passed, self.hidden)
        states, logits = reference.run(served.passed, done)
        chosen = logits[served.first - 1 :]
        judged = [
            each.when.within(each.mask(served.passed, served.first), served.first)
            for each in served.ask.steering
            if each.when is not None
        ]
        if any(when.is_near(states, self.tolerance.points[when.place[0]]) for when in judged):
            figures.on_edge += 1
            self._compare_status(served)
            return
        self._compare_captures(figures, served, places, states)
        if served.ask.seed is None:
            self._compare_greedy(figures, served, chosen)
        self._compare_log_probabilities(served, chosen)
        for when in judged:
            self._compare_signal(served, when, states)
        if len(served.ask.steering) + len(served.ask.patches) == 1:
            self._count_seen(served, places, states, chosen, reference)

    def _compare_greedy(self, figures: BatchFigures, served: Served, logits: Tensor) -> None:
        new = torch.tensor(list(served.completion.token_ids))
        regret = (logits.amax(1) - logits.gather(1, new[:, None])[:, 0]) / logits.abs().amax()
        figures.differing += int((regret > 0).sum())
        limit = self.tolerance.regret
        for step in (~(regret <= limit)).nonzero()[:1, 0].tolist():
            best, size = int(logits[step].argmax()), float(regret[step])
            what = f"token {int(new[step])} was taken, where {best} is likelier by {size:.2e}"
            at = served.first + step
            self._differs(
                served.difference("token", what, position=at, size=_number(size), limit=limit)
            )

    def _compare_log_probabilities(self, served: Served, logits: Tensor) -> None:
        new = torch.tensor(list(served.completion.token_ids))
        expected = torch.log_softmax(logits, -1).gather(1, new[:, None])[:, 0]
        scale = logits.abs().amax()
        errors = (served.log_probabilities - expected).abs() / scale
        self._judge(served, "logits", None, errors, served.first)
        if len(new) > 1:
            exchanged = float(((expected.roll(1) - expected).abs() / scale).max())
            self.certificate.points["logits"].exchanged.append(exchanged)

    def _compare_signal(self, served: Served, when: Judged, states: States) -> None:
        """The score of each token that it was judged for, and how many."""
        point, layer = when.place
        limit = self.tolerance.points[point]
        mask = served.ask.steering[0].mask(served.passed, served.first)
        wanted = when.meant(mask.nonzero()[:, 0].tolist())
        signal = served.completion.signals.get(when.name)
        found = [] if signal is None else signal.positions.tolist()
        cached = range(served.first if when.over == "token" else 0)
        missing = [each for each in wanted if each not in found and each not in cached]
        if missing or not set(found) <= set(wanted):
            what = f"scores of positions {found}, where {wanted} are judged"
            self._differs(served.difference("signal", what, layer=layer))
        elif found:
            errors = when.errors(torch.tensor(signal.scores), found, states, limit)
            if bool((errors > limit).any()):
                at = int(errors.argmax())
                expected = float(when.scores(states)[found[at]])
                what = f"the score is {float(signal.scores[at]):.4g}, not {expected:.4g}"
                size = _number(float(errors[at]))
                given = {"layer": layer, "position": found[at], "size": size, "limit": limit}
                self._differs(served.difference("signal", what, **given))

    def _compare_captures(
        self, figures: BatchFigures, served: Served, places: Sequence[Place], states: States
    ) -> None:
        self._compare_status(served)
        completion, ask = served.completion, served.ask
        if ask.reads is None:
            return
        low = served.first if ask.reads == "decode" else 0
        high = served.first if ask.reads == "prefill" else len(served.passed)
        wanted = list(range(low, high))
        found = completion.activations or {}
        for point, layer in sorted(places, key=as_computed):
            if point not in found or layer not in found[point]:
                self._differs(served.difference(point, "no rows came back", layer=layer))
                continue
            given = found[point][layer]
            if given.positions.tolist() != wanted:
                what = f"rows of positions {given.positions.tolist()}, not {wanted}"
                self._differs(served.difference(point, what, layer=layer))
                continue
            if wanted:
                expected = states[point][layer][low:high]
                got = given.tensor.float().cpu()
                figures.rows += len(got)
                self._judge(served, point, layer, row_errors(got, expected), low)
                if len(got) > 1:
                    exchanged = float(row_errors(expected.roll(1, 0), expected).max())
                    self.certificate.points[point].exchanged.append(exchanged)

    def _compare_status(self, served: Served) -> None:
        for name, result in served.completion.consumer_results.items():
            if result.status != "ok":
                what = f"{name} is {result.status}: {result.error}"
                self._differs(served.difference("result", what))

    def _judge(self, served: Served, point: str, layer: Layer, errors: Tensor, first: int) -> None:
        """Errors of the rows of one tensor, of which the first one is of position `first`."""
        figures = self.certificate.points[point]
        figures.rows += len(errors)
        worst = float(errors.max())
        figures.worst = max(figures.worst, worst) if math.isfinite(worst) else math.inf
        wrong = ~(errors <= figures.limit)  # what is not a number is wrong, too
        if count := int(wrong.sum()):
            at = int(errors.nan_to_num(math.inf).argmax())
            where = "log-probability" if point == "logits" else point
            what = (
                f"{count} of {len(errors)} rows are off, by up to {float(errors[at]):.2e} "
                f"(limit {figures.limit:.1e})"
            )
            self._differs(
                served.difference(
                    where,
                    what,
                    layer=layer,
                    position=first + at,
                    size=_number(float(errors[at])),
                    limit=figures.limit,
                )
            )

    def _count_seen(
        self,
        served: Served,
        places: Sequence[Place],
        states: States,
        logits: Tensor,
        reference: Answers,
    ) -> None:
        """Whether the comparison would have failed had it not been steered, or patched."""
        alone: Sequence[Steered | Patched] = (*served.ask.steering, *served.ask.patches)
        figures = self.certificate.points[alone[0].place[0]]
        others: list[Steers | None] = [None]
        when = served.ask.steering[0].when if served.ask.steering else None
        if when is not None and when.remembers:
            return  # it may have decided alike for all tokens
        gated = when is not None
        if gated:
            always = replace(served.ask.steering[0], when=None)
            others.append(changes([always], served.passed, served.first))
        seen = all(
            self._is_off(served, places, states, logits, reference.run(served.passed, steers))
            for steers in others
        )
        if gated:
            figures.gated += 1
            figures.gates_seen += seen
        elif served.ask.patches:
            figures.patched += 1
            figures.patches_seen += seen
        else:
            figures.steered += 1
            figures.seen += seen

    def _is_off(
        self,
        served: Served,
        places: Sequence[Place],
        states: States,
        logits: Tensor,
        other: tuple[States, Tensor],
    ) -> bool:
        """Whether another forward pass differs from what is right by more than is accepted."""
        rows, other_logits = other[0], other[1][served.first - 1 :]
        new = torch.tensor(list(served.completion.token_ids))[:, None]
        shift = torch.log_softmax(logits, -1) - torch.log_softmax(other_logits, -1)
        off = float(shift.gather(1, new).abs().max() / logits.abs().amax())
        if off > self.tolerance.points["logits"]:
            return True
        return served.ask.reads == "any" and any(
            float(row_errors(rows[point][layer], states[point][layer]).max())
            > self.tolerance.points[point]
            for point, layer in places
        )

    # -- what could not be compared --------------------------------------------------------------

    def _note_power(self) -> None:
        """A limit that exchanged rows pass says nothing; nor do changes that nobody sees."""
        for point, figures in self.certificate.points.items():
            if not figures.rows:
                self._unchecked(f"{point}: no rows were compared")
            elif figures.power <= figures.limit:
                self._unchecked(
                    f"{point}: rows of neighbouring tokens differ by {figures.power:.1e}, less "
                    f"than what is accepted ({figures.limit:.1e}); verify with --dtype float32"
                )
            elif point != "logits":
                for count, seen, done in (
                    (figures.steered, figures.seen, "ways of steering"),
                    (figures.patched, figures.patches_seen, "patches"),
                    (figures.gated, figures.gates_seen, "conditions"),
                ):
                    if not seen:
                        self._unchecked(
                            f"{point}: of {count} {done}, none changed anything by more than is "
                            "accepted"
                        )

    def _note_engine(self) -> None:
        """What the engine was not made to do."""
        batches = self.certificate.batches
        if on_edge := sum(batch.on_edge for batch in batches):
            self.certificate.notes.append(
                f"sequences not compared, since rounding decides a condition of theirs: {on_edge}"
            )
        cache = self.config.cache_config
        if not cache.enable_prefix_caching:
            self.certificate.notes.append("this engine has no prefix cache")
        elif not any(batch.cached_tokens for batch in batches):
            self._unchecked(
                f"prefix caching: nothing was served from the cache (blocks of {self._block} "
                f"tokens, prompts of up to {self.prompts.longest}); a larger --max-model-len or a "
                "smaller --block-size may help"
            )
        if not any(batch.chunked for batch in batches):
            self._unchecked(
                f"chunked prefill: no prompt was longer than {self._chunk} tokens; a smaller "
                "--max-num-batched-tokens or a larger --max-model-len may help"
            )
        if not any(batch.preemptions for batch in batches):
            self._unchecked("preemption: all requests had ended before any could be preempted")

    def _unchecked(self, what: str) -> None:
        self.certificate.unchecked.append(what)

    def _differs(self, difference: Difference) -> None:
        self.certificate.differences.append(difference)


def _number(size: float) -> float | None:
    """For JSON, which knows no others."""
    return size if math.isfinite(size) else None
