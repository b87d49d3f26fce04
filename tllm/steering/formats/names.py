"""Names that files and other libraries give to a place in the model, and what they mean here.

The keys that name the place of a vector, in a safetensors or npz file or in a saved dict:

    key    := [hook ("." | "_")] [word ["." | "_"]] layer
    hook   := a hook point of tLLM or its alias, such as post_block
    word   := "layer" | "layers" | "block" | "blocks" | "direction"
    layer  := decimal number, counting from 0

such as `post_block.12`, `post_block.layer_12`, `layers.12`, `layer_12`, `layer12` and `12`; also

    blocks.12.hook_resid_post    a hook name of TransformerLens, of those in TRANSFORMER_LENS
    model.layers.12              the module of a block: the stream that leaves it. Prefixes are
                                 model.layers, transformer.h, gpt_neox.layers, model.decoder.layers

`hidden_states.12` is not one: whether it counts from the embedding or from the first block's
output differs from writer to writer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tllm.spec.hooks import ALIASES, TRANSFORMER_LENS, HookPoint

GRAMMAR = (
    "a key is [HOOK.][layer_]N, such as 'post_block.12', 'layer_12' or '12', or a name of "
    "TransformerLens such as 'blocks.12.hook_resid_post', or of a block, 'model.layers.12'"
)


class NamedPlace(NamedTuple):
    """A layer and, if the name says so, a hook point."""

    hook: HookPoint | None
    layer: int


_LETTERS = HookPoint.Q, HookPoint.K, HookPoint.V
"""With a dot: `v_12` may be anybody's twelfth vector."""
_NAMED = [point.value for point in HookPoint if point.has_layer and point not in _LETTERS]
_KEY = re.compile(
    rf"(?:(?P<hook>{'|'.join([*_NAMED, *ALIASES])})[._]|(?P<letter>{'|'.join(_LETTERS)})\.)?"
    r"(?:(?:layers?|blocks?|direction)[._]?)?(?P<layer>0|[1-9][0-9]*)"
)
_LENS = re.compile(rf"blocks\.(?P<layer>0|[1-9][0-9]*)\.(?P<hook>{'|'.join(TRANSFORMER_LENS)})")
BLOCKS = r"model\.layers|transformer\.h|gpt_neox\.layers|model\.decoder\.layers"
"""Where `transformers` keeps the blocks of a model, as a pattern."""

_BLOCK = re.compile(rf"(?:{BLOCKS})\.(?P<layer>0|[1-9][0-9]*)")


def parse_place(name: str) -> NamedPlace | None:
    """The place that `name` means, or None if it follows none of the grammar above."""
    if match := _KEY.fullmatch(name):
        hook = match["hook"] or match["letter"]
        return NamedPlace(HookPoint.parse(hook) if hook else None, int(match["layer"]))
    if match := _LENS.fullmatch(name):
        return NamedPlace(TRANSFORMER_LENS[match["hook"]], int(match["layer"]))
    if match := _BLOCK.fullmatch(name):
        return NamedPlace(HookPoint.POST_BLOCK, int(match["layer"]))
    return None
