"""One mixed batch through tLLM, compared row by row with the reference.

Each sequence is compared with the reference forced along the tokens that vLLM produced. That the
tokens of a greedy sequence are the reference's too is then a statement about its logits: at every
position the token taken is the likeliest one.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.lens import LensConsumer
from tllm.ports import Phase
from tllm.verify.batches import Ask, Prompts, gated_batch
from tllm.verify.places import POINTS, WITHOUT_LAYER
from tllm.verify.steered import PHASES, Place, steering_fields
from tllm.verify.tolerance import Tolerance

from .consumers import Gatherer, Writer
from .families import engine_arguments
from .reference import Writes
from .reference_process import ReferenceProcess

BLOCK = 32
MAX_LEN = 4 * BLOCK
CHUNK = 48
"""`max_num_batched_tokens`: longer prompts are computed in chunks, beside other sequences."""

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": CHUNK,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "disable_log_stats": True,
    "hook_points": "all",
}


SMALL = ("block_size", "enable_prefix_caching")
"""What not every family takes: a state-space layer's block holds more tokens."""


@dataclass(frozen=True)
class WrittenAsk(Ask):
    """A request with a vector added at a place, in a phase."""

    write: tuple[Place, Phase] | None = None

    def __str__(self) -> str:
        return f"{super().__str__()}, written at {self.write}"


def params_of(ask: Ask, registered: Sequence[str], *, seeded: bool) -> Any:
    consumers: dict[str, Mapping[str, Any]] = {
        name: {"enabled": ask.reads == name.removeprefix("rows ")}
        for name in registered
        if name.startswith("rows ")
    }
    if "writer" in registered:
        write = ask.write if isinstance(ask, WrittenAsk) else None
        consumers["writer"] = Writer.options(*write) if write else {"enabled": False}
    return SamplingParams(
        n=ask.n,
        seed=ask.seed if seeded else None,
        temperature=0.0 if ask.seed is None else 1.0,
        max_tokens=ask.max_tokens,
        ignore_eos=True,
        detokenize=False,
        consumers=consumers,
        patch=[patched.entry for patched in ask.patches] or None,
        **steering_fields(ask.steering),
    )


def prompts_of(vocab: int) -> Prompts:
    return Prompts(vocab, BLOCK)


def written_batch(writes: Sequence[tuple[Place, Phase]], vocab: int) -> list[Ask]:
    """A request for each write, with others that nothing is written to between them.

    The first ones have one prompt, longer than a block: they would share what they must not.
    """
    pick = random.Random(1)
    common = [pick.randrange(2, vocab) for _ in range(BLOCK + 3)]
    middle = writes[len(writes) // 2]
    asks: list[Ask] = [
        WrittenAsk(common, "decode", write=write) for write in (writes[0], None, middle, None)
    ]
    for number, write in enumerate(writes):
        prompt = [pick.randrange(2, vocab) for _ in range(pick.randrange(4, 12))]
        asks.append(WrittenAsk(prompt, write=write, max_tokens=4))
        if number % 4 == 0:
            asks.append(Ask(prompt, max_tokens=4))
    return asks


@dataclass
class Report:
    """What a comparison found.

    worst: by hook point, and for `logits`, the largest error relative to the largest reference.
    mixed_up: by hook point, what the error of each tensor would be if every row were its
        neighbour's.
    rows: that were compared, once for each place.
    tokens: of greedy sequences that were compared.
    differing: of these, that are not the reference's.
    on_edge: sequences that were not compared, since rounding decides a condition of theirs.
    preemptions, cached_tokens: of the requests; else nothing was tested of recomputing and caching.
    problems: in words.
    """

    worst: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    mixed_up: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    tokens: int = 0
    differing: int = 0
    on_edge: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, holds: bool, problem: str) -> bool:
        if not holds:
            self.problems.append(problem)
        return holds


