"""Which layer and position carry the mood of a story: activation patching on the demo model.

    python examples/mood_patching.py
    python examples/mood_patching.py --pairs 40 --plot doc/guides/patching_mood.png

Two openings differ in one word, which makes the story happy or sad; both go on with the hero's
name. Of the happy run one row at a time is put into the sad one: by how much does that bring back
that the hero smiles, and does not cry?
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.text import hero, mood_pair
from tllm import LLM

ANSWERS = " smiled", " cried"


def first_difference(tokenizer: Any, one: str, other: str) -> int:
    """The first position at which the tokens of two texts differ."""
    tokens = zip(tokenizer.encode(one), tokenizer.encode(other), strict=True)
    return next(i for i, (left, right) in enumerate(tokens) if left != right)


def main() -> None:
    """Sweep some pairs of openings, and print the share that each kind of token recovers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "demo" / "model"))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--plot", type=Path, help="draw the first pair, as a PNG")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**28, seed=0
    )
    drawn = Random(0)
    pairs = [mood_pair(drawn) for _ in range(arguments.pairs)]
    happy, sad = ([f"{text} {hero(text)}" for text in texts] for texts in zip(*pairs, strict=True))
    sweep = llm.patching.sweep(
        happy, sad, hooks="post_block", metric=["recovered", "logit_diff"], answers=ANSWERS
    )
    for name, values in (("happy", sweep.clean), ("sad", sweep.corrupt)):
        print(
            f"logit of 'smiled' above 'cried', {name} openings: {values['logit_diff'].mean():.2f}"
        )
    print("share of it that a row of the happy run brings back, by layer:")
    print(f"{'layer':>7} {'mood word':>10} {'between':>10} {'last token':>10}")
    last = {row["pair"]: row["position"] for row in sweep.rows}
    changed = [
        first_difference(llm.get_tokenizer(), *pair) for pair in zip(happy, sad, strict=True)
    ]
    for layer in sweep.layers:
        shares: dict[str, list[float]] = {"mood word": [], "between": [], "last token": []}
        for row in sweep.rows:
            position, word = row["position"], changed[row["pair"]]
            if row["layer"] == layer and position >= word:
                ends = {word: "mood word", last[row["pair"]]: "last token"}
                shares[ends.get(position, "between")].append(row["recovered"])
        print(f"{layer:7} " + " ".join(f"{np.mean(each):10.2f}" for each in shares.values()))
    if arguments.plot is not None:
        tokens = [llm.get_tokenizer().decode([token]) for token in sweep.tokens[0]]
        labels = [*tokens, *[""] * (len(sweep.positions) - len(tokens))]
        sweep.heatmap(arguments.plot, pair=0, labels=labels)
    best = sweep.top(1)[0]
    print(f"the most: pair {best['pair']}, layer {best['layer']}, position {best['position']}")


if __name__ == "__main__":
    main()
