"""Timings of an answer in llama-server's format."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from cllm.core.output import PrefillProgress
from cllm.serving.answer import Generation


class Timings(TypedDict):
    """Times in milliseconds. ``cache_n`` is the number of prompt tokens from the cache.
    ``prompt_ms`` includes time in the queue. A rate is 0 if its divisor is 0. ``draft_n`` draft
    tokens were verified, if any, and ``draft_n_accepted`` of them were right.
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
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


class PromptProgress(TypedDict):
    """How far a prompt is, in tokens, ``time_ms`` milliseconds after its computation began:
    ``cache`` of its ``total`` tokens were in the cache, and ``processed`` includes them.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


def build_progress(prefill: PrefillProgress) -> PromptProgress:
    return {
        "total": prefill.num_tokens,
        "cache": prefill.num_cached,
        "processed": prefill.num_computed,
        "time_ms": round(prefill.seconds * 1000),
    }


def build_timings(generation: Generation) -> Timings:
    """Return the timings of the tokens generated so far."""
    usage, times = generation.usage, generation.times
    num_read, num_written = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    reading = times.first - times.submitted
    # all tokens may have come in one step
    writing = times.latest - times.first or times.latest - times.submitted
    timings: Timings = {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": reading * 1000,
        "prompt_per_token_ms": reading * 1000 / num_read if num_read else 0.0,
        "prompt_per_second": num_read / reading if reading else 0.0,
        "predicted_n": num_written,
        "predicted_ms": writing * 1000,
        "predicted_per_token_ms": writing * 1000 / num_written if num_written else 0.0,
        "predicted_per_second": num_written / writing if writing else 0.0,
    }
    if usage.num_guesses:
        timings |= {"draft_n": usage.num_guesses, "draft_n_accepted": usage.num_accepted}
    return timings


EXAMPLE_TIMINGS: Timings = {
    "cache_n": 0,
    "prompt_n": 17,
    "prompt_ms": 34.0,
    "prompt_per_token_ms": 2.0,
    "prompt_per_second": 500.0,
    "predicted_n": 3,
    "predicted_ms": 60.0,
    "predicted_per_token_ms": 20.0,
    "predicted_per_second": 50.0,
}
