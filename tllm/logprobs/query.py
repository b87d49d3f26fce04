"""What is asked of a next token, and what comes back."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, cast, overload

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from tllm.consumers.next_token import NextTokenConsumer
from tllm.params import ASKED_FIELDS, SamplingParams, parse_asked
from tllm.spec.conditions import autoencoders_of
from tllm.spec.reading import whole_number
from tllm.spec.request import Asked
from tllm.spec.selection import Selection

#: The rows that patches name may be others tomorrow, as what a conversation remembers, and answers
#: are kept. Tokens of queries and lanes are given, so no condition ends them.
_REFUSED = ("patch", "stop_when", "abort_when", "conversation")
_FIELDS = tuple(name for name in ASKED_FIELDS if name not in _REFUSED)


def own_params(kind: RequestOutputKind, **fields: Any) -> SamplingParams:
    """Sampling parameters of requests whose text nobody reads."""
    params = SamplingParams(output_kind=kind, detokenize=False, **fields)
    params.skip_clone = True  # nobody changes it
    return params


_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
NEXT_TOKEN = own_params(RequestOutputKind.FINAL_ONLY, **_ONE_TOKEN)
"""Of a request that draws one token."""
NEXT_TURN = own_params(RequestOutputKind.DELTA, **_ONE_TOKEN)
"""Of one that draws one after another."""


class LaneOptions(TypedDict, total=False):
    """What a lane, a completion or a query may be asked with.

    `lora_name` is an adapter for it, instead of the one that is set. The rest is what
    `tllm.SamplingParams` takes beside vLLM's own parameters, but for `patch`, `stop_when`,
    `abort_when` and `conversation`.
    """

    lora_name: str | None
    consumers: Mapping[str, Mapping[str, Any]] | None
    capture: Mapping[str, Mapping[str, Any]] | None
    steering_vectors: Any
    prefill_steering_vectors: Any
    decode_steering_vectors: Any
    steering_clamps: Any
    prefill_steering_clamps: Any
    decode_steering_clamps: Any
    steering_module_ref: Any
    steering_positions: Any


class QueryOptions(LaneOptions, total=False):
    """What a query may be asked with, and how much of the vocabulary it wants.

    `top_k`: only the best k, as `TopLogprobs`; `only`: only these tokens, `[len(only)]`. The rest
    of the vocabulary stays on the device.
    """

    top_k: int | None
    only: Sequence[int] | None


class TopLogprobs(NamedTuple):
    """The best k next tokens.

    Attributes:
        values: float32 `[k]` log-probabilities, the largest first.
        token_ids: int32 `[k]`.
    """

    values: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True)
class Form:
    """How much of the vocabulary is wanted: all of it, the best k, or only some tokens."""

    top_k: int | None = None
    only: tuple[int, ...] | None = None

    @classmethod
    def of(cls, top_k: int | None, only: Sequence[int] | None, vocab_size: int) -> Form:
        """Check what was asked; `ValueError` says what is allowed."""
        if top_k is None and only is None:
            return WHOLE
        if top_k is not None and only is not None:
            raise ValueError("top_k= and only= were both given; give one of them")
        if top_k is not None:
            return cls(top_k=min(whole_number(top_k, "top_k=", 1), vocab_size))
        tokens = checked_tokens(only, vocab_size, "only=")
        if not tokens:
            raise ValueError("only= is empty; give at least one token, or leave it out")
        return cls(only=tokens)

    def numbers(self, vocab_size: int) -> int:
        """Values and ids of one result."""
        if self.top_k is not None:
            return 2 * self.top_k
        return vocab_size if self.only is None else len(self.only)

    def options(self) -> dict[str, Any]:
        """As `NextTokenConsumer` takes it."""
        if self.top_k is not None:
            return {"top_k": self.top_k}
        return {} if self.only is None else {"token_ids": list(self.only)}


WHOLE = Form()
"""The whole vocabulary."""

_BOOLEANS = frozenset({bool, np.bool_})
_FEW = 8
"""So many tokens are looked at one by one: an array of them would take longer to make."""


def checked_tokens(tokens: Any, vocab_size: int, name: str) -> tuple[int, ...]:
    """Token ids as plain integers; `ValueError` for what is not one of the vocabulary's."""
    few = type(tokens) is tuple and len(tokens) <= _FEW
    if few and all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        return cast(tuple[int, ...], tokens)
    listed = isinstance(tokens, Sequence | np.ndarray | torch.Tensor)
    if not listed or isinstance(tokens, str | bytes):
        raise ValueError(f"{name} is {type(tokens).__name__}; give a list of token ids")
    given = tokens.tolist() if isinstance(tokens, np.ndarray | torch.Tensor) else tokens
    try:
        array = np.asarray(given)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ValueError
        # NumPy takes booleans for integers among these.
        if len(array) and array.min() < 2 and not _BOOLEANS.isdisjoint(map(type, given)):
            raise ValueError
    except ValueError:
        way_out = ""
        if isinstance(given, Sequence) and given and _BOOLEANS.issuperset(map(type, given)):
            way_out = "; of a mask, give np.flatnonzero(mask), or torch's mask.nonzero().flatten()"
        raise ValueError(
            f"{name} must be a flat list of integers, and is {given!r:.80}{way_out}"
        ) from None
    if len(array) and (array.min() < 0 or array.max() >= vocab_size):
        raise ValueError(
            f"{name} has token {array.min() if array.min() < 0 else array.max()}; the model's "
            f"are 0 to {vocab_size - 1}"
        )
    return tuple(array.tolist())


