"""The facts about a request apart from its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from cllm.core.account import ADDRESS, ANONYMOUS, Account
from cllm.core.carried import Carried
from cllm.observe.request_record import RequestRecord
from cllm.server.auth import ACCOUNT, CARRIED, name_for_key, read_key
from cllm.server.http.recording import find_record
from cllm.server.state import ServerState, get_state
from cllm.serving.answer import SchedulingOptions
from cllm.serving.delivered import Delivered
from cllm.store.audit import write_audit

CALL = "cllm.call"  # in the scope of a request
DELIVERED = "cllm.delivered"  # in the scope of a request that another server has begun to answer


@dataclass(eq=False, slots=True)
class Call:
    """An HTTP request, or a request of a batch, without its body.

    ``account_name`` names the account of a batch or, for an HTTP request, comes from its
    credentials ("" without any). ``request`` is the HTTP request, whose client may disconnect, or
    None in a batch. ``num_bytes`` counts the body and the stored responses that it continues.
    ``body_hash`` is the same for the same body. ``time_limits`` are those in the body; they count
    from its arrival. ``lora`` has the adapters that the body names. ``carried`` is set if the
    request came from a front, which has found its account. If another server has begun to answer
    the request, the client has the part ``delivered``. ``record`` gets what becomes of it.
    """

    state: ServerState
    account_name: str
    request: Request | None = None
    num_bytes: int = 0
    body_hash: int = 0
    time_limits: SchedulingOptions = field(default_factory=SchedulingOptions)
    lora: Sequence[Any] | None = None
    carried: Carried | None = None
    delivered: Delivered | None = None
    record: RequestRecord = field(default_factory=RequestRecord)

    def account(self, user: str | None = None) -> Account:
        """Return the account of the credentials, or else of ``user``, or else the anonymous one.

        Raises Unauthorized for a batch whose account has lost its key.
        """
        if self.carried is not None:
            return self.carried.account
        if self.request is not None and ACCOUNT in self.request.scope:
            account: Account = self.request.scope[ACCOUNT]
            return account
        access = self.state.access
        if self.request is not None and access.is_required:
            return ANONYMOUS  # without any rights
        return access.account(self.account_name or (f"user-{user}" if user else ""))

    def scheduling_account(self, user: str | None = None) -> Account:
        """Return the account for scheduling. For anonymous requests, it is the client's address."""
        if self.carried is not None:
            return self.carried.scheduled
        account = self.account(user)
        if account.name or self.request is None or self.request.client is None:
            return account
        return msgspec.structs.replace(account, name=f"{ADDRESS}{self.request.client.host}")

    @property
    def replica_name(self) -> str:
        """The name that a front gives this server, for the ids of stored data; or ""."""
        return self.carried.replica if self.carried else ""

    def audit(self, what: str, **details: object) -> None:
        """Record in the audit log what the request changes about the server."""
        folder = self.state.settings.storage.folder
        if folder is not None:
            who = self.account().name or "anonymous"
            write_audit(Path(folder).expanduser(), who, what, **details)


def get_call(request: Request) -> Call:
    """Return the Call of ``request``, always the same object."""
    call: Call | None = request.scope.get(CALL)
    if call is None:
        name = name_for_key(read_key(request.headers))
        call = request.scope[CALL] = Call(get_state(request), name, request)
        call.record = find_record(request.scope)
        call.carried = request.scope.get(CARRIED)
        call.delivered = request.scope.get(DELIVERED)
    return call
