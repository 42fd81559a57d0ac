"""Serves clients whose base URL lacks /v1, or contains it although the client adds it too."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from cllm.core.account import Account
from cllm.server.auth import ACCOUNT, route_not_allowed

PREFIX = "/v1"
# The operator's pages cannot be reached under /v1, so a proxy that passes only /v1 hides them.
PRIVATE = ("/metrics", "/scheduler", "/benchmark", "/faults")


def install(app: FastAPI) -> None:
    """Rewrite a path that has no route to the same path with one /v1 less or more, if that has a
    route.

    This happens after routing has failed, so known paths lose no time. Handlers, dialects and the
    OpenAPI document see one path for each route.
    """
    not_found = app.router.default

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        for other in (path.removeprefix(PREFIX), PREFIX + path):
            if other != path and other not in PRIVATE and has_route(app, {**scope, "path": other}):
                account: Account | None = scope.get(ACCOUNT)
                if account is not None and not account.may_use_route(other):
                    raise route_not_allowed(account, path)
                scope["path"] = other
                await app.router(scope, receive, send)
                return
        await not_found(scope, receive, send)

    app.router.default = default


def has_route(app: FastAPI, scope: Scope) -> bool:
    """Return whether the path of ``scope`` has a route, for any method."""
    routes: list[Route] = app.state.routes
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)
