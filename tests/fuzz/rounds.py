"""Rounds of requests that run together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import vllm
from capture.truth import POINTS
from engine.asking import generate
from engine.reference import HIDDEN

from fuzz.asks import Ask
from fuzz.controllers import controlled, made
from fuzz.features import MODULES, VECTORS, draw_together, tier
from fuzz.gates import MONITORS, gate, names_of, save_autoencoder
from fuzz.leaks import Footprint, footprint, grown
from fuzz.oracle import Alone, Oracle, WrongError, at_these_positions
from fuzz.patches import MEAN, MEANS, RUN, RUN_PROMPT
from tllm.consumers.base import Consumer
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.consumers.logging import LoggingConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.consumers.sae import SaeConsumer

PROBE = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3)), 0.25

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AGAIN = 3
"""How often a round may run again and leave more than before, until that is a leak."""
STEERED, INTERRUPTED = 0.25, 0.2
"""How likely a round has global steering, and a Ctrl-C in between."""


def consumers(root: Path) -> list[Consumer]:
    """What every engine of the attack has, beside captures to memory.

    Args:
        root: folder for the store.
    """
    return [
        FilesystemConsumer(root, publish_interval=0.05),
        ProbeConsumer(PROBE[0], PROBE[1]),
        LoggingConsumer(layers="0-3"),
        SaeConsumer(save_autoencoder(root.with_name("autoencoder")), top_k=5),
        ESampConsumer(ESampConsumerConfig(rank=4, slots=2)),
        *made(),
    ]


@dataclass(frozen=True)
class Event:
    """Something that happens in the middle of a round, and harms no request.

    Attributes:
        chance: how likely it happens in a round.
        begin: done to the engine.
        end: done some steps later, or after the round.
    """

    chance: float
    begin: Callable[[Any], object]
    end: Callable[[Any], object] = lambda llm: None


EVENTS: Mapping[str, Event] = {
    "the prefix cache is reset": Event(
        0.2, lambda llm: llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    ),
    "global steering changes": Event(  # requests keep what was set when they were added
        0.2,
        lambda llm: llm.steering.set({"post_block": {2: VECTORS[5]}}),
        lambda llm: llm.steering.clear(),
    ),
    "a module changes": Event(
        0.1,
        lambda llm: llm.steering.register_module("calm", {"post_block": {3: VECTORS[4]}}),
        lambda llm: llm.steering.register_module("calm", MODULES["calm"]),
    ),
    "a monitor changes": Event(
        0.1,
        lambda llm: llm.steering.register_monitor("glad", MONITORS["both"]["any"][1]),
        lambda llm: llm.steering.register_monitor("glad", MONITORS["glad"]),
    ),
    "a consumer comes and goes": Event(
        0.2,
        lambda llm: llm.register_consumer(LoggingConsumer(consumer_id="guest")),
        lambda llm: llm.unregister_consumer("guest"),
    ),
}


@dataclass(frozen=True)
class Setup:
    """An engine to attack.

    Attributes:
        options: arguments of `LLM` beside those of all test engines.
        allows: kinds of features, see `features.Feature`.
        ahead: whether it schedules a step ahead.
        drafts: how it drafts tokens, if it does; one that does not says what is right then.
    """

    options: Mapping[str, Any]
    allows: frozenset[str]
    ahead: bool = False
    drafts: str | None = None


def _of_whole_prompts() -> frozenset[str]:
    """What an engine allows that computes prompts at once."""
    found = {"text", "undrafted"}
    # Triton's interpreter cannot run the kernel that vLLM's V2 runner has for them.
    if not INTERPRETED:
        found.add("structured")
    # On a GPU steps are scheduled ahead, and the V1 runner then draws other tokens for a request
    # with a seed that was preempted.
    if not (torch.cuda.is_available() and os.environ["TLLM_TEST_RUNNER"] == "v1"):
        found.add("seeded")
    return frozenset(found)


TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 24,
    "max_model_len": 160,
    "num_gpu_blocks_override": 8,
}
"""Sequences preempt each other, and prompts are computed in chunks."""

_EAGLE3 = "eagle3-ahead" if os.environ["TLLM_TEST_RUNNER"] == "v2" else "eagle3"
"""The V1 runner knows a step's tokens before the next is scheduled, or refuses to draft."""

