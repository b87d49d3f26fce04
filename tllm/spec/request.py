"""What a request asks of tLLM, as it travels in `SamplingParams.extra_args["tllm"]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tllm.spec.selection import Selection
from tllm.spec.steering import GroupUse

EXTRA_ARG = "tllm"
"""Key of `SamplingParams.extra_args` under which the request's spec travels."""


class Wire(dict[str, Any]):
    """A request's spec as plain data, which nobody may change any more: copies of the sampling
    parameters share it, and it is read once in a process, or never where it was made."""

    @classmethod
    def of(cls, spec: RequestSpec) -> Wire:
        """A spec, ready to travel: what is as in a request without one is left out."""
        wire = cls(spec.to_wire())
        vars(wire)["spec"] = spec
        return wire

    def __deepcopy__(self, memo: Any) -> Wire:
        return self

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    @cached_property
    def spec(self) -> RequestSpec:
        """What it says."""
        asked: dict[str, Any] = dict(self)
        if "steering" in asked:
            asked["steering"] = tuple(map(GroupUse.from_wire, asked["steering"]))
        if "reads" in asked:
            asked["reads"] = tuple(map(RowsRead.from_wire, asked["reads"]))
        return RequestSpec(**asked)


@dataclass(frozen=True)
class RowsRead:
    """Some rows that somebody reads.

    Attributes:
        name: of the field that asked for them, for errors.
        positions: which.
        once: prompt rows are read of sample 0 only.
    """

    name: str
    positions: Selection
    once: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "positions": self.positions.to_wire(), "once": self.once}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RowsRead:
        """The inverse of `to_wire`."""
        return cls(wire["name"], Selection.from_wire(wire["positions"]), wire["once"])


@dataclass(frozen=True)
class RequestSpec:
    """Plain data only: it crosses process boundaries as msgpack.

    Attributes:
        request_id: the id the caller knows.
        prompt_id: unique to one prompt of one call; the n samples of the prompt share it, and
            results are kept under it. Empty when nobody will come for results.
        num_samples: n.
        consumers: options by consumer id.
        reads: the rows that somebody reads, those of generated tokens too.
        wants_tokens: the workers are told its tokens when it ends.
        isolated: rows are changed by writes, so cached blocks are not shared with anybody.
        steering: what is done to which rows, in order; the operations themselves were sent to
            the workers before, and are known by their digest.
    """

    request_id: str = ""
    prompt_id: str = ""
    num_samples: int = 1
    consumers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reads: tuple[RowsRead, ...] = ()
    wants_tokens: bool = False
    isolated: bool = False
    steering: tuple[GroupUse, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is nobody's concern but vLLM's."""
        return not (
            self.steering or self.consumers or self.reads or self.isolated or self.wants_tokens
        )

    def to_wire(self) -> dict[str, Any]:
        """As plain data, without what has its default."""
        wire: dict[str, Any] = {"request_id": self.request_id, "prompt_id": self.prompt_id}
        if self.num_samples != 1:
            wire["num_samples"] = self.num_samples
        if self.consumers:
            wire["consumers"] = dict(self.consumers)
        if self.reads:
            wire["reads"] = [read.to_wire() for read in self.reads]
        if self.wants_tokens:
            wire["wants_tokens"] = True
        if self.isolated:
            wire["isolated"] = True
        if self.steering:
            wire["steering"] = [use.to_wire() for use in self.steering]
        return wire

    @classmethod
    def from_extra_args(cls, extra_args: dict[str, Any] | None) -> RequestSpec:
        """The spec of a request; the default one for a request without.

        What was read stays in `extra_args`, in place of the plain mapping, for whoever asks next.
        """
        if not extra_args or not (wire := extra_args.get(EXTRA_ARG)):
            return cls()
        if not isinstance(wire, Wire):
            wire = extra_args[EXTRA_ARG] = Wire(wire)
        return wire.spec

    def sample_index(self, engine_id: str) -> int:
        """Which sample a sequence is; vLLM names the n of a request `{index}_{request id}`."""
        return 0 if self.num_samples == 1 else int(engine_id.partition("_")[0])

    def rows_from(
        self, prompt_len: int, prompt_token_ids: Sequence[int], sample_index: int
    ) -> int | None:
        """First prompt position whose rows somebody reads (None: no prompt rows): the prefix cache
        may serve only what lies before it."""
        first = prompt_len
        for read in self.reads:
            if not (read.once and sample_index):
                for start, _ in read.positions.intervals(prompt_len, prompt_token_ids)[:1]:
                    first = min(first, start)
        return first if first < prompt_len else None