@dataclass(frozen=True, eq=False)
class Interventions:
    """What a request asks of tLLM besides its log-probabilities: steering, capture, consumers.

    Attributes:
        asked: all of it, checked.
        key: equal for equal asks; a key of its own where equality cannot be told.
        results: whether something comes back with the request's output.
        from_end: the field of a consumer that reads tokens that count from the end of the prompt,
            or names them to leave them out; empty for none.
        autoencoders: ids of the consumers whose features its conditions name.
    """

    asked: Asked = field(default_factory=Asked)
    key: str = ""
    results: bool = False
    from_end: str = ""
    autoencoders: tuple[str, ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, Any], *, generates: bool = False) -> Interventions:
        """Check keyword arguments; `ValueError` names those that cannot be given.

        Args:
            generates: whether the engine draws tokens itself. Else all tokens are the caller's.
        """
        given = {name: value for name, value in params.items() if value is not None}
        if unknown := sorted(set(given) - set(_FIELDS)):
            raise ValueError(
                f"unknown arguments {unknown}: log-probabilities are the model's own, before "
                "sampling parameters, patches and what ends a request; one may give "
                f"{', '.join(_FIELDS)}"
            )
        if not given:
            return cls()
        idle = sorted(name for name in given if name.startswith("decode_"))
        if idle and not generates:
            raise ValueError(
                f"{idle} would do nothing: the tokens of queries and lanes are given, so they are "
                "all of the prompt's phase. Use the form without decode_"
            )
        asked = parse_asked(given)
        if not generates:
            _check_given(asked)
        if NextTokenConsumer.consumer_id in asked.consumers:
            raise ValueError("consumers['next_token'] is set by the backend; use top_k= or only=")
        results = any(options.get("enabled", True) for options in asked.consumers.values())
        digest = hashlib.sha256()
        _digest(given, digest)
        from_end = (name for name, selection in _positions_read(asked) if selection.from_end)
        return cls(
            asked, digest.hexdigest(), results, next(from_end, ""), _autoencoders_named(asked)
        )

    def with_registrations(self, registrations: tuple[str, ...] | None) -> Interventions:
        """The same with a key that tells its autoencoders from others of their ids.

        Args:
            registrations: by which they are there; None where that is not known, and the key is
                one of its own.
        """
        told = f"object {next(_OBJECTS)}" if registrations is None else " ".join(registrations)
        return replace(self, key=f"{self.key} {told}")

    def applied_to(self, params: SamplingParams, next_token: Mapping[str, Any]) -> SamplingParams:
        """A copy of sampling parameters that asks for this, and for log-probabilities."""
        consumers = {**self.asked.consumers, NextTokenConsumer.consumer_id: dict(next_token)}
        own = copy(params)
        own.asked = replace(self.asked, consumers=consumers)
        return own


