"""How requests are steered in the benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.workload import SHAPES, Benchmark


def steering_for(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Keywords of `SamplingParams`, one for each configuration; every vector is its own."""
    steered, shape = benchmark.steered, SHAPES[benchmark.shape]
    assert steered is not None
    middle = shape.layers // 2
    layers = (
        range(shape.layers) if steered.layers is None else range(middle, middle + steered.layers)
    )
    generator = np.random.default_rng(0)

    def operation() -> dict[str, Any]:
        vector = generator.standard_normal(shape.hidden, dtype=np.float32)
        return {"vector": 0.01 * vector, "method": steered.method}

    def condition() -> dict[str, Any]:
        vector = generator.standard_normal(shape.hidden, dtype=np.float32)
        probe = {"hook": "pre_attn", "layer": 0, "vector": vector}
        return {"when": {"probe": probe, "above": 0.0, "name": "gate"}} if steered.gated else {}

    conditions = [condition() for _ in range(steered.configurations)]
    return [
        {
            "steering_vectors": {
                "post_block": {
                    layer: [operation() | when for _ in range(steered.vectors)] for layer in layers
                }
            }
        }
        for when in conditions
    ]
