from __future__ import annotations

from collections.abc import Iterator

import pytest

from .reference_process import ReferenceProcess


@pytest.fixture(scope="session", autouse=True)
def _models_are_looked_at_here() -> Iterator[None]:
    """vLLM looks at every model class it meets for the first time on a machine in a process of its
    own, to keep CUDA out of this one: 8 s for each family."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceProcess]:
    """Answers what plain `transformers` does, for every family, in a process of its own."""
    process = ReferenceProcess(tmp_path_factory.mktemp("oracle"))
    yield process
    process.close()
