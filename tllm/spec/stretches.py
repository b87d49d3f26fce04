"""What is done to each position of a sequence, from the groups of its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from tllm.spec.groups import GroupUse
from tllm.spec.phases import SELECTED_PHASES, Phase
from tllm.spec.selection import (
    Criteria,
    Selection,
    columns_of,
    covers_each,
    negative_and_others,
    stretch_starts,
)

Configuration: TypeAlias = tuple[str, ...]
"""Digests of the groups that apply to a token, in order: one row of the workers' tables."""


@dataclass(frozen=True)
class TokenChoice:
    """What is done to generated tokens where it depends on which they are.

    Attributes:
        by_token: configurations of the tokens that are treated otherwise than all others, in the
            order of their ids.
        others: of all others.
    """

    by_token: tuple[tuple[int, Configuration], ...]
    others: Configuration

    @property
    def configurations(self) -> frozenset[Configuration]:
        """All that may be needed."""
        return frozenset((self.others, *(configuration for _, configuration in self.by_token)))


_MOST_COUNTED = 2**12
"""Combinations of groups in a phase that are counted one by one; of more, a bound is told."""

Stretches: TypeAlias = list[tuple[int, Configuration | TokenChoice]]
"""`(first position, what is done)` of each stretch of positions; the first begins at 0, the last
has no end."""


def steering_stretches(
    uses: Sequence[GroupUse], prompt_len: int, tokens: Sequence[int]
) -> Stretches:
    """What is done to each position of a sequence.

    Args:
        uses: the groups of a request.
        prompt_len: number of prompt tokens.
        tokens: the prompt's tokens (for selections by token).
    """
    if len(uses) == 1 and uses[0].phase == "any" and uses[0].positions.everything:
        return [(0, (uses[0].digest,))]  # as most requests are, and a burst of them is waited for
    if all(use.positions.everything for use in uses):
        prefill = tuple(use.digest for use in uses if use.phase != "decode")
        decode = tuple(use.digest for use in uses if use.phase != "prefill")
        return [(0, prefill)] if prefill == decode else [(0, prefill), (prompt_len, decode)]
    kinds = _kinds_of_tokens(uses)
    where = [
        [use.positions.intervals(prompt_len, tokens, kind[0] if kind else None) for use in uses]
        for kind in kinds
    ]
    starts = stretch_starts(prompt_len, [each for of_kind in where for each in of_kind])
    covered = [covers_each(each, starts) for of_kind in where for each in of_kind]
    kinds_of_columns, kind_of = columns_of([[start >= prompt_len for start in starts], *covered])
    told = [_applied(uses, kinds, column) for column in kinds_of_columns]
    stretches: Stretches = []
    for start, kind in zip(starts, kind_of, strict=True):
        if not stretches or stretches[-1][1] != told[kind]:
            stretches.append((start, told[kind]))
    return stretches


def _applied(
    uses: Sequence[GroupUse], kinds: Sequence[Sequence[int]], column: tuple[bool, ...]
) -> Configuration | TokenChoice:
    """What is done in a stretch.

    Args:
        kinds: of generated tokens, see `_kinds_of_tokens`.
        column: whether it is of generated tokens; and, for each kind, which of the uses mean its
            tokens.
    """
    generated, *meant = column
    phase = "decode" if generated else "prefill"
    found = [
        tuple(
            use.digest
            for use, means in zip(uses, meant[first : first + len(uses)], strict=True)
            if means and use.phase in ("any", phase)
        )
        for first in range(0, len(meant), len(uses))
    ]
    by_token = [
        (token, configuration)
        for kind, configuration in zip(kinds, found, strict=True)
        if generated and configuration != found[0]
        for token in kind
    ]
    return TokenChoice(tuple(sorted(by_token)), found[0]) if by_token else found[0]


def configurations(stretches: Stretches) -> frozenset[Configuration]:
    """All configurations that a sequence may need; `()` where nothing is done."""
    found: set[Configuration] = set()
    for applied in {applied for _, applied in stretches}:
        found |= applied.configurations if isinstance(applied, TokenChoice) else {applied}
    return frozenset(found)


def _kinds_of_tokens(uses: Sequence[GroupUse]) -> list[list[int]]:
    """Tokens that every selection treats alike, together; first those that none names: `[]`."""
    criteria = [
        frozenset(each.token_ids)
        for use in uses
        if use.phase != "prefill" and use.positions.depends_on_generated_tokens
        for each in (use.positions.include, use.positions.exclude)
    ]
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for token in frozenset().union(*criteria):
        kinds.setdefault(tuple(token in each for each in criteria), []).append(token)
    return [[], *kinds.values()]


def most_configurations(uses: Sequence[GroupUse]) -> int:
    """How many distinct combinations of groups a request may need, whatever its tokens are."""
    if len(uses) == 1 and uses[0].positions.everything:
        return 1
    found: set[tuple[str, ...]] = set()
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        meant = ("any", SELECTED_PHASES[phase])
        there = [u for u in uses if u.phase in ("any", phase) and u.positions.phase in meant]
        front, end = _listed_together(there, phase)
        free = [
            ((), (number,)) if use.positions.include or use.positions.exclude else ((number,),)
            for number, use in enumerate(there)
            if not _lists_positions(use.positions)
        ]
        most = len(front) * len(end) * 2 ** sum(len(choice) > 1 for choice in free)
        if most > _MOST_COUNTED:
            return 2 * most
        for one, other, *chosen in product(front, end, *free):
            applied = sorted(set().union(one, other, *chosen))
            found.add(tuple(there[number].digest for number in applied))
    return len(found - {()})


def _lists_positions(where: Selection) -> bool:
    """Whether a selection is a list of positions and nothing else."""
    alone = Criteria(positions=where.include.positions)
    return bool(alone) and not where.exclude and where.include == alone


def _listed_together(
    uses: Sequence[GroupUse], phase: Phase
) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Of those that list positions, which one token may have together: at a position from the
    beginning, and at one from the end. How far these are apart nobody knows, but no position is
    two others that are counted from where it is."""
    listed = {
        number: negative_and_others(use.positions.include.positions)
        for number, use in enumerate(uses)
        if _lists_positions(use.positions)
    }
    found: list[set[tuple[int, ...]]] = []
    for side in (1, 0):
        at: dict[int, tuple[int, ...]] = {}
        for number, positions in listed.items():
            own = (number,)
            for position in set(positions[side]):
                at[position] = at.get(position, ()) + own
        found.append({(), *at.values()})
    front, end = found
    return front, end if phase == "prefill" else {()}  # the end is that of the prompt
