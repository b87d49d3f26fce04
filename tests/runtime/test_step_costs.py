"""What our calls do in a steady decode step, as counts that do not depend on the machine."""

import pytest
import torch

from benchmarks.host import CASES, Steady, counted

NOTHING = {"uploads": 0, "operators": 0}
AT_MOST = {
    "idle": {"calls": 5, **NOTHING},
    "steered, one way": {"calls": 13, **NOTHING},
    "steered, 128 ways": {"calls": 13, **NOTHING},
    "steered by position": {"calls": 13, **NOTHING},
    "captured, one layer": {"calls": 29, **NOTHING},
    "captured, all layers": {"calls": 29, **NOTHING},
    # Two of the calls find inference mode on, in the place of twelve of torch's.
    "captured to memory": {"calls": 38, "uploads": 0, "operators": 1},
    "captured and steered": {"calls": 29, **NOTHING},
    # Two of the operators find out whether what is written are numbers.
    "written by a consumer": {"calls": 40, "uploads": 0, "operators": 4},
}


def steady(case, layers, batch):
    """What a step does that is like the one before."""
    with torch.inference_mode():
        found = Steady(case, layers=layers, batch=batch)
        for _ in range(3):
            found.step(found.counts)
        return counted(found)


def test_every_case_of_the_benchmark_has_a_budget():
    assert set(CASES) == set(AT_MOST)


@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_costs_the_same_whatever_the_layers_and_sequences(case):
    found = steady(case, 4, 8)
    assert steady(case, 28, 8) == found
    assert steady(case, 4, 64) == found
    assert all(found[name] <= most for name, most in AT_MOST[case].items()), found
