"""Requests that make an engine do all that it does at once, and what they ask of tLLM.

Another kind of intervention gets a batch of its own here, and its formula in `reference.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.ports import Phase
from tllm.verify.gated import MLP, SCORES, judged_at
from tllm.verify.patched import Patched, patch_changes
from tllm.verify.places import POINTS
from tllm.verify.reference import Change, States, Steers
from tllm.verify.steered import (
    METHODS,
    PHASES,
    POSITIONS,
    Place,
    Steered,
    arrays_for,
    changes,
    given_for,
    phase_of,
)

MAX_TOKENS = 5


@dataclass(frozen=True)
class Ask:
    """One request.

    reads: the rows that are captured; None for none.
    seed: sample with it at temperature 1; None is greedy.
    """

    prompt: list[int]
    reads: Phase | None = "any"
    n: int = 1
    seed: int | None = None
    max_tokens: int = MAX_TOKENS
    steering: tuple[Steered, ...] = ()
    patches: tuple[Patched, ...] = ()

    def __str__(self) -> str:
        steered = f", steered {[str(each) for each in self.steering]}" if self.steering else ""
        patched = f", patched {[str(each) for each in self.patches]}" if self.patches else ""
        return f"prompt of {len(self.prompt)}, reads {self.reads}{steered}{patched}"

    def changes(self, tokens: Sequence[int], hidden: int) -> Steers:
        """What the reference does to its sequence: rows are patched, then steered."""
        found: dict[Place, list[Change]] = {}
        patches = patch_changes(self.patches, hidden, len(tokens))
        for done in (patches, changes(self.steering, tokens, len(self.prompt))):
            for place, more in done.items():
                found.setdefault(place, []).extend(more)
        return found


@dataclass(frozen=True)
class Prompts:
    """Random prompts.

    vocab: the tokens are below it.
    block: tokens of a block of the KV cache; shared prefixes are as long.
    longest: no prompt is longer.
    without: tokens that mean something else than text, such as an image.
    """

    vocab: int
    block: int
    longest: int = 2**31
    without: Collection[int] = ()

    def pick(self, chance: random.Random, length: int) -> list[int]:
        """A prompt of this length, or the longest."""
        found: list[int] = []
        while len(found) < min(length, self.longest):
            token = chance.randrange(2, self.vocab)
            if token not in self.without:
                found.append(token)
        return found

    def after(self, prefix: Sequence[int], chance: random.Random, length: int) -> list[int]:
        return [*prefix, *self.pick(chance, length)][: self.longest]


def mixed_batch(prompts: Prompts, chunk: int) -> list[Ask]:
    """Prompts of many lengths, two of whose prefixes are shared, greedy and sampled.

    Those that read no prompt row may be served by the prefix cache. Many stop just before the end
    of a block: they grow into blocks that are not there.

    Args:
        chunk: longer prompts are computed in pieces.
    """
    chance = random.Random(0)
    block = prompts.block

    def prompt(length: int) -> list[int]:
        return prompts.pick(chance, length)

    shared = prompt(block)

    def longer(length: int) -> list[int]:
        return prompts.after(shared, chance, length)

    return [
        Ask(longer(5)),
        Ask(longer(7), "decode"),
        Ask(prompt(block - 2), n=3, seed=11),
        Ask(prompt(1)),
        Ask(prompt(chunk + 13)),
        Ask(longer(block - 2), "decode", n=3, seed=12),
        Ask(prompt(7), None),
        Ask(prompt(block - 1), max_tokens=3),
        Ask(prompt(block - 3), "prefill"),
        Ask(longer(1), None, seed=13),
        Ask(longer(2), n=3, seed=14, max_tokens=3),
    ]


def given_batch(prompts: Sequence[list[int]]) -> list[Ask]:
    """The user's own prompts: each greedy, and sampled twice."""
    return [
        ask
        for number, prompt in enumerate(prompts)
        for ask in (Ask(prompt), Ask(prompt, "decode", n=2, seed=number))
    ]


