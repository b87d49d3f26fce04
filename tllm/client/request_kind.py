"""What sort of request it is, and what can therefore not be done to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tllm.client.request import Uses, media_of
from tllm.spec.groups import SteeringGroup
from tllm.spec.request import Asked

_POOLING = "pooling, which generates nothing; use generate()"
_STREAMED = (
    "a prompt that is streamed, as a lane's is, too; give the whole prompt at once (of a lane, to "
    "next_token_logprobs)"
)
_BEAM = "a beam, which is computed by many requests; use generate()"


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

    def check(self, asked: Asked, groups: Sequence[SteeringGroup], uses: Uses) -> None:
        """Refuse what cannot be done to a request of this kind: of the fields of a request in
        their order, of what else steers it, and of the consumers.

        Raises `ValueError` naming what is wrong.
        """
        if self.generates and self.results and not self.streamed and self.generated is None:
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
            _check_decodes(asked)
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


def _check_decodes(asked: Asked) -> None:
    """Refuse steering of generated tokens alone where none are generated."""
    for phase, entry in () if asked.steering is None else asked.steering.own.by_phase():
        if phase == "decode" or entry.needs_generated:
            raise ValueError(
                f"{entry.name} steers generated tokens alone, and was given for pooling, which "
                "generates nothing; use steering_vectors or steering_clamps, other positions, and "
                "a condition without 'over'"
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
