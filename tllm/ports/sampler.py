"""The candidates that survived top-k, top-p and min-p, and a say in which is drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from tllm.ports.base import PortWrite
from tllm.ports.request_meta import RowMeta
from tllm.spec.phases import Phase, phase_named
from tllm.spec.reading import whole_number


class Candidates(ABC):
    """The tokens that may still be drawn this step, as compact rows on the device. To be read: what
    is changed in place is not drawn from.

    Attributes:
        meta: the sequence of each row. Only sampled (not greedy) sequences that have this
            consumer enabled and are in the declared phase are here.
        token_ids: `[rows, width]` int32; meaningless from `counts` on.
        logits: `[rows, width]` float32, after penalties and temperature; `-inf` from `counts` on.
        counts: `[rows]` int32, on the device. 0 for a row that has more than `width` candidates:
            only `contrast` guides it. Such rows are counted when this, or `logits`, is looked at.
        temperature: `[rows]` float32, on the device.
    """

    meta: RowMeta
    token_ids: torch.Tensor
    logits: torch.Tensor
    counts: torch.Tensor
    temperature: torch.Tensor

    @abstractmethod
    def project(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits that other final states would give these candidates.

        Args:
            hidden: `[n, hidden]`, in place of what the LM head reads.
            rows: `[rows]` int32 on the device: which row of `hidden` belongs to each row here,
                -1 for none. By default row i belongs to row i.

        Returns:
            `[rows, width]` float32 after the same penalties and temperature as `logits`;
            `-inf` where there is no candidate, NaN-free; equal to `logits` for rows with none.
            Only the candidates' rows of the LM head are read.
        """

    @abstractmethod
    def contrast(
        self,
        hidden: torch.Tensor,
        strength: torch.Tensor,
        tally: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Guide away from another final state: `l' = l + strength (l - d)` for every candidate.

        d is the logit that `hidden` gives it, after the same penalties and temperature. It takes
        effect at once, needs no compact rows of deltas, and is exact also in rows that have more
        than `width` candidates, for which it reads the whole LM head. A delta that is not finite
        counts as 0. Under tensor parallelism, and in steps in which the engine applies penalties
        or biases, rows that top-k, top-p or min-p filter stay unguided when they have more than
        `width` candidates.

        Args:
            hidden: `[n, hidden]`, in place of what the LM head reads.
            strength: `[rows]` float32 on the device; 0 leaves a row alone.
            tally: `[2]` int64 on the device: the candidates of the rows that are guided, and how
                many of them change, are added.
            rows: as in `project`.
        """


class Sampler:
    """Lets a consumer's `guide(candidates, ctx)` change the candidates' logits."""

    @staticmethod
    def write(*, phase: Phase = "decode", role: str = "sampler", width: int = 1024) -> PortWrite:
        """Ask to guide sampling.

        Args:
            phase: `decode` guides tokens that follow a generated token, `prefill` the first
                generated token, `any` both.
            width: the most candidates that a compact row has room for.
        """
        phase = phase_named(phase)
        number = whole_number(width, "Sampler.write(width)=", 1)
        return PortWrite("sampler", role, phase, options={"width": number})
