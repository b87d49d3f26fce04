"""The places in a transformer block where a model's activations can be read and written."""

from __future__ import annotations

from enum import Enum


class HookPoint(str, Enum):
    """A named tensor of the forward pass; members are in the order a block computes them."""

    PRE_ATTN = "pre_attn"
    """The residual stream entering the block, before its norm."""
    ATTN_IN = "attn_in"
    """What the attention module receives."""
    ATTN_OUT = "attn_out"
    """The attention branch as it is added to the stream."""
    POST_ATTN = "post_attn"
    """The stream after the attention branch is added."""
    MLP_IN = "mlp_in"
    """What the MLP (or expert layer) receives."""
    MLP_OUT = "mlp_out"
    """The MLP branch as it is added to the stream."""
    POST_BLOCK = "post_block"
    """The stream leaving the block."""
    LM_HEAD_IN = "lm_head_in"
    """The final normed state, what the LM head reads; it belongs to no layer."""

    def __str__(self) -> str:
        return self.value

    @property
    def has_layer(self) -> bool:
        """Whether the point is found once in every layer; False for `lm_head_in`."""
        return self is not HookPoint.LM_HEAD_IN

    @classmethod
    def parse(cls, name: str | HookPoint) -> HookPoint:
        """The hook point called `name`, which may be an alias.

        Raises `ValueError` naming what was given and what is allowed.
        """
        if isinstance(name, str):
            try:
                return cls(_ALIASES.get(name, name))
            except ValueError:
                pass
        allowed = ", ".join(point.value for point in cls)
        aliases = ", ".join(f"{alias} = {canonical}" for alias, canonical in _ALIASES.items())
        raise ValueError(
            f"unknown hook point {name!r}; the hook points are {allowed} (also {aliases})"
        )


_ALIASES = {
    "block_input": "pre_attn",
    "attn_input": "attn_in",
    "attn_output": "attn_out",
    "mlp_input": "mlp_in",
    "mlp_output": "mlp_out",
    "block_output": "post_block",
}
