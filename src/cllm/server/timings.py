"""Timings of an answer in llama-server's format."""

from __future__ import annotations

from typing import Any

from cllm.server.body import ResponseModel
from cllm.serving.answer import Generation


class Timings(ResponseModel):
    """Times in milliseconds.

    ``cache_n``: prompt tokens from the cache. ``prompt_ms`` includes time in the queue.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def build_timings(generation: Generation) -> dict[str, Any]:
    """Return the fields of Timings for the tokens generated so far."""
    usage, times = generation.usage, generation.times
    # all tokens may have come in one step
    seconds = times.latest - times.first or times.latest - times.submitted
    return {
        "cache_n": usage.cached_tokens,
        **build_part(
            "prompt", usage.prompt_tokens - usage.cached_tokens, times.first - times.submitted
        ),
        **build_part("predicted", usage.completion_tokens, seconds),
    }


def build_part(name: str, count: int, seconds: float) -> dict[str, Any]:
    """Return the fields for ``count`` tokens that took ``seconds``.

    A rate is 0 if its divisor is 0.
    """
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
