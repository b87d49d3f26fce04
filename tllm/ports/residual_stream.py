"""The residual stream, and every other hook point, at any layer: read and additive write."""

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


def _place(site: str, layer: int | None) -> Place:
    point = hook_named(site, "site")
    return point.value, layer_at(point, layer if point.has_layer else None, "layer")
