"""The tap: read and change the rows of a hook point, as its descriptor and the row plan say."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime import columns
from tllm.runtime.columns import FLAG_BITS, STAGES, Column, IntArray
from tllm.runtime.descriptor import (
    CHAIN_UNIT,
    HAS_SUM,
    KIND_UNIT,
    SCOPE_UNIT,
    STAGE_FIELDS,
    Descriptor,
    FeatureWord,
    GateWord,
    Operation,
    OperationKind,
    Replacement,
    stage_field,
)
from tllm.runtime.kernels.backend import HAS_TRITON, starts_early
from tllm.runtime.latches import NEXT, OF_A_PROBE, SUMMED
from tllm.runtime.mlp_score import BETWEEN, READS_ROW, READS_UNITS
from tllm.spec.conditions import MAX_GATES
from tllm.spec.operations import MAX_UNITS
from tllm.spec.probes import FEATURES, KINDS, MAX_WIDTH

HOLDS = 0.5
"""A condition is remembered where its strength is above this."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    FLAGS = tl.constexpr(int(Descriptor.FLAGS))
    ARENA = tl.constexpr(int(Descriptor.ARENA))
    VECTORS = tl.constexpr(int(Descriptor.VECTORS))
    OPERATIONS = tl.constexpr(int(Descriptor.OPERATIONS))
    RING_OFFSETS = tl.constexpr(stage_field("RING_OFFSETS"))
    ADD_INDEX = tl.constexpr(stage_field("ADD_INDEX"))
    ADD_TABLE = tl.constexpr(stage_field("ADD_TABLE"))
    STEERING = tl.constexpr(stage_field("STEERING"))
    SUMS = tl.constexpr(stage_field("SUMS"))
    PATCHES = tl.constexpr(stage_field("PATCHES"))
    REPLACEMENTS = tl.constexpr(stage_field("REPLACEMENTS"))
    GATES = tl.constexpr(stage_field("GATES"))
    GATE_RECORDS = tl.constexpr(stage_field("GATE_RECORDS"))
    GATE_STATE = tl.constexpr(stage_field("GATE_STATE"))
    LATCHES = tl.constexpr(stage_field("LATCHES"))
    HELD = tl.constexpr(stage_field("HELD"))
    ROW_SUMS = tl.constexpr(stage_field("ROW_SUMS"))
    CAPTURE_FLAG = tl.constexpr(Column.PROGRAM.flag)
    ADD_FLAG = tl.constexpr(Column.ADD.flag)
    STEER_FLAG = tl.constexpr(Column.STEER.flag)
    PATCH_FLAG = tl.constexpr(Column.PATCH.flag)
    GATE_FLAG = tl.constexpr(Column.GATE.flag)
    BITS = tl.constexpr(FLAG_BITS)
    MASK = tl.constexpr(2**FLAG_BITS - 1)
    UNIT = tl.constexpr(CHAIN_UNIT)
    SUM = tl.constexpr(HAS_SUM)
    WORDS = tl.constexpr(int(Operation.SIZE))
    CHAIN = tl.constexpr(int(Operation.CHAIN))
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
    REPLACEMENT_WORDS = tl.constexpr(int(Replacement.SIZE))
    SOURCE = tl.constexpr(int(Replacement.SOURCE))
    CHOSEN = tl.constexpr(int(Replacement.MASK))
    KEEP = tl.constexpr(int(Replacement.KEEP))
    SCALE = tl.constexpr(int(Replacement.SCALE))
    COUNT = tl.constexpr(int(Replacement.COUNT))
    GATE_COUNT = tl.constexpr(MAX_GATES)
    GATE_WORDS = tl.constexpr(int(GateWord.SIZE))
    GATE_VECTOR = tl.constexpr(int(GateWord.VECTOR))
    GATE_NUMBER = tl.constexpr(int(GateWord.NUMBER))
    GATE_RECORD_COUNT = tl.constexpr(int(GateWord.COUNT))
    GATE_SCORE = tl.constexpr(int(GateWord.SCORE))
    GATE_TERMS = tl.constexpr(int(GateWord.TERMS))
    GATE_EVERY = tl.constexpr(int(GateWord.EVERY))
    GATE_BIAS = tl.constexpr(int(GateWord.BIAS))
    GATE_LOW = tl.constexpr(int(GateWord.LOW))
    GATE_HIGH = tl.constexpr(int(GateWord.HIGH))
    GATE_SOFT = tl.constexpr(int(GateWord.SOFT))
    GATE_MIDDLE = tl.constexpr(int(GateWord.MIDDLE))
    GATE_THRESHOLD = tl.constexpr(int(GateWord.THRESHOLD))
    GATE_SCOPE = tl.constexpr(int(GateWord.SCOPE))
    SCOPED = tl.constexpr(SCOPE_UNIT)
    SCOPE_NEXT = tl.constexpr(NEXT)
    SCOPE_SUMMED = tl.constexpr(SUMMED)
    HALF = tl.constexpr(HOLDS)
    CAST = tl.constexpr(KINDS.index("cast"))
    FEATURE = tl.constexpr(KINDS.index("feature"))
    LAYER_NORM_FEATURE = tl.constexpr(KINDS.index("layer_norm_feature"))
    RESCALED_FEATURE = tl.constexpr(KINDS.index("rescaled_feature"))
    MLP_UNIT = tl.constexpr(READS_ROW)
    MLP_UNIT_OF_UNITS = tl.constexpr(READS_UNITS)
    UNITS = tl.constexpr(MAX_WIDTH)
    GATE_BETWEEN = tl.constexpr(int(GateWord.BETWEEN))
    RELU = tl.constexpr(1 + list(BETWEEN).index("relu_mlp"))
    GELU = tl.constexpr(1 + list(BETWEEN).index("gelu_mlp"))
    SILU = tl.constexpr(1 + list(BETWEEN).index("silu_mlp"))
    TANH = tl.constexpr(1 + list(BETWEEN).index("tanh_mlp"))
    PLAN_DESTINATION = tl.constexpr(columns.DESTINATION)
    PLAN_PROGRAM = tl.constexpr(Column.PROGRAM.plan_row)
    PLAN_ADD = tl.constexpr(Column.ADD.plan_row)
    PLAN_STEER = tl.constexpr(Column.STEER.plan_row)
    PLAN_PATCH = tl.constexpr(Column.PATCH.plan_row)
    PLAN_GATE = tl.constexpr(Column.GATE.plan_row)
    PLAN_POSITION = tl.constexpr(Column.POSITION.plan_row)

    @triton.jit
    def _along(start, offsets, HIDDEN: tl.constexpr):
        """Where the elements of a row lie that was found by its address.

        Rows that fill units of 16 bytes are aligned to them (every table is a tensor's memory, or
        begins at one of its rows). The compiler cannot know, and would move one element at a time.
        """
        at = start + offsets
        if HIDDEN * start.dtype.element_ty.primitive_bitwidth % 128 == 0:
            at = tl.multiple_of(at, [16])
        return at

    @triton.jit
    def _row(table, row, offsets, HIDDEN: tl.constexpr):
        """Where the elements of a row of a table lie that was found by its address."""
        return _along(table + row.to(tl.int64) * HIDDEN, offsets, HIDDEN)

    @triton.jit
    def _operate(value, vector, operation, share):
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
        at = _row(vectors, operation[0] + number, offsets, HIDDEN)
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
        return tl.load(_row(vectors, row, at, HIDDEN), mask=at < count, other=0.0).to(tl.float32)

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
    def _operate_with_several(
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
    def _operation(words, wanted):
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

    @triton.jit
    def _latch(fields, plan_ptr, plan_stride):
        """What the sequence of a row remembers, and which token of it the row is; -1 for none."""
        at = plan_ptr + tl.program_id(0)
        row = tl.load(at + PLAN_GATE * plan_stride)
        cells = tl.load(fields + LATCHES).to(tl.pointer_type(tl.int32))
        cells += tl.maximum(row, 0).to(tl.int64) * (2 * GATE_COUNT)
        return cells, tl.where(row >= 0, tl.load(at + PLAN_POSITION * plan_stride), -1)

    @triton.jit
    def _held(fields, cells, number, position, known):
        """The word with the bit of a position, and the bit."""
        words = tl.load(fields + HELD).to(tl.pointer_type(tl.int32))
        start = tl.load(cells + GATE_COUNT + number, mask=known, other=0)
        return words + start + tl.where(known, position // 32, 0), position % 32

    @triton.jit
    def _recalled(fields, gate, plan_ptr, plan_stride):
        """Whether a gate held for an earlier token of the sequence of a row, as its scope asks."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        number = gate % SCOPED - 1
        # Not by way of the first cache, which may have what was there before.
        first = tl.load(cells + number, cache_modifier=".cg")
        held = first < position
        if gate // SCOPED == SCOPE_NEXT:
            word, bit = _held(fields, cells, number, position - 1, position > 0)
            bits = tl.load(word, mask=position > 0, other=0, cache_modifier=".cg")
            held = ((bits >> bit) & 1) != 0
        return tl.where(held, 1.0, 0.0)

    @triton.jit
    def _remember(fields, number, scope, plan_ptr, plan_stride):
        """A gate holds for a row."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        if position >= 0:
            tl.atomic_min(cells + number, position, sem="relaxed")
            if scope == SCOPE_NEXT:
                word, bit = _held(fields, cells, number, position, position >= 0)
                tl.atomic_or(word, 1 << bit, sem="relaxed")

    @triton.jit
    def _sum_up(
        value, fields, number, plan_ptr, plan_stride, offsets, inside, HIDDEN: tl.constexpr
    ):
        """Add a row `[BLOCK]` to the sum that its sequence keeps for a probe."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        if position >= 0:
            sums = tl.load(fields + ROW_SUMS).to(tl.pointer_type(tl.float32))
            row = tl.load(cells + GATE_COUNT + number)
            tl.atomic_add(
                sums + row.to(tl.int64) * HIDDEN + offsets, value, mask=inside, sem="relaxed"
            )

    @triton.jit
    def _share(fields, operation, plan_ptr, plan_stride):
        """How much of an operation is done: the strength of its gate, all without one."""
        gate = operation[7] % KIND
        own = tl.where(gate < SCOPED, gate, 0)
        state = tl.load(fields + GATE_STATE, mask=own > 0, other=0).to(tl.pointer_type(tl.float32))
        at = state + tl.program_id(0).to(tl.int64) * (2 * GATE_COUNT) + own - 1
        share = tl.load(at, mask=own > 0, other=1.0)
        if gate >= SCOPED:
            share = _recalled(fields, gate, plan_ptr, plan_stride)
        return share

    @triton.jit
    def _stage(fields):
        """The addresses of one stage; `fields` is the descriptor, one word on for the second."""
        return (
            tl.load(fields + RING_OFFSETS, eviction_policy="evict_last"),
            tl.load(fields + ADD_INDEX, eviction_policy="evict_last"),
            tl.load(fields + ADD_TABLE, eviction_policy="evict_last"),
            tl.load(fields + STEERING, eviction_policy="evict_last"),
            tl.load(fields + SUMS, eviction_policy="evict_last"),
        )

    @triton.jit
    def _look_up(stage, flags, planned, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr):
        """What a stage does to a row: which of its ring rows, row of the add table, that table,
        chain, first operation, sum."""
        ring_offsets, add_index, add_table, steering, sums = stage
        destination, program, add_row, steering_row, _ = planned
        int_ptr = tl.pointer_type(tl.int32)
        captures = tl.where((flags & CAPTURE_FLAG) != 0, destination, -1) >= 0
        adds = tl.where((flags & ADD_FLAG) != 0, add_row, -1) >= 0
        steers = tl.where((flags & STEER_FLAG) != 0, steering_row, -1) >= 0
        known_row = tl.where(steers, steering_row, 0)
        entry = steering.to(int_ptr) + known_row * WORDS
        summed = _row(sums.to(tl.pointer_type(dtype)), known_row, offsets, HIDDEN)
        has_sums = tl.where(steers, sums, 0) != 0
        return (
            tl.load(ring_offsets.to(int_ptr) + program, mask=captures, other=-1),
            tl.load(add_index.to(int_ptr) + add_row, mask=adds, other=-1),
            add_table,
            tl.load(entry + CHAIN, mask=steers, other=0, eviction_policy="evict_last"),
            _operation(entry, steers),
            tl.load(
                summed,
                mask=tl.where(has_sums, inside, False),
                other=0.0,
                eviction_policy="evict_last",
            ),
        )

    @triton.jit
    def _begin(desc_ptr, plan_ptr, plan_stride, AHEAD: tl.constexpr, dtype: tl.constexpr):
        """What is known of a row before it is read.

        Returns the flags, the addresses of arena, vectors and operations, those of both stages (if
        AHEAD), what the plan says (destination, program, add row, steering row, patch row), and
        whether there is anything to do: `wanted >= 0`. A tap is a chain of latencies, and in a
        forward pass of cold ones: weights have swept the cache since the last pass. So loads that
        do not need each other stand side by side, and the small tables ask to be evicted last.
        """
        flags = tl.load(desc_ptr + FLAGS, eviction_policy="evict_last")
        row_ptr = tl.pointer_type(dtype)
        arena = tl.load(desc_ptr + ARENA, eviction_policy="evict_last").to(row_ptr)
        vectors = tl.load(desc_ptr + VECTORS, eviction_policy="evict_last").to(row_ptr)
        operations = tl.load(desc_ptr + OPERATIONS, eviction_policy="evict_last").to(
            tl.pointer_type(tl.int32)
        )
        addresses = (0, 0)
        if AHEAD:
            addresses = (_stage(desc_ptr), _stage(desc_ptr + 1))
        at = plan_ptr + tl.program_id(0)
        destination = tl.load(at + PLAN_DESTINATION * plan_stride, eviction_policy="evict_last")
        program = tl.load(at + PLAN_PROGRAM * plan_stride, eviction_policy="evict_last")
        add_row = tl.load(at + PLAN_ADD * plan_stride, eviction_policy="evict_last")
        steering_row = tl.load(at + PLAN_STEER * plan_stride, eviction_policy="evict_last")
        either = flags | (flags >> BITS)
        # The only one that waits for the flags: it is read where anybody patches, and else nothing.
        patching = (either & PATCH_FLAG) != 0
        patch_row = tl.load(
            at + PLAN_PATCH * plan_stride, mask=patching, other=-1, eviction_policy="evict_last"
        )
        wanted = tl.where((either & CAPTURE_FLAG) != 0, destination, -1)
        wanted = tl.maximum(wanted, tl.where((either & ADD_FLAG) != 0, add_row, -1))
        steers = (either & (STEER_FLAG | GATE_FLAG)) != 0
        wanted = tl.maximum(wanted, tl.where(steers, steering_row, -1))
        wanted = tl.maximum(wanted, patch_row)
        planned = (destination, program, add_row, steering_row, patch_row)
        return flags, (arena, vectors, operations), addresses, planned, wanted

    @triton.jit
    def _first(flags):
        """The first stage that does anything."""
        return tl.where((flags & MASK) != 0, 0, 1)

    @triton.jit
    def _look_ahead(
        addresses, flags, planned, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr
    ):
        """What the first stage that does anything does to a row."""
        stage = _first(flags)
        first, second = addresses
        fields = (
            tl.where(stage == 0, first[0], second[0]),
            tl.where(stage == 0, first[1], second[1]),
            tl.where(stage == 0, first[2], second[2]),
            tl.where(stage == 0, first[3], second[3]),
            tl.where(stage == 0, first[4], second[4]),
        )
        return _look_up(fields, flags >> (BITS * stage), planned, offsets, inside, HIDDEN, dtype)

    @triton.jit
    def _vector(vectors, operation, wanted, offsets, inside, HIDDEN: tl.constexpr):
        """The vector of an operation, if wanted."""
        at = _row(vectors, operation[0], offsets, HIDDEN)
        return tl.load(at, mask=tl.where(wanted, inside, False), other=0.0)

    @triton.jit
    def _first_vector(vectors, found, offsets, inside, HIDDEN: tl.constexpr):
        """The vector of the first operation of a stage."""
        return _vector(vectors, found[4], (found[3] & (SUM - 1)) > 0, offsets, inside, HIDDEN)

    @triton.jit
    def _tanh(x):
        """The series where the difference of two numbers near 1 would be all rounding."""
        square = x * x
        series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * 17.0 / 315.0)))
        small = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - small) / (1.0 + small)
        return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0.0, -far, far))

    @triton.jit
    def _normalised(score, value, kind, inside, HIDDEN: tl.constexpr):
        """The product of a feature with a row `[BLOCK]` that its autoencoder normalises."""
        mean = tl.where(kind == RESCALED_FEATURE, 0.0, tl.sum(value, axis=0) / HIDDEN)
        centered = tl.where(inside, value - mean, 0.0)
        squares = tl.sum(centered * centered, axis=0)
        length = tl.sqrt(squares / HIDDEN)
        if kind == LAYER_NORM_FEATURE:
            length = tl.sqrt(squares / max(HIDDEN - 1, 1)) + 1e-5
        return tl.where(length > 0.0, score / length, 0.0)

    @triton.jit
    def _unit(score, units, words, weights):
        """What a unit of a small MLP gives on: `score` if it reads the row, else of the units
        before it."""
        if tl.load(words + GATE_SCORE) == MLP_UNIT_OF_UNITS:
            score += tl.sum(units * tl.load(weights + tl.arange(0, UNITS)), axis=0)
        between = tl.load(words + GATE_BETWEEN)
        if between == RELU:
            score = tl.maximum(score, 0.0)
        elif between == GELU:
            score = 0.5 * score * (1.0 + tl.erf(score * 0.7071067811865476))
        elif between == SILU:
            score = score / (1.0 + tl.exp(-score))
        elif between == TANH:
            score = _tanh(score)
        return score

    @triton.jit
    def _score(value, vector, words, floats, inside, HIDDEN: tl.constexpr):
        """What a probe says of a row `[BLOCK]`."""
        kind = tl.load(words + GATE_SCORE)
        score = tl.sum(value * vector, axis=0)
        bias = tl.load(floats + GATE_BIAS)
        if (kind >= FEATURE) & (kind < MLP_UNIT):
            if kind > FEATURE:
                score = _normalised(score, value, kind, inside, HIDDEN)
            score = tl.where(score + bias <= tl.load(floats + GATE_THRESHOLD), -bias, score)
        elif (kind != 0) & (kind < FEATURE):
            if kind == CAST:
                vector = _tanh(score * vector)
                score = tl.sum(value * vector, axis=0)
            squares = tl.sum(value * value, axis=0) * tl.sum(vector * vector, axis=0)
            score = tl.where(squares > 0.0, score / tl.sqrt(squares), 0.0)
        return score + bias

    @triton.jit
    def _judge(
        value,
        fields,
        steering_row,
        plan_ptr,
        plan_stride,
        offsets,
        inside,
        HIDDEN: tl.constexpr,
    ):
        """Judge the conditions that a steering row has at one stage: score the row `[BLOCK]`, and
        leave scores and strengths where later operations on this token find them, and what holds
        where those on later tokens do.

        Args:
            fields: the descriptor, one word on for the second stage.
        """
        float_ptr = tl.pointer_type(tl.float32)
        int_ptr = tl.pointer_type(tl.int32)
        first = tl.load(tl.load(fields + GATES).to(int_ptr) + steering_row)
        if first >= 0:
            records = tl.load(fields + GATE_RECORDS).to(int_ptr) + first * GATE_WORDS
            state = tl.load(fields + GATE_STATE).to(float_ptr)
            state += tl.program_id(0).to(tl.int64) * (2 * GATE_COUNT)
            numbers = tl.arange(0, GATE_COUNT)
            held = tl.load(state + numbers)
            scores = tl.load(state + GATE_COUNT + numbers)
            units = tl.zeros([UNITS], tl.float32)
            following = tl.zeros([UNITS], tl.float32)
            for i in range(tl.load(records + GATE_RECORD_COUNT)):
                words = records + i * GATE_WORDS
                floats = words.to(float_ptr)
                address = tl.load((words + GATE_VECTOR).to(tl.pointer_type(tl.int64)))
                scope = tl.load(words + GATE_SCOPE)
                number = tl.load(words + GATE_NUMBER)
                score = tl.load(floats + GATE_BIAS)
                strength = score
                if scope == SCOPE_SUMMED:
                    _sum_up(value, fields, number, plan_ptr, plan_stride, offsets, inside, HIDDEN)
                elif address != 0:
                    at = _along(address.to(float_ptr), offsets, HIDDEN)
                    kind = tl.load(words + GATE_SCORE)
                    reads = tl.where(kind != MLP_UNIT_OF_UNITS, inside, False)
                    vector = tl.load(at, mask=reads, other=0.0)
                    score = _score(value, vector, words, floats, inside, HIDDEN)
                    if kind >= MLP_UNIT:
                        begins = tl.load(words + GATE_EVERY) != 0
                        units = tl.where(begins, following, units)
                        following = tl.where(begins, 0.0, following)
                        score = _unit(score, units, words, address.to(float_ptr))
                        following = tl.where(tl.arange(0, UNITS) == number, score, following)
                    low, high = tl.load(floats + GATE_LOW), tl.load(floats + GATE_HIGH)
                    soft, middle = tl.load(floats + GATE_SOFT), tl.load(floats + GATE_MIDDLE)
                    strength = tl.where((score > low) & (score < high), 1.0, 0.0)
                    smooth = 1.0 / (1.0 + tl.exp(-soft * (score - middle)))
                    strength = tl.where(soft != 0.0, smooth, strength)
                else:
                    joined = ((tl.load(words + GATE_TERMS) >> numbers) & 1) != 0
                    least = tl.min(tl.where(joined, held, 1.0), axis=0)
                    greatest = tl.max(tl.where(joined, held, 0.0), axis=0)
                    strength = tl.where(tl.load(words + GATE_EVERY) != 0, least, greatest)
                    score = strength
                judged = scope < SCOPE_SUMMED
                if (scope != 0) & judged & (strength > HALF):
                    _remember(fields, number, scope, plan_ptr, plan_stride)
                own = (numbers == number) & judged
                held = tl.where(own, strength, held)
                scores = tl.where(own, score, scores)
            tl.store(state + numbers, held)
            tl.store(state + GATE_COUNT + numbers, scores)
            # Operations of this stage read what other threads have just written.
            tl.debug_barrier()

    @triton.jit
    def _patch(
        value, fields, patch_row, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr
    ):
        """What a patch row puts in the place of a row `[BLOCK]` at one stage; padding stays 0.

        Args:
            fields: the descriptor, one word on for the second stage.

        Returns the row, and whether it changed.
        """
        int_ptr = tl.pointer_type(tl.int32)
        long_ptr = tl.pointer_type(tl.int64)
        float_ptr = tl.pointer_type(tl.float32)
        row_ptr = tl.pointer_type(dtype)
        first = tl.load(tl.load(fields + PATCHES).to(int_ptr) + patch_row)
        changed = 0
        if first >= 0:
            changed = 1
            words = tl.load(fields + REPLACEMENTS).to(int_ptr) + first * REPLACEMENT_WORDS
            count = tl.load(words + COUNT)
            for i in range(count):
                replacement = words + i * REPLACEMENT_WORDS
                source = tl.load((replacement + SOURCE).to(long_ptr))
                chosen = tl.load((replacement + CHOSEN).to(long_ptr))
                keep = tl.load((replacement + KEEP).to(float_ptr))
                scale = tl.load((replacement + SCALE).to(float_ptr))
                row = tl.load(
                    _along(source.to(row_ptr), offsets, HIDDEN),
                    mask=tl.where(source != 0, inside, False),
                    other=0.0,
                )
                changes = tl.load(
                    _along(chosen.to(row_ptr), offsets, HIDDEN),
                    mask=tl.where(chosen != 0, inside, False),
                    other=1.0,
                )
                # A row that is not kept may hold anything: 0 times infinity is no number.
                kept = tl.where(keep != 0.0, keep * value, 0.0)
                patched = kept + scale * row.to(tl.float32)
                value = tl.where(changes.to(tl.float32) != 0.0, patched, value)
        return value, changed

    @triton.jit
    def _work(
        value,
        desc_ptr,
        flags,
        plan_ptr,
        plan_stride,
        planned,
        tables,
        ahead,
        offsets,
        inside,
        HIDDEN: tl.constexpr,
        AHEAD: tl.constexpr,
    ):
        """The stages of a tap on a row `[BLOCK]`, in turn: capture, gate, patch, add, steer.

        Returns the row, and whether it changed. If AHEAD, `ahead` is what the first stage does and
        the vector of its first operation. Stages and operations are loops: a kernel this short
        waits for its own instructions, and copies of them would be more to wait for.
        """
        arena, vectors, operations = tables
        dtype = arena.dtype.element_ty
        changed = 0
        begin = _first(flags)
        end = tl.where((flags >> BITS) != 0, 2, 1)
        for stage in range(begin, end):
            own = flags >> (BITS * stage)
            if AHEAD and stage == begin:
                found, vector = ahead
            else:
                fields = _stage(desc_ptr + stage)
                found = _look_up(fields, own, planned, offsets, inside, HIDDEN, dtype)
                vector = _first_vector(vectors, found, offsets, inside, HIDDEN)
            ring_offset, add, add_table, chain, operation, summed = found
            if ring_offset >= 0:
                place = _row(arena, planned[0] + ring_offset, offsets, HIDDEN)
                tl.store(place, value.to(dtype), mask=inside)
            if tl.where((own & GATE_FLAG) != 0, planned[3], -1) >= 0:
                _judge(
                    value,
                    desc_ptr + stage,
                    planned[3],
                    plan_ptr,
                    plan_stride,
                    offsets,
                    inside,
                    HIDDEN,
                )
                # Looked up again: what a score takes in registers would push it into memory.
                fields = _stage(desc_ptr + stage)
                found = _look_up(fields, own, planned, offsets, inside, HIDDEN, dtype)
                vector = _first_vector(vectors, found, offsets, inside, HIDDEN)
                ring_offset, add, add_table, chain, operation, summed = found
            if tl.where((own & PATCH_FLAG) != 0, planned[4], -1) >= 0:
                value, patched = _patch(
                    value, desc_ptr + stage, planned[4], offsets, inside, HIDDEN, dtype
                )
                changed = tl.maximum(changed, patched)
            if add >= 0:
                row = _row(add_table.to(tl.pointer_type(dtype)), add, offsets, HIDDEN)
                value += tl.load(row, mask=inside, other=0.0).to(tl.float32)
                changed = 1
            if chain > 0:
                if (chain & SUM) != 0:
                    value += summed.to(tl.float32)
                    changed = 1
                count = chain & (SUM - 1)
                following = operations + (chain // UNIT) * WORDS
                for i in range(count):
                    share = _share(desc_ptr + stage, operation, plan_ptr, plan_stride)
                    changed = tl.where(share != 0.0, 1, changed)
                    if operation[7] < KIND:
                        value = _operate(value, vector, operation, share)
                    else:
                        value = _operate_with_several(
                            value, vector, operation, share, tables, offsets, inside, HIDDEN
                        )
                    operation = _operation(following + i * WORDS, i + 1 < count)
                    vector = _vector(vectors, operation, i + 1 < count, offsets, inside, HIDDEN)
            # As the model's dtype holds it, as the next forward hook would see it.
            value = value.to(dtype).to(tl.float32)
        return value, changed

    @triton.jit(do_not_specialize=["plan_stride"])
    def _tap_kernel(
        stream_ptr,
        residual_ptr,
        desc_ptr,
        plan_ptr,
        plan_stride,
        stream_stride,
        residual_stride,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr,
        AHEAD: tl.constexpr,
        EARLY: tl.constexpr,
    ):
        # With EARLY this grid may begin while the kernel before it ends: whatever that one does
        # not write is looked up before `gdc_wait`. Descriptors, plan and tables are written before
        # the pass, and never by the kernel just before (`Taps.separate`).
        offsets = tl.arange(0, BLOCK)
        inside = offsets < HIDDEN
        dtype: tl.constexpr = stream_ptr.dtype.element_ty
        flags, tables, addresses, planned, wanted = _begin(
            desc_ptr, plan_ptr, plan_stride, AHEAD, dtype
        )
        if wanted < 0:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            return
        ahead = (0, 0)
        if AHEAD:
            found = _look_ahead(addresses, flags, planned, offsets, inside, HIDDEN, dtype)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        number = tl.program_id(0).to(tl.int64)
        at = stream_ptr + number * stream_stride + offsets
        residual_at = residual_ptr + number * residual_stride + offsets
        row = tl.load(at, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_at, mask=inside, other=0.0)
        if AHEAD:
            ahead = (found, _first_vector(tables[1], found, offsets, inside, HIDDEN))
        value = row.to(tl.float32)
        if HAS_RESIDUAL:
            value += residual.to(tl.float32)
            value = value.to(dtype).to(tl.float32)
        value, changed = _work(
            value,
            desc_ptr,
            flags,
            plan_ptr,
            plan_stride,
            planned,
            tables,
            ahead,
            offsets,
            inside,
            HIDDEN,
            AHEAD,
        )
        if changed > 0:
            written = value.to(dtype)
            if HAS_RESIDUAL:
                tl.store(residual_at, written, mask=inside)
                tl.store(at, tl.zeros_like(written), mask=inside)
            else:
                tl.store(at, written, mask=inside)


_FEW_ROWS = 512


def options(num_rows: int, device: torch.device) -> dict[str, Any]:
    """How kernels of taps are launched.

    A few rows leave most of the card idle: what is done to them is looked up ahead, while the
    kernel before still runs. With many rows that would only cost registers.
    """
    if num_rows > _FEW_ROWS:
        return {"AHEAD": False, "EARLY": False}
    if not starts_early(device):
        return {"AHEAD": True, "EARLY": False}
    return {"AHEAD": True, "EARLY": True, "launch_pdl": True}


def launch(
    stream: torch.Tensor,
    residual: torch.Tensor | None,
    desc: torch.Tensor,
    plan: torch.Tensor,
) -> None:
    """Run the kernel over the rows of `stream` (`[..., hidden]`)."""
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    # Many warps for few rows, few for many. Measured on an H200 (`benchmarks/RESULTS.md`).
    chosen = options(num_rows, stream.device)
    elements = 16 if chosen["AHEAD"] else 32
    _tap_kernel[(num_rows,)](
        stream,
        residual if residual is not None else stream,
        desc,
        plan,
        plan.stride(0),
        stream.stride(-2),
        residual.stride(-2) if residual is not None else 0,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=max(4, min(16, block // (32 * elements))),
        **chosen,
    )


def _at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A view of host memory, as the kernel sees device memory."""
    count = math.prod(shape)
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def _words(address: int, *shape: int) -> IntArray:
    """Integers of 32 bits, likewise."""
    buffer = (ctypes.c_uint8 * (4 * math.prod(shape))).from_address(address)
    return np.frombuffer(memoryview(buffer), np.int32).reshape(shape)


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
    vectors = _at(vectors_at, dtype, int(index.max()) + 1, rows.shape[1])[index].float()
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
        return _at(vectors_at + index * hidden * dtype.itemsize, dtype, count, hidden).float()

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
        words = _at(operations_at + 4 * size * start, torch.float32, count, size)
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


_FIRST_STAGE = [(name, stage_field(name)) for name in STAGE_FIELDS]
_ALL_FLAGS = (1 << FLAG_BITS) - 1
_LOOKED_AT = [
    columns.DESTINATION,
    *(column.plan_row for column in (Column.ADD, Column.STEER, Column.PATCH)),
]


def reference(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, plan: torch.Tensor
) -> None:
    """The kernel in PyTorch, for host tensors: the same descriptor, the same result."""
    fields = desc.tolist()
    if not fields[Descriptor.FLAGS]:
        return
    hidden, dtype = stream.shape[-1], stream.dtype
    rows = stream.view(-1, hidden)
    fused = residual.view(-1, hidden) if residual is not None else None
    # What is looked up is looked up with NumPy: of so few numbers an operator of torch costs more.
    planned = plan.numpy()[:, : len(rows)]
    at = (planned[_LOOKED_AT] >= 0).any(0).nonzero()[0]
    if not len(at):
        return
    whole = len(at) == len(rows)
    planned, index = (planned, None) if whole else (planned[:, at], torch.from_numpy(at))
    value = (rows if index is None else rows[index]).float()
    if fused is not None:
        value = (value + (fused if index is None else fused[index]).float()).to(dtype).float()
    elif whole and dtype == torch.float32:
        value = value.clone()
    changed = np.zeros(len(at), bool)
    for stage in range(STAGES):
        flags = fields[Descriptor.FLAGS] >> (FLAG_BITS * stage)
        if not flags & _ALL_FLAGS:
            continue
        at_stage = {name: fields[word + stage] for name, word in _FIRST_STAGE}
        if flags & Column.PROGRAM.flag:
            _capture(value.to(dtype), planned, at_stage["RING_OFFSETS"], fields[Descriptor.ARENA])
        if flags & Column.GATE.flag:
            _judge_reference(value, planned, at, at_stage)
        if flags & Column.PATCH.flag:
            changed[_put(value, planned, at_stage, dtype)] = True
        if flags & Column.ADD.flag:
            changed[_add(value, planned, at_stage, dtype)] = True
        if flags & Column.STEER.flag:
            changed |= _steer(value, planned, at, fields, at_stage, dtype)
        value = value.to(dtype).float()
    if whole and changed.all():
        (rows if fused is None else fused).copy_(value)
        if fused is not None:
            rows.zero_()
        return
    written_at, written = torch.from_numpy(at[changed]), value[torch.from_numpy(changed)].to(dtype)
    if fused is not None:
        fused[written_at] = written
        rows[written_at] = torch.zeros_like(written)
    else:
        rows[written_at] = written


def _capture(seen: torch.Tensor, planned: IntArray, offsets_at: int, arena_at: int) -> None:
    destination = planned[columns.DESTINATION]
    at = (destination >= 0).nonzero()[0]
    if len(at):
        program = planned[Column.PROGRAM.plan_row, at]
        offset = _words(offsets_at, int(program.max()) + 1)[program]
        at, offset = at[offset >= 0], offset[offset >= 0]
    if len(at):
        target = destination[at].astype(np.int64) + offset
        arena = _at(arena_at, seen.dtype, int(target.max()) + 1, seen.shape[1])
        captured = seen if len(at) == len(seen) else seen[torch.from_numpy(at)]
        arena.index_copy_(0, torch.from_numpy(target), captured)


def _state_at(address: int, token: int) -> torch.Tensor:
    """Strengths and scores `[2, MAX_GATES]` of a token."""
    return _at(address + 4 * 2 * MAX_GATES * token, torch.float32, 2, MAX_GATES)


def _judge_reference(
    value: torch.Tensor, planned: IntArray, at: npt.NDArray[np.int64], at_stage: dict[str, int]
) -> None:
    """Judge the conditions of rows, the tokens `at` of the batch."""
    hidden, size = value.shape[1], int(GateWord.SIZE)
    rows = planned[Column.STEER.plan_row].tolist()
    for i, (row, token, h) in enumerate(zip(rows, at.tolist(), value, strict=True)):
        first = int(_at(at_stage["GATES"] + 4 * row, torch.int32, 1)) if row >= 0 else -1
        if first < 0:
            continue
        strengths, scores = _state_at(at_stage["GATE_STATE"], token)
        latch = _latch_of(planned[:, i], at_stage)
        units, following = torch.zeros(2, MAX_WIDTH)
        begin = at_stage["GATE_RECORDS"] + 4 * size * first
        count = int(_at(begin, torch.int32, size)[GateWord.COUNT])
        for words in _at(begin, torch.int32, count, size):
            number = int(words[GateWord.NUMBER])
            floats = words.view(torch.float32)
            address = int(words[GateWord.VECTOR : GateWord.NUMBER].view(torch.int64))
            scope = int(words[GateWord.SCOPE])
            if scope == SUMMED:
                if latch is not None:
                    latch.row_sum(number, hidden).add_(h)
                continue
            if address:
                kind = (*KINDS, "dot", "units")[int(words[GateWord.SCORE])]
                if int(words[GateWord.SCORE]) >= READS_ROW and words[GateWord.EVERY]:
                    units, following = following, torch.zeros(MAX_WIDTH)
                if kind == "units":
                    score = units @ _at(address, torch.float32, MAX_WIDTH)
                else:
                    score = score_of(h, _at(address, torch.float32, hidden), kind)
                score = score + floats[GateWord.BIAS]
                if scope == OF_A_PROBE:
                    between = list(BETWEEN.values())[int(words[GateWord.BETWEEN]) - 1]
                    following[number] = between(score)
                    continue
                if kind in FEATURES and score <= floats[GateWord.THRESHOLD]:
                    score = torch.zeros(())
                fires = (score > floats[GateWord.LOW]) & (score < floats[GateWord.HIGH])
                soft = floats[GateWord.SOFT]
                smooth = torch.sigmoid(soft * (score - floats[GateWord.MIDDLE]))
                strengths[number], scores[number] = smooth if soft else fires, score
            else:
                terms = [n for n in range(MAX_GATES) if int(words[GateWord.TERMS]) >> n & 1]
                joined = strengths[terms]
                strengths[number] = joined.min() if words[GateWord.EVERY] else joined.max()
                scores[number] = strengths[number]
            if scope and latch is not None and float(strengths[number]) > HOLDS:
                latch.remember(number, scope)


@dataclass(frozen=True)
class _SequenceLatch:
    """What the sequence of a row remembers.

    Attributes:
        cells: int32 `[2, MAX_GATES]`.
        position: which token of it the row is.
        at_stage: the addresses.
    """

    cells: torch.Tensor
    position: int
    at_stage: dict[str, int]

    def row_sum(self, number: int, hidden: int) -> torch.Tensor:
        """The sum that is kept for a probe, `[hidden]`."""
        begin = self.at_stage["ROW_SUMS"] + 4 * hidden * int(self.cells[1, number])
        return _at(begin, torch.float32, hidden)

    def remember(self, number: int, scope: int) -> None:
        """A gate holds for the row."""
        self.cells[0, number] = min(int(self.cells[0, number]), self.position)
        if scope == NEXT:
            start = int(self.cells[1, number]) + self.position // 32
            bit = 1 << self.position % 32
            word = _at(self.at_stage["HELD"] + 4 * start, torch.int32, 1)
            word |= bit - (bit >> 31 << 32)


def _latch_of(planned: IntArray, at_stage: dict[str, int]) -> _SequenceLatch | None:
    """What a row's sequence remembers; `planned` is what the plan says of the row."""
    row = int(planned[Column.GATE.plan_row])
    if row < 0:
        return None
    cells = _at(at_stage["LATCHES"] + 4 * 2 * MAX_GATES * row, torch.int32, 2, MAX_GATES)
    return _SequenceLatch(cells, int(planned[Column.POSITION.plan_row]), at_stage)


def score_of(h: torch.Tensor, vector: torch.Tensor, kind: str) -> torch.Tensor:
    """What a probe says of a row `[hidden]`, without its bias and threshold."""
    if kind == "dot":
        return h @ vector
    if kind in FEATURES:
        lengths = {
            "feature": torch.ones(()),
            "layer_norm_feature": h.std() + 1e-5,
            "rescaled_feature": h.square().mean().sqrt(),
            "centered_rescaled_feature": h.std(correction=0),
        }[kind]
    else:
        if kind == "cast":
            vector = torch.tanh((h @ vector) * vector)
        lengths = h.norm() * vector.norm()
    return (h @ vector) / lengths if lengths > 0 else torch.zeros(())


def _put(
    value: torch.Tensor, planned: IntArray, at_stage: dict[str, int], dtype: torch.dtype
) -> list[int]:
    """Do what patch rows say; returns which rows have changed."""
    hidden, size = value.shape[1], int(Replacement.SIZE)
    changed = []
    for i, row in enumerate(planned[Column.PATCH.plan_row].tolist()):
        if row < 0:
            continue
        first = int(_at(at_stage["PATCHES"] + 4 * row, torch.int32, 1))
        if first < 0:
            continue
        changed.append(i)
        begin = at_stage["REPLACEMENTS"] + 4 * size * first
        count = int(_at(begin, torch.int32, size)[Replacement.COUNT])
        for words in _at(begin, torch.int32, count, size):
            source, mask = words[: Replacement.KEEP].view(torch.int64).tolist()
            keep, scale = words[Replacement.KEEP : Replacement.COUNT].view(torch.float32).tolist()
            patched = keep * value[i] if keep else torch.zeros_like(value[i])
            if source:
                patched = patched + scale * _at(source, dtype, hidden).float()
            stays = _at(mask, dtype, hidden) == 0 if mask else torch.zeros(hidden, dtype=torch.bool)
            value[i] = torch.where(stays, value[i], patched)
    return changed


def _add(
    value: torch.Tensor, planned: IntArray, at_stage: dict[str, int], dtype: torch.dtype
) -> npt.NDArray[np.int64]:
    """Add what consumers write; returns which rows have changed."""
    of = planned[Column.ADD.plan_row]
    adding = (of >= 0).nonzero()[0]
    if len(adding):
        of = of[adding]
        row = _words(at_stage["ADD_INDEX"], int(of.max()) + 1)[of]
        adding, row = adding[row >= 0], row[row >= 0]
    if len(adding):
        deltas = _at(at_stage["ADD_TABLE"], dtype, int(row.max()) + 1, value.shape[1])
        value.index_add_(0, torch.from_numpy(adding), deltas[torch.from_numpy(row)].float())
    return adding


def _steer(
    value: torch.Tensor,
    planned: IntArray,
    tokens: npt.NDArray[np.int64],
    fields: list[int],
    at_stage: dict[str, int],
    dtype: torch.dtype,
) -> npt.NDArray[np.bool_]:
    """Do what the steering rows say; returns `[rows]`, which have changed.

    All rows at once: those of a batch may each have a steering row of its own.

    Args:
        planned: of the rows of `value`.
        tokens: which of the batch they are.
    """
    size, hidden = int(Operation.SIZE), value.shape[1]
    changed = np.zeros(len(value), bool)
    row = planned[Column.STEER.plan_row]
    steered = (row >= 0).nonzero()[0]
    if not len(steered):
        return changed
    row = row[steered]
    entries = _words(at_stage["STEERING"], int(row.max()) + 1, size)[row]
    chain = entries[:, Operation.CHAIN]
    summed = (chain & HAS_SUM) != 0
    if summed.any():
        with_sum, of = steered[summed], row[summed]
        sums = _at(at_stage["SUMS"], dtype, int(of.max()) + 1, hidden)[torch.from_numpy(of)]
        if len(with_sum) == len(value):
            value += sums.float()
        else:
            value.index_add_(0, torch.from_numpy(with_sum), sums.float())
        changed[with_sum] = True
    count = chain & (HAS_SUM - 1)
    for number in range(int(count.max())):
        left = (count > number).nonzero()[0]
        operations = entries[left]
        if number:  # the first stands in the entry
            following = chain[left] // CHAIN_UNIT + (number - 1)
            end = int(following.max()) + 1
            operations = _words(fields[Descriptor.OPERATIONS], end, size)[following]
        at = steered[left]
        share = _shares(operations[:, Operation.GATE], planned, at, tokens, at_stage)
        changed[at] |= (share != 0).numpy()
        index = torch.from_numpy(at)
        value[index] = _operate_reference(
            value[index], torch.from_numpy(operations), fields, dtype, share
        )
    return changed


def _operate_reference(
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


def _shares(
    words: IntArray,
    planned: IntArray,
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    at_stage: dict[str, int],
) -> torch.Tensor:
    """How much of each row's operation is done, as its gate says; 1 without a gate.

    Args:
        words: `Operation.GATE` of the operations.
        rows: which rows of the plan they are done to.
    """
    share = np.ones(len(rows), np.float32)
    gates = words % KIND_UNIT
    gated = gates.nonzero()[0]
    if len(gated):
        rows, scope, number = rows[gated], gates[gated] // SCOPE_UNIT, gates[gated] % SCOPE_UNIT - 1
        now = scope == 0
        if now.any():
            of = tokens[rows[now]]
            state = _words(at_stage["GATE_STATE"], int(of.max()) + 1, 2, MAX_GATES)
            share[gated[now]] = state.view(np.float32)[of, 0, number[now]]
        if not now.all():
            later = planned[:, rows[~now]]
            share[gated[~now]] = _remembered(later, number[~now], scope[~now], at_stage)
    return torch.from_numpy(share)


def _remembered(
    planned: IntArray, number: IntArray, scope: IntArray, at_stage: dict[str, int]
) -> npt.NDArray[np.bool_]:
    """Of each row, whether its gate of that number held for an earlier token of the sequence, as
    the gate's scope asks; not where nothing is remembered of the sequence."""
    row, position = planned[Column.GATE.plan_row], planned[Column.POSITION.plan_row]
    recalled = row >= 0
    if recalled.any():
        cells = _words(at_stage["LATCHES"], int(row.max()) + 1, 2, MAX_GATES)
        first, held_at = cells[row.clip(0), 0, number], cells[row.clip(0), 1, number]
        before = recalled & (scope == NEXT) & (position > 0)
        recalled &= np.where(scope == NEXT, before, first < position)
        if before.any():
            previous = position[before] - 1
            at = held_at[before] + previous // 32
            words = _words(at_stage["HELD"], int(at.max()) + 1)[at]
            recalled[before] = (words >> previous % 32 & 1).astype(bool)
    return recalled