def does_nothing(what: str) -> str:
    """Of steering that is for generated tokens alone, where all tokens are given."""
    return (
        f"{what} would do nothing: it is for generated tokens alone, and the tokens of queries and "
        "lanes are given, so they are all of the prompt's phase. Give other positions, and a "
        "condition without 'over'"
    )


def _positions_read(asked: Asked) -> Iterator[tuple[str, Selection]]:
    """Whose rows consumers are asked to read, and the field that says so."""
    for name, options in asked.consumers.items():
        if options.get("enabled", True) and "positions" in options:
            field = f"{'capture' if name in asked.captures else 'consumers'}[{name!r}]['positions']"
            try:
                selection = Selection.parse(options["positions"], field)
            except ValueError:
                continue  # a word of the consumer's own, or for it to refuse
            yield field, selection


def _autoencoders_named(asked: Asked) -> tuple[str, ...]:
    """The ids of the consumers whose features the conditions of a request itself name."""
    own = () if asked.steering is None else asked.steering.own
    conditions = {entry.when for entry in own if entry.when is not None}
    return tuple(sorted({name for each in conditions for name in autoencoders_of(each)}))


def _check_given(asked: Asked) -> None:
    """Refuse what is for generated tokens alone where all tokens are given."""
    for name, selection in _positions_read(asked):
        if "prompt" not in selection.phases:
            raise ValueError(
                f"{name} would read nothing: it names generated tokens alone, and the tokens of "
                "queries and lanes are given, so they are all of the prompt's phase"
            )
    for _, entry in () if asked.steering is None else asked.steering.own.by_phase():
        if entry.needs_generated:
            raise ValueError(does_nothing(entry.name))


_OBJECTS = itertools.count()
"""An address would be another object's later, and a kept answer would be given to it."""


