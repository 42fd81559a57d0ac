"""What a server offers to the fronts of its cluster: a lease, to those that have the cluster key."""

import stat
from pathlib import Path

import httpx2
import msgspec
import pytest
from starlette.datastructures import Headers

from cllm.config.settings import Settings
from cllm.core.account import Account
from cllm.core.carried import Carried, encode_carried
from cllm.errors import StartupError
from cllm.server.auth import CARRIED_HEADER
from cllm.server.cluster.key import KEY_HEADER, ClusterKey
from cllm.server.cluster.lease import LEASE_PATH, Lease, ReplicaIdentity
from cllm.server.cluster.recent_prefixes import MAX_REQUESTS, RecentPrefixes

KEY = "a-key-of-a-cluster"
FAKE = ["--backend.name", "fake", "--max-num-seqs", "4", "--model.aliases", "other,gpt-*"]


def read_lease(server, key: str = KEY, **query: str | int) -> Lease:
    answer = server.client.get(LEASE_PATH, params=query, headers={KEY_HEADER: key})
    assert answer.status_code == 200
    return msgspec.json.decode(answer.content, type=Lease)


def test_lease_describes_models_and_name_outlives_a_restart(start_server, tmp_path):
    storage = ["--storage.folder", str(tmp_path)]
    first = start_server(*FAKE, *storage, CLLM_CLUSTER_KEY=KEY)
    lease = read_lease(first)
    assert lease.status == "ready"
    (model,) = lease.models
    assert (model.name, model.aliases, model.task) == ("fake", ["other", "gpt-*"], "chat")
    assert model.is_loaded
    assert (model.max_num_seqs, model.num_running, model.num_waiting) == (4, 0, 0)
    assert read_lease(first).epoch == lease.epoch
    first.stop()
    again = read_lease(start_server(*FAKE, *storage, CLLM_CLUSTER_KEY=KEY))
    assert again.name == lease.name
    assert again.epoch != lease.epoch


def test_lease_needs_the_cluster_key_and_its_exact_path(start_server):
    server = start_server(*FAKE, CLLM_CLUSTER_KEY=KEY, CLLM_API_KEY="sk-user")
    assert read_lease(server).models
    user = {"authorization": "Bearer sk-user"}
    with_key = {KEY_HEADER: KEY, **user}
    assert server.client.get(LEASE_PATH).status_code == 401
    for headers in (user, {**user, KEY_HEADER: KEY[:-1]}, {**user, KEY_HEADER: ""}):
        assert server.client.get(LEASE_PATH, headers=headers).status_code == 404
    for path in ("//internal/lease", "/v1/internal/lease", "/internal/lease/", "/INTERNAL/lease"):
        assert server.client.get(path, headers=with_key).status_code == 404
    # the key alone is no API key
    assert server.client.get("/v1/models", headers={KEY_HEADER: KEY}).status_code == 401


def test_lease_names_the_prefixes_that_other_fronts_have_sent(start_server):
    server = start_server(*FAKE, CLLM_CLUSTER_KEY=KEY)
    before = read_lease(server, front="c")
    for front, names in (("a", [1, 2**64 - 1]), ("b", [3])):
        carried = Carried(Account("me"), Account("me"), front=front, prefixes=names)
        headers = {KEY_HEADER: KEY, CARRIED_HEADER: encode_carried(carried)}
        body = {"prompt": "Hello", "max_tokens": 1}
        server.client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    assert read_lease(server, front="c").prefixes == [[1, 2**64 - 1], [3]]
    lease = read_lease(server, front="a", epoch=before.epoch, after=before.num_noted)
    assert (lease.prefixes, lease.num_noted) == ([[3]], before.num_noted + 2)
    again = {"front": "c", "after": lease.num_noted}
    assert read_lease(server, epoch=lease.epoch, **again).prefixes == []
    assert len(read_lease(server, epoch="another", **again).prefixes) == 2, "after a restart"


def test_only_the_last_requests_are_remembered():
    recent = RecentPrefixes()
    for number in range(MAX_REQUESTS + 5):
        recent.note(Carried(Account("me"), Account("me"), front="a", prefixes=[number]))
    assert recent.list_others("b", 0) == [[number] for number in range(5, MAX_REQUESTS + 5)]
    assert recent.list_others("b", MAX_REQUESTS + 3) == [[MAX_REQUESTS + 3], [MAX_REQUESTS + 4]]
    assert recent.list_others("a", 0) == []
    assert recent.list_others("b", 10**9) == []


def test_server_without_a_cluster_key_has_no_lease(fake_server):
    for key in ("", "x", KEY):
        answer = httpx2.get(fake_server.url + LEASE_PATH, headers={KEY_HEADER: key})
        assert answer.status_code == 404


def test_key_file_is_private_and_followed_by_those_that_did_not_create_it(home: Path):
    settings = Settings()
    replica, front = ClusterKey(settings), ClusterKey(settings)
    assert replica.find() == ""
    assert not replica.is_sent_in(Headers({KEY_HEADER: ""}))
    key = front.find_or_create()
    assert len(key) > 40
    assert stat.S_IMODE(front.path.stat().st_mode) == 0o600
    assert replica.find() == key == front.find_or_create()
    assert replica.is_sent_in(Headers({KEY_HEADER: key}))
    assert not replica.is_sent_in(Headers({KEY_HEADER: key + "\xff"}))
    front.path.write_text("short\n")
    assert replica.find() == ""
    with pytest.raises(StartupError, match="needs at least 16 characters"):
        front.find_or_create()


def test_short_key_in_the_settings_is_rejected():
    with pytest.raises(StartupError, match="at least 16"):
        ClusterKey(Settings.model_validate({"cluster": {"key": "short"}}))


def test_servers_with_one_storage_folder_have_two_names(tmp_path: Path):
    folder = str(tmp_path / "state")
    first, second = ReplicaIdentity(folder), ReplicaIdentity(folder)
    assert first.name == first.name != second.name
    assert ReplicaIdentity(None).name != ReplicaIdentity(None).name
