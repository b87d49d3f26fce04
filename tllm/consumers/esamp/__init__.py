"""ESamp: explore by disagreeing with a distiller that learns during generation."""

from tllm.consumers.esamp.config import ESampConsumerConfig
from tllm.consumers.esamp.consumer import ESampConsumer, from_options

__all__ = ["ESampConsumer", "ESampConsumerConfig", "from_options"]
