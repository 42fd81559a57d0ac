"""Base URLs that end with /v1 where they should not, and the other way round."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

PREFIX = "/v1"
# The operator's pages have their own paths alone, so that a proxy which lets only /v1 through hides them.
PRIVATE = ("/metrics", "/scheduler", "/benchmark")


def install(app: FastAPI) -> None:
    """Let ``app`` serve a path that it does not know as the one that has one /v1 less or more, if it knows that.

    The path is rewritten when no route was found, so known paths lose no time, and errors, dialects and the OpenAPI
    document see one path for each route.
    """
    not_found = app.router.default

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        for other in (path.removeprefix(PREFIX), PREFIX + path):
            if other != path and other not in PRIVATE and knows(app, {**scope, "path": other}):
                scope["path"] = other
                await app.router(scope, receive, send)
                return
        await not_found(scope, receive, send)

    app.router.default = default


def knows(app: FastAPI, scope: Scope) -> bool:
    """Whether there is a route for the path of ``scope``, with whatever method."""
    routes: list[Route] = app.state.routes
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)
