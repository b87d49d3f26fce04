"""A bank of distillers against one ordinary PyTorch module and optimiser for each prompt."""

import gc
import random
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from esamp_driver import forward
from torch.nn.functional import mse_loss

from tllm.consumers.esamp import kernels, reference
from tllm.consumers.esamp.bank import DistillerBank
from tllm.consumers.esamp.distiller import AdamW, Layout, Parameters
from tllm.consumers.esamp.graphs import CudaGraphs, Replays
from tllm.consumers.esamp.norm import CallableNorm, Identity, RmsNorm
from tllm.consumers.esamp.passes import upload
from tllm.consumers.esamp.plan import plan_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = Layout(hidden=12, rank=4)
ADAMW = AdamW(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)
SEED = 3
BOTH = [
    pytest.param(reference, id="torch"),
    pytest.param(kernels, id="triton", marks=pytest.mark.kernels),
]


class Independent:
    """One prompt's distiller, trained by autograd and torch.optim."""

    def __init__(self, norm):
        flat = LAYOUT.initial(SEED).to(DEVICE)
        self.weights = Parameters(*(part.clone().requires_grad_() for part in LAYOUT.views(flat)))
        self.norm = norm
        self.losses = []
        self.optimizer = torch.optim.AdamW(
            self.weights, ADAMW.lr, ADAMW.betas, ADAMW.eps, ADAMW.weight_decay
        )

    def predict(self, x):
        return forward(x, self.weights, self.norm).detach()

    def train(self, x, target):
        loss = mse_loss(forward(x, self.weights, self.norm), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def rms_norm():
    return RmsNorm(torch.linspace(0.5, 1.5, LAYOUT.hidden, device=DEVICE), 1e-6)


def make_bank(slots=4, norm=None, ops=reference, **options):
    norm = norm or rms_norm()
    return DistillerBank(
        LAYOUT, slots, ADAMW, SEED, norm, norm, torch.float32, DEVICE, ops, **options
    )


def device_blocks(bank, slots):
    return upload(plan_blocks(np.array(slots), bank.slots), bank.device)


def predict(bank, rows, slots):
    out = torch.zeros(len(rows) + 1, LAYOUT.hidden, device=DEVICE)
    bank.predict(rows, device_blocks(bank, slots), out)
    return out[:-1]


def train(bank, source, target, slots):
    bank.train(source, target, device_blocks(bank, slots))


def rows_of(count):
    return torch.randn(count, LAYOUT.hidden, device=DEVICE)


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize("norm", [rms_norm(), Identity()], ids=["rms", "identity"])
def test_the_bank_equals_independent_distillers_while_prompts_come_and_go(ops, norm):
    torch.manual_seed(0)
    pick = random.Random(0)
    bank = make_bank(slots=2, norm=norm, ops=ops)
    running: dict[int, Independent] = {}
    for step in range(25):
        if step == 10:
            bank.grow(4)
        for slot in list(running):
            if pick.random() < 0.15:
                del running[slot]
        for slot in range(bank.slots):
            if slot not in running and pick.random() < 0.5:
                bank.reset([slot])
                running[slot] = Independent(norm)
        slots = [pick.choice([-1, *running]) for _ in range(pick.randint(1, 12))]
        source, target = rows_of(len(slots)), rows_of(len(slots))
        predictions = predict(bank, source, slots)
        train(bank, source, target, slots)
        for slot in set(slots) - {-1}:
            own = torch.tensor([other == slot for other in slots], device=DEVICE)
            alone = running[slot]
            torch.testing.assert_close(
                predictions[own], alone.predict(source[own]), rtol=1e-3, atol=1e-4
            )
            alone.train(source[own], target[own])
    for slot, alone in running.items():
        for ours, theirs in zip(
            LAYOUT.views(bank.weights.master[slot]), alone.weights, strict=True
        ):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4)
        book = bank.ledger[slot].tolist()
        assert book[reference.STEPS] == len(alone.losses)
        assert book[reference.LOSS_SUM] == pytest.approx(sum(alone.losses), rel=1e-3)


