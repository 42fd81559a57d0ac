"""GET /models/sse at a front: the models of all replicas, each once."""

import signal

import pytest
from client_ledger import CONFIG
from cluster.conftest import FAKE, start_front
from server.test_model_events import is_status, read_events

from cllm.cluster.model_events import ModelEvents
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file


@pytest.mark.slow
@pytest.mark.llama
def test_listener_sees_a_load_on_any_replica_and_only_models_of_its_account(start_server, tmp_path):
    records = {
        "root": AccountRecord(keys=(Key(hash_key("root's key"), 0),), admin=True),
        "ann": AccountRecord(keys=(Key(hash_key("ann's key"), 0),), models=("large",)),
    }
    write_key_file(tmp_path / "keys.json", KeyFile(accounts=records))
    text = CONFIG.replace("small: {preload: true}", "small: {}")
    (tmp_path / "cllm.yaml").write_text(text)
    replicas = [start_server("--config", str(tmp_path / "cllm.yaml")) for _ in range(2)]
    only = start_server(*FAKE)  # it has another model, "fake"
    urls = [one.url for one in (*replicas, only)]
    front = start_front(start_server, *urls, CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"))
    root, ann = ({"authorization": f"Bearer {name}'s key"} for name in ("root", "ann"))
    assert front.client.get("/models/sse").status_code == 401
    with (
        front.client.stream("GET", "/models/sse", headers=root) as stream,
        front.client.stream("GET", "/models/sse", headers=ann) as other,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        seen = set()

        def has_all(event):
            seen.add(event["model"])
            return {"large", "small", "fake"} <= seen

        known = read_events(lines, has_all)
        assert len(known) == len(seen)  # each one once, although two replicas have it
        assert any(is_status(one, "large", "loaded") for one in known)
        assert any(is_status(one, "small", "unloaded") for one in known)
        body = {"model": "small", "prompt": "hello", "max_tokens": 3}
        for one in replicas:
            assert one.client.post("/v1/completions", json=body).status_code == 200
        events = read_events(lines, lambda one: is_status(one, "small", "loaded"))
        shares = [
            one["data"]["progress"]["value"] for one in events if is_status(one, "small", "loading")
        ]
        assert shares == sorted(shares)
        only.process.send_signal(signal.SIGTERM)
        gone = read_events(lines, lambda one: one["event"] == "model_remove")
        assert gone == [{"model": "fake", "event": "model_remove"}]
        seen_by_ann = read_events(other.iter_lines(), lambda one: one["model"] == "large")
        assert {one["model"] for one in seen_by_ann} == {"large"}


class NoReplicas:
    all = ()


def test_model_has_the_status_of_the_replica_that_has_loaded_most_of_it():
    events = ModelEvents(NoReplicas, None, lambda: False)
    states = [
        ('{"status": "unloaded"}', "unloaded"),
        ('{"status": "loading", "progress": {"value": 0.25}}', 0.25),
        ('{"status": "loading", "progress": {"value": 0.75}}', 0.75),
        ('{"status": "loading", "progress": {"value": 0.5}}', 0.75),
        ('{"status": "loaded"}', "loaded"),
        ('{"status": ["loaded"]}', "loaded"),  # no status, which is ignored
    ]
    for replica, (data, merged) in enumerate(states):
        event = f'{{"model": "m", "event": "model_status", "data": {data}}}'
        events._take(replica, event.encode())
        state = events._merge()["m"]
        assert state.get("progress", {}).get("value", state["status"]) == merged
    for replica in range(4):
        events._lose(replica)
    events._take(4, b'{"model": "m", "event": "model_remove"}')
    events._take(4, b"no event")
    assert events._merge() == {}


@pytest.mark.parametrize("data", ["{}", '{"model": 1}', "[]", "\xff", "[" * 100_000])
def test_event_of_another_form_is_ignored(data):
    """An exception would end the reading from that replica."""
    events = ModelEvents(NoReplicas, None, lambda: False)
    events._take(0, data.encode("latin-1"))
    assert not events._merge()
