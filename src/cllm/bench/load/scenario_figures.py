"""The figures that only one workload of users has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from cllm.bench.load.answer import TimedAnswer, split_parts
from cllm.bench.load.client import Outcome
from cllm.bench.load.scenarios import ALONE, CHATS, LONG, STREAMS

BESIDE = "beside the long prompt"


def find_figures(workload: str | None, outcome: Outcome) -> dict[str, float]:
    """Return the figures by name and unit; none for other workloads, and none without the answers
    that they need.
    """
    find = FIGURES.get(workload or "")
    parts = split_parts(
        answer for answer in outcome.answers if not answer.failure and answer.content_times
    )
    return find(parts, outcome) if find and LONG in parts else {}


def long_beside_short(parts: dict[str, list[TimedAnswer]], _: Outcome) -> dict[str, float]:
    """Return the gaps between the tokens of the streams, before the long prompt is sent and from
    then to its first token, and the long prompt's time to first token beside the streams and alone.
    """
    (long,), streams, alone = parts[LONG], parts.get(STREAMS, []), parts.get(ALONE, [])
    began = max((answer.first for answer in streams if answer.sent < long.sent), default=0.0)
    spans = [span for answer in streams for span in pairwise(answer.content_times)]
    before = [end - begin for begin, end in spans if began <= begin and end <= long.sent]
    beside = [end - begin for begin, end in spans if begin < long.first and end > long.sent]
    if not (before and beside and alone):
        return {}
    undisturbed = percentile(before, 50)
    figures = {f"ITL p{share} {BESIDE} ms": percentile(beside, share) for share in (50, 90, 99)}
    figures["ITL p50 before it ms"] = undisturbed
    if undisturbed:  # 0 if most chunks were read together with another one
        figures[f"ITL p50, {BESIDE} / before"] = figures[f"ITL p50 {BESIDE} ms"] / undisturbed
    ttft, ttft_alone = (1e3 * (answer.first - answer.sent) for answer in (long, alone[0]))
    return figures | {
        "TTFT of the long prompt ms": ttft,
        "TTFT of a long prompt alone ms": ttft_alone,
        "TTFT of the long prompt / alone": ttft / ttft_alone,
    }


def percentile(seconds: Sequence[float], share: int) -> float:
    """Return a percentile in milliseconds."""
    return 1e3 * float(np.percentile(seconds, share))


def long_context(parts: dict[str, list[TimedAnswer]], outcome: Outcome) -> dict[str, float]:
    """Return the rate at which the chats receive chunks before, during and after the long request,
    and the longest time in which the server did not advance that request.
    """
    (long,), chats = parts[LONG], parts.get(CHATS, [])
    firsts = sorted(answer.ended for answer in chats if answer.ended < long.sent)
    if not firsts:
        return {}
    # the first wave of requests arrives at once, which the others do not
    begun = firsts[min(len(firsts), max_running(chats)) - 1]
    last = max(answer.content_times[-1] for answer in chats)
    spans = {"before": (begun, long.sent), "during": (long.sent, long.ended)}
    spans["after"] = (long.ended, last)
    rates = {name: rate(chats, *span) for name, span in spans.items()}
    figures = {f"chunks/s of the chats {name} it": value for name, value in rates.items()}
    if rates["before"]:
        for name in ("during", "after"):
            figures[f"chunks/s of the chats, {name} / before"] = rates[name] / rates["before"]
    seen = [at for at, _ in outcome.computed_tokens if long.sent < at < long.first]
    advances = [long.sent, *seen, *long.content_times, long.ended]
    return figures | {
        "TTFT of the long prompt ms": 1e3 * (long.first - long.sent),
        "longest pause of the long request s": float(np.diff(advances).max()),
    }


def max_running(answers: Sequence[TimedAnswer]) -> int:
    """Return how many requests were sent before the first one ended."""
    end = min(answer.ended for answer in answers)
    return sum(answer.sent < end for answer in answers)


def rate(answers: Iterable[TimedAnswer], begin: float, end: float) -> float:
    """Return the chunks per second in a span; 0 if it is empty."""
    count = sum(begin < at <= end for answer in answers for at in answer.content_times)
    return count / (end - begin) if end > begin else 0.0


FIGURES: dict[str, Callable[[dict[str, list[TimedAnswer]], Outcome], dict[str, float]]] = {
    "long-beside-short": long_beside_short,
    "long-context": long_context,
}
