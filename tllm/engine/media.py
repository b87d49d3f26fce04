"""Where the images, videos and sounds of a prompt stand, as vLLM knows it, and which of its tokens
are tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tllm.engine.seams import uses
from tllm.spec.media import PromptMedia

_IMAGE = "positions of the tokens that stand for an image"
uses("vllm.multimodal.inputs.PlaceholderRange", "extract_embeds_range", _IMAGE)
uses(
    "vllm.config.ModelConfig",
    "is_mm_prefix_lm",
    "a token of an image may see those after it, which its block's key then holds",
)
uses("vllm.v1.engine.EngineCoreRequest", "mm_features", _IMAGE)
_EMBEDDED = "what stands among tokens in the place of an embedding is none of them"
uses("vllm.v1.request.Request", "prompt_is_token_ids", _EMBEDDED)
uses("vllm.v1.core.sched.output.NewRequestData", "prompt_is_token_ids", _EMBEDDED)


def media_of_request(request: Any) -> PromptMedia:
    """The items of a request's prompt.

    Args:
        request: vLLM's `EngineCoreRequest`.
    """
    return _media((each.modality, each.mm_position) for each in request.mm_features or ())


def prompt_len(request: Any) -> int:
    """Of vLLM's `EngineCoreRequest`, `Request`, or `NewRequestData`."""
    tokens = request.prompt_token_ids
    return len(request.prompt_embeds if tokens is None else tokens)


def tokens_of(request: Any) -> list[int] | None:
    """The tokens of a prompt, with -1 for each embedding that was given among them; None for a
    prompt of embeddings alone.

    Args:
        request: vLLM's `Request`, or its `NewRequestData`.
    """
    tokens: list[int] | None = request.prompt_token_ids
    told = getattr(request, "prompt_is_token_ids", None)
    if tokens is None or told is None:
        return tokens
    return [token if is_told else -1 for token, is_told in zip(tokens, told, strict=True)]


def seen_whole(features: Iterable[Any], model_config: Any) -> list[tuple[int, int]]:
    """`(start, stop)` of the items whose tokens see all of their item, those after them, too.

    Gemma 3's images are such: their attention is causal between items, and not within one.

    Args:
        features: the items of a prompt, `mm_features` of a request.
        model_config: vLLM's.
    """
    if not model_config.is_mm_prefix_lm:
        return []
    places = (each.mm_position for each in features if each.modality != "audio")
    return sorted((place.offset, place.offset + place.length) for place in places)


def media_of_prompt(prompt: Any) -> PromptMedia:
    """The items of a prompt that vLLM has processed, and made no request of yet."""
    placeholders = prompt.get("mm_placeholders") if isinstance(prompt, Mapping) else None
    return _media(
        (modality, position)
        for modality, positions in (placeholders or {}).items()
        for position in positions
    )


def _media(found: Iterable[tuple[str, Any]]) -> PromptMedia:
    items: dict[str, list[list[tuple[int, int]]]] = {}
    for modality, position in sorted(found, key=lambda each: each[1].offset):
        # Some placeholders have other tokens among them, such as those that end a row of an image.
        stretches = [(first, last + 1) for first, last in position.extract_embeds_range()]
        items.setdefault(modality, []).append(stretches)
    return PromptMedia(items)
