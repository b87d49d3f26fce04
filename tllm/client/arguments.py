"""The arguments of `LLM`, `AsyncLLM.create` and `make_llm`: vLLM's, and ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict

from tllm.client.vllm_arguments import VllmArguments
from tllm.consumers.base import Consumer
from tllm.spec.reading import one_or_several, require_bool

RESULT_TIMEOUT_S = 600.0


class OurArguments(TypedDict, total=False):
    """What an engine is started with beside vLLM's arguments.

    Attributes:
        consumers: instances or spec strings, beside those of `register_consumer`.
        capture_consumers: the same; their results are also in `output.capture_results`.
        result_timeout_s: how long `generate` waits for results that consumers are still working on
            (writing to disk, for example); after that they are `pending`. By default 600.
        hook_points: the hook points to install in every layer, or `"all"`. By default all but
            `q`, `k`, `v`, `attn_heads` and `router`; where the model is compiled for a GPU
            `embed`, `pre_attn`, `post_attn`, `post_block` and `lm_head_in`, which cost nothing
            there, and what the consumers need.
        capture_mib, max_capture_mib, overflow: size of the capture ring, and what happens when
            consumers are slower than the model (`"block"` or `"drop"`).
        enable_steering: False turns steering off, as `max_steering_configs=0` does.
        max_steering_configs, max_steering_mib: how many distinct ways of steering run at once (the
            rest waits), and the device memory for their vectors.
        max_patch_mib, max_patch_host_mib: the memory for rows that are kept to be patched in
            (`llm.patching`), on the device and on the host.
        max_conversations: how many conversations conditions are remembered for at a time.
        fuse_norms: whether a tap and the norm after it are one kernel (default: yes, where vLLM
            compiles the model for a GPU, and quantizes it not at all or in the formats of
            `doc/reference/port-catalog.md`). With False a tap costs a launch of its own, and what
            is not intervened in is computed by vLLM's own kernels alone.
    """

    consumers: Iterable[Consumer | str]
    capture_consumers: Iterable[Consumer | str]
    result_timeout_s: float
    hook_points: Iterable[str] | str | None
    capture_mib: int | None
    max_capture_mib: int | None
    overflow: str | None
    enable_steering: bool
    max_steering_configs: int | None
    max_steering_mib: int | None
    max_patch_mib: int | None
    max_patch_host_mib: int | None
    max_conversations: int | None
    fuse_norms: bool | None


class LLMArguments(OurArguments, VllmArguments, total=False):
    """What `LLM` takes by keyword."""

    chat_template: Path | str | None


class AsyncLLMArguments(OurArguments, VllmArguments, total=False):
    """What `AsyncLLM.create` takes by keyword."""

    enable_log_requests: bool


_OF_THE_CLIENT = ("consumers", "capture_consumers", "result_timeout_s")


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arguments by whom they are for: the client, tLLM's options of the engine, and vLLM."""
    ours = OurArguments.__annotations__.keys()
    theirs = {name: value for name, value in given.items() if name not in ours}
    of_client = {name: given[name] for name in _OF_THE_CLIENT if name in given}
    options = {
        name: value
        for name, value in given.items()
        if name in ours and name not in _OF_THE_CLIENT and value is not None
    }
    steers = options.pop("enable_steering", True)
    require_bool("enable_steering", steers)
    if not steers:
        options["max_steering_configs"] = 0
    points = options.get("hook_points", "all")
    if points != "all":
        options["hook_points"] = tuple(one_or_several(points))
    return of_client, options, theirs


def check_names(
    given: Mapping[str, Any],
    known: Collection[str],
    of: str = "an engine",
    otherwise: str = "it takes what vllm.LLM takes",
) -> None:
    """Refuse arguments that nobody takes; `TypeError` names the nearest.

    Args:
        known: what vLLM's engines take, or what else they were given to.
        of: what they were given to.
        otherwise: what is said where none is near.
    """
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    names = [] if unknown in AsyncLLMArguments.__annotations__ else OurArguments.__annotations__
    near = get_close_matches(unknown, [*names, *known], cutoff=0.5) if names else []
    meant = f"did you mean {' or '.join(near)}?" if near else f"{otherwise}."
    raise TypeError(
        f"{unknown!r} is no argument of {of}; {meant} tLLM's own are "
        f"{', '.join(OurArguments.__annotations__)}"
    )
