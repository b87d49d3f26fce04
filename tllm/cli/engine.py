"""The engine of a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tllm.cli.files import missing_here

if TYPE_CHECKING:
    from tllm import LLM


def start_engine(model: str, **arguments: Any) -> LLM:
    """An engine; `ValueError` names the model where none starts, which not every error does."""
    from tllm import LLM  # vLLM takes seconds to import

    try:
        return LLM(model, **arguments)
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        here = missing_here(model, error)
        raise ValueError(f"no engine with the model {model!r}{here}: {said}") from error


def check_prompts(
    prompts: Iterable[tuple[str, object]], model: str, arguments: Mapping[str, Any]
) -> None:
    """Refuse an empty text that has no tokens, as one has of a model that begins with a token of
    its own, before an engine is started.

    Args:
        prompts: what each is called on the command line, and what it is.
        arguments: of the engine.
    """
    for name in [name for name, prompt in prompts if prompt == ""]:
        from tllm.engine.tokenizer import encoded, tokenizer_of  # vLLM takes seconds to import

        if not encoded(tokenizer_of(model, arguments), [""])[0]:
            raise ValueError(f"{name} is empty; give a text that has tokens")
