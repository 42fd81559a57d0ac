"""The record of a request: what it asked for, what it cost, and where its time went.

It is made when the request arrives and complete when the request has ended. The log, the metrics
and everything else that tells about requests read it.
"""

from __future__ import annotations

import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cllm.core.output import SequenceTimes
from cllm.observe.request_steps import RequestSteps

UNKNOWN = SequenceTimes()
NOT_TIMED = nullcontext()


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one request, over HTTP or of a batch.

    Times are in seconds on the monotonic clock; None means that the request did not get so far.
    ``route`` is the path of its route, such as ``/v1/models/{name}``. ``dialect`` names the API,
    such as OpenAI. ``status`` is the HTTP status, 499 if the client has left before the answer
    began. ``outcome`` is finished, abort (the client has left), error or timeout; "" if no model
    computed anything. An error has a code, and a 4xx names the field that is wrong.

    The request was ``submitted`` to the engines after it had been read, rendered and tokenized, and
    perhaps had waited for its model to be loaded. Then ``num_ahead`` requests were in the
    engines, ``busiest`` is the account with most of them, and their number. ``times`` are those of
    its first sequence. ``gaps`` are the seconds between two deliveries of tokens. A request that is
    traced has ``steps``.
    """

    request_id: str = ""
    method: str = ""
    route: str = ""
    dialect: str = ""
    account: str = ""
    priority: str = ""
    model: str = ""
    adapter: str = ""
    answer_id: str = ""  # that of the answer, which `cllm explain` shows too
    batch_id: str = ""  # of the stored batch that it belongs to
    arrived: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.time)  # seconds since 1970
    submitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    status: int = 0
    outcome: str = ""
    error_code: str = ""
    error_field: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_position: int = 0
    num_ahead: int = 0
    busiest: tuple[str, int] = ("", 0)
    times: SequenceTimes = UNKNOWN
    gaps: array[float] = field(default_factory=lambda: array("f"))
    engine: int | None = None
    replica: str = ""  # of a cluster, which has answered
    num_retries: int = 0
    num_parked: int = 0
    trace: Any = None  # its SpanContext, if the server traces requests, sampled or not
    steps: RequestSteps | None = None

    def timing(self, name: str) -> AbstractContextManager[None]:
        """Note a step before the submission if the request is traced."""
        return NOT_TIMED if self.steps is None else self.steps.timing(name)

    @property
    def seconds(self) -> float:
        """From the arrival to the end, or to now."""
        return (time.monotonic() if self.ended is None else self.ended) - self.arrived

    @property
    def is_computed(self) -> bool:
        """Whether an engine has got it."""
        return self.submitted is not None

    @property
    def preparation(self) -> float | None:
        """Seconds from the arrival to the submission."""
        return None if self.submitted is None else self.submitted - self.arrived

    @property
    def ttft(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def decoding(self) -> float | None:
        """Seconds from the first token to the last one."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of tokens after the first one; None if there are no others."""
        if not self.decoding or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decoding

    def note_delivery(self) -> None:
        """Note that tokens have been delivered now."""
        now = time.monotonic()
        if self.last_token is None:
            self.first_token = now
        else:
            self.gaps.append(now - self.last_token)
        self.last_token = now

    def find_gap(self, share: float) -> float | None:
        """Return the time between two tokens that ``share`` of the times do not exceed."""
        if not self.gaps:
            return None
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(share * len(self.gaps)))]

    def explain_wait(self) -> str:
        """Return where the time to the first token, or to the end without one, went: a list of the
        parts that took at least a tenth of it.
        """
        whole = self.seconds if self.ttft is None else self.ttft
        queued = self.times.queued
        did = "waited"
        has_ended_early = self.first_token is None and self.outcome != "finished"
        if queued is None and self.submitted is not None and has_ended_early:
            queued, did = whole - (self.preparation or 0.0), "waited, or computed its prompt, for"
        account, number = self.busiest
        parts = []
        if (seconds := self.preparation or 0.0) >= whole / 10:
            parts.append(f"{seconds:.1f} s until its model was loaded and its text was read")
        if queued is not None and queued >= whole / 10:
            text = f"{did} {queued:.1f} s"
            if self.num_ahead:
                others = "1 request" if self.num_ahead == 1 else f"{self.num_ahead} requests"
                text += f" behind {others}, {number} of account {account!r}"
            if self.times.reason:
                text += f": {self.times.reason}"
            parts.append(text)
        if (seconds := self.times.prefill or 0.0) >= whole / 10:
            computed = self.prompt_tokens - self.cached_tokens
            parts.append(f"prefill of {computed} tokens took {seconds:.1f} s")
        if self.num_parked:
            parts.append(f"parked {write_times(self.num_parked)}")
        if self.num_retries:
            what = "a front sent it again" if self.replica else "its engine ended"
            parts.append(f"{what} {write_times(self.num_retries)}")
        return "; ".join(parts) or f"took {whole:.1f} s; its parts are not known"

    def list_phases(self) -> list[tuple[str, float, float]]:
        """Return the phases that it has reached, one after the other: their names, begins and
        ends. The queue and the prefill are those of its first sequence.
        """
        if self.submitted is None:
            return []
        end = time.monotonic() if self.ended is None else self.ended
        first = end if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        # engines on other machines have other clocks, so only their durations count
        queued = first if self.times.queued is None else self.submitted + self.times.queued
        bounds = [self.arrived, self.submitted, min(queued, first), first, last, end]
        names = ("prepare", "queue", "prefill", "decode", "send")
        return [
            (name, begin, after)
            for name, (begin, after) in zip(names, pairwise(bounds), strict=True)
            if after > begin
        ]

    def list_fields(self) -> dict[str, Any]:
        """Return what the log shows of it. Times are in milliseconds; what is not known is left
        out.
        """
        is_computed = self.is_computed
        fields: dict[str, Any] = {
            "id": self.request_id,
            "answer": "" if self.answer_id == self.request_id else self.answer_id,
            "batch": self.batch_id,
            "account": self.account,
            "priority": self.priority,
            "model": self.model,
            "adapter": self.adapter,
            "dialect": self.dialect,
            "outcome": self.outcome,
            "code": self.error_code,
            "field": self.error_field,
            "finish": ",".join(sorted({*self.finish_reasons})),
            "prompt_tokens": self.prompt_tokens if is_computed else None,
            "cached_tokens": self.cached_tokens if is_computed else None,
            "output_tokens": self.completion_tokens if is_computed else None,
            "queue_ms": milliseconds(self.times.queued),
            "prefill_ms": milliseconds(self.times.prefill),
            "ttft_ms": milliseconds(self.ttft),
            "itl_p99_ms": milliseconds(self.find_gap(0.99)),
            "tokens_per_s": round(self.tokens_per_second or 0.0, 1) or None,
            "total_ms": milliseconds(self.seconds),
            "engine": self.engine,
            "replica": self.replica,
            "retries": self.num_retries if is_computed or self.replica else None,
            "parked": self.num_parked if is_computed and not self.replica else None,
        }
        return {name: value for name, value in fields.items() if value not in (None, "")}


def write_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def milliseconds(seconds: float | None) -> float | None:
    """Return milliseconds, with one digit below 100."""
    if seconds is None:
        return None
    return round(seconds * 1000, 1) if seconds < 0.1 else round(seconds * 1000)
