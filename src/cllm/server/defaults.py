"""Default sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from cllm.core.params import LARGEST, SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The operator's defaults for parameters that a request leaves out."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    max_tokens: int | None = None

    def params(self, **given: Any) -> SamplingParams:
        """Return the SamplingParams of a request.

        Arguments that are None get the default. Raises BadRequest.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if "max_tokens" in values:  # a limit above any context length is valid
            values["max_tokens"] = min(values["max_tokens"], LARGEST)
        return SamplingParams(**{**msgspec.structs.asdict(self), **values})
