"""How many requests each account has in the engine, and which account has the most."""

from __future__ import annotations


class RequestCounts:
    """The number of requests of each account. The account with the most is known at any time,
    however many accounts there are.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._accounts: dict[int, dict[str, None]] = {}  # by the number of their requests
        self._most = 0

    def add(self, account: str, number: int = 1) -> None:
        """Count one request more, or one less with ``number=-1``."""
        before = self._counts.pop(account, 0)
        count = before + number
        if before:
            del self._accounts[before][account]
            if not self._accounts[before]:
                del self._accounts[before]
        if count:
            self._counts[account] = count
            self._accounts.setdefault(count, {})[account] = None
        if count > self._most or self._most not in self._accounts:
            self._most = count

    def find_busiest(self) -> tuple[str, int]:
        """Return the account with the most requests, and their number; "" and 0 if there are
        none.
        """
        return next(iter(self._accounts.get(self._most, {"": None}))), self._most
