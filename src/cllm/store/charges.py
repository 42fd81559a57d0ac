"""The charges of a request, which reserves tokens when it is admitted and pays for those that it
used; and the usage of one account, to which they are added.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Annotated, Protocol

import msgspec

from cllm.errors import CLLMError

WINDOW = 60  # seconds of the limits per minute

Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class HeldCharges:
    """Charges of requests that reserve tokens when they are admitted, but pay only when ``confirm``
    is called.
    """

    def __init__(self) -> None:
        self._charges: list[Charge] = []

    def add(self, charge: Charge) -> None:
        self._charges.append(charge)

    def confirm(self) -> dict[str, UsageCounts]:
        """Let all charges pay. Returns what they cost together, by model."""
        totals: dict[str, UsageCounts] = {}
        for charge in self._charges:
            charge.confirm()
            totals.setdefault(charge.model, UsageCounts()).add(charge.paid)
        self._charges.clear()
        return totals

    def forget(self) -> None:
        """Discard all charges without paying."""
        for charge in self._charges:
            charge.forget()
        self._charges.clear()


_held: ContextVar[HeldCharges | None] = ContextVar("held", default=None)


@contextlib.contextmanager
def hold_charges() -> Iterator[HeldCharges]:
    """Hold the charges of the requests that are admitted in this context. Those that were not
    confirmed in the block are forgotten.
    """
    charges = HeldCharges()
    token = _held.set(charges)
    try:
        yield charges
    finally:
        _held.reset(token)
        charges.forget()


class RequestUsage:
    """What one HTTP request costs its account: the sum of its ``charges``.

    ``num_needed`` is the number of tokens that it would have had to reserve, if it was rejected
    because a front had reserved too few for it; otherwise 0.
    """

    def __init__(self) -> None:
        self.charges: list[Charge] = []
        self.num_needed = 0

    @property
    def is_settled(self) -> bool:
        """Whether there are charges, and all of them have ended."""
        return bool(self.charges) and not any(charge.is_open for charge in self.charges)

    def sum_up(self) -> UsageCounts:
        """Return what has been paid so far."""
        total = UsageCounts()
        for charge in self.charges:
            total.add(charge.paid)
        return total


_tracked: ContextVar[RequestUsage | None] = ContextVar("tracked", default=None)


@contextlib.contextmanager
def track_usage() -> Iterator[RequestUsage]:
    """Collect the charges of the requests that are admitted in this context, but not those of
    batches, which are held.
    """
    usage = RequestUsage()
    token = _tracked.set(usage)
    try:
        yield usage
    finally:
        _tracked.reset(token)


def note_need(num_tokens: int) -> None:
    """Note for the tracked request how many tokens must be reserved for it."""
    if (usage := _tracked.get()) is not None:
        usage.num_needed = num_tokens


class Counts(Protocol):
    """The tokens of one request so far."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageCounts(msgspec.Struct):
    """The usage of an account in some period. ``prompt_tokens`` includes ``cached_tokens``."""

    requests: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def add(self, other: UsageCounts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class UsageEntry:
    """The usage of one account.

    ``latest`` has a bucket for each second of the last minute by the monotonic clock: [second,
    requests, tokens]. Running requests have reserved ``num_reserved`` tokens that are not paid yet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.charges: set[Charge] = set()
        self.num_reserved = 0
        self.latest: deque[list[int]] = deque()
        self.day = self.month = ""  # the latest that the clock has shown
        self.of_month = UsageCounts()
        self.total = UsageCounts()  # since the start; requests that were taken back too
        self.unsaved: dict[tuple[str, str], UsageCounts] = {}  # by day and model
        self.changed: dict[int, list[int]] = {}  # buckets of ``latest`` to write

    def count_latest(self, seconds: float) -> tuple[int, int]:
        """Return the requests and the paid tokens of the last minute, at least."""
        while self.latest and self.latest[0][0] <= seconds - WINDOW - 1:
            self.latest.popleft()
        return sum(one[1] for one in self.latest), sum(one[2] for one in self.latest)

    def _get_bucket(self, second: int) -> list[int]:
        """Return the bucket of a second that is not before the last one."""
        if not self.latest or self.latest[-1][0] < second:
            self.latest.append([second, 0, 0])
        self.changed[self.latest[-1][0]] = self.latest[-1]
        return self.latest[-1]

    def begin_month(self, now: float) -> str:
        """Return the day of ``now``, or of an earlier call if the clock has been set back since
        then. Forget the tokens of an earlier month.
        """
        self.day = max(self.day, datetime.fromtimestamp(now, UTC).date().isoformat())
        if self.day[:7] != self.month:
            self.month, self.of_month = self.day[:7], UsageCounts()
        return self.day

    def seconds_until(self, seconds: float, index: int, excess: int) -> float:
        """Return the time until ``excess`` requests (index 1) or tokens (2) are a minute old."""
        for one in self.latest:
            excess -= one[index]
            if excess <= 0:
                return max(1.0, one[0] + WINDOW + 1 - seconds)
        return float(WINDOW)

    def book(self, used: UsageCounts, now: float, model: str) -> str:
        """Add ``used`` to the day and the month. Returns the day."""
        day = self.begin_month(now)
        for one in (self.of_month, self.total, self.get_unsaved(day, model)):
            one.add(used)
        return day

    def get_unsaved(self, day: str, model: str) -> UsageCounts:
        """Return the usage of a day that has not been written yet."""
        return self.unsaved.setdefault((day, model), UsageCounts())

    def count_used(self, used: UsageCounts, seconds: float) -> list[int]:
        """Count ``used`` in the last minute. Returns its bucket."""
        bucket = self._get_bucket(int(seconds))
        bucket[1] += used.requests
        bucket[2] += used.tokens
        return bucket

    def forget_old(self, seconds: float) -> None:
        """Drop buckets that no longer matter from those to write."""
        if self.changed and next(iter(self.changed)) < seconds - 2 * WINDOW:
            first = seconds - WINDOW - 1
            self.changed = {
                second: bucket for second, bucket in self.changed.items() if second >= first
            }

    def take_back(self, bucket: list[int], day: str | None, model: str) -> None:
        """Remove a request from the counts: from ``bucket`` and, unless ``day`` is None, from that
        day.
        """
        bucket[1] -= 1
        self.changed[bucket[0]] = bucket
        if day is None:
            return
        self.get_unsaved(day, model).requests -= 1
        if day[:7] == self.month:
            self.of_month.requests -= 1


class Clocks(Protocol):
    def now(self) -> float:
        """Return the Unix time."""

    def seconds(self) -> float:
        """Return the seconds of a clock that never jumps."""


class Charge:
    """The tokens that one admitted request reserves and pays. The caller must call ``settle``.

    ``hold_charges`` explains held charges.
    """

    def __init__(
        self, clocks: Clocks, entry: UsageEntry, reserved: int, counts: Counts, model: str
    ) -> None:
        self.model = model
        self._clocks = clocks
        self._entry = entry
        self._counts = counts
        self._paid = UsageCounts()
        one = UsageCounts(requests=1)
        self._bucket = entry.count_used(one, clocks.seconds())  # that counts the request
        self.is_open = True
        self._is_finished = False
        self._is_taken_back = False
        self._day: str | None = None  # on which the request was booked
        held = _held.get()
        self._is_held = held is not None
        if held is not None:
            held.add(self)
        else:
            self._day = entry.book(one, clocks.now(), model)
            if (usage := _tracked.get()) is not None:
                usage.charges.append(self)
        self._left = reserved  # of the reserved tokens, those that have not been paid
        entry.num_reserved += reserved
        self.end: Callable[[CLLMError], None] | None = None  # ends the request with an error

    @property
    def paid(self) -> UsageCounts:
        """What the request has cost so far."""
        return msgspec.structs.replace(self._paid, requests=0 if self._is_taken_back else 1)

    @property
    def num_reserved(self) -> int:
        """The tokens that are still reserved."""
        return self._left

    def _release(self, num_tokens: int) -> None:
        """Reserve up to ``num_tokens`` tokens less."""
        released = min(num_tokens, self._left)
        self._left -= released
        self._entry.num_reserved -= released

    def pay(self, *, finished: bool = False) -> None:
        """Book the tokens delivered since the last call; nothing before the first one."""
        counts, paid = self._counts, self._paid
        if self._is_held:
            return
        if not counts.completion_tokens and not finished:
            return
        used = UsageCounts(
            0,
            counts.prompt_tokens - paid.prompt_tokens,
            counts.cached_tokens - paid.cached_tokens,
            counts.completion_tokens - paid.completion_tokens,
        )
        if used != UsageCounts():
            paid.add(used)
            self._release(used.tokens)
            self._entry.count_used(used, self._clocks.seconds())
            self._entry.book(used, self._clocks.now(), self.model)

    def settle(self, *, finished: bool = False, failed: bool = False) -> None:
        """End the reservation. May be called again.

        The request was ``finished`` if it was answered completely. If it ``failed``, because the
        server could not answer it, and nothing was delivered, it does not count.
        """
        if not self.is_open:
            return
        self.is_open = False
        self._is_finished = finished
        self.pay(finished=finished)
        if not self._is_held:
            self._release(self._left)
        self._entry.charges.discard(self)
        if (
            failed
            and self._paid == UsageCounts()
            and not (self._is_held and self._counts.completion_tokens)
        ):
            self._entry.take_back(self._bucket, self._day, self.model)
            self._is_taken_back = True
            self._is_held = False
            self._release(self._left)

    def confirm(self) -> None:
        """Pay the held tokens, unless the request does not count."""
        if not self._is_held:
            return
        self._is_held = False
        self._day = self._entry.book(UsageCounts(requests=1), self._clocks.now(), self.model)
        self.pay(finished=self._is_finished)
        self._release(self._left)

    def forget(self) -> None:
        """End the reservation without paying."""
        self._release(self._left)
