"""The accounts of a front: which one a request belongs to, and what it pays.

A front checks the limits of accounts before it passes a request on, because only it sees the
requests to all replicas. It does not know how many tokens a prompt has. So it reserves an estimate,
and the replica rejects a request that needs more, with the exact number. The front then reserves
that and asks again. In the end, the replica says what the request has cost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from starlette.requests import Request

from cllm.cluster.body import Fields
from cllm.core.account import NO_LIMITS
from cllm.core.carried import Carried, encode_carried
from cllm.errors import CLLMError, EngineError, RateLimited, Unauthorized
from cllm.server.access import Access
from cllm.server.auth import NEEDED_HEADER, USAGE_HEADER
from cllm.server.call import get_call
from cllm.server.http.request_id import request_id
from cllm.serving.delivered import Ending
from cllm.store.charges import Charge, UsageCounts
from cllm.store.usage_reports import ReportBatch

NEEDED = re.compile(rb"[0-9]{1,12}")  # tokens
BYTES_PER_TOKEN = 4  # of a prompt, for the estimate
BATCHES = ("/v1/batches", "/v1/messages/batches")  # a replica checks their limits while they run
REPORT_SECONDS = 10.0  # a replica that answers has reported a request's usage by then
# Routes whose requests are charged, as ``Service.submit`` and ``cllm.serving.embedding`` do.
CHARGED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/completion", "/infill", "/generate", "/v1/embeddings", "/embeddings"),
        *("/v1/rerank", "/v1/reranking", "/v2/rerank"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)


class NeedsTokens(Exception):
    """A replica has rejected a request for which ``num_tokens`` must be reserved."""

    event = "needs more tokens reserved for it"

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens


class Admission:
    """A request that a front passes on: its account, and what it has reserved. Close it.

    ``received`` counts the tokens of a stream that the client has got, which its account pays for
    while it runs; in the end, the replica says what the request has cost.
    """

    def __init__(
        self,
        accounts: Accounts,
        request: Request,
        path: str,
        fields: Fields,
        num_bytes: int,
        model: str,
    ) -> None:
        """``path`` is the canonical one; the body has ``num_bytes`` and asks for ``model``. Raises
        RateLimited, and Unauthorized if the key of the account has been revoked.
        """
        self._accounts = accounts
        self._model = model
        self._id = request_id(request)
        self._num_attempts = 0
        self._replica = ""  # that was asked last
        self._has_ended = False  # its whole answer has come
        self._base_url = str(request.base_url)
        self._is_batch = path in BATCHES
        call = get_call(request)
        self.account = call.account()
        is_charged = self.account.has_key and path in CHARGED
        limits = self.account.limits
        self._is_limited = (limits.tokens_per_minute, limits.tokens_per_month) != (None, None)
        self.scheduled = call.scheduling_account(fields.find_user())
        self._charge: Charge | None = None
        self.received = UsageCounts()
        self._is_exact = False
        self._end: Callable[[CLLMError], None] | None = None
        self._num_estimated = self._num_reserved = 0
        if is_charged:
            self._num_estimated = num_bytes // BYTES_PER_TOKEN + fields.estimate_output()
            self._reserve(0, self._num_estimated)

    def _reserve(self, num_tokens: int, num_extra: int) -> None:
        if not self._is_limited:
            num_extra = 0
        ledger = self._accounts.access.ledger
        self._charge = ledger.admit(self.account, num_tokens, num_extra, self.received, self._model)
        self._num_reserved = self._charge.num_reserved
        self._charge.end = self._end

    def reserve(self, num_tokens: int) -> None:
        """Reserve the number of tokens that a replica says are needed. Raises RateLimited, and
        EngineError if so many have been reserved.
        """
        if self._charge is None or not self._is_limited or num_tokens <= self._num_reserved:
            raise EngineError("A replica does not accept what has been reserved for the request.")
        self._charge.settle(failed=True)
        self._reserve(num_tokens, max(0, self._num_estimated - num_tokens))

    def on_end(self, end: Callable[[CLLMError], None]) -> None:
        """Call ``end`` if the request must end early because the account has lost its key."""
        self._end = end
        if self._charge is not None:
            self._charge.end = end

    @property
    def id(self) -> str:
        """The id of the latest attempt, under which its replica reports its usage."""
        return f"{self._id}.{self._num_attempts}"

    def encode(self, replica: str, prefixes: list[int]) -> str:
        """Return the header that carries the account and the names of the prompt's prefixes to a
        replica, for a new attempt.
        """
        self._num_attempts += 1
        self._replica, self._has_ended = replica, False
        accounts = self._accounts
        num_reserved = None
        if self._charge is not None and self._is_limited:
            num_reserved = self._num_reserved
        account, scheduled = (
            msgspec.structs.replace(
                one,
                tenant=accounts.access.choose_tenant(one),
                limits=one.limits if self._is_batch else NO_LIMITS,
                is_carried=True,
                num_reserved=num_reserved,
            )
            for one in (self.account, self.scheduled)
        )
        weight = accounts.access.find_weight(scheduled.name)
        carried = Carried(
            account, scheduled, weight, replica, accounts.front, self.id, self._base_url, prefixes
        )
        return encode_carried(carried)

    def note_usage(self, used: UsageCounts) -> None:
        """Note what the request has cost, according to the replica that answered it."""
        for name in used.__struct_fields__:
            setattr(self.received, name, getattr(used, name))
        self._is_exact = True

    def end(self, headers: Mapping[bytes, bytes], *, is_stream: bool) -> None:
        """Note that the whole answer of a replica has come, which began with ``headers``.

        Raises NeedsTokens if the replica rejects the request because too few are reserved.
        """
        if NEEDED.fullmatch(needed := headers.get(NEEDED_HEADER.encode(), b"")):
            self._has_ended = True
            raise NeedsTokens(int(needed))
        encoded = headers.get(USAGE_HEADER.encode())
        if encoded is not None:
            with suppress(msgspec.DecodeError):
                self.note_usage(msgspec.json.decode(encoded, type=UsageCounts))
        # the replica reports the usage of a stream whose end did not come
        self._has_ended = encoded is None and not is_stream

    def note_ending(self, ending: Ending) -> None:
        """Note the last progress of a stream, which tells its usage."""
        num_requests = 0 if ending.error and not ending.completion_tokens else 1
        used = UsageCounts(num_requests)
        if num_requests:
            used.prompt_tokens, used.cached_tokens = ending.prompt_tokens, ending.cached_tokens
            used.completion_tokens = ending.completion_tokens
        self.note_usage(used)

    def close(self) -> None:
        """End the reservation. If the usage is not known, wait for the report of the replica."""
        charge = self._charge
        if charge is None or not charge.is_open:
            return
        if self._is_exact:
            num_more = self.received.requests - 1
            charge.settle(finished=num_more >= 0, failed=num_more < 0)
            if num_more > 0:
                more = UsageCounts(requests=num_more)
                self._accounts.access.ledger.book(self.account.name, more, self._model)
        elif self._has_ended or not self._replica:
            charge.settle(failed=True)
        else:
            self._accounts.expect_report(self, self._replica)

    def give_up(self) -> None:
        """Pay for what the client has received, because no report has come."""
        if self._charge is not None:
            self._charge.settle(failed=True)


class Accounts:
    """The accounts of a front, whose name is ``front``."""

    def __init__(self, access: Access, front: str) -> None:
        self.access = access
        self.front = front
        self._expected: dict[str, tuple[Admission, str, float]] = {}  # by the request's id
        self.on_expected: Callable[[str], None] = lambda _: None  # called with a replica's name

    def admit(
        self, request: Request, path: str, fields: Fields, num_bytes: int, model: str = ""
    ) -> Admission:
        """Return the admission of a request. Raises what ``Admission`` raises."""
        return Admission(self, request, path, fields, num_bytes, model)

    def expect_report(self, admission: Admission, replica: str) -> None:
        until = time.monotonic() + REPORT_SECONDS
        self._expected[admission.id] = admission, replica, until
        self.on_expected(replica)

    @property
    def awaited(self) -> set[str]:
        """The names of replicas that have to report usage."""
        return {replica for _, replica, _ in self._expected.values()}

    def last_taken(self, replica: str, *, is_saved: bool = False) -> tuple[str, int]:
        """Return the epoch and the number of the last report that was taken from a replica or, if
        ``is_saved``, of the last one that is not lost if the front is killed.
        """
        return self.access.ledger.last_taken(self.front, replica, is_saved=is_saved)

    def take(self, replica: str, taken: ReportBatch) -> None:
        """Book what a replica reports."""
        epoch, last = self.last_taken(replica)
        if epoch != taken.epoch:
            last = 0
            if epoch:
                self.forget(replica)
        for report in taken.reports:
            if report.number <= last:
                continue
            last = report.number
            if not report.request:  # of a batch
                self.access.ledger.book(report.account, report.used, report.model)
            elif (expected := self._expected.pop(report.request, None)) is not None:
                expected[0].note_usage(report.used)
                expected[0].close()
        self.access.ledger.note_taken(self.front, replica, taken.epoch, last)

    def list_paused(self, names: list[str]) -> list[str]:
        """Return those of the accounts ``names`` whose batches must wait, because they have used up
        a limit or lost their key.
        """
        return [name for name in names if not self._may_use(name)]

    def _may_use(self, name: str) -> bool:
        try:
            self.access.ledger.check(self.access.account(name))
        except (RateLimited, Unauthorized):
            return False
        return True

    def expire(self) -> None:
        """Stop waiting for reports that are too late."""
        now = time.monotonic()
        for name, (admission, _, until) in [*self._expected.items()]:
            if until <= now:
                del self._expected[name]
                admission.give_up()

    def forget(self, replica: str) -> None:
        """Stop waiting for the reports of a replica that has been started again."""
        for name, (admission, expected, _) in [*self._expected.items()]:
            if expected == replica:
                del self._expected[name]
                admission.give_up()

    def give_up_all(self) -> None:
        """Stop waiting for all reports."""
        for admission, _, _ in self._expected.values():
            admission.give_up()
        self._expected.clear()
