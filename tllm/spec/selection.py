"""Which tokens of a sequence are meant: the selection language of steering and capture."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, islice
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tllm.spec.media import MODALITIES, MediaItem, PromptMedia, media_to_wire, parse_media
from tllm.spec.phases import SELECTED_PHASES, SelectedPhase, phase_named
from tllm.spec.reading import own_numbers, whole_numbers

#: Half-open intervals of positions, sorted, disjoint and not touching.
Intervals: TypeAlias = tuple[tuple[int, int], ...]

IntArray: TypeAlias = npt.NDArray[np.int64]

END = 2**31 - 1
"""The end of an interval that has none."""

_NAMED: dict[str, dict[str, Any]] = {
    "all": {},
    "all_prompt": {"phase": "prompt"},
    "all_generated": {"phase": "generation"},
    "last_prompt": {"positions": [-1]},
    **{modality: {modality: "all"} for modality in MODALITIES},
}
_CRITERIA = ("positions", "ranges", "windows", "token_ids", *MODALITIES)
_NOWHERE: tuple[int | None, int | None] = (END, None)
"""A range that has no position."""

_FEW = 64
"""Positions up to which Python looks them up sooner than NumPy does."""

MOST_LISTED = 2**16
"""Numbers, or pairs, in one list: each may begin a stretch of its own, which every process on the
way of a request looks at."""

_SHORT = 1024
"""Bytes of a selection as plain data up to which the parsed selection is kept."""


@dataclass(frozen=True)
class Criteria:
    """Tokens that meet any of these.

    Attributes:
        positions: absolute positions; negative ones count from the end of the prompt, so -1 is
            the last prompt token.
        ranges: `(start, stop)`, half-open, counted as positions are; None is open.
        windows: `(start, stop)`, half-open, counted from the first token of the selection's phase
            (the first generated token for `generation`, else the first token of the prompt).
        token_ids: the token itself.
        media: the tokens that stand for these images, videos and sounds of the prompt.
    """

    positions: tuple[int, ...] = ()
    ranges: tuple[tuple[int | None, int | None], ...] = ()
    windows: tuple[tuple[int, int | None], ...] = ()
    token_ids: tuple[int, ...] = ()
    media: tuple[MediaItem, ...] = ()

    def __bool__(self) -> bool:
        named = self.positions or self.ranges or self.windows
        return bool(named or self.token_ids or self.media)

    @property
    def of_prompt(self) -> bool:
        """Whether they are met by tokens of the prompt alone, however long it is."""
        return bool(self) and not (
            self.windows
            or self.token_ids
            or any(position >= 0 for position in self.positions)
            or any(stop is None or stop >= 0 for _, stop in self.ranges)
        )

    @property
    def from_end(self) -> bool:
        """Whether some of them count from the end of the prompt."""
        edges = (edge for each in self.ranges for edge in each if edge is not None)
        return any(position < 0 for position in (*self.positions, *edges))

    @cached_property
    def _runs(self) -> tuple[Intervals, Intervals]:
        """The positions that count from the end of the prompt, and those that do not, each as
        intervals."""
        from_end, from_start = negative_and_others(self.positions)
        return runs_of(from_end), runs_of(from_start)

    def in_prompt(self, media: PromptMedia) -> Criteria:
        """These criteria with the positions of the items that they name."""
        if not self.media:
            return self
        found = tuple(pair for item in self.media for pair in media.ranges(item))
        return replace(self, ranges=(*self.ranges, *(found or (_NOWHERE,))), media=())

    def intervals(
        self, prompt_len: int, origin: int, tokens: Sequence[int], generated: int | None
    ) -> Intervals:
        """Where the criteria are met; see `Selection.intervals`.

        Args:
            origin: position that windows count from.
        """
        if self.media:
            raise ValueError(
                f"positions name the tokens of {self.media[0]}, and where these are in the prompt "
                "was not found out"
            )

        def absolute(position: int) -> int:
            return position + prompt_len if position < 0 else position

        from_end, listed = self._runs
        if not (from_end or self.ranges or self.windows or self.token_ids):
            return listed
        found = [*listed, *((prompt_len + start, prompt_len + stop) for start, stop in from_end)]
        for start, stop in self.ranges:
            found.append(
                (0 if start is None else absolute(start), END if stop is None else absolute(stop))
            )
        for first, last in self.windows:
            found.append((origin + first, END if last is None else origin + last))
        if self.token_ids:
            wanted = frozenset(self.token_ids)
            found += [(i, i + 1) for i, token in enumerate(tokens) if token in wanted]
            if generated in wanted:
                found.append((prompt_len, END))
        return united(found)


@dataclass(frozen=True)
class Selection:
    """Tokens of one sequence: those of a phase that meet `include`, and nothing of `exclude`.

    An empty `include` means every token of the phase; exclusions always win. A token belongs to
    the prompt or was generated; its position is its index in the sequence.

    `Selection.parse` takes what users write: `"all"`, `"all_prompt"`, `"all_generated"`,
    `"last_prompt"`, `"image"`, `"video"`, `"audio"`, a position, a list of positions, or a mapping
    with any of `phase` (`any`, `prompt` or `prefill`, `generation` or `decode`), `positions`,
    `ranges`, `windows`, `token_ids`, `image`, `video`, `audio` and `exclude` (a mapping of the same
    criteria).
    """

    phase: SelectedPhase = "any"
    include: Criteria = field(default_factory=Criteria)
    exclude: Criteria = field(default_factory=Criteria)

    @classmethod
    def parse(cls, given: Any, name: str = "positions") -> Selection:
        """The selection a user wrote. Raises `ValueError` naming the field `name`."""
        if isinstance(given, Selection):
            return given
        if isinstance(given, str):
            if given not in _NAMED:
                raise ValueError(
                    f"{name}={given!r} is not known; give one of {', '.join(_NAMED)}, a list of "
                    "positions, or a mapping with "
                    f"{', '.join(('phase', *_CRITERIA, 'exclude'))}"
                )
            given = _NAMED[given]
        given = own_numbers(given)
        if isinstance(given, (Iterable, Integral)) and not isinstance(given, Mapping):
            listed = whole_numbers(_listed(given, name), name, -END, END, may_be_empty=True)
            if not listed:
                raise ValueError(f"{name}=[] selects nothing; leave it out or list positions")
            given = {"positions": listed}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{name}={given!r} is {type(given).__name__}; give one of {', '.join(_NAMED)}, a "
                "list of positions, or a mapping"
            )
        if unknown := sorted(set(map(str, given)) - {"phase", "exclude", *_CRITERIA}):
            raise ValueError(
                f"{name} has unknown keys {unknown}; it takes "
                f"{', '.join(('phase', *_CRITERIA, 'exclude'))}"
            )
        phase = SELECTED_PHASES[phase_named(given.get("phase", "any"), f"{name}['phase']")]
        excluded = given.get("exclude", {})
        if not isinstance(excluded, Mapping) or set(excluded) - set(_CRITERIA):
            raise ValueError(
                f"{name}['exclude']={excluded!r}: give a mapping with any of {', '.join(_CRITERIA)}"
            )
        include = _criteria({k: given[k] for k in _CRITERIA if k in given}, name)
        if any(k in given for k in _CRITERIA) and not include:
            raise ValueError(
                f"{name}={dict(given)!r} lists nothing, so it would select nothing; leave the "
                "empty lists out, or name something"
            )
        if phase == "generation" and include.media:
            raise ValueError(
                f"{name} names the tokens of {include.media[0]} and the phase 'generation', and "
                "such tokens are of the prompt; leave the phase out"
            )
        return cls(phase, include, _criteria(excluded, f"{name}['exclude']"))

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Selection:
        """The inverse of `to_wire`. Short ones are parsed once: most requests ask the same."""
        content = pickle.dumps(wire)  # json takes several times as long
        return _parsed(content) if len(content) <= _SHORT else cls.parse(wire)

    @cached_property
    def everything(self) -> bool:
        return self is EVERYWHERE or self == EVERYWHERE

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """The items of the prompt that it names, to mean their tokens or to leave them out."""
        return self.include.media + self.exclude.media

    @property
    def from_end(self) -> bool:
        """Whether it hangs on where the prompt ends, beside by its phase."""
        return self.include.from_end or self.exclude.from_end

    def in_prompt(self, media: PromptMedia) -> Selection:
        """This selection in a prompt with these items: by positions. Items that the prompt lacks
        have no tokens."""
        if not self.media:
            return self
        include, exclude = self.include.in_prompt(media), self.exclude.in_prompt(media)
        return replace(self, include=include, exclude=exclude)

    @cached_property
    def phases(self) -> frozenset[SelectedPhase]:
        """The phases, `prompt` and `generation`, of which it may mean tokens."""
        both: tuple[SelectedPhase, ...] = ("prompt", "generation")
        own = {self.phase} if self.phase != "any" else {*both}
        return frozenset(own - {"generation"} if self.include.of_prompt else own)

    @property
    def single_tokens(self) -> frozenset[tuple[bool, int]] | None:
        """All tokens that it may mean of any sequence, where it names each of them alone: whether
        it counts from the end of the prompt (-1 is the last token of that, 0 the first that is
        generated), and its number. What is excluded is among them. None where it may mean others.
        """
        include = self.include
        if not include or include.token_ids or include.media:
            return None
        named = [(position < 0, position, position + 1) for position in include.positions]
        for start, stop in include.ranges:
            first = start or 0
            last = 0 if stop is None and first < 0 and self.phase == "prompt" else stop
            if last is None or (first < 0) != (last <= 0):
                return None
            named.append((first < 0, first, last))
        for first, last in include.windows:
            if last is None:
                return None
            named.append((self.phase == "generation", first, last))
        if any(last > first + 1 for _, first, last in named):
            return None
        return frozenset((from_end, first) for from_end, first, _ in named)

    @property
    def depends_on_generated_tokens(self) -> bool:
        """Whether which generated token it is decides."""
        return self.phase != "prompt" and bool(self.include.token_ids or self.exclude.token_ids)

    def intervals(
        self, prompt_len: int, tokens: Sequence[int] = (), generated: int | None = None
    ) -> Intervals:
        """The positions that are meant.

        Args:
            prompt_len: number of prompt tokens.
            tokens: tokens from position 0 on, as far as they are known; needed only for
                `token_ids`.
            generated: what every generated token is taken to be; None for one that no criterion
                names.
        """
        origin = prompt_len if self.phase == "generation" else 0
        everywhere: Intervals = ((0, END),)
        found = self.include.intervals(prompt_len, origin, tokens, generated)
        meant = found if self.include else everywhere
        if self.phase == "prompt":
            meant = intersected(meant, ((0, prompt_len),))
        elif self.phase == "generation":
            meant = intersected(meant, ((prompt_len, END),))
        if self.exclude:
            excluded = self.exclude.intervals(prompt_len, origin, tokens, generated)
            meant = intersected(meant, complement(excluded))
        return meant

    def in_prompt_and_after(self) -> tuple[Selection, ...]:
        """Selections that name no generated token by its id: together they mean what this one
        does of the prompt, and all generated tokens that it may mean, whatever these are."""
        after = replace(
            self,
            phase="generation",
            include=Criteria() if self.include.token_ids else self._counted(self.include),
            exclude=replace(self._counted(self.exclude), token_ids=()),
        )
        return (after,) if self.phase == "generation" else (replace(self, phase="prompt"), after)

    def _counted(self, criteria: Criteria) -> Criteria:
        """Criteria whose windows count from the first token of the sequence, as ranges."""
        if self.phase == "generation":
            return criteria
        return replace(criteria, ranges=(*criteria.ranges, *criteria.windows), windows=())

    def check(self, prompt_len: int, max_tokens: int | None, name: str = "positions") -> None:
        """Refuse positions at which the sequence cannot have a row, and those of which none is of
        the phase. What is excluded may lie anywhere.

        Args:
            max_tokens: the most tokens that are generated; None when that is not limited. The last
                one is drawn and never passes the model.
        """
        rows = END if max_tokens is None else prompt_len + max_tokens - 1
        for position in ends_of(self.include.positions):
            if not -prompt_len <= position < rows:
                raise ValueError(
                    f"{name}: position {position} is out of range for a prompt of {prompt_len} "
                    f"tokens and max_tokens={max_tokens}; give {-prompt_len} to {rows - 1}"
                )
        if self.phase == "any" or self.include != Criteria(positions=self.include.positions):
            return
        of_prompt = {position < prompt_len for position in self.include.positions}
        if of_prompt == {self.phase == "generation"}:
            raise ValueError(
                f"{name}: positions={list(self.include.positions)} of a prompt of {prompt_len} "
                f"tokens and phase={self.phase!r} have no token in common; leave one of them out"
            )

    def to_wire(self) -> dict[str, Any]:
        """As plain data, such that `parse` gives the same selection."""
        wire: dict[str, Any] = {"phase": self.phase, **_to_wire(self.include)}
        if self.exclude:
            wire["exclude"] = _to_wire(self.exclude)
        return wire


EVERYWHERE = Selection()
"""Every token."""


@lru_cache(4096)
def _parsed(content: bytes) -> Selection:
    return Selection.parse(pickle.loads(content))


def ends_of(positions: Collection[int]) -> tuple[int, ...]:
    """The least and the greatest of positions; none of none."""
    return (min(positions), max(positions)) if positions else ()


def negative_and_others(positions: Collection[int]) -> tuple[list[int], list[int]]:
    """Positions that count from the end of the prompt, and those that do not."""
    return [p for p in positions if p < 0], [p for p in positions if p >= 0]


def runs_of(numbers: Sequence[int] | IntArray) -> Intervals:
    """The numbers, in any order, as half-open intervals."""
    if not len(numbers):
        return ()
    found = np.unique(np.asarray(numbers, np.int64))
    breaks = np.flatnonzero(np.diff(found) > 1)
    starts, lasts = np.append(found[:1], found[breaks + 1]), np.append(found[breaks], found[-1:])
    return tuple(zip(starts.tolist(), (lasts + 1).tolist(), strict=True))


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """The union of half-open intervals; what is below 0, or empty, is dropped."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if start < 0:
            start = 0
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def complement(intervals: Intervals) -> Intervals:
    """The positions in none of the intervals."""
    edges = [0, *chain.from_iterable(intervals), END]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, stop) for start, stop in pairs if stop > start)


