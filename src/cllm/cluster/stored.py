"""Finds out on which replica a request must be answered, because of what it names."""

from __future__ import annotations

import re
from typing import Any

from cllm.cluster.body import Fields
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


class StoredName:
    """What a request names: the id of something stored, and the field that has it."""

    def __init__(self, stored_id: str, noun: str, param: str) -> None:
        self.id = stored_id
        self.noun = noun
        self.param = param
        self.replica = find_replica(stored_id)

    @property
    def is_item(self) -> bool:
        """Whether it is an item of a response."""
        return self.noun == "item"

    @property
    def may_move(self) -> bool:
        """Whether it is stored on another replica if that one has continued the stream with it."""
        return self.is_item or self.noun == "response"

    def gone(self) -> BadRequest:
        """Return the error for a replica that is not running."""
        message = (
            f"The {self.noun} {self.id[:100]!r} cannot be found: it is stored on the replica "
            f"{self.replica!r}, which is not running."
        )
        return BadRequest(message, param=self.param, code="replica_gone", status=404)


def find_stored(path: str, fields: Fields) -> StoredName | None:
    """Return what a request names, if it is stored on a certain replica."""
    found = STORED_PATHS.fullmatch(path)
    if found is not None:
        noun, param = NOUNS[found["kind"]]
        if (name := name_field(found["id"], noun, param)) is not None:
            return name
    if path.rstrip("/") == "/v1/batches":
        return name_field(fields.input_file_id, "file", "input_file_id")
    if path.startswith("/v1/responses"):
        return find_in_response(fields)
    return None


def find_in_response(fields: Fields) -> StoredName | None:
    """Return the stored response that the body of a response continues or refers to."""
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
