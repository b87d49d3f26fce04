"""`SamplingParams`, `PoolingParams` and `BeamSearchParams`: vLLM's, with what a request asks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from numbers import Integral, Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import torch
import vllm
from vllm.sampling_params import BeamSearchParams as VllmBeamSearchParams

from tllm.request_fields import meant_by
from tllm.spec.condition_reading import parse_conditions
from tllm.spec.conversations import RequestConversation
from tllm.spec.groups import Endings, RequestSteering
from tllm.spec.patching import RequestPatch
from tllm.spec.reading import check_64_bits, check_text
from tllm.spec.request import EXTRA_ARG, Asked, carried_by, refusal_of_own
from tllm.spec.selection import EVERYWHERE, Selection
from tllm.spec.tiers import Tiers, parse_modules

_STEERING_NAMES = {
    "vectors": "steering_vectors",
    "prefill_vectors": "prefill_steering_vectors",
    "decode_vectors": "decode_steering_vectors",
    "clamps": "steering_clamps",
    "prefill_clamps": "prefill_steering_clamps",
    "decode_clamps": "decode_steering_clamps",
}

_DEEPEST = 32
"""Levels of mappings and lists in the options of a consumer."""


class Asking(msgspec.Struct, kw_only=True):
    """What a request asks of tLLM: the fields that our classes have beside those of vLLM's.

    Attributes:
        consumers: by consumer id, e.g. `{"esamp": {"beta": 0.3}}`; `{"enabled": False}` turns a
            consumer off for the request. Options are plain data: numbers, text, lists and mappings,
            and arrays, which are given on as lists. Checked by `generate`, when the consumers are
            known.
        capture: what to capture, by the consumer that it goes to, e.g.
            `{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}`. Results are
            the output's `activations` and `capture_results`.
        steering_vectors: added to the rows of prompt and generation:
            `{hook point: {layer: vector}}`. A vector is a list, an array or a tensor `[hidden]`,
            or a mapping with `vector` and any of `scale`, `method` (see
            `tllm.spec.methods.METHODS`), its parameters, `positions`, and `when`, the condition
            on which it steers (a probe with a threshold, or the name of a monitor); or a list of
            such mappings, applied in order. In place of `{layer: vector}`: an array
            `[layers, hidden]`, or the packed form.
        prefill_steering_vectors, decode_steering_vectors: in one phase only.
        steering_clamps, prefill_steering_clamps, decode_steering_clamps: applied after all
            vectors; entries give `vector` and `min`, `max` or `value`.
        steering_module_ref: name of a module of `llm.steering.register_module`, or
            `(name, scale)`, or a list of these.
        steering_positions: which tokens, for entries that say none, those of modules too
            (default: all).
        patch: rows that are put in the place of the request's own, a list of
            `{"hook", "layer", "positions", "source", "alpha", "mask"}`:
            `h' = (1 - alpha) h + alpha source` on the dimensions of `mask` (default: all). `source`
            is `{"tensor": rows}`, `{"zero": True}`, `{"mean": name}`,
            `{"run": run, "positions": [...]}`, or `{"noise": std, "seed": n}`, which is added.
            Negative positions count from the end of the prompt.
        stop_when: a condition, as an entry's `when` is one (a mapping, or the name of a monitor),
            or a list of them, any of which decides. A sample ends with the first generated token
            for whose row it holds: `finish_reason` is `"stop"`, `stop_reason` the condition's name.
            That token is the last one given, unless fewer than `min_tokens` were generated.
        abort_when: the same for the rows of the prompt. Where it holds for any of them, nothing is
            generated: `finish_reason` is `"abort"`, `stop_reason` the condition's name.
        conversation: `{"id", "key", "expires_s"}`: the conversation that the request belongs to.
            What holds in it of conditions of scope `conversation` holds for later requests that
            name the same id with the same key, a secret, until `expires_s` seconds (by default
            3600) have passed since one of them was added.
        asked: all of these together, checked; made when they are given, and not to be given.
    """

    consumers: Any = None
    capture: Any = None
    steering_vectors: Any = None
    prefill_steering_vectors: Any = None
    decode_steering_vectors: Any = None
    steering_clamps: Any = None
    prefill_steering_clamps: Any = None
    decode_steering_clamps: Any = None
    steering_module_ref: Any = None
    steering_positions: Any = None
    patch: Any = None
    stop_when: Any = None
    abort_when: Any = None
    conversation: Any = None
    asked: Asked | None = None


ASKED_FIELDS = tuple(name for name in Asking.__struct_fields__ if name != "asked")
"""What a request may ask of tLLM, beside vLLM's own parameters."""


