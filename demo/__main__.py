"""What `make demo` runs: the main job of the starter, a measurement of what ESamp finds, stories
made happy or sad by a vector, and a probe that colours the tokens of two stories."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from itertools import zip_longest
from random import Random

import numpy as np
from rich.console import Console
from rich.text import Text

import starter
from demo.diversity import Arm, Setting, chosen, paired_bootstrap, sample
from demo.moods import ToldStory, Way, measure, mood_module, mood_probe, tell
from demo.text import mood_pair
from tllm import LLM
from tllm.consumers.esamp import ESampConsumer

BETAS = (0.1, 0.2, 0.4, 0.8)
SWEEP_PUZZLES = 20
SCALES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
OPENINGS = 40
BAR = 40
STRONG = 6.0
"""Score from which on a token has its full colour."""


def main() -> int:
    """The demo; 1 when ESamp learned nothing."""
    ArgumentParser(prog="python -m demo", description=__doc__).parse_args()
    began = time.monotonic()
    arguments = starter.parse_arguments(
        ["--model-name", str(starter.DEMO_MODEL), "--dtype", "float32", "--max-new-tokens", "48"]
    )
    llm, esamp = starter.start(arguments)
    try:
        if status := _show(llm, esamp, arguments):
            return status
    finally:
        starter.end(llm)
    print(f"\n{time.monotonic() - began:.0f} s in all, start-up of the engine included.")
    return 0


def _show(llm: LLM, esamp: ESampConsumer, arguments: Namespace) -> int:
    if status := starter.run(llm, esamp, arguments):
        return status
    compare(llm, Setting())
    if error := esamp.read_stats()["runtime"]["error"]:
        print(f"error: ESamp failed: {error}", file=sys.stderr)
        return 1
    llm.clear_consumers()
    steer(llm)
    colour(llm)
    return 0


def compare(llm: LLM, setting: Setting) -> None:
    """Choose beta on puzzles of the training split, and measure on the held-out ones."""
    print(f"\nDistinct valid answers to a puzzle in {setting.samples} samples")
    print(
        f"  temperature {setting.temperature}, top-p {setting.top_p}, min-p {setting.min_p}; "
        "sample i of a puzzle has the same seed with and without ESamp"
    )
    beta = _sweep(llm, setting)
    asked = chosen("held_out")
    without = sample(llm, asked, {"enabled": False}, setting)
    having = sample(llm, asked, {"beta": beta}, setting)
    difference, ratio = paired_bootstrap(without.found, having.found)
    print(f"\n{len(asked)} held-out puzzles, beta {beta}")
    print("  (95% intervals of a paired bootstrap over puzzles)")
    _print_arm("without ESamp", without)
    _print_arm("with ESamp", having)
    print(f"  {'difference':16} {difference}")
    print(f"  {'ratio':16} {ratio}")
    print(f"  {'verdict':16} {_verdict(difference.low, difference.high)}")


def steer(llm: LLM) -> None:
    """Steer stories from neutral openings, and print the share that turns happy, a bar each."""
    module = mood_module(llm)
    way = Way(module.best_layer, "all")
    print(f"\nStories made happy or sad: the mood vector at {way}")
    print(f"  {OPENINGS} neutral openings at each scale; the vector comes from 100 pairs of others")
    print(f"  scale  {'happy':{BAR + 6}}  sad  hero named again")
    for point in measure(llm, module, [way], OPENINGS, scales=SCALES):
        bar = "█" * round(BAR * point.happy)
        shares = f"{point.happy:4.0%} {point.sad:5.0%} {point.kept:9.0%}"
        print(f"  {point.scale:5.1f}  {bar:{BAR}} {shares}")


def colour(llm: LLM) -> None:
    """Score the tokens of two stories by a probe, and colour them."""
    probe, right = mood_probe(llm)
    llm.register_consumer(probe)
    print("\nWhat a probe for the mood sees in each token: green is happy, red is sad")
    print(f"  it is right for {right:.0%} of the tokens of stories that it did not learn from\n")
    console = Console(highlight=False, width=100)
    for story in tell(llm, mood_pair(Random(5))):
        console.print(_coloured(story))
        print(f"mean score {np.mean(story.scores):+.1f}\n")


def _coloured(story: ToldStory) -> Text:
    text = Text()
    for token, score in zip_longest(story.tokens, story.scores):
        strength = 0.0 if score is None else max(-1.0, min(1.0, score / STRONG))
        red, green = (int(40 + 160 * max(0.0, sign * strength)) for sign in (-1.0, 1.0))
        text.append(token, style=f"white on rgb({red},{green},40)" if abs(strength) > 0.1 else "")
    return text


def _sweep(llm: LLM, setting: Setting) -> float:
    """The beta that finds most on some puzzles of the training split; the smallest of equals."""
    asked = chosen("train", SWEEP_PUZZLES)
    print(f"\n{len(asked)} puzzles of the training split, to choose beta")
    _print_arm("without ESamp", sample(llm, asked, {"enabled": False}, setting))
    arms = {beta: sample(llm, asked, {"beta": beta}, setting) for beta in BETAS}
    for beta, arm in arms.items():
        _print_arm(f"beta {beta}", arm)
    return max(BETAS, key=lambda beta: float(arms[beta].found.mean()))


def _print_arm(name: str, arm: Arm) -> None:
    print(f"  {name:16} {arm.found.mean():.3f} found, {arm.valid.mean():.1%} of samples valid")


def _verdict(low: float, high: float) -> str:
    if low > 0:
        return "ESamp finds more here"
    return "ESamp finds fewer here" if high < 0 else "no difference is seen"


if __name__ == "__main__":
    sys.exit(main())
