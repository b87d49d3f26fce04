"""What is registered in a worker: consumers, their flows, and what they may use when called."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch

from tllm.cuda_runtime import current_stream
from tllm.ports import (
    Action,
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    HostTensor,
    ModelView,
    PortBundle,
    PortRead,
    RequestInfo,
    ResidualWriter,
    RowMeta,
)
from tllm.result_memory import ResultMemory
from tllm.runtime.columns import DECODE, PREFILL
from tllm.runtime.read_rows import ReadRows, Roles
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.taps import TapKey
from tllm.runtime.transfer import CopyInto, DeliveryThread, PinnedCopy, upload
from tllm.spec.selection import Selection

PHASES: Mapping[str, tuple[int, ...]] = {
    "prefill": (PREFILL,),
    "decode": (DECODE,),
    "any": (PREFILL, DECODE),
}
#: Flows of requests that are remembered, to be shared by later ones that ask the same.
_MAX_REQUEST_FLOWS = 4096
#: Batches whose sequences are remembered.
_MAX_BATCHES = 64


class ConsumerProtocol(Protocol):
    """What the runtime, which imports no consumer, calls of one (`tllm.consumers.base.Consumer` is
    its public base)."""

    consumer_id: str
    on_request_only: bool
    uses_lm_head: bool
    hears_step_end: bool
    has_request_flows: bool
    remote_methods: Sequence[str]
    #: `(channel, tensors, meta, attached)`; the last may be left out.
    on_export: Callable[..., None]

    def needs_tokens_of(self, options: Mapping[str, Any]) -> bool: ...
    def flows(self) -> Sequence[ConsumerFlow]: ...
    def validate_options(self, options: Mapping[str, Any]) -> None: ...
    def request_flows(
        self, options: Mapping[str, Any], num_layers: int
    ) -> Sequence[ConsumerFlow]: ...
    def start(self, ctx: ConsumerContext) -> None: ...
    def on_weights_changed(self, ctx: ConsumerContext) -> None: ...
    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None: ...
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None: ...
    def decide(self, rows: PortBundle, ctx: ConsumerContext) -> Iterable[Action] | None: ...
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> torch.Tensor | None: ...
    def on_step_end(self, ctx: ConsumerContext) -> None: ...
    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any: ...
    def expedite(self) -> None: ...
    def on_error(self, error: BaseException) -> None: ...
    def stop(self) -> None: ...
    def synchronize(self) -> None: ...
    def read_stats(self) -> Mapping[str, Any]: ...


@dataclass(eq=False)
class BoundFlow:
    """A flow of a registered consumer, with its reads resolved to taps.

    number: its index in the consumer's `flows()`; -1 for one of `request_flows`.
    reads: the flow's, as this worker has them.
    tap_by_role: the taps that each residual read is served by.
    """

    owner: BoundConsumer
    number: int
    flow: ConsumerFlow
    reads: tuple[PortRead, ...]
    tap_by_role: Mapping[str, tuple[TapKey, ...]]
    held: list[ReadRows] = field(default_factory=list)
    """Rows that wait for the n-th step (`dispatch_every_n_steps`)."""
    steps_seen: int = 0

    @cached_property
    def taps(self) -> tuple[TapKey, ...]:
        return tuple(tap for taps in self.tap_by_role.values() for tap in taps)

    @cached_property
    def gathered(self) -> Mapping[Roles, tuple[str, tuple[TapKey, ...]]]:
        """Port and taps by what is made one tensor. All reads of one place each are: what they
        cost does not grow with how many layers are read."""
        single = [r.role for r in self.reads if r.port == "residual_stream" and not r.block]
        found: dict[Roles, tuple[str, tuple[TapKey, ...]]] = {}
        if len(single) > 1:
            taps = tuple(tap for role in single for tap in self.tap_by_role[role])
            found[tuple(single)] = "residual_stream", taps
        for read in self.reads:
            if len(single) < 2 or read.role not in single:
                found[read.role] = read.port, self.tap_by_role.get(read.role, ())
        return found

    @cached_property
    def columns(self) -> Mapping[str, int]:
        """By role: which of the rows that are one tensor of several roles."""
        several = [roles for roles in self.gathered if isinstance(roles, tuple)]
        return {role: place for roles in several for place, role in enumerate(roles)}

    @cached_property
    def single(self) -> str | None:
        """The role of its only read of one place; None where there is none, or are several."""
        roles = [r.role for r in self.reads if r.port == "residual_stream" and not r.block]
        return roles[0] if len(roles) == 1 else None

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """The phases whose rows it reads."""
        return PHASES[self.flow.phase] if self.flow.reads else ()

    @cached_property
    def after_sampling(self) -> bool:
        return self.flow.reads_port("token_target")

    @cached_property
    def before_sampling(self) -> bool:
        """Whether it is called before the step's tokens are sampled."""
        return self.flow.window == "same_step" and not self.after_sampling

    @cached_property
    def divides(self) -> bool:
        """Whether the rows of a step and phase may go into several bundles."""
        spec = self.flow
        return bool(spec.max_bundle_rows) or not {"request_id", "prompt_id"}.isdisjoint(
            spec.bundle_key
        )

    @cached_property
    def lends(self) -> bool:
        """Whether its rows are the consumer's only while it is called."""
        return self.flow.delivery == "device_lease"

    @cached_property
    def leaves_stream(self) -> bool:
        """Whether it is called on another stream than the forward pass."""
        return self.flow.window in ("out_of_band", "background")

    @cached_property
    def keeps_logits(self) -> bool:
        """Whether it reads the logits after the sampler has worked on them in place."""
        return self.flow.reads_port("logits") and not self.before_sampling


