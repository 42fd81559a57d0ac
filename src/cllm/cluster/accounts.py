"""The accounts of a front: which one a request belongs to, and what it pays.

A front checks the limits of accounts before it passes a request on, because only it sees the
requests to all replicas. It does not know how many tokens a prompt has. So it reserves an estimate,
and the replica rejects a request that needs more, with the exact number. The front then reserves
that and asks again. In the end, the replica says what the request has cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request

from cllm.core.account import NO_LIMITS
from cllm.core.carried import Carried, encode_carried
from cllm.errors import CLLMError
from cllm.server.access import Access
from cllm.server.call import get_call
from cllm.server.http.request_id import request_id
from cllm.store.charges import Charge, UsageCounts
from cllm.store.usage import EXPECTED_OUTPUT
from cllm.store.usage_reports import UsageReport

BYTES_PER_TOKEN = 4  # of a prompt, for the estimate
REPORT_SECONDS = 10.0  # a replica that answers has reported a request's usage by then
# Routes whose requests are charged, as ``Service.submit`` and ``cllm.serving.embedding`` do.
CHARGED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/chat/completions", "/completions", "/completion", "/infill"),
        *("/v1/embeddings", "/embeddings", "/embedding"),
        *("/v1/rerank", "/v1/reranking", "/v2/rerank", "/rerank", "/reranking"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/generate", "/encode", "/benchmark"),
    }
)


class Fields(msgspec.Struct):
    """The fields of request bodies that say who asks and for how many tokens."""

    user: Any = None
    metadata: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n_predict: Any = None
    options: Any = None

    def find_user(self) -> str | None:
        """Return the user that the body names."""
        user = self.user
        if user is None and isinstance(self.metadata, dict):
            user = self.metadata.get("user_id")
        return user if isinstance(user, str) and user else None

    def estimate_output(self) -> int:
        """Return about how many tokens the answer may have."""
        limits = [self.max_tokens, self.max_completion_tokens, self.max_output_tokens]
        limits.append(self.n_predict)
        if isinstance(self.options, dict):
            limits.append(self.options.get("num_predict"))
        counts = [limit for limit in limits if type(limit) is int and limit > 0]
        n = self.n if type(self.n) is int and 1 <= self.n <= EXPECTED_OUTPUT else 1
        return min([*counts, EXPECTED_OUTPUT]) * n


def read_fields(body: bytes) -> Fields:
    """Return the fields of a body. One that is not valid has none; the replica rejects it."""
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Fields()


class Admission:
    """A request that a front passes on: its account, and what it has reserved. Close it."""

    def __init__(self, accounts: Accounts, request: Request, path: str, body: bytes) -> None:
        """``path`` is the canonical one. Raises RateLimited, and Unauthorized if the key of the
        account has been revoked.
        """
        self._accounts = accounts
        self.id = request_id(request)
        fields = read_fields(body) if body.lstrip()[:1] == b"{" else Fields()
        call = get_call(request)
        self.account = call.account()
        self.scheduled = call.scheduling_account(fields.find_user())
        self._charge: Charge | None = None
        self._used = UsageCounts()
        self._is_exact = False
        self._end: Callable[[CLLMError], None] | None = None
        self._num_estimated = 0
        if self.account.has_key and path in CHARGED:
            self._num_estimated = len(body) // BYTES_PER_TOKEN + fields.estimate_output()
            self._reserve(0, self._num_estimated)

    def _reserve(self, num_tokens: int, num_extra: int) -> None:
        limits = self.account.limits
        self._is_limited = (limits.tokens_per_minute, limits.tokens_per_month) != (None, None)
        if not self._is_limited:
            num_extra = 0
        ledger = self._accounts.access.ledger
        self._charge = ledger.admit(self.account, num_tokens, num_extra, self._used)
        self._charge.end = self._end

    def reserve(self, num_tokens: int) -> None:
        """Reserve the number of tokens that a replica says are needed. Raises RateLimited."""
        assert self._charge is not None
        self._charge.settle(failed=True)
        self._reserve(num_tokens, max(0, self._num_estimated - num_tokens))

    def on_end(self, end: Callable[[CLLMError], None]) -> None:
        """Call ``end`` if the request must end early because the account has lost its key."""
        self._end = end
        if self._charge is not None:
            self._charge.end = end

    def encode(self, replica: str) -> str:
        """Return the header that carries the account to a replica."""
        accounts = self._accounts
        num_reserved = None
        if self._charge is not None and self._is_limited:
            num_reserved = self._charge.num_reserved
        account, scheduled = (
            msgspec.structs.replace(
                one,
                tenant=accounts.access.choose_tenant(one),
                limits=NO_LIMITS,
                is_carried=True,
                num_reserved=num_reserved,
            )
            for one in (self.account, self.scheduled)
        )
        weight = accounts.access.weights.get(scheduled.name, 1.0)
        return encode_carried(Carried(account, scheduled, weight, replica, accounts.front, self.id))

    def note_progress(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Note the tokens that the client has received so far."""
        used = self._used
        used.prompt_tokens, used.cached_tokens = prompt_tokens, cached_tokens
        used.completion_tokens = completion_tokens

    def note_usage(self, used: UsageCounts) -> None:
        """Note what the request has cost, according to the replica that answered it."""
        self.note_progress(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        self._used.requests = used.requests
        self._is_exact = True

    def close(self, replica: str = "", *, has_failed: bool = False) -> None:
        """End the reservation.

        If the usage is not known, wait for the report of ``replica``, unless no replica has
        answered the request, because it ``has_failed``.
        """
        charge = self._charge
        if charge is None or not charge.is_open:
            return
        if self._is_exact:
            num_more = self._used.requests - 1
            charge.settle(finished=num_more >= 0, failed=num_more < 0)
            if num_more > 0:
                more = UsageCounts(requests=num_more)
                self._accounts.access.ledger.book(self.account.name, more)
        elif has_failed or not replica:
            charge.settle(failed=True)
        else:
            self._accounts.expect_report(self, replica)

    def give_up(self) -> None:
        """Pay for what the client has received, because no report has come."""
        if self._charge is not None:
            self._charge.settle()


class Accounts:
    """The accounts of a front, whose name is ``front``."""

    def __init__(self, access: Access, front: str) -> None:
        self.access = access
        self.front = front
        self._taken: dict[tuple[str, str], int] = {}  # number of the last report, by replica
        self._expected: dict[str, tuple[Admission, str, float]] = {}  # by the request's id

    def admit(self, request: Request, path: str, body: bytes) -> Admission:
        """Return the admission of a request. Raises what ``Admission`` raises."""
        return Admission(self, request, path, body)

    def expect_report(self, admission: Admission, replica: str) -> None:
        until = time.monotonic() + REPORT_SECONDS
        self._expected[admission.id] = admission, replica, until

    @property
    def awaited(self) -> set[str]:
        """The names of replicas that have to report usage."""
        return {replica for _, replica, _ in self._expected.values()}

    def last_taken(self, replica: str, epoch: str) -> int:
        """Return the number of the last report that was taken from a run of a replica."""
        return self._taken.get((replica, epoch), 0)

    def take(self, replica: str, epoch: str, reports: Iterable[UsageReport]) -> None:
        """Book what a replica reports."""
        for report in reports:
            if report.number <= self.last_taken(replica, epoch):
                continue
            self._taken[replica, epoch] = report.number
            if not report.request:  # of a batch
                self.access.ledger.book(report.account, report.used)
            elif (expected := self._expected.pop(report.request, None)) is not None:
                expected[0].note_usage(report.used)
                expected[0].close()
        now = time.monotonic()
        for name, (admission, _, until) in [*self._expected.items()]:
            if until <= now:
                del self._expected[name]
                admission.give_up()

    def lose(self, replica: str) -> None:
        """Stop waiting for the reports of a replica that has died."""
        for name, (admission, expected, _) in [*self._expected.items()]:
            if expected == replica:
                del self._expected[name]
                admission.give_up()
