"""Steering as a request asks for it, and what is to come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tllm.ports import Phase
from tllm.spec.selection import Selection
from tllm.verify.gated import Judged
from tllm.verify.reference import Change, Layer, Steers

Place: TypeAlias = tuple[str, Layer]
"""A hook point and its layer; None for a point that belongs to none."""

PHASES: tuple[Phase, ...] = ("any", "prefill", "decode")

TOKENS = tuple(range(2, 90))
"""Tokens that some steering is given for."""

POSITIONS: dict[str, tuple[Any, Callable[[int, int, int], bool]]] = {
    "all": ("all", lambda p, n, token: True),
    "last prompt": ("last_prompt", lambda p, n, token: p == n - 1),
    "listed": ([0, -2], lambda p, n, token: p in (0, n - 2)),
    "generated": ("all_generated", lambda p, n, token: p >= n),
    "window": (
        {"phase": "generation", "windows": [[1, 3]]},
        lambda p, n, token: n + 1 <= p < n + 3,
    ),
    "range without": (
        {"ranges": [[-4, None]], "exclude": {"positions": [-2]}},
        lambda p, n, token: p >= n - 4 and p != n - 2,
    ),
    "prompt tokens": (
        {"phase": "prompt", "token_ids": TOKENS, "exclude": {"windows": [[0, 2]]}},
        lambda p, n, token: p < n and token in TOKENS and p >= 2,
    ),
    "tokens": (
        {"token_ids": TOKENS, "exclude": {"positions": [-2]}},
        lambda p, n, token: token in TOKENS and p != n - 2,
    ),
    "generated without": (
        {"phase": "generation", "exclude": {"token_ids": TOKENS, "windows": [[4, 5]]}},
        lambda p, n, token: p >= n and token not in TOKENS and p != n + 4,
    ),
}
"""As users write it, and whether a position is meant: (position, prompt length, token)."""


def phase_of(positions: str) -> Phase:
    """The phase that all tokens are of which some of `POSITIONS` mean; `any` where of both."""
    phases = Selection.parse(POSITIONS[positions][0]).phases
    if len(phases) > 1:
        return "any"
    return "prefill" if "prompt" in phases else "decode"


METHODS: tuple[tuple[str, dict[str, float]], ...] = (
    ("add", {"scale": 1.5}),
    ("norm_match", {"scale": 0.4}),
    ("clamp", {"min": -0.3, "max": 0.2, "strength": 0.8}),
    ("ablate", {}),
    ("project", {"value": 1.2}),
    ("multiply", {"factor": -1.5}),
    ("clamp", {"value": 0.7}),
    ("rotate", {"degrees": 60.0, "strength": 0.8}),
    ("affine", {"strength": 0.7}),
    ("scale_dimensions", {"scale": -0.6}),
    ("low_rank", {"strength": 0.9}),
    ("sae_features", {}),
    ("k_steering", {"alpha": 0.7}),
    ("affine", {"strength": 1.0}),
)
"""Every method, with the numbers that an entry of rows whose numbers are about 1 gives; what it
takes in the place of one vector, `arrays_for` draws."""


def arrays_for(method: str, direction: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What an entry gives of a method that takes more than one vector; empty for the others.

    None of them jumps anywhere, where rounding would decide.

    Args:
        direction: `[hidden]`, as long as rows are.
    """
    hidden, size = len(direction), float(direction.norm()) / len(direction) ** 0.5

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, hidden, generator=generator)

    if method == "rotate":
        return {"plane": torch.stack([direction, rows()])}
    if method == "affine" and float(torch.rand((), generator=generator)) < 0.5:
        return {"weight": 1 + 0.3 * rows().tanh(), "shift": 0.5 * direction}
    if method == "affine":
        return {
            "source_mean": 0.2 * size * rows(),
            "source_std": size * (1 + 0.3 * rows().tanh()),
            "target_mean": 0.5 * direction,
            "target_std": size * (1 + 0.3 * rows().tanh()),
        }
    if method == "scale_dimensions":
        return {"mask": (rows() > 0.3).float()}
    if method == "low_rank":
        return {
            "rotation": torch.linalg.qr(rows(3).double().T).Q.T.float().contiguous(),
            "weight": rows(3) / hidden**0.5,
            "bias": size * rows(3)[:, 0],
        }
    if method == "sae_features":
        return {
            "encoder": rows(2) / hidden**0.5,
            "decoder": torch.nn.functional.normalize(rows(2)),
            "encoder_bias": size * rows(2)[:, 0],
            "decoder_bias": 0.3 * direction,
            "value": 2 * size * rows(2)[:, 0],
        }
    if method == "k_steering":
        # Units far from where they begin to be active: half of each layer is, whatever the row.
        sides = torch.tensor([1.0, -1.0, 1.0, -1.0])
        weight1 = rows(4) / hidden**0.5
        weight2 = torch.randn(4, 4, generator=generator)
        last = size * torch.randn(3, 4, generator=generator)
        return {
            "weight1": weight1,
            "bias1": 10 * size * sides,
            "weight2": weight2,
            "bias2": 100 * size * sides,
            "last_weight": last,
            "target": torch.tensor([0.0, 2.0]),
            "avoid": torch.tensor([1.0]),
        }
    return {}


