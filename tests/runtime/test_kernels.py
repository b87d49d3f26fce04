"""Every Triton kernel against the PyTorch reference beside it, on random shapes.

Kernels run on a GPU where there is one. Random numbers are drawn on the CPU, so that they are the
same everywhere; and so run the references that a worker uses there only.
"""

import copy
import random
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from engine.drawn_methods import drawn

from tllm.consumers.sparse_autoencoder import AutoencoderConfig, SparseAutoencoder
from tllm.runtime import ops
from tllm.runtime.columns import DESTINATION, PLAN_ROWS, SEGMENT_WIDTH, Column, SegmentWord
from tllm.runtime.descriptor import CHAIN_UNIT, HAS_SUM, SCOPE_UNIT, Operation, Replacement
from tllm.runtime.gates import Gates
from tllm.runtime.kernels import (
    candidates,
    contrast,
    projection,
    row_plan,
    tap,
    tap_norm,
    token_choice,
)
from tllm.runtime.latches import NEVER, NEXT, REST
from tllm.runtime.steering import Steering
from tllm.runtime.taps import AddedNorm, Taps
from tllm.spec.condition_reading import parse_condition
from tllm.spec.conditions import Known
from tllm.spec.gates import Gate, GateNumbers
from tllm.spec.hooks import HookPoint, ModelPoints
from tllm.spec.methods import METHODS
from tllm.spec.operations import Coefficients
from tllm.spec.probes import SCORES
from tllm.spec.tiers import Tiers

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def segments_of(pick):
    """Segments with a gap here and there: `[n, SEGMENT_WIDTH]`."""
    segments, row, destination = [], 0, 0
    for _ in range(pick.randint(1, 6)):
        count, width = pick.randint(1, 700), pick.choice([0, 1, 3])
        skip = pick.choice([0, 0, count // 2])
        segment = [0] * SEGMENT_WIDTH
        segment[SegmentWord.ROW], segment[SegmentWord.COUNT], segment[SegmentWord.SKIP] = (
            row,
            count,
            skip,
        )
        segment[SegmentWord.DESTINATION], segment[SegmentWord.WIDTH] = destination, width
        for column in Column:
            segment[column.word] = pick.randint(column.neutral, 9)
        segments.append(segment)
        row += count + pick.choice([0, 5])
        destination += (count - skip) * width
    return torch.tensor(segments, dtype=torch.int32)


EVERY_COLUMN = sum(column.flag for column in Column)


@pytest.mark.parametrize("used", [EVERY_COLUMN, Column.STEER.flag, Column.PATCH.flag])
@pytest.mark.parametrize("seed", range(4))
def test_row_plan(seed, used):
    segments = segments_of(random.Random(seed))
    expected = torch.full((PLAN_ROWS, 5000), -7, dtype=torch.int32)
    plan = expected.to(DEVICE, copy=True)
    row_plan.launch(segments.to(DEVICE), plan, used)
    row_plan.reference(segments, expected, used)
    assert torch.equal(plan.cpu(), expected)
    written = {column for column in Column if (expected[column.plan_row] != -7).any()}
    assert written == {column for column in Column if used & column.flag}
    assert bool((expected[DESTINATION] != -7).any()) == bool(used & Column.PROGRAM.flag)


def test_what_is_consecutive_counts_up_and_what_does_nothing_does_not():
    segments = torch.zeros(2, SEGMENT_WIDTH, dtype=torch.int32)
    segments[:, [SegmentWord.ROW, SegmentWord.COUNT, Column.PATCH.word]] = torch.tensor(
        [[0, 3, 5], [3, 2, -1]], dtype=torch.int32
    )
    plan = torch.full((PLAN_ROWS, 8), -7, dtype=torch.int32)
    row_plan.reference(segments, plan, Column.PATCH.flag)
    assert plan[Column.PATCH.plan_row].tolist() == [5, 6, 7, -1, -1, -7, -7, -7]


def test_token_choice():
    pick = random.Random(3)
    counts = [0, 3, 300]
    heads = [[sum(counts[:i]), count, 5 - 3 * i] for i, count in enumerate(counts)]
    entries = [
        [token, pick.randint(-1, 40)]
        for count in counts
        for token in sorted(pick.sample(range(400), count))
    ]
    heads, entries = (torch.tensor(each, dtype=torch.int32) for each in (heads, entries))
    steer = torch.tensor([pick.randint(-4, 3) for _ in range(200)], dtype=torch.int32)
    tokens = torch.tensor(
        [pick.choice([7, entries[1, 0], pick.randrange(400)]) for _ in range(200)]
    )
    before = steer.tolist()
    on_device = [each.to(DEVICE, copy=True) for each in (steer, tokens, heads, entries)]
    token_choice.launch(*on_device)
    token_choice.reference(steer, tokens, heads, entries)
    assert torch.equal(on_device[0].cpu(), steer)
    for was, now, token in zip(before, steer.tolist(), tokens.tolist(), strict=True):
        if was < -1:
            start, count, others = heads[-2 - was].tolist()
            by_token = dict(entries[start : start + count].tolist())
            assert now == by_token.get(token, others)
        else:
            assert now == was


def taps_of(sites, hidden, dtype, device, second=MappingProxyType({}), checked=()):
    return Taps(
        sites,
        second=second,
        hidden_size=hidden,
        dtype=dtype,
        device=torch.device(device),
        max_tokens=16,
        max_programs=4,
        add_rows=4,
        checked=checked,
    )


def steering_tables(taps, keys, generator, dtype):
    """Steering rows 0 to 3: nothing, a sum, a sum with three operations of which one has a gate,
    one operation with a gate."""
    count, hidden = taps.num_points, taps.hidden_size
    tables = torch.zeros(count, 4, int(Operation.SIZE), dtype=torch.int32)
    operations = torch.zeros(8, int(Operation.SIZE), dtype=torch.int32)
    vectors = torch.nn.functional.normalize(torch.randn(5, hidden, generator=generator), dim=1)

    def fill(words, vector, coefficients, chain=0):
        words[Operation.CHAIN], words[Operation.VECTOR] = chain, vector
        words[Operation.ADD : Operation.COEFFICIENTS_END] = torch.tensor(
            [*vars(coefficients).values()]
        ).view(torch.int32)

    for key in keys:
        table = tables[taps.index[key]]
        fill(table[1], 0, Coefficients(), HAS_SUM)
        fill(table[2], 1, Coefficients(norm=0.7), 3 + HAS_SUM + CHAIN_UNIT * 4)
        fill(operations[4], 2, Coefficients(strength=0.9, low=-0.2, high=0.1))
        fill(operations[5], 3, Coefficients(add=1.5, component=-0.5))
        operations[4, Operation.GATE] = 1 + 9 + SCOPE_UNIT * NEXT
        operations[5, Operation.GATE] = 1 + (7 if hidden % 2 else 2) + SCOPE_UNIT * (hidden % 2)
        fill(table[3], 4, Coefficients(strength=1.0, low=0.0, high=0.0), 1)
        table[3, Operation.GATE] = 1 + 4
    sums = 2 * torch.randn(count, 4, hidden, generator=generator)
    tables, operations = tables.to(taps.device), operations.to(taps.device)
    vectors, sums = vectors.to(taps.device, dtype), sums.to(taps.device, dtype)
    taps.place_steering(
        tables, operations, vectors, {taps.index[key]: sums[taps.index[key]] for key in keys}
    )
    taps.set_used(Column.STEER, np.array([taps.index[key] for key in keys], np.int64))
    return tables, operations, vectors, sums  # to be kept alive


def patch_tables(taps, keys, generator, dtype):
    """Patch rows 0 to 3: nothing, a whole row, noise on some dimensions, a mix and then zeros on
    some."""
    hidden, device = taps.hidden_size, taps.device
    sources = torch.randn(3, hidden, generator=generator).to(device, dtype)
    mask = (torch.rand(hidden, generator=generator) < 0.5).to(device, dtype)
    row_bytes = hidden * dtype.itemsize
    replacements = torch.zeros(4, int(Replacement.SIZE), dtype=torch.int32)
    for words, source, masked, keep, scale, count in (
        (replacements[0], 0, False, 0.0, 1.0, 1),
        (replacements[1], 1, True, 1.0, 0.5, 1),
        (replacements[2], 2, False, 0.25, 0.75, 2),
        (replacements[3], None, True, 0.0, 1.0, 0),
    ):
        at = 0 if source is None else sources.data_ptr() + source * row_bytes
        addresses = torch.tensor([at, mask.data_ptr() if masked else 0])
        words[: Replacement.KEEP] = addresses.view(torch.int32)
        factors = torch.tensor([keep, scale])
        words[Replacement.KEEP : Replacement.COUNT] = factors.view(torch.int32)
        words[Replacement.COUNT] = count
    patches = torch.full((taps.num_points, 4), -1, dtype=torch.int32)
    for key in keys:
        patches[taps.index[key]] = torch.tensor([-1, 0, 1, 2])
    patches, replacements = patches.to(device), replacements.to(device)
    taps.place_patches(patches, replacements)
    taps.set_used(Column.PATCH, np.array([taps.index[key] for key in keys], np.int64))
    return sources, mask, patches, replacements  # to be kept alive


def gates_at(keys, taps, generator):
    """Conditions of steering rows 2 and 3: a score of each kind, hard and soft, and joints."""
    gates = Gates(taps, 64)
    for name, vector in zip(
        "abc", torch.randn(3, taps.hidden_size, generator=generator), strict=True
    ):
        gates.hold(name, vector.numpy())
    place = "post_block", 0
    first = [
        Gate(0, *place, "a", bias=0.3, low=0.0, scope=REST),
        Gate(1, *place, "b", score=1, low=-0.1, high=0.1, scope=NEXT),
        Gate(2, *place, terms=(0, 1), every=False),
        Gate(3, *place, "c", over=2),
    ]
    second = [
        Gate(0, *place, "c", score=2, low=0.2, soft=6.0, middle=0.2),
        Gate(31, *place, "a", bias=-0.1, soft=-0.7, middle=0.4),
        Gate(4, *place, terms=(0, 31), every=True, scope=REST),
    ]
    for row, judged in ((2, first), (3, second)):
        gates.use(gates.place(row, {taps.index[key]: judged for key in keys}), 1)
    # Three sequences, of which something is known that other taps have judged.
    known = Gate(7, *place, scope=REST), Gate(9, *place, scope=NEXT)
    latches = [gates.latches.acquire([*first, *second, *known]) for _ in range(3)]
    gates.commit(4)
    gates.forget_scores(16)
    cells, held, _ = gates.latches.tables
    cells[:3, 0, 7] = torch.tensor([2, 5, 40])
    at = [latch.held[9] for latch in latches]
    held[at] = (
        torch.randint(-(2**31), 2**31 - 1, held[at].shape, generator=generator)
        .int()
        .to(held.device)
    )
    taps.plan[Column.GATE.plan_row] = torch.randint(-1, 3, (16,), generator=generator)
    taps.plan[Column.POSITION.plan_row] = torch.randperm(60, generator=generator)[:16].int()
    return gates


class BusyTap:
    """A tap whose two stages capture, gate, patch, add and steer, other rows each in another way;
    with the last seed only the second does."""

    rows = 9

    def __init__(self, seed, dtype, device, *, check=False):
        first, second = (HookPoint.POST_BLOCK, 0), (HookPoint.PRE_ATTN, 1)
        generator = torch.Generator().manual_seed(seed)
        hidden = [24, 64, 100, 7, 40][seed]
        both, last = (first, second), seed == 4
        checked = [first] if check else []
        taps = taps_of(
            {first: None}, hidden, dtype, device, second={first: second}, checked=checked
        )
        self.arena = torch.zeros(40, hidden, dtype=dtype, device=device)
        taps.set_arena(self.arena)
        taps.set_program(1, [first])
        taps.set_program(2, [first, second])
        taps.set_capturing(both if seed % 2 else [both[last]])
        for key in both[last : 1 + seed // 2]:
            vectors = torch.randn(2, hidden, generator=generator)
            taps.set_additions(key, [1, 3], vectors.to(device))
        self._kept = steering_tables(taps, both[seed % 3 :], generator, dtype)
        self.gates = gates_at(both[last:], taps, generator)
        self._kept += patch_tables(taps, both[last : 2 - seed % 2], generator, dtype)
        taps.plan[DESTINATION] = (2 * torch.randperm(20, generator=generator)[:16]).int()
        taps.plan[DESTINATION, ::3] = -1
        taps.plan[Column.PROGRAM.plan_row] = torch.randint(0, 3, (16,), generator=generator)
        for column in (Column.ADD, Column.STEER, Column.PATCH):
            taps.plan[column.plan_row] = torch.randint(-1, 4, (16,), generator=generator)
        taps.commit()
        self.taps, self.descriptor = taps, taps.descriptors[0]
        shape = (self.rows, hidden)
        self.stream, self.residual, self.weight = (
            torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)
        )
        if check:
            self.break_rows()

    def break_rows(self):
        """Rows 1 to 4 are not finite, or their square is not; row 3 is of nobody."""
        self.told = torch.full((17,), -1, dtype=torch.int32)
        self.told = self.told.pin_memory() if DEVICE == "cuda" else self.told
        self.told[0] = 0
        self.taps.place_check(self.told)
        self.taps.set_checking(True)
        self.taps.commit()
        sequences = torch.arange(100, 116, dtype=torch.int32)
        sequences[3] = -1
        self.taps.plan[Column.SEQUENCE.plan_row] = sequences
        self.stream[1, 2] = torch.nan
        self.stream[2, -1] = -torch.inf
        self.residual[3, 0] = self.stream[3, 0] = torch.nan
        self.residual[4, 1] = self.stream[4, 1] = 2e19
        for column in (Column.ADD, Column.STEER, Column.PATCH):
            self.taps.plan[column.plan_row, 1:5] = -1


def assert_same(results, dtype):
    # Triton's interpreter cuts bfloat16 off where devices round.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-4
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(params=[512, 8], ids=["few rows", "many rows"])
def many(request, monkeypatch):
    """From how many rows on nothing is looked up ahead; the taps here have nine."""
    monkeypatch.setattr(tap, "_FEW_ROWS", request.param)


@pytest.mark.parametrize("fused", [False, True], ids=["stream", "fused residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("many")
def test_tap(seed, dtype, fused):
    results = []
    for run, device in ((tap.reference, "cpu"), (tap.launch, DEVICE)):
        busy = BusyTap(seed, dtype, device)
        run(busy.stream, busy.residual if fused else None, busy.descriptor, busy.taps.plan)
        state = busy.gates.state.cpu()
        remembered = [table.cpu() for table in busy.gates.latches.tables]
        results.append(
            (busy.arena.cpu(), busy.stream.cpu(), busy.residual.cpu(), state, *remembered)
        )
        assert seed or ((remembered[0][:3, 0, :3] < NEVER).any() and remembered[2].any())
        judged = (busy.taps.plan[Column.STEER.plan_row, : busy.rows] > 1).cpu()
        assert torch.equal(~state[: busy.rows, 0, 0].isnan(), judged)
        assert state[busy.rows :].isnan().all()
    assert_same(results, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("many")
def test_tap_with_the_norm_after_it(seed, dtype):
    results = []
    for run, device in ((tap_norm.reference, "cpu"), (tap_norm.launch, DEVICE)):
        busy = BusyTap(seed, dtype, device)
        given = busy.stream.clone(), busy.residual.clone()
        asked = busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan, False, seed == 4
        outputs = run(*given, *asked)
        assert torch.equal(given[0], busy.stream) and torch.equal(given[1], busy.residual)
        results.append((busy.arena.cpu(), *(output.cpu() for output in outputs)))
    assert_same(results, dtype)


@pytest.mark.parametrize("given", [None, 0.02], ids=["scales of rows", "a given scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("many")
def test_tap_with_the_norm_after_it_and_numbers_of_fp8(dtype, given):
    results = []
    for run, device in ((tap_norm.reference_fp8, "cpu"), (tap_norm.launch_fp8, DEVICE)):
        busy = BusyTap(3, dtype, device)
        scale = None if given is None else torch.tensor([given], device=device)
        asked = busy.stream, busy.residual, busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan
        numbers, added, scales = run(*asked, False, scale)
        assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == added.shape
        assert scales.shape == ((*added.shape[:-1], 1) if scale is None else (0,))
        assert given or numbers.float().abs().amax() == 448
        normed = numbers.float() * (scales if scale is None else scale)
        results.append((normed.cpu(), busy.arena.cpu(), added.cpu(), scales.cpu()))
    (expected, *others), (normed, *found) = results
    assert_same([others, found], dtype)
    # Where a sum was rounded otherwise, a number may be the next one that FP8 has.
    atol = 1e-4 if dtype == torch.float32 else 2**-4
    torch.testing.assert_close(normed, expected, rtol=1 / 8, atol=atol)


@pytest.mark.parametrize("by_group", [False, True], ids=["by row", "by group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("many")
def test_tap_with_the_norm_after_it_and_a_scale_for_each_group_of_numbers(dtype, by_group):
    results = []
    runs = (tap_norm.reference_fp8_groups, "cpu"), (tap_norm.launch_fp8_groups, DEVICE)
    for run, device in runs:
        busy = BusyTap(0, dtype, device)
        rows, groups = len(busy.stream), 3
        shape = (groups, rows) if by_group else (rows, groups)
        scales = torch.full(shape, -1.0, device=device)
        scales = scales.T if by_group else scales
        asked = busy.stream, busy.residual, busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan
        numbers, added = run(*asked, scales)
        assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == added.shape
        assert (numbers.float().unflatten(-1, (groups, -1)).abs().amax(-1) == 448).all()
        normed = numbers.float().unflatten(-1, (groups, -1)) * scales[..., None]
        results.append((normed.flatten(-2).cpu(), busy.arena.cpu(), added.cpu(), scales.cpu()))
    (expected, *others), (normed, *found) = results
    assert_same([others, found], dtype)
    atol = 1e-4 if dtype == torch.float32 else 2**-4
    torch.testing.assert_close(normed, expected, rtol=1 / 8, atol=atol)


def test_numbers_of_groups_are_those_that_vllm_makes():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        quantize = QuantFP8(False, GroupShape(1, 8), compile_native=False)
    busy = BusyTap(0, torch.bfloat16, "cpu")
    asked = busy.stream, busy.residual, busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan
    rows, hidden = busy.stream.shape
    scales = torch.empty(rows, hidden // 8)
    numbers, added = tap_norm.reference_fp8_groups(*asked, scales)
    normed, expected = tap_norm.reference(*asked)
    assert torch.equal(added, expected)
    theirs, theirs_scales = quantize.forward_native(normed.float())
    assert torch.equal(numbers.float(), theirs.float()) and torch.equal(scales, theirs_scales)


@pytest.mark.parametrize("given", [None, 0.02], ids=["scales of rows", "a given scale"])
def test_numbers_of_fp8_are_those_that_vllm_makes(given):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    shape = GroupShape.PER_TOKEN if given is None else GroupShape.PER_TENSOR
    with set_current_vllm_config(VllmConfig()):
        quantize = QuantFP8(given is not None, shape, compile_native=False)
    scale = None if given is None else torch.tensor([given])
    busy = BusyTap(3, torch.float32, "cpu")
    asked = busy.stream, busy.residual, busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan
    numbers, added, scales = tap_norm.reference_fp8(*asked, False, scale)
    normed, expected = tap_norm.reference(*asked)
    assert torch.equal(added, expected)
    theirs, theirs_scales = quantize.forward_native(normed, scale)
    assert torch.equal(numbers.float(), theirs.float())
    assert scale is not None or torch.equal(scales, theirs_scales)


@pytest.mark.parametrize("form", ["stream", "fused residual", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("many")
def test_rows_that_are_not_finite_are_zeros_and_told_of(seed, dtype, form):
    results = []
    kernel = tap_norm if form == "norm" else tap
    for run, device in ((kernel.reference, "cpu"), (kernel.launch, DEVICE)):
        busy = BusyTap(seed, dtype, device, check=True)
        fused = None if form == "stream" else busy.residual
        more = (busy.weight[0], 1e-5) if form == "norm" else ()
        given = run(busy.stream, fused, *more, busy.descriptor, busy.taps.plan, True)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        normed, rows = given or (None, busy.stream if fused is None else fused)
        assert busy.told.tolist() == [1, -1, 101, 102, -1, 104, *[-1] * 11]
        assert not rows[[1, 2, 4]].any() and rows[3].isnan().any()
        assert normed is None or not normed[[1, 2, 4]].any()
        results.append((busy.arena.cpu(), rows.cpu(), *([] if normed is None else [normed.cpu()])))
    assert_same(results, dtype)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(24))


def test_a_tapped_norm_can_be_copied_and_compiled():
    key = (HookPoint.POST_BLOCK, 0)
    site, norm = Norm(), Norm()
    taps = taps_of({key: SimpleNamespace(module=site)}, 24, torch.float32, "cpu")
    taps.install({key: AddedNorm(norm, 1e-6)})
    copied = copy.deepcopy(norm)
    rows = torch.ones(2, 24)
    with torch.no_grad():
        copied.weight.fill_(5.0)
        compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
        for module, expected in ((norm, 1.0), (copied, 5.0), (compiled, 5.0)):
            normed, added = module(rows, rows)
            torch.testing.assert_close(normed, torch.full((2, 24), expected))
            assert torch.equal(added, 2 * rows)
    with pytest.raises(RuntimeError, match="fuse_norms=False"):
        norm(rows)


def test_norm_of_a_tap_is_what_a_tap_and_a_norm_give():
    """The reference, of which the kernel is the same, against both one after the other."""
    busy, again = (BusyTap(2, torch.float32, "cpu") for _ in range(2))
    weight = busy.weight[0]
    normed, added = tap_norm.reference(
        busy.stream, busy.residual, weight, 1e-5, busy.descriptor, busy.taps.plan
    )
    tap.reference(again.stream, again.residual, again.descriptor, again.taps.plan)
    expected = again.stream + again.residual
    assert torch.equal(busy.arena, again.arena)
    torch.testing.assert_close(added, expected)
    norm = torch.nn.functional.rms_norm(expected, weight.shape, weight, 1e-5)
    torch.testing.assert_close(normed, norm)
    more, _ = tap_norm.reference(
        busy.stream, busy.residual, weight - 1, 1e-5, busy.descriptor, busy.taps.plan, False, True
    )
    torch.testing.assert_close(more, norm)


def test_ops_are_what_they_tell_torch():
    """Shapes, aliases, and the way through torch.compile."""
    busy = BusyTap(2, torch.float32, DEVICE)
    row, others = busy.stream, (busy.descriptor, busy.taps.plan)
    torch.library.opcheck(ops.tap.default, (row, busy.residual, *others))
    norm = row, busy.residual, busy.weight[0], 1e-5, *others
    torch.library.opcheck(ops.tap_norm.default, norm)
    for scale in (None, torch.ones(1, device=DEVICE)):
        torch.library.opcheck(ops.tap_norm_fp8.default, (*norm, False, scale))
    scales = torch.empty(len(row), row.shape[1] // 4, device=DEVICE)
    torch.library.opcheck(ops.tap_norm_fp8_groups.default, (*norm, scales))


WIDTHS = [100, 896, 1536, 3584, 4096, 8192, 12288] if DEVICE == "cuda" else [100]
"""One warp to many; without a GPU there are no warps, and rows of 12,288 take minutes."""


@pytest.mark.parametrize("hidden", WIDTHS)
def test_a_row_is_normed_alike_in_batches_of_any_size(hidden, monkeypatch):
    """The order of a sum must not hang on how many rows there are."""
    key = (HookPoint.POST_BLOCK, 0)
    taps = taps_of({key: None}, hidden, torch.bfloat16, DEVICE)
    generator = torch.Generator().manual_seed(hidden)
    stream, residual, weight = (
        torch.randn(9, hidden, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3)
    )
    seen = []
    for few in (512, 0):
        monkeypatch.setattr(tap, "_FEW_ROWS", few)
        for rows in (9, 2):
            normed, added = tap_norm.launch(
                stream[:rows], residual[:rows], weight[0], 1e-5, taps.descriptors[0], taps.plan
            )
            seen.append((normed[:2], added[:2]))
    assert all(torch.equal(a, b) for each in seen for a, b in zip(each, seen[0], strict=True))


def test_rows_that_do_not_lie_side_by_side():
    """As a slice of a wider tensor, and with the leading dimension of the Transformers backend."""
    busy = BusyTap(1, torch.float32, DEVICE)
    expected = tap_norm.launch(
        busy.stream, busy.residual, busy.weight[0], 1e-5, busy.descriptor, busy.taps.plan
    )
    wide = torch.cat([busy.stream, busy.residual], dim=1)
    hidden = busy.stream.shape[1]
    normed, added = tap_norm.launch(
        wide[None, :, :hidden],
        wide[None, :, hidden:],
        busy.weight[0],
        1e-5,
        busy.descriptor,
        busy.taps.plan,
    )
    assert torch.equal(normed[0], expected[0]) and torch.equal(added[0], expected[1])


@pytest.mark.parametrize("score", SCORES)
def test_each_score_is_its_formula(score):
    """Of rows of every size, with the vector as the spec gives it."""
    generator = torch.Generator().manual_seed(4)
    hidden = 48
    w = torch.randn(hidden, generator=generator)
    h = torch.randn(6, hidden, generator=generator) * torch.logspace(-3, 2, 6)[:, None]
    h[5] = 0
    probe = {"hook": "post_block", "layer": 0, "vector": w, "score": score, "bias": 0.25}
    condition = parse_condition({"probe": probe, "above": 0.5}, "when")
    direction = w / w.norm()
    projected = torch.tanh((h @ direction)[:, None] * direction)
    expected = {
        "dot": h @ w,
        "cosine": torch.cosine_similarity(h, w[None], eps=0),
        "cast": torch.cosine_similarity(h, projected, eps=0),
    }[score].nan_to_num() + 0.25
    assert_scored(condition, h, expected)


def assert_scored(condition, h, expected, above=0.5):
    """The kernel and its reference give rows these scores by a condition at `post_block`."""
    key = (HookPoint.POST_BLOCK, 0)
    for run, device in ((tap.launch, DEVICE), (tap.reference, "cpu")):
        taps = taps_of({key: None}, h.shape[1], torch.float32, device)
        numbers = GateNumbers()
        number = numbers.number(condition)
        gates = Gates(taps, 64)
        gates.hold(condition.vector_digest, condition.vector)
        gates.use(gates.place(0, {0: numbers.gates([number])}), 1)
        gates.commit(1)
        taps.plan[Column.STEER.plan_row, :] = 0
        taps.commit()
        stream = h.to(device, copy=True)
        run(stream, None, taps.descriptors[0], taps.plan)
        strengths, scores = gates.state[: len(h), :, number].cpu().T
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(strengths, (scores > above).float())
        assert torch.equal(stream.cpu(), h)


ACTIVATIONS = {
    "relu": torch.nn.ReLU,
    "gelu": torch.nn.GELU,
    "silu": torch.nn.SiLU,
    "tanh": torch.nn.Tanh,
}


def mlp_of(inputs, widths, activation, seed):
    """A small MLP, as `torch` has it, and the `layers` of a probe."""
    torch.manual_seed(seed)
    sizes = [inputs, *widths, 1]
    linear = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    modules = [module for each in linear for module in (each, ACTIVATIONS[activation]())]
    layers = [(each.weight.detach(), each.bias.detach()) for each in linear]
    return torch.nn.Sequential(*modules[:-1]).requires_grad_(False), layers


@pytest.mark.parametrize(
    ("activation", "widths", "hidden"),
    [("relu", (5,), 48), ("gelu", (64, 64, 3, 2), 48), ("silu", (3, 17), 50), ("tanh", (8,), 7)],
)
def test_a_small_mlp_is_what_torch_computes(activation, widths, hidden):
    mlp, layers = mlp_of(hidden, widths, activation, 3)
    h = 4 * torch.randn(9, hidden, generator=torch.Generator().manual_seed(2))
    expected = mlp(h)[:, 0]
    middle = float(expected.median()) + 1e-3
    probe = {"hook": "post_block", "layer": 0, "layers": layers, "activation": activation}
    condition = parse_condition({"probe": probe, "above": middle}, "when")
    assert_scored(condition, h, expected, middle)


AUTOENCODERS = {
    "relu": ("standard", "none", False),
    "jumprelu": ("jumprelu", "none", False),
    "gated": ("gated", "none", False),
    "centered": ("standard", "none", True),
    "layer norm": ("jumprelu", "layer_norm", True),
    "rescaled": ("gated", "constant_norm_rescale", False),
    "rescaled, centered": ("jumprelu", "constant_norm_rescale", True),
}


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_a_feature_is_scored_as_its_autoencoder_encodes_it(name):
    architecture, normalization, centered = AUTOENCODERS[name]
    hidden, features = 48, 5
    generator = torch.Generator().manual_seed(8)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    vectors = {"standard": ("b_enc",), "jumprelu": ("b_enc", "threshold")}
    weights = {"W_enc": normal(hidden, features) / 4, "b_dec": normal(hidden)}
    for each in vectors.get(architecture, ("b_gate", "b_mag", "r_mag")):
        weights[each] = normal(features)
    given = {"architecture": architecture, "normalize_activations": normalization}
    config = AutoencoderConfig.parse({**given, "d_in": hidden, "d_sae": features})
    autoencoder = SparseAutoencoder(config, weights)
    h = normal(12, hidden) * torch.linspace(0.5, 3, 12)[:, None]
    seen = h - h.mean(1, keepdim=True) if centered else h
    expected = autoencoder.encode(seen)
    assert 0.1 < (expected > 0).float().mean() < 0.9

    def find(_, feature):
        one = autoencoder.only([feature])
        return one.probe(HookPoint.POST_BLOCK, 0, centered=centered)

    for feature in range(features):
        given = {"probe": {"sae": "any", "feature": feature}, "above": 0.2}
        condition = parse_condition(given, "when").found(Known(ModelPoints("any", 1, {}), {}, find))
        assert_scored(condition, h, expected[:, feature], 0.2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("many")
def test_each_method_computes_its_formula(method, seed):
    """The one kernel and its reference, against the method's formula written out; half the rows
    are steered, once with the operation in the entry and once with it after another."""
    hidden, key = [48, 100, 7][seed], (HookPoint.POST_BLOCK, 0)
    asked = drawn(method, seed, hidden)
    (parsed,) = Tiers.parse(vectors={"post_block": {0: asked.entry}})
    generator = torch.Generator().manual_seed(seed)
    h, w = torch.randn(8, hidden, generator=generator), torch.randn(hidden, generator=generator)
    operations = [("post_block", 0, "v", parsed.coefficients)]
    before = ("post_block", 0, "w", Coefficients(component=0.5))
    vectors = {"w": (w / w.norm()).numpy(), "v": parsed.vector}
    for run, device in ((tap.launch, DEVICE), (tap.reference, "cpu")):
        taps = taps_of({key: None}, hidden, torch.float32, device)
        steering = Steering(taps, lambda hook, layer: key, 4, 16, 64)
        steering.put(vectors, {"g": operations, "f": [before]})
        steer = taps.plan[Column.STEER.plan_row]
        steer[:] = -1
        steer[::4], steer[1::4] = steering.acquire(("g",)), steering.acquire(("f", "g"))
        steering.commit()
        taps.commit()
        stream = h.to(device, copy=True)
        run(stream, None, taps.descriptors[0], taps.plan)
        found, expected = stream.cpu(), h.clone()
        expected[::4] = asked.change(h[::4])
        expected[1::4] = asked.change(h[1::4] + 0.5 * (h[1::4] @ w)[:, None] * w / w.norm() ** 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def sorted_by_token(found):
    """Candidates with tokens ascending, and zeros beyond the count: kernels gather in any order."""
    valid = torch.arange(found.ids.shape[1], device=DEVICE) < found.counts[:, None]
    assert (found.logits.isfinite() == valid).all()
    order = found.ids.masked_fill(~valid, 10**6).argsort(1)
    valid = valid.gather(1, order)
    return (
        found.ids.gather(1, order) * valid,
        found.logits.gather(1, order).where(valid, 0.0),
        found.counts,
    )


def both(monkeypatch, work):
    """What `work` gives with the kernels and with the references."""
    answers = []
    for use_triton in (True, False):
        monkeypatch.setattr(candidates, "uses_triton", lambda device, use=use_triton: use)
        answers.append(work())
    for ours, expected in zip(*answers, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.fixture
def logits(seed):
    """Filtered logits of 5 sequences; sequence 2 has more candidates than `WIDTH`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 300, generator=generator)
    logits[torch.rand(5, 300, generator=generator) > 0.04] = -torch.inf
    logits[2, :40] = 1.0
    return logits.to(DEVICE)


WIDTH = 32


@pytest.mark.parametrize("seed", range(4))
def test_collect(logits, monkeypatch):
    def work():
        overflow = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
        found = candidates.collect(logits, rows, WIDTH, overflow)
        compact = sorted_by_token(found)
        assert int(overflow) == 1
        return compact

    both(monkeypatch, work)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filter_and_collect(seed, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    raw = (4 * torch.randn(4, 300, generator=generator)).to(DEVICE, dtype)
    index = torch.tensor([3, 0, 4, 1], dtype=torch.int32, device=DEVICE)
    temperature = torch.tensor([0.7, 2.0, -1.0, 0.0, 1.0], device=DEVICE)
    min_p = torch.tensor([0.05, 0.3, -1.0, 0.1, 0.0], device=DEVICE)

    def work():
        overflow = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        rows = torch.arange(4, dtype=torch.int32, device=DEVICE)
        asked = index, temperature, min_p, 64
        processed, own, found = candidates.filter_and_collect(raw, rows, *asked, overflow)
        assert int(overflow) == 0  # nobody has looked at a compact row
        compact = sorted_by_token(found)
        assert int(overflow) == 1  # the row that nothing filters
        return processed, own, found.found, *compact

    both(monkeypatch, work)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_project_and_edit(seed, logits, has_bias, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(200, 40, generator=generator).to(DEVICE)
    bias = torch.randn(200, generator=generator).to(DEVICE) if has_bias else None
    states = torch.randn(3, 40, generator=generator).to(DEVICE)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    which = torch.tensor([1, -1, 2], dtype=torch.int32, device=DEVICE)
    overflow = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(candidates, "uses_triton", lambda device: False)
    found = candidates.collect(logits, rows, WIDTH, overflow)
    known = (torch.arange(WIDTH, device=DEVICE) < found.counts[:, None]) & (which >= 0)[:, None]

    def work():
        projected = projection.project(states, which, weight, bias, 60, found)
        edited = logits.clone()
        candidates.edit(edited, found, torch.ones_like(found.logits))
        return projected.where(known, 0.0), edited

    both(monkeypatch, work)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("soft_cap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_contrast(seed, logits, has_bias, soft_cap, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(310, 70, generator=generator).to(DEVICE)  # padded beyond 300 tokens
    bias = torch.randn(310, generator=generator).to(DEVICE) if has_bias else None
    states = torch.randn(3, 70, generator=generator).to(DEVICE)
    logits[0] = torch.randn(300, generator=generator).to(DEVICE)  # nothing was filtered
    rows = torch.tensor([4, 0, 2, 0], dtype=torch.int32, device=DEVICE)
    which = torch.tensor([0, 2, 1, -1], dtype=torch.int32, device=DEVICE)
    strength = torch.tensor([1.0, 0.7, -0.5, 1.0], device=DEVICE)
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0], device=DEVICE)
    overflow = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    answers = []
    for use in (True, False):
        for module in (candidates, contrast):
            monkeypatch.setattr(module, "uses_triton", lambda device, use=use: use)
        found = candidates.collect(logits, rows, WIDTH, overflow)
        edited, tally = logits.clone(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
        contrast.contrast(
            edited, found, states, which, strength, weight, bias, 0.9, soft_cap, temperature, tally
        )
        answers.append((edited, tally))
    torch.testing.assert_close(*(edited for edited, _ in answers), rtol=1e-4, atol=1e-4)
    assert answers[0][1].tolist() == answers[1][1].tolist()
    for row, state, factor, cold in ((4, 0, 1.0, 1.0), (0, 2, 0.7, 0.5), (2, 1, -0.5, 2.0)):
        dots = weight[:300] @ states[state] + (bias[:300] if has_bias else 0)
        capped = dots if soft_cap is None else soft_cap * (dots / soft_cap).tanh()
        expected = logits[row] + factor * (logits[row] - capped * 0.9 / cold)
        expected = expected.where(logits[row].isfinite(), logits[row])
        torch.testing.assert_close(answers[1][0][row], expected, rtol=1e-4, atol=1e-4)
    for row in (1, 3):  # not asked
        assert torch.equal(answers[0][0][row], logits[row])
    seen = 300 + int(found.found[0]) + int(found.found[2])
    assert answers[0][1].tolist() == [seen, seen]


@pytest.mark.parametrize("seed", range(3))
def test_contrast_of_logits_that_were_predicted_elsewhere(seed, logits, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([4, 2, 0, 1], dtype=torch.int32, device=DEVICE)
    strength = torch.tensor([0.5, 1.0, 0.0, -2.0], device=DEVICE)  # the second row is wide
    predicted = torch.randn(4, WIDTH, generator=generator).to(DEVICE)
    predicted[0, 0], predicted[3, 1] = torch.inf, torch.nan
    monkeypatch.setattr(candidates, "uses_triton", lambda device: False)
    overflow = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    answers = []
    for use in (True, False):
        monkeypatch.setattr(contrast, "uses_triton", lambda device, use=use: use)
        found = candidates.collect(logits, rows, WIDTH, overflow)
        edited, tally = logits.clone(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
        contrast.contrast_narrow(edited, found, predicted, strength, tally)
        answers.append((edited, tally))
    for ours, expected in zip(*answers, strict=True):
        torch.testing.assert_close(ours, expected)
    for row in (0, 2, 3):
        assert torch.equal(answers[0][0][row], logits[row])
    seen = int(found.found[0]) + int(found.found[3])
    assert answers[0][1].tolist() == [seen, seen - 2]
