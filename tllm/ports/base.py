"""What every port shares: reads, writes, phases, windows and the flow that binds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tllm.spec.phases import Phase
from tllm.spec.reading import require_one_of, whole_number
from tllm.spec.selection import Selection

Window = Literal["same_step", "next_step", "background", "out_of_band"]
Delivery = Literal["bundle", "device_lease"]
PromptRows = Literal["each_sample", "once", "computed"]
Ranks = Literal["all", "first"]
BundleKey = Literal["engine_step_id", "phase", "request_id", "prompt_id"]

Place: TypeAlias = tuple[str, int | None]
"""A hook point's name, and its layer (None for `lm_head_in`)."""


def _listed(field_name: str, given: Any, kind: type) -> tuple[Any, ...]:
    """What a flow reads or writes; refuses what no port has made."""
    listed = tuple(given) if isinstance(given, Iterable) else (given,)
    port = "read" if kind is PortRead else "write"
    if not isinstance(given, Iterable) or not all(isinstance(each, kind) for each in listed):
        raise TypeError(
            f"{field_name}={given!r:.100} is no list of what ports give; give such as "
            f"{field_name}=[ResidualStream.{port}(layer=3)]"
        )
    for each in listed:
        if not isinstance(each.role, str):
            raise TypeError(f"{field_name}: role={each.role!r:.60} is no text; give a name")
    return listed


@dataclass(frozen=True)
class PortRead:
    """One thing a flow reads. `role` is its key in `PortBundle.entries`.

    places: of a residual read: where its rows are read. With `block`, the entry is
        `[rows, places, hidden]`; else there is one place, and it is `[rows, hidden]`.
    """

    port: str
    role: str
    phase: Phase = "any"
    places: tuple[Place, ...] = ()
    block: bool = False