def test_padding_has_no_effect():
    torch.manual_seed(0)
    alone, beside = make_bank(), make_bank()
    source, target = rows_of(3), rows_of(3)
    train(alone, source, target, [1, 1, 1])
    more_source, more_target = torch.cat((source, rows_of(5))), torch.cat((target, rows_of(5)))
    train(beside, more_source, more_target, [1, 1, 1, 0, 0, 0, 0, 0])
    torch.testing.assert_close(
        alone.weights.master[1], beside.weights.master[1], rtol=1e-5, atol=1e-7
    )
    assert torch.equal(beside.weights.master[2], LAYOUT.initial(SEED).to(DEVICE))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("ops", BOTH)
def test_a_row_that_is_not_finite_costs_its_own_distiller_one_step_and_no_other(ops, bad):
    bank = make_bank(ops=ops)
    before = bank.weights.master.clone()
    source, target = rows_of(4), rows_of(4)
    source[0, 0] = bad
    train(bank, source, target, [0, 0, 1, -1])
    assert torch.equal(bank.weights.master[0], before[0])
    assert not torch.equal(bank.weights.master[1], before[1])
    assert torch.isfinite(bank.weights.master).all()
    assert bank.ledger[:, reference.NON_FINITE].tolist() == [1, 0, 0, 0]
    train(bank, rows_of(2), rows_of(2), [0, 0])
    assert bank.ledger[0, reference.STEPS] == 1


def test_a_reset_distiller_remembers_nothing():
    bank, new = make_bank(), make_bank()
    for _ in range(3):
        train(bank, rows_of(4), rows_of(4), [0, 1, 2, 3])
    bank.reset([2, 0, 1])
    source, target = rows_of(4), rows_of(4)
    for each in (bank, new):
        train(each, source, target, [0, 1, 2, 2])
    for name in ("master", "mean", "square", "shadow", "corrections", "ledger"):
        ours, theirs = (getattr(each.weights, name)[:3] for each in (bank, new))
        assert torch.equal(ours, theirs), name


def test_low_precision_rows_learn_from_float32_master_weights():
    torch.manual_seed(0)
    norm = rms_norm()
    bank = DistillerBank(LAYOUT, 2, ADAMW, SEED, norm, norm, torch.bfloat16, DEVICE)
    exact = make_bank(slots=2)
    for _ in range(20):
        source, target = rows_of(6), rows_of(6)
        for each in (bank, exact):
            train(each, source.bfloat16(), target.bfloat16(), [0] * 6)
    assert bank.weights.master.dtype == torch.float32
    assert torch.equal(bank.weights.shadow, bank.weights.master.bfloat16())
    moved = exact.weights.master[0] - LAYOUT.initial(SEED).to(DEVICE)
    error = (bank.weights.master[0] - exact.weights.master[0]).norm() / moved.norm()
    assert error < 0.25


def test_a_norm_without_a_kernel_trains_like_any_other():
    torch.manual_seed(0)
    layer_norm = torch.nn.LayerNorm(LAYOUT.hidden).requires_grad_(False).to(DEVICE)
    norm = CallableNorm(layer_norm, torch.float32)
    bank, alone = make_bank(norm=norm), Independent(norm)
    for _ in range(5):
        source, target = rows_of(3), rows_of(3)
        torch.testing.assert_close(predict(bank, source, [1] * 3), alone.predict(source))
        with torch.inference_mode():
            train(bank, source, target, [1] * 3)
        alone.train(source, target)
    for ours, theirs in zip(LAYOUT.views(bank.weights.master[1]), alone.weights, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-5)


def test_distillers_learn():
    torch.manual_seed(0)
    bank = make_bank()
    mapping = torch.randn(LAYOUT.hidden, LAYOUT.hidden, device=DEVICE) * 0.3
    losses = []
    for _ in range(150):
        source = rows_of(16)
        train(bank, source, rms_norm().forward(source + source @ mapping), [0] * 16)
        losses.append(bank.ledger[0, reference.LOSS_LAST].item())
    assert losses[-1] < 0.5 * losses[0]


class Again:
    """Records work on a CPU as a CUDA graph does: it is done again with the same memory."""

    def __init__(self):
        self.replayed = 0

    def record(self, work):
        def replay():
            self.replayed += 1
            work()

        return replay

    def wait(self):
        pass


