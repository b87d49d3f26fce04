"""What the outputs of a request have given out of its samples."""

from __future__ import annotations

from dataclasses import replace

from vllm.outputs import CompletionOutput, RequestOutput


class Samples:
    """The samples of a request, from its outputs in turn.

    The last output alone does not tell: vLLM gives a sample out for the last time where it ends,
    which may be in an output before, and with `RequestOutputKind.DELTA` only what is new of it.
    Everything is copied: outputs are the caller's, who may merge them (`RequestOutput.add`).

    Args:
        deltas: whether each output has only what is new.

    Attributes:
        tokens: those generated, by sample; once the last output is there.
    """

    def __init__(self, *, deltas: bool = False) -> None:
        self.tokens: dict[int, list[int]] = {}
        self._deltas = deltas
        self._ended: dict[int, CompletionOutput] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """How many tokens were generated, by sample."""
        return {sample: len(tokens) for sample, tokens in self.tokens.items()}

    def add(self, output: RequestOutput) -> None:
        """Note what an output gives out, before the caller has it."""
        for sample in output.outputs:
            if self._deltas:
                self.tokens.setdefault(sample.index, []).extend(sample.token_ids)
            elif sample.finished():
                self.tokens[sample.index] = list(sample.token_ids)
            if sample.finished() and not output.finished:
                self._ended[sample.index] = self._again(sample)

    def gather(self, output: RequestOutput) -> None:
        """Bring all samples to the last output, in order. Those that ended before are as they were
        then; of deltas, with nothing new."""
        here = {sample.index: sample for sample in output.outputs}
        if not self._deltas:  # a streamed prompt may be over without an end of its sample
            self.tokens |= {index: list(sample.token_ids) for index, sample in here.items()}
        output.outputs = [sample for _, sample in sorted((self._ended | here).items())]

    def _again(self, sample: CompletionOutput) -> CompletionOutput:
        if not self._deltas:
            return replace(sample)
        nothing = None if sample.logprobs is None else sample.logprobs[:0]
        return replace(sample, text="", token_ids=[], logprobs=nothing, sampling_mask=None)