class BoundConsumer:
    """A registered consumer in this worker: its flows, its streams and how it fares.

    Args:
        call: calls into a consumer, and keeps what it raises to it.
        registration: tells it from others that had its id, or will have.

    Attributes:
        writes_rows: whether it adds to rows, in any worker.
        guides: whether it guides which tokens are drawn.
        forgotten: how often sequences have changed, so that what was said of them is asked anew.
    """

    def __init__(
        self,
        consumer: ConsumerProtocol,
        model: ModelView,
        writers: Mapping[str, ResidualWriter],
        result_memory: ResultMemory,
        call: Callable[..., Any],
        registration: str = "",
    ) -> None:
        self.consumer = consumer
        self.registration = registration
        self.id = consumer.consumer_id
        self.hears_step_end = consumer.hears_step_end
        self.on_request_only = consumer.on_request_only
        self.context = Context(self, model, writers, result_memory)
        self.side = self.context.side_stream()
        #: Recorded where the side stream goes on.
        self.side_follows = None if self.side is None else torch.cuda.Event()
        self.flows: list[BoundFlow] = []
        writes = [write for flow in consumer.flows() for write in flow.writes]
        self.channels = {w.options["channel"] for w in writes if w.port == "cpu_export"}
        self.writes_rows = any(write.port == "residual_stream" for write in writes)
        self.guides = any(write.port == "sampler" for write in writes)
        self.thread = DeliveryThread(f"tllm-{self.id}", model.device)
        self.export_thread = DeliveryThread(f"tllm-{self.id}-export", model.device)
        self.error: str | None = None
        self.calls = 0
        self.rows = 0
        self.rows_dropped = 0
        #: By slot: the flows that only this sequence asked for, and at which positions.
        self.asked: dict[int, list[tuple[BoundFlow, Selection]]] = {}
        self._call = call
        self._lock = threading.Lock()
        #: What the last job of the export thread hands on, where it has not begun and has no
        #: tensors.
        self._together: list[tuple[Any, ...]] | None = None
        self._request_flows: OrderedDict[ConsumerFlow, BoundFlow | None] = OrderedDict()
        #: The same by the flow's identity; each flow is kept with it.
        self._same_flows: dict[int, tuple[ConsumerFlow, BoundFlow | None]] = {}
        self._infos: dict[int, RequestInfo] = {}
        self._requests: dict[bytes, tuple[tuple[RequestInfo, ...], np.ndarray]] = {}
        self._places: dict[bytes, tuple[list[int], np.ndarray]] = {}
        self.forgotten = 0

    @property
    def alive(self) -> bool:
        return self.error is None

    def counters(self) -> dict[str, Any]:
        """What it was given, what waits for it and since when, and how it fares."""
        threads = self.thread, self.export_thread
        return {
            "calls": self.calls,
            "rows": self.rows,
            "rows_dropped": self.rows_dropped,
            "waiting": sum(thread.waiting for thread in threads),
            "lag_s": max(thread.lag_s for thread in threads),
            "error": self.error,
        }

    def serves(self, sequence: RunningSequence) -> bool:
        """Whether the sequence uses it. One that was accepted when nobody wrote to its rows shares
        its cached blocks with others: whoever writes does not serve it. Nor does whoever guides one
        that was accepted when nobody did, and whose tokens are drafted."""
        if self.on_request_only and self.id not in sequence.consumers:
            return False
        if (self.writes_rows and not sequence.isolated) or (self.guides and sequence.drafted):
            return False
        return sequence.uses(self.id)

    def has_served(self, sequence: RunningSequence) -> bool:
        """Whether the sequence uses it, or did for an earlier input of its prompt."""
        return self.id in sequence.let_go or self.serves(sequence)

    def is_of_another(self, sequence: RunningSequence) -> bool:
        """Whether the sequence names one of this id that was registered before this one, or after
        it."""
        return sequence.registrations.get(self.id, self.registration) != self.registration

    def info(self, sequence: RunningSequence) -> RequestInfo:
        """The sequence as this consumer sees it, with the options meant for it."""
        slot = sequence.info.slot
        info = self._infos.get(slot)
        if info is None:
            options = sequence.consumers.get(self.id, {})
            info = sequence.info.having(options=options) if options else sequence.info
            self._infos[slot] = info
        return info

    def interned(
        self, flow: ConsumerFlow, bind: Callable[[ConsumerFlow], BoundFlow | None]
    ) -> BoundFlow | None:
        """The flow of a kind that sequences share; `bind` makes it (None: not on this rank)."""
        kind = flow.kind
        same = self._same_flows.get(id(kind))  # what it is equal to takes longer to find
        if same is not None:
            return same[1]
        if kind in self._request_flows:
            self._request_flows.move_to_end(kind)
        else:
            self._request_flows[kind] = bind(kind)
            if len(self._request_flows) > _MAX_REQUEST_FLOWS:
                self._request_flows.popitem(last=False)
        if len(self._same_flows) >= _MAX_REQUEST_FLOWS:
            self._same_flows.clear()
        self._same_flows[id(kind)] = kind, self._request_flows[kind]
        return self._request_flows[kind]

    def requests(self, at: np.ndarray, slots: Slots) -> tuple[tuple[RequestInfo, ...], np.ndarray]:
        """The distinct sequences in these slots, and which of them is in each.

        Those of a steady decode batch are looked up once.
        """
        key = at.tobytes()
        found = self._requests.get(key)
        if found is None:
            distinct, index = self._distinct(key, at)
            try:
                requests = tuple(map(self._infos.__getitem__, distinct))
            except KeyError:
                owners = map(slots.by_slot.__getitem__, distinct)
                requests = tuple([self.info(owner) for owner in owners if owner is not None])
            found = self._requests[key] = requests, index
        return found

    def _distinct(self, key: bytes, at: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The distinct slots, and which of them each is: the same, whoever has them."""
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= _MAX_BATCHES:
                self._places.clear()
                self._requests.clear()
            places = at.tolist()
            distinct = list(dict.fromkeys(places))
            if len(distinct) == len(places):
                index = np.arange(len(places), dtype=np.int32)
            else:
                numbers = dict(zip(distinct, range(len(distinct)), strict=True))
                index = np.fromiter(map(numbers.__getitem__, places), np.int32, len(places))
            found = self._places[key] = distinct, index
        return found

    def forget(self, slot: int) -> None:
        """What was said of a slot's sequence, and what it asked, is no longer true: it has changed,
        or is gone."""
        self.asked.pop(slot, None)
        self._places.clear()
        self.forget_all((slot,))

    def forget_all(self, slots: Iterable[int]) -> None:
        """Sequences have grown. Which slots a batch has is what it was."""
        for slot in slots:
            self._infos.pop(slot, None)
        self._requests.clear()
        self.forgotten += 1

    @cached_property
    def takes_attached(self) -> bool:
        """Whether its `on_export` has room for what came with the tensors."""
        try:
            signature(self.consumer.on_export).bind("", {}, None, None)
        except TypeError:
            return False
        return True

    def export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any,
        into: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Bring tensors to the host, and hand them to `on_export` on the export thread."""
        if channel not in self.channels:
            raise ValueError(
                f"channel={channel!r} was not declared with CpuExport.write; declared are "
                f"{sorted(map(str, self.channels)) or 'none'}"
            )
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"export() was given {type(tensors).__name__}; give tensors by name: "
                '{"states": tensor}'
            )
        if attached is not None and not self.takes_attached:
            raise ValueError(
                f"export(..., attach=...) was called, and on_export of consumer {self.id!r} does "
                "not take it; define on_export(self, channel, tensors, meta, attached)"
            )
        given = into or {}
        if unknown := sorted(set(given) - set(tensors)):
            raise ValueError(
                f"export(..., into=...) has memory for {unknown}; the tensors are {sorted(tensors)}"
            )
        rest = (attached,) if self.takes_attached else ()
        if not tensors:
            self._deliver_together(channel, meta, *rest)
            return
        with self._lock:
            self._together = None
        # The thread that waits for them waits for most of a step.
        copies: dict[str, HostTensor] = {
            name: CopyInto(tensor, given[name], sleeps=True)
            if name in given
            else PinnedCopy(tensor, sleeps=True)
            for name, tensor in tensors.items()
        }

        def deliver() -> None:
            arrived = {name: copy.wait() for name, copy in copies.items()}
            self.consumer.on_export(channel, arrived, meta, *rest)

        def deliver_into() -> None:
            self._call(self, deliver)
            if self.error is not None:  # the memory must not be used again before
                with suppress(RuntimeError):
                    for name in given:
                        copies[name].wait()

        self.export_thread.submit(deliver_into if given else partial(self._call, self, deliver))

    def _deliver_together(self, *told: Any) -> None:
        """Hand on what comes without tensors, as the ends of sequences do: one job of the thread
        for all that follow each other and come before it begins."""

        def deliver(channel: str, *rest: Any) -> None:
            self.consumer.on_export(channel, {}, *rest)

        def deliver_all() -> None:
            with self._lock:
                if self._together is together:
                    self._together = None
            for each in together:
                self._call(self, deliver, *each)

        with self._lock:
            if self._together is not None:
                self._together.append(told)
                return
            self._together = together = [told]
        self.export_thread.submit(deliver_all)


