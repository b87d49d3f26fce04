"""One mixed batch through tLLM, compared row by row with the reference.

Each sequence is compared with the reference forced along the tokens that vLLM produced. That the
tokens of a greedy sequence are the reference's too is then a statement about its logits: at every
position the token taken is the likeliest one.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.ports import Phase

from .consumers import Gatherer, Place, Writer
from .families import engine_arguments
from .reference import POINTS, Change, Writes
from .reference_process import ReferenceProcess

BLOCK = 32
MAX_LEN = 4 * BLOCK
MAX_TOKENS = 5
PHASES: tuple[Phase, ...] = ("any", "prefill", "decode")
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


@dataclass(frozen=True, eq=False)
class Steered:
    """One operation of a request.

    kind: whether it is asked among the vectors or the clamps; these come last.
    """

    place: Place
    method: str
    vector: Tensor
    given: Mapping[str, float] = field(default_factory=dict)
    phase: Phase = "any"
    positions: str = "all"
    kind: str = "vectors"

    def mask(self, tokens: list[int], n: int) -> Tensor:
        """Which of the positions of `tokens`, of which n are the prompt's, it is done to."""
        meant = POSITIONS[self.positions][1]
        chosen = [meant(p, n, token) for p, token in enumerate(tokens)]
        phases = ["prefill" if p < n else "decode" for p in range(len(tokens))]
        in_phase = [self.phase in ("any", phase) for phase in phases]
        return torch.tensor(chosen) & torch.tensor(in_phase)

    def __str__(self) -> str:
        return f"{self.kind} {self.method} {self.place} {self.phase} {self.positions}"


TOKENS = tuple(range(2, 90))
"""Chosen by token: about half of the vocabulary."""

POSITIONS: dict[str, tuple[Any, Callable[[int, int, int], bool]]] = {
    "all": ("all", lambda p, n, token: True),
    "last prompt": ("last_prompt", lambda p, n, token: p == n - 1),
    "listed": ([0, -2], lambda p, n, token: p in (0, n - 2)),
    "generated": ("all_generated", lambda p, n, token: p >= n),
    "window": (
        {"phase": "generation", "windows": [[1, 3]]},
        lambda p, n, token: n + 1 <= p < n + 3,
    ),
    "range without": (
        {"ranges": [[-4, None]], "exclude": {"positions": [-2]}},
        lambda p, n, token: p >= n - 4 and p != n - 2,
    ),
    "prompt tokens": (
        {"phase": "prompt", "token_ids": TOKENS, "exclude": {"windows": [[0, 2]]}},
        lambda p, n, token: p < n and token in TOKENS and p >= 2,
    ),
    "tokens": (
        {"token_ids": TOKENS, "exclude": {"positions": [-2]}},
        lambda p, n, token: token in TOKENS and p != n - 2,
    ),
    "generated without": (
        {"phase": "generation", "exclude": {"token_ids": TOKENS, "windows": [[4, 5]]}},
        lambda p, n, token: p >= n and token not in TOKENS and p != n + 4,
    ),
}
"""As users write it, and whether a position is meant: (position, prompt length, token)."""


def _steering_fields(steering: Sequence[Steered]) -> dict[str, Any]:
    """The keywords of `SamplingParams`, with several operations at a place in their order."""
    fields: dict[str, Any] = {}
    for each in steering:
        prefix = "" if each.phase == "any" else f"{each.phase}_"
        tier = fields.setdefault(f"{prefix}steering_{each.kind}", {})
        point, layer = each.place
        entry = {
            "vector": each.vector,
            "method": each.method,
            "positions": POSITIONS[each.positions][0],
            **each.given,
        }
        if layer is None:
            tier.setdefault(point, []).append(entry)
        else:
            tier.setdefault(point, {}).setdefault(layer, []).append(entry)
    return fields


