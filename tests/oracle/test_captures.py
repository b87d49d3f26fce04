"""`capture=` against plain `transformers`: families of each kind, every hook point and layer."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tllm import SamplingParams

from .differential import BLOCK, CHUNK, Engine, Report, _count_preemptions, serving
from .families import tolerance
from .reference_process import ReferenceProcess
from .test_differential import KINDS

RUNNER = os.environ["TLLM_TEST_RUNNER"]
FAMILIES = ("qwen2",) if RUNNER == "v2" else tuple(KINDS)

#: Positions as users write them, and which they are in a prompt of `p` tokens of `n` that passed.
FORMS: list[tuple[Any, Any]] = [
    ("all", lambda p, n: range(n)),
    ("all_prompt", lambda p, n: range(p)),
    ("all_generated", lambda p, n: range(p, n)),
    ("last_prompt", lambda p, n: [p - 1]),
    ([0, -1], lambda p, n: sorted({0, p - 1})),
    ({"ranges": [[-2, None]]}, lambda p, n: range(max(0, p - 2), n)),
    ({"phase": "generation", "windows": [[1, 3]]}, lambda p, n: range(p + 1, min(n, p + 3))),
    ({"exclude": {"ranges": [[1, -1]]}}, lambda p, n: [i for i in range(n) if not 1 <= i < p - 1]),
]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, reference: ReferenceProcess) -> Iterator[Engine]:
    family = request.param
    with serving(
        family,
        reference,
        reference.checkpoint(family),
        seeded=RUNNER == "v2",
        dtype="float32",
        enforce_eager=True,
    ) as served:
        yield served


def test_captures_of_a_mixed_batch_are_those_of_transformers(engine: Engine) -> None:
    pick = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [pick.randrange(2, engine.vocab) for _ in range(length)]

    shared = prompt(BLOCK)
    prompts = [
        *([*shared, *prompt(n)] for n in (5, 7, BLOCK - 2, 1)),
        *(prompt(n) for n in (BLOCK - 2, 1, CHUNK + 13, 7, BLOCK - 1, BLOCK - 3)),
    ]
    has = engine.points
    hooks = dict.fromkeys(has, "all")
    asks = []
    for number, (form, prompt_ids) in enumerate((f, p) for f in FORMS for p in prompts[::2]):
        n = 3 if number % 5 == 0 else 1
        asks.append((prompt_ids, form, n))
    params = [
        SamplingParams(
            n=n,
            temperature=1.0 if n > 1 else 0.0,
            max_tokens=5,
            ignore_eos=True,
            detokenize=False,
            capture={"memory": {"hooks": hooks, "positions": form[0]}},
        )
        for _, form, n in asks
    ]
    report = Report()
    with _count_preemptions(engine.llm, report):
        outputs = engine.llm.generate(
            [{"prompt_token_ids": p} for p, _, _ in asks], params, use_tqdm=False
        )
    limit, worst, rows = tolerance(engine.family), 0.0, 0
    for (prompt_ids, form, _), output in zip(asks, outputs, strict=True):
        report.cached_tokens += output.num_cached_tokens or 0
        for completion in output.outputs:
            passed = [*prompt_ids, *completion.token_ids][:-1]
            states, _ = engine.reference.run(engine.family, passed, {})
            where = list(form[1](len(prompt_ids), len(passed)))
            assert completion.capture_results["memory"].status == "ok"
            assert list(completion.activations) == has
            for point, layers in completion.activations.items():
                for layer, found in layers.items():
                    assert found.positions.tolist() == where, (form[0], len(prompt_ids))
                    expected = states[point][layer]
                    if where:
                        error = (found.tensor - expected[where]).abs().max()
                        worst = max(worst, float(error / expected.abs().max()))
                        rows += len(where)
    assert worst <= limit, f"off by {worst:.2e}, more than {limit:.2e}"
    assert rows
    assert report.preemptions
    assert report.cached_tokens