def same_with_recordings(recorder, ops, steps, stream=nullcontext):
    """Two banks, of which one replays, through batches that last some steps and then change."""
    torch.manual_seed(0)
    pick = random.Random(0)
    banks = make_bank(slots=2, ops=ops), make_bank(slots=2, ops=ops, recorder=recorder)
    ring = torch.zeros(64, 2, LAYOUT.hidden, device=DEVICE)  # as the rows of two taps lie in it
    outs = [torch.zeros(33, LAYOUT.hidden, device=DEVICE) for _ in banks]
    slots = blocks = None
    for step in range(steps):
        if step % 12 == 0:
            if step == steps // 2:
                for bank in banks:
                    bank.grow(4)
            fresh = [slot for slot in range(banks[0].slots) if pick.random() < 0.3]
            for bank in banks:
                bank.reset(fresh)
            slots = [pick.randrange(-1, banks[0].slots) for _ in range(pick.randint(1, 24))]
            blocks = device_blocks(banks[0], slots)
        ring.normal_()
        at = pick.choice([0, 40])
        # A graph knows where rows begin, and not how many there are.
        source, target = ring[at : at + 24].unbind(1)
        guided = torch.tensor(slots, device=DEVICE) >= 0
        for bank, out in zip(banks, outs, strict=True):
            bank.predict(source, blocks, out)
        torch.testing.assert_close(*(out[: len(slots)][guided] for out in outs))
        with stream():
            for bank in banks:
                bank.train(source, target, blocks)
    for name in ("master", "mean", "square", "ledger"):
        torch.testing.assert_close(*(getattr(bank.weights, name) for bank in banks))
    return banks[1]


def test_recordings_compute_what_launches_do():
    recorder = Again()
    bank = same_with_recordings(recorder, reference, 120)
    assert recorder.replayed > 100
    assert all(count > 2 for count in bank.recorded)


@pytest.mark.parametrize("recorder", [None, Again()], ids=["launches", "recordings"])
def test_a_batch_that_stays_the_same_sees_the_weights_of_a_bank_that_has_grown(recorder):
    torch.manual_seed(0)
    bank, alone = make_bank(slots=2, recorder=recorder), Independent(rms_norm())
    source, target, out = rows_of(3), rows_of(3), torch.zeros(4, LAYOUT.hidden, device=DEVICE)
    for step in range(8):
        if step == 4:
            bank.grow(4)
        if step % 4 == 0:
            blocks = device_blocks(bank, [1, 1, 1])
        bank.predict(source, blocks, out)
        expected = alone.predict(source)
        torch.testing.assert_close(out[:3], expected, rtol=1e-3, atol=1e-4)
        bank.train(source, target, blocks)
        alone.train(source, target)
    assert bank.ledger[1, reference.STEPS] == 8


def test_what_comes_seldom_is_not_recorded_and_recordings_are_bounded():
    recorder, done = Again(), []
    replays = Replays(recorder)
    for key in range(500):
        replays.run(key, lambda key=key: done.append(key))
    assert not len(replays)
    for key in range(500):
        for _ in range(3):
            replays.run(key, lambda key=key: done.append(key))
        assert len(replays) <= 64
    assert recorder.replayed > 400
    assert sorted(done) == sorted(4 * list(range(500)))


def test_a_recording_that_fails_costs_nothing_but_the_recordings(caplog):
    class Failing(Again):
        def record(self, work):
            raise RuntimeError("no graphs here")

    done = []
    replays = Replays(Failing())
    for _ in range(5):
        replays.run(0, lambda: done.append(0))
    assert len(done) == 5
    assert [record.message for record in caplog.records if "graph" in record.message]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_work_is_recorded(collects, fails):
    """A kernel or a graph that is destroyed meanwhile ends the recording."""
    seen = []

    class Watched(Again):
        def record(self, work):
            seen.append(gc.isenabled())
            if fails:
                raise RuntimeError("no graphs here")
            return super().record(work)

    replays = Replays(Watched())
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        for _ in range(3):
            replays.run(0, lambda: None)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_replayed_graphs_compute_what_launches_do():
    side = torch.cuda.Stream()

    @contextmanager
    def behind():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    bank = same_with_recordings(CudaGraphs(side), kernels, 120, behind)
    assert all(count > 2 for count in bank.recorded)
