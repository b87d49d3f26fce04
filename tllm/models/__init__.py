"""Where the hook points are in each model family: a table and one resolver."""

from tllm.models.resolver import resolve
from tllm.models.sites import Argument, ModelSites, Site

__all__ = ["Argument", "ModelSites", "Site", "resolve"]
