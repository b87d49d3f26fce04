"""The engines that are attacked."""

from __future__ import annotations

import pytest
from engine.ahead import scheduling_ahead
from engine.conftest import kept_plain_engine, plain_engine  # noqa: F401 - fixtures
from tiny_engines import TINY_ENGINE

from fuzz.rounds import SETUPS, Attack


@pytest.fixture(params=SETUPS)
def attacked(request, tiny_model, plain_engine, tmp_path):  # noqa: F811
    from contextlib import nullcontext

    from tllm import LLM

    setup = SETUPS[request.param]
    with scheduling_ahead() if setup.ahead else nullcontext():
        llm = LLM(tiny_model, **TINY_ENGINE | setup.options)
    yield Attack(llm, plain_engine, tmp_path / "store", setup.allows)
    llm.clear_consumers()
