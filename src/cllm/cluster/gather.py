"""The routes that a front answers itself, mostly from the answers of several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm import __version__
from cllm.cluster.accounts import Accounts
from cllm.cluster.ask import TIMEOUT, ReplicaAnswer, ask, quote_path
from cllm.cluster.body import NOTHING
from cllm.cluster.leases import Replica, Replicas
from cllm.cluster.lists import STORED_LISTS, answer_list
from cllm.cluster.merge import merge_health, merge_metrics, merge_named
from cllm.cluster.metrics import FrontMetrics
from cllm.cluster.stored import StoredName
from cllm.errors import BadRequest, EngineError
from cllm.observe.exposition import render
from cllm.scheduler.trace import Explanation
from cllm.server.auth import CARRIED_HEADER
from cllm.server.body import receive_parts
from cllm.server.call import get_call
from cllm.server.cluster.routes import RESPONSES_PATH
from cllm.server.http.paths import BENCH, CONTROL_PATH

# Fields of clients that matter for the form of the answers
PASSED_FIELDS = (b"anthropic-version", b"anthropic-beta", b"accept", b"content-type")


class Identified(msgspec.Struct):
    """What the front reads of an entry that has an id."""

    id: str


class ModelList(msgspec.Struct):
    """OpenAI's list of models."""

    data: list[Identified]


class Named(msgspec.Struct):
    """What the front reads of a model in Ollama's lists."""

    name: str


class NamedList(msgspec.Struct):
    """Ollama's lists of models."""

    models: list[Named]


class Health(msgspec.Struct):
    """The health of a replica."""

    status: str
    model_loaded: bool
    models: list[dict[str, Any]] = []


