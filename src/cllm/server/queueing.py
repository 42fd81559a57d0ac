"""Queueing extensions of all dialects: request fields for priority and timeouts, and headers about
the queue.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from pydantic import Field
from starlette.requests import Request

from cllm.answer import Answer, SchedulingOptions
from cllm.config import PriorityName
from cllm.core.request import Priority
from cllm.process.backlog import Place
from cllm.process.reservations import Claim
from cllm.server.body import BODY_HASH, Body

# a header of a rejection, which the client sends back when it retries
TICKET = "x-cllm-retry-ticket"
# in the scope of a batch's request: the account that created the batch
BATCH_OWNER = "cllm.batch_owner"

Milliseconds = Annotated[int, Field(ge=1, le=604_800_000)]


class TermsBody(Body):
    """Request fields for the account, the priority, the timeouts and the sharing of the cache."""

    user: Annotated[str, Field(max_length=256)] | None = Field(
        default=None,
        description="The account, for fair scheduling; a bearer token takes precedence.",
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

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="Cached prefixes and results are shared only among requests with the same "
        "salt.",
    )

    def terms(self, request: Request, user: str | None = None) -> SchedulingOptions:
        """Return how the request is scheduled.

        ``user``: a user that another field of the body names.
        """
        key = account(request, self.user or user)
        asked: PriorityName | None = "batch" if BATCH_OWNER in request.scope else self.priority
        return SchedulingOptions(
            key=key,
            priority=priority_of(asked, request.app.state.settings.scheduler.priorities.get(key)),
            deadline=None if self.deadline_ms is None else self.deadline_ms / 1000,
            queue_timeout=None if self.queue_timeout_ms is None else self.queue_timeout_ms / 1000,
            cache_salt=self.cache_salt or "",
            claim=Claim(request.headers.get(TICKET, ""), request.scope.get(BODY_HASH, 0)),
        )


def priority_of(asked: PriorityName | None, of_key: PriorityName | None) -> Priority:
    """Return the priority that a request asks for, but not a higher one than that of its
    account.
    """
    asked = asked or of_key or "normal"
    return max(Priority[asked.upper()], Priority[(of_key or asked).upper()])


def account(request: Request, user: str | None) -> str:
    """Return the account of a request: a name made from its API key, else from ``user``, else "".

    The API key is taken from Authorization, or else from x-api-key. A request of a batch has the
    batch's account.
    """
    token = re.sub(
        r"^bearer(\s+|$)", "", request.headers.get("authorization", "").strip(), flags=re.IGNORECASE
    )
    token = token or request.headers.get("x-api-key", "").strip()
    if owner := request.scope.get(BATCH_OWNER):
        return str(owner)
    if token:
        return f"key-{hashlib.sha256(token.encode()).hexdigest()[:16]}"
    return f"user-{user}" if user else ""


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the headers that every dialect adds to an answer: its queue position, and schema
    keywords that were not enforced.
    """
    unenforced = answer.generation.unenforced
    return place_headers(answer.place) | (
        {"x-cllm-unenforced-keywords": ", ".join(unenforced)} if unenforced else {}
    )


def place_headers(place: Place) -> dict[str, str]:
    """Return headers with the request's queue position on arrival (0: it runs immediately), and the
    estimated time to its first token.
    """
    return {
        "x-cllm-queue-position": str(place.position),
        "x-cllm-estimated-ttft-ms": str(round(place.seconds * 1000)),
    }
