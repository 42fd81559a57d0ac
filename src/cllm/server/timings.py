"""How long an answer took, in the words of llama-server."""

from __future__ import annotations

from typing import Any

from cllm.answer import Generation
from cllm.server.body import Shape


class Timings(Shape):
    """Milliseconds. ``cache_n`` tokens of the prompt were not computed again; to wait counts as reading the prompt."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(generation: Generation) -> dict[str, Any]:
    """The fields of Timings, of what has been computed so far."""
    usage, times = generation.usage, generation.times
    return {
        "cache_n": usage.cached_tokens,
        **part("prompt", usage.prompt_tokens - usage.cached_tokens, times.first - times.submitted),
        **part("predicted", usage.completion_tokens, times.latest - times.first),
    }


def part(name: str, count: int, seconds: float) -> dict[str, Any]:
    """``count`` tokens in ``seconds``; rates are 0 where nothing was computed or no time has passed."""
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
