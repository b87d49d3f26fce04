"""The engines that are attacked."""

from __future__ import annotations

import pytest
from beyond_interpreting import beyond_interpreting
from engine.ahead import scheduling_ahead
from engine.conftest import kept_plain_engine, plain_engine  # noqa: F401 - fixtures
from engine.drafting import DraftedModel
from tiny_engines import TINY_ENGINE

from fuzz.rounds import SETUPS, Attack


@pytest.fixture(
    params=[
        pytest.param(name, marks=beyond_interpreting if setup.drafts else ())
        for name, setup in SETUPS.items()
    ]
)
def attacked(request, tiny_model, plain_engine, tmp_path):  # noqa: F811
    from contextlib import nullcontext

    from tllm import LLM

    setup = SETUPS[request.param]
    if setup.drafts:
        drafted = DraftedModel.made(setup.drafts, tmp_path, tiny_model)
        alone = plain = LLM(drafted.path, **TINY_ENGINE | setup.options)
        llm = drafted.llm()
    else:
        with scheduling_ahead() if setup.ahead else nullcontext():
            llm = LLM(tiny_model, **TINY_ENGINE | setup.options)
        alone, plain = llm, plain_engine
    yield Attack(llm, alone, plain, tmp_path / "store", setup.allows)
    llm.clear_consumers()
    if setup.drafts:
        (stats,) = llm.intervention_stats()
        assert 0 < stats["tokens_accepted"] < stats["tokens_drafted"], stats