@dataclass(frozen=True)
class PortWrite:
    """One thing a flow may write. `role` is its name in the context's `writer(role)`."""

    port: str
    role: str
    phase: Phase = "any"
    layer: int | None = None
    site: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ConsumerFlow:
    """Declares what one consumer reads and writes, and when it is called.

    Args:
        reads: what arrives in each bundle. All residual reads of one flow, and the token target,
            share a phase: rows of a bundle are aligned across its entries.
        writes: what the consumer may change (`ResidualStream.write`, `Sampler.write`,
            `CpuExport.write`), and whether its `decide` is given the rows (`Actions.write`).
        window: when `consume_bundle` runs.
            `same_step`: on the engine's thread and compute stream, after the forward pass and
            before this step's tokens are sampled (after sampling, when the flow reads
            `TokenTarget`). `next_step`: on the engine's thread and compute stream, just before
            the next forward pass; residual writes made here reach that pass. `out_of_band`:
            on the engine's thread at the end of the step, on a side stream that is behind the
            compute stream's work so far, so device work overlaps the next forward pass.
            `background`: on a delivery thread and a side stream, in step order; nothing waits
            for it.
        bundle_key: what the rows of one bundle have in common.
        dispatch_every_n_steps: call once every n engine steps, with the rows of all of them.
        max_bundle_rows: split larger bundles; 0 is no limit.
        delivery: `bundle` tensors are the consumer's to keep; `device_lease` tensors are
            views into the runtime's ring, valid for the work enqueued during the call.
        positions: which tokens of a sequence, beside what the phases of the reads say: anything
            `tllm.spec.selection.Selection.parse` takes.
        label: text of the consumer's own, given back as `PortBundle.label`; rows of flows with
            different labels never share a bundle.
        prompt_rows: with n > 1, prompt rows are given for `each_sample`, or `once` (as those of
            sample 0; the other samples may then use the prefix cache), or only those that are
            `computed` anyway: the prefix cache serves what it has.
        ranks: `all` ranks of a tensor-parallel group have the same rows and are all called;
            `first`: only one of them is.
        split_by_stage: the hook points may lie on several pipeline stages; each stage is given
            the places it has (`PortBundle.reads` says which).
    """

    reads: Sequence[PortRead] = ()
    writes: Sequence[PortWrite] = ()
    window: Window = "same_step"
    bundle_key: Sequence[BundleKey] = ("engine_step_id", "phase")
    dispatch_every_n_steps: int = 1
    max_bundle_rows: int = 0
    delivery: Delivery = "bundle"
    positions: Any = "all"
    label: str = ""
    prompt_rows: PromptRows = "each_sample"
    ranks: Ranks = "all"
    split_by_stage: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", _listed("reads", self.reads, PortRead))
        object.__setattr__(self, "writes", _listed("writes", self.writes, PortWrite))
        if isinstance(self.bundle_key, str) or not isinstance(self.bundle_key, Iterable):
            raise TypeError(
                f"bundle_key={self.bundle_key!r:.60}: give a list, such as ['request_id']"
            )
        object.__setattr__(self, "bundle_key", tuple(self.bundle_key))
        object.__setattr__(self, "positions", Selection.parse(self.positions))
        require_one_of("window", self.window, Window)
        require_one_of("delivery", self.delivery, Delivery)
        require_one_of("prompt_rows", self.prompt_rows, PromptRows)
        require_one_of("ranks", self.ranks, Ranks)
        for key in self.bundle_key:
            require_one_of("bundle_key", key, BundleKey)
        whole_number(self.dispatch_every_n_steps, "dispatch_every_n_steps=", 1)
        whole_number(self.max_bundle_rows, "max_bundle_rows=", 0)
        if self.delivery == "device_lease" and self.dispatch_every_n_steps != 1:
            raise ValueError(
                "delivery='device_lease' lends the rows of one step; use "
                "dispatch_every_n_steps=1 with it, or delivery='bundle'"
            )
        roles = [read.role for read in self.reads] + [write.role for write in self.writes]
        if duplicates := sorted({role for role in roles if roles.count(role) > 1}):
            raise ValueError(
                f"roles must differ within a flow, but {duplicates} are used more than once; "
                "give each read and write its own role="
            )
        if self.reads_port("signals") and self.window != "same_step":
            raise ValueError(
                f"window={self.window!r} with Signals.read(): they are there in the step itself; "
                "use window='same_step'"
            )
        phased = "residual_stream", "token_target"
        phases = {read.phase for read in self.reads if read.port in phased}
        if len(phases) > 1:
            raise ValueError(
                "the residual reads and the token target of one flow must share a phase, but "
                f"{sorted(phases)} were given; declare one flow for each phase"
            )
        if self.selection.depends_on_generated_tokens:
            raise ValueError(
                "positions: token_ids of generated tokens are not known when the rows are "
                "captured; add 'phase': 'prompt', or read all of them and choose by the tokens of "
                "the output"
            )
        self._check_actions()
        if not self.selection.everything and (
            self.reads_port("logits") or self.reads_port("token_target")
        ):
            raise ValueError(
                "positions: a flow that reads the logits or the token target is given every row; "
                "choose among them by bundle.meta.positions"
            )

    def _check_actions(self) -> None:
        """Refuse windows in which what is decided could not act when it should."""
        if not (kinds := self.actions):
            return
        if self.window == "out_of_band":
            raise ValueError(
                "window='out_of_band' with Actions.write: what is decided on a side stream acts "
                "when nobody knows; use 'same_step', 'next_step' or 'background'"
            )
        if self.window == "same_step" and "steer" in kinds:
            raise ValueError(
                "window='same_step' with Actions.write('steer'): the forward pass is over when its "
                "rows are here, so nothing can be done to them any more; use "
                "window='next_step', or steering with a condition ('when'), which is judged in "
                "the pass itself"
            )
        if self.window == "same_step" and self.reads_port("token_target"):
            raise ValueError(
                "window='same_step' with Actions.write and TokenTarget.read(): the token is drawn "
                "and on its way when it can be read; use window='next_step'"
            )
        if self.window != "background" and self.dispatch_every_n_steps > 1:
            raise ValueError(
                f"dispatch_every_n_steps={self.dispatch_every_n_steps} with Actions.write and "
                f"window={self.window!r}: rows of earlier steps could not act in time; use 1, or "
                "window='background'"
            )

    @cached_property
    def actions(self) -> frozenset[str]:
        """The kinds of actions that may be decided by its rows; empty where none."""
        found: frozenset[str] = frozenset()
        for write in self.writes:
            kinds = write.options.get("kinds")
            if write.port == "actions" and isinstance(kinds, frozenset):
                found |= kinds
        return found

    @property
    def selection(self) -> Selection:
        """`positions`, parsed."""
        assert isinstance(self.positions, Selection)
        return self.positions

    @cached_property
    def kind(self) -> ConsumerFlow:
        """The flow without what differs from sequence to sequence: those of a kind share
        capture programs and bundles."""
        return self if self.selection.everything else replace(self, positions="all")

    @property
    def places(self) -> tuple[Place, ...]:
        """Every hook point it reads."""
        return tuple(place for read in self.reads for place in read.places)

    @property
    def phase(self) -> Phase:
        """The phase of the rows this flow is given."""
        for read in self.reads:
            if read.port in ("residual_stream", "token_target"):
                return read.phase
        return "any"

    @cached_property
    def ports(self) -> frozenset[str]:
        """Those that it reads."""
        return frozenset(read.port for read in self.reads)

    def reads_port(self, port: str) -> bool:
        """Whether any read is of this port."""
        return port in self.ports
