"""ESamp in an engine, with the parameters that a first user gives it."""

import re

import pytest
from engine.asking import generate, prompts_of, sampled

from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig


def test_requests_that_filter_nothing_are_guided(llm):
    """Neither top-k, top-p nor min-p: every row has the whole vocabulary as candidates."""
    prompts, params = prompts_of([5, 9]), sampled(12, n=4, temperature=0.8)
    esamp = llm.register_consumer(ESampConsumer(ESampConsumerConfig(width=16, rank=8, beta=2.0)))
    generate(llm, prompts, params)
    stats = esamp.read_stats()
    assert stats["rows_trained"] > 0
    # Every decode row, 11 of each sample, and nearly every token of the vocabulary.
    assert stats["candidates_seen"] == 8 * 11 * 256
    assert stats["candidates_changed"] > 0.9 * stats["candidates_seen"]


def test_a_group_that_persists_is_forgotten_when_its_user_says_so(llm):
    config = ESampConsumerConfig(width=16, rank=8, slots=1, on_full="unguided", persist=True)
    esamp = llm.register_consumer(ESampConsumer(config))
    params = sampled(4, temperature=0.8, consumers={"esamp": {"group": "x"}})
    generate(llm, prompts_of([5]), params)
    assert esamp.read_stats()["slots_in_use"] == 1
    [refused] = generate(llm, prompts_of([5]), sampled(4, temperature=0.8))
    assert "until they are forgotten (forget_group)" in refused.consumer_results["esamp"].error
    for name in (["x"], "", None):
        with pytest.raises(ValueError, match=rf"given {re.escape(repr(name))}; give the name of"):
            llm.call_consumer("esamp", "forget_group", name)
    for name, known in (("y", False), ("x", True), ("x", False)):
        assert llm.call_consumer("esamp", "forget_group", name) == [known]
    assert esamp.read_stats()["slots_in_use"] == 0
    [guided] = generate(llm, prompts_of([5]), sampled(4, temperature=0.8))
    assert "esamp" not in guided.consumer_results
    llm.unregister_consumer(esamp)
    with pytest.raises(RuntimeError, match=r"not registered.*llm\.register_consumer"):
        esamp.read_stats()
