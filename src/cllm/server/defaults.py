"""Sampling of requests that do not say how."""

from __future__ import annotations

from typing import Any

import msgspec

from cllm.core.params import LARGEST, SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The operator's choices for what a request leaves open."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    max_tokens: int | None = None

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams of a request; arguments that are None are left open. Raises BadRequest."""
        values = {name: value for name, value in given.items() if value is not None}
        if "max_tokens" in values:  # more than any context holds is no mistake
            values["max_tokens"] = min(values["max_tokens"], LARGEST)
        return SamplingParams(**{**msgspec.structs.asdict(self), **values})
