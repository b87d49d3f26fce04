"""What these tests are compared with."""

from __future__ import annotations

import pytest
import vllm
from tiny_engines import TINY_ENGINE

from engine.reference import Reference


@pytest.fixture(scope="session")
def reference(tiny_model):
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def plain_engine(tiny_model):
    """vLLM as it is. Kept to the end: a collected engine takes vLLM's process groups with it."""
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    return vllm.LLM(tiny_model, **options | {"skip_tokenizer_init": False})
