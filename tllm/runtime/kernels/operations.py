"""Operations of steering on rows: the kernel's functions, and their reference in PyTorch."""

from __future__ import annotations

import torch

from tllm.runtime.descriptor import KIND_UNIT, Descriptor, FeatureWord, Operation, OperationKind
from tllm.runtime.kernels.addresses import view_at
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.spec.operations import MAX_UNITS

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.addresses import row_at

    WORDS = tl.constexpr(int(Operation.SIZE))
    VECTOR = tl.constexpr(int(Operation.VECTOR))
    ADD = tl.constexpr(int(Operation.ADD))
    NORM = tl.constexpr(int(Operation.NORM))
    COMPONENT = tl.constexpr(int(Operation.COMPONENT))
    STRENGTH = tl.constexpr(int(Operation.STRENGTH))
    LOW = tl.constexpr(int(Operation.LOW))
    HIGH = tl.constexpr(int(Operation.HIGH))
    GATE = tl.constexpr(int(Operation.GATE))
    KIND = tl.constexpr(KIND_UNIT)
    ROTATE = tl.constexpr(int(OperationKind.ROTATE))
    DIMENSIONS = tl.constexpr(int(OperationKind.DIMENSIONS))
    GRADIENT = tl.constexpr(int(OperationKind.GRADIENT))
    CLASSIFIER_UNITS = tl.constexpr(MAX_UNITS)
    FEATURE_BIAS = tl.constexpr(int(FeatureWord.BIAS))
    FEATURE_THRESHOLD = tl.constexpr(int(FeatureWord.THRESHOLD))
    FEATURE_SLOPE = tl.constexpr(int(FeatureWord.SLOPE))
    FEATURE_LOW = tl.constexpr(int(FeatureWord.LOW))
    FEATURE_HIGH = tl.constexpr(int(FeatureWord.HIGH))
    FEATURE_ONLY_ACTIVE = tl.constexpr(int(FeatureWord.ONLY_ACTIVE))

    @triton.jit
    def operate(value, vector, operation, share):
        """One steering operation on a row `[BLOCK]`, as much of it as its gate says; padding stays
        0."""
        _, add, norm, component, strength, low, high, _ = operation
        vector = vector.to(tl.float32)
        scale = add
        if norm != 0.0:
            scale += norm * tl.sqrt(tl.sum(value * value, axis=0))
        if tl.abs(component) + tl.abs(strength) != 0.0:
            along = tl.sum(value * vector, axis=0)
            clipped = tl.minimum(tl.maximum(along, low), high)
            scale += component * along + strength * (clipped - along)
        return value + tl.where(share != 0.0, share * scale, 0.0) * vector

    @triton.jit
    def _following(vectors, operation, number, offsets, inside, HIDDEN: tl.constexpr):
        """A vector of an operation that has several, in float32."""
        at = row_at(vectors, operation[0] + number, offsets, HIDDEN)
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _along_features(value, operation, tables, offsets, inside, HIDDEN: tl.constexpr):
        """What an operation adds that reads features of a row, at strength 1."""
        _, vectors, operations = tables
        first = operation[5].to(tl.int32, bitcast=True)
        delta = tl.zeros_like(value)
        for i in range(operation[6].to(tl.int32, bitcast=True)):
            read = _following(vectors, operation, 2 * i, offsets, inside, HIDDEN)
            rule = (operations + (first + i) * WORDS).to(tl.pointer_type(tl.float32))
            score = tl.sum(value * read, axis=0) + tl.load(rule + FEATURE_BIAS)
            active = score > tl.load(rule + FEATURE_THRESHOLD)
            feature = tl.where(active, score, 0.0)
            low, high = tl.load(rule + FEATURE_LOW), tl.load(rule + FEATURE_HIGH)
            added = tl.load(rule + FEATURE_SLOPE) * feature
            added += tl.minimum(tl.maximum(feature, low), high) - feature
            asleep = (tl.load(rule + FEATURE_ONLY_ACTIVE) != 0.0) & (
                score <= tl.load(rule + FEATURE_THRESHOLD)
            )
            added = tl.where(asleep, 0.0, added)
            delta += added * _following(vectors, operation, 2 * i + 1, offsets, inside, HIDDEN)
        return delta

    @triton.jit
    def _units_of(vectors, row, at, count, HIDDEN: tl.constexpr):
        """The first numbers of a row of a classifier, one for each of its units, in float32."""
        return tl.load(row_at(vectors, row, at, HIDDEN), mask=at < count, other=0.0).to(tl.float32)

    @triton.jit
    def _along_gradient(value, operation, tables, offsets, inside, HIDDEN: tl.constexpr):
        """The gradient of a small MLP at a row; see `Gradient`."""
        first, _, _, _, _, units, outer, _ = operation
        vectors = tables[1]
        count, outer_count = units.to(tl.int32), outer.to(tl.int32)
        at = tl.arange(0, CLASSIFIER_UNITS)
        outs = _units_of(vectors, first + count + 1, at, CLASSIFIER_UNITS, HIDDEN)
        outer_biases = _units_of(vectors, first + count + 2, at, outer_count, HIDDEN)
        scores = _units_of(vectors, first + count, at, count, HIDDEN)
        for i in range(count):
            read = _following(vectors, operation, i, offsets, inside, HIDDEN)
            scores += tl.where(at == i, tl.sum(value * read, axis=0), 0.0)
        slope = tl.where(outer_count > 0, 0.0, outs)
        for j in range(outer_count):
            weights = _units_of(vectors, first + count + 3 + j, at, count, HIDDEN)
            score = tl.maximum(scores, 0.0) * weights + tl.where(at == j, outer_biases, 0.0)
            out = tl.sum(tl.where(at == j, outs, 0.0), axis=0)
            slope += tl.where(tl.sum(score, axis=0) > 0.0, out, 0.0) * weights
        slope = tl.where(scores > 0.0, slope, 0.0)
        delta = tl.zeros_like(value)
        for i in range(count):
            own = tl.sum(tl.where(at == i, slope, 0.0), axis=0)
            delta += own * _following(vectors, operation, i, offsets, inside, HIDDEN)
        return delta

    @triton.jit
    def operate_with_several(
        value, vector, operation, share, tables, offsets, inside, HIDDEN: tl.constexpr
    ):
        """An operation with more vectors than the first, on a row `[BLOCK]`; see `OperationKind`.
        Padding stays 0."""
        _, add, norm, component, strength, _, _, word = operation
        vectors = tables[1]
        vector = vector.to(tl.float32)
        if word // KIND == ROTATE:
            second = _following(vectors, operation, 1, offsets, inside, HIDDEN)
            along = tl.sum(value * vector, axis=0)
            across = tl.sum(value * second, axis=0)
            length = tl.sqrt(along * along + across * across)
            delta = (length * add - along) * vector + (length * norm - across) * second
            share = tl.where((component != 0.0) & (along <= 0.0), 0.0, share)
        elif word // KIND == DIMENSIONS:
            delta = vector * value
            if component > 1.0:
                delta += _following(vectors, operation, 1, offsets, inside, HIDDEN)
            if component > 2.0:
                low = _following(vectors, operation, 2, offsets, inside, HIDDEN)
                high = _following(vectors, operation, 3, offsets, inside, HIDDEN)
                delta = tl.where((value >= low) & (value <= high), delta, 0.0)
        elif word // KIND == GRADIENT:
            delta = _along_gradient(value, operation, tables, offsets, inside, HIDDEN)
        else:
            delta = _along_features(value, operation, tables, offsets, inside, HIDDEN)
        return value + tl.where(share != 0.0, share * strength * delta, 0.0)

    @triton.jit
    def operation_at(words, wanted):
        """The words of an operation after its chain; one that does nothing if not wanted."""
        coefficients = words.to(tl.pointer_type(tl.float32))
        return (
            tl.load(words + VECTOR, mask=wanted, other=0, eviction_policy="evict_last"),
            tl.load(coefficients + ADD, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(coefficients + NORM, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(coefficients + COMPONENT, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(coefficients + STRENGTH, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(coefficients + LOW, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(coefficients + HIGH, mask=wanted, other=0.0, eviction_policy="evict_last"),
            tl.load(words + GATE, mask=wanted, other=0, eviction_policy="evict_last"),
        )


def operate_reference(
    rows: torch.Tensor,
    operations: torch.Tensor,
    fields: list[int],
    dtype: torch.dtype,
    share: torch.Tensor,
) -> torch.Tensor:
    """Of each float32 row `[rows, hidden]` its own operation `[rows, Operation.SIZE]`, `share`
    `[rows]` of it."""
    kinds = operations[:, Operation.GATE].div(KIND_UNIT, rounding_mode="floor")
    vectors_at, operations_at = fields[Descriptor.VECTORS], fields[Descriptor.OPERATIONS]
    along = kinds == OperationKind.ALONG
    if along.all():
        return _operate_along_reference(rows, operations, vectors_at, dtype, share)
    result = rows.clone()
    if along.any():
        result[along] = _operate_along_reference(
            rows[along], operations[along], vectors_at, dtype, share[along]
        )
    alike, which = operations.unique(dim=0, return_inverse=True)
    for number, operation in enumerate(alike):
        at = (which == number) & ~along
        if at.any():
            result[at] = _operate_with_several_reference(
                rows[at], operation, vectors_at, operations_at, dtype, share[at]
            )
    return result


def _operate_along_reference(
    rows: torch.Tensor,
    operations: torch.Tensor,
    vectors_at: int,
    dtype: torch.dtype,
    share: torch.Tensor,
) -> torch.Tensor:
    """Of each float32 row `[rows, hidden]` its own operation along one vector, `share` `[rows]` of
    it; see `OperationKind`."""
    index = operations[:, Operation.VECTOR].long()
    vectors = view_at(vectors_at, dtype, int(index.max()) + 1, rows.shape[1])[index].float()
    coefficients = operations[:, Operation.ADD : Operation.COEFFICIENTS_END].view(torch.float32)
    add, norm, component, strength, low, high = coefficients.unbind(1)
    along = (rows * vectors).sum(1)
    clipped = torch.minimum(torch.maximum(along, low), high)
    scale = add + component * along + strength * (clipped - along) + norm * rows.norm(dim=1)
    return rows + torch.where(share != 0, share * scale, 0.0)[:, None] * vectors


def _operate_with_several_reference(
    rows: torch.Tensor,
    operation: torch.Tensor,
    vectors_at: int,
    operations_at: int,
    dtype: torch.dtype,
    share: torch.Tensor,
) -> torch.Tensor:
    """One steering operation with more vectors than one on float32 rows `[rows, hidden]`, `share`
    `[rows]` of it; see `OperationKind`."""
    hidden = rows.shape[1]
    index = int(operation[Operation.VECTOR])
    kind = int(operation[Operation.GATE]) // KIND_UNIT

    def vectors(count: int) -> torch.Tensor:
        return view_at(vectors_at + index * hidden * dtype.itemsize, dtype, count, hidden).float()

    coefficients = operation[Operation.ADD : Operation.COEFFICIENTS_END].view(torch.float32)
    add, norm, component, strength, low, high = coefficients.tolist()
    if kind == OperationKind.ROTATE:
        basis = vectors(2)
        along = rows @ basis.T
        turned = along.norm(dim=1, keepdim=True) * torch.tensor([add, norm])
        delta = strength * (turned - along) @ basis
        if component:
            share = torch.where(along[:, 0] > 0, share, 0.0)
    elif kind == OperationKind.DIMENSIONS:
        weight, *more = vectors(int(component))
        delta = strength * (weight * rows + sum(more[:1]))
        if len(more) > 1:
            delta = torch.where((rows >= more[1]) & (rows <= more[2]), delta, 0.0)
    elif kind == OperationKind.FEATURES:
        start, count = operation[[Operation.LOW, Operation.HIGH]].tolist()
        size = int(Operation.SIZE)
        words = view_at(operations_at + 4 * size * start, torch.float32, count, size)
        bias, threshold, slope, low, high, only = words[:, : FeatureWord.END].unbind(1)
        read, written = vectors(2 * count).view(count, 2, hidden).unbind(1)
        score = rows @ read.T + bias
        feature = torch.where(score > threshold, score, 0.0)
        added = slope * feature + feature.clamp(low, high) - feature
        added = torch.where((only != 0) & (score <= threshold), 0.0, added)
        delta = strength * added @ written
    elif kind == OperationKind.GRADIENT:
        count, outer = int(low), int(high)
        held = vectors(count + (3 + outer if outer else 2))
        first, bias, outs = held[:count], held[count, :count], held[count + 1, : outer or count]
        scores = rows @ first.T + bias
        slope = outs.expand(len(rows), -1)
        if outer:
            weights = held[count + 3 :, :count]
            ends = scores.relu() @ weights.T + held[count + 2, :outer]
            slope = torch.where(ends > 0, outs, 0.0) @ weights
        delta = strength * torch.where(scores > 0, slope, 0.0) @ first
    else:
        raise ValueError(f"an operation of kind {kind}, which has one vector only")
    share = share[:, None]
    return rows + torch.where(share != 0, share * delta, 0.0)
