"""Patching as it is written: what does not need an engine."""

import numpy as np

from tllm.spec.patching import noise_rows


def test_noise_of_a_position_hangs_on_the_seed_and_on_it_alone():
    """Negative positions too, which are far from 0 as whole numbers without a sign."""
    positions = [-3, -2, -1, 0, 1, 2]
    for seed in (0, 7, 2**63 - 1):
        rows = noise_rows(1.0, seed, positions, 16)
        assert len(np.unique(rows, axis=0)) == len(positions)
        again = noise_rows(1.0, seed, positions[::-1], 16)[::-1]
        np.testing.assert_array_equal(rows, again)
    assert not np.array_equal(noise_rows(1.0, 1, [-1], 16), noise_rows(1.0, 2, [-1], 16))
