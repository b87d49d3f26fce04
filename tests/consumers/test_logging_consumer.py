from __future__ import annotations

import logging
from typing import Any

import pytest

from tllm.consumers.logging import LoggingConsumer

PROMPTS = [[5, 6, 7, 8], list(range(2, 72)), [9, 10, 11]]


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    from tllm import SamplingParams

    params = SamplingParams(ignore_eos=True, detokenize=False, **{"max_tokens": 6, **sampling})
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


@pytest.mark.parametrize("window", ["background", "out_of_band"])
def test_norms_and_counts_are_those_of_transformers(
    llm: Any, with_consumer: Any, reference: Any, window: Any
) -> None:
    consumer = with_consumer(LoggingConsumer(layers="0-1 -1", window=window))
    outputs = generate(llm, PROMPTS, n=2, temperature=1.0)
    stats = consumer.read_stats()["layers"]
    assert list(stats) == [0, 1, -1]
    for layer, index in ((0, 0), (1, 1), (-1, 3)):
        prefill, decode = [], []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            for sample in output.outputs:
                norms = reference([*prompt, *sample.token_ids])[index].norm(dim=-1).tolist()
                prefill += norms[: len(prompt)]
                decode += norms[len(prompt) : -1]
        for phase, norms in (("prefill", prefill), ("decode", decode)):
            found = stats[layer][phase]
            assert found["rows"] == len(norms)
            assert found["mean_norm"] == pytest.approx(sum(norms) / len(norms), rel=2e-5)
            assert found["max_norm"] == pytest.approx(max(norms), rel=2e-5)


def test_a_point_without_layers_is_counted_under_none(llm: Any, with_consumer: Any) -> None:
    consumer = with_consumer(LoggingConsumer(site="lm_head_in"))
    generate(llm, PROMPTS, temperature=0)
    assert consumer.read_stats()["layers"][None]["prefill"]["rows"] == sum(map(len, PROMPTS))


def test_a_line_is_logged_every_n_steps(
    llm: Any, with_consumer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with_consumer(LoggingConsumer(layers=2, every_n_steps=4))
    with caplog.at_level(logging.INFO, logger="tllm.consumers.logging"):
        generate(llm, PROMPTS[:1], temperature=0, max_tokens=13)
        llm.synchronize()
    lines = [record.getMessage() for record in caplog.records if "mean norm" in record.message]
    decode = [line for line in lines if "layer 2 decode" in line]
    assert len(decode) == 3
    assert "layer 2 prefill: 4 rows" in lines[0]


def test_a_second_one_at_another_site_has_its_own_name(llm: Any, with_consumer: Any) -> None:
    first = with_consumer(LoggingConsumer())
    second = with_consumer(LoggingConsumer(site="mlp_output", consumer_id="mlp"))
    generate(llm, PROMPTS, temperature=0)
    a, b = (c.read_stats()["layers"][-1]["prefill"] for c in (first, second))
    assert a["rows"] == b["rows"]
    assert a["mean_norm"] != b["mean_norm"]


def test_layers_of_several_pipeline_stages_are_merged_in_the_order_asked() -> None:
    consumer = LoggingConsumer(layers=[3, 0])
    figures = {"decode": {"rows": 1, "mean_norm": 1.0, "max_norm": 1.0}}
    merged = consumer.merge_stats([{"layers": {0: figures}}, {"layers": {3: figures}}])
    assert list(merged["layers"]) == [3, 0]


@pytest.mark.parametrize(
    ("given", "layers"),
    [(7, (7,)), ("7", (7,)), ("0-3 12 -1", (0, 1, 2, 3, 12, -1)), ([2, -2, 2], (2, -2))],
)
def test_each_layer_has_a_flow(given: Any, layers: tuple[int, ...]) -> None:
    read = [flow.places[0][1] for flow in LoggingConsumer(given).flows()]
    assert tuple(read) == layers


def test_bad_arguments_are_refused_with_the_field_and_what_is_allowed() -> None:
    for arguments, message in (
        ({"layers": "all"}, "layers: which layers all are is not known without the model"),
        ({"layers": "deep"}, "layers: 'deep' is not a layer; give 'all'"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "5-3"}, "layers: the range 5-3 has no layers"),
        ({"site": "middle"}, "unknown hook point 'middle'"),
        ({"every_n_steps": -1}, "every_n_steps=-1 must be 0"),
        ({"every_n_steps": "often"}, "every_n_steps='often' is not a whole number"),
        ({"window": "same_step"}, "choose one of background, out_of_band"),
        ({"level": "loud"}, "choose one of debug, info, warning"),
    ):
        with pytest.raises(ValueError, match=message):
            LoggingConsumer(**arguments)  # type: ignore[arg-type]


def test_an_object_that_no_engine_has_says_so() -> None:
    """It said that there were no rows."""
    with pytest.raises(RuntimeError, match=r"'logging' is not registered.*llm\.register_consumer"):
        LoggingConsumer().read_stats()