class Engine:
    """tLLM serving one family, and the reference it is compared with.

    seeded: give sampled requests their own seeds. vLLM's V1 runner cannot on a CPU when prompts are
        computed in chunks ("CPU Generator does not use offset").
    """

    def __init__(
        self,
        family: str,
        reference: ReferenceProcess,
        llm: LLM,
        *,
        seeded: bool,
    ) -> None:
        self.seeded = seeded
        self.family = family
        self.reference = reference
        self.llm = llm
        config = llm.llm_engine.model_config
        self.layers = config.get_total_num_hidden_layers()
        self.vocab = config.get_vocab_size()
        self.places: list[Place] = reference.places(family)
        generator = torch.Generator().manual_seed(5)
        vector = 3 * torch.randn(config.get_hidden_size(), generator=generator)
        self.vector = vector.to(config.dtype).float()
        self.registered: list[str] = []

    @property
    def points(self) -> list[str]:
        """The hook points that some layer has."""
        return list(dict.fromkeys(point for point, _ in self.places))

    @contextmanager
    def few_blocks(self) -> Iterator[None]:
        """Half of the KV cache is taken: sequences preempt each other."""
        pool = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() // 2)
        try:
            yield
        finally:
            pool.free_blocks(taken)

    @contextmanager
    def consumers(self, *, writer: bool = False) -> Iterator[None]:
        """Registers a gatherer for each phase, and the writer if asked to."""
        made: list[Consumer] = [
            Gatherer(f"rows {phase}", self.places, phase, logits=phase == "any") for phase in PHASES
        ]
        if writer:
            made.append(Writer(self.places, self.vector))
        try:
            for consumer in made:
                self.llm.register_consumer(consumer)
                self.registered.append(consumer.consumer_id)
            yield
        finally:
            while self.registered:
                self.llm.unregister_consumer(self.registered.pop())

    def refusals(self) -> list[str]:
        """What is wrong with how the hook points that the family, or a layer, lacks are refused."""
        problems = []
        lacking = [
            (point, layer)
            for point in POINTS
            for layer in ([None] if point in WITHOUT_LAYER else range(self.layers))
            if (point, layer) not in self.places
        ]
        if "q" not in self.points:  # `transformers` may compute them otherwise: not compared
            lacking = [(point, layer) for point, layer in lacking if point not in ("q", "k", "v")]
        for point, layer in lacking:
            having = [place[1] for place in self.places if place[0] == point]
            named = self.points if not having else [f"in layer {layer}"]
            try:
                self.llm.register_consumer(Gatherer("lacking", [(point, layer)], "any"))
            except ValueError as error:
                told = [f"no hook point {point}", *named]
                if all(each in str(error) for each in told):
                    continue
                problems.append(f"{point} {layer} is refused with: {error}")
            else:
                self.llm.unregister_consumer("lacking")
                problems.append(f"{point} {layer} is not refused")
        return problems

    def compare(self, asks: Sequence[Ask], tolerance: Tolerance) -> Report:
        """Serve the requests in one call and compare all that comes back."""
        report = Report()
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [params_of(ask, self.registered, seeded=self.seeded) for ask in asks]
        with _count_preemptions(self.llm, report):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            report.cached_tokens += output.num_cached_tokens or 0
            samples = [completion.index for completion in output.outputs]
            report.check(samples == list(range(ask.n)), f"{ask}: its samples are {samples}")
            for completion in output.outputs:
                self._compare_sequence(report, ask, completion, tolerance)
        return report

    def gated_asks(self, places: Sequence[Place]) -> list[Ask]:
        """Each of these places steered on a condition, with a probe there or before."""
        prompts = prompts_of(self.vocab)
        states = self.reference.capture(self.family, prompts.pick(random.Random(4), 24))
        return gated_batch(places, prompts, self.vector, states, self.places)

    def lens(self, report: Report, tolerance: float) -> str | None:
        """Compare the logit lens of the last layer with the model's own log-probabilities; why
        there is none, if it was refused."""
        try:
            self.llm.register_consumer(LensConsumer(self.layers - 1, top_k=3))
        except ValueError as error:
            return str(error)
        prompts = [[5, 9, 4, 7], [8, 3]]
        params = SamplingParams(
            temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, consumers={"lens": {}}
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        self.llm.unregister_consumer("lens")
        for prompt, output in zip(prompts, outputs, strict=True):
            passed = [*prompt, *output.outputs[0].token_ids][:-1]
            _, logits = self.reference.run(self.family, passed, {}, {})
            expected = logits.float().log_softmax(-1)
            result = output.consumer_results["lens"]
            if not report.check(result.status == "ok", f"lens: {result.error}"):
                continue
            found = torch.from_numpy(result.payload["logprobs"].values[:, 0])
            named = torch.from_numpy(result.payload["token_ids"].values[:, 0]).long()
            report.check(len(found) == len(passed), f"lens: {len(found)} of {len(passed)} rows")
            for kind, wanted in (
                ("best", expected.topk(3).values),
                ("named", expected.gather(1, named)),
            ):
                error = float((found - wanted).abs().max() / logits.abs().max())
                report.worst["lens"] = max(report.worst["lens"], error)
                report.check(error <= tolerance, f"lens, {kind}: off by {error:.2e}")
        return None

    def _compare_sequence(
        self, report: Report, ask: Ask, completion: Any, tolerance: Tolerance
    ) -> None:
        name = f"{ask}, sample {completion.index}"
        new = list(completion.token_ids)
        report.check(len(new) == ask.max_tokens, f"{name}: {len(new)} tokens")
        passed = [*ask.prompt, *new][:-1]  # the last token never passes the model
        first = len(ask.prompt)
        changes = ask.changes(passed, len(self.vector))
        states, logits = self.reference.run(self.family, passed, self._writes(ask), changes)
        conditions = [
            each.when.within(each.mask(passed, first), first)
            for each in ask.steering
            if each.when is not None
        ]
        if any(when.is_near(states, tolerance.points[when.place[0]]) for when in conditions):
            report.on_edge += 1
            return
        if ask.seed is None:
            chosen = logits[first - 1 :]
            regret = chosen.amax(1) - chosen.gather(1, torch.tensor(new)[:, None])[:, 0]
            regret /= chosen.abs().amax()
            report.tokens += len(new)
            report.differing += int((regret > 0).sum())
            problem = f"{name}: tokens {new} are not greedy, by {regret.tolist()}"
            report.check(bool((regret <= tolerance.regret).all()), problem)

        results = completion.consumer_results
        errors = [f"{key}: {r.error}" for key, r in results.items() if r.status != "ok"]
        report.check(not errors, f"{name}: {errors}")
        wanted = {f"rows {ask.reads}"} if ask.reads else set()
        if conditions:
            wanted.add("signals")
        if not report.check(set(results) == wanted, f"{name}: results of {sorted(results)}"):
            return
        if ask.reads is None:
            return
        low = first if ask.reads == "decode" else 0
        high = first if ask.reads == "prefill" else len(passed)
        payload = results[f"rows {ask.reads}"].payload
        values = self._rows(report, name, payload, "states", range(low, high))
        if values is not None:
            for place, got in zip(self.places, values.unbind(1), strict=True):
                point, layer = place
                expected = states[point][layer][low:high]
                self._compare_rows(report, f"{name}, {place}", point, got, expected, tolerance)
        if ask.reads == "any":
            values = self._rows(report, name, payload, "logits", range(first - 1, len(passed)))
            if values is not None:
                expected = logits[first - 1 :]
                self._compare_rows(
                    report, f"{name}, logits", "logits", values[:, 0], expected, tolerance
                )

    def _writes(self, ask: Ask) -> Writes:
        if not isinstance(ask, WrittenAsk) or ask.write is None:
            return {}
        place, phase = ask.write
        in_prompt = torch.arange(MAX_LEN) < len(ask.prompt)
        masks = {"prefill": in_prompt, "decode": ~in_prompt, "any": torch.ones(MAX_LEN)}
        return {place: (self.vector, masks[phase])}

    def _rows(
        self, report: Report, name: str, payload: Any, kind: str, positions: range
    ) -> Tensor | None:
        """The values returned, if they are of exactly these positions, once each and in order."""
        if not report.check(kind in payload, f"{name}: no {kind} were captured"):
            return None
        got = payload[kind].positions.tolist()
        problem = f"{name}: {kind} of positions {got}, not {positions}"
        return payload[kind].values if report.check(got == list(positions), problem) else None

    def _compare_rows(
        self,
        report: Report,
        name: str,
        point: str,
        got: Tensor,
        expected: Tensor,
        tolerance: Tolerance,
    ) -> None:
        error = float((got - expected).abs().max() / expected.abs().max())
        report.worst[point] = max(report.worst[point], error)
        report.rows += len(got)
        if len(got) > 1:
            mixed_up = float((got.roll(1, 0) - expected).abs().max() / expected.abs().max())
            report.mixed_up[point].append(mixed_up)
        limit = tolerance.points[point]
        report.check(error <= limit, f"{name}: off by {error:.2e}, more than {limit:.2e}")


@contextmanager
def serving(
    family: str,
    reference: ReferenceProcess,
    checkpoint: Path,
    *,
    seeded: bool,
    roomy: bool = False,
    wide: bool = False,
    **arguments: Any,
) -> Iterator[Engine]:
    """An engine in this process, gone afterwards with all it held.

    Its KV cache is as small as the family allows, so that sequences preempt each other; where it is
    `roomy`, vLLM chooses its blocks and whether prefixes are cached. A `wide` one has twice as many
    blocks and sequences, which half as many passes compute.
    """
    # These have sliding and full attention: three groups of layers, each with blocks of its own.
    # One sequence needs 14 and the null block where steps are scheduled ahead.
    blocks = {"gemma2": 15, "gemma3": 15, "gemma3n": 15, "exaone4": 15}.get(family, 7)
    given = {**ENGINE, "num_gpu_blocks_override": blocks}
    if wide:
        given |= {"num_gpu_blocks_override": 2 * blocks - 1, "max_num_seqs": 16}  # one is null
    if roomy:
        given = {name: value for name, value in ENGINE.items() if name not in SMALL}
    llm = LLM(str(checkpoint), **given, **engine_arguments(family), **arguments)
    served = Engine(family, reference, llm, seeded=seeded)
    try:
        yield served
    finally:
        llm.llm_engine.engine_core.shutdown()  # with vLLM's own clean-up of groups and memory
        del llm, served.llm
        if torch.cuda.is_available():  # the next one needs its memory
            gc.collect()


@contextmanager
def _count_preemptions(llm: LLM, report: Report) -> Iterator[None]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        report.preemptions += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    try:
        yield
    finally:
        del scheduler._preempt_request
