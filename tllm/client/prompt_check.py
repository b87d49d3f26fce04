"""What a request asks, held against its prompt once that is processed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from tllm.client.patching import PatchComposer
from tllm.client.request import Prepared
from tllm.engine.media import media_of_request, prompt_len
from tllm.engine.refusals import RefusedError
from tllm.spec.groups import GroupUse
from tllm.spec.media import PromptMedia
from tllm.spec.patching import PatchUse, check_patch_positions
from tllm.spec.request import EXTRA_ARG, RequestSpec, RowsRead, wire_of


class PromptCheck:
    """Puts positions in the place of what a request names of its prompt, items and the whole, and
    refuses those that the request cannot have.

    Args:
        patches: finds what a request's patches name.
    """

    def __init__(self, patches: PatchComposer) -> None:
        self._patches = patches
        #: By prompt: requests of which it hangs on the prompt what is done at which positions.
        self._unplaced: WeakValueDictionary[str, Prepared] = WeakValueDictionary()

    def expect(self, prepared: Prepared) -> None:
        """Which positions a request means hangs on its prompt, which is to come."""
        self._unplaced[prepared.prompt_id] = prepared

    def check(self, request: Any) -> None:
        """Place and check what a request asks.

        Args:
            request: vLLM's `EngineCoreRequest`.
        """
        params = request.sampling_params or request.pooling_params
        wire = wire_of(params)
        try:
            if wire.get("media") is not None:
                if wire.get("streamed") and request.mm_features:
                    raise ValueError(
                        "what steers every request names the tokens of images, and this streamed "
                        "prompt has some: where they will be is not known; give it at once"
                    )
                wire = self._placed_in(wire, prompt_len(request), media_of_request(request))
                name = "extra_args" if request.sampling_params else "extra_kwargs"
                setattr(params, name, {**getattr(params, name), EXTRA_ARG: wire})
            _check_positions(wire, request)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _placed_in(
        self, wire: Mapping[str, Any], num_tokens: int, media: PromptMedia
    ) -> dict[str, Any]:
        """What a request carries, with the positions of what it names of its prompt."""
        spec = RequestSpec.from_wire(wire).in_prompt(media)
        asked = self._unplaced.get(spec.prompt_id)
        if asked is not None and asked.patch is not None and asked.patch.unplaced:
            spec = replace(spec, patch=self._patches.uses(asked.patch.in_prompt(num_tokens, media)))
        return spec.to_wire()


def _check_positions(wire: Mapping[str, Any], request: Any) -> None:
    """Refuse positions at which the sequences of a request cannot have rows."""
    if request.prompt_token_ids is None:
        _check_judged(wire)
    reads, patch = wire.get("reads", ()), wire.get("patch", ())
    if not reads and not patch:
        return
    num_tokens = prompt_len(request)
    max_tokens = 1 if request.sampling_params is None else request.sampling_params.max_tokens
    if wire.get("streamed"):  # a later part of the prompt may reach the position
        max_tokens = None
    check_patch_positions(map(PatchUse.from_wire, patch), num_tokens, max_tokens)
    for read in map(RowsRead.from_wire, reads):
        read.positions.check(num_tokens, max_tokens, read.name)


def _check_judged(wire: Mapping[str, Any]) -> None:
    """Refuse conditions that end a request whose prompt is embeddings, where nobody knows which of
    its tokens are steered: a worker would judge none of them."""
    name = next((name for name in ("stop", "abort") if wire.get(f"{name}s")), None)
    if name is None:
        return
    if any(use.names_prompt_tokens for use in map(GroupUse.from_wire, wire["steering"])):
        raise ValueError(
            f"{name}_when was given with steering by token_ids, which cannot be found in a prompt "
            "that was given as embeddings; give positions"
        )
