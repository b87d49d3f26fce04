"""Ways to find a direction that tells two sets of activations apart.

`FINDERS` is a table: a method is a function of two sets of rows, `positive` `[n, hidden]` and
`negative` `[m, hidden]`, both float64, to a direction `[hidden]` of any length. To add one is to
add a row. `find_direction` checks what goes in, and gives what comes out unit length, a sign and a
natural scale, the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from tllm.spec.reading import require_one_of
from tllm.steering.module import FloatArray

FinderName = Literal["diffmean", "pca", "lat", "probe"]


class DirectionFinder(Protocol):
    """From rows to a direction `[hidden]`, float64, of any length.

    `paired` says that `positive[i]` and `negative[i]` belong together; `seed` is for a method
    that draws lots.
    """

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, *, paired: bool, seed: int
    ) -> torch.Tensor: ...


class NoDirectionError(ValueError):
    """The rows do not define a direction: they do not differ, or in no way that has a sign."""


@dataclass(frozen=True)
class Direction:
    """A direction and what it takes to get from one side to the other along it.

    Attributes:
        vector: `[hidden]`, float32, unit length; positive rows project higher on average.
        scale: the natural scale, `mean(positive @ vector) - mean(negative @ vector)`: adding
            `scale * vector` brings the mean of the negative rows level with the positive ones.
        middle: the projection half-way between the two means; above it a row is rather positive.
    """

    vector: FloatArray
    scale: float
    middle: float


def diffmean(
    positive: torch.Tensor, negative: torch.Tensor, *, paired: bool, seed: int
) -> torch.Tensor:
    """The difference of the means, `mean(positive) - mean(negative)`.

    Mean difference, contrastive activation addition: Rimsky et al. 2024, arXiv:2312.06681;
    Marks and Tegmark 2024, arXiv:2310.06824. For pairs it is the mean of their differences.
    """
    return positive.mean(0) - negative.mean(0)


def pca(positive: torch.Tensor, negative: torch.Tensor, *, paired: bool, seed: int) -> torch.Tensor:
    """The first principal component of the pairs' differences.

    It maximises `sum_i (d_i @ v)^2`, `d_i = positive_i - negative_i`, over unit v: the component
    about zero, which is that of all rows when each pair's centre is taken off. That is repeng's
    `pca_center` (repeng/extract.py), and RepE's (Zou et al. 2023, arXiv:2310.01405, section 3.1)
    when each pair's order is tossed for, as theirs is. repeng's `pca_diff` takes the mean of the
    differences off first, and with it what all pairs have in common.

    Without pairs: the first component of all rows, each set weighted alike and centred on the point
    half-way between the means, so that sets of different sizes have the same say.
    """
    if paired:
        return first_component(positive - negative)
    middle = (positive.mean(0) + negative.mean(0)) / 2
    rows = [
        (positive - middle) / len(positive) ** 0.5,
        (negative - middle) / len(negative) ** 0.5,
    ]
    return first_component(torch.cat(rows))


def lat(positive: torch.Tensor, negative: torch.Tensor, *, paired: bool, seed: int) -> torch.Tensor:
    """Linear artificial tomography: the first component of the unit differences of pairs.

    With `d = (h_i - h_j) / |h_i - h_j|` for each pair of rows, v maximises `sum (d @ v)^2`; which
    of the two comes first does not matter, so labels are not used but for the sign. Zou et al.
    2023, arXiv:2310.01405, section 3.1; with the differences normalised, as Wu et al. 2025
    (AxBench, arXiv:2501.17148) and EasySteer do. Pairs of equal rows say nothing and are left out.

    The pairs are those that were given, as in RepE's own experiments. Without pairs all rows are
    shuffled together and cut into pairs at random (of an odd number one is left out): then the
    component is of whatever varies most, which need not be the contrast. The scores tell.
    """
    if paired:
        differences = positive - negative
    else:
        rows = torch.cat([positive, negative])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        half = len(rows) // 2
        differences = rows[order[:half]] - rows[order[half : 2 * half]]
    lengths = differences.norm(dim=1, keepdim=True)
    kept = lengths[:, 0] > 0
    if not kept.any():
        raise NoDirectionError("every pair is of two equal rows; give prompts that differ")
    return first_component(differences[kept] / lengths[kept])


def probe(
    positive: torch.Tensor,
    negative: torch.Tensor,
    *,
    paired: bool,
    seed: int,
    l2: float = 1.0,
    max_iterations: int = 2000,
) -> torch.Tensor:
    """The normal of a logistic regression, `w` of `P(positive | h) = sigmoid(h @ w + b)`.

    It minimises `sum_i log(1 + exp(-y_i (z_i @ u + b))) + l2/2 |u|^2` with `y_i = +-1`, over
    standardised features `z = (h - mean) / std`, so that a feature's unit does not matter; then
    `w = u / std`. That is scikit-learn's `LogisticRegression(C=1/l2)` behind a `StandardScaler`.
    Features that are constant get weight 0. Probing: Alain and Bengio 2016, arXiv:1610.01644; as a
    steering direction: Li et al. 2023, arXiv:2306.03341.

    Raises:
        ValueError: `l2` is not above 0: rows that can be told apart have no best weights then.
        RuntimeError: LBFGS did not get the gradient below 1e-6 of what it was at zero.
    """
    if not l2 > 0:
        raise ValueError(f"l2={l2}; it must be above 0")
    rows = torch.cat([positive, negative])
    signs = torch.cat([rows.new_ones(len(positive)), -rows.new_ones(len(negative))])
    std = rows.std(0, correction=0)
    # Rounding leaves a constant feature a spread; standardised, it would be as large as any other.
    constant = std <= 1e-12 * rows.abs().amax(0)
    std = torch.where(constant, 1.0, std)
    features = torch.where(constant, 0.0, (rows - rows.mean(0)) / std)

    weights = rows.new_zeros(rows.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=max_iterations,
        history_size=20,
        tolerance_grad=1e-9 * len(rows),
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    gradients: list[float] = []

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        margins = signs * (features @ weights[:-1] + weights[-1])
        value = torch.nn.functional.softplus(-margins).sum() + l2 / 2 * weights[:-1].square().sum()
        value.backward()
        assert weights.grad is not None
        gradients.append(float(weights.grad.norm()))
        return value

    with torch.enable_grad():
        optimizer.step(loss)
        loss()
    if gradients[-1] > 1e-6 * gradients[0] + 1e-9 * len(rows):
        raise RuntimeError(
            f"the logistic regression did not converge: the gradient is {gradients[-1]:.1e}, and "
            f"was {gradients[0]:.1e} at zero weights; use another method"
        )
    return (weights.detach()[:-1] / std).masked_fill(constant, 0.0)


FINDERS: Mapping[str, DirectionFinder] = {
    "diffmean": diffmean,
    "pca": pca,
    "lat": lat,
    "probe": probe,
}


def find_direction(
    positive: torch.Tensor,
    negative: torch.Tensor,
    method: str = "diffmean",
    *,
    paired: bool = True,
    seed: int = 0,
) -> Direction:
    """The direction from `negative` `[m, hidden]` to `positive` `[n, hidden]`.

    Computed in float64 on the rows' device, whatever their floating-point type; the same arguments
    give the same answer.

    Raises:
        ValueError: an unknown method; rows that are not two finite `[n >= 2, hidden]` of
            floating-point numbers; pairs of sets of different sizes.
        NoDirectionError: (a ValueError) sets with the same mean, or that differ only where the
            method does not look, so that no direction has a sign.
    """
    function = finder_named(method)
    positive, negative = checked_rows(positive, negative)
    if paired and len(positive) != len(negative):
        raise ValueError(
            f"there are {len(positive)} positive and {len(negative)} negative rows, which are no "
            "pairs; give as many of each, in the same order, or say paired=False"
        )
    return oriented(function(positive, negative, paired=paired, seed=seed), positive, negative)


def finder_named(method: str) -> DirectionFinder:
    """The row of `FINDERS`; `ValueError` names those there are."""
    require_one_of("method", method, FINDERS)
    return FINDERS[method]


def checked_rows(
    positive: torch.Tensor, negative: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sets as float64, or a `ValueError`."""
    for name, rows in (("positive", positive), ("negative", negative)):
        if rows.ndim != 2 or not rows.is_floating_point():
            raise ValueError(
                f"{name} is {rows.dtype} of shape {list(rows.shape)}; it must be rows of "
                "floating-point numbers, [n, hidden]"
            )
        if len(rows) < 2:
            raise ValueError(f"{name} has {len(rows)} rows; give at least 2 of each side")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(
                f"{name} has rows with NaN or infinity; the model overflows on these prompts"
            )
    if positive.shape[1] != negative.shape[1]:
        raise ValueError(
            f"positive has width {positive.shape[1]} and negative {negative.shape[1]}; they must "
            "be of the same layer of the same model"
        )
    return positive.double(), negative.double()


