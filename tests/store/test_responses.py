"""Stored responses: limits, and the history of a conversation."""

import pytest
from store_parts import OWN

from cllm.core.account import Account
from cllm.errors import BadRequest
from cllm.store.responses import ResponseStore, list_items


def add(store, name, previous=None, text="x"):
    store.add(
        OWN,
        {"id": name, "previous_response_id": previous, "output": [{"id": f"msg_{name}"}]},
        [{"t": text}],
    )


def test_responses_are_limited_in_bytes():
    store = ResponseStore(100, 1000)
    for i in range(20):
        add(store, str(i), text="x" * 100)
    with pytest.raises(BadRequest, match="1000 bytes"):
        store.get("0", OWN)
    kept = [str(i) for i in range(20) if str(i) in store._stored]
    assert kept == [str(i) for i in range(20 - len(kept), 20)]
    assert (
        0 < sum(stored.num_bytes for stored in store._stored.values()) == store._num_bytes <= 1000
    )
    add(store, "huge", text="x" * 2000)
    assert [*store._stored] == kept, "one that is too large removes no others"
    assert store._response_ids == {f"msg_{name}": name for name in kept}


def test_history_with_a_missing_response_raises_an_error():
    store = ResponseStore(3, 10_000)
    add(store, "a")
    add(store, "b", "a")
    assert list_items(store.find_conversation("b", OWN)) == [
        {"t": "x"},
        {"id": "msg_a"},
        {"t": "x"},
        {"id": "msg_b"},
    ]
    store.delete("a", OWN)
    with pytest.raises(BadRequest, match="'a' was not found"):
        store.find_conversation("b", OWN)
    with pytest.raises(BadRequest):
        store.find_conversation("b", Account("another"))


def test_least_recently_used_responses_are_removed_first():
    store = ResponseStore(2, 10_000)
    add(store, "a")
    add(store, "b")
    assert store.find_by_items(["msg_a", "msg_x"], OWN) == [store.get("a", OWN)]
    add(store, "c")
    assert store.get("a", OWN)
    with pytest.raises(BadRequest, match="at most 2 responses"):
        store.get("b", OWN)


def test_items_are_found_by_their_account_only():
    store = ResponseStore(2, 10_000)
    add(store, "a")
    assert store.find_by_items(["msg_a"], Account("another")) == []
    with pytest.raises(BadRequest, match="not found") as caught:
        store.get("a", Account("another"))
    assert caught.value.status == 404
