"""The ports that only declare what a flow reads or writes."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.ports.base import Place, PortRead, PortWrite
from tllm.spec.layers import layer_at
from tllm.spec.phases import Phase, phase_named
from tllm.spec.reading import hook_named


class ResidualStream:
    """Rows `[rows, hidden]` of a hook point, in the model's dtype."""

    @staticmethod
    def read(
        *, layer: int = -1, site: str = "post_block", phase: Phase = "any", role: str = "hidden"
    ) -> PortRead:
        """Read the rows that arrive at a hook point.

        Args:
            layer: index of the block; negative counts from the end. Ignored by `embed` and
                `lm_head_in`.
            site: a hook point, or its alias.
            phase: `prefill` (the token belongs to the prompt), `decode`, or `any`.
            role: key of the tensor in `PortBundle.entries`.
        """
        phase = phase_named(phase)
        return PortRead("residual_stream", role, phase, (_place(site, layer),))

    @staticmethod
    def read_block(
        places: Sequence[Place], *, phase: Phase = "any", role: str = "hidden"
    ) -> PortRead:
        """Read many hook points as one tensor `[rows, places, hidden]`.

        It costs no more than reading one: the rows of a token lie side by side in the ring.

        Args:
            places: `(site, layer)` of each; that of `embed` and `lm_head_in` is ignored.
            phase, role: as in `read`.
        """
        phase = phase_named(phase)
        if not len(places):
            raise ValueError("places=[] reads nothing; give one or more (site, layer)")
        for place in places:
            if isinstance(place, str) or not isinstance(place, Sequence) or len(place) != 2:
                raise ValueError(
                    f"places: {place!r:.60} is no place; give (site, layer) of each, such as "
                    "[('post_block', 3), ('mlp_out', 3)]"
                )
        located = tuple(_place(site, layer) for site, layer in places)
        return PortRead("residual_stream", role, phase, located, block=True)

    @staticmethod
    def write(
        *, layer: int = -1, site: str = "post_block", phase: Phase = "any", role: str = "delta"
    ) -> PortWrite:
        """Add a vector to the rows of a hook point, from the next forward pass on.

        The vectors are given per request through `ctx.writer(role)`; a request that has none
        is not touched.
        """
        phase = phase_named(phase)
        point, number = _place(site, layer)
        return PortWrite("residual_stream", role, phase, number, point)


class Logits:
    """Rows `[rows, vocab]`, one for each sequence that samples a token this step.

    Of a request with `structured_outputs`, they are -inf for tokens that these do not allow.
    """

    @staticmethod
    def read(*, role: str = "logits") -> PortRead:
        """Read the logits. Rows of a flow that reads them are the rows that are sampled from."""
        return PortRead("logits", role)


class TokenTarget:
    """`[rows]` int64: the token after each row's token.

    For a row that is sampled from, the sampled token; for an earlier prompt row, the prompt's
    next token. A flow that reads it is called after sampling.
    """

    @staticmethod
    def read(*, phase: Phase = "any", role: str = "token_target") -> PortRead:
        """Read the token that follows each row."""
        phase = phase_named(phase)
        return PortRead("token_target", role, phase)


class Signals:
    """`[rows, 2, 32]` float32: the strength (0 to 1) and the score of each condition of steering
    that a row's request has, by its number; no number where a condition was not judged.

    They are there in the step itself: a flow that reads them has `window="same_step"`.
    """

    @staticmethod
    def read(*, role: str = "signals") -> PortRead:
        """Read what conditions made of each row."""
        return PortRead("signals", role)


class CpuExport:
    """A channel to `Consumer.on_export`, which gets pinned host copies on a delivery thread."""

    @staticmethod
    def write(*, channel: str, role: str | None = None) -> PortWrite:
        """Declare a channel; send with `ctx.export(channel, {"name": tensor, ...}, meta)`.

        Args:
            channel: name given back to `on_export`.
            role: name of the write within the flow; the channel's name by default.
        """
        if not isinstance(channel, str) or not channel:
            raise TypeError(f"CpuExport.write(channel={channel!r:.60}): give a text, not empty")
        return PortWrite("cpu_export", role or channel, options={"channel": channel})


def _place(site: str, layer: int | None) -> Place:
    point = hook_named(site, "site")
    return point.value, layer_at(point, layer if point.has_layer else None, "layer")
