"""What is known about a request apart from its body."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import State
from starlette.requests import Request

from cllm.core.account import Account
from cllm.server.auth import account_name_of, make_account

CALL = "cllm.call"  # in the scope of a request


@dataclass(eq=False, slots=True)
class Call:
    """An HTTP request, or a request of a batch, without its body.

    state: the application's: registry, settings, sampling defaults, stored responses.
    account_name: by the credentials, "" without. request: None for a batch, else the HTTP request,
    whose client may disconnect. num_bytes: of the body, and of stored responses that it continues.
    body_hash: the same for the same body.
    """

    state: State
    account_name: str
    request: Request | None = None
    num_bytes: int = 0
    body_hash: int = 0

    def account(self, user: str | None = None) -> Account:
        """Return the account: by the credentials, else of ``user``, else the anonymous one."""
        name = self.account_name or (f"user-{user}" if user else "")
        return make_account(name, self.state.settings)


def call_of(request: Request) -> Call:
    """Return the call that ``request`` is, always the same object."""
    call: Call | None = request.scope.get(CALL)
    if call is None:
        call = request.scope[CALL] = Call(request.app.state, account_name_of(request), request)
    return call
