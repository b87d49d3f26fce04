"""Reading what users write: numbers, arrays and hook points, with errors that name the
field."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tllm.spec.hooks import HookPoint
from tllm.spec.operations import LARGEST_FLOAT32

FloatArray = npt.NDArray[np.float32]
_BESIDE_TEXT = ("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids", "prompt_embeds")
"""What vLLM's prompts may have and text has not."""
_CONSTANTS = {"True": True, "False": False, "None": None}
_NAMED = 20
"""How many names a message has."""
_LONGEST_NAME = 256
_MOST = 2**64 - 1
"""The largest whole number that a message between processes holds."""
_MOST_SHOWN = 256
"""Bits of a number up to which a message has it: of one of more than 4300 digits Python has no
text."""


def digest_of(content: bytes | memoryview) -> str:
    """What stands for a content."""
    return hashlib.sha256(content).hexdigest()[:32]


@contextmanager
def said_of(name: str) -> Iterator[None]:
    """What a `ValueError` says that is raised in here begins with what it is said of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of each line of a file that is not empty; `ValueError` names the line that
    is wrong."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file of JSON Lines")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            marked = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if marked.strip():
                try:
                    yield number, json.loads(marked.decode())
                except ValueError as error:  # not UTF-8, or not JSON
                    raise ValueError(
                        f"{path}, line {number} is not JSON: {error}; give a line of JSON for "
                        'each, a text with quotation marks ("...")'
                    ) from None


def prompt_lines(path: Path) -> Iterator[tuple[int, Any, str | list[int]]]:
    """Number and content of each line of a file of prompts, and the prompt: a text, or the token
    ids of `prompt_token_ids`. What would be more than that to vLLM is refused; other keys are the
    user's own. `ValueError` names the line that is wrong."""
    for number, entry in json_lines(path):
        where = f"{path}, line {number}"
        found = entry if isinstance(entry, dict) else {"prompt": entry}
        if more := [key for key in _BESIDE_TEXT if found.get(key) is not None]:
            raise ValueError(
                f"{where} has {more}, and these prompts are text alone: images, videos, sounds and "
                "embeddings are given to generate or chat of an engine, or over HTTP"
            )
        text, tokens = found.get("prompt"), found.get("prompt_token_ids")
        if text is not None and tokens is not None:
            raise ValueError(f"{where}: both 'prompt' and 'prompt_token_ids' were given; give one")
        if isinstance(text, str):
            yield number, entry, text
        elif isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
            yield number, entry, tokens
        else:
            raise ValueError(
                f"{where}: give a text, or an object with 'prompt' or 'prompt_token_ids'"
            )


def json_mapping(text: str | bytes, what: str) -> dict[str, Any]:
    """The JSON object in a text; `ValueError` saying what it was to be when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}; it must be a JSON object")
    return value


def typed(text: str) -> Any:
    """What the text of a value means on a command line: JSON, a constant as Python spells it, or
    the text itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def check_text(given: str, name: str) -> str:
    """The text, as Python's own: NumPy has another. Refuses one with lone surrogates, as JSON may
    have it. Neither can be sent to a worker."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}={given!r:.60} has lone surrogates; leave them out") from None
    return str(given)


def check_name(given: Any, what: str) -> str:
    """The name of something that is registered, as Python's own text. Refuses what a list of names
    would not show, and what a command line or a request's field would lose an end of.

    Args:
        what: is called so, for the message.
    """
    is_name = isinstance(given, str) and given.isprintable() and given == given.strip()
    if not is_name or not 0 < len(given) <= _LONGEST_NAME:
        raise ValueError(
            f"{what} name {given!r:.80}: give 1 to {_LONGEST_NAME} printable characters, without "
            "spaces at the ends"
        )
    return str(given)


def own_numbers(given: Any) -> Any:
    """The numbers of an array or a tensor as Python's own; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def one_or_several(given: Any) -> list[Any]:
    """What may be one value, or several in a list; a text is one."""
    alone = isinstance(given, str) or not isinstance(given, Iterable)
    return [given] if alone else list(given)


def hook_named(hook: Any, name: str) -> HookPoint:
    """The hook point of a name."""
    with said_of(name):
        return HookPoint.parse(hook)


def check_64_bits(number: int, name: str, instead: str = "a smaller one") -> None:
    """Refuse what no message between processes holds."""
    if not -(2**63) <= number <= _MOST:
        raise ValueError(
            f"{name} is beyond the 64 bits that a whole number may have; give {instead}"
        )


