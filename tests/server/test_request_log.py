"""The log has one line for each request, with its tokens and times."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import PATIENCE

SECRET = "xylophone"


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once(
        *("--backend.name", "fake", "--context", "4096", "--max-num-seqs", "1"),
        *("--log.format", "json", "--log.slow-seconds", "0.2", "--log.allow-header", "true"),
    )


def read_line(server, request_id: str) -> dict[str, Any]:
    """Return the line about a request, which another thread writes."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        found = [line for line in lines if request_id in (line.get("id"), line.get("answer"))]
        if found:
            [line] = found
            return line
        time.sleep(0.01)
    raise TimeoutError(server.log)


def ask(server, path="/v1/completions", headers=None, **body):
    return server.client.post(path, json=body, headers=headers)


def test_line_has_the_tokens_and_times_of_a_request(server):
    """Also those of a stream, whose usage is known at its end."""
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "user": "alice"}
    for stream in (False, True):
        response = ask(server, **body, stream=stream)
        line = read_line(server, response.headers["x-request-id"])
        assert line["message"] == "POST /v1/completions 200"
        assert (line["account"], line["model"], line["dialect"]) == ("user-alice", "fake", "OpenAI")
        assert (line["prompt_tokens"], line["output_tokens"]) == (len(SECRET), 5)
        assert line["cached_tokens"] == (len(SECRET) - 1 if stream else 0)
        assert (line["outcome"], line["finish"], line["engine"]) == ("finished", "length", 0)
        assert (line["retries"], line["parked"]) == (0, 0)
        assert 0 < line["queue_ms"] + line["prefill_ms"] <= line["ttft_ms"] <= line["total_ms"]
        assert line["itl_p99_ms"] > 0
        assert line["tokens_per_s"] > 0


def test_other_dialects_and_embeddings_have_lines_too(server):
    asked = {
        "Ollama": ask(server, "/api/generate", model="fake", prompt="ab", stream=False),
        "cLLM": ask(server, "/generate", prompt="ab"),
        "OpenAI": ask(server, "/v1/embeddings", input="abc"),
    }
    for dialect, response in asked.items():
        line = read_line(server, response.headers["x-request-id"])
        assert (line["dialect"], line["outcome"]) == (dialect, "finished"), line


def test_rejected_request_names_the_wrong_field(server):
    line = read_line(server, ask(server, prompt="a", temperature=-1).headers["x-request-id"])
    assert (line["level"], line["message"]) == ("info", "POST /v1/completions 400")
    assert (line["field"], line["code"]) == ("temperature", "decimal_below_min_value")


def test_log_has_no_prompts_and_no_keys(server):
    key = {"authorization": f"Bearer sk-{SECRET}"}
    names = [
        ask(server, headers=key, prompt=SECRET, max_tokens=2).headers["x-request-id"],
        ask(server, headers=key, prompt={SECRET: 1}).headers["x-request-id"],
        ask(server, f"/v1/{SECRET}", headers=key).headers["x-request-id"],
    ]
    for name in names:
        read_line(server, name)
    assert SECRET not in server.log


def test_slow_request_names_who_was_ahead(server):
    """The only place is in use by another account."""
    with ThreadPoolExecutor() as threads:
        body = {"ignore_eos": True, "temperature": 0}
        long = threads.submit(ask, server, **body, prompt="abc", max_tokens=300, user="bob")
        end = time.monotonic() + PATIENCE
        while not server.stats()["num_running"]:
            assert time.monotonic() < end
        short = threads.submit(ask, server, **body, prompt="xyz", max_tokens=1, user="alice")
        line = read_line(server, short.result(PATIENCE).headers["x-request-id"])
        long.result(PATIENCE)
    assert line["level"] == "warning"
    assert re.fullmatch(
        r"waited \d+\.\d s behind 1 request, 1 of account 'user-bob': the only place is in use "
        r"\(scheduler\.max_num_seqs\)(;.*)?",
        line["slow"],
    ), line


def test_questions_about_the_server_are_logged_on_request(server):
    """The header lowers the level of one request's lines."""
    silent = server.client.get("/version").headers["x-request-id"]
    shown = server.client.get("/version", headers={"x-cllm-log-level": "debug"})
    assert read_line(server, shown.headers["x-request-id"])["level"] == "debug"
    assert silent not in server.log


def test_lines_of_a_batch_have_its_id(server):
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "fake", "prompt": "ab", "max_tokens": n},
        }
        for i, n in enumerate((2, -7))
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("x.jsonl", content)}
    file = server.client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = ask(server, "/v1/batches", **asked).json()["id"]
    end = time.monotonic() + PATIENCE
    found = []
    while len(found) < 2 and time.monotonic() < end:
        found = [one for one in map(str.strip, server.log.splitlines()) if f'"{batch}"' in one]
        time.sleep(0.01)
    statuses = sorted(json.loads(one)["message"] for one in found if '"batch"' in one)
    assert statuses == ["POST /v1/completions 200", "POST /v1/completions 400"]
