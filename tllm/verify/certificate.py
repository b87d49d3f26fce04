"""What was compared, how it came out, and what could not be compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from torch import Tensor

from tllm.verify.reference import Layer

Verdict = Literal["certified", "incomplete", "differs"]
EXIT: dict[Verdict, int] = {"certified": 0, "differs": 1, "incomplete": 3}
"""Exit status of `tllm verify`; 2 is a command that cannot be carried out."""


@dataclass(frozen=True)
class Difference:
    """Something that is not as the reference says.

    Attributes:
        batch, request, sample: whose it is; requests are counted from 0 in their batch.
        asked: the request in words.
        where: the hook point, or `token`, `log-probability`, `result`.
        layer: of the hook point.
        position: of the token in its sequence; that of the worst, if there are several.
        size: how far it is off, relative to the row.
        limit: what rounding explains.
        what: in words.
    """

    batch: str
    request: int
    sample: int
    asked: str
    where: str
    what: str
    layer: Layer = None
    position: int | None = None
    size: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        position = "" if self.position is None else f", position {self.position}"
        return (
            f"{self.where}{layer}: {self.batch} request {self.request}, sample {self.sample}"
            f"{position}: {self.what} ({self.asked})"
        )


@dataclass
class PointFigures:
    """What was found at one hook point, or of log-probabilities.

    Attributes:
        layers: that were compared; none where there are none.
        rows: that were compared, once for each layer.
        worst: the largest error of any row, relative to its size.
        limit: what is accepted.
        exchanged: for each tensor, the error if every row were its neighbour's.
        steered: requests that were steered here and nowhere else.
        seen: of these, whose rows or tokens would be off by more than the limit without steering.
        patched, patches_seen: the same of requests that were patched.
        gated, gates_seen: requests that were steered here on a condition; and those of them that
            would be off by more than the limit had they been steered always, and had they never.
    """

    limit: float
    layers: list[int] = field(default_factory=list)
    rows: int = 0
    worst: float = 0.0
    exchanged: list[float] = field(default_factory=list)
    steered: int = 0
    seen: int = 0
    patched: int = 0
    patches_seen: int = 0
    gated: int = 0
    gates_seen: int = 0

    @property
    def power(self) -> float:
        """What exchanged rows are typically off by."""
        return median(self.exchanged) if self.exchanged else 0.0


@dataclass
class BatchFigures:
    """One batch of requests.

    Attributes:
        preemptions: how often a running request was preempted.
        chunked: prompts that were computed in several steps.
        cached_tokens: prompt tokens that the prefix cache served.
        on_edge: sequences that were not compared: the score of one of their tokens lies so near to
            a condition's threshold that rounding decides.
        differing: greedy tokens that are not the reference's likeliest, within the limits.
    """

    name: str
    requests: int
    samples: int = 0
    tokens: int = 0
    differing: int = 0
    rows: int = 0
    preemptions: int = 0
    chunked: int = 0
    cached_tokens: int = 0
    on_edge: int = 0


@dataclass
class Certificate:
    """The outcome for one model on one engine.

    Attributes:
        reference: what it was compared with.
        engine: versions, device, dtype and options.
        points: by hook point, and for `logits`.
        lacking: by hook point, why this engine does not have it, and what it is refused with.
        unchecked: what could not be compared, and why.
        notes: what else there is to know.
    """

    model: str
    reference: str
    engine: dict[str, Any] = field(default_factory=dict)
    points: dict[str, PointFigures] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    batches: list[BatchFigures] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Whether anything differs, else whether everything could be compared."""
        if self.differences:
            return "differs"
        return "incomplete" if self.unchecked else "certified"

    @property
    def exit_status(self) -> int:
        """0 only if everything was compared and nothing differs."""
        return EXIT[self.verdict]

    def to_json(self) -> str:
        values = {"verdict": self.verdict, **asdict(self)}
        for name, figures in self.points.items():
            values["points"][name]["exchanged"] = figures.power
        return json.dumps(values, indent=2)


def row_errors(got: Tensor, expected: Tensor) -> Tensor:
    """How far each row `[rows, hidden]` is off: its largest error, relative to its largest number.

    A row that is smaller than most is compared with these: what is left of large sums has their
    rounding errors. One that is much larger, as the first token's often is, hides nobody's errors.
    """
    sizes = expected.abs().amax(1)
    return (got - expected).abs().amax(1) / sizes.clamp(min=max(float(sizes.median()), 1e-30))
