"""Requests that cannot be served as they are."""

from __future__ import annotations

from vllm.exceptions import VLLMClientError

from tllm.engine.seams import uses

uses("vllm.exceptions", "VLLMClientError", "what a request asks and cannot have is its own fault")

REFUSALS = (ValueError, VLLMClientError)
"""What is raised for a request that cannot be served as it is."""


class RefusedError(VLLMClientError, ValueError):
    """What a request asks is not possible. vLLM hands it on to the caller as it is."""