_LENGTHS = ("min", "max", "value")


def given_for(given: Mapping[str, float], size: float) -> dict[str, float]:
    """What an entry of rows whose numbers are about `size` gives."""
    return {key: value * size if key in _LENGTHS else value for key, value in given.items()}


@dataclass(frozen=True, eq=False)
class Steered:
    """One operation of a request.

    kind: whether it is asked among the vectors or the clamps; these come last.
    when: its condition; None: always.
    arrays: given in the place of the vector, by methods that take several.
    """

    place: Place
    method: str
    vector: Tensor
    given: Mapping[str, float] = field(default_factory=dict)
    phase: Phase = "any"
    positions: str = "all"
    kind: str = "vectors"
    when: Judged | None = None
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def mask(self, tokens: Sequence[int], n: int) -> Tensor:
        """Which of the positions of `tokens`, of which n are the prompt's, it is done to."""
        meant = POSITIONS[self.positions][1]
        chosen = [meant(p, n, token) for p, token in enumerate(tokens)]
        phases = ["prefill" if p < n else "decode" for p in range(len(tokens))]
        in_phase = [self.phase in ("any", phase) for phase in phases]
        return torch.tensor(chosen) & torch.tensor(in_phase)

    def __str__(self) -> str:
        when = "" if self.when is None else f" {self.when}"
        return f"{self.kind} {self.method} {self.place} {self.phase} {self.positions}{when}"


def steering_fields(steering: Sequence[Steered]) -> dict[str, Any]:
    """The keywords of `SamplingParams`, with several operations at a place in their order."""
    fields: dict[str, Any] = {}
    for each in steering:
        prefix = "" if each.phase == "any" else f"{each.phase}_"
        tier = fields.setdefault(f"{prefix}steering_{each.kind}", {})
        point, layer = each.place
        entry = {
            **(each.arrays or {"vector": each.vector}),
            "method": each.method,
            "positions": POSITIONS[each.positions][0],
            **each.given,
        }
        if each.when is not None:
            entry["when"] = each.when.entry
        if layer is None:
            tier.setdefault(point, []).append(entry)
        else:
            tier.setdefault(point, {}).setdefault(layer, []).append(entry)
    return fields


def changes(steering: Sequence[Steered], tokens: Sequence[int], n: int) -> Steers:
    """What the reference does to a sequence of which n tokens are the prompt's."""
    steers: dict[Place, list[Change]] = {}
    for each in steering:
        mask = each.mask(tokens, n)
        given: dict[str, Any] = {**each.given, **each.arrays}
        if each.when is not None:
            given["when"] = each.when.within(mask, n)
        change = each.method, each.vector, given, mask
        steers.setdefault(each.place, []).append(change)
    return steers
