"""What a request asks of tLLM, and how it travels in `SamplingParams.extra_args["tllm"]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tllm.spec.conversations import ConversationUse, RequestConversation
from tllm.spec.groups import GroupUse, RequestSteering
from tllm.spec.media import MediaItem, PromptMedia
from tllm.spec.patching import PatchUse, RequestPatch
from tllm.spec.selection import Selection

EXTRA_ARG = "tllm"
"""Key of `SamplingParams.extra_args`, and of `PoolingParams.extra_kwargs`, under which it is."""

OWN_ARGS = "tllm_"
"""Keys of `extra_args` that begin so are for tLLM's own messages, and refused in a request."""


CONVERSATION = "conversation"
"""Name of the read of rows that need no computing in a conversation whose conditions all held."""


@dataclass(frozen=True)
class Asked:
    """What the user asks of tLLM for one request, checked as far as it can be without an engine.

    Attributes:
        consumers: options by consumer id, those of captures among them.
        captures: the consumers whose results are capture results.
        steering, patch: None for nothing.
        conversation: the one that it names.
        given: what it was read of, as the user's parameters have it.
        read: what each field that is not None was read as, by its name.
    """

    consumers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    captures: tuple[str, ...] = ()
    steering: RequestSteering | None = None
    patch: RequestPatch | None = None
    conversation: RequestConversation | None = None
    given: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def steered_media(self) -> list[tuple[str, MediaItem]]:
        """The items of the prompt whose tokens it steers, each with the field that names it."""
        if self.steering is None:
            return []
        named = [("steering_positions", item) for item in self.steering.positions.include.media]
        for entry in self.steering.tiers:
            named += [(f"{entry.name}['positions']", i) for i in entry.positions.include.media]
        return named

    def __bool__(self) -> bool:
        rows = self.steering, self.patch, self.conversation
        return bool(self.consumers) or any(each is not None for each in rows)

    def __deepcopy__(self, memo: Any) -> Asked:
        # Copies of the parameters share it: it never changes, and vectors are large.
        return self


@dataclass(frozen=True)
class RowsRead:
    """Some rows that somebody reads.

    Attributes:
        name: of the field that asked for them, for errors.
        once: prompt rows are read of sample 0 only.
    """

    name: str
    positions: Selection
    once: bool = False

    def in_prompt(self, media: PromptMedia) -> RowsRead:
        """The same with the positions of the items that it names."""
        return replace(self, positions=self.positions.in_prompt(media))

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, "positions": self.positions.to_wire(), "once": self.once}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RowsRead:
        return cls(wire["name"], Selection.from_wire(wire["positions"]), wire["once"])


_FLAGS = "wants_tokens", "acted", "isolated", "guided", "streamed"
"""Fields of a `RequestSpec` that are off by default."""

_OF_PARTS: Mapping[str, type[RowsRead | GroupUse | PatchUse]] = {
    "reads": RowsRead,
    "steering_rows": RowsRead,
    "steering": GroupUse,
    "patch": PatchUse,
}
"""Those that are several of one kind, each as plain data."""