class Context(ConsumerContext):
    """The context of one consumer; `at` gives the one of a call.

    Attributes:
        latest: the one that `at` gave last.
    """

    def __init__(
        self,
        owner: BoundConsumer,
        model: ModelView,
        writers: Mapping[str, ResidualWriter],
        result_memory: ResultMemory,
    ) -> None:
        self.step = 0
        self.model = model
        self.result_memory = result_memory
        self.device = model.device
        self._owner = owner
        self._writers = writers
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.latest: Context = self

    @property
    def stream(self) -> torch.cuda.Stream | None:  # type: ignore[override]
        """Found out when it is asked for."""
        return current_stream(self.device) if self.device.type == "cuda" else None

    def at(self, step: int) -> Context:
        """The context of the calls of a step. Nothing changes in it any more."""
        latest = self.latest
        if latest.step == step and latest.model is self.model and latest is not self:
            return latest
        own = Context.__new__(Context)
        vars(own).update(vars(self), step=step)
        del own.latest  # else each would hold all before it
        self.latest = own
        return own

    def writer(self, role: str) -> ResidualWriter:
        try:
            return self._writers[role]
        except KeyError:
            raise ValueError(
                f"no ResidualStream.write with role={role!r} was declared; declared are "
                f"{sorted(self._writers) or 'none'}"
            ) from None

    def upload(self, array: np.ndarray) -> torch.Tensor:
        uploaded = upload(array, self.device)
        # On a CPU it may be the array itself, which is the consumer's to change again.
        return uploaded.clone() if self.device.type == "cpu" else uploaded

    def to_host(self, tensor: torch.Tensor) -> HostTensor:
        return PinnedCopy(tensor)

    def export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None = None,
        attach: Any = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._owner.export(channel, tensors, meta, attach, into)

    def side_stream(self) -> torch.cuda.Stream | None:
        return self._side
