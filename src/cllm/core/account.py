"""The account on whose behalf a request is computed, and to which stored data belongs."""

from __future__ import annotations

import msgspec

from cllm.core.request import Priority


class Account(msgspec.Struct, frozen=True):
    """name: "" if the request names no account. priority: the highest class that its requests can
    have, None without a limit.
    """

    name: str = ""
    priority: Priority | None = None

    def choose_priority(self, asked: Priority | None) -> Priority:
        """Return the class of a request that asks for ``asked``, or for none."""
        if self.priority is None:
            return Priority.NORMAL if asked is None else asked
        return self.priority if asked is None else max(asked, self.priority)


ANONYMOUS = Account()
