"""What the outputs of a request have given out of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from vllm.outputs import CompletionOutput, RequestOutput


class Samples:
    """The samples of a request, from its outputs in turn.

    The last output alone does not tell: vLLM gives a sample out for the last time where it ends,
    which may be in an output before, and with `RequestOutputKind.DELTA` only what is new of it.

    Args:
        deltas: whether each output has only what is new.
    """

    def __init__(self, *, deltas: bool = False) -> None:
        self._deltas = deltas
        self._parts: dict[int, list[Sequence[int]]] = {}
        self._last: dict[int, CompletionOutput] = {}

    @property
    def tokens(self) -> dict[int, list[int]]:
        """The tokens generated, by sample."""
        return {sample: list(chain.from_iterable(parts)) for sample, parts in self._parts.items()}

    @property
    def lengths(self) -> dict[int, int]:
        """How many tokens were generated, by sample."""
        return {sample: sum(map(len, parts)) for sample, parts in self._parts.items()}

    def add(self, output: RequestOutput) -> None:
        """Note what an output gives out."""
        for sample in output.outputs:
            parts = self._parts.setdefault(sample.index, [])
            if not self._deltas:
                parts.clear()
            parts.append(sample.token_ids)
            self._last[sample.index] = sample

    def gather(self, output: RequestOutput) -> None:
        """Bring all samples to the last output, in order. Those that ended before are as they were
        then; of deltas, with nothing new."""
        here = {sample.index: sample for sample in output.outputs}
        ended = {i: self._again(sample) for i, sample in self._last.items() if i not in here}
        output.outputs = [sample for _, sample in sorted((here | ended).items())]

    def _again(self, sample: CompletionOutput) -> CompletionOutput:
        if not self._deltas:
            return sample
        nothing = None if sample.logprobs is None else sample.logprobs[:0]
        return replace(sample, text="", token_ids=[], logprobs=nothing, sampling_mask=None)