@dataclass(frozen=True)
class Ask:
    """One request.

    reads: the rows that are captured; None for none.
    seed: sample with it at temperature 1; None is greedy.
    write: where, and in which phase, the vector is added; None for nowhere.
    """

    prompt: list[int]
    reads: Phase | None = "any"
    n: int = 1
    seed: int | None = None
    max_tokens: int = MAX_TOKENS
    write: tuple[Place, Phase] | None = None
    steering: tuple[Steered, ...] = ()

    def params(self, registered: Sequence[str], *, seeded: bool) -> Any:
        consumers: dict[str, Mapping[str, Any]] = {
            name: {"enabled": self.reads == name.removeprefix("rows ")}
            for name in registered
            if name.startswith("rows ")
        }
        if "writer" in registered:
            consumers["writer"] = Writer.options(*self.write) if self.write else {"enabled": False}
        return SamplingParams(
            n=self.n,
            seed=self.seed if seeded else None,
            temperature=0.0 if self.seed is None else 1.0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            detokenize=False,
            consumers=consumers,
            **_steering_fields(self.steering),
        )

    def __str__(self) -> str:
        written = f", written at {self.write}" if self.write else ""
        steered = f", steered {[str(each) for each in self.steering]}" if self.steering else ""
        return f"prompt of {len(self.prompt)}, reads {self.reads}{written}{steered}"


def mixed_batch(vocab: int) -> list[Ask]:
    """Prompts of many lengths, two of whose prefixes are shared, greedy and sampled.

    Those that read no prompt row may be served by the prefix cache. Many stop just before the end
    of a block: they grow into blocks that are not there.
    """
    pick = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [pick.randrange(2, vocab) for _ in range(length)]

    shared = prompt(BLOCK)
    return [
        Ask([*shared, *prompt(5)]),
        Ask([*shared, *prompt(7)], "decode"),
        Ask(prompt(BLOCK - 2), n=3, seed=11),
        Ask(prompt(1)),
        Ask(prompt(CHUNK + 13)),
        Ask([*shared, *prompt(BLOCK - 2)], "decode", n=3, seed=12),
        Ask(prompt(7), None),
        Ask(prompt(BLOCK - 1), max_tokens=3),
        Ask(prompt(BLOCK - 3), "prefill"),
        Ask([*shared, *prompt(1)], None, seed=13),
        Ask([*shared, *prompt(2)], n=3, seed=14, max_tokens=3),
    ]


