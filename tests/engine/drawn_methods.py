"""Every way of steering with random vectors: what is asked, and what it means in plain torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


class DrawnMethod(NamedTuple):
    """An entry of steering, and what it makes of rows `[rows, hidden]`.

    Attributes:
        margin: how far numbers of rows are from where the formula jumps, relative to what is
            above 1; None where it never does.
    """

    entry: dict[str, Any]
    change: Change
    margin: Change | None = None

    def is_near(self, rows: torch.Tensor, border: float) -> bool:
        """Whether rounding decides what is done to one of these rows."""
        return self.margin is not None and bool((self.margin(rows) < border).any())


class Draws:
    """Random numbers for entries that steer rows `[hidden]` whose numbers are about `size`."""

    def __init__(self, seed: int, hidden: int, size: float) -> None:
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.hidden, self.size = hidden, size

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.hidden, generator=self.generator)

    def unit(self) -> torch.Tensor:
        return torch.nn.functional.normalize(self.rows(), dim=0)

    def strength(self) -> float:
        return self.pick.choice([1.0, 0.8, -0.5])


def _add(draw: Draws) -> DrawnMethod:
    w, scale = draw.size * draw.rows(), draw.strength()
    return DrawnMethod({"vector": w, "scale": scale}, lambda h: h + scale * w)


def _norm_match(draw: Draws) -> DrawnMethod:
    v, scale = draw.unit(), draw.strength()
    return DrawnMethod(
        {"vector": 3 * v, "scale": scale}, lambda h: h + scale * h.norm(dim=1, keepdim=True) * v
    )


def _clamp(draw: Draws) -> DrawnMethod:
    v, strength, high = draw.unit(), draw.strength(), 0.3 * draw.size
    low = draw.pick.choice([None, -0.4 * draw.size])

    def change(h):
        p = (h @ v)[:, None]
        return h + strength * (p.clip(low, high) - p) * v

    return DrawnMethod({"vector": 3 * v, "min": low, "max": high, "strength": strength}, change)


def _ablate(draw: Draws) -> DrawnMethod:
    v, strength = draw.unit(), draw.strength()
    return DrawnMethod(
        {"vector": v, "strength": strength}, lambda h: h - strength * (h @ v)[:, None] * v
    )


def _project(draw: Draws) -> DrawnMethod:
    v, strength, value = draw.unit(), draw.strength(), 3 * draw.size
    return DrawnMethod(
        {"vector": v, "strength": strength, "value": value},
        lambda h: h + strength * (value - (h @ v)[:, None]) * v,
    )


def _multiply(draw: Draws) -> DrawnMethod:
    v, strength, factor = draw.unit(), draw.strength(), draw.pick.choice([0.0, -1.5, 3.0])
    return DrawnMethod(
        {"vector": v, "strength": strength, "factor": factor},
        lambda h: h + strength * (factor - 1) * (h @ v)[:, None] * v,
    )


def _rotate(draw: Draws) -> DrawnMethod:
    basis = torch.linalg.qr(draw.rows(2).double().T).Q.T.float()
    skewed = torch.stack([2 * basis[0], 3 * basis[1] - 4 * basis[0]])
    degrees, strength = draw.pick.choice([0.0, 30.0, 200.0, -90.0]), draw.strength()
    adaptive = draw.pick.choice([True, False])
    turned = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])

    def change(h):
        p = h @ basis.T
        delta = strength * (p.norm(dim=1, keepdim=True) * turned - p) @ basis
        return torch.where((p[:, :1] > 0) | torch.tensor(not adaptive), h + delta, h)

    entry = {"plane": skewed, "degrees": degrees, "strength": strength, "adaptive": adaptive}
    return DrawnMethod(entry, change, (lambda h: (h @ basis[0]).abs()) if adaptive else None)


def _affine(draw: Draws) -> DrawnMethod:
    weight, shift = 1 + 0.5 * draw.rows(), 0.5 * draw.size * draw.rows()
    source = {"source_mean": draw.size * draw.rows(), "source_std": 0.5 + draw.rows().abs()}
    target = {"target_mean": draw.size * draw.rows(), "target_std": 0.5 * draw.rows().abs()}
    strength, told = draw.strength(), draw.pick.choice(["map", "weight", "shift", "statistics"])
    entry: dict[str, Any] = {"strength": strength}
    if told == "statistics":
        entry |= source | target
        weight = target["target_std"] / source["source_std"]
        shift = target["target_mean"] - weight * source["source_mean"]
    elif told == "weight":
        entry |= {"weight": weight}
        shift = torch.zeros(draw.hidden)
    elif told == "shift":
        entry |= {"shift": shift}
        weight = torch.ones(draw.hidden)
    else:
        entry |= {"weight": weight, "shift": shift}
    few = min(8, draw.hidden)
    low, high = torch.full((2, draw.hidden), 1e6)
    low = -low
    bounded = draw.pick.random() < 0.5
    if bounded:
        low[:few], high[:few] = (draw.size * draw.rows(2)).sort(dim=0).values[:, :few]
        entry |= {"low": low, "high": high}

    def change(h):
        mapped = strength * (weight * h + shift) + (1 - strength) * h
        return torch.where((h >= low) & (h <= high), mapped, h)

    def margin(h):
        edges = torch.stack([(h - low)[:, :few], (h - high)[:, :few]]).abs()
        return edges / h[:, :few].abs().clamp(min=1)

    return DrawnMethod(entry, change, margin if bounded else None)


def _scale_dimensions(draw: Draws) -> DrawnMethod:
    mask, scale = (draw.rows() > 0.5).float(), draw.pick.choice([0.7, -1.0, 2.0])
    return DrawnMethod({"mask": mask, "scale": scale}, lambda h: h + scale * (h * mask))


def _low_rank(draw: Draws) -> DrawnMethod:
    rank = draw.pick.choice([1, 4, 5])
    rotation = torch.linalg.qr(draw.rows(rank).double().T).Q.T.float()
    weight, bias = draw.rows(rank) / draw.hidden**0.5, draw.size * draw.rows(rank)[:, 0]
    strength = draw.strength()

    def change(h):
        return h + strength * (h @ weight.T + bias - h @ rotation.T) @ rotation

    entry = {"rotation": rotation, "weight": weight, "bias": bias, "strength": strength}
    return DrawnMethod(entry, change)


def _sae_features(draw: Draws) -> DrawnMethod:
    count, strength = draw.pick.choice([1, 3, 6]), draw.strength()
    encoder, decoder = (draw.rows(count) / draw.hidden**0.5 for _ in range(2))
    encoder_bias, decoder_bias = draw.size * draw.rows(count)[:, 0], draw.size * draw.rows()
    threshold = draw.size * draw.rows(count)[:, 0].abs() * draw.pick.choice([0.0, 0.3])
    numbers = draw.size * draw.rows(2, count)[..., 0].sort(dim=0).values
    asked: dict[str, torch.Tensor] = draw.pick.choice(
        [
            {"value": numbers[1]},
            {"factor": numbers[0]},
            {"min": numbers[0].abs()},
            {"min": numbers[0], "max": numbers[1]},
        ]
    )
    only = draw.pick.choice([True, False])
    entry = {
        "encoder": encoder,
        "decoder": decoder,
        "encoder_bias": encoder_bias,
        "decoder_bias": decoder_bias,
        "threshold": threshold,
        "only_if_active": only,
        "strength": strength,
    }

    def scores(h):
        return (h - decoder_bias) @ encoder.T + encoder_bias

    def change(h):
        features = torch.where(scores(h) > threshold, scores(h).relu(), 0.0)
        target = features
        if "value" in asked:
            target = asked["value"].expand_as(features)
        elif "factor" in asked:
            target = asked["factor"] * features
        else:
            target = torch.clip(features, asked["min"], asked.get("max"))
        if only:
            target = torch.where(features > 0, target, features)
        return h + strength * (target - features) @ decoder

    jumps = only or float(threshold.max()) > 0
    margin = (lambda h: (scores(h) - threshold).abs()) if jumps else None
    return DrawnMethod({**entry, **asked}, change, margin)


def _k_steering(draw: Draws) -> DrawnMethod:
    """With one hidden layer or two, of the gradient that torch finds."""
    widest = min(6, draw.hidden)
    units, outer = draw.pick.randint(1, widest), draw.pick.choice([0, 1, widest])
    weight1 = draw.rows(units) / draw.hidden**0.5
    bias1 = draw.size * draw.rows(units)[:, 0]
    weight2, bias2 = draw.rows(outer)[:, :units], draw.size * draw.rows(outer)[:, 0]
    last = draw.size * draw.rows(4)[:, : outer or units]
    asked = draw.pick.choice([{"target": [1]}, {"avoid": [0, 3]}, {"target": [0, 2], "avoid": [3]}])
    alpha = draw.strength()
    entry = {"weight1": weight1, "bias1": bias1, "last_weight": last, "alpha": alpha, **asked}
    if outer:
        entry |= {"weight2": weight2, "bias2": bias2}

    def scores(h):
        """Of the units of each hidden layer."""
        first = h @ weight1.T + bias1
        return [first, first.relu() @ weight2.T + bias2] if outer else [first]

    def change(h):
        with torch.inference_mode(False), torch.enable_grad():
            row = h.clone().requires_grad_()
            logits = scores(row)[-1].relu() @ last.T
            means = {key: logits[:, labels].mean(1).sum() for key, labels in asked.items()}
            loss = means.get("avoid", 0.0) - means.get("target", 0.0)
            (gradient,) = torch.autograd.grad(loss, row)
        return h - alpha * gradient

    def margin(h):
        return torch.cat(scores(h), 1).abs() / h.norm(dim=1, keepdim=True).clamp(min=1)

    return DrawnMethod(entry, change, margin)


METHODS: Mapping[str, Callable[[Draws], DrawnMethod]] = {
    "add": _add,
    "norm_match": _norm_match,
    "clamp": _clamp,
    "ablate": _ablate,
    "project": _project,
    "multiply": _multiply,
    "rotate": _rotate,
    "affine": _affine,
    "scale_dimensions": _scale_dimensions,
    "low_rank": _low_rank,
    "sae_features": _sae_features,
    "k_steering": _k_steering,
}


def drawn(method: str, seed: int, hidden: int, size: float = 1.0) -> DrawnMethod:
    """One of a method."""
    found = METHODS[method](Draws(seed, hidden, size))
    return found._replace(entry={"method": method, **found.entry})
