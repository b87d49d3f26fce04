"""Results of pipeline stages become one, or the user is told."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.outputs import CompletionOutput

from tllm.client.request import Prepared
from tllm.client.results import Collected, Samples, attach_results
from tllm.ports import Payload, PerToken


@dataclass
class Sum(Payload):
    value: int

    def joined(self, other):
        return Sum(self.value + other.value)


def scores(*values):
    return PerToken(np.arange(len(values), dtype=np.int32), np.array(values))


def joined(*payloads):
    """The result of a sequence whose stages returned these."""
    collected = Collected()
    for worker, payload in enumerate(payloads):
        said = {"status": "ok", "error": None, "payload": payload}
        collected.add(worker, {0: {"mine": said}})
    return collected.joined()[0]["mine"]


def ended(*lengths, captures=(), named=()):
    """A request whose samples have as many tokens."""
    samples = Samples()
    samples.tokens = {index: [1] * length for index, length in enumerate(lengths)}
    options = {name: {} for name in captures}
    return Prepared(None, "prompt", options, named=frozenset(named), samples=samples)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (None, 5, 5),
        (5, None, 5),
        (5, 5, 5),
        (Sum(2), Sum(3), Sum(5)),
        ({0: 1, "rows": 7}, {1: 2, "rows": 7}, {0: 1, 1: 2, "rows": 7}),
        ({0: {"a": Sum(1)}}, {0: {"a": Sum(2), "b": 3}}, {0: {"a": Sum(3), "b": 3}}),
    ],
)
def test_results_of_stages_are_joined(first, second, both):
    result = joined(first, second)
    assert (result.status, result.error, result.payload) == ("ok", None, both)


@pytest.mark.parametrize(
    ("first", "second"),
    [(5, 6), ({"rows": 5}, {"rows": 6}), (scores(1, 2), scores(1, 3)), ([1], {"rows": 1})],
)
def test_results_that_differ_and_cannot_be_joined_are_not_lost_in_silence(first, second):
    result = joined(first, second)
    assert result.status == "partial_error"
    assert "pipeline stages returned different results" in result.error
    assert type(result.payload) is type(first)


def test_equal_scores_are_one():
    assert joined(scores(1, 2), scores(1, 2)).status == "ok"


class Broken(Payload):
    """Raises in the user's process."""

    def joined(self, other):
        raise KeyError("joined")

    def with_prompt_of(self, first):
        raise ZeroDivisionError("first")

    def up_to(self, num_tokens):
        raise IndexError("cut")


def test_a_payload_that_cannot_be_joined_is_an_error_of_its_own():
    result = joined(Broken(), Broken())
    assert (result.status, result.payload) == ("error", None)
    assert result.error == "its result cannot be given: KeyError: 'joined'"


def test_a_payload_that_raises_in_the_users_process_is_an_error_of_its_own():
    said = [{"status": "ok", "error": None, "payload": payload} for payload in (Broken(), 7)]
    collected = Collected()
    for sample in (0, 1):
        collected.add(0, {sample: dict(zip(("broken", "good"), said, strict=True))})
    samples = [SimpleNamespace(index=i) for i in (0, 1)]
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=samples)
    attach_results(output, ended(3, 3), collected.joined(), {})
    for sample, why in zip(samples, ("IndexError: cut", "ZeroDivisionError: first"), strict=True):
        broken, good = sample.consumer_results["broken"], sample.consumer_results["good"]
        assert (broken.status, broken.payload) == ("error", None)
        assert broken.error == f"its result cannot be given: {why}"
        assert (good.status, good.payload) == ("ok", 7)


@pytest.mark.parametrize(
    ("finish_reason", "generated", "why"),
    [
        ("abort", 0, "the request was aborted before any of it was computed"),
        ("abort", 2, "the workers gave no result"),
        ("length", 1, "the workers gave no result"),
    ],
)
def test_a_capture_of_which_there_is_nothing_says_why(finish_reason, generated, why):
    """A request may be aborted while it waits: no worker has heard of it."""
    sample = CompletionOutput(0, "", [1] * generated, None, None, finish_reason=finish_reason)
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[sample])
    attach_results(output, ended(generated, captures=["memory"]), {}, {})
    result = sample.capture_results["memory"]
    assert (result.status, result.error, result.payload) == ("error", why, None)


@pytest.mark.parametrize(("reason", "generated", "heard"), [("abort", 0, True), ("stop", 1, False)])
def test_a_named_consumer_is_told_of_where_nothing_was_computed(reason, generated, heard):
    sample = CompletionOutput(0, "", [1] * generated, None, None, finish_reason=reason)
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[sample])
    attach_results(output, ended(generated, named=["probe"]), {}, {})
    said = {name: (each.status, each.error) for name, each in sample.consumer_results.items()}
    why = "the request was aborted before its first token, and the consumer had no result of it"
    assert said == ({"probe": ("error", why)} if heard else {})
