"""Lets requests in: reads API keys, checks Host header fields, and throttles wrong keys."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.config.settings import Settings
from cllm.core.account import Account
from cllm.core.carried import Computed, decode_carried
from cllm.errors import BadRequest, CLLMError, Unauthorized
from cllm.observe.request_record import RequestRecord
from cllm.server.access import LOAD_ACCOUNT, Access
from cllm.server.addresses import is_loopback, split_host
from cllm.server.cluster.key import INTERNAL
from cllm.server.http.recording import find_record
from cllm.server.http.sse import WANTS_FRAMES
from cllm.server.page import PATHS
from cllm.store.charges import RequestUsage, track_usage

ACCOUNT = "cllm.account"  # in the scope of a request that has a valid key
CARRIED = "cllm.carried"  # in the scope of a request that a front has sent for an account
# Headers between fronts and replicas. Only a request with the cluster key may have the first two;
# the others are in answers to such requests.
CARRIED_HEADER = "x-cllm-account"
PROGRESS_HEADER = "x-cllm-progress"  # asks for streams in frames, which tell their progress
USAGE_HEADER = "x-cllm-usage"  # UsageCounts as JSON
COMPUTED_HEADER = "x-cllm-computed"  # Computed as JSON
NEEDED_HEADER = "x-cllm-needed-tokens"  # tokens that the front must reserve for the request
# Paths that need no key, because they reveal nothing about the model or its users. CORS preflights
# need none either.
PUBLIC = PATHS | {"/", "/bench", "/docs", "/health", "/live", "/ping", "/ready"}
METRICS = "/metrics"
KEY_HEADERS = ("x-api-key", "api-key")  # Anthropic's and Azure's
MAX_WRONG_KEYS = 20  # from one address within WRONG_KEY_WINDOW; further ones get 429
WRONG_KEY_WINDOW = 60.0  # seconds
MAX_ADDRESSES = 10_000  # addresses whose wrong keys are counted

log = logging.getLogger("cllm.access")

Answer = Callable[[Request, Exception], Response]


def read_key(headers: Headers) -> str:
    """Return the API key of a request, or "" if it has none.

    The key is taken from Authorization, or else from one of KEY_HEADERS.
    """
    authorization = headers.get("authorization", "").strip()
    key = re.sub(r"^bearer(\s+|$)", "", authorization, flags=re.IGNORECASE)
    others = (headers.get(name, "").strip() for name in KEY_HEADERS)
    return key or next(filter(None, others), "")


def name_for_key(key: str) -> str:
    """Return the name of the account of ``key``, or "" without a key, on a server without accounts.

    Such a server accepts any key. The key only identifies the account for fair scheduling.
    """
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:16]}" if key else ""


def find_owner(scope: Scope) -> str:
    """Return the name of the account that a request's key names, "" without a key."""
    account: Account | None = scope.get(ACCOUNT)
    return name_for_key(read_key(Headers(scope=scope))) if account is None else account.name


