"""The usage of a cluster, which its front counts."""

from __future__ import annotations

import json
import time

from client_ledger import CONFIG, ClientLedger, count, write_accounts
from cluster.conftest import start_front
from conftest import PATIENCE


def test_usage_equals_the_ledger_of_the_clients(start_server, tmp_path):
    """Over two replicas, restarts of the front and of a replica, and batches."""
    write_accounts(tmp_path / "keys.json")
    (tmp_path / "cllm.yaml").write_text(CONFIG)
    arguments = "--config", str(tmp_path / "cllm.yaml")
    first, second = (
        start_server(*arguments, CLLM_STORAGE_FOLDER=str(tmp_path / name)) for name in "ab"
    )

    def serve():
        return start_front(
            start_server,
            *(first.url, second.url),
            CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"),
            CLLM_STORAGE_FOLDER=str(tmp_path / "front"),
        )

    ledger, front = ClientLedger(), serve()
    ledger.use(front)
    front.stop()
    front = serve()
    ledger.use(front)
    second.process.kill()
    second.process.wait()
    ledger.use(front, num_rounds=1)
    assert read_usage(front) == ledger.told

    add_batch(front, ledger)
    end = time.monotonic() + PATIENCE
    while (used := read_usage(front)) != ledger.told:
        assert time.monotonic() < end, (used, ledger.told)
        time.sleep(0.05)


def read_usage(front):
    answer = front.client.get("/usage", headers={"authorization": "Bearer key of root"})
    return count(answer.json()["days"])


def add_batch(front, ledger):
    """Run a batch of ann that asks one model, and add its answers to the ledger."""
    headers = {"authorization": "Bearer key of ann"}
    body = {"model": "small", "prompt": "hello", "max_tokens": 4}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    file = front.client.post(
        "/v1/files",
        files={"file": ("lines.jsonl", json.dumps(line))},
        data={"purpose": "batch"},
        headers=headers,
    ).json()["id"]
    order = {
        "input_file_id": file,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = front.client.post("/v1/batches", json=order, headers=headers).json()
    end = time.monotonic() + PATIENCE
    while batch["status"] != "completed":
        assert time.monotonic() < end, batch
        time.sleep(0.05)
        batch = front.client.get(f"/v1/batches/{batch['id']}", headers=headers).json()
    path = f"/v1/files/{batch['output_file_id']}/content"
    usage = json.loads(front.client.get(path, headers=headers).text)["response"]["body"]["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    told = usage | {"requests": 1, "cached_tokens": cached}
    for kind in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"):
        ledger.told["ann", "small", kind] += told[kind]
