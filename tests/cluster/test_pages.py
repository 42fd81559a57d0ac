"""Lists of what an account has stored on three replicas, in pages: nothing is lost, twice or in the
wrong order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from cluster.conftest import FAKE, KEY, start_front
from server.conftest import Server

from cllm.core.account import Account
from cllm.core.carried import Carried, encode_carried
from cllm.core.stored_ids import find_replica
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PATHS = ("/v1/files", "/v1/batches", "/v1/messages/batches")
COUNT = 23  # entries of each list on each replica: more than a page of 20
PAGE = 7


def name_account(path: str) -> str:
    """Return the account of a list. Each has one, because batches write files."""
    return path.replace("/", "")


class Cluster:
    """A front with three replicas, on which accounts have stored something in turn."""

    def __init__(self, start: Callable[..., Server], keys: str) -> None:
        self.replicas = [start(*FAKE) for _ in range(3)]
        urls = [one.url for one in self.replicas]
        self.front = start_front(start, *urls, CLLM_SERVER_KEYS_FILE=keys)
        lease = {"x-cllm-cluster-key": KEY}
        self.names = [
            one.client.get("/internal/lease", headers=lease).json()["name"] for one in self.replicas
        ]
        self.created: dict[str, list[str]] = {
            path: [self.create(path, number % 3) for number in range(3 * COUNT)] for path in PATHS
        }

        self.stored_at = int(time.time())

    def create(self, path: str, number: int) -> str:
        """Store something on a replica. Return its id."""
        account = Account(name_account(path), has_key=True, is_carried=True)
        carried = Carried(account, account, replica=self.names[number])
        headers = {"x-cllm-cluster-key": KEY, "x-cllm-account": encode_carried(carried)}
        client = self.replicas[number].client

        def upload(owner: str) -> str:
            line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": MESSAGES}
            file = {"file": ("in.jsonl", json.dumps(line).encode())}
            data = {"purpose": "batch"}
            return client.post("/v1/files", files=file, data=data, headers=headers).json()["id"]

        if path == "/v1/files":
            return upload(path)
        body: dict[str, Any]
        if path == "/v1/batches":
            body = {"input_file_id": upload(path), "endpoint": CHAT, "completion_window": "24h"}
        else:
            body = {"requests": [{"custom_id": "a", "params": {"model": "fake", **MESSAGES}}]}
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def list(self, path: str, **query: Any) -> Any:
        headers = {"authorization": f"Bearer {name_account(path)}"}
        answer = self.front.client.get(path, params=query, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def cluster(start_server_once, tmp_path_factory):
    path = tmp_path_factory.mktemp("front") / "keys.json"
    names = map(name_account, PATHS)
    accounts = {name: AccountRecord(keys=(Key(hash_key(name), 0),)) for name in names}
    write_key_file(path, KeyFile(accounts=accounts))
    return Cluster(start_server_once, str(path))


def check_order(entries: list[dict[str, Any]], created: list[str]) -> None:
    """Check that ``entries`` are those ``created``, newest first. Those of the same second may have
    any order, unless they are on the same replica.
    """
    ids = [entry["id"] for entry in entries]
    assert sorted(ids) == sorted(created)
    assert all(first["created_at"] >= last["created_at"] for first, last in pairwise(entries))
    for replica in {*map(find_replica, created)}:
        of_replica = [one for one in created if find_replica(one) == replica]
        assert [one for one in ids if find_replica(one) == replica] == of_replica[::-1]


@pytest.mark.parametrize("path", PATHS)
def test_pages_forward_have_every_entry_once_in_order(cluster, path):
    """Also if something is stored meanwhile, which is newer."""
    created = [*cluster.created[path]]
    cursor = "after_id" if "messages" in path else "after"
    seen: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": PAGE}
    while True:
        page = cluster.list(path, **query)
        seen += page["data"]
        assert page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][-1]["id"]
        if not page["has_more"]:
            break
        assert len(page["data"]) == PAGE
        if len(seen) == 2 * PAGE:
            # entries of one second have no order over several replicas
            while int(time.time()) <= cluster.stored_at:
                time.sleep(0.01)
            cluster.created[path].append(cluster.create(path, 1))
        query[cursor] = page["last_id"]
    check_order(seen, created)


@pytest.mark.parametrize("path", PATHS)
def test_page_without_a_limit_has_the_usual_length(cluster, path):
    created = cluster.created[path]
    page = cluster.list(path)
    if path == "/v1/files":
        assert page["has_more"] is False
        check_order(page["data"], created)
    else:
        assert (len(page["data"]), page["has_more"]) == (20, True)
        whole = cluster.list(path, limit=100)
        assert whole["has_more"] is False
        check_order(whole["data"], created)
        ids = [[entry["id"] for entry in one["data"]] for one in (page, whole)]
        assert ids[0] == ids[1][:20]


def test_pages_backward_have_every_entry_once_in_order(cluster):
    path = "/v1/messages/batches"
    whole = cluster.list(path, limit=1000)["data"]
    seen, before = whole[-1:], whole[-1]["id"]
    while True:
        page = cluster.list(path, limit=PAGE, before_id=before)
        seen = page["data"] + seen
        if not page["has_more"]:
            break
        before = page["first_id"]
    assert [one["id"] for one in seen] == [one["id"] for one in whole]


def test_oldest_files_come_first_if_that_is_asked_for(cluster):
    seen: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": PAGE, "order": "asc"}
    while True:
        page = cluster.list("/v1/files", **query)
        seen += page["data"]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    check_order(seen[::-1], cluster.created["/v1/files"])