def plainly_steered_batch(
    places: Sequence[Place],
    prompts: Prompts,
    vector: Tensor,
    sizes: Mapping[Place, float],
) -> list[Ask]:
    """At each of these places, every token added to, ablated and clamped.

    Args:
        vector, sizes: as of `steered_batch`.
    """
    chance = random.Random(3)
    generator = torch.Generator().manual_seed(7)
    asks = []
    for place in places:
        size = sizes[place]
        for method in ("add", "ablate", "clamp"):
            given = next(given for name, given in METHODS if name == method)
            direction = size * vector * torch.randn(len(vector), generator=generator)
            kind = "clamps" if method == "clamp" else "vectors"
            steered = Steered(place, method, direction, given_for(given, size), kind=kind)
            asks.append(Ask(prompts.pick(chance, 9), steering=(steered,), max_tokens=3))
    return asks


def steered_batch(
    places: Sequence[Place],
    prompts: Prompts,
    vector: Tensor,
    sizes: Mapping[Place, float] | None = None,
) -> list[Ask]:
    """Every place once, with method, phase and positions changing in turn; and compositions.

    Half of them share a prompt longer than a block with requests that are not steered, and read
    no prompt rows: they would share cached blocks that they must not.

    Args:
        vector: `[hidden]`; directions are this with random factors.
        sizes: of the numbers of rows at each place, about 1 where nothing is said.
    """
    chance = random.Random(2)
    generator = torch.Generator().manual_seed(6)
    common = prompts.pick(chance, prompts.block + 6)

    def steered(number: int, place: Place, phase: Phase) -> Steered:
        method, given = METHODS[number % len(METHODS)]
        kind = "clamps" if method == "clamp" else "vectors"
        positions = list(POSITIONS)[number % len(POSITIONS)]
        if phase != "any" and phase_of(positions) not in ("any", phase):
            positions = "all"
        size = (sizes or {}).get(place, 1.0)
        direction = size * vector * torch.randn(len(vector), generator=generator)
        return Steered(
            place,
            method,
            direction,
            given_for(given, size),
            phase,
            positions,
            kind,
            arrays=arrays_for(method, direction, generator),
        )

    asks = []
    for number, place in enumerate(places):
        prompt = prompts.pick(chance, chance.randrange(5, 14))
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
        chosen = [chance.choice(list(places)) for _ in range(3)]
        linked: list[Place] = [("post_block", 0), ("pre_attn", 1), ("post_block", 0)]
        chosen += [place for place in linked if place in places]
        several = sorted(
            (steered(number + i, place, PHASES[i % 3]) for i, place in enumerate(chosen)),
            # As they are composed: vectors before clamps, the base tier before its phases.
            key=lambda each: (each.kind != "vectors", PHASES.index(each.phase)),
        )
        asks.append(Ask(common, "any", steering=tuple(several), max_tokens=3))
        asks.append(Ask(common, None, steering=tuple(several), n=2, seed=3, max_tokens=3))
    return asks


