"""tLLM against plain `transformers`: every family, hook point and layer, in mixed batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tllm.verify.batches import mixed_batch, patched_batch, steered_batch
from tllm.verify.steered import PHASES
from tllm.verify.tolerance import Tolerance

from .differential import CHUNK, Engine, Report, prompts_of, serving, written_batch
from .families import CONFIGS, limits
from .reference_process import ReferenceProcess

RUNNER = os.environ["TLLM_TEST_RUNNER"]

# Triton's interpreter needs 20 to 30 s a family, so the V2 pass takes one of each kind. The table
# and the resolver do not depend on the runner.
KINDS = {
    "qwen2": "fused residuals",
    "gemma2": "fused residuals and normed branches, two KV cache groups",
    "gpt2": "unfused residuals",
    # Not Cohere, whose norm vLLM compiles for a backend that the interpreter lacks.
    "falcon_one_norm": "parallel attention",
    "olmo2": "norms after the branches, through vLLM's Transformers backend",
    "mixtral": "mixture of experts",
}
COMPILED = ("qwen2", "olmo2")
WITHOUT_LENS = ("gemma3n",)
"""Families whose final norm reads more than what leaves the last block."""
_ONE_OF_EACH_KIND = pytest.mark.skipif(
    RUNNER == "v2", reason=f"interpreted kernels are slow; v2 runs only {', '.join(KINDS)}"
)
_NOT_INTERPRETED = pytest.mark.skipif(
    RUNNER == "v2", reason="the interpreted kernels cannot be compiled; tests/oracle/gpu.py does"
)
ENGINES = [
    *(
        pytest.param((family, "eager"), marks=() if family in KINDS else _ONE_OF_EACH_KIND)
        for family in CONFIGS
    ),
    *(pytest.param((family, "compiled"), marks=_NOT_INTERPRETED) for family in COMPILED),
]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest, reference: ReferenceProcess) -> Iterator[Engine]:
    family, mode = request.param
    with serving(
        family,
        reference,
        reference.checkpoint(family),
        seeded=RUNNER == "v2",
        wide=RUNNER == "v1",  # interpreted kernels run in small passes only
        dtype="float32",
        enforce_eager=mode == "eager",
    ) as served:
        yield served


@pytest.fixture
def accepted(engine: Engine) -> Tolerance:
    return Tolerance(limits(engine.family, [*engine.points, "logits"]))


def is_short(engine: Engine) -> bool:
    """Whether not every change is made at every place: where kernels are interpreted, and of
    families of which another one of the same kind has all (`TLLM_TEST_FAMILIES=whole`: of none).
    Rows and steering are compared at every place of every family."""
    whole = os.environ.get("TLLM_TEST_FAMILIES") == "whole"
    return RUNNER == "v2" or not (whole or engine.family in KINDS)


def assert_agrees(report: Report) -> None:
    shown = "\n".join(report.problems[:20])
    assert not report.problems, f"{len(report.problems)} problems:\n{shown}"


def test_rows_and_tokens_of_a_mixed_batch_are_those_of_transformers(
    engine: Engine, accepted: Tolerance
) -> None:
    crowded = nullcontext() if RUNNER == "v2" else engine.few_blocks()
    with engine.consumers(), crowded:
        for _ in range(1 if RUNNER == "v2" else 2):
            report = engine.compare(mixed_batch(prompts_of(engine.vocab), CHUNK), accepted)
            assert_agrees(report)
            assert report.preemptions
            assert report.cached_tokens


def test_writes_reach_their_requests_as_hooks_would_and_no_others(
    engine: Engine, accepted: Tolerance
) -> None:
    writes = [(place, phase) for place in engine.places for phase in PHASES]
    if is_short(engine):  # each place once, with phase and layer changing in turn
        writes = [writes[3 * i + (i + i // 3) % 3] for i in range(len(engine.places))]
    with engine.consumers(writer=True):
        report = engine.compare(written_batch(writes, engine.vocab), accepted)
    assert_agrees(report)


def test_steered_rows_and_tokens_are_those_of_transformers_with_hooks(
    engine: Engine, accepted: Tolerance
) -> None:
    with engine.consumers():
        asks = steered_batch(engine.places, prompts_of(engine.vocab), engine.vector)
        report = engine.compare(asks, accepted)
    assert_agrees(report)
    assert report.cached_tokens


def chosen_places(engine: Engine) -> list[tuple[str, int | None]]:
    """Each hook point in one layer, and the layer changes in turn; or all layers."""
    if not is_short(engine):
        return engine.places
    having = [[place for place in engine.places if place[0] == point] for point in engine.points]
    return [places[number % len(places)] for number, places in enumerate(having)]


def test_patched_rows_and_tokens_are_those_of_transformers_with_hooks(
    engine: Engine, accepted: Tolerance
) -> None:
    with engine.consumers():
        asks = patched_batch(chosen_places(engine), prompts_of(engine.vocab), engine.vector)
        report = engine.compare(asks, accepted)
    assert_agrees(report)
    assert report.cached_tokens


def test_conditions_decide_as_hooks_would_that_look_first(
    engine: Engine, accepted: Tolerance
) -> None:
    with engine.consumers():
        report = engine.compare(asks := engine.gated_asks(chosen_places(engine)), accepted)
    assert_agrees(report)
    assert report.on_edge <= len(asks) / 4  # more where the tolerance is wide
    assert report.cached_tokens


def test_the_lens_of_the_last_layer_says_what_the_model_says(
    engine: Engine, accepted: Tolerance
) -> None:
    report = Report()
    refused = engine.lens(report, accepted.points["logits"])
    assert_agrees(report)
    assert (refused is not None) == (engine.family in WITHOUT_LENS), refused


def test_points_that_the_family_lacks_are_refused_with_those_it_has(engine: Engine) -> None:
    assert engine.refusals() == []