def oriented(found: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> Direction:
    """`found` with unit length, and the sign under which positive rows project higher."""
    high, low = positive.mean(0), negative.mean(0)
    length = float(found.norm())
    gap = float((high - low) @ found) / length if length > 0 else 0.0
    # What rounding leaves of a difference of two equal means is no direction.
    rounding = 1e-12 * float(high.norm() + low.norm())
    if length == 0.0 or abs(gap) <= rounding:
        raise NoDirectionError(
            "the positive and the negative rows have the same mean along what was found, so it "
            "has no sign; are the two sets the same?"
        )
    unit = found / length if gap > 0 else -found / length
    middle = float((high + low) @ unit) / 2
    return Direction(unit.float().cpu().numpy(), abs(gap), middle)


def first_component(rows: torch.Tensor) -> torch.Tensor:
    """Unit v that maximises `|rows @ v|`, for float64 rows `[n, hidden]`; no mean is taken off.

    The first eigenvector of the smaller of `rows @ rows.T` and `rows.T @ rows`. The square is no
    harm for the largest one: its relative error is of the order of 1e-16 over the relative gap.

    Raises:
        NoDirectionError: rows that are all zero, or whose two largest components are equal.
    """
    wide = rows.shape[0] < rows.shape[1]
    gram = rows @ rows.T if wide else rows.T @ rows
    if float(gram.diagonal().max()) == 0.0:
        raise NoDirectionError("the rows do not differ, so there is no principal component")
    first = _dominant(gram)
    if first is None:
        values, vectors = torch.linalg.eigh(gram)
        if len(values) > 1 and float(values[-1] - values[-2]) <= 1e-10 * float(values[-1]):
            raise NoDirectionError(
                "the two largest principal components are equal, so there is no first one; give "
                "more rows, or use diffmean"
            )
        first = vectors[:, -1]
    component = rows.T @ first if wide else first
    return component / component.norm()


def _dominant(gram: torch.Tensor) -> torch.Tensor | None:
    """The first eigenvector `[n]` of a positive `[n, n]`, or None if it does not stand out.

    By orthogonal iteration on two vectors: with thousands of rows, all eigenvectors take minutes
    on a few cores. The second vector is there to see a tie.
    """
    if len(gram) < 3:
        return None
    random = torch.Generator().manual_seed(0)
    basis = torch.randn(len(gram), 2, generator=random, dtype=torch.float64).to(gram)
    for _ in range(300):
        basis = torch.linalg.qr(basis).Q
        image = gram @ basis
        values, turn = torch.linalg.eigh(basis.T @ image)
        second, first = values.tolist()
        vector = basis @ turn[:, 1]
        if float((image @ turn[:, 1] - first * vector).norm()) <= 1e-13 * first:
            return vector if first - second > 1e-3 * first else None
        basis = image
    return None


assert set(FINDERS) == set(get_args(FinderName))
