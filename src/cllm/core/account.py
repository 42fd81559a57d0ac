"""The account on whose behalf a request is computed, and to which stored data belongs."""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec

from cllm.core.request import Priority


class AccountLimits(msgspec.Struct, frozen=True):
    """The limits of an account; None means no limit. Tokens are those of prompts and outputs."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_month: int | None = None

    @property
    def is_limited(self) -> bool:
        return any(limit is not None for limit in msgspec.structs.astuple(self))


NO_LIMITS = AccountLimits()


class Account(msgspec.Struct, frozen=True):
    """An account and its rights. Its ``name`` is "" if the request names none.

    Its requests can have the class ``priority`` at most; None sets no limit. Only accounts with the
    same ``tenant`` share cached prefixes and results. ``models`` and ``routes`` have the names or
    patterns of those that it may use; if they are empty, it may use all. An account that
    ``is_admin`` may see and manage data of all accounts. The usage of an account that ``has_key``
    is counted. A front has checked the limits of an account that ``is_carried``, and has reserved
    ``num_reserved`` tokens for the request; None means that no tokens are limited.
    """

    name: str = ""
    priority: Priority | None = None
    tenant: str = ""
    models: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    limits: AccountLimits = NO_LIMITS
    is_admin: bool = False
    has_key: bool = False
    is_carried: bool = False
    num_reserved: int | None = None

    def choose_priority(self, asked: Priority | None) -> Priority:
        """Return the class of a request that asks for ``asked``, or for none."""
        if self.priority is None:
            return Priority.NORMAL if asked is None else asked
        return self.priority if asked is None else max(asked, self.priority)

    def may_use_model(self, name: str) -> bool:
        return matches(name, self.models)

    def may_use_route(self, path: str) -> bool:
        return matches(path, self.routes)


ANONYMOUS = Account()
ADDRESS = "address-"  # prefix of account names that come from the address of anonymous requests


def is_anonymous(name: str) -> bool:
    """Return whether the account ``name`` may have several clients that do not know each other."""
    return not name or name.startswith(ADDRESS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether ``name`` matches one of ``patterns``, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
