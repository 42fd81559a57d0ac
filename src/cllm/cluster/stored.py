"""Finds out on which replica a request must be answered, because of what it names."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cllm.core.stored_ids import find_replica
from cllm.errors import BadRequest

STORED_PATHS = re.compile(
    r"/v1/(?P<kind>responses|files|batches|messages/batches)/(?P<id>[^/]+)(?:/[a-z_]+)?"
)
NOUNS = {
    "responses": ("response", "response_id"),
    "files": ("file", "file_id"),
    "batches": ("batch", "batch_id"),
    "messages/batches": ("batch", "batch_id"),
}


class NamingBody(msgspec.Struct):
    """The fields of request bodies that name stored data."""

    previous_response_id: Any = None
    input_file_id: Any = None
    input: Any = None


class StoredName:
    """What a request names: the id of something stored, and the field that has it."""

    def __init__(self, stored_id: str, noun: str, param: str) -> None:
        self.id = stored_id
        self.noun = noun
        self.param = param
        self.replica = find_replica(stored_id)

    def gone(self) -> BadRequest:
        """Return the error for a replica that is not running."""
        message = (
            f"The {self.noun} {self.id[:100]!r} cannot be found: it is stored on the replica "
            f"{self.replica!r}, which is not running."
        )
        return BadRequest(message, param=self.param, code="replica_gone", status=404)


def find_stored(path: str, body: bytes) -> StoredName | None:
    """Return what a request names, if it is stored on a certain replica."""
    found = STORED_PATHS.fullmatch(path)
    if found is not None:
        noun, param = NOUNS[found["kind"]]
        if (name := name_field(found["id"], noun, param)) is not None:
            return name
    if path.rstrip("/") == "/v1/batches":
        return name_field(read_fields(body).input_file_id, "file", "input_file_id")
    if path.startswith("/v1/responses"):
        return find_in_response(body)
    return None


def find_in_response(body: bytes) -> StoredName | None:
    """Return the stored response that the body of a response continues or refers to."""
    if b'"previous_response_id"' not in body and b'"item_reference"' not in body:
        return None
    fields = read_fields(body)
    name = name_field(fields.previous_response_id, "response", "previous_response_id")
    if name is None and isinstance(fields.input, list):
        for item in fields.input:
            if isinstance(item, dict) and item.get("type") == "item_reference":
                name = name or name_field(item.get("id"), "item", "input")
    return name


def name_field(value: Any, noun: str, param: str) -> StoredName | None:
    if not isinstance(value, str):
        return None
    name = StoredName(value, noun, param)
    return name if name.replica else None


def read_fields(body: bytes) -> NamingBody:
    """Return the fields of a body. One that is not valid names nothing; the replica rejects it."""
    try:
        return msgspec.json.decode(body, type=NamingBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NamingBody()
