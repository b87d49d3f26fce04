"""The engine of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tllm import LLM


def start_engine(model: str, **arguments: Any) -> LLM:
    """An engine; `ValueError` names the model where none starts, which not every error does."""
    from tllm import LLM  # vLLM takes seconds to import

    try:
        return LLM(model, **arguments)
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        sought = isinstance(error, OSError) and not Path(model).exists()
        here = " (there is no such folder here)" if sought else ""
        raise ValueError(f"no engine with the model {model!r}{here}: {said}") from error
