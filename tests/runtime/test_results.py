"""What consumers say of sequences that ended reaches whoever asks for it, once and whole."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tllm.answers import AnswerWriter, SharedFolder, decode
from tllm.ports import PerToken, RequestInfo, RequestResult
from tllm.runtime import results as module
from tllm.runtime.results import PENDING, Results, sendable
from tllm.runtime.slots import Slots


def info(prompt_id: str = "prompt", sample: int = 0) -> RequestInfo:
    return RequestInfo(prompt_id, prompt_id, sample, 2, slot=sample, prompt_len=3)


def results_of(kept: dict[str, Any], **options: Any) -> Results:
    """Results of one sample, by consumer."""
    made = Results(SimpleNamespace(call=None), {}, Slots(2), **{"payloads": True, **options})
    for name, result in kept.items():
        made._keep(info(), name, result, None)
    return made


def popped(results: Results, wait_s: float = 0.0) -> dict[str, Any]:
    return results.pop(["prompt"], wait_s).get("prompt", {}).get(0, {})


class LateFuture(Future):
    """Is done by a writer's thread just after it was looked at."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def done(self) -> bool:
        before = super().done()
        self._looks -= 1
        if not self._looks:
            writer = threading.Thread(target=self.set_result, args=["written"])
            writer.start()
            writer.join()
        return before


@pytest.mark.parametrize("looks", range(1, 6))
def test_a_result_that_is_made_while_it_is_looked_at_is_not_lost(looks):
    results = results_of({"mine": LateFuture(looks), "other": 5})
    found = []
    for _ in range(7):
        found.append(popped(results).get("mine"))
    said = [each for each in found if each not in (None, PENDING)]
    assert said == [{"status": "ok", "error": None, "payload": "written"}]


def test_each_is_given_once_and_what_is_pending_again():
    promised: Future = Future()
    results = results_of({"now": 1, "later": promised})
    assert popped(results) == {
        "now": {"status": "ok", "error": None, "payload": 1},
        "later": PENDING,
    }
    assert popped(results) == {"later": PENDING}
    promised.set_result(RequestResult(2, "partial_error", "half"))
    assert popped(results) == {"later": {"status": "partial_error", "error": "half", "payload": 2}}
    assert popped(results) == {}


def test_a_cancelled_or_broken_promise_is_an_error_of_its_own():
    cancelled, broken, good = Future(), Future(), Future()
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    broken.set_exception(KeyError("gone"))
    good.set_result("here")
    found = popped(results_of({"a": cancelled, "b": broken, "c": good}), wait_s=0.1)
    assert found["a"]["status"] == found["b"]["status"] == "error"
    assert found["a"]["error"].startswith("CancelledError")
    assert found["b"]["error"] == "KeyError: 'gone'"
    assert found["c"] == {"status": "ok", "error": None, "payload": "here"}


def test_an_error_whose_message_raises_is_told():
    class WordlessError(Exception):
        def __str__(self):
            return 7

    promise = Future()
    promise.set_exception(WordlessError())
    results = results_of({"mine": promise})
    said = results.pop(["prompt"], 0)["prompt"][0]["mine"]
    assert said["error"] == "WordlessError, whose message raised TypeError"


def test_a_payload_that_cannot_be_pickled_is_an_error_of_its_own():
    class Sneaky:
        def __reduce__(self):
            raise RecursionError("too deep")

    found = results_of({"a": threading.Lock(), "b": Sneaky(), "c": np.arange(3)}).pop(["prompt"], 0)
    with pytest.raises(TypeError):
        pickle.dumps(found)
    sent = pickle.loads(pickle.dumps(sendable(found), protocol=5))["prompt"][0]
    assert "cannot be sent to the user's process: TypeError" in sent["a"]["error"]
    assert "RecursionError: too deep" in sent["b"]["error"]
    assert sent["c"]["payload"].tolist() == [0, 1, 2] and sent["c"]["status"] == "ok"


class NeverMadeAgain:
    """Can be pickled, and nothing else."""

    def __reduce__(self):
        return int, ("seven",)


