"""Replicas that end within a stream, at any byte: what their front asks the others, and what clients
get.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cluster.test_failures import CHAT, CHAT_PATH, Cluster
from cluster.test_replay import ENDING, FAULT, ORIGIN, token, write
from conftest import repeat
from fake_replica import DONE, Received, answer, chunk, sends, stream_head
from server.conftest import starter

from cllm.server.cluster.continuation import CONTINUE_PATH, Continue
from cllm.server.http.sse import HEARTBEAT_BYTES
from cllm.serving.delivered import Progress, split_progress

TOKENS = [1, 2, 3, 4]
HEAD = stream_head().replace(b"transfer-encoding", b"x-cllm-framed: 1\r\ntransfer-encoding")
BEGIN = write(origin=ORIGIN)
END = write(ending=ENDING, data=DONE)
LAST = b"0\r\n\r\n"


def data_of(number: int) -> bytes:
    return b"data: %d\n\n" % number


def frame_of(number: int) -> bytes:
    return write(token(number), data=data_of(number))


WHOLE = b"".join(map(data_of, TOKENS)) + DONE


def read_delivered(request: Received) -> list[int]:
    """Return the tokens after which a replica is asked to continue."""
    if CONTINUE_PATH not in request.line:
        return []
    asked = msgspec.msgpack.decode(request.body, type=Continue)
    assert (asked.path, msgspec.json.decode(asked.body)["stream"]) == (CHAT_PATH, True)
    parts = split_progress(asked.progress)
    decoded = [msgspec.msgpack.decode(part, type=Progress) for part in parts]
    return [output.token for one in decoded for output in one.outputs]


def continues(connection: socket.socket, request: Received) -> None:
    """Send what follows what was delivered."""
    delivered = read_delivered(request)
    assert delivered == TOKENS[: len(delivered)]
    rest = b"".join(map(frame_of, TOKENS[len(delivered) :]))
    connection.sendall(HEAD + chunk(BEGIN + rest + END) + LAST)


def cut_after(*numbers: int) -> Any:
    """Send tokens, and close the connection."""
    return sends(HEAD + chunk(BEGIN + b"".join(map(frame_of, numbers))))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    starting = starter()
    made = Cluster(next(starting), 3, "--cluster.continue-seconds", "1")
    yield made
    made.close()
    next(starting, None)


def ask(cluster: Cluster, *steps: Any) -> bytes:
    for one in cluster.replicas:
        one.received.clear()
    cluster.next_steps(*steps)
    got = cluster.post(**CHAT, stream=True)
    assert got.status_code == 200
    assert "x-cllm-framed" not in got.headers
    return bytes(got.content.replace(HEARTBEAT_BYTES, b""))


@pytest.mark.slow
def test_client_gets_all_bytes_once_wherever_the_connection_is_cut(cluster):
    frames = BEGIN + b"".join(map(frame_of, TOKENS)) + END
    cuts = range(0, len(frames), repeat(1, 3))
    for cut in cuts:
        data = ask(cluster, sends(HEAD + chunk(frames[:cut]) if cut else HEAD), continues)
        assert data == WHOLE, f"cut after {cut} of {len(frames)} bytes"
        assert len(cluster.received()) == 2


def test_replica_that_cannot_continue_or_is_busy_is_passed_over(cluster):
    other_model = answer(409, {"error": "another model"})
    assert ask(cluster, cut_after(1, 2), other_model, continues) == WHOLE
    assert sorted(cluster.received()) == ["a", "b", "c"]
    assert ask(cluster, cut_after(1, 2), answer(503), answer(503), answer(503), continues) == WHOLE
    assert len(cluster.received()) == 5


def test_stream_continues_although_two_replicas_ended_without_a_token(cluster):
    """None of them is asked again. If all have ended, the stream does too."""
    ends = sends(HEAD + chunk(BEGIN))
    assert ask(cluster, cut_after(1, 2), ends, continues) == WHOLE
    assert sorted(cluster.received()) == ["a", "b", "c"]
    before = cluster.metric("cut_streams_total")
    data = ask(cluster, cut_after(1, 2), ends, ends, continues)
    assert data.startswith(data_of(1) + data_of(2) + b'data: {"error"')
    assert data.endswith(DONE)
    assert sorted(cluster.received()) == ["a", "b", "c"]
    assert cluster.metric("cut_streams_total") == before + 1
    assert ask(cluster, cut_after(1), cut_after(2), cut_after(3), continues) == WHOLE


def test_error_of_a_replica_is_shown_only_if_no_other_continues(cluster):
    failed = write(ending=FAULT, data=b"data: failed\n\n")
    fails = sends(HEAD + chunk(BEGIN + frame_of(1) + failed) + LAST, closes=False)
    assert ask(cluster, fails, continues) == WHOLE
    refuses = answer(409, {"error": "another model"})
    assert ask(cluster, fails, refuses, refuses) == data_of(1) + b"data: failed\n\n"


def test_stream_that_is_no_frames_ends_with_an_error(cluster):
    nonsense = HEAD + chunk(BEGIN + frame_of(1) + b"\x00\x00\x00\x01\x00\x00\x00\x00\xc1")
    assert ask(cluster, sends(nonsense), continues) == WHOLE
    refuses = answer(409, {"error": "another model"})
    data = ask(cluster, sends(nonsense), refuses, refuses)
    assert data.startswith(data_of(1) + b'data: {"error"')
