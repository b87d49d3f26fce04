"""Conditions in a worker: what taps judge for each steering row, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column
from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.descriptor import GateWord
from tllm.runtime.kernels import relayed
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.latches import OF_A_PROBE, SUMMED, Latches
from tllm.runtime.mlp_score import BETWEEN, READS_ROW, READS_UNITS, packed_layers
from tllm.runtime.prompt_means import PromptMeans
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import Taps
from tllm.runtime.transfer import upload
from tllm.spec.gates import MAX_GATES, Gate
from tllm.spec.probes import KINDS

_WORDS = int(GateWord.SIZE)


@dataclass(eq=False)
class JudgedGates:
    """The gates of one steering row.

    Attributes:
        chains: `(first record, number of records)` by point.
    """

    row: int
    chains: dict[int, tuple[int, int]] = field(default_factory=dict)


class Gates:
    """The tables that taps read to judge conditions, and where they leave what they find.

    Nothing is allocated before the first condition. What changes here reaches the device in
    `commit`.

    Args:
        max_positions: the most tokens of a sequence.
        agree: see `Session`.

    Attributes:
        latches: what sequences remember of their conditions.
        means: judges the means of prompts.
        state: float32 `[tokens, 2, MAX_GATES]`: strengths and scores of the tokens of the last
            forward pass. None before there was any condition.
    """

    def __init__(
        self,
        taps: Taps,
        max_positions: int,
        agree: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._taps = taps
        self.latches = Latches(taps.hidden_size, max_positions, taps.device)
        self._vectors: dict[str, torch.Tensor] = {}
        self._mlps: dict[str, npt.NDArray[np.float32]] = {}  # what is packed, for their biases
        self.means = PromptMeans(
            self.latches, self._vectors, lambda: self.state, taps.device, agree
        )
        self._records_placed = ConsecutivePlaces()
        self._points: Counter[int] = Counter()  # configurations in use that judge there
        device = taps.device
        self._table = StagedTable((taps.num_points, 0), 2, torch.int32, device, fill=-1)
        self._records = StagedTable((0, _WORDS), 1, torch.int32, device)
        self.state: torch.Tensor | None = None
        self._hears = False
        self._remember = relayed.launch if uses_triton(device) else relayed.reference

    # -- vectors -----------------------------------------------------------------------------------

    def hold(self, digest: str, vector: npt.NDArray[np.float32]) -> None:
        """Keep the vector of a probe, in float32, whatever the model's dtype is."""
        if digest not in self._vectors:
            self._vectors[digest] = upload(np.array(vector, np.float32), self._taps.device)
            if vector.ndim > 1:
                self._mlps[digest] = vector.reshape(-1)

    def let_go(self, digest: str) -> bool:
        """Forget the vector of a probe; whether it was one."""
        self._mlps.pop(digest, None)
        return self._vectors.pop(digest, None) is not None

    # -- steering rows -----------------------------------------------------------------------------

    def place(self, row: int, gates: Mapping[int, Sequence[Gate]]) -> JudgedGates:
        """Judge these for a steering row.

        Args:
            gates: by point, terms before their joints.
        """
        judged = JudgedGates(row)
        for point, at_point in gates.items():
            # What is made of the mean of a prompt is known when the prompt ends (`PromptMeans`).
            at_point = [gate for gate in at_point if gate.vector or not gate.of_mean]
            if not at_point:
                continue
            records = [words for gate in at_point for words in self._records_of(gate)]
            first = self._records_placed.acquire(len(records))
            judged.chains[point] = first, len(records)
            for i, words in enumerate(records):
                words[GateWord.COUNT] = len(records)
                self._records.stage(first + i, words)
            self._table.stage((point, row), np.array(first, np.int32))
        return judged

    def remove(self, judged: JudgedGates) -> None:
        """A steering row is nobody's any more."""
        for point, (first, count) in judged.chains.items():
            self._table.stage((point, judged.row), np.array(-1, np.int32))
            self._records_placed.release(first, count)

    def use(self, judged: JudgedGates, more: int) -> None:
        """A steering row is used by sequences (`more` is 1), or by none any more (-1)."""
        for point in judged.chains:
            self._points[point] += more

    def _records_of(self, gate: Gate) -> Iterator[npt.NDArray[np.int32]]:
        """The records of a gate: one; of a small MLP one for each unit, layer after layer."""
        last = self._words(gate)
        if not gate.widths or gate.of_mean:
            yield last
            return
        packed = self._mlps[gate.vector]
        begin = self._vectors[gate.vector].data_ptr()
        *layers, end = packed_layers(self._taps.hidden_size, gate.widths)
        kind = READS_ROW
        for layer in layers:
            for unit in range(layer.width):
                words = np.zeros(_WORDS, np.int32)
                words[GateWord.VECTOR : GateWord.NUMBER] = _address(
                    begin, layer.weight + unit * layer.inputs
                )
                words[GateWord.NUMBER] = unit
                words[GateWord.SCORE] = kind
                words[GateWord.EVERY] = unit == 0
                words[GateWord.BIAS] = packed[layer.bias + unit].view(np.int32)
                words[GateWord.SCOPE] = OF_A_PROBE
                words[GateWord.BETWEEN] = 1 + list(BETWEEN).index(KINDS[gate.score])
                yield words
            kind = READS_UNITS
        last[GateWord.VECTOR : GateWord.NUMBER] = _address(begin, end.weight)
        last[GateWord.SCORE] = kind
        last[GateWord.EVERY] = True
        yield last

    def _words(self, gate: Gate) -> npt.NDArray[np.int32]:
        words = np.zeros(_WORDS, np.int32)
        if gate.vector:
            begin = self._vectors[gate.vector].data_ptr()
            words[GateWord.VECTOR : GateWord.NUMBER] = _address(begin, 0)
        words[GateWord.NUMBER] = gate.number
        words[GateWord.SCORE] = gate.score
        terms = np.array(sum(1 << term for term in gate.terms), np.uint32)
        words[GateWord.TERMS] = terms.view(np.int32)
        words[GateWord.EVERY] = gate.every
        words[GateWord.SCOPE] = SUMMED if gate.of_mean else gate.scope
        floats = np.array([gate.bias, gate.low, gate.high, gate.soft, gate.middle], np.float32)
        words[GateWord.BIAS : GateWord.MIDDLE + 1] = floats.view(np.int32)
        words[GateWord.THRESHOLD] = np.float32(gate.threshold).view(np.int32)
        return words

    # -- the device --------------------------------------------------------------------------------

    def commit(self, rows: int) -> None:
        """Bring what changed to the device. On the compute stream, before a forward pass.

        Args:
            rows: steering rows that there are.
        """
        if not self._records_placed.end and not self._hears:
            return
        moved = [
            self._table.grow((self._taps.num_points, rows)),
            self._records.grow((room(self._records_placed.end, 64), _WORDS)),
            self.latches.commit(),
        ]
        if self.state is None:
            shape = self._taps.plan.shape[1], 2, MAX_GATES
            self.state = torch.full(shape, torch.nan, device=self._taps.device)
        if any(moved):
            self._taps.place_gates(
                self._table.tensor, self._records.tensor, self.state, self.latches.tables
            )
        self._table.commit()
        self._records.commit()
        used: Iterable[int] = (point for point, users in self._points.items() if users)
        self._taps.set_used(Column.GATE, np.array(sorted(used), np.int64))

    def expect(self) -> None:
        """Conditions decide here that earlier pipeline stages judge. What they find has its place
        from the next `commit` on."""
        self._hears = True

    def hear(self, told: torch.Tensor) -> None:
        """What earlier pipeline stages made of the tokens of a batch stands where taps leave what
        they find, and is remembered. Behind the row plan, before the forward pass.

        Args:
            told: as `state`, for the tokens of the batch.
        """
        if self.state is None:  # nobody here needs it
            return
        self.state[: len(told)].copy_(told)
        if self.latches.any:
            cells, held, _ = self.latches.tables
            self._remember(told, self._taps.plan, cells, held)
            self._taps.note_write()

    def forget_scores(self, tokens: int) -> None:
        """What was not judged anew is no number, for the first tokens of the batch."""
        if self.state is not None:
            self.state[:tokens].fill_(torch.nan)


def _address(begin: int, numbers: int) -> npt.NDArray[np.int32]:
    """Two words: that of the float32 that lies so many numbers on."""
    return np.array([begin + 4 * numbers], np.int64).view(np.int32)