@pytest.mark.parametrize("shared", [False, True])
def test_a_payload_that_cannot_be_made_again_is_an_error_of_its_own(shared):
    rows = np.arange(2**19, dtype=np.float32)
    folder = SharedFolder()
    made = {
        "a": NeverMadeAgain(),
        "b": {"rows": rows, "first": 1},
        "c": PerToken(np.arange(3), rows[:3]),
    }
    found = results_of(made).pop(["prompt"], 0)
    encoded = AnswerWriter().encode(("ok", sendable(found)), folder.token if shared else "")
    sent = decode(encoded)[1]["prompt"][0]
    assert sent["a"]["payload"] is None and sent["a"]["status"] == "error"
    assert "cannot be read in the user's process: ValueError: invalid literal" in sent["a"]["error"]
    assert sent["b"]["status"] == "ok" and np.array_equal(sent["b"]["payload"]["rows"], rows)
    assert sent["b"]["payload"]["rows"].flags.writeable
    assert sent["c"]["payload"].values.tolist() == [0, 1, 2]


def test_rows_of_tokens_ahead_of_the_end_are_cut_and_a_cut_that_fails_is_one_error():
    class Broken(PerToken):
        def up_to(self, num_tokens):
            raise ZeroDivisionError("mine")

    given = np.arange(6, dtype=np.int32), np.arange(6)
    results = Results(SimpleNamespace(call=None), {}, Slots(2), payloads=True)
    for name, result in (("good", PerToken(*given)), ("bad", Broken(*given))):
        results._keep(info(), name, result, None, 4)
    found = popped(results)
    assert found["good"]["payload"].positions.tolist() == [0, 1, 2]
    assert found["bad"] == {"status": "error", "error": "ZeroDivisionError: mine", "payload": None}


@pytest.mark.parametrize(
    ("positions", "values", "message"),
    [
        ([0, 1, 2], np.arange(5), r"positions of shape \(3,\).*5 values"),
        (np.zeros((2, 2), np.int32), np.arange(2), r"positions of shape \(2, 2\).*2 values"),
        ([0, 1], 3.0, r"positions of shape \(2,\).*and float;"),
        ([0.5, 1.0], np.arange(2), "float64"),
    ],
)
def test_values_of_tokens_that_do_not_fit_their_positions_are_refused(positions, values, message):
    with pytest.raises(ValueError, match=message):
        PerToken(positions, values)


def test_a_result_has_one_of_the_statuses():
    with pytest.raises(ValueError, match=r"status='fine'.*ok, partial_error, error"):
        RequestResult(1, "fine", "all went well")


def test_later_ranks_say_only_how_it_went():
    results = Results(SimpleNamespace(call=None), {}, Slots(2), payloads=False)
    results._keep(info(), "mine", [1, 2, 3], "2 rows")
    assert popped(results)["mine"] == {
        "status": "partial_error",
        "error": "2 rows",
        "payload": None,
    }


def test_results_nobody_comes_for_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    results = Results(SimpleNamespace(call=None), {}, Slots(2), payloads=True)
    for prompt_id in "abc":
        results._keep(info(prompt_id), "mine", 1, None)
    assert results.forgotten == 1
    assert sorted(results.pop("abc", 0)) == ["b", "c"]


def test_what_begins_after_its_prompt_was_given_up_is_not_kept():
    """Of several samples some may wait in the engine, whose user has left."""
    results = results_of({"mine": 1})
    results.discard(["prompt"])
    results._keep(info(sample=1), "mine", 2, None)
    assert results.num_kept == 0
    results._keep(info("another"), "mine", 3, None)
    assert results.num_kept == 1


def test_only_so_many_prompts_that_were_given_up_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "_MAX_GIVEN_UP", 2)
    results = results_of({})
    results.discard(["a", "b", "c"])
    for name in ("a", "b", "c"):
        results._keep(info(name), "mine", 1, None)
    assert {*results.pop(["a", "b", "c"], 0.0)} == {"a"}
