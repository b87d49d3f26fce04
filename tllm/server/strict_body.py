"""Bodies of our own routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictBody(BaseModel):
    """A body that takes its own fields and no other, and says which these are."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        known = cls.model_fields.keys()
        if isinstance(given, Mapping) and (unknown := sorted(given.keys() - known)):
            raise ValueError(
                f"{', '.join(unknown)} was given, and is no field; give any of {', '.join(known)}"
            )
        return given
