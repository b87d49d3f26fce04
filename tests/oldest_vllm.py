"""Whether this is the oldest vLLM that is supported, of which tests leave out what it cannot do."""

from __future__ import annotations

import vllm

ON_0_30 = vllm.__version__.startswith("0.30.")
