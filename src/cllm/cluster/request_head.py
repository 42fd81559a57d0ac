"""Writes the head of a request to a replica: what the client has sent, for the replica."""

from __future__ import annotations

from starlette.requests import Request

from cllm.cluster.ask import quote_path
from cllm.cluster.leases import Replica
from cllm.cluster.relay import drop_hop_by_hop
from cllm.server.auth import CARRIED_HEADER, PROGRESS_HEADER
from cllm.server.cluster.continuation import CONTINUE_PATH
from cllm.server.cluster.key import KEY_HEADER
from cllm.server.queueing import TICKET

# Header fields that only a front may send to a replica. A proxy before a replica could read
# underscores as hyphens.
OWN_FIELDS = (b"x-cllm-cluster-", b"x-cllm-account", b"x-cllm-progress", b"x-forwarded-")
# The client's credentials are for the front only. A field x-api-key means Anthropic's dialect, so
# it is sent, but without a value.
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
REPLACED = CREDENTIALS | {b"host", b"content-length", b"expect"}
TRACE = b"traceparent"
CHUNKED = (b"transfer-encoding", b"chunked")


def write_head(
    replica: Replica,
    request: Request,
    path: str,
    key: str,
    carried: str,
    trace: str,
    size: int | None,
) -> bytes:
    """Return the head of a client's request for a replica. ``key`` is the cluster key, ``carried``
    tells the account, and ``trace`` replaces the client's traceparent unless it is "". The body has
    ``size`` bytes; None means that it is passed on as it arrives.
    """
    target = quote_path(path)
    query: bytes = request.scope["query_string"]
    if query:
        target += "?" + query.decode("latin-1")
    fields = list_fields(request, key, carried, trace)
    if size is None:
        length = request.headers.get("content-length")
        fields.append((b"content-length", length.encode()) if length else CHUNKED)
    elif size or request.method not in ("GET", "HEAD"):
        fields.append((b"content-length", b"%d" % size))
    return replica.client.write_head(request.method, target, fields)


def write_continuing_head(
    replica: Replica, request: Request, key: str, carried: str, trace: str, size: int
) -> bytes:
    """Return the head of the request for the rest of a stream, with a body of ``size`` bytes."""
    listed = list_fields(request, key, carried, trace)
    fields = [field for field in listed if field[0] != b"content-type"]
    fields.append((b"content-length", b"%d" % size))
    return replica.client.write_head("POST", CONTINUE_PATH, fields)


def list_fields(request: Request, key: str, carried: str, trace: str) -> list[tuple[bytes, bytes]]:
    """Return the header fields for a replica, except the length of the body."""
    fields = [
        (name, value)
        for name, value in drop_hop_by_hop(request.scope["headers"])
        if name not in REPLACED and not name.replace(b"_", b"-").startswith(OWN_FIELDS)
    ]
    if "x-api-key" in request.headers:
        fields.append((b"x-api-key", b""))
    ticket = TICKET.encode()
    fields = [
        (name, value.rpartition(b".")[2] if name == ticket else value) for name, value in fields
    ]
    if trace:
        fields = [*(field for field in fields if field[0] != TRACE), (TRACE, trace.encode())]
    return [
        *fields,
        (KEY_HEADER.encode(), key.encode()),
        (CARRIED_HEADER.encode(), carried.encode()),
        (PROGRESS_HEADER.encode(), b"1"),
    ]
