"""A request on its way: of what kind it is, what it asks, as the engine takes it, and what has come
back of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import PoolingRequestOutput, RequestOutput

from tllm.client.composer import Composer
from tllm.client.results import Collected, Samples
from tllm.ports import ConsumerFlow
from tllm.spec.conversations import ConversationUse
from tllm.spec.groups import SteeringGroup
from tllm.spec.media import MediaItem
from tllm.spec.patching import RequestPatch
from tllm.spec.phases import SELECTED_PHASES
from tllm.spec.request import Asked, RowsRead, wire_of
from tllm.spec.selection import Selection

_POOLING = "pooling, which generates nothing; use generate()"
_STREAMED = (
    "a prompt that is streamed, as a lane's is, too; give the whole prompt at once (of a lane, to "
    "next_token_logprobs)"
)
_BEAM = "a beam, which is computed by many requests; use generate()"


@dataclass
class Uses:
    """What consumers have to do with a request.

    Attributes:
        reads: rows that they read.
        writes: they may change rows.
        guides: they may guide which tokens are drawn.
        acting: the first that decides what is done to it; None for none.
        steering_rows: rows by which they may decide how those after them are steered.
        captures: those whose results are capture results.
        wants_tokens: one waits for the tokens of the output.
        unused: those that have nothing to do with it.
        media: items of the prompt whose tokens they read, with the field that names them; None
            where no flow hangs on where such items are.
    """

    reads: list[RowsRead] = field(default_factory=list)
    writes: bool = False
    guides: bool = False
    acting: str | None = None
    steering_rows: list[RowsRead] = field(default_factory=list)
    captures: list[str] = field(default_factory=list)
    wants_tokens: bool = False
    unused: set[str] = field(default_factory=set)
    media: list[tuple[str, MediaItem]] | None = None

    def add(self, flow: ConsumerFlow, field_name: str) -> None:
        """A flow takes part."""
        if flow.selection.media:
            named = [(f"{field_name}['positions']", i) for i in flow.selection.include.media]
            self.media = [*(self.media or ()), *named]
        self.reads += rows_read(flow, field_name)
        if flow.actions:
            self.acting = self.acting or field_name
            if "steer" in flow.actions and (positions := rows_given(flow)) is not None:
                self.steering_rows.append(RowsRead(f"{field_name}['positions']", positions))
        ports = {each.port for each in flow.writes}
        self.writes = self.writes or "residual_stream" in ports
        self.guides = self.guides or "sampler" in ports


@dataclass(frozen=True)
class RequestKind:
    """What sort of request it is.

    Attributes:
        generates: it is for generation, and not for pooling.
        streamed: its prompt arrives in parts. Only the engine knows then where it ends.
        generated: how many of the last tokens of its prompt were generated, where it is a step of
            a beam; None for every other request.
        results: somebody will come for what the consumers have to say.
    """

    generates: bool = True
    streamed: bool = False
    generated: int | None = None
    results: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it may be asked for all that there is."""
        beam = self.generated is not None
        return self.generates and self.results and not self.streamed and not beam

    def check(
        self, asked: Asked, groups: Sequence[SteeringGroup], uses: Uses, composer: Composer
    ) -> None:
        """Refuse what cannot be done to a request of this kind: of the fields of a request in
        their order, of what else steers it, and of the consumers.

        Args:
            composer: knows the modules and the monitors that a request names.

        Raises `ValueError` naming what is wrong.
        """
        if self.is_plain:
            return
        for what, limits, way_out in self._limited(asked, groups, uses):
            for limit, holds in (
                (_POOLING, not self.generates),
                (_STREAMED, self.streamed),
                (_BEAM, self.generated is not None),
            ):
                if holds and limit in limits:
                    raise ValueError(f"{what} {limit}{way_out}")
        if not self.generates:
            _check_decodes(asked, composer)
        if not self.results or self.streamed:
            _check_media(asked, groups, uses)

    def _limited(
        self, asked: Asked, groups: Sequence[SteeringGroup], uses: Uses
    ) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """What is asked that some kinds of requests cannot have: what it is, as an error begins,
        of which kinds, and what else may be done about it."""
        if asked.steering is not None and asked.steering.endings:
            name = "stop_when" if asked.steering.endings.stop else "abort_when"
            yield f"{name} was given for", (_POOLING, _STREAMED), ""
        if asked.conversation is not None:
            yield "conversation was given for", (_POOLING, _STREAMED), ""
        if asked.patch is not None:
            yield "patch was given for", (_STREAMED,), ""
        if any(group.remembers for group in groups):
            yield (
                "a condition of steering, the request's own or a global one, decides on later "
                "tokens ('scope', 'over'), and was given for",
                (_STREAMED, _BEAM),
                ", or leave scope and over out",
            )
        if uses.acting is not None:
            yield (
                f"{uses.acting} decides what is done to requests (Actions.write), and this one is "
                "for",
                (_POOLING, _STREAMED, _BEAM),
                f", or turn it off for this request: {uses.acting} = {{'enabled': False}}",
            )