@dataclass(frozen=True)
class RequestSpec:
    """Plain data only: it crosses process boundaries as msgpack.

    Attributes:
        request_id: the id the caller knows.
        prompt_id: unique to one prompt of one call; the n samples of the prompt share it, and
            results are kept under it. Empty when nobody will come for results.
        consumers: options by consumer id.
        registrations: of the consumers that it names, which one of that id it was accepted with.
        reads: the rows that somebody reads, those of generated tokens too.
        wants_tokens: the workers are told its tokens when it ends.
        acted: controllers may act on it.
        steering_rows: those by which controllers may steer the rows after them.
        isolated: rows are changed by writes, so cached blocks are not shared with anybody.
        guided: which tokens are drawn for it may be guided, so that none of them is drafted.
        steering: what is done to which rows, in order; the operations themselves were sent to
            the workers before, and are known by their digest.
        patch: what is put in the place of which rows, in order.
        generated: how many of the last tokens of its prompt were generated, as in a step of beam
            search. Their rows are those of generated tokens.
        streamed: its prompt arrives in parts.
        stops, aborts: number and name of the conditions that end a sample, and of those that refuse
            the prompt, in the order in which they are asked.
        conversation: the one that it belongs to, where that remembers any of its conditions.
        media: while the prompt is not known yet, and tokens of its items are named: the items that
            it must have, each with the field that names it. None afterwards, and otherwise.
    """

    request_id: str = ""
    prompt_id: str = ""
    num_samples: int = 1
    consumers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    registrations: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[RowsRead, ...] = ()
    wants_tokens: bool = False
    acted: bool = False
    steering_rows: tuple[RowsRead, ...] = ()
    isolated: bool = False
    guided: bool = False
    steering: tuple[GroupUse, ...] = ()
    patch: tuple[PatchUse, ...] = ()
    generated: int = 0
    streamed: bool = False
    stops: tuple[tuple[int, str], ...] = ()
    aborts: tuple[tuple[int, str], ...] = ()
    conversation: ConversationUse | None = None
    media: tuple[tuple[str, MediaItem], ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is nobody's concern but vLLM's."""
        changed = self.steering or self.patch or self.isolated or self.acted or self.guided
        return not (changed or self.consumers or self.reads or self.wants_tokens)

    def to_wire(self) -> dict[str, Any]:
        """As plain data, without what has its default."""
        wire: dict[str, Any] = {"request_id": self.request_id, "prompt_id": self.prompt_id}
        if self.num_samples != 1:
            wire["num_samples"] = self.num_samples
        if self.generated:
            wire["generated"] = self.generated
        for name in _FLAGS:
            if getattr(self, name):
                wire[name] = True
        for name in ("consumers", "registrations"):
            if by_id := getattr(self, name):
                wire[name] = dict(by_id)
        for name in _OF_PARTS:
            if parts := getattr(self, name):
                wire[name] = [part.to_wire() for part in parts]
        for name, ends in (("stops", self.stops), ("aborts", self.aborts)):
            if ends:
                wire[name] = [list(end) for end in ends]
        if self.conversation is not None:
            wire["conversation"] = self.conversation.to_wire()
        if self.media is not None:
            wire["media"] = [[name, *item] for name, item in self.media]
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RequestSpec:
        asked = dict(wire)
        for name, kind in _OF_PARTS.items():
            if name in asked:
                asked[name] = tuple(map(kind.from_wire, asked[name]))
        for name in ("stops", "aborts"):
            if name in asked:
                asked[name] = tuple((number, reason) for number, reason in asked[name])
        if "conversation" in asked:
            asked["conversation"] = ConversationUse.from_wire(asked["conversation"])
        if asked.get("media") is not None:
            asked["media"] = tuple((name, MediaItem(*item)) for name, *item in asked["media"])
        return cls.having(asked)

    @classmethod
    def having(cls, fields: Mapping[str, Any]) -> RequestSpec:
        """A request with these fields, and none else. What the constructor does, at a quarter of
        its price."""
        spec = cls.__new__(cls)
        own = vars(spec)
        own.update(vars(_PLAIN))
        own.update(fields)
        return spec if len(own) == len(vars(_PLAIN)) else cls(**fields)

    def in_prompt(self, media: PromptMedia) -> RequestSpec:
        """The same with the positions of the items that it names, all but those of patches.

        Raises `ValueError` for an item that the request asks for and the prompt lacks.
        """
        for name, item in self.media or ():
            media.check(item, name)
        return replace(
            self,
            consumers={name: _in_prompt(given, media) for name, given in self.consumers.items()},
            reads=tuple(read.in_prompt(media) for read in self.reads),
            steering_rows=tuple(read.in_prompt(media) for read in self.steering_rows),
            steering=tuple(
                replace(use, positions=use.positions.in_prompt(media)) for use in self.steering
            ),
            media=None,
        )

    @classmethod
    def of(cls, request: Any) -> RequestSpec:
        """The spec of a request; the default one for a request without.

        Args:
            request: of vLLM's, in any of its forms: it has `sampling_params` or `pooling_params`.
        """
        wire = wire_of(request.sampling_params or request.pooling_params)
        return cls.from_wire(wire) if wire else _PLAIN

    @property
    def judged_in_prompt(self) -> tuple[int, ...]:
        """Numbers of the conditions that the engine must be told of, for rows of the prompt."""
        kept = () if self.conversation is None else self.conversation.in_prompt
        return *(number for number, _ in self.aborts), *kept

    @property
    def judged_generated(self) -> tuple[int, ...]:
        """The same for rows of generated tokens."""
        kept = () if self.conversation is None else self.conversation.generated
        return *(number for number, _ in self.stops), *kept

    def recalling(self, use: ConversationUse) -> RequestSpec:
        """The same request, of which it is known what its conversation remembers."""
        reads = self.reads
        if len(use.held) == len(use.conditions):
            reads = tuple(read for read in reads if read.name != CONVERSATION)
        return replace(self, conversation=use, reads=reads)

    def sample_index(self, engine_id: str) -> int:
        """Which sample a sequence is; vLLM names the n of a request `{index}_{request id}`."""
        return 0 if self.num_samples == 1 else int(engine_id.partition("_")[0])

    def steered_from(self, prompt_len: int, prompt_token_ids: Sequence[int]) -> int | None:
        """The first position whose row controllers may steer; None for none."""
        firsts = [
            start + 1
            for read in self.steering_rows
            for start, _ in read.positions.intervals(prompt_len, prompt_token_ids)[:1]
        ]
        return min(firsts, default=None)

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


def _in_prompt(options: Mapping[str, Any], media: PromptMedia) -> Mapping[str, Any]:
    """A consumer's options, with positions in the place of the items that they name."""
    try:
        positions = Selection.parse(options["positions"])
    except (KeyError, ValueError):  # the consumer has no such option, or another of this name
        return options
    if not positions.media:
        return options
    return {**options, "positions": positions.in_prompt(media).to_wire()}


_PLAIN = RequestSpec()


def wire_of(params: Any) -> Mapping[str, Any]:
    """What sampling or pooling parameters carry for tLLM, as plain data."""
    if params is None:
        return {}
    found: Mapping[str, Any] = carried_by(params)[1].get(EXTRA_ARG, {})
    return found


def refusal_of_own(place: str, carried: Iterable[object]) -> str | None:
    """Why what stands in a place is refused: it has a name of our own messages. None where it has
    none, and all of it is the user's."""
    for name in carried:
        if isinstance(name, str) and name.startswith(OWN_ARGS):  # it could end the engine
            return (
                f"{place}[{name!r}] was given; names that begin with {OWN_ARGS!r} are those that "
                "tLLM's own processes use among themselves: leave it out"
            )
    return None


def carried_by(params: Any) -> tuple[str, Mapping[str, Any]]:
    """The field in which sampling or pooling parameters carry what vLLM does not know, and what is
    in it."""
    name = "extra_args" if hasattr(params, "extra_args") else "extra_kwargs"
    return name, getattr(params, name) or {}
