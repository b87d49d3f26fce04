"""What a condition remembers: for which tokens it decides, and over which rows it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tllm.spec.reading import require_one_of

SCOPES = ("token", "rest", "next", "conversation")
"""The tokens for which a condition decides: the one it is judged for; those after it, to the end of
the sample; the one after it; those after it, and all of later requests of the conversation."""
OVERS = ("token", "prompt_last", "prompt_mean")
"""What it is judged for: each token; the last one of the prompt; the mean of the prompt's rows."""


class Memory(NamedTuple):
    """For which tokens a condition decides (of `SCOPES`), and what it is judged for (of `OVERS`).

    What is judged for the prompt decides for the tokens after it: its scope is `rest`, or
    `conversation`.
    """

    scope: str = "token"
    over: str = "token"

    @property
    def lasts(self) -> bool:
        """Whether it decides for other tokens than the one it is judged for."""
        return self.scope != "token"

    @property
    def of_prompt(self) -> bool:
        """Whether it is judged once, when the prompt ends."""
        return self.over != "token"

    @property
    def is_kept(self) -> bool:
        """Whether later requests of the conversation know of it."""
        return self.scope == "conversation"

    @property
    def of_terms(self) -> Memory:
        """What conditions remember that are joined by one with this: nothing of their own."""
        return Memory(over=self.over)

    @classmethod
    def parse(cls, given: Mapping[str, Any], field: str, *, joined: bool) -> Memory:
        """From what users write; `ValueError` naming the field that is wrong.

        Args:
            joined: whether it is one of those that another joins.
        """
        scope = _one_of(SCOPES, given, "scope", field)
        over = _one_of(OVERS, given, "over", field)
        found = cls(scope, over)
        if joined and found != NOTHING:
            raise ValueError(
                f"{field} has {'scope' if found.lasts else 'over'!r}, and is joined with others; "
                "give it to the condition that joins them"
            )
        if found.of_prompt and scope == "next":
            raise ValueError(
                f"{field}['scope']='next' with over={over!r}: what is judged for the prompt "
                "decides for all tokens after it; leave scope out, and give the entry 'positions'"
            )
        return cls("rest", over) if found.of_prompt and not found.is_kept else found

    def described(self) -> dict[str, str]:
        """For people: what is not as it is unless told."""
        told = {"over": self.over} if self.of_prompt else {}
        if self.is_kept or (self.lasts and not self.of_prompt):
            told["scope"] = self.scope
        return told


NOTHING = Memory()


def _one_of(known: tuple[str, ...], given: Mapping[str, Any], key: str, field: str) -> str:
    value = given.get(key)
    if value is None:
        return known[0]
    require_one_of(f"{field}[{key!r}]", value, known)
    return str(value)
