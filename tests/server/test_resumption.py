"""Streams that a client has lost: it comes back for the rest of their events."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from client_ledger import write_accounts
from conftest import PATIENCE

from cllm.server.http import resumption
from cllm.server.http.resumption import EventReader, KeptStreams

FAKE = ("--backend.name", "fake", "--context", "4096")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, dict[str, object]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/completion": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12, "model": ""},
}


@pytest.fixture(scope="module")
def server(start_server_once, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_accounts(path)
    return start_server_once(*FAKE, CLLM_SERVER_KEYS_FILE=str(path))


def headers(name="ann", **more):
    return {"authorization": f"Bearer key of {name}", "x-cllm-resumable": "1", **more}


def split_events(text):
    """Return the ids and the data of the events of a stream."""
    events = []
    for part in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in part.splitlines())
        events.append((int(fields["id"]), fields["data"]))
    return events


def lose(server, path=CHAT, num_lines=6, **fields):
    """Begin a stream and lose it. Return its id, and the events that have come."""
    body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True} | fields
    text = ""
    with server.client.stream(
        "POST", path, json=body | {"stream": True}, headers=headers()
    ) as stream:
        for piece in stream.iter_text():
            text += piece
            if text.count("\n\n") >= num_lines:
                break
        whole = text.rpartition("\n\n")[0]
        return stream.headers["x-cllm-stream"], split_events(whole)


def resume(server, stream_id, name="ann", **more):
    params = {key: value for key, value in more.items() if key == "after"}
    given = {key: value for key, value in more.items() if key != "after"}
    return server.client.get(
        f"/v1/streams/{stream_id}", params=params, headers=headers(name, **given)
    )


def text_of(events):
    objects = [json.loads(data) for _, data in events if data != "[DONE]"]
    choices = [choice for one in objects for choice in one["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("named_by", ["after", "last-event-id"])
def test_lost_stream_goes_on_after_the_last_event(server, named_by):
    body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    whole = server.client.post(CHAT, json=body, headers=headers()).json()
    stream_id, events = lose(server, temperature=0)
    answer = resume(server, stream_id, **{named_by: str(events[-1][0])})
    assert answer.status_code == 200
    assert answer.headers["x-cllm-stream"] == stream_id
    events += split_events(answer.text)
    assert [number for number, _ in events] == [*range(1, len(events) + 1)]
    assert events[-1][1] == "[DONE]"
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    again = resume(server, stream_id)  # it is complete, and kept for a while
    assert split_events(again.text) == events


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_with_events_can_be_resumed(server, path):
    body: dict[str, object] = {"max_tokens": 12, **DIALECTS[path], "stream": True}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    if path == "/v1/messages":
        body["model"] = server.client.get("/v1/models", headers=headers()).json()["data"][0]["id"]
    answer = server.client.post(path, json=body, headers=headers())
    assert answer.status_code == 200, answer.text
    again = resume(server, answer.headers["x-cllm-stream"], after=1)
    assert answer.text.endswith(again.text)
    assert again.text.startswith("id: 2\n")


def test_stream_without_the_header_is_not_kept(server):
    known = headers()
    del known["x-cllm-resumable"]
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    answer = server.client.post(CHAT, json=body, headers=known)
    assert "x-cllm-stream" not in answer.headers
    assert "id: " not in answer.text
    assert resume(server, answer.headers["x-request-id"]).status_code == 404


def test_answer_that_is_no_stream_is_as_usual(server):
    answer = server.client.post(CHAT, json={"messages": MESSAGES}, headers=headers())
    assert answer.json()["object"] == "chat.completion"
    assert "x-cllm-stream" not in answer.headers
    assert server.client.post(CHAT, json={"messages": 7}, headers=headers()).status_code == 400


@pytest.mark.parametrize("name", ["bob", "root"])
def test_streams_of_other_accounts_do_not_exist(server, name):
    stream_id, _ = lose(server)
    for method in ("GET", "DELETE"):
        answer = server.client.request(method, f"/v1/streams/{stream_id}", headers=headers(name))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "stream_not_found"
    unknown = resume(server, "chatcmpl-unknown")
    assert unknown.json()["error"]["message"].startswith("There is no stream 'chatcmpl-unknown'")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"after": "99999"}, "after"),
        ({"last-event-id": "abc"}, "Last-Event-ID"),
        ({"after": "-1"}, "after"),
    ],
)
def test_event_that_does_not_exist_is_rejected(server, given, param):
    stream_id, _ = lose(server, max_tokens=20)
    answer = resume(server, stream_id, **given)
    assert answer.status_code in (400, 422)
    assert param in answer.text


def test_deleted_stream_ends(server):
    stream_id, _ = lose(server, max_tokens=3000)
    path = f"/v1/streams/{stream_id}"
    assert server.client.delete(path, headers=headers()).json() == {
        "id": stream_id,
        "deleted": True,
    }
    assert resume(server, stream_id).status_code == 404
    end = time.monotonic() + PATIENCE
    root = {"authorization": "Bearer key of root"}
    while server.client.get("/model/info", headers=root).json()["stats"]["num_running"]:
        assert time.monotonic() < end
        time.sleep(0.02)


# --- without a server ----------------------------------------------------------------------------


class Client:
    """A client of an ASGI application, which goes when ``leave`` is called."""

    def __init__(self):
        self.left = asyncio.Event()
        self.data = b""

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.data += message.get("body", b"")


def test_stream_without_a_reader_is_abandoned_in_time():
    async def test():
        streams = KeptStreams(keep_seconds=0.05)
        stream = streams.add("a", "ann", [])
        client = Client()
        reading = asyncio.create_task(
            EventReader(streams, stream, 0)({}, client.receive, client.send)
        )
        stream.put(b"data: 1\n\n: ping\n\ndata: 2\n\n")
        await asyncio.sleep(0.2)
        assert not stream.abandoned.is_set()
        assert client.data == b"id: 1\ndata: 1\n\nid: 2\ndata: 2\n\n"
        client.left.set()
        await reading
        await asyncio.wait_for(stream.abandoned.wait(), PATIENCE)
        assert streams.find("a", "ann") is None

    asyncio.run(test())


def test_only_the_latest_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(resumption, "MAX_BYTES", 100)

    async def test():
        streams = KeptStreams()
        stream = streams.add("a", "ann", [])
        for number in range(1000):
            stream.put(b"data: %d\n\n" % number)
        assert stream.num_events == 1000
        assert 1000 - 20 < stream.first < 1000
        assert stream.read(998) == b"id: 999\ndata: 998\n\nid: 1000\ndata: 999\n\n"

    asyncio.run(test())


def test_number_of_streams_is_limited(monkeypatch):
    monkeypatch.setattr(resumption, "MAX_STREAMS", 3)
    monkeypatch.setattr(resumption, "MAX_OF_ACCOUNT", 2)

    async def test():
        streams = KeptStreams()
        first = streams.add("a", "ann", [])
        assert streams.add("b", "ann", []) is not None
        assert streams.add("c", "ann", []) is None  # of this account
        assert streams.add("d", "bob", []) is not None
        assert streams.add("e", "cat", []) is None  # of all
        first.finish()
        assert streams.add("f", "cat", []) is not None
        assert streams.find("a", "ann") is None

    asyncio.run(test())