def patched_batch(
    places: Sequence[Place],
    prompts: Prompts,
    vector: Tensor,
    sizes: Mapping[Place, float] | None = None,
) -> list[Ask]:
    """Every place once, with what is patched changing in turn: rows of the prompt, of generated
    tokens and of both; whole, mixed and some dimensions; rows and zeros; and steered as well.

    Half of them share a prompt longer than a block with requests that are not patched.

    Args:
        vector, sizes: as of `steered_batch`.
    """
    chance = random.Random(5)
    generator = torch.Generator().manual_seed(8)
    common = prompts.pick(chance, prompts.block + 6)
    asks = []
    for number, place in enumerate(places):
        shares = number % 2 == 1
        prompt = common if shares else prompts.pick(chance, chance.randrange(5, 14))
        size = (sizes or {}).get(place, 1.0)
        last = len(prompt) - 1
        within = (last, last + 2) if place[0] == "lm_head_in" else (0, last // 2)  # what is seen
        positions = [(last,), within, (last + 2,), (last, last + 1)][number % 4]
        rows = torch.randn(len(positions), len(vector), generator=generator)
        mask = tuple(sorted(chance.sample(range(len(vector)), len(vector) // 3)))
        patched = Patched(
            place,
            positions,
            None if number % 5 == 4 else size * vector * rows,
            0.4 if number % 3 == 1 else 1.0,
            mask if number % 7 == 2 else None,
        )
        steering: tuple[Steered, ...] = ()
        if number % 6 == 5:
            direction = size * vector * torch.randn(len(vector), generator=generator)
            steering = (Steered(place, "add", direction, {"scale": 0.5}),)
        reads: Phase = "decode" if shares else "any"
        asks.append(Ask(prompt, reads, steering=steering, patches=(patched,), max_tokens=4))
        if number % 4 == 1:
            asks.append(Ask(common, "decode", max_tokens=4))
    return asks


_MEMORIES = (
    ("rest", "token"),
    ("token", "prompt_mean"),
    ("next", "token"),
    ("conversation", "token"),
    ("token", "prompt_last"),
)
"""Scope and over of conditions that remember. Nobody names a conversation: that is as `rest`."""


def as_computed(place: Place) -> tuple[float, int]:
    """The order of places in a forward pass: the first difference is where it begins."""
    point, layer = place
    if layer is None:
        return (-1 if point == "embed" else math.inf), POINTS.index(point)
    return layer, POINTS.index(point)


def _before(places: Sequence[Place], place: Place) -> list[Place]:
    """Where a probe may stand that decides at a place: there, and in earlier layers."""
    first, _ = as_computed(place)
    return [*(each for each in places if as_computed(each)[0] < first), place]


def _earlier(places: Sequence[Place], place: Place) -> list[Place]:
    """Those of these places whose rows are known before those of a place, for all tokens of a
    prompt."""
    point, layer = place
    same: tuple[Place, ...] = (place,)
    if point == "pre_attn":
        assert layer is not None
        same = (place, ("post_block", layer - 1), ("embed", None))
    return [each for each in places if each not in same]


def gated_batch(
    places: Sequence[Place],
    prompts: Prompts,
    vector: Tensor,
    states: States,
    deciding: Sequence[Place],
) -> list[Ask]:
    """Every place once, steered on a condition: a probe there or at an earlier place, with every
    score, hard and soft, and with method, phase and positions changing in turn; every third of them
    remembers.

    Half of them share a prompt longer than a block with requests that are not steered.

    Args:
        vector: as of `steered_batch`.
        states: of some tokens that are not steered.
        deciding: the places of probes; each decides where it is, and in later layers.
    """
    chance = random.Random(6)
    generator = torch.Generator().manual_seed(9)
    common = prompts.pick(chance, prompts.block + 6)
    methods = [each for each in METHODS if each[0] != "multiply"]
    asks = []
    for number, place in enumerate(places):
        # Only a few rows of the last place are seen at all; softly, each of them is.
        last = place == ("lm_head_in", None)
        shares = number % 2 == 1 and not last
        size = float(states[place[0]][place[1]].square().mean(1).sqrt().median())
        direction = size * vector * torch.randn(len(vector), generator=generator)
        probe = torch.randn(len(vector), generator=generator)
        phase: Phase = "any" if last else PHASES[number // 4 % 3]
        before, memory = _before(deciding, place), ("token", "token")
        if number % 3 == 1 and not last:
            memory = _MEMORIES[number // 3 % len(_MEMORIES)]
            phase = "any" if memory[1] != "token" else phase
            earlier = before if phase == "decode" else _earlier(before, place)
            before, memory = (earlier, memory) if earlier else (before, ("token", "token"))
        when = judged_at(
            chance.choice(before),
            probe,
            states,
            (*SCORES, MLP)[number // 2 % (1 + len(SCORES))],
            last or number % 3 == 2,
            memory,
        )
        method, given = methods[number % len(methods)]
        steered = Steered(
            place,
            method,
            direction,
            given_for(given, size),
            phase,
            kind="clamps" if method == "clamp" else "vectors",
            when=when,
            arrays=arrays_for(method, direction, generator),
        )
        prompt = common if shares else prompts.pick(chance, chance.randrange(9, 18))
        reads: Phase = "decode" if shares else "any"
        asks.append(Ask(prompt, reads, steering=(steered,), max_tokens=4))
        if number % 4 == 1:
            asks.append(Ask(common, "decode", max_tokens=4))
    return asks