def intersected(left: Intervals, right: Intervals) -> Intervals:
    """The positions in both."""
    few, many = sorted((left, right), key=len)
    found: list[tuple[int, int]] = []
    for start, stop in few:
        within = many[max(0, bisect_left(many, (start,)) - 1) : bisect_left(many, (stop,))]
        if within and within[0][1] <= start:
            within = within[1:]
        if within:
            first = len(found)
            found += within
            found[first] = max(start, found[first][0]), found[first][1]
            found[-1] = found[-1][0], min(stop, found[-1][1])
    return tuple(found)


def stretch_starts(prompt_len: int, intervals: Iterable[Intervals]) -> list[int]:
    """Where stretches of positions begin within which nothing changes: at the phases' first
    positions and at every edge of an interval."""
    edges = {0, prompt_len}.union(*map(chain.from_iterable, intervals))
    return sorted(edge for edge in edges if edge < END)


def stretches_of(starts: Sequence[int], positions: Sequence[int]) -> list[int]:
    """`[positions]`, in which of the stretches that begin at `starts` each lies; -1 before all."""
    if len(positions) <= _FEW:
        return [bisect_right(starts, position) - 1 for position in positions]
    found: list[int] = (np.searchsorted(starts, positions, side="right") - 1).tolist()
    return found


