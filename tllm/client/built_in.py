"""Consumers of every engine."""

from __future__ import annotations

from collections.abc import Mapping

from tllm.consumers.capture.memory import MemoryConsumer
from tllm.consumers.signals import SignalsConsumer

BUILT_IN: Mapping[str, type[MemoryConsumer | SignalsConsumer]] = {
    "memory": MemoryConsumer,
    SignalsConsumer.consumer_id: SignalsConsumer,
}
"""By id: each is made when a request names it for the first time."""