# Lists whose union is answered: the field with the entries, their key, and their form
UNIONS: dict[str, tuple[str, str, type]] = {
    "/v1/models": ("data", "id", ModelList),
    "/api/tags": ("models", "name", NamedList),
    "/api/ps": ("models", "name", NamedList),
}
# Requests that change a server. All replicas do what they ask, unless ?replica= names one.
CHANGES = frozenset(
    {
        *("/models/load", "/models/unload", "/lora-adapters", "/faults"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/api/pull", "/api/create", "/api/copy", "/api/delete"),
    }
)
# These ask the replica that ?replica= names, or the first one.
OF_ONE = frozenset({"/benchmark", "/debug/trace"})


class Gatherer:
    """Answers requests from the answers of several replicas."""

    def __init__(
        self,
        replicas: Replicas,
        accounts: Accounts,
        metrics: FrontMetrics,
        max_body_bytes: int,
    ) -> None:
        self._replicas = replicas
        self._accounts = accounts
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._handlers: Mapping[str, Callable[[Request], Coroutine[Any, Any, Response]]] = {
            **dict.fromkeys(("/health", "/ping"), self._answer_health),
            **dict.fromkeys(UNIONS, self._answer_union),
            **dict.fromkeys(STORED_LISTS, self._answer_list),
            "/metrics": self._answer_metrics,
            "/scheduler": self._answer_scheduler,
            "/version": answer_version,
        }

    def find(self, request: Request) -> ASGIApp | None:
        """Return what answers a request, or None if one replica does."""
        path: str = request.scope["path"]
        if path.startswith(BENCH):
            message = "A load run is on one server; open /bench at the address of a replica."
            raise BadRequest(message, code="not_found", status=404)
        if request.method == "GET" and (handler := self._handlers.get(path)) is not None:
            return as_app(request, handler)
        if request.method == "GET" and path.startswith("/v1/models/"):
            return as_app(request, self._answer_first)
        if path == CONTROL_PATH and request.method == "POST":
            return as_app(request, self._answer_control)
        if path in OF_ONE or (path in CHANGES and request.method != "GET"):
            return as_app(request, self._answer_change)
        return None

    # --- asking ----------------------------------------------------------------------------------

    def _choose(self, request: Request) -> list[Replica]:
        """Return the replicas that get requests, or the one that ?replica= names.

        Raises BadRequest (404), and EngineError if there is none.
        """
        listed = sorted(self._replicas.listed(), key=lambda replica: replica.name)
        if name := request.query_params.get("replica"):
            listed = [replica for replica in listed if replica.name == name]
            if not listed:
                message = f"There is no replica {name[:100]!r} that gets requests."
                raise BadRequest(message, param="replica", code="replica_gone", status=404)
        if not listed:
            raise EngineError("No replica can answer the request now.")
        return listed

    async def ask(
        self,
        replica: Replica,
        request: Request,
        target: str,
        body: bytes = b"",
        seconds: float | None = TIMEOUT,
        method: str = "",
    ) -> ReplicaAnswer | None:
        """Return the answer of a replica to a client's request, sent to ``target``, a path with a
        query; or None if it does not answer. ``method`` is that of the request by default.
        """
        carried = self._accounts.admit(request, "", NOTHING, 0).encode(replica.name, [])
        fields = [
            (CARRIED_HEADER.encode(), carried.encode()),
            *(field for field in request.headers.raw if field[0] in PASSED_FIELDS),
        ]
        method = method or ("GET" if request.method == "HEAD" else request.method)
        key = self._accounts.access.cluster_key
        return await ask(replica, key, method, target, fields, body, seconds)

    async def find_response(self, request: Request, stored: StoredName) -> Replica | None:
        """Return the replica that stores a response or an item although the id may name another
        one, whose stream it has continued; None if there is none.
        """
        # a replica rejects what names a response that it does not have, but not such an item
        others = [
            one for one in self._replicas.listed() if stored.is_item or one.name != stored.replica
        ]
        target = RESPONSES_PATH + stored.id
        answers = await asyncio.gather(
            *(self.ask(one, request, target, method="GET") for one in others)
        )
        pairs = zip(others, answers, strict=True)
        return next((one for one, answer in pairs if answer and answer.status == 204), None)

    async def _ask_all(self, request: Request) -> dict[str, ReplicaAnswer]:
        """Return the answers of the replicas to the same request, by their names. Raises
        EngineError if there are none.
        """
        if not (answered := await self._ask_any(request)):
            raise EngineError("No replica has answered the request.")
        return answered

    async def _ask_any(self, request: Request) -> dict[str, ReplicaAnswer]:
        """Return the answers of those replicas that answer, by their names."""
        replicas, target = self._choose(request), write_target(request)
        answers = await asyncio.gather(*(self.ask(one, request, target) for one in replicas))
        pairs = zip(replicas, answers, strict=True)
        return {replica.name: answer for replica, answer in pairs if answer is not None}

    # --- routes ----------------------------------------------------------------------------------

    async def _answer_first(self, request: Request) -> Response:
        """Answer with the first answer that is no error, because replicas have different models."""
        answers = [*(await self._ask_all(request)).values()]
        return next((one for one in answers if one.status == 200), answers[0]).pass_on()

    async def _answer_union(self, request: Request) -> Response:
        answers = [*(await self._ask_all(request)).values()]
        field, key, form = UNIONS[request.scope["path"]]
        read = [answer.read(form) for answer in answers if answer.status == 200]
        known = [one for one in read if one is not None]
        if not known:
            return answers[0].pass_on()
        merged = merge_named(known, field, key)
        if "last_id" in merged and merged[field]:
            merged["first_id"], merged["last_id"] = merged[field][0][key], merged[field][-1][key]
        return JSONResponse(merged)

    async def _answer_health(self, request: Request) -> Response:
        answers: dict[str, Any] = {replica.name: None for replica in self._replicas.all}
        if any(self._replicas.listed()):
            answered = await self._ask_all(request)
            errors = [answer for answer in answered.values() if answer.status != 200]
            if errors and len(errors) == len(answered):
                return errors[0].pass_on()
            answers |= {
                name: one.read(Health) for name, one in answered.items() if one.status == 200
            }
        is_full = request.query_params.get("level") == "full"
        troubles = None
        if is_full and get_call(request).account().is_admin:
            troubles = {replica.name: replica.trouble for replica in self._replicas.all}
        return JSONResponse(merge_health(answers, troubles))

    async def _answer_metrics(self, request: Request) -> Response:
        pages: list[bytes] = []
        if any(self._replicas.listed()):
            answered = await self._ask_any(request)
            pages = [one.body for one in answered.values() if one.status == 200]
        ledger = self._accounts.access.ledger
        usage = ledger.totals() if get_call(request).account().is_admin else {}
        own = render(self._metrics.list_registries(usage, ledger.num_failed_writes))
        content = await asyncio.to_thread(merge_metrics, own, pages)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def _answer_scheduler(self, request: Request) -> Response:
        """Answer with what all replicas say of their schedulers, by name, or with the answer of the
        one that ?replica= names.
        """
        answered = await self._ask_all(request)
        known = {
            name: explanation
            for name, answer in answered.items()
            if answer.status == 200 and (explanation := answer.read(Explanation)) is not None
        }
        if request.query_params.get("replica") or not known:
            return next(iter(answered.values())).pass_on()
        return JSONResponse({"replicas": known})

    async def _answer_list(self, request: Request) -> Response:
        return await answer_list(request, self._choose(request), self.ask)

    async def _answer_control(self, request: Request) -> Response:
        """Let the replica that generates an answer do what its client asks. Only that one knows the
        answer, which another replica may have begun.
        """
        body, target = await self._read_body(request), write_target(request)
        replicas = [one for one in self._replicas.all if one.is_listed or one.running]
        answers = await asyncio.gather(*(self.ask(one, request, target, body) for one in replicas))
        answered = [answer for answer in answers if answer is not None]
        if not answered:
            raise EngineError("No replica has answered the request.")
        done, *_ = sorted(answered, key=lambda one: (one.status == 404, b"true" not in one.body))
        return done.pass_on()

    async def _read_body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        message = f"The body is larger than {limit} bytes."
        too_large = BadRequest(message, code="request_too_large", status=413)
        return b"".join([part async for part in receive_parts(request, limit, too_large)])

    async def _answer_change(self, request: Request) -> Response:
        """Let replicas do what an operator asks. Answer with the first error, or else with the
        first answer.
        """
        replicas = self._choose(request)
        if request.scope["path"] in OF_ONE:
            replicas = replicas[:1]
        body, target = await self._read_body(request), write_target(request)
        answers = await asyncio.gather(
            *(self.ask(one, request, target, body, seconds=None) for one in replicas)
        )
        for replica, answer in zip(replicas, answers, strict=True):
            if answer is None:
                message = f"The replica {replica.name} has not answered; others may have."
                raise EngineError(message)
        answered = [answer for answer in answers if answer is not None]
        return next((one for one in answered if is_failure(one)), answered[0]).pass_on()


async def answer_version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


def as_app(
    request: Request, handler: Callable[[Request], Coroutine[Any, Any, Response]]
) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(request)
        await response(scope, receive, send)

    return app


def write_target(request: Request) -> str:
    """Return the path of a request with its query, but without the name of a replica."""
    query = [one for one in request.query_params.multi_items() if one[0] != "replica"]
    path: str = request.scope["path"]
    return f"{quote_path(path)}?{urlencode(query)}" if query else quote_path(path)


def is_failure(answer: ReplicaAnswer) -> bool:
    """Return whether a change has failed, perhaps in the last line of a stream."""
    if answer.status >= 400:
        return True
    last = answer.body.rstrip().rpartition(b"\n")[2]
    return last.startswith(b'{"error"')
