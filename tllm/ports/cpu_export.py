"""Bring tensors to the host without making the engine wait."""

from __future__ import annotations

from tllm.ports.base import PortWrite


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
