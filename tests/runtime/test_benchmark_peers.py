"""What peers are asked, and how what they answer is judged."""

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.peers.__main__ import table
from benchmarks.peers.environment import ENVIRONMENTS, run
from benchmarks.peers.model import Reference, compare, save_model
from benchmarks.peers.peer_process import PEERS
from benchmarks.peers.work import SIZES

SMALL = SIZES["small"]
WORKS = SMALL.works


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What right answers are."""
    return Reference(save_model(tmp_path_factory.mktemp("model"), SMALL))


def test_every_way_of_steering_changes_the_answers(reference):
    for work in WORKS:
        if work.doing == "steer":
            work = replace(work, prompts=4, max_tokens=4)
            plain = reference.answer(replace(work, layers=0), 1)
            assert compare(reference.answer(work, 1), plain) != "equal", work.name


def test_the_reference_steers_after_each_layer_and_with_each_prompts_vectors(reference):
    many = replace(WORKS[3], prompts=3, max_tokens=2)
    together = reference.answer(many, 1)
    one = replace(many, configurations=1)
    assert reference.answer(one, 1)[0] == together[0]
    assert (many.vectors(0, 1) != many.vectors(1, 1)).all()
    assert (one.vectors(0, 1) == one.vectors(1, 2)).all()
    fresh = replace(many, fresh=True)
    assert (fresh.vectors(0, 1) != fresh.vectors(0, 2)).all()


def test_answers_are_equal_only_where_they_are():
    assert compare([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == "equal"
    assert (
        compare([[1, 2], [3, 5]], [[1, 2], [3, 4]]) == "1 of 2 answers equal, 2 of the first tokens"
    )
    assert compare([[1.0, 2.0]], [[1.0, 2.00001]]) == "equal"
    assert compare([[1.0, 2.0]], [[1.0, 2.1]]).startswith("differs by 0.1")
    assert compare([[1.0]], [[1.0, 2.0]]) == "shape [1, 1] where [1, 2] was asked"


def test_a_peer_that_cannot_be_installed_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="built from its repository"):
        ENVIRONMENTS["EasySteer"].python("EasySteer", tmp_path)
    nowhere = ["--no-index", "-d", str(tmp_path), "vllm-lens==1.3.0"]
    with pytest.raises(
        RuntimeError, match=r"No matching distribution found for vllm-lens==1\.3\.0"
    ):
        run([sys.executable, "-m", "pip", "download", *nowhere])
    assert set(PEERS) == set(ENVIRONMENTS) - {"EasySteer"}


def test_the_table_says_what_is_not_offered_and_what_is_wrong():
    cell = {"ratio": 0.5, "ratios": [0.4, 0.6], "answers": "equal"}
    wrong = cell | {"answers": "1 of 8 answers equal"}
    shown = table(
        {
            "one": {"plain": cell, "steer 1 layer": wrong},
            "two": {"plain": cell, "skipped": "KeyError: 3"},
            "three": {"skipped": "no"},
            "four": {"skipped": "later", "versions": {"torch": "2"}},
        },
        [work.name for work in WORKS],
    )
    rows = {line.split("|")[1].strip(): line for line in shown.splitlines() if "|" in line}
    assert "0.50 [0.40, 0.60] | 0.50 [0.40, 0.60], 1 of 8 answers equal | not" in rows["one"]
    assert "| 0.50 [0.40, 0.60] | failed |" in rows["two"]
    assert not {"three", "four"} & rows.keys()
    assert shown.endswith("\nthree: no\n\nfour: later")


def test_only_the_first_prompts_of_a_large_model_are_compared(reference):
    work = replace(WORKS[-2], prompts=4, prompt_tokens=5)
    few = reference.answer(replace(work, checked=2), 1)
    assert compare(reference.answer(work, 1)[:2], few) == "equal"
    for size in SIZES.values():
        assert {each.hidden for each in size.works} == {size.shape.hidden}
        assert size.positions <= 4096


def test_particles_are_fed_what_parts_them():
    work = WORKS[-1]
    fed = work.fed(1348, 2)
    assert len({each[0] for each in fed}) == work.prompts
    assert fed == work.fed(1348, 2) != work.fed(1348, 3)
    assert torch.tensor(fed).shape == (work.prompts, work.steps)
