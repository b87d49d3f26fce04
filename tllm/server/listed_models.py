"""`GET /v1/models`, with the registered steering modules."""

from __future__ import annotations

from typing import Any

from tllm.client.attached import Attached


class ListedModels:
    """Stands before vLLM's models: lists `NAME:MODULE` for each module beside them, so that clients
    whose users choose from a list can steer.

    Args:
        handler: vLLM's.
        interventions: of the engine that it uses.
    """

    def __init__(self, handler: Any, interventions: Attached) -> None:
        self._handler = handler
        self._interventions = interventions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def show_available_models(self) -> Any:
        """vLLM's list, and behind it the first of its models with each module."""
        models = await self._handler.show_available_models()
        first, served = models.data[0], {model.id for model in models.data}
        for module in await self._interventions.steering.modules():
            name = f"{first.id}:{module}"
            if name not in served:
                models.data.append(first.model_copy(update={"id": name, "parent": first.id}))
        return models
