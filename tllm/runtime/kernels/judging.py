"""Conditions at a tap: how rows are judged, and how much of an operation is done to each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column, IntArray
from tllm.runtime.descriptor import KIND_UNIT, SCOPE_UNIT, GateWord, stage_field
from tllm.runtime.kernels.addresses import view_at, words_at
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.runtime.kernels.remembering import latch_of, remembered
from tllm.runtime.latches import HOLDS, OF_A_PROBE, SUMMED
from tllm.runtime.mlp_score import BETWEEN, READS_ROW, READS_UNITS
from tllm.spec.gates import MAX_GATES
from tllm.spec.probes import FEATURES, KINDS, MAX_WIDTH

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.addresses import elements_at
    from tllm.runtime.kernels.remembering import recalled, remember, sum_up

    GATES = tl.constexpr(stage_field("GATES"))
    GATE_RECORDS = tl.constexpr(stage_field("GATE_RECORDS"))
    GATE_STATE = tl.constexpr(stage_field("GATE_STATE"))
    KIND = tl.constexpr(KIND_UNIT)
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
    def judge(
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
                    sum_up(value, fields, number, plan_ptr, plan_stride, offsets, inside, HIDDEN)
                elif address != 0:
                    at = elements_at(address.to(float_ptr), offsets, HIDDEN)
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
                    remember(fields, number, scope, plan_ptr, plan_stride)
                own = (numbers == number) & judged
                held = tl.where(own, strength, held)
                scores = tl.where(own, score, scores)
            tl.store(state + numbers, held)
            tl.store(state + GATE_COUNT + numbers, scores)
            # Operations of this stage read what other threads have just written.
            tl.debug_barrier()

    @triton.jit
    def share_of(fields, operation, plan_ptr, plan_stride):
        """How much of an operation is done: the strength of its gate, all without one."""
        gate = operation[7] % KIND
        own = tl.where(gate < SCOPED, gate, 0)
        state = tl.load(fields + GATE_STATE, mask=own > 0, other=0).to(tl.pointer_type(tl.float32))
        at = state + tl.program_id(0).to(tl.int64) * (2 * GATE_COUNT) + own - 1
        share = tl.load(at, mask=own > 0, other=1.0)
        if gate >= SCOPED:
            share = recalled(fields, gate, plan_ptr, plan_stride)
        return share


def judge_reference(
    value: torch.Tensor, planned: IntArray, at: npt.NDArray[np.int64], at_stage: dict[str, int]
) -> None:
    """Judge the conditions of rows, the tokens `at` of the batch."""
    hidden, size = value.shape[1], int(GateWord.SIZE)
    rows = planned[Column.STEER.plan_row].tolist()
    for i, (row, token, h) in enumerate(zip(rows, at.tolist(), value, strict=True)):
        first = int(view_at(at_stage["GATES"] + 4 * row, torch.int32, 1)) if row >= 0 else -1
        if first < 0:
            continue
        strengths, scores = _state_at(at_stage["GATE_STATE"], token)
        latch = latch_of(planned[:, i], at_stage)
        units, following = torch.zeros(2, MAX_WIDTH)
        begin = at_stage["GATE_RECORDS"] + 4 * size * first
        count = int(view_at(begin, torch.int32, size)[GateWord.COUNT])
        for words in view_at(begin, torch.int32, count, size):
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
                    score = units @ view_at(address, torch.float32, MAX_WIDTH)
                else:
                    score = score_of(h, view_at(address, torch.float32, hidden), kind)
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


def _state_at(address: int, token: int) -> torch.Tensor:
    """Strengths and scores `[2, MAX_GATES]` of a token."""
    return view_at(address + 4 * 2 * MAX_GATES * token, torch.float32, 2, MAX_GATES)


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


def shares(
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
            state = words_at(at_stage["GATE_STATE"], int(of.max()) + 1, 2, MAX_GATES)
            share[gated[now]] = state.view(np.float32)[of, 0, number[now]]
        if not now.all():
            later = planned[:, rows[~now]]
            share[gated[~now]] = remembered(later, number[~now], scope[~now], at_stage)
    return torch.from_numpy(share)
