"""The routes that a front answers as a server does, with the same code."""

from __future__ import annotations

from types import SimpleNamespace

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from cllm.cluster.model_events import ModelEvents
from cllm.server import page
from cllm.server.app import answer_fault
from cllm.server.call import get_call
from cllm.server.errors import install
from cllm.server.live import routes as live
from cllm.server.llama_server.model_events import EVENTS_PATH
from cllm.server.native import streams, usage

PATHS = frozenset({"/usage", "/live", live.EVENTS_PATH})
PREFIXES = (page.PREFIX, streams.PREFIX)


class OwnRoutes:
    """Answers from the front's ledger, its files, the streams that it keeps, and what it follows of
    its replicas.
    """

    def __init__(self, state: SimpleNamespace, model_events: ModelEvents) -> None:
        """``state`` has what the routes need of a ServerState."""
        self._state = state
        self._model_events = model_events
        self._app: FastAPI | None = None

    def find(self, request: Request) -> ASGIApp | None:
        """Return what answers a request, None if the front does not answer it in this way."""
        path: str = request.scope["path"]
        if path == "/" and request.method == "GET" and page.wants_page(request):
            return page.answer_page(request)
        if path == EVENTS_PATH and request.method == "GET":
            events = self._model_events.listen(get_call(request).account())
            return StreamingResponse(events, media_type="text/event-stream")
        return self._make() if path in PATHS or path.startswith(PREFIXES) else None

    def _make(self) -> FastAPI:
        if self._app is None:
            self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
            self._app.state = self._state  # type: ignore[assignment]
            for router in (usage.router, live.router, streams.router, page.router):
                self._app.include_router(router)
            install(self._app, answer_fault)
        return self._app
