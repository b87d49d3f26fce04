"""What adapters change beside the layers of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from tllm.engine.seams import uses

_HEAD = "lm_head"
_WHY = "requests whose adapter changes the LM head are not told what the model's own gives"

uses("vllm.v1.core.sched.output.NewRequestData", "lora_request", _WHY)
uses("vllm.lora.request.LoRARequest", "lora_int_id lora_name lora_path load_inplace", _WHY)
uses("vllm.lora.utils", "get_adapter_absolute_path", _WHY, takes="lora_path")
uses("vllm.lora.peft_helper.PEFTHelper", "from_local_dir", _WHY, takes="lora_path")
uses("vllm.lora.peft_helper.PEFTHelper", "target_modules", _WHY)
for _engine in ("vllm.v1.engine.llm_engine.LLMEngine", "vllm.v1.engine.async_llm.AsyncLLM"):
    uses(_engine, "add_lora", "an adapter that cannot be loaded is refused", takes="lora_request")
    uses(
        _engine, "remove_lora", "an adapter that was replaced gives its place back", takes="lora_id"
    )


def check_adapter(given: Any, vllm_config: Any) -> None:
    """Refuse, in the user's process, what is no adapter, and any where an engine takes none."""
    if not isinstance(given, LoRARequest):
        raise ValueError(
            f"lora_request={given!r:.80} is {type(given).__name__}; give "
            "vllm.lora.request.LoRARequest(name, number, path)"
        )
    if vllm_config.lora_config is None:
        raise ValueError(
            f"lora_request names the adapter {given.lora_name!r}, and this engine takes none; "
            "start it with enable_lora=True and max_lora_rank=..."
        )


def refusal_of(adapter: LoRARequest, error: Exception) -> ValueError:
    """What is said of an adapter that the engine could not load."""
    return ValueError(
        f"lora_request: the adapter {adapter.lora_name!r} cannot be loaded from "
        f"{adapter.lora_path!r}: {error}"
    )


class Adapters:
    """Which adapters change the LM head. What was found of one is remembered."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], bool] = {}

    def of_head(self, adapter: Any) -> str:
        """The name of this adapter, a `LoRARequest` or None, where it has weights for the LM head.
        Of one that cannot be read vLLM says so itself, when it loads it."""
        if adapter is None:
            return ""
        key = adapter.lora_int_id, adapter.lora_path
        if adapter.load_inplace or key not in self._known:
            self._known[key] = _has_head(adapter.lora_path)
        return str(adapter.lora_name) if self._known[key] else ""


def _has_head(lora_path: str) -> bool:
    try:
        folder = Path(get_adapter_absolute_path(lora_path))
        weights = folder / "adapter_model.safetensors"
        if weights.exists():
            with safe_open(weights, framework="pt") as file:
                return any(f".{_HEAD}." in f".{name}" for name in file.keys())  # noqa: SIM118
        return _HEAD in PEFTHelper.from_local_dir(str(folder), None).target_modules
    except Exception:  # whatever is wrong with it
        return False
