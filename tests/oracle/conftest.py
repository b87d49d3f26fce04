from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked_processes import forked

from .reference_process import ReferenceProcess


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceProcess]:
    """Answers what plain `transformers` does, for every family, in a process of its own.

    It has vLLM imported, and no engine: only one that runs changes `transformers`.
    """
    with forked():
        process = ReferenceProcess(tmp_path_factory.mktemp("oracle"))
    yield process
    process.close()
