"""What is known about a request apart from its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import State
from starlette.requests import Request

from cllm.core.account import ADDRESS, ANONYMOUS, Account
from cllm.server.access import Access
from cllm.server.auth import ACCOUNT, name_for_key, read_key
from cllm.serving.answer import SchedulingOptions
from cllm.store.audit import write_audit

CALL = "cllm.call"  # in the scope of a request


@dataclass(eq=False, slots=True)
class Call:
    """An HTTP request, or a request of a batch, without its body.

    state: the application's: registry, settings, access, stored responses. account_name: of the
    account of a batch; for an HTTP request, by its credentials, "" without. request: None for a
    batch, else the HTTP request, whose client may disconnect. num_bytes: of the body, and of stored
    responses that it continues. body_hash: the same for the same body. time_limits: those in the
    body, which count from its arrival. lora: the adapters that the body names.
    """

    state: State
    account_name: str
    request: Request | None = None
    num_bytes: int = 0
    body_hash: int = 0
    time_limits: SchedulingOptions = field(default_factory=SchedulingOptions)
    lora: Sequence[Any] | None = None

    def account(self, user: str | None = None) -> Account:
        """Return the account: by the credentials, else of ``user``, else the anonymous one.

        Raises Unauthorized for a batch whose account has lost its key.
        """
        if self.request is not None and ACCOUNT in self.request.scope:
            account: Account = self.request.scope[ACCOUNT]
            return account
        access: Access = self.state.access
        if self.request is not None and access.is_required:
            return ANONYMOUS  # without any rights
        return access.account(self.account_name or (f"user-{user}" if user else ""))

    def scheduling_account(self, user: str | None = None) -> Account:
        """Return the account for scheduling. Anonymous requests are of their client's address."""
        account = self.account(user)
        if account.name or self.request is None or self.request.client is None:
            return account
        return msgspec.structs.replace(account, name=f"{ADDRESS}{self.request.client.host}")

    def audit(self, what: str, **details: object) -> None:
        """Note in the audit log what the request changes about the server."""
        folder = self.state.settings.storage.folder
        if folder is not None:
            who = self.account().name or "anonymous"
            write_audit(Path(folder).expanduser(), who, what, **details)


def call_of(request: Request) -> Call:
    """Return the call that ``request`` is, always the same object."""
    call: Call | None = request.scope.get(CALL)
    if call is None:
        name = name_for_key(read_key(request.headers))
        call = request.scope[CALL] = Call(request.app.state, name, request)
    return call
