"""Serves clients that write paths in other ways: with repeated or trailing slashes, without /v1, or
with /v1 twice because the base URL also contains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.core.account import Account
from cllm.server.auth import ACCOUNT, route_not_allowed
from cllm.server.cluster.key import INTERNAL

PREFIX = "/v1"
OTHER = "other"  # a path without a route
# The operator's pages cannot be reached under /v1, so a proxy that passes only /v1 hides them.
PRIVATE = (
    "/metrics",
    "/scheduler",
    "/bench",
    "/benchmark",
    "/faults",
    "/live",
    "/live/events",
    "/debug/trace",
)
CONTROL_PATH = "/v1/chat/completions/control"
BENCH = "/bench/"  # all paths that begin with it are the operator's too


class KnownPaths:
    """The paths of all routes, for any method."""

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        routes = list(routes)
        self._dialects = {
            route.path: str((route.tags or ["cLLM"])[0]) for route in reversed(routes)
        }
        self._plain = {route.path for route in routes if not route.param_convertors}
        self._templates = [
            (route.path_regex, route.path) for route in routes if route.param_convertors
        ]

    def __contains__(self, path: str) -> bool:
        return path in self._plain or any(pattern.match(path) for pattern, _ in self._templates)

    def find(self, path: str) -> str | None:
        """Return the known path that ``path`` means: itself, or with one /v1 removed or added."""
        if path in self:
            return path
        others = path.removeprefix(PREFIX), PREFIX + path
        return next((one for one in others if one in self and not is_private(one)), None)

    def describe(self, path: str) -> tuple[str, str]:
        """Return the path of the route that ``path`` means, such as /v1/models/{name}, and the name
        of its dialect; OTHER and "" if there is none.
        """
        known = path if path in self._plain else self.find(re.sub("/+", "/", path).rstrip("/"))
        if known is None:
            return OTHER, ""
        if known not in self._plain:
            known = next(name for pattern, name in self._templates if pattern.match(known))
        return known, self._dialects[known]


def is_private(path: str) -> bool:
    """Return whether a path cannot be written in other ways."""
    return path in PRIVATE or path.startswith((INTERNAL, BENCH))


def install(app: FastAPI, known: KnownPaths) -> None:
    """Rewrite a path that has no route to the same path with one /v1 less or more, if that has a
    route.

    This happens after routing has failed, so known paths lose no time. Handlers, dialects and the
    OpenAPI document see one path for each route.
    """
    not_found = app.router.default

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        other = known.find(path)
        if other in (None, path):
            await not_found(scope, receive, send)
            return
        account: Account | None = scope.get(ACCOUNT)
        if account is not None and not account.may_use_route(other):
            raise route_not_allowed(account, path)
        scope["path"] = other
        await app.router(scope, receive, send)

    app.router.default = default


def with_single_slashes(app: ASGIApp, known: KnownPaths) -> ASGIApp:
    """Return ``app`` with repeated and trailing slashes removed from paths that have no route.

    Many clients join a base URL that ends with a slash and a path that begins with one. This must
    come before all checks of access, because they depend on the path.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if ("//" in path or path.endswith("/")) and path not in known:
            single = re.sub("/+", "/", path)
            if single not in known:
                single = single.rstrip("/") or "/"
            if not is_private(single):
                scope = {**scope, "path": single}
        await app(scope, receive, send)

    return called
