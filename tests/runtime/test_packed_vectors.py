"""Vectors on their way to the workers: what arrives is what was sent, as the model has its rows."""

import pickle

import numpy as np
import pytest
import torch

from tllm.runtime.packed_vectors import PackedVectors
from tllm.spec.conditions import PROBE

WIDTH = 12


def _drawn(number: int, rows: int | None = None, width: int = WIDTH) -> np.ndarray:
    shape = (width,) if rows is None else (rows, width)
    return np.random.default_rng(number).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_vectors_arrive_in_the_models_dtype(count, dtype):
    vectors = {f"v{number}": _drawn(number) for number in range(count)}
    for vector in vectors.values():
        vector.setflags(write=False)
    packed = pickle.loads(pickle.dumps(PackedVectors.of(vectors, dtype)))
    assert [*packed] == [*packed.digests] == [*vectors]
    assert not packed.others and packed.rows.dtype == getattr(torch, dtype)
    for row, vector in zip(packed.rows, vectors.values(), strict=True):
        assert torch.equal(row, torch.tensor(vector).to(row.dtype))


def test_probes_and_what_has_another_shape_keep_their_numbers():
    others = {
        f"{PROBE}p": _drawn(1),
        "several": _drawn(2, rows=3),
        "narrow": _drawn(3, width=WIDTH - 1),
    }
    vectors = {f"{PROBE}q": _drawn(4), "first": _drawn(5), **others, "last": _drawn(6)}
    packed = pickle.loads(pickle.dumps(PackedVectors.of(vectors, "bfloat16")))
    assert packed.digests == ("first", "last") and {*packed} == vectors.keys()
    assert packed.others.keys() == others.keys() | {f"{PROBE}q"}
    for digest, array in packed.others.items():
        assert array.dtype == np.float32 and (array == vectors[digest]).all()