class Guard:
    """Passes allowed requests to the application, with their account in the scope.

    Rejects all others: with 401 if there is no valid key, 403 if the Host or the route is not
    allowed, and 429 if an address keeps sending wrong keys.
    """

    def __init__(self, app: ASGIApp, access: Access, settings: Settings, answer: Answer) -> None:
        """``answer`` returns the response to a request that fails with an error."""
        self._app = app
        self._access = access
        self._settings = settings
        self._answer = answer
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address
        self._own_name = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        headers = request.headers
        if self._access.is_front(headers):
            if PROGRESS_HEADER in headers:
                scope[WANTS_FRAMES] = True
            if CARRIED_HEADER in headers:
                await self._serve_front(request, receive, send)
                return
            if scope["path"].startswith(INTERNAL):
                await self._app(scope, receive, send)
                return
        try:
            account = self._authenticate_load(request)
            if account is None:
                self._check_host(request)
                account = self._authenticate(request)
        except CLLMError as error:
            await self._answer(request, error)(scope, receive, send)
            return
        if account is not None:
            scope[ACCOUNT] = account
            find_record(scope).account = account.name
            if account.limits.is_limited:
                send = self._with_limits(account, send)
        await self._app(scope, receive, send)

    async def _serve_front(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a request that a front has checked, and tell it what that has cost."""
        scope = request.scope
        try:
            carried = decode_carried(request.headers[CARRIED_HEADER])
        except ValueError as error:
            fault = BadRequest(f"Invalid {CARRIED_HEADER}: {error}.", code="invalid_value")
            await self._answer(request, fault)(scope, receive, send)
            return
        scope[CARRIED] = carried
        find_record(scope).account = carried.account.name
        self._access.note_carried(carried)
        with track_usage() as usage:

            async def send_with_usage(message: Message) -> None:
                if message["type"] == "http.response.start":
                    own = [*list_usage_headers(usage), *list_computed(find_record(scope))]
                    headers = [*message["headers"], *own]
                    message = {**message, "headers": headers}
                await send(message)

            try:
                await self._app(scope, receive, send_with_usage)
            finally:
                self._access.reports.add(carried, usage.sum_up(), carried.request)

    def _check_host(self, request: Request) -> None:
        """Raise BadRequest (403) for a host name that is not the server's.

        A page of another site may have made the browser resolve that site's name to this address
        (DNS rebinding).
        """
        allowed = self._settings.server.allowed_hosts
        asked = request.headers.get("host")
        if not asked or (self._access.is_required and not allowed):
            return
        name = split_host(asked)
        if any(fnmatchcase(name, pattern.lower()) for pattern in allowed):
            return
        if not self._access.is_required and is_loopback(name):
            return
        # other machines may use this server without keys; an address cannot be rebound
        if self._settings.server.insecure and (name == self._own_name or is_address(name)):
            return
        message = (
            f"The host {name[:100]!r} is not allowed; the option server.allowed_hosts names the "
            "hosts by which this server may be called."
        )
        raise BadRequest(message, code="host_not_allowed", status=403)

    def _authenticate_load(self, request: Request) -> Account | None:
        """Return the account of load runs if the load run has sent the request, else None.

        Raises BadRequest (403).
        """
        if not self._access.is_load_key(read_key(request.headers)):
            return None
        if not LOAD_ACCOUNT.may_use_route(request.scope["path"]):
            raise route_not_allowed(LOAD_ACCOUNT, request.scope["path"])
        return LOAD_ACCOUNT

    def _authenticate(self, request: Request) -> Account | None:
        """Return the account of a request's key; None if the server or this request needs no key.

        Raises Unauthorized, and BadRequest (403, 429).
        """
        if not self._access.is_required:
            return None
        key = read_key(request.headers)
        account = self._access.account_for_key(key) if key else None
        public = is_public(request, self._settings)
        if account is None and public:
            return None
        if account is not None:
            if not public and not account.may_use_route(request.scope["path"]):
                raise route_not_allowed(account, request.scope["path"])
            return account
        if self._access.is_for_fronts:
            raise Unauthorized("This server answers only to the fronts of its cluster.")
        if not key:
            raise Unauthorized(
                "This server needs an API key, as 'Authorization: Bearer KEY', 'x-api-key: KEY' or "
                "'api-key: KEY'."
            )
        self._count_wrong_key(request.client.host if request.client else "")
        raise Unauthorized("The API key is not valid.")

    def _count_wrong_key(self, address: str) -> None:
        """Raise TooManyWrongKeys if the address has sent too many.

        Valid keys from it are still accepted, because other clients may have the same address.
        """
        now = time.monotonic()
        since, count = self._wrong.pop(address, (now, 0))
        if now - since > WRONG_KEY_WINDOW:
            since, count = now, 0
        self._wrong[address] = since, count + 1
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        if count + 1 == MAX_WRONG_KEYS:
            log.warning("%s sends wrong API keys", address)
        if count >= MAX_WRONG_KEYS:
            raise TooManyWrongKeys(since + WRONG_KEY_WINDOW - now)

    def _with_limits(self, account: Account, send: Send) -> Send:
        """Return ``send`` with headers that say how much the account's limits leave."""

        async def limited(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *self._limit_headers(account)]
                message = {**message, "headers": headers}
            await send(message)

        return limited

    def _limit_headers(self, account: Account) -> list[tuple[bytes, bytes]]:
        headers = []
        for name, (limit, left, seconds) in self._access.ledger.list_left(account).items():
            for what, value in (
                ("limit", str(limit)),
                ("remaining", str(left)),
                ("reset", format_duration(seconds)),
            ):
                headers.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return headers


def route_not_allowed(account: Account, path: str) -> BadRequest:
    message = f"The account {account.name!r} may not use {path[:100]}."
    return BadRequest(message, code="route_not_allowed", status=403)


class TooManyWrongKeys(CLLMError):
    """An address has sent too many wrong keys; ``retry_after`` is in seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("Too many requests with wrong API keys came from this address.")
        self.retry_after = retry_after


def is_public(request: Request, settings: Settings) -> bool:
    """Return whether a request may be answered without a key."""
    path, headers = request.scope["path"], request.headers
    if path == METRICS:
        return settings.server.open_metrics
    is_preflight = (
        request.method == "OPTIONS"
        and "origin" in headers
        and "access-control-request-method" in headers
    )
    return path in PUBLIC or is_preflight


def list_usage_headers(usage: RequestUsage) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a front what an answer has cost, unless it goes on; or how many
    tokens must be reserved for the request.
    """
    if usage.num_needed:
        return [(NEEDED_HEADER.encode(), b"%d" % usage.num_needed)]
    if usage.is_settled:
        return [(USAGE_HEADER.encode(), msgspec.json.encode(usage.sum_up()))]
    return []


def list_computed(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Return the header that tells a front about an answer, if it is complete."""
    if record.outcome != "finished":
        return []
    computed = Computed(
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.ttft,
        record.finish_reasons,
    )
    return [(COMPUTED_HEADER.encode(), msgspec.json.encode(computed))]


def is_address(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, name)
            return True
    return False


def format_duration(seconds: float) -> str:
    """Return a duration in the format of OpenAI's headers, such as 1s or 6m0s."""
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"