def covers_each(intervals: Intervals, positions: Sequence[int]) -> list[bool]:
    """`[positions]`, whether each lies in any of the intervals."""
    edges = list(chain.from_iterable(intervals))
    return [stretch % 2 == 0 for stretch in stretches_of(edges, positions)]


def columns_of(covered: Iterable[Sequence[bool]]) -> tuple[list[tuple[bool, ...]], list[int]]:
    """The distinct columns of `[parts, positions]`, and which of them each position has."""
    numbers: dict[tuple[bool, ...], int] = {}
    columns = zip(*covered, strict=True)
    kind_of = [numbers.setdefault(column, len(numbers)) for column in columns]
    return list(numbers), kind_of


def _criteria(given: Mapping[str, Any], name: str) -> Criteria:
    return Criteria(
        positions=tuple(_whole_numbers(given.get("positions", ()), f"{name}['positions']")),
        ranges=tuple(_pairs(given.get("ranges", ()), f"{name}['ranges']", signed=True)),
        windows=tuple(
            (0 if start is None else start, stop)
            for start, stop in _pairs(given.get("windows", ()), f"{name}['windows']", signed=False)
        ),
        token_ids=tuple(_token_ids(given.get("token_ids", ()), f"{name}['token_ids']")),
        media=parse_media(given, name),
    )