class _Checked:
    """What is asked is checked when it is given. Mixed into vLLM's parameters with our fields."""

    __slots__ = ()
    theirs: ClassVar[Any]
    """vLLM's own class."""

    if TYPE_CHECKING:
        asked: Asked | None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        # Parameters that were made of others have what these asked, and perhaps other fields.
        given = _given_in(self)
        if self.asked is None or not _same(self.asked.given, given):
            self.asked = _asked_in(given, self.asked)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ASKED_FIELDS:
            fields = zip(ASKED_FIELDS, _given_in(self), strict=True)
            given = [value if field == name else own for field, own in fields]
            self.asked = _asked_in(given, self.asked, anew=name)
        elif not hasattr(type(self), name) and (meant := meant_by(name)) is not None:
            # vLLM's structs take any attribute, and nobody would read this one.
            meant = "steering_module_ref" if meant == "steering_name" else meant
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, and nobody would read it; "
                f"{meant} may be meant"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        # What is asked of us never changes, and is shared.
        own = copy.copy(self)
        for name, value in _values_of(self).items():
            setattr(own, name, copy.deepcopy(value, memo))
        return own

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's check of a request. What an engine with tLLM is asked it carries as plain data:
        where that is not there, nobody would do it."""
        if self.asked and EXTRA_ARG not in carried_by(self)[1]:
            asked = [n for n, v in zip(ASKED_FIELDS, _given_in(self), strict=True) if v is not None]
            raise ValueError(
                f"{', '.join(asked)} was asked of an engine of vLLM's own, which would not do it; "
                "start it with tllm.LLM or tllm.AsyncLLM, or make it known with tllm.attach(engine)"
            )
        super().verify(*args, **kwargs)  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        return _values_of(self) == _values_of(other) and self.asked == other.asked


if TYPE_CHECKING:

    class _SamplingFields(_Checked, vllm.SamplingParams, Asking, kw_only=True):
        pass

    class _PoolingFields(_Checked, vllm.PoolingParams, Asking, kw_only=True):
        pass

    class _BeamSearchFields(_Checked, VllmBeamSearchParams, Asking, kw_only=True):
        pass
else:

    def _with_our_fields(theirs: type) -> type:
        # Structs with fields cannot be mixed.
        ours = [(f.name, f.type, f.default) for f in msgspec.structs.fields(Asking)]
        return msgspec.defstruct(
            theirs.__name__,
            ours,
            bases=(_Checked, theirs),
            namespace={"theirs": theirs, "__annotations__": {"theirs": ClassVar[Any]}},
            module=__name__,
            kw_only=True,
        )

    _SamplingFields, _PoolingFields, _BeamSearchFields = map(
        _with_our_fields, (vllm.SamplingParams, vllm.PoolingParams, VllmBeamSearchParams)
    )


class SamplingParams(_SamplingFields, kw_only=True):
    """`vllm.SamplingParams`, with what a request asks of consumers, of steering and of patching.

    Attributes:
        consumers, capture, steering_vectors, ...: see `Asking`.
    """

    def __deepcopy__(self, memo: Any) -> SamplingParams:
        own: SamplingParams = super().__deepcopy__(memo)
        own.__post_init__()
        return own

    @classmethod
    def from_optional(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """As `vllm.SamplingParams.from_optional`, with our arguments beside."""
        ours = {name: kwargs.pop(name) for name in ASKED_FIELDS if name in kwargs}
        made = vllm.SamplingParams.from_optional(*args, **kwargs)
        return cls(**_values(made, vllm.SamplingParams), **ours)


class PoolingParams(_PoolingFields, kw_only=True):
    """`vllm.PoolingParams`, with what a request asks of consumers, of steering and of patching.

    Every token of a pooled request is of its prompt.

    Attributes:
        consumers, capture, steering_vectors, ...: see `Asking`.
    """


class BeamSearchParams(_BeamSearchFields, kw_only=True):
    """`vllm.sampling_params.BeamSearchParams`, with what all beams ask of consumers and of
    steering. Captures and patches are refused: a beam is computed by many requests.

    Attributes:
        consumers, steering_vectors, ...: see `Asking`.
    """


def plain(params: SamplingParams | PoolingParams) -> Any:
    """vLLM's part of parameters, as an object of vLLM's own class."""
    return params.theirs(**_values_of(params))


def with_patch(params: SamplingParams, patch: RequestPatch) -> SamplingParams:
    """A copy that asks for a patch, too. What is asked otherwise is not checked again."""
    own = copy.copy(params)
    assert own.asked is not None
    own.asked = replace(own.asked, patch=patch)
    return own


def asked_of(params: Any) -> Asked:
    """What parameters ask: our own classes' `asked`, or, in vLLM's, what stands in
    `extra_args["tllm"]` (`extra_kwargs["tllm"]`) as plain data, under the names of our fields.

    Raises `ValueError` for what is asked in a place where nobody reads it, and `TypeError` for what
    is no parameters.
    """
    own = params.asked if isinstance(params, _Checked) else None
    if own is None and isinstance(params, (vllm.SamplingParams, VllmBeamSearchParams)):
        _refuse_attributes(params)
    if params is None or isinstance(params, VllmBeamSearchParams):  # nothing is carried by these
        return _NOTHING if own is None else own
    if own is None and not isinstance(params, (vllm.SamplingParams, vllm.PoolingParams)):
        raise TypeError(
            f"{params!r:.60} was given in the place of parameters, and is {type(params).__name__}; "
            "give tllm.SamplingParams(max_tokens=...), or tllm.PoolingParams() for pooling"
        )
    name, carried = carried_by(params)
    if carried:
        _refuse_unread(name, carried, ours=own is not None)
    if own is not None:
        return own
    given = carried.get(EXTRA_ARG)
    return parse_asked(given) if given else _NOTHING


def _refuse_attributes(params: vllm.SamplingParams | VllmBeamSearchParams) -> None:
    """Refuse our fields as attributes of vLLM's structs, which take any."""
    for field in vars(params):
        if field in ASKED_FIELDS:
            kind = type(params).__name__
            raise ValueError(
                f"{field} was set on vLLM's {kind}, where nobody reads it; give {field}= to "
                f"tllm.{kind}"
            )