SETUPS: Mapping[str, Setup] = {
    # vLLM cannot compute seeded requests in chunks on a CPU.
    "chunked": Setup(
        {"max_num_batched_tokens": 24, "scheduling_policy": "priority"},
        frozenset({"priority", "undrafted"}),
    ),
    "whole": Setup(
        {"enable_chunked_prefill": False, "skip_tokenizer_init": False},
        _of_whole_prompts(),
    ),
    "tight": Setup(
        TIGHT,
        frozenset({"undrafted"}),
        ahead=True,
    ),
    "n-gram drafts": Setup(TIGHT, frozenset({"drafted"}), drafts="ngram"),
    "eagle3 drafts": Setup(TIGHT, frozenset({"drafted"}), drafts=_EAGLE3),
}


class Attack:
    """Attacks one engine, round after round.

    Args:
        llm: an `LLM` in this process.
        alone: the `LLM` that computes each request alone: the same, or one that drafts no tokens.
        plain: vLLM's own, for the tokens of requests that are not steered.
        root: folder for the store.
        allows: kinds of features that the engine allows.
    """

    def __init__(
        self, llm: Any, alone: Any, plain: Any, root: Path, allows: frozenset[str]
    ) -> None:
        self._llm = llm
        self._alone = alone
        self._plain = plain
        self._allows = allows | {"abort"}
        self._truth: dict[int, list[Alone]] = {}
        self._prepare(llm, root)
        if alone is not llm:
            self._prepare(alone, root.with_name("alone"))
        self._oracle = Oracle(PROBE, root, apart=False)

    def _prepare(self, llm: Any, root: Path) -> None:
        """Give an engine what requests may name."""
        for consumer in consumers(root):
            llm.register_consumer(consumer)
        for name, condition in MONITORS.items():
            llm.steering.register_monitor(name, condition)
        for name, spec in MODULES.items():
            llm.steering.register_module(name, spec)
        llm.patching.register_mean(MEAN, MEANS)
        llm.patching.run(RUN_PROMPT, hooks=POINTS, name=RUN)

    def run(self, seed: int, requests: int) -> int:
        """One round; how many requests were compared. `WrongError` tells seed and request."""
        pick = Random(seed)
        asks = draw_together(pick, self._allows, requests)
        everywhere = tier(pick, Ask([1], {"max_tokens": 2})) if pick.random() < STEERED else None
        if everywhere is not None:
            gate(pick, everywhere, names_of("everywhere"), 0.5)
        interrupt = pick.randint(1, 15) if pick.random() < INTERRUPTED else None
        happens = {
            name: (begin := pick.randint(2, 12), begin + pick.randint(1, 6))
            for name, event in EVENTS.items()
            if pick.random() < event.chance
        }
        told = f"{happens}, interrupted after {interrupt} steps, global steering: {everywhere}"
        more: list[str] = []
        checked = 0
        self._truth.clear()
        for _ in range(1 + AGAIN):
            before = self._footprint() if checked else None
            self._steer(everywhere)
            if before is not None and interrupt is not None:
                self._interrupted(asks, interrupt)
            try:
                checked += self._together(asks, happens, everywhere)
            except WrongError as error:
                raise WrongError(f"seed {seed}, {error}\n  {told}") from error
            self._steer(None)
            if before is not None and not (more := grown(self._footprint, before)):
                return checked
        features = "\n  ".join(" ".join(ask.drawn) for ask in asks)
        leaks = "\n  ".join(more)
        raise WrongError(
            f"seed {seed}: each time the same requests run there is more of\n  {leaks}\n{told}\n"
            f"  {features}"
        )

    def check_power(self) -> None:
        """Raises `WrongError` where little could be compared."""
        self._oracle.check_power()

    def _together(
        self, asks: Sequence[Ask], happens: Mapping[str, tuple[int, int]], everywhere: Any
    ) -> int:
        """Run requests together and compare each; how many there were."""
        outputs = self._generate(asks, happens)
        self._steer(everywhere)
        for number, ask in enumerate(asks):
            output = outputs.get(number)
            try:
                if output is not None:
                    self._compare(number, ask, output, everywhere)
                elif ask.abort_after is None:
                    raise WrongError("there is no output")
            except Exception as error:
                raise WrongError(f"request {number}: {error!r}\n  {ask}") from error
        return len(outputs)

    def _compare(self, number: int, ask: Ask, output: Any, everywhere: Any) -> None:
        if number not in self._truth or ask.guided:
            prompts, params = self._oracle.alone(ask, output)
            found = []
            for prompt in prompts:
                self._alone.reset_prefix_cache()
                if ask.guided and everywhere is not None:
                    self._steer(at_these_positions(everywhere, len(ask.prompt), prompt))
                found += generate(self._alone, [prompt], params)
            if ask.guided:
                self._steer(everywhere)
            self._truth[number] = self._oracle.truth(ask, output, found)
            acted = ask.steered or ask.patched or ask.guided or ask.judged or controlled(ask)
            if everywhere is None and not acted:
                self._compare_with_vllm(ask, output)
        self._oracle.check(ask, output, self._truth[number], everywhere)

    def _compare_with_vllm(self, ask: Ask, output: Any) -> None:
        params = ask.params(capture=None, consumers=None)
        prompt = {"prompt_token_ids": list(ask.prompt)}
        [theirs] = self._plain.generate([prompt], params, use_tqdm=False)
        for ours, plain in zip(output.outputs, theirs.outputs, strict=True):
            if list(ours.token_ids) != list(plain.token_ids):
                raise WrongError(f"vLLM's tokens are {plain.token_ids}, ours {ours.token_ids}")

    def _generate(
        self, asks: Sequence[Ask], happens: Mapping[str, tuple[int, int]]
    ) -> dict[int, Any]:
        """Outputs by the number of the request; aborted ones may have none."""
        first = self._llm.request_counter.counter
        prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        aborts = {str(first + i): a.abort_after for i, a in enumerate(asks) if a.abort_after}
        priorities = [ask.priority for ask in asks] if "priority" in self._allows else None
        begun: list[str] = []

        def look(steps: int) -> None:
            if due := [name for name, after in aborts.items() if after == steps]:
                self._llm.llm_engine.abort_request(due)
            for name, (begin, end) in happens.items():
                if steps == begin:
                    EVENTS[name].begin(self._llm)
                    begun.append(name)
                elif steps == end:
                    EVENTS[name].end(self._llm)
                    begun.remove(name)

        with self._stepping(look):
            outputs = self._llm.generate(
                prompts, [ask.same for ask in asks], use_tqdm=False, priority=priorities
            )
        for name in begun:
            EVENTS[name].end(self._llm)
        return {int(output.request_id) - first: output for output in outputs}

    def _steer(self, everywhere: Any) -> None:
        for llm in {self._llm, self._alone}:
            llm.steering.clear()
            if everywhere:
                llm.steering.set(everywhere)

    def _interrupted(self, asks: Sequence[Ask], after: int) -> None:
        """The user presses Ctrl-C in the middle of it."""

        def interrupt(steps: int) -> None:
            if steps == after:
                raise KeyboardInterrupt

        prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        try:
            with self._stepping(interrupt):
                self._llm.generate(prompts, [ask.same for ask in asks], use_tqdm=False)
        except KeyboardInterrupt:
            pass

    @contextmanager
    def _stepping(self, look: Any) -> Iterator[None]:
        """Call `look(steps so far)` before each step of the engine."""
        engine, steps = self._llm.llm_engine, 0
        step = engine.step

        def looked_at() -> Any:
            nonlocal steps
            steps += 1
            look(steps)
            return step()

        engine.step = looked_at
        try:
            yield
        finally:
            engine.step = step

    def _footprint(self) -> Footprint:
        # Workers hear of what ended in the last step with the next one; which requests these are
        # hangs on when their grammars were ready.
        ending = vllm.SamplingParams(max_tokens=2, temperature=0.0, detokenize=False)
        self._llm.generate([{"prompt_token_ids": [5]}], ending, use_tqdm=False)
        self._llm.synchronize()
        return footprint(self._llm)


def attack(attacked: Attack, seed: int, *, rounds: int | None, seconds: float | None) -> int:
    """Rounds with seeds from `seed` on, as many as said or until the time is over; how many
    requests were compared. `WrongError` tells of all rounds that went wrong, three at most."""
    started, checked, number = time.monotonic(), 0, 0
    wrong: list[str] = []
    while len(wrong) < 3:
        if rounds is not None and number >= rounds:
            break
        if seconds is not None and time.monotonic() - started > seconds:
            break
        try:
            checked += attacked.run(seed + number, requests=8)
        except WrongError as error:
            wrong.append(str(error))
        number += 1
    attacked.check_power()
    if wrong:
        raise WrongError("\n\n".join(wrong))
    return checked
