"""GET /models/sse: the status of models and the progress of their loads."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from client_ledger import CONFIG

from cllm.cli.loading import follow, read_share
from cllm.server.llama_server.model_events import describe_models, write_events
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file


def read_events(lines, until):
    """Return the events of a stream up to the first one for which ``until`` is true."""
    events = []
    for line in lines:
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            if until(events[-1]):
                return events
    raise AssertionError(events)


def is_status(event, model, status):
    return event["model"] == model and event.get("data", {}).get("status") == status


@pytest.fixture
def server(start_server, tmp_path):
    """A server of two models, one of which is loaded; ann may use only that one."""
    records = {
        "root": AccountRecord(keys=(Key(hash_key("root's key"), 0),), admin=True),
        "ann": AccountRecord(keys=(Key(hash_key("ann's key"), 0),), models=("large",)),
    }
    write_key_file(tmp_path / "keys.json", KeyFile(accounts=records))
    text = CONFIG.replace("small: {preload: true}", "small: {}")
    (tmp_path / "cllm.yaml").write_text(text)
    return start_server(
        "--config",
        str(tmp_path / "cllm.yaml"),
        CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"),
    )


def test_listener_sees_a_model_being_loaded_and_only_models_of_its_account(server):
    root, ann = ({"authorization": f"Bearer {name}'s key"} for name in ("root", "ann"))
    with (
        server.client.stream("GET", "/models/sse", headers=root) as stream,
        server.client.stream("GET", "/models/sse", headers=ann) as other,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        known = read_events(lines, lambda one: is_status(one, "small", "unloaded"))
        assert any(is_status(one, "large", "loaded") for one in known)
        body = {"model": "small", "prompt": "hello", "max_tokens": 3}
        assert server.client.post("/v1/completions", json=body, headers=root).status_code == 200
        events = read_events(lines, lambda one: is_status(one, "small", "loaded"))
        loading = [one["data"] for one in events if is_status(one, "small", "loading")]
        assert loading
        assert loading[0]["progress"].keys() == {"stages", "current", "value"}
        assert loading[0]["progress"]["current"] in loading[0]["progress"]["stages"]
        seen = read_events(other.iter_lines(), lambda one: is_status(one, "large", "loaded"))
        assert {one["model"] for one in seen} == {"large"}
    # a server that shuts down ends the streams: the fixture checks that it ends in time


def model(name, status, share=0.0):
    return SimpleNamespace(name=name, status=status, loaded_share=share)


def test_events_tell_each_change_once():
    states = [
        [model("a", "unloaded")],
        [model("a", "loading")],
        [model("a", "loading", 0.5)],
        [model("a", "loading", 0.5)],
        [model("a", "loaded"), model("b", "unloaded")],
        [model("b", "unloaded")],
    ]
    left = iter([*states, None])

    async def collect():
        state = next(left)

        def advance():
            nonlocal state
            now, state = state, next(left)
            return now

        written = write_events(
            lambda: describe_models(advance()), lambda: state is None, interval=0
        )
        return [data async for data in written]

    text = b"".join(asyncio.run(collect())).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    brief = [
        (one["model"], one["event"], one.get("data", {}).get("progress", {}).get("value"))
        for one in events
    ]
    assert brief == [
        ("a", "model_status", None),
        ("a", "model_status", 0.0),
        ("a", "model_status", 0.5),
        ("*", "models_reload", None),
        ("a", "model_status", None),
        ("b", "model_status", None),
        ("a", "model_remove", None),
    ]


class Bar:
    def __init__(self):
        self.shares = []

    def update(self, share, text=""):
        self.shares.append(share)


class Client:
    """Answers every request with the same lines."""

    def __init__(self, *lines, status=200):
        self.lines, self.status_code = lines, status

    def stream(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def iter_lines(self):
        yield from self.lines


def status_line(name, status, value=None):
    data = {"status": status} | ({} if value is None else {"progress": {"value": value}})
    return "data: " + json.dumps({"model": name, "event": "model_status", "data": data})


def test_bar_follows_the_load_of_one_model():
    client = Client(
        ": ping",
        status_line("other", "loading", 0.9),
        status_line("m", "loading", 0.25),
        "",
        status_line("m", "loading", 0.75),
        status_line("m", "loaded"),
        status_line("m", "loading", 0.1),
    )
    bar = Bar()
    follow(client, "m", bar, threading.Event())
    assert bar.shares == [0.25, 0.75, 1.0]


@pytest.mark.parametrize("line", ["data: {", "data: []", 'data: {"model": "m"}', "data"])
def test_bar_ignores_servers_with_other_events(line):
    bar = Bar()
    follow(Client(line), "m", bar, threading.Event())
    follow(Client(status_line("m", "loading", 0.5), status=404), "m", bar, threading.Event())
    assert bar.shares == []


def test_line_of_another_event_has_no_share():
    assert read_share('data: {"model": "m", "event": "model_remove"}', "m") is None