def _digest(value: Any, digest: Any) -> None:
    """Feed a value; what cannot be told apart from its equals gets an identity of its own."""
    if isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _digest(value[key], digest)
        digest.update(b"}")
    elif isinstance(value, list | tuple):
        digest.update(b"[")
        for each in value:
            _digest(each, digest)
        digest.update(b"]")
    elif isinstance(value, torch.Tensor):
        stored = value.detach().cpu().contiguous()
        digest.update(f"tensor {stored.dtype} {tuple(stored.shape)}".encode())
        digest.update(stored.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(f"{type(value).__name__} {value!r}".encode())
    else:
        digest.update(f"object {next(_OBJECTS)}".encode())


@dataclass(eq=False, slots=True)
class Query:
    """A wish for the next token's log-probabilities.

    Attributes:
        given: token ids. A lane's own list: more may be appended to it while the query is answered.
        num_tokens: how many of them the query is about.
    """

    given: Sequence[int]
    num_tokens: int
    form: Form
    lora: LoRARequest | None
    interventions: Interventions

    @classmethod
    def of(
        cls,
        tokens: tuple[int, ...],
        form: Form = WHOLE,
        lora: LoRARequest | None = None,
        interventions: Interventions | None = None,
    ) -> Query:
        """One about all tokens that are given."""
        return cls(tokens, len(tokens), form, lora, interventions or Interventions())

    @property
    def tokens(self) -> tuple[int, ...]:
        given = self.given
        return given if isinstance(given, tuple) else tuple(given[: self.num_tokens])

    def tokens_from(self, known: int) -> list[int]:
        """The tokens but for the first ones."""
        return list(self.given[known : self.num_tokens])

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for queries that have the same answer."""
        adapter = 0 if self.lora is None else self.lora.lora_int_id
        return adapter, self.interventions.key, self.form, self.tokens


class SharedRow(NamedTuple):
    """A row of `SharedRows` that is one answer's.

    Attributes:
        path: of the file, which no other has or had.
        number: of the row in it.
    """

    path: str
    number: int


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back.

    Attributes:
        values: float32 `[vocab]`, `[k]` or `[len(only)]`.
        token_ids: int32 `[k]` for `top_k`.
        output: vLLM's output of the request, with consumers' results and captured rows.
        row: where the values arrived; None where they were copied from there at once.
    """

    values: torch.Tensor
    token_ids: torch.Tensor | None = None
    output: Any = None
    row: SharedRow | None = None

    def copy(self) -> Answer:
        """One that shares no memory with this one."""
        ids = None if self.token_ids is None else self.token_ids.clone()
        return Answer(self.values.clone(), ids, self.output)

    @property
    def result(self) -> torch.Tensor | TopLogprobs:
        return self.values if self.token_ids is None else TopLogprobs(self.values, self.token_ids)


class AnswerRows(Sequence[Answer]):
    """Answers of one form that lie in memory one after the other.

    Attributes:
        values: float32 `[answers, ...]`.
        token_ids: int32 `[answers, k]` for `top_k`.
    """

    def __init__(self, values: torch.Tensor, token_ids: torch.Tensor | None = None) -> None:
        self.values = values
        self.token_ids = token_ids

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Answer: ...

    @overload
    def __getitem__(self, index: slice) -> AnswerRows: ...

    def __getitem__(self, index: int | slice) -> Answer | AnswerRows:
        kind = AnswerRows if isinstance(index, slice) else Answer
        return kind(self.values[index], None if self.token_ids is None else self.token_ids[index])

    @property
    def result(self) -> torch.Tensor | TopLogprobs:
        return self.values if self.token_ids is None else TopLogprobs(self.values, self.token_ids)


def stacked(answers: Sequence[Answer]) -> torch.Tensor | TopLogprobs:
    """One result of answers of one form: values `[batch, ...]`. Those that lie in shared rows which
    follow each other, as answers do that arrived together, stay where they are."""
    if isinstance(answers, AnswerRows):
        return answers.result
    rows = [answer.values for answer in answers]
    values = rows[0][None] if len(rows) == 1 else _in_place(answers)
    if values is None:
        # Not torch.stack, whose threads would spin on every core, beside the engine, after it.
        values = torch.from_numpy(np.stack([row.numpy() for row in rows]))
    ids = [answer.token_ids for answer in answers if answer.token_ids is not None]
    return TopLogprobs(values, torch.stack(ids)) if ids else values


def _in_place(answers: Sequence[Answer]) -> torch.Tensor | None:
    """Two answers or more in rows that follow each other, as one tensor that holds them; None for
    others. What lies between those is not theirs, and whoever copies or saves a tensor may read all
    from its first value to its last."""
    first = answers[0].row
    if first is None or any(
        answer.row != first._replace(number=first.number + i) for i, answer in enumerate(answers)
    ):
        return None
    return torch.from_numpy(np.asarray(_Rows([answer.values for answer in answers])))


class _Rows:
    """What NumPy makes an array of, without a copy, that keeps each of the rows; they follow each
    other."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows
        first = rows[0].numpy()
        step = rows[1].data_ptr() - rows[0].data_ptr()
        self.__array_interface__ = {
            "version": 3,
            "data": (first.ctypes.data, False),
            "typestr": first.dtype.str,
            "shape": (len(rows), *first.shape),
            "strides": (step, *first.strides),
        }
