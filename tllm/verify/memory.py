"""What `transformers` needs to run a model in float32, and what there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from tllm.verify.reference import kind_of

_MORE = 1.25  # a shard of the checkpoint beside the model, and what a forward pass holds
_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class Needs:
    """What is known of a model before it is loaded.

    Attributes:
        unknown: why `transformers` cannot run it; "" where it can.
        longest: sequence that it is made for; None where it does not say.
        multimodal: whether it has a language model beside others.
    """

    unknown: str = ""
    parameters: int = 0
    longest: int | None = None
    multimodal: bool = False
    experts: bool = False

    @property
    def bytes(self) -> int:
        """Of memory, in float32."""
        return int(4 * _MORE * self.parameters)


def needs(checkpoint: str, options: dict[str, Any]) -> Needs:
    """Look at a checkpoint's configuration.

    Args:
        options: of `from_pretrained`.

    Raises `OSError` where there is no checkpoint.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, **options)
    except (ValueError, KeyError, ImportError) as error:
        return Needs(f"transformers does not know it ({_first_line(error)})")
    text = config.get_text_config()
    more: dict[str, Any] = {
        "longest": getattr(text, "max_position_embeddings", None),
        "multimodal": hasattr(config, "text_config"),
        "experts": any("expert" in name for name in text.to_dict()),
    }
    if getattr(config, "quantization_config", None) is not None:
        return Needs("it is quantized, and float32 would be another model", **more)
    try:
        with torch.device("meta"):
            model = kind_of(config).from_config(config, **_code(options))
    except Exception as error:  # whatever the model's own code raises
        return Needs(f"transformers cannot build it ({_first_line(error)})", **more)
    return Needs(parameters=sum(each.numel() for each in model.parameters()), **more)


def available(device: str) -> int:
    """Bytes that are free on a device, as `torch` names it."""
    if device != "cpu":
        try:
            return int(torch.cuda.mem_get_info(device)[0])
        except (AssertionError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ValueError(
                f"the reference device {device!r} cannot be used: {said}; give cpu, or a CUDA "
                "device that torch finds here"
            ) from None
    free = int(psutil.virtual_memory().available)
    if all(path.exists() for path in _LIMITS):
        limit, used = (path.read_text().strip() for path in _LIMITS)
        if limit != "max":
            free = min(free, int(limit) - int(used))
    return free


def _code(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key == "trust_remote_code"}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
