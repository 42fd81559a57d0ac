"""A server with several engines of one model, and models that are replaced while it runs."""

import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import PATIENCE

from cllm.bench.make_model import make_model
from cllm.models.catalog import BUILTIN

QUESTION = [{"role": "user", "content": "What is 27 plus 45?"}]
TEXT = {"model": "m", "prompt": [5], "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def pool(start_server_once):
    """A server with four engines of the fake model, each of which runs four requests."""
    return start_server_once(
        *("--backend.name", "fake", "--max-num-seqs", "4", "--context", "512"),
        *("--engine.count", "4", "--model.aliases", "m"),
    )


def complete(server, i):
    body = {**TEXT, "prompt": [i % 200, i // 200, 7], "max_tokens": 100}
    answer = server.client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


def engines_of(server):
    [model] = server.client.get("/health?level=full").json()["models"]
    return model["engines"]


def children(pid):
    """Return the engine processes of a server."""
    tasks = Path(f"/proc/{pid}/task")
    found = {int(pid) for one in tasks.iterdir() for pid in (one / "children").read_text().split()}
    engines = []
    for child in found:
        with suppress(FileNotFoundError):  # it has ended meanwhile
            if b"cllm.process.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                engines.append(child)
    return engines


def test_one_of_four_engines_is_killed_under_load(pool):
    """All requests succeed with right answers, and the engine comes back."""
    alone = [complete(pool, i) for i in range(3)]
    with ThreadPoolExecutor(48) as clients:
        asking = [clients.submit(complete, pool, i) for i in range(48)]
        wait(asking, return_when=FIRST_COMPLETED)
        assert not all(one.done() for one in asking)
        os.kill(children(pool.process.pid)[0], signal.SIGKILL)
        answers = [one.result(PATIENCE) for one in asking]
    assert {status for status, _ in answers} == {200}
    texts = [answer["choices"][0]["text"] for _, answer in answers]
    assert texts == [alone[0][1]["choices"][0]["text"]] * 48  # they count on from 7
    assert all(answer["usage"]["completion_tokens"] == 100 for _, answer in answers)
    deadline = time.monotonic() + PATIENCE
    while not all(engine["ready"] for engine in engines_of(pool)):
        assert time.monotonic() < deadline
    assert sum(engine["restarts"] for engine in engines_of(pool)) == 1


def test_each_engine_is_shown(pool):
    with ThreadPoolExecutor(16) as clients:
        assert {status for status, _ in clients.map(complete, [pool] * 16, range(16))} == {200}
    engines = engines_of(pool)
    assert [engine["number"] for engine in engines] == [0, 1, 2, 3]
    assert {engine["num_seq_ids"] for engine in engines} == {4}
    for number in range(4):
        assert pool.metric("pool_engine_ready", f'engine="{number}"') == 1
        found = pool.client.get(f"/scheduler?engine={number}")
        assert found.status_code == 200
        assert found.json()["steps"]
    missing = pool.client.get("/scheduler?engine=4")
    assert missing.status_code == 400
    assert "numbered from 0" in missing.text
    assert pool.client.get("/health?level=half").status_code == 400
    assert "models" not in pool.client.get("/health").json()
    assert pool.client.get("/api/ps").json()["models"][0]["engines"] == 4
    assert pool.metric("seq_ids") == 16


# --- changes while the server runs ---------------------------------------------------------------

SETTINGS = """
models:
  a:
    path: {folder}/a.gguf
    aliases: [{alias}]
  {name}:
    path: {folder}/a.gguf
    sampling: {{max_tokens: 3}}
model.max_context_length: 512
kv: {{max_memory_mb: 30, ram_cache_mb: 0}}
scheduler.max_num_seqs: 4
"""


@pytest.fixture
def changing(tmp_path, start_server):
    """A server of the models a and b, and a function that writes its settings again."""
    shutil.copy(BUILTIN, tmp_path / "a.gguf")

    def write(name="b", alias="first"):
        text = SETTINGS.format(folder=tmp_path, name=name, alias=alias)
        (tmp_path / "cllm.yaml").write_text(text)

    write()
    server = start_server("--config", str(tmp_path / "cllm.yaml"))
    server.folder, server.write = tmp_path, write
    return server


def ask(server, model):
    body = {"model": model, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    return server.client.post("/v1/chat/completions", json=body)


def names(server, path="/v1/models"):
    return [model["id"] for model in server.client.get(path).json()["data"]]


def test_settings_are_read_again(changing):
    """Models come and go, by the route and by SIGHUP; a fault changes nothing and is explained."""
    assert ask(changing, "b").status_code == 200
    changing.write(name="c", alias="second")
    assert names(changing) == ["a", "b", "first"]
    assert names(changing, "/v1/models?reload=1") == ["a", "c", "second"]
    assert ask(changing, "b").status_code == 404
    assert ask(changing, "c").json()["choices"][0]["message"]["content"] == "72"
    (changing.folder / "cllm.yaml").write_text("models: {a: {pth: x}}")
    refused = changing.client.get("/models?reload=1")
    assert refused.status_code == 400
    assert "pth is not a setting" in refused.json()["error"]["message"]
    assert names(changing) == ["a", "c", "second"]
    changing.write(name="d")
    os.kill(changing.process.pid, signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE
    while names(changing) != ["a", "d", "first"]:
        assert time.monotonic() < deadline
    changing.wait_for_log("the settings were reloaded; models: a, d")


def test_new_file_takes_over_without_a_failed_request(changing):
    """Requests are answered all the time while the file of their model is replaced, first by the
    old one and then by the new one. A stream that has begun is completed by the old one.
    """
    assert ask(changing, "a").json()["choices"][0]["message"]["content"] == "72"
    other = changing.folder / "other.gguf"
    make_model("tiny", "q8_0", other, seed=3, progress=lambda stage, share: None)
    body = {"model": "a", "prompt": "One, two,", "max_tokens": 400, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    results, stopped = [], threading.Event()

    def keep_asking():
        while not stopped.is_set():
            results.append(ask(changing, "a"))

    thread = threading.Thread(target=keep_asking)
    with changing.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        thread.start()
        other.replace(changing.folder / "a.gguf")
        assert changing.client.get("/models?reload=1").status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    deadline = time.monotonic() + PATIENCE
    while not results or results[-1].json()["choices"][0]["message"]["content"] == "72":
        assert time.monotonic() < deadline
    stopped.set()
    thread.join()
    assert {answer.status_code for answer in results} == {200}
    while len(children(changing.process.pid)) > 1:  # the old engine ends
        assert time.monotonic() < deadline
