"""A replica continues a stream of another one if a front asks for it."""

from typing import Any

import msgspec
import pytest
from cluster.test_replica import FAKE, KEY, headers
from framed_streams import join_progress, read_events, read_frames

from cllm.server.cluster.continuation import CONTINUE_PATH

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 12,
    "stream": True,
    "temperature": 1.0,
}
PACK = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def replicas(start_server_once):
    """Two replicas with the same model."""
    return [start_server_once(*FAKE, CLLM_CLUSTER_KEY=KEY) for _ in range(2)]


def ask(replica, body=BODY, **more):
    answer = replica.client.post(CHAT, json=body, headers={**headers(), **more})
    assert answer.status_code == 200
    return answer


def continued(replica, frames, body=BODY, fields=None, **changes):
    """Return the answer of a replica that is asked to continue after ``frames``."""
    asked: dict[str, Any] = {
        "path": CHAT,
        "query": b"",
        "content_type": "application/json",
        "body": body if isinstance(body, bytes) else msgspec.json.encode(body),
        "progress": join_progress(frames),
        "elapsed": 0.1,
    }
    data = PACK(asked | changes)
    return replica.client.post(
        CONTINUE_PATH, content=data, headers=headers() if fields is None else fields
    )


def test_stream_has_frames_only_for_a_front_that_asks_for_them(replicas):
    plain = ask(replicas[0])
    assert "x-cllm-framed" not in plain.headers
    assert plain.text.startswith("data: ")
    without_key = replicas[0].client.post(CHAT, json=BODY, headers={"x-cllm-progress": "1"})
    assert without_key.text.startswith("data: ")
    framed = ask(replicas[0], **{"x-cllm-progress": "1"})
    assert framed.headers["x-cllm-framed"] == "1"
    assert b"".join(frame.data for frame in read_frames(framed.content)).startswith(b"data: ")


def test_another_replica_continues_with_the_same_text(replicas):
    frames = read_frames(ask(replicas[0], **{"x-cllm-progress": "1"}).content)
    whole = read_events(b"".join(frame.data for frame in frames))
    for cut in (1, 2, len(frames) // 2, len(frames) - 1):
        answer = continued(replicas[1], frames[:cut])
        assert (answer.status_code, answer.headers["x-cllm-framed"]) == (200, "1")
        rest = read_frames(answer.content)
        assert read_events(b"".join(one.data for one in [*frames[:cut], *rest])) == whole


def test_only_a_front_can_continue_streams(replicas):
    frames = read_frames(ask(replicas[0], **{"x-cllm-progress": "1"}).content)[:3]
    forged = {**headers(), "x-cllm-cluster-key": KEY + "x"}
    for fields in ({}, forged):
        assert continued(replicas[1], frames, fields=fields).status_code == 404


def test_stream_of_another_prompt_or_with_other_progress_is_refused(replicas):
    frames = read_frames(ask(replicas[0], **{"x-cllm-progress": "1"}).content)[:3]
    other = {**BODY, "messages": [{"role": "user", "content": "bye"}]}
    without_beginning = join_progress(frames[1:])
    of_choice_9 = PACK([[[9, 97]]])
    of_choice_9 = join_progress(frames) + len(of_choice_9).to_bytes(4) + of_choice_9
    bad: list[dict[str, Any]] = [
        {"body": msgspec.json.encode(other)},
        {"progress": join_progress(frames)[:-1]},
        {"progress": without_beginning},
        {"progress": b""},
        {"progress": of_choice_9},
    ]
    for changes in bad:
        answer = continued(replicas[1], frames, **changes)
        assert answer.status_code == 409, changes
        assert answer.json()["error"]["code"] == "cannot_continue"
    bad = [{"path": CONTINUE_PATH}, {"elapsed": -1.0}, {"body": b"{"}]
    for changes in bad:
        assert continued(replicas[1], frames, **changes).status_code == 400, changes


def test_deadline_counts_from_the_first_replica(replicas):
    body = {**BODY, "deadline_ms": 60_000}
    frames = read_frames(ask(replicas[0], body, **{"x-cllm-progress": "1"}).content)[:3]
    assert continued(replicas[1], frames, body).status_code == 200
    late = continued(replicas[1], frames, body, elapsed=61.0)
    assert b"deadline_exceeded" in late.content
