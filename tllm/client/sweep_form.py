"""What a sweep patches, and in which prompts."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.client.path_ways import PathWays, Place
from tllm.spec.reading import require_bool, whole_number


@dataclass(frozen=True)
class PromptPair:
    """Two prompts of one length, as token ids."""

    clean: list[int]
    corrupt: list[int]

    def check(self, number: int) -> None:
        """Refuse pairs that cannot be compared."""
        if len(self.clean) != len(self.corrupt):
            raise ValueError(
                f"pair {number}: the clean prompt has {len(self.clean)} tokens and the corrupt one "
                f"{len(self.corrupt)}; rows are put at the same positions, so give prompts of as "
                "many tokens"
            )
        if self.clean == self.corrupt:
            raise ValueError(f"pair {number}: the clean and the corrupt prompt are the same")

    @property
    def differs_from(self) -> int:
        """The first position whose tokens differ: rows before it are the same in both."""
        together = zip(self.clean, self.corrupt, strict=True)
        return next(i for i, (one, other) in enumerate(together) if one != other)


@dataclass(frozen=True)
class SweepForm:
    """What is patched in each experiment of a sweep.

    Attributes:
        places: hook points by layer.
        positions: None for all.
        heads: of `attn_heads`, `q`, `k` or `v`, one at a time; None: whole rows.
        together: all positions in one experiment, and not one at a time.
        noising, window: see `Sweep`.
        ways: what is kept from changing, and where changes arrive; None: all changes count.
    """

    places: tuple[Place, ...]
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    together: bool = False
    noising: bool = False
    window: int = 1
    ways: PathWays | None = None

    def __post_init__(self) -> None:
        if alone := [hook for hook, layer in self.places if layer is None]:
            raise ValueError(f"hooks: {alone[0]} belongs to no layer; patch it with a request")
        require_bool("together", self.together)
        require_bool("noising", self.noising)
        whole_number(self.window, "window=", 1)
        if self.window > 1 and self.ways is not None:
            raise ValueError(
                f"window={self.window} was given with freeze or receivers, but what lies between "
                "the layers of a window belongs to no path; leave one of them out"
            )

    @property
    def hooks(self) -> tuple[str, ...]:
        """Each hook point once."""
        return tuple(dict.fromkeys(hook for hook, _ in self.places))

    @property
    def layers(self) -> tuple[int, ...]:
        """Each layer once, in their order."""
        return tuple(sorted({layer for _, layer in self.places if layer is not None}))

    def at(self, place: Place) -> tuple[int, int]:
        """Where a place is in the values."""
        hook, layer = place
        assert layer is not None
        return self.hooks.index(hook), self.layers.index(layer)
