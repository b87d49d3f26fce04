"""ESamp in an engine, with the parameters that a first user gives it."""

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