def _refuse_unread(name: str, carried: Mapping[str, Any], *, ours: bool) -> None:
    """Refuse our fields among what is carried beside them, which vLLM ignores, and names of our own
    messages."""
    for field in ASKED_FIELDS:
        if field in carried:
            raise ValueError(
                f"{name}[{field!r}] was given, where nobody reads it; give {field}= to tllm's "
                f"class of parameters, or {name}={{{EXTRA_ARG!r}: {{{field!r}: ...}}}} to vLLM's"
            )
    if refusal := refusal_of_own(name, carried):
        raise ValueError(refusal)
    if ours and carried.get(EXTRA_ARG):
        raise ValueError(
            f"{name}[{EXTRA_ARG!r}] was given with tllm's class of parameters, which has fields "
            "for what is in it; give them there"
        )


def parse_asked(given: Mapping[str, Any]) -> Asked:
    """What a request asks, from the fields of `SamplingParams` as a mapping.

    Raises `ValueError` naming the field that is wrong.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"what a request asks of tLLM is {type(given).__name__}; give a mapping with any of "
            f"{', '.join(ASKED_FIELDS)}"
        )
    if unknown := sorted(map(str, set(given) - set(ASKED_FIELDS))):
        raise ValueError(
            f"unknown fields {unknown} for tLLM; a request takes {', '.join(ASKED_FIELDS)}"
        )
    return _asked_of(
        {name: _read(name, value) for name, value in given.items() if value is not None}
    )


def _read(name: str, value: Any) -> Any:
    """What is given as one of our fields, read and checked by itself."""
    if name in _TIER_OF:
        return Tiers.parse(**{_TIER_OF[name]: value}, names=_STEERING_NAMES)
    return _READERS[name](value)


def _options(given: Any, field: str, example: str) -> dict[str, dict[str, Any]]:
    """`consumers=` or `capture=` as plain data; raises `ValueError` for what cannot be sent to the
    workers."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{field}={given!r:.80} is {type(given).__name__}; give a mapping from consumers to "
            f"options, such as {example}"
        )
    found: dict[str, dict[str, Any]] = {}
    for name, options in given.items():
        if not isinstance(options, Mapping):
            raise ValueError(
                f"{field}[{name!r}] is {type(options).__name__}; give a mapping of options, as in "
                f"{example}"
            )
        found[_key(name, field)] = _plain(options, f"{field}[{name!r}]")
    return found