def _token_ids(given: Any, name: str) -> list[int]:
    ids = _whole_numbers(given, name)
    if negative := [token for token in ids if token < 0]:
        raise ValueError(f"{name}: token ids are 0 or more, but {negative} were given")
    return sorted(set(ids))


def _whole_numbers(given: Any, name: str) -> list[int]:
    given = _listed(given, name)
    return list(dict.fromkeys(whole_numbers(given, name, -END, END, may_be_empty=True)))


def _listed(given: Any, name: str) -> Any:
    """What is given in a list, which is not too long; anything else as it is."""
    given = own_numbers(given)
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        return given
    listed = given if isinstance(given, Sized) else [*islice(given, MOST_LISTED + 1)]
    if len(listed) > MOST_LISTED:
        raise ValueError(
            f"{name} lists more than {MOST_LISTED}, the most that are allowed; give fewer, or "
            "ranges of positions"
        )
    return listed


def _pairs(given: Any, name: str, *, signed: bool) -> list[tuple[int | None, int | None]]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{name}={given!r}: give a list of [start, stop]")
    pairs: list[tuple[int | None, int | None]] = []
    for pair in map(own_numbers, _listed(given, name)):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"{name}: {pair!r} is not [start, stop]; None is an open end")
        numbers = _whole_numbers([edge for edge in pair if edge is not None], name)
        if not signed and any(number < 0 for number in numbers):
            raise ValueError(f"{name}: {list(pair)} counts from the phase's first token: 0 or more")
        start, stop = (None if edge is None else int(edge) for edge in pair)
        same_sign = start is not None and stop is not None and (start < 0) == (stop < 0)
        if same_sign and start >= stop:  # type: ignore[operator]
            raise ValueError(f"{name}: {list(pair)} is empty; stop must be greater than start")
        if stop == 0:
            raise ValueError(
                f"{name}: {list(pair)} ends before the first token, and is empty; give None for an "
                "open end"
            )
        pairs.append((start, stop))
    return pairs


def _to_wire(criteria: Criteria) -> dict[str, Any]:
    wire: dict[str, Any] = {}
    for name in ("positions", "token_ids"):
        if numbers := getattr(criteria, name):
            wire[name] = list(numbers)
    for name in ("ranges", "windows"):
        if pairs := getattr(criteria, name):
            wire[name] = [list(pair) for pair in pairs]
    return wire | media_to_wire(criteria.media) if criteria.media else wire
