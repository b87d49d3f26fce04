"""Every way of steering, with one direction of the demo model: what it does to the same opening.

    python examples/steering_methods.py

The direction leads from happy to sad, as `tllm.steering.extract` finds it. Each method takes it at
one layer, for the generated tokens only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.text import mood
from tllm import LLM, SamplingParams
from tllm.spec.methods import METHODS
from tllm.steering import extract

LAYER = 3
WORDS = [("happy", "sad"), ("cheerful", "gloomy"), ("joyful", "lonely"), ("glad", "unhappy")]
NAMES = ["Anna", "Ben", "Clara", "Felix", "Mia", "Leo"]
GIVEN = {
    "add": {"scale": 9.0},
    "norm_match": {"scale": 0.7},
    "clamp": {"min": 6.0},
    "ablate": {},
    "project": {"value": 9.0},
    "multiply": {"factor": 3.0},
    "rotate": {"degrees": 0.0},
    "affine": {"strength": 0.8},
    "scale_dimensions": {"scale": 1.5},
    "low_rank": {},
    "sae_features": {},
    "k_steering": {"alpha": 9.0},
}


def main() -> None:
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    stories = [
        [f"This is a {w} story about {name}." for w in words for name in NAMES]
        for words in zip(*WORDS, strict=True)
    ]
    happy, sad = stories
    module = extract(llm, sad, happy, layers=LAYER)
    direction = module.vectors["post_block"][LAYER]["vector"]
    unit = direction / np.linalg.norm(direction)
    strongest = np.argsort(np.abs(direction))[-16:]
    mask = np.zeros_like(direction)
    mask[strongest] = 1.0
    arrays = {
        "rotate": {"plane": [direction, np.roll(direction, 1)]},
        "affine": {"shift": 9.0 * unit},
        "scale_dimensions": {"mask": mask},
        "low_rank": {"rotation": [unit], "weight": [0.0 * unit], "bias": [9.0]},
        "sae_features": {"encoder": [unit], "decoder": [unit], "value": [9.0]},
        # A classifier of one unit, which is always active.
        "k_steering": {
            "weight1": [unit],
            "bias1": [100.0],
            "last_weight": [[1.0]],
            "target": [0],
        },
    }
    opening = "One day Leo went to the lake."
    plain = {"max_tokens": 48, "temperature": 0}
    asked = {"no steering": SamplingParams(**plain)}
    for method, given in GIVEN.items():
        entry = {**arrays.get(method, {"vector": direction}), "method": method, **given}
        asked[f"{method}: {METHODS[method].formula}"] = SamplingParams(
            **plain, decode_steering_vectors={"post_block": {LAYER: entry}}
        )
    outputs = llm.generate([opening] * len(asked), list(asked.values()), use_tqdm=False)
    for name, output in zip(asked, outputs, strict=True):
        text = output.outputs[0].text
        print(f"{name}\n  [{mood(text)}] {opening}{text}\n")


if __name__ == "__main__":
    main()
