"""Stores responses in memory, so that requests can continue from them.

The least recently used are removed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_core import from_json, to_json

from cllm.core.account import Account
from cllm.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Stored:
    """A response of the account ``account``, and the ``items`` of its request's input.

    Both are JSON, so that their size is known. ``item_ids`` are the ids of the output items, by
    which an item_reference finds them.
    """

    account: str
    response: bytes
    items: bytes
    previous_id: str | None
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = from_json(self.response)["output"]
        return items


class ResponseStore:
    """At most ``max_count`` responses in ``max_bytes``. Each is visible only to its account."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0
        self._response_ids: dict[str, str] = {}  # output item id -> response id

    def add(self, account: Account, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store ``response``, unless it alone is too large.

        The least recently used ones make room.
        """
        item_ids = tuple(item["id"] for item in response["output"])
        stored = Stored(
            account.name,
            msgspec.json.encode(response),
            to_json(items),
            response["previous_response_id"],
            item_ids,
        )
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        self._response_ids |= dict.fromkeys(item_ids, response["id"])
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self._num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._response_ids[item_id]

    def get(self, response_id: str, account: Account, param: str = "response_id") -> Stored:
        """Return a response.

        Raises BadRequest (404) if it does not exist or belongs to another account.
        """
        stored = self._stored.get(response_id)
        if stored is None or stored.account != account.name:
            raise BadRequest(
                f"The response {response_id[:100]!r} was not found: it was not stored, was "
                f"deleted, or was removed to make room for newer ones (at most "
                f"{self._max_count} responses and {self._max_bytes} bytes are kept in memory).",
                param=param,
                code="response_not_found",
                status=404,
            )
        return stored

    def has(self, stored_id: str, account: Account) -> bool:
        """Return whether a response of ``account``, or an item in the output of one, is stored."""
        response_id = self._response_ids.get(stored_id, stored_id)
        stored = self._stored.get(response_id)
        return stored is not None and stored.account == account.name

    def delete(self, response_id: str, account: Account) -> None:
        """Delete a response. Raises BadRequest (404) as ``get`` does."""
        self.get(response_id, account)
        self._remove(response_id)

    def find_by_items(self, item_ids: Iterable[str], account: Account) -> list[Stored]:
        """Return the responses of ``account`` whose output has an item with one of these ids.

        They count as used.
        """
        response_ids = dict.fromkeys(self._response_ids.get(item_id, "") for item_id in item_ids)
        return [
            self._use(name)
            for name in response_ids
            if name in self._stored and self._stored[name].account == account.name
        ]

    def find_conversation(
        self, response_id: str | None, account: Account, param: str = "previous_response_id"
    ) -> list[Stored]:
        """Return a response and all those before it, oldest first. They count as used.

        Raises BadRequest (404) if one of them does not exist.
        """
        response_ids: list[str] = []
        while response_id is not None:
            response_ids.append(response_id)
            response_id = self.get(response_id, account, param).previous_id
        return [self._use(name) for name in reversed(response_ids)]

    def _use(self, response_id: str) -> Stored:
        self._stored.move_to_end(response_id)
        return self._stored[response_id]


def list_items(turns: list[Stored]) -> list[dict[str, Any]]:
    """Return all input and output items of ``turns``."""
    return [item for turn in turns for item in (*from_json(turn.items), *turn.output())]
