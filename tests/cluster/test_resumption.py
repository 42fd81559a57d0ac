"""Streams through a front that a client has lost: it comes back for the rest of their events."""

import signal

import pytest
from client_ledger import write_accounts
from cluster.conftest import FAKE, start_front
from server.test_resumption import CHAT, MESSAGES, headers, lose, resume, split_events, text_of

pytestmark = [pytest.mark.slow, pytest.mark.llama]
BODY = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def cluster(start_server, tmp_path):
    """A front with accounts, and its two replicas, whose steps take a while."""
    write_accounts(tmp_path / "keys.json")
    replicas = [start_server(*FAKE, "--server.enable-faults") for _ in range(2)]
    slow = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.01}
    for one in replicas:
        one.client.post("/faults", json={"faults": [slow]})
    urls = [one.url for one in replicas]
    front = start_front(start_server, *urls, CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"))
    return front, replicas


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_lost_stream_goes_on_although_its_replica_is_killed(cluster, path):
    front, replicas = cluster
    given = {"input": "hello", "messages": None} if path != CHAT else {}
    stream_id, events = lose(front, path, temperature=0, **given)
    busy = next(one for one in replicas if one.stats()["num_running"])
    busy.stop(signal.SIGKILL)
    answer = resume(front, stream_id, after=events[-1][0])
    assert answer.status_code == 200
    events += split_events(answer.text)
    assert [number for number, _ in events] == [*range(1, len(events) + 1)]
    metrics = front.client.get("/metrics", headers=headers("root")).text
    assert "\ncllm:front_continued_streams_total 1.0\n" in metrics
    if path == CHAT:
        whole = front.client.post(CHAT, json=BODY, headers=headers()).json()
        assert text_of(events) == whole["choices"][0]["message"]["content"]
    else:
        assert '"response.incomplete"' in events[-1][1]  # it has as many tokens as it may have
    assert split_events(resume(front, stream_id).text) == events  # it is kept for a while


def test_log_line_of_a_resumable_stream_is_complete(cluster):
    front, _ = cluster
    body = BODY | {"max_tokens": 7, "stream": True}
    assert front.client.post(CHAT, json=body, headers=headers()).headers["x-cllm-stream"]
    front.stop()
    [line] = front.find_lines(f"POST {CHAT} 200")
    assert " outcome=finished " in line
    assert " output_tokens=7 " in line


def test_only_its_account_can_resume_or_end_a_stream(cluster):
    front, replicas = cluster
    stream_id, _ = lose(front)
    assert resume(front, stream_id, name="bob").status_code == 404
    path = f"/v1/streams/{stream_id}"
    assert front.client.delete(path, headers=headers("bob")).status_code == 404
    assert front.client.get(path).status_code == 401
    assert front.client.delete(path, headers=headers()).json()["deleted"]
    assert resume(front, stream_id).status_code == 404
    for one in replicas:
        one.wait_until_idle()