@dataclass(eq=False)
class Prepared:
    """A request that is ready for the engine.

    Attributes:
        params: its own copy of the parameters, vLLM's.
        prompt_id: the key its results are kept under.
        capture_options: of the consumers whose results are capture results.
        wants_tokens: a consumer waits for the tokens of the output.
        streamed: its prompt arrives in parts; only the engine knows which tokens it keeps of the
            answers between them.
        unused: the consumers that were registered and have nothing to do with it.
        named: the consumers that it asks for by name.
        lasting: by consumer, the options that later inputs of its prompt have to give alike.
        groups: what its rows are steered with.
        patch: the rows that are put in the place of its own.
        ended_by: names of the conditions that may end a sample, or refuse the prompt.
        keeps_results: somebody will come for what consumers have to say.
        samples: what was given out so far.
        results: what the workers said so far.
        handed_over: which of them the user's consumers were given, by sample and consumer.
    """

    params: Any
    prompt_id: str
    capture_options: Mapping[str, Mapping[str, Any]]
    wants_tokens: bool = False
    streamed: bool = False
    unused: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    lasting: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[SteeringGroup, ...] = ()
    patch: RequestPatch | None = None
    ended_by: frozenset[str] = frozenset()
    keeps_results: bool = True
    samples: Samples = field(default_factory=Samples)
    results: Collected = field(default_factory=Collected)
    handed_over: set[tuple[int, str]] = field(default_factory=set)

    def take_in(self, later: Prepared) -> None:
        """A later input of its prompt may use consumers that it did without: their results come
        with its own."""
        self.unused &= later.unused
        self.named |= later.named
        self.lasting = {**later.lasting, **self.lasting}
        self.wants_tokens |= later.wants_tokens

    @property
    def captures(self) -> tuple[str, ...]:
        """The consumers whose results are capture results."""
        return tuple(self.capture_options)

    @property
    def conversation(self) -> tuple[int, int] | None:
        """Place and serial of the conversation that it takes part in; None for none."""
        given = wire_of(self.params).get("conversation")
        return None if given is None else ConversationUse.from_wire(given)[:2]

    def tokens(self, output: RequestOutput | PoolingRequestOutput) -> dict[int, list[int]] | None:
        """All tokens of each sample, if a consumer waits for them; None: the engine will say."""
        if not self.wants_tokens:
            return {}
        if self.streamed:
            return None
        prompt = list(output.prompt_token_ids or ())
        return {sample: [*prompt, *tokens] for sample, tokens in self.samples.tokens.items()}


def media_of(
    asked: Asked, groups: Sequence[SteeringGroup], uses: Uses
) -> tuple[tuple[str, MediaItem], ...] | None:
    """The items that a prompt must have for what is asked; None where nothing is named of which it
    hangs on the prompt where it is. Steering of every request is for those that have some."""
    patched = asked.patch is not None and asked.patch.unplaced
    if uses.media is None and not patched and not any(g.positions.media for g in groups):
        return None
    return tuple(dict.fromkeys((*(uses.media or ()), *asked.steered_media)))


def _check_decodes(asked: Asked, composer: Composer) -> None:
    """Refuse steering of generated tokens alone where none are generated."""
    if asked.steering is None:
        return
    own = asked.steering.own.by_phase()
    idle = [e.name for phase, e in own if phase == "decode" or e.needs_generated]
    what = idle[0] if idle else composer.for_generated_alone(asked.steering)
    if what is not None:
        raise ValueError(
            f"{what} steers generated tokens alone, and was given for pooling, which generates "
            "nothing; use steering_vectors or steering_clamps, other positions, and a condition "
            "without 'over'"
        )


def _check_media(asked: Asked, groups: Sequence[SteeringGroup], uses: Uses) -> None:
    """Refuse what is named of a prompt where nobody puts its positions in its place."""
    whole = () if asked.patch is None else [e.name for e in asked.patch.entries if e.whole_prompt]
    if whole:
        raise ValueError(
            f"{whole[0]}['positions'] is 'all_prompt' in a question for log-probabilities; give "
            "the positions as a list of numbers"
        )
    if media_of(asked, groups, uses):
        raise ValueError(
            "positions name the tokens of an image, a video or a sound, and the prompt is "
            "streamed, or a question for log-probabilities; give a whole prompt at once, to "
            "generate() or chat()"
        )


def rows_given(flow: ConsumerFlow) -> Selection | None:
    """Which rows a flow is given; None for none."""
    positions = flow.selection
    if flow.phase != "any":
        phase = SELECTED_PHASES[flow.phase]
        if positions.everything:
            positions = Selection.parse({"phase": phase})
        elif positions.phase == "any":
            if phase == "generation":
                positions = Selection.parse({"phase": phase})
        elif positions.phase != phase:
            return None
    return positions


def rows_read(flow: ConsumerFlow, field: str) -> list[RowsRead]:
    """The rows that a flow reads, and that the prefix cache may not have."""
    # Rows of a flow that reads the logits are sampled from: the cache never holds those.
    if not flow.reads or flow.reads_port("logits") or flow.prompt_rows == "computed":
        return []
    positions = rows_given(flow)
    if positions is None:
        return []
    return [RowsRead(f"{field}['positions']", positions, flow.prompt_rows == "once")]
