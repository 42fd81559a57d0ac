"""The application of a front: answers requests itself, or passes them on."""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.cluster.forwarding import Forwarding
from cllm.cluster.front import Front
from cllm.core.account import Account
from cllm.errors import BadRequest, CLLMError
from cllm.server.app import PATHS, answer_fault
from cllm.server.auth import ACCOUNT, route_not_allowed
from cllm.server.cluster.key import INTERNAL
from cllm.server.errors import describe
from cllm.server.http.sse import ClientGone


class FrontApp:
    """The ASGI application, inside the checks of ``guard``."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._front  # as the framework does it, for ``get_state``
        request = Request(scope, receive)
        try:
            check_path(request)
            if (answer := self._answer_here(request)) is not None:
                await answer(scope, receive, send)
                return
            await Forwarding(self._front, request, send).run()
        except (ClientDisconnect, ClientGone):
            pass
        except CLLMError as error:
            await answer_fault(request, describe(error))(scope, receive, send)

    def _answer_here(self, request: Request) -> ASGIApp | None:
        """Return the answer to a request that the front answers itself, or from the answers of
        several replicas; None for a request that one replica answers.
        """
        if request.scope["path"] == "/ready":
            ready = self._front.replicas.ready
            content = {"status": "ready" if ready else "loading"}
            return JSONResponse(content, 200 if ready else 503)
        return self._front.own.find(request) or self._front.gatherer.find(request)


def check_path(request: Request) -> None:
    """Replace the path by the one of the route that it means. Raises BadRequest (404, 403)."""
    scope = request.scope
    path: str = scope["path"]
    known = PATHS.find(path)
    is_hidden = known is None or known.startswith(INTERNAL)
    # a proxy before a replica could remove these segments, and reach another path
    segments = {segment.partition(";")[0] for segment in re.split(r"[/\\]", path)}
    if known is None or is_hidden or {".", ".."} & segments:
        message = f"{request.method} {path}: Not Found"
        raise BadRequest(message[:300], code="not_found", status=404)
    if request.method == "TRACE":  # such a proxy could answer it with the cluster key
        raise BadRequest("TRACE: Method Not Allowed", code="method_not_allowed", status=405)
    account: Account | None = scope.get(ACCOUNT)
    if known != path:
        if account is not None and not account.may_use_route(known):
            raise route_not_allowed(account, path)
        scope["path"] = known
