"""The options of the fake backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

SUMMARY = "only takes time like a model, for tests and load studies"


class Options(BaseModel):
    """There are none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )
