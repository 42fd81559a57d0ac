"""What a request reserves when it is admitted, and pays for what it has cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import msgspec

from cllm.errors import CLLMError

if TYPE_CHECKING:
    from cllm.store.usage import Entry, UsageLedger


class HeldCharges:
    """The charges of the requests that are admitted while these are held: they reserve what they
    may cost, and pay when ``confirm`` is called.
    """

    def __init__(self) -> None:
        self._charges: list[Charge] = []

    def add(self, charge: Charge) -> None:
        self._charges.append(charge)

    def confirm(self) -> None:
        """Let all of them pay."""
        for charge in self._charges:
            charge.confirm()
        self._charges.clear()

    def forget(self) -> None:
        """Let none of them pay."""
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


class Counts(Protocol):
    """The tokens of one request so far."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Used(msgspec.Struct):
    """What an account has used in some time. prompt_tokens include cached_tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def add(self, other: Used) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Charge:
    """What one admitted request reserves and pays. The caller must call ``settle``. See
    ``hold_charges`` for those that are held.
    """

    def __init__(self, ledger: UsageLedger, entry: Entry, reserved: int, counts: Counts) -> None:
        self._ledger = ledger
        self._entry = entry
        self._counts = counts
        self._paid = Used()
        one = Used(requests=1)
        self._bucket = entry.count_used(one, ledger.seconds())  # that counts the request
        self._is_open = True
        self._is_finished = False
        self._day: str | None = None  # on which the request was booked
        held = _held.get()
        self._is_held = held is not None
        if held is not None:
            held.add(self)
        else:
            self._day = entry.book(one, ledger.now())
        self._left = reserved  # of the reserved tokens, those that have not been paid
        entry.num_reserved += reserved
        self.end: Callable[[CLLMError], None] | None = None  # ends the request with an error

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
        used = Used(
            0,
            counts.prompt_tokens - paid.prompt_tokens,
            counts.cached_tokens - paid.cached_tokens,
            counts.completion_tokens - paid.completion_tokens,
        )
        if used != Used():
            paid.add(used)
            self._release(used.tokens)
            self._entry.count_used(used, self._ledger.seconds())
            self._entry.book(used, self._ledger.now())

    def settle(self, *, finished: bool = False, failed: bool = False) -> None:
        """End the reservation. finished: the request was answered completely. failed: the server
        could not answer it; if nothing was delivered, the request does not count. May be called
        again.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._is_finished = finished
        self.pay(finished=finished)
        if not self._is_held:
            self._release(self._left)
        self._entry.charges.discard(self)
        if (
            failed
            and self._paid == Used()
            and not (self._is_held and self._counts.completion_tokens)
        ):
            self._entry.take_back(self._bucket, self._day)
            self._is_held = False
            self._release(self._left)

    def confirm(self) -> None:
        """Pay what was held, unless the request does not count."""
        if not self._is_held:
            return
        self._is_held = False
        self._day = self._entry.book(Used(requests=1), self._ledger.now())
        self.pay(finished=self._is_finished)
        self._release(self._left)

    def forget(self) -> None:
        """Reserve nothing any more, and pay nothing."""
        self._release(self._left)