def whole_number(given: Any, before: str, least: float = -math.inf, most: float = _MOST) -> int:
    """A whole number from `least` to `most`; `before` begins the message where it is none. With an
    infinite `most` it may have more than 64 bits."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise ValueError(f"{before}{given!r:.60} is not a whole number")
    number = int(given)
    if most == _MOST:
        check_64_bits(number, before.rstrip(": ="))
    if not least <= number <= most:
        allowed = f"{least} or more" if most >= _MOST else f"from {least} to {most}"
        bits = number.bit_length()
        told = number if bits < _MOST_SHOWN else f"a number of {bits} bits"
        raise ValueError(f"{before}{told} must be {allowed}")
    return number


def whole_numbers(
    given: Any,
    name: str,
    least: float = -math.inf,
    most: float = _MOST,
    *,
    may_be_empty: bool = False,
) -> list[int]:
    """A whole number or several, in a list, an array or a tensor; each from `least` to `most`."""
    given = own_numbers(given)
    listed = given if isinstance(given, Iterable) else [given]
    if isinstance(listed, (str, bytes, Mapping)):
        raise ValueError(f"{name}={given!r:.60}: give a whole number, or a list of whole numbers")
    if isinstance(listed, (list, tuple)) and set(map(type, listed)) == {int}:
        fit = max(least, -(2**63)) <= min(listed) and max(listed) <= min(most, _MOST)
        if fit:  # there may be thousands, which are not read one by one
            return list(listed)
    found = [whole_number(own_numbers(each), f"{name}: ", least, most) for each in listed]
    if not found and not may_be_empty:
        raise ValueError(f"{name} is empty; give one number or more")
    return found


def require_one_of(name: str, given: object, known: Any) -> None:
    """Refuse what is none of the values of a `Literal`, or of some names."""
    allowed = get_args(known) or known
    if not isinstance(given, str) or given not in allowed:
        raise ValueError(f"{name}={given!r:.60} is not known; choose one of {', '.join(allowed)}")


def registered_names(names: Iterable[str]) -> str:
    """What there is, for who names something else: the first of them, and how many more."""
    known = sorted(names)
    more = len(known) - _NAMED
    return (", ".join(known[:_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")


def require_bool(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ValueError(f"{name}={given!r:.60} must be True or False")


def allow_keys(given: Iterable[Any], allowed: Iterable[str], name: str, what: str) -> None:
    """Refuse a mapping that has other keys than these; `what` says in the message what takes
    them."""
    if unknown := sorted(set(map(str, given)) - set(allowed)):
        raise ValueError(f"{name} has unknown keys {unknown}; {what} takes {sorted(allowed)}")


def allow_options(given: Iterable[str], allowed: Sequence[str], name: str) -> None:
    """Refuse options of a consumer that it does not know; `enabled` every one has."""
    if unknown := sorted(set(given) - {"enabled", *allowed}):
        raise ValueError(f"{name} has unknown options {unknown}; it takes {', '.join(allowed)}")


def scalar(given: Any, name: str) -> float:
    """A finite number that float32 holds."""
    if isinstance(given, Integral):
        check_64_bits(int(given), name, "a smaller one, or one with a decimal point")
    try:
        if isinstance(given, (bool, np.bool_, str, bytes)):
            raise TypeError
        value = float(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={given!r:.60} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not finite")
    if abs(value) > LARGEST_FLOAT32:
        raise ValueError(f"{name}={value} is beyond float32, in which rows are computed")
    return value


def float_array(given: Any, name: str) -> FloatArray:
    """A float32 copy of a list, an array, or a tensor on any device."""
    array = numeric_array(given, name)
    if array.dtype == np.float32:
        array = array.copy()
    else:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are NaN, infinite or beyond float32")
    return array


class FiniteVector(NamedTuple):
    """A vector that was read and has no numbers that are NaN or infinite.

    Attributes:
        numbers: float32 `[hidden]`, not to be written to.
        largest: the largest absolute value.
    """

    numbers: FloatArray
    largest: float


def vectors_together(given: Sequence[Any]) -> list[FiniteVector] | None:
    """Copies of float32 arrays or tensors `[hidden]` of one width, made in a few calls for all of
    them; None where any is something else, or has numbers that are not finite."""
    arrays = [np.asarray(e) if isinstance(e, np.ndarray) else _of_tensor(e) for e in given]
    alike = [each for each in arrays if each is not None and each.dtype == np.float32]
    if len(alike) < len(arrays) or len({each.shape for each in alike}) != 1:
        return None
    if alike[0].ndim != 1 or not alike[0].size:
        return None
    rows = np.array(alike)
    largest = np.maximum(rows.max(1), -rows.min(1))
    if not np.isfinite(largest).all():  # so that none of its row's numbers is NaN, either
        return None
    rows.setflags(write=False)
    return [*map(FiniteVector, rows, largest.tolist())]


def _of_tensor(given: Any) -> npt.NDArray[Any] | None:
    """A tensor as an array; None for what is none, or cannot be one."""
    if not hasattr(given, "detach"):
        return None
    try:
        return numeric_array(given, "")
    except ValueError:
        return None


def numeric_array(given: Any, name: str) -> npt.NDArray[Any]:
    """A list, an array, or a tensor on any device, as an array of integers or floating-point
    numbers; `ValueError` naming the field for anything else. It may share the memory of `given`."""
    if isinstance(given, (str, bytes)) or not isinstance(given, (Iterable, np.ndarray)):
        raise ValueError(f"{name} is {given!r:.60}; give a list of numbers, an array or a tensor")
    try:
        if hasattr(given, "detach"):
            given = given.detach().cpu()
            given = (given.float() if given.is_floating_point() else given).numpy()
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from None
    if isinstance(given, (list, tuple)):
        small = array.dtype.kind in "iuf" and bool((np.abs(array) < 2**63).all())
        _check_listed(given, name, array.ndim, small)
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"{name} is not an array of numbers: {array.dtype} is no kind of real number"
        )
    return array


def _check_listed(given: Sequence[Any], name: str, levels: int, small: bool) -> None:
    """Refuse by its place what NumPy takes for a number in silence: `True` for 1.0, and a whole
    number beyond 64 bits for one nearby.

    Args:
        levels: of lists.
        small: whether none of the numbers may be beyond 64 bits.
    """
    if small and _NUMBERS.issuperset(map(type, given)):
        return
    for i, each in enumerate(given):
        if str(getattr(each, "dtype", "")).endswith("bool"):
            each = own_numbers(each)
        if isinstance(each, bool):
            raise ValueError(f"{name}[{i}] is {each}; give a number")
        if isinstance(each, int):
            check_64_bits(each, f"{name}[{i}]")
        elif levels > 1 and isinstance(each, (list, tuple)):
            _check_listed(each, f"{name}[{i}]", levels - 1, small)


_NUMBERS = frozenset((float, int))
