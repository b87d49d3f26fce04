"""Cheer up only the stories that turn sad: a probe judges each token, and a vector follows it.

    python examples/gated_mood.py

The probe tells the tokens of happy stories from those of sad ones (a linear discriminant of the
last layer's states); where it says sad, the mood vector is added in the same pass. Stories that are
happy anyway are left as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.moods import PROBED_LAYER, mood_discriminant, mood_module
from demo.text import mood, neutral_opening
from tllm import LLM, SamplingParams

STORIES, SCALE = 100, 1.0


def main() -> None:
    """Tell the same stories unsteered, always steered, and steered where they are sad."""
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    entry = mood_module(llm).scaled(SCALE).vectors["post_block"][PROBED_LAYER]
    weight, bias, right = mood_discriminant(llm)
    print(f"the probe is right about {right:.0%} of the tokens of stories that it has not seen")
    sad = {
        "probe": {"hook": "post_block", "layer": PROBED_LAYER, "vector": weight, "bias": bias},
        "below": 0.0,
        "name": "sad",
    }
    openings = [neutral_opening(Random(seed)) for seed in range(STORIES)]
    ways: dict[str, dict[str, Any]] = {
        "unsteered": {},
        "always": {"decode_steering_vectors": {"post_block": {PROBED_LAYER: entry}}},
        "where sad": {
            "decode_steering_vectors": {"post_block": {PROBED_LAYER: {**entry, "when": sad}}}
        },
    }
    told = {}
    for way, steering in ways.items():
        params = [
            SamplingParams(max_tokens=48, temperature=0.8, seed=seed, **steering)
            for seed in range(STORIES)
        ]
        told[way] = [output.outputs[0] for output in llm.generate(openings, params, use_tqdm=False)]
    moods = {way: [mood(story.text) for story in stories] for way, stories in told.items()}
    print("way        happy   sad   happy stories left as they were")
    for way, found in moods.items():
        happy = [i for i, was in enumerate(moods["unsteered"]) if was == "happy"]
        same = sum(told[way][i].text == told["unsteered"][i].text for i in happy) / len(happy)
        shares = f"{found.count('happy') / STORIES:6.0%}{found.count('sad') / STORIES:6.0%}"
        print(f"{way:10}{shares}{same:8.0%}")
    signals = [story.signals["sad"] for story in told["where sad"]]
    judged = sum(len(signal.positions) for signal in signals)
    fired = sum(len(signal.fired) for signal in signals)
    print(f"of {judged} generated tokens, {fired} were steered")


if __name__ == "__main__":
    main()
