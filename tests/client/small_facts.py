"""What the client knows of a model that nobody has started."""

from __future__ import annotations

from typing import Any

from tllm.client.facts import Facts
from tllm.spec.hooks import ModelPoints


def small_facts(layers: int, hidden: int, **others: Any) -> Facts:
    """Those of a model of so many layers without patches, but for `others`."""
    known: dict[str, Any] = {
        "points": ModelPoints("any", layers, {}),
        "hidden_size": hidden,
        "vocab_size": 100,
        "dtype": "float32",
        "row_bytes": 4 * hidden,
        "max_value": 3e38,
        "max_configs": 8,
        "max_mib": 1,
        "max_patch_mib": 0,
        "max_patch_host_mib": 0,
        "centers_rows": False,
    }
    return Facts(**{**known, **others})
