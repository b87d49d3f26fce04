"""Serves batches of requests, and compares all that comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind

from tllm.client.llm import LLM
from tllm.params import SamplingParams
from tllm.spec.hooks import HookPoint
from tllm.verify.batches import (
    Ask,
    Prompts,
    gated_batch,
    given_batch,
    mixed_batch,
    patched_batch,
    plainly_steered_batch,
    steered_batch,
)
from tllm.verify.certificate import BatchFigures, Certificate, PointFigures
from tllm.verify.comparison import Answers, Comparison, judge, judge_status
from tllm.verify.places import WITHOUT_LAYER
from tllm.verify.reference import Layer, States
from tllm.verify.served import Served
from tllm.verify.steered import Place, steering_fields
from tllm.verify.tolerance import Tolerance

PREEMPTED_AT = (3, 9, 21, 45, 93)
"""Steps of the engine before which all that runs is preempted: later and later, so that requests
get on."""
STEERED_LAYERS = 8
"""At each hook point, unless told."""
_POSITIONS = {"any": "all", "prefill": "all_prompt", "decode": "all_generated"}


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
        named = None if points is None else [HookPoint.parse(point).value for point in points]
        self.points = [point for point in tapped if named is None or point in named]
        self.found = {point: self._layers(point, described) for point in self.points}
        missing: dict[str, str] = described["missing"]
        wanted = missing if named is None else named
        certificate.lacking = {
            point: missing.get(point, "this engine has no tap there; its hook_points must name it")
            for point in wanted
            if point not in self.points
        }
        if named is not None:
            for point, why in certificate.lacking.items():
                self._unchecked(f"{point}: {why}")
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
        comparison = Comparison(reference, self.certificate, self.tolerance, places, self.hidden)
        for name, asks, preempts in self._batches(places, states):
            self.progress(f"{name}: {len(asks)} requests")
            figures, sequences = self.serve(name, asks, preempts=preempts)
            for number, served in enumerate(sequences):
                comparison.compare(figures, served)
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
            judge_status(self.certificate, each)
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
            judge(self.certificate, each, "logits", None, errors, each.first)

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
        steps, preempted = 0, self._preempted()
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
            steps += 1
            if preempts and steps in PREEMPTED_AT and engine.has_unfinished_requests():
                engine.reset_prefix_cache(reset_running_requests=True)
        figures.preemptions = self._preempted() - preempted
        self.llm.wait_for_results(ended.values())
        sequences = []
        for number, (request_id, ask) in enumerate(zip(names, asks, strict=True)):
            output = ended[request_id]
            cached = output.num_cached_tokens or 0
            figures.cached_tokens += cached
            figures.chunked += len(ask.prompt) > self._chunk
            for completion in output.outputs:
                sequences.append(Served(name, number, ask, completion, len(ask.prompt), cached))
                figures.tokens += len(completion.token_ids)
        figures.samples = len(sequences)
        return figures, sequences

    def _preempted(self) -> int:
        """How often a running request was, since the engine began."""
        return int(self.llm.intervention_stats()[0]["requests_preempted"])

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
