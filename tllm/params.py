"""`tllm.SamplingParams`: vLLM's, with what a request asks of tLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import vllm

from tllm.spec.request import EXTRA_ARG
from tllm.spec.selection import Selection
from tllm.spec.steering import RequestSteering, Tiers, parse_modules

_STEERING_NAMES = {
    "vectors": "steering_vectors",
    "prefill_vectors": "prefill_steering_vectors",
    "decode_vectors": "decode_steering_vectors",
    "clamps": "steering_clamps",
    "prefill_clamps": "prefill_steering_clamps",
    "decode_clamps": "decode_steering_clamps",
}


def SamplingParams(  # noqa: N802 - the name users know
    *args: Any,
    consumers: Mapping[str, Mapping[str, Any]] | None = None,
    steering_vectors: Any = None,
    prefill_steering_vectors: Any = None,
    decode_steering_vectors: Any = None,
    steering_clamps: Any = None,
    prefill_steering_clamps: Any = None,
    decode_steering_clamps: Any = None,
    steering_module_ref: Any = None,
    steering_positions: Any = None,
    capture: Mapping[str, Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> vllm.SamplingParams:
    """`vllm.SamplingParams`, with what a request asks of consumers and of steering.

    Args:
        *args, **kwargs: as `vllm.SamplingParams` takes them.
        consumers: by consumer id, e.g. `{"esamp": {"beta": 0.3}}`; `{"enabled": False}` turns a
            consumer off for the request. Checked by `generate`, when the consumers are known.
        steering_vectors: added to the rows of prompt and generation:
            `{hook point: {layer: vector}}`. A vector is a list, an array or a tensor `[hidden]`,
            or a mapping with `vector` and any of `scale`, `method` (see
            `tllm.spec.steering.METHODS`), its parameters, and `positions`; or a list of such
            mappings, applied in order. In place of `{layer: vector}`: an array
            `[layers, hidden]`, or the packed form.
        prefill_steering_vectors, decode_steering_vectors: in one phase only.
        steering_clamps, prefill_steering_clamps, decode_steering_clamps: applied after all
            vectors; entries give `vector` and `min`, `max` or `value`.
        steering_module_ref: name of a module of `llm.steering.register_module`, or
            `(name, scale)`, or a list of these.
        steering_positions: which tokens, for entries that say none, those of modules too
            (default: all).
        capture: what to capture, by the consumer that it goes to, e.g.
            `{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}`. Results are
            the output's `activations` and `capture_results`.

    Returns:
        A `vllm.SamplingParams`; what was asked travels in its `extra_args`.
    """
    asked: dict[str, Any] = {}
    if consumers is not None:
        for name, options in consumers.items():
            if not isinstance(options, Mapping):
                raise ValueError(
                    f"consumers[{name!r}] is {type(options).__name__}; give a mapping of options, "
                    "such as {'enabled': False}"
                )
        asked["consumers"] = {name: dict(o) for name, o in consumers.items()}
    if capture is not None:
        _ask_capture(asked, captured(capture))
    steering = _steering(
        {
            "vectors": steering_vectors,
            "prefill_vectors": prefill_steering_vectors,
            "decode_vectors": decode_steering_vectors,
            "clamps": steering_clamps,
            "prefill_clamps": prefill_steering_clamps,
            "decode_clamps": decode_steering_clamps,
        },
        steering_module_ref,
        steering_positions,
    )
    if steering is not None:
        asked["steering"] = steering
    if asked:
        kwargs["extra_args"] = {**(kwargs.get("extra_args") or {}), EXTRA_ARG: asked}
    return vllm.SamplingParams(*args, **kwargs)


def _steering(tiers: Mapping[str, Any], module_ref: Any, positions: Any) -> RequestSteering | None:
    """What a request asks of steering; None for nothing."""
    given = {name: tier for name, tier in tiers.items() if tier is not None}
    if not given and module_ref is None:
        if positions is not None:
            raise ValueError(
                "steering_positions says which tokens to steer, but nothing to steer with was "
                "given; give steering_vectors, steering_clamps or steering_module_ref"
            )
        return None
    modules = () if module_ref is None else parse_modules(module_ref)
    where = Selection() if positions is None else Selection.parse(positions, "steering_positions")
    asked = RequestSteering(Tiers.parse(**given, names=_STEERING_NAMES), modules, where)
    asked.hash()
    return asked


def _ask_capture(asked: dict[str, Any], capture: Mapping[str, dict[str, Any]]) -> None:
    """Captures are options of consumers."""
    consumers = asked.setdefault("consumers", {})
    for name, options in capture.items():
        if name in consumers:
            raise ValueError(
                f"capture[{name!r}] and consumers[{name!r}] were both given; give one of them"
            )
        consumers[name] = options
    asked["captures"] = list(capture)


def captured(capture: Any) -> dict[str, dict[str, Any]]:
    """`capture=` as plain data; raises `ValueError` for what cannot be sent to the workers."""
    if not isinstance(capture, Mapping):
        raise ValueError(
            f"capture={capture!r} is {type(capture).__name__}; give a mapping such as "
            "{'memory': {'hooks': {'post_block': [12]}, 'positions': 'last_prompt'}}"
        )
    for name, chosen in capture.items():
        if not isinstance(name, str) or not isinstance(chosen, Mapping):
            raise ValueError(
                f"capture[{name!r}] is {type(chosen).__name__}; give a mapping of options, such as "
                "{'hooks': {'post_block': [12]}, 'positions': 'last_prompt'}"
            )
    plain: dict[str, dict[str, Any]] = _plain(capture, "capture")
    return plain


def _plain(value: Any, field: str) -> Any:
    """As numbers, text, lists and dictionaries."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Selection):
        return value.to_wire()
    if isinstance(value, Mapping):
        return {_key(key, field): _plain(each, f"{field}[{key!r}]") for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_plain(each, f"{field}[{i}]") for i, each in enumerate(value)]
    raise ValueError(
        f"{field} is {type(value).__name__}; give numbers, text, lists and mappings of them"
    )


def _key(key: Any, field: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{field} has the key {key!r}; keys are text")
    return str(key)