def _asked_of(read: Mapping[str, Any]) -> Asked:
    """What a request asks, from what its fields were read as."""
    consumers, captures = read.get("consumers", {}), read.get("capture", {})
    for name in captures.keys() & consumers.keys():
        raise ValueError(
            f"capture[{name!r}] and consumers[{name!r}] were both given; give one of them"
        )
    return Asked(
        {**consumers, **captures},
        tuple(captures),
        _steering(read),
        read.get("patch"),
        read.get("conversation"),
        read=read,
    )


_TIER_OF = {field: tier for tier, field in _STEERING_NAMES.items()}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "consumers": partial(_options, field="consumers", example="{'esamp': {'beta': 0.3}}"),
    "capture": partial(
        _options,
        field="capture",
        example="{'memory': {'hooks': {'post_block': [12]}, 'positions': 'last_prompt'}}",
    ),
    "steering_module_ref": parse_modules,
    "steering_positions": lambda given: Selection.parse(given, "steering_positions"),
    "patch": RequestPatch.parse,
    "stop_when": lambda given: parse_conditions(given, "stop_when"),
    "abort_when": lambda given: parse_conditions(given, "abort_when"),
    "conversation": RequestConversation.parse,
}
"""From what is given as a field to what it is read as; of the fields that have none, `Tiers`."""

_NOTHING = Asked(given=(None,) * len(ASKED_FIELDS))
_given_in = attrgetter(*ASKED_FIELDS)


def _asked_in(given: Sequence[Any], before: Asked | None = None, anew: str = "") -> Asked:
    """What is asked by values of our fields.

    Args:
        before: what was read of the same objects is not read again: what is in them may be
            something else now.
        anew: the field that is given, whatever object it is.
    """
    known = _NOTHING if before is None or not before.given else before
    read = {
        name: known.read[name] if value is was and name != anew else _read(name, value)
        for name, value, was in zip(ASKED_FIELDS, given, known.given, strict=True)
        if value is not None
    }
    return replace(_asked_of(read), given=tuple(given)) if read else _NOTHING


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _values_of(params: Any) -> dict[str, Any]:
    """vLLM's part of our parameters."""
    return _values(params, params.theirs)


def _values(params: Any, theirs: Any) -> dict[str, Any]:
    return {name: getattr(params, name) for name in theirs.__struct_fields__}


def _steering(read: Mapping[str, Any]) -> RequestSteering | None:
    """What a request asks of steering, and of being judged; None for nothing."""
    tiers = [read[field] for field in _STEERING_NAMES.values() if field in read]
    modules = read.get("steering_module_ref", ())
    endings = Endings(*(read.get(name, ()) for name in ("stop_when", "abort_when")))
    if not tiers and not modules:
        if "steering_positions" in read:
            raise ValueError(
                "steering_positions says which tokens to steer, but nothing to steer with was "
                "given; give steering_vectors, steering_clamps or steering_module_ref"
            )
        if not endings:
            return None
    where = read.get("steering_positions", EVERYWHERE)
    joined = reduce(Tiers.joined, tiers) if tiers else Tiers()
    asked = RequestSteering(joined, modules, where, endings)
    asked.hash()
    return asked


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """As numbers, text, lists and dictionaries."""
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, str):
        check_text(value, field)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        check_64_bits(int(value), field, "a smaller one, or text")
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Selection):
        return value.to_wire()
    if isinstance(value, slice):
        return _range(value, field)
    if depth == _DEEPEST:
        raise ValueError(f"{field:.80}... is nested deeper than {_DEEPEST} levels, or holds itself")
    if isinstance(value, Mapping):
        return {
            _key(key, field): _plain(each, f"{field}[{key!r}]", depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [_plain(each, f"{field}[{i}]", depth + 1) for i, each in enumerate(value)]
    raise ValueError(
        f"{field} is {type(value).__name__}; give numbers, text, lists and mappings of them"
    )


def _range(given: slice, field: str) -> str:
    """A slice as the text that means the same, where layers are named."""
    edges = [] if given.step is not None else [given.start, given.stop]
    if not edges or not all(each is None or isinstance(each, Integral) for each in edges):
        raise ValueError(f"{field} is {given}; give a slice of whole numbers without a step")
    return ":".join("" if each is None else str(int(each)) for each in edges)


def _key(key: Any, field: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{field} has the key {key!r}; keys are text")
    return str(key)
