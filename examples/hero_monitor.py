"""Stop a story when its hero changes: a monitor that fires at the name of somebody else.

    python examples/hero_monitor.py

The demo model's own states say whether a name is the one that the story began with. A probe is
fitted to the last tokens of openings of stories: those that end at another name than the hero's,
against those that end at the hero's name or at any other word. As a monitor it ends a sample at
the very token; what it says of stories that it has not seen is compared with their text.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.text import HEROES, hero, neutral_opening, story
from tllm import LLM, SamplingParams
from tllm.steering import fit_probe

STORIES, EXAMPLES, LAYER = 100, 200, 3
NAME = re.compile(rf"\b({'|'.join(HEROES)})\b")


def beginnings(llm: LLM, rng: Random, examples: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of stories up to where the hero has just changed, and up to other tokens."""
    tokenizer = llm.get_tokenizer()
    changed: list[list[int]] = []
    kept: list[list[int]] = []
    while len(changed) < examples:
        tokens = tokenizer.encode(story(rng).text)
        words = [tokenizer.decode([token]).strip() for token in tokens]
        names = [i for i, word in enumerate(words) if word in HEROES]
        others = [i for i in names if words[i] != words[names[0]]]
        same = [i for i in names[1:] if i not in others]
        rest = [i for i in range(names[0] + 1, len(tokens)) if i not in names]
        if others:
            changed.append(tokens[: others[0] + 1])
        kept += [tokens[: i + 1] for i in [*same[:1], *rng.sample(rest, 6)]]
    return changed, kept


def told_of(opening: str, text: str) -> str | None:
    """A story up to the first name of somebody else than its hero; None if there is none."""
    others = (found for found in NAME.finditer(text) if found[0] != hero(opening))
    return next((text[: found.end()] for found in others), None)


def main() -> None:
    """Fit the monitor, tell the same stories with it and without, and count where it stopped."""
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    changed, kept = beginnings(llm, Random(0), EXAMPLES)
    fitted = fit_probe(llm, changed, kept, layers=LAYER, max_false_positives=0.0)
    print(f"AUROC on stories held out: {fitted.auroc[LAYER]:.4f}; {fitted.chosen}")
    llm.steering.register_monitor("hero changed", fitted.condition)

    drawn = (neutral_opening(Random(seed)) for seed in range(10 * STORIES))
    openings = [each for each in drawn if len(NAME.findall(each)) == 1][:STORIES]
    told = []
    for stop_when in (None, "hero changed"):
        params = [
            SamplingParams(max_tokens=80, temperature=0.8, seed=seed, stop_when=stop_when)
            for seed in range(STORIES)
        ]
        outputs = llm.generate(openings, params, use_tqdm=False)
        told.append([output.outputs[0] for output in outputs])
    counted: Counter[str] = Counter()
    for opening, plain, watched in zip(openings, *told, strict=True):
        until = told_of(opening, plain.text)
        stopped = watched.stop_reason == "hero changed"
        if until is None:
            counted["the hero stays: " + ("stopped" if stopped else "told to its end")] += 1
        elif watched.text == until and stopped:
            counted["the hero changes: stopped at the other's name"] += 1
        else:
            counted[f"the hero changes: {'stopped elsewhere' if stopped else 'not stopped'}"] += 1
    for outcome, stories in sorted(counted.items()):
        print(f"{stories:4}  {outcome}")
    print(f"\nfor example: {openings[0]}{told[1][0].text}")
    print(f"without it:  {openings[0]}{told[0][0].text}")


if __name__ == "__main__":
    main()
