"""Queueing extensions of all dialects: request fields for priority and timeouts, and headers about
the queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from cllm.core.request import Priority, PriorityName
from cllm.process.reservations import Claim
from cllm.server.body import Body
from cllm.server.call import Call
from cllm.serving.answer import Answer, SchedulingOptions

# a header of a rejection, which the client sends back when it retries
TICKET = "x-cllm-retry-ticket"

Milliseconds = Annotated[int, Field(ge=1, le=604_800_000)]


class SchedulingBody(Body):
    """Request fields for the account, the priority, the timeouts and the sharing of the cache."""

    user: Annotated[str, Field(max_length=256)] | None = Field(
        default=None,
        description="The account, for fair scheduling; an API key takes precedence.",
    )
    priority: PriorityName | None = Field(
        default=None,
        description="Interactive requests are served before normal ones (the default), batch "
        "requests last.",
    )
    deadline_ms: Milliseconds | None = Field(
        default=None,
        description="The request gets 504 if it has not finished within this many milliseconds.",
    )
    queue_timeout_ms: Milliseconds | None = Field(
        default=None,
        description="The request gets 504 if it has waited this many milliseconds in the queue.",
    )

    cache_salt: (
        Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")] | None
    ) = Field(
        default=None,
        description="Cached prefixes and results are shared only among requests with the same "
        "salt.",
    )

    @property
    def reports_prefill(self) -> bool:
        """Whether the answer is to tell how far the prompt is."""
        return False

    def time_limits(self) -> SchedulingOptions:
        return SchedulingOptions(
            deadline=None if self.deadline_ms is None else self.deadline_ms / 1000,
            queue_timeout=None if self.queue_timeout_ms is None else self.queue_timeout_ms / 1000,
        )

    def scheduling_options(self, call: Call, user: str | None = None) -> SchedulingOptions:
        """Return how the request is scheduled.

        ``user`` is the user that another field of the body names.
        """
        account = call.scheduling_account(self.user or user)
        asked: PriorityName | None = "batch" if call.request is None else self.priority
        ticket = "" if call.request is None else call.request.headers.get(TICKET, "")
        return replace(
            self.time_limits(),
            arrived=call.time_limits.arrived
            - (0.0 if call.delivered is None else call.delivered.elapsed),
            delivered=call.delivered,
            account=account,
            priority=account.choose_priority(None if asked is None else Priority[asked.upper()]),
            cache_salt=call.state.access.salt(account, self.cache_salt or ""),
            claim=Claim(ticket, call.body_hash),
            record=call.record,
            reports_prefill=self.reports_prefill,
        )


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the headers that every dialect adds to an answer: its queue position on arrival (0: it
    runs immediately), the estimated time to its first token, and schema keywords that were not
    enforced.
    """
    headers = {
        "x-cllm-queue-position": str(answer.queue_position.position),
        "x-cllm-estimated-ttft-ms": str(round(answer.queue_position.seconds * 1000)),
    }
    if answer.generation.unenforced:
        headers["x-cllm-unenforced-keywords"] = ", ".join(answer.generation.unenforced)
    return headers
