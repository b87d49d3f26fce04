"""The requests that both engines of a benchmark get."""

from itertools import pairwise

import pytest

from benchmarks.__main__ import check
from benchmarks.asked import asked
from benchmarks.workload import BENCHMARKS, Workload


def test_the_same_round_asks_the_same_and_another_round_does_not():
    work = Workload(prompts=4, ragged=True, arrivals=5.0)
    assert asked(work, 500, 3) == asked(work, 500, 3)
    assert asked(work, 500, 3) != asked(work, 500, 4)


def test_ragged_requests_have_a_quarter_of_the_most_at_least():
    found = asked(Workload(prompts=200, prompt_tokens=64, max_tokens=256, ragged=True), 500, 1)
    prompts = [len(each.prompt_token_ids) for each in found]
    answers = [each.max_tokens for each in found]
    assert 16 <= min(prompts) < 24 and 56 < max(prompts) <= 64
    assert 64 <= min(answers) < 80 and 240 < max(answers) <= 256
    assert {each.due for each in found} == {0.0}


def test_arrivals_are_a_poisson_process_of_the_rate():
    due = [each.due for each in asked(Workload(prompts=2001, arrivals=5.0), 500, 1)]
    assert due[0] == 0.0 and due == sorted(due)
    assert due[-1] == pytest.approx(400, rel=0.1)
    between = [after - before for before, after in pairwise(due)]
    assert sum(each > 0.2 for each in between) / 2000 == pytest.approx(0.368, abs=0.04)


def test_esamp_on_other_requests_shares_the_engines_of_esamp():
    for shape in ("7b", "0.5b"):
        named = [f"esamp-{each}-{shape}" for each in ("n1", "n64", "ragged", "poisson")]
        plain = BENCHMARKS[f"esamp-{shape}"].workload
        for work in (BENCHMARKS[name].workload for name in named):
            assert work.engine_arguments == plain.engine_arguments


@pytest.mark.parametrize("missing", ["rows_predicted", "candidates_guided", "steps_trained"])
def test_a_round_in_which_esamp_did_nothing_is_an_error(missing):
    counted = {"rows_predicted": 3, "candidates_guided": 5, "rows_trained": 3, "steps_trained": 2}
    result = {
        "name": "esamp-7b",
        "workload": {"variant": "esamp"},
        "counters": {"esamp": counted},
        "loaded": {"counters": {"esamp": counted | {missing: 0}}},
    }
    with pytest.raises(SystemExit, match="nothing was predicted, guided or trained"):
        check(result)
    check(result | {"loaded": {"counters": {"esamp": counted}}})
