"""The fields of a request's body that are tLLM's. It imports only Python's own: who only sends
requests needs neither vLLM nor torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

FIELDS = (
    "consumers",
    "capture",
    "steering_vectors",
    "prefill_steering_vectors",
    "decode_steering_vectors",
    "steering_clamps",
    "prefill_steering_clamps",
    "decode_steering_clamps",
    "steering_module_ref",
    "steering_name",
    "steering_positions",
    "patch",
    "stop_when",
    "abort_when",
    "conversation",
)
"""As arguments of `tllm.SamplingParams`; `steering_name` is another name of
`steering_module_ref`."""

_SHORTEST = 7
"""Letters of a name from which on one wrong letter leaves no doubt: `path` is not `patch`."""


def meant_by(name: str) -> str | None:
    """What may be meant by a name that nobody knows: a field that is spelt like it but for a
    letter, or the fields that steer. None for what is none of ours."""
    spelt = _spelling(name)
    meant = _SPELLINGS.get(spelt)
    if meant is None and len(spelt) <= _LONGEST + 1:
        near = {each for variant in _without_a_letter(spelt) for each in _NEAR.get(variant, ())}
        alike = [spelling for spelling in near if _differ_by_one(spelt, spelling)]
        meant = _SPELLINGS[min(alike, key=_ORDER.index)] if alike else None
    if meant is None and spelt.startswith("steer"):
        return ", ".join(field for field in FIELDS if "steering" in field)
    return meant


def _spelling(name: str) -> str:
    """A name without what is easily mistaken in it."""
    return re.sub("[-_]", "", name.lower())


_SPELLINGS = {
    _spelling(variant): name
    for name in FIELDS
    for variant in (name, f"{name}s", f"{name}es", name.removesuffix("s"))
}


def _without_a_letter(text: str) -> Iterator[str]:
    """A text, and what is left of it without one of its letters."""
    yield text
    for at in range(len(text)):
        yield text[:at] + text[at + 1 :]


_ORDER = list(_SPELLINGS)
_LONGEST = max(map(len, _SPELLINGS))
_NEAR: dict[str, list[str]] = {}
"""Spellings that are long enough to be meant by one that is nearly theirs, by themselves and by
what is left of them without a letter: two that differ by one have one of these in common. A body
may have a million names."""
for _name in _SPELLINGS:
    for _variant in _without_a_letter(_name) if len(_name) >= _SHORTEST else ():
        _NEAR.setdefault(_variant, []).append(_name)


def _differ_by_one(one: str, other: str) -> bool:
    """Whether one letter more, less or another, or two in the other order, make one the other."""
    if abs(len(one) - len(other)) > 1:
        return False
    begin = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    one, other = one[begin:], other[begin:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return max(len(one), len(other)) < 2 or (len(one) == 2 and one == other[::-1])
