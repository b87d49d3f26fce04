"""What `make demo` runs: the main job of the starter, then a measurement of what ESamp finds."""

from __future__ import annotations

import sys
import time

import starter
from demo.diversity import Arm, Setting, chosen, paired_bootstrap, sample
from tllm import LLM

BETAS = (0.1, 0.2, 0.4, 0.8)
SWEEP_PUZZLES = 20


def main() -> int:
    """The demo; 1 when ESamp learned nothing."""
    began = time.monotonic()
    arguments = starter.parse_arguments(
        ["--model-name", str(starter.DEMO_MODEL), "--dtype", "float32", "--max-new-tokens", "48"]
    )
    llm, esamp = starter.start(arguments)
    if status := starter.run(llm, esamp, arguments):
        return status
    compare(llm, Setting())
    if error := esamp.read_stats()["runtime"]["error"]:
        print(f"error: ESamp failed: {error}", file=sys.stderr)
        return 1
    print(f"\n{time.monotonic() - began:.0f} s in all, start-up of the engine included.")
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
