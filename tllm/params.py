"""`tllm.SamplingParams`: vLLM's, with what a request asks of tLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm

from tllm.spec.request import EXTRA_ARG


def SamplingParams(  # noqa: N802 - the name users know
    *args: Any, consumers: Mapping[str, Mapping[str, Any]] | None = None, **kwargs: Any
) -> vllm.SamplingParams:
    """`vllm.SamplingParams`, with options for registered consumers.

    Args:
        *args, **kwargs: as `vllm.SamplingParams` takes them.
        consumers: by consumer id, e.g. `{"esamp": {"beta": 0.3}}`; `{"enabled": False}` turns a
            consumer off for the request. Checked by `generate`, when the consumers are known.

    Returns:
        A `vllm.SamplingParams`; the options travel in its `extra_args`.
    """
    if consumers is not None:
        for name, options in consumers.items():
            if not isinstance(options, Mapping):
                raise ValueError(
                    f"consumers[{name!r}] is {type(options).__name__}; give a mapping of options, "
                    "such as {'enabled': False}"
                )
        extra = dict(kwargs.pop("extra_args", None) or {})
        extra[EXTRA_ARG] = {"consumers": {name: dict(o) for name, o in consumers.items()}}
        kwargs["extra_args"] = extra
    return vllm.SamplingParams(*args, **kwargs)