def written_batch(writes: Sequence[tuple[Place, Phase]], vocab: int) -> list[Ask]:
    """A request for each write, with others that nothing is written to between them.

    The first ones have one prompt, longer than a block: they would share what they must not.
    """
    pick = random.Random(1)
    common = [pick.randrange(2, vocab) for _ in range(BLOCK + 3)]
    middle = writes[len(writes) // 2]
    asks = [Ask(common, "decode", write=write) for write in (writes[0], None, middle, None)]
    for number, write in enumerate(writes):
        prompt = [pick.randrange(2, vocab) for _ in range(pick.randrange(4, 12))]
        asks.append(Ask(prompt, write=write, max_tokens=4))
        if number % 4 == 0:
            asks.append(Ask(prompt, max_tokens=4))
    return asks


METHODS: tuple[tuple[str, dict[str, float]], ...] = (
    ("add", {"scale": 1.5}),
    ("norm_match", {"scale": 0.4}),
    ("clamp", {"min": -0.3, "max": 0.2, "strength": 0.8}),
    ("ablate", {}),
    ("project", {"value": 1.2}),
    ("multiply", {"factor": -1.5}),
    ("clamp", {"value": 0.7}),
)


def steered_batch(places: Sequence[Place], vector: Tensor, vocab: int) -> list[Ask]:
    """Every place once, with method, phase and positions changing in turn; and compositions.

    Half of them share a prompt longer than a block with requests that are not steered, and read
    no prompt rows: they would share cached blocks that they must not.
    """
    pick = random.Random(2)
    generator = torch.Generator().manual_seed(6)
    common = [pick.randrange(2, vocab) for _ in range(BLOCK + 6)]

    def direction() -> Tensor:
        return vector * torch.randn(len(vector), generator=generator)

    def steered(number: int, place: Place, phase: Phase) -> Steered:
        method, given = METHODS[number % len(METHODS)]
        kind = "clamps" if method == "clamp" else "vectors"
        positions = list(POSITIONS)[number % len(POSITIONS)]
        return Steered(place, method, direction(), given, phase, positions, kind)

    asks = []
    for number, place in enumerate(places):
        prompt = [pick.randrange(2, vocab) for _ in range(pick.randrange(5, 14))]
        phase = PHASES[(number // 2) % 3] if number % len(POSITIONS) in (0, 5) else "any"
        shares = number % 2 == 1
        asks.append(
            Ask(
                common if shares else prompt,
                "decode" if shares else "any",
                steering=(steered(number, place, phase),),
                max_tokens=4,
            )
        )
        if number % 4 == 1:
            asks.append(Ask(common, "decode", max_tokens=4))
    for number in range(4):
        chosen = [pick.choice(list(places)) for _ in range(3)]
        chosen += [("post_block", 0), ("pre_attn", 1), ("post_block", 0)]
        several = sorted(
            (steered(number + i, place, PHASES[i % 3]) for i, place in enumerate(chosen)),
            # As they are composed: vectors before clamps, the base tier before its phases.
            key=lambda each: (each.kind != "vectors", PHASES.index(each.phase)),
        )
        asks.append(Ask(common, "any", steering=tuple(several), max_tokens=3))
        asks.append(Ask(common, None, steering=tuple(several), n=2, seed=3, max_tokens=3))
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
    preemptions, cached_tokens: of the requests; else nothing was tested of recomputing and caching.
    problems: in words.
    """

    worst: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    mixed_up: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    tokens: int = 0
    differing: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, holds: bool, problem: str) -> bool:
        if not holds:
            self.problems.append(problem)
        return holds


@dataclass(frozen=True)
class Tolerance:
    """The largest relative error to accept, by hook point and for `logits`.

    regret: how far below the likeliest token's the logit of a greedy token may lie in the
        reference, relative to the largest logit.
    """

    points: Mapping[str, float]
    regret: float = 0.0


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
            for layer in ([None] if point == "lm_head_in" else range(self.layers))
            if (point, layer) not in self.places
        ]
        for point, layer in lacking:
            having = [place[1] for place in self.places if place[0] == point]
            named = ", ".join(self.points) if not having else f"in layer {layer}"
            try:
                self.llm.register_consumer(Gatherer("lacking", [(point, layer)], "any"))
            except ValueError as error:
                if f"no hook point {point}" in str(error) and named in str(error):
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
        params = [ask.params(self.registered, seeded=self.seeded) for ask in asks]
        with _count_preemptions(self.llm, report):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            report.cached_tokens += output.num_cached_tokens or 0
            samples = [completion.index for completion in output.outputs]
            report.check(samples == list(range(ask.n)), f"{ask}: its samples are {samples}")
            for completion in output.outputs:
                self._compare_sequence(report, ask, completion, tolerance)
        return report

    def _compare_sequence(
        self, report: Report, ask: Ask, completion: Any, tolerance: Tolerance
    ) -> None:
        name = f"{ask}, sample {completion.index}"
        new = list(completion.token_ids)
        report.check(len(new) == ask.max_tokens, f"{name}: {len(new)} tokens")
        passed = [*ask.prompt, *new][:-1]  # the last token never passes the model
        first = len(ask.prompt)
        steers: dict[Place, list[Change]] = {}
        for each in ask.steering:
            change = each.method, each.vector, each.given, each.mask(passed, first)
            steers.setdefault(each.place, []).append(change)
        states, logits = self.reference.run(self.family, passed, self._writes(ask), steers)
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
        if ask.write is None:
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
    **arguments: Any,
) -> Iterator[Engine]:
    """An engine in this process, gone afterwards with all it held.

    Its KV cache is as small as the family allows, so that sequences preempt each other; where it is
    `roomy`, vLLM chooses its blocks and whether prefixes are cached.
    """
    # These have sliding and full attention: three groups of layers, each with blocks of its own.
    # One sequence needs 14 and the null block where steps are scheduled ahead.
    blocks = {"gemma2": 15, "gemma3": 15, "exaone4": 15}.get(family, 7)
    given = {**ENGINE, "num_gpu_blocks_override": blocks}
    if roomy:
        given = {name: value for name, value in ENGINE.items() if name not in SMALL}
    llm = LLM(str(checkpoint), **given, **engine_arguments(family), **arguments)
    served = Engine(family, reference, llm, seeded=seeded)
    try:
        yield served
    finally:
        llm.llm_engine.engine_core.shutdown()  # with vLLM's own clean-up of groups and memory
        del llm, served.llm
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
