"""Finds the taps of flows, and refuses what a rank cannot give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tllm.ports import ConsumerFlow, ModelView, PortRead
from tllm.runtime.flows import BoundConsumer, BoundFlow
from tllm.runtime.taps import TapKey, Taps


class Binder:
    """From what flows declare to what this rank has.

    Args:
        resolve: from a hook point's name and a layer to the tap that serves it; raises
            `ValueError` with what the model has.
        samples: whether this rank samples tokens.
        refusal: why candidates cannot be guided here, if they cannot.
    """

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        model: ModelView,
        *,
        samples: bool,
        refusal: str | None,
    ) -> None:
        self._taps = taps
        self._resolve = resolve
        self._model = model
        self._samples = samples
        self._refusal = refusal

    def reads_here(self, flow: ConsumerFlow) -> tuple[PortRead, ...] | None:
        """A flow's reads as this rank has them. None: the flow belongs to another rank.

        Raises `ValueError` for what this engine does not have, or cannot give together.
        """
        needs_sampling = flow.reads_port("logits") or flow.reads_port("token_target")
        guides = any(write.port == "sampler" for write in flow.writes)
        if guides and self._samples and self._refusal:
            raise ValueError(f"Sampler.write is not possible: {self._refusal}")
        if flow.actions:
            self._check_actions()
        reads, wanted, here = [], 0, 0
        for read in flow.reads:
            keys = [self._resolve(site, layer) for site, layer in read.places]
            found = tuple((str(p), n) for p, n in keys if (p, n) in self._taps.index)
            wanted, here = wanted + len(keys), here + len(found)
            if found or not keys:
                reads.append(replace(read, places=found))
        if not self._samples and (needs_sampling or guides):
            if here:
                raise ValueError(
                    "a flow reads a hook point of one pipeline stage together with the logits, "
                    f"the sampler or the sampled token of the last of {self._model.num_stages}; "
                    "give hook points of the last stage's layers (ESamp: source_layer), or split "
                    "it into two flows"
                )
            return None
        if here and here < wanted and not flow.split_by_stage:
            raise ValueError(
                f"a flow reads hook points of several pipeline stages ({here} of {wanted} are "
                "here); declare one flow for each stage, or give it split_by_stage=True"
            )
        # Ranks that decided each for itself could come to different ends: the first one decides.
        on_first = flow.ranks == "first" or bool(flow.actions)
        if (wanted and not here) or (on_first and not self._model.first_rank):
            return None
        return tuple(reads)

    def _check_actions(self) -> None:
        """Refuse what is decided in an engine in which it could not act where it should."""
        if self._model.num_stages > 1:
            raise ValueError(
                f"Actions.write is not possible: this engine has {self._model.num_stages} pipeline "
                "stages, which compute several steps at once; start it with "
                "pipeline_parallel_size=1"
            )

    def bound(
        self, owner: BoundConsumer, number: int, flow: ConsumerFlow, reads: tuple[PortRead, ...]
    ) -> BoundFlow:
        """A flow with the taps of its reads; see `reads_here`."""
        taps = {
            read.role: tuple(self._resolve(site, layer) for site, layer in read.places)
            for read in reads
            if read.places
        }
        return BoundFlow(owner, number, flow, reads, taps)

    def for_request(self, owner: BoundConsumer, flow: ConsumerFlow) -> BoundFlow | None:
        """A flow that one sequence asked for; `ValueError` for what such flows cannot do."""
        if flow.writes:
            raise ValueError("a flow of request_flows writes; declare its writes in flows()")
        if flow.dispatch_every_n_steps > 1:
            raise ValueError("a flow of request_flows has dispatch_every_n_steps; leave it 1")
        reads = self.reads_here(flow)
        return None if reads is None else self.bound(owner, -1, flow, reads)

    def tap(self, site: str | None, layer: int | None) -> TapKey | None:
        """The installed tap of a hook point; None when another pipeline rank has it."""
        assert site is not None
        key = self._resolve(site, layer)
        return key if key in self._taps.index else None
