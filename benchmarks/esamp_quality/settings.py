"""How the problems are sampled: plainly, with ESamp in its forms, and with what it could be
confused with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SAMPLES = 64

UNGUIDED = "plain", "stratified"
"""Kinds without a strength."""


@dataclass(frozen=True)
class Setting:
    """One way of sampling every problem.

    Attributes:
        kind: `plain`; `esamp`; `shared`, one distiller for all problems; `waves`, a distiller for
            each problem, which is kept from one wave of samples to the next; `own`, a distiller for
            each sample; `matched`, ESamp without what only sharpens (`MatchedESamp`); `drawn`, a
            distiller of the tokens that were drawn (`DrawnESamp`); `drawn-near`, the same among the
            tokens that could be drawn; `memory`, away from what other
            samples drew in such states (`SampleMemory`); `stratified`, samples that share the
            distribution out among them (`StratifiedSampling`); `lens`, contrast with what the
            final norm and LM head make of a layer's rows; `noise`, contrast with random errors as
            large as the distiller's.
        beta: strength of the guidance.
        layer: whose rows are read.
        lr: the distiller's.
        waves: the samples are drawn in so many parts, one after the other.
    """

    kind: str
    temperature: float = 1.0
    min_p: float = 0.0
    beta: float = 0.0
    layer: int = 0
    lr: float = 1e-3
    waves: int = 1

    @property
    def name(self) -> str:
        """As it is shown."""
        parts = [self.kind, f"T {self.temperature:g}", f"min-p {self.min_p:g}"]
        if self.kind not in UNGUIDED:
            parts.append(f"beta {self.beta:g}")
        if self.layer:
            parts.append(f"layer {self.layer}")
        if self.lr != Setting.lr:
            parts.append(f"lr {self.lr:g}")
        if self.waves > 1:
            parts.append(f"{self.waves} waves")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For the file of results."""
        return {"name": self.name, **asdict(self)}


def grid(layers: int) -> list[Setting]:
    """All settings, those first that matter most: whoever stops early has a comparison."""
    found = list(_plain((0.8, 1.0, 1.2), (0.0, 0.05)))
    for temperature in (1.0, 1.2):
        for beta in (0.25, 0.5, 1.0):
            found += [Setting(kind, temperature, 0.05, beta) for kind in ("esamp", "matched")]
    found += _plain((0.6, 1.4), (0.0, 0.05))
    for beta in (0.25, 1.0):
        found.append(Setting("waves", 1.0, 0.05, beta, waves=8))
        found.append(Setting("shared", 1.0, 0.05, beta))
        found.append(Setting("noise", 1.0, 0.05, beta))
        found.append(Setting("lens", 1.0, 0.05, beta))
        found.append(Setting("lens", 1.0, 0.05, beta, layer=layers // 2))
        found.append(Setting("esamp", 1.0, 0.05, beta, layer=layers // 2))
        found.append(Setting("esamp", 1.0, 0.05, beta, lr=1e-2))
    for kind in ("esamp", "matched"):
        for temperature in (0.8, 1.4):
            for beta in (0.25, 1.0):
                found.append(Setting(kind, temperature, 0.05, beta))
        for beta in (0.1, 2.0):
            found.append(Setting(kind, 1.0, 0.05, beta))
            found.append(Setting(kind, 1.2, 0.0, beta))
    for beta in (0.5, 2.0):
        found.append(Setting("waves", 1.2, 0.05, beta, waves=8))
        found.append(Setting("matched", 1.0, 0.05, beta, lr=1e-2))
        found.append(Setting("matched", 1.0, 0.05, beta, layer=layers // 2))
    found += [
        Setting("stratified", t, floor) for t in (0.6, 0.8, 1.0, 1.2) for floor in (0.0, 0.05)
    ]
    for beta in (0.25, 1.0):
        for lr in (1e-3, 1e-2):
            found.append(Setting("own", 1.0, 0.05, beta, lr=lr))
            for waves in (1, 8):
                found.append(Setting("drawn", 1.0, 0.05, beta, lr=lr, waves=waves))
        middle = layers // 2
        found.append(Setting("drawn", 1.0, 0.05, beta, layer=middle, lr=1e-2, waves=8))
        for temperature in (0.8, 1.2):
            found.append(Setting("drawn", temperature, 0.05, beta, lr=1e-2, waves=8))
    for beta in (0.1, 0.25, 0.5, 1.0):
        found.append(Setting("memory", 1.0, 0.05, beta, waves=8))
        found.append(Setting("memory", 0.8, 0.05, beta, waves=8))
    found.append(Setting("memory", 1.0, 0.05, 0.5))
    found.append(Setting("memory", 0.6, 0.05, 0.5, waves=8))
    return list(dict.fromkeys(found))


def confirmation() -> list[Setting]:
    """What won in `grid` on its problems, around its best, to be tried on others."""
    found = list(_plain((0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (0.05,)))
    for kind in ("drawn", "drawn-near"):
        for temperature in (0.6, 0.8):
            for beta in (1.0, 2.0):
                found.append(Setting(kind, temperature, 0.05, beta, lr=1e-2, waves=8))
    found.append(Setting("drawn", 0.7, 0.05, 1.0, lr=3e-2, waves=8))
    found.append(Setting("drawn", 0.7, 0.05, 1.0, lr=3e-3, waves=8))
    found.append(Setting("drawn", 0.7, 0.05, 1.0, lr=1e-2, waves=16))
    found.append(Setting("esamp", 0.7, 0.05, 0.25, lr=1e-2))
    return found


def _plain(temperatures: Iterable[float], floors: Iterable[float]) -> Iterable[Setting]:
    floors = tuple(floors)
    return (Setting("plain", t, floor) for t in temperatures for floor in floors)
