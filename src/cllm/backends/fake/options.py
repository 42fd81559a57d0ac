"""The options of the fake backend."""

from __future__ import annotations

from pydantic import BaseModel

SUMMARY = "only takes time like a model, for tests and load studies"


class Options(BaseModel):
    """There are none."""
