"""What accounts pay when a replica dies."""

import concurrent.futures
import signal
import time
from collections import Counter

from cluster.conftest import FAKE, KEY, start_front
from conftest import PATIENCE

from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

CHAT = "/v1/chat/completions"
BEARER = {"authorization": "Bearer key of ann"}


def is_running(replica):
    lease = replica.client.get("/internal/lease", headers={"x-cllm-cluster-key": KEY}).json()
    return lease["models"][0]["num_running"] > 0


def test_request_that_was_tried_on_a_dead_replica_is_paid_once(start_server, tmp_path):
    accounts = {"ann": AccountRecord(keys=(Key(hash_key("key of ann"), 0),))}
    write_key_file(tmp_path / "keys.json", KeyFile(accounts=accounts))
    replicas = [start_server(*FAKE) for _ in range(2)]
    front = start_front(
        start_server,
        *(one.url for one in replicas),
        CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"),
        CLLM_STORAGE_FOLDER=str(tmp_path),
    )

    front.client.headers.update(BEARER)

    def ask(i):
        message = {"role": "user", "content": f"{i} question"}
        body = {"messages": [message], "max_tokens": 400, "ignore_eos": True}
        return front.client.post(CHAT, json=body)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, i) for i in range(8)]
        end = time.monotonic() + PATIENCE
        while not is_running(replicas[0]):
            assert time.monotonic() < end
        replicas[0].stop(signal.SIGKILL)
        told = Counter(requests=len(answers))
        for answer in answers:
            result = answer.result()
            assert result.status_code == 200, result.text
            usage = result.json()["usage"]
            told.update({kind: usage[kind] for kind in ("prompt_tokens", "completion_tokens")})
    assert told["completion_tokens"] == 8 * 400
    [day] = front.client.get("/usage").json()["days"]
    assert {kind: day[kind] for kind in told} == told
    assert front.metric("front_retries_total", "lost") > 0
