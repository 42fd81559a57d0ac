"""Several models in one server: loaded when asked for, and unloaded for each other."""

import json
import shutil
import subprocess
import sys
import threading
import time

import httpx2
import preloaded
import pytest
from conftest import PATIENCE

from cllm.models.catalog import BUILTIN

QUESTION = [{"role": "user", "content": "What is 27 plus 45?"}]
SETTINGS = """
models:
  folder: {folder}/more
  max_memory_mb: 900
  a:
    path: {folder}/a.gguf
    aliases: [gpt-4o, "claude-*"]
    sampling.temperature: 0.0
  b:
    path: {folder}/a.gguf
    sampling: {{max_tokens: 1}}
  huge:
    path: {folder}/a.gguf
    kv.max_memory_mb: 10000
kv:
  max_memory_mb: 100
  ram_cache_mb: 0
server:
  allow_model_changes: true
"""
# a model takes 420 MB: 100 for its cells, 315 for work buffers and processes, and its weights


@pytest.fixture(scope="module")
def models(tmp_path_factory, start_server_once):
    """A server of the models a, b, c, huge and damaged, which has memory for two at a time."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "more" / "below").mkdir(parents=True)
    shutil.copy(BUILTIN, folder / "a.gguf")
    shutil.copy(BUILTIN, folder / "more" / "below" / "c.gguf")
    (folder / "more" / "damaged.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    (folder / "cllm.yaml").write_text(SETTINGS.format(folder=folder))
    server = start_server_once("--config", str(folder / "cllm.yaml"))
    server.folder = folder
    return server


def ask(server, model, **more):
    body = {"model": model, "messages": QUESTION, "max_tokens": 20, "temperature": 0, **more}
    return server.client.post("/v1/chat/completions", json=body)


def answer(server, model, **more):
    found = ask(server, model, **more)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"]


def loaded(server):
    return {
        model["id"] for model in server.client.get("/v1/models").json()["data"] if model["loaded"]
    }


def unload(server, model):
    assert server.client.post("/models/unload", json={"model": model}).json() == {"success": True}


def test_models_are_loaded_when_asked_for_and_leave_for_each_other(models):
    names = [model["id"] for model in models.client.get("/v1/models").json()["data"]]
    assert names == ["a", "b", "huge", "c", "damaged", "gpt-4o"]
    models.wait_for_log("cLLM serves a, b, huge, c, damaged at")
    for model in ("a", "b", "c", "gpt-4o", "claude-x", "c"):
        assert answer(models, model) == "72"
        assert len(loaded(models) - {"gpt-4o"}) <= 2
    assert loaded(models) == {"a", "c", "gpt-4o"}
    assert models.metric("model_loads_total", 'model_name="a"') == 2
    assert models.metric("engine_ready") == 2
    page = models.client.get("/metrics").text
    assert page.count("# TYPE cllm:requests_total") == 1
    assert models.client.get("/ready").json() == {"status": "ready"}


def test_each_model_has_its_own_settings(models):
    body = {"model": "b", "messages": QUESTION}
    found = models.client.post("/v1/chat/completions", json=body).json()
    assert found["usage"]["completion_tokens"] == 1
    assert found["model"] == "b"
    props = models.client.get("/props", params={"model": "a"}).json()
    assert props["default_generation_settings"]["params"]["temperature"] == 0


def test_no_stream_is_cut_off_for_another_model(models):
    """With memory for two and three wanted, each answer is complete."""
    results = {}

    def talk(name):
        with httpx2.Client(base_url=models.url, timeout=PATIENCE) as client:
            for i in range(4):
                body = {
                    "model": name,
                    "messages": [{"role": "user", "content": f"What is {i} plus 45?"}],
                    "max_tokens": 200,
                    "min_tokens": 100,
                    "temperature": 0,
                    "stream": True,
                }
                with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                    text = "".join(stream.iter_text())
                events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
                pieces = [json.loads(event)["choices"] for event in events[:-1]]
                content = "".join(
                    choice[0]["delta"].get("content") or "" for choice in pieces if choice
                )
                results.setdefault((name, i), (stream.status_code, events[-1], content[:2]))

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    expected = {(name, i): (200, "[DONE]", f"{i + 45}") for name in "abc" for i in range(4)}
    assert results == expected


def test_model_that_can_never_fit_gets_503_with_both_sizes(models):
    found = ask(models, "huge")
    assert found.status_code == 503
    assert "needs 10.3 GB of memory, but only 900.0 MB" in found.json()["error"]["message"]
    assert models.metric("requests_refused_total", 'reason="memory"') >= 1
    assert answer(models, "a") == "72"


def test_damaged_file_fails_its_own_requests_only(models):
    found = ask(models, "damaged")
    assert found.status_code == 500
    assert found.json()["error"]["code"] == "model_load_failed"
    assert str(models.folder) not in found.text
    models.wait_for_log("damaged.gguf")
    assert answer(models, "c") == "72"
    assert models.client.get("/api/tags").status_code == 200


def test_unknown_model_is_404_and_a_new_file_is_found(models):
    assert ask(models, "new").status_code == 404
    shutil.copy(BUILTIN, models.folder / "more" / "new.gguf")
    listed = models.client.get("/models", params={"reload": 1}).json()["data"]
    assert "new" in {model["id"] for model in listed}
    assert answer(models, "new") == "72"
    unload(models, "new")
    (models.folder / "more" / "new.gguf").unlink()
    listed = models.client.get("/models", params={"reload": 1}).json()["data"]
    assert "new" not in {model["id"] for model in listed}


def test_ollama_loads_keeps_and_unloads(models):
    def ps():
        return {
            model["name"]: model["expires_at"]
            for model in models.client.get("/api/ps").json()["models"]
        }

    def generate(**more):
        found = models.client.post("/api/generate", json={"model": "a", "stream": False, **more})
        assert found.status_code == 200, found.text
        return found.json()

    assert generate(keep_alive=-1)["done_reason"] == "load"
    assert ps()["a:latest"].startswith("2999")
    generate(prompt="Hi", keep_alive="10m", options={"num_predict": 1})
    model = models.client.get("/api/ps").json()["models"][0]
    assert 0 < model["size_used"] < model["size"], "a paged cache takes memory as tokens need it"
    left = time.mktime(time.strptime(ps()["a:latest"], "%Y-%m-%dT%H:%M:%SZ"))
    assert 500 < left - time.mktime(time.gmtime()) <= 601
    generate(prompt="Hi", options={"num_predict": 1})
    assert ps()["a:latest"].startswith("2999"), "as the settings say"
    assert generate(keep_alive=0)["done_reason"] == "unload"
    assert "a:latest" not in ps()
    assert generate(keep_alive=0)["done_reason"] == "unload"
    assert "a:latest" not in ps(), "it was not loaded to be unloaded"
    generate(prompt="Hi", keep_alive="0s", options={"num_predict": 1})
    end = time.monotonic() + PATIENCE
    while "a:latest" in ps():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert models.client.post("/api/generate", json={"model": "a", "keep_alive": "x"}).json() == {
        "error": "Invalid 'keep_alive': 'x' is not a duration such as 5m."
    }


def test_llama_server_loads_and_unloads(models):
    def status():
        return {
            model["id"]: model["status"]["value"]
            for model in models.client.get("/models").json()["data"]
        }

    assert models.client.post("/models/load", json={"model": "c"}).json() == {"success": True}
    assert status()["c"] == "loaded"
    unload(models, "c")
    assert status()["c"] == "unloaded"


def test_batches_load_their_model(models):
    unload(models, "a")
    line = {
        "custom_id": "x",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "a", "messages": QUESTION, "temperature": 0},
    }
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = models.client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = models.client.post("/v1/batches", json=body).json()
    end = time.monotonic() + PATIENCE
    while batch["status"] != "completed":
        assert time.monotonic() < end, batch
        time.sleep(0.05)
        batch = models.client.get(f"/v1/batches/{batch['id']}").json()
    content = models.client.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert "72" in content


def test_changes_need_permission(fake_server):
    """Without server.allow_model_changes, keep_alive has no effect and the routes are refused."""
    for path in ("/models/load", "/models/unload"):
        found = fake_server.client.post(path, json={"model": "fake"})
        assert found.status_code == 403
        assert "server.allow_model_changes" in found.text
    body = {"model": "fake", "keep_alive": 0, "stream": False}
    assert fake_server.client.post("/api/generate", json=body).json()["done_reason"] == "unload"
    assert loaded(fake_server) == {"fake"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {path: /nowhere.gguf}}", "There is no file /nowhere.gguf"),
        ("models: {folder: /nowhere}", "there is no folder /nowhere"),
        ("models: {default: x, a: {}}", "models.default is x, but the models are a"),
        ("model: {name: a, path: cllm-builtin}\nmodels: {a: {}}", "two models have the name a"),
    ],
)
def test_start_that_cannot_work_gets_one_line(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    done = preloaded.run("serve", "--port", "0", "--config", tmp_path / "c.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_commands_for_a_running_server(start_server, tmp_path):
    """``cllm run`` loads a model and asks it, ``ps`` lists it, and ``stop`` unloads it."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "models: {a: {path: cllm-builtin}, b: {path: cllm-builtin}}\n"
        "kv: {max_memory_mb: 100}\nserver: {allow_model_changes: true}\n"
    )
    server = start_server("--config", str(config))

    def cllm(*words, code=0, stdin=""):
        done = preloaded.run(*words, "--url", server.url, text=stdin)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    assert len(cllm("ps").splitlines()) == 1
    assert cllm("run", "b", "What is 27 plus 45?", "--temperature", "0") == "72\n"
    assert cllm("run", "b", stdin="What is 27 plus 45?\n").strip()
    head, row = cllm("ps").splitlines()
    assert head.split() == ["NAME", *["MEMORY", "UP", "TO"], "PROCESSOR", "CONTEXT", "UNTIL"]
    assert row.startswith("b:latest ")
    assert row.endswith("for ever")
    assert cllm("stop", "b") == "b is unloaded\n"
    assert json.loads(cllm("ps", "--json")) == []
    for words in (("run", "c", "Hi"), ("stop", "c")):
        assert "'c' does not exist" in cllm(*words, code=2)


@pytest.mark.slow
def test_signal_while_models_are_preloaded_ends_the_server_without_an_error(tmp_path):
    lines = "".join(f"  m{i}: {{path: cllm-builtin, preload: true}}\n" for i in range(4))
    (tmp_path / "c.yaml").write_text(f"kv: {{max_memory_mb: 100}}\nmodels:\n{lines}")
    command = [sys.executable, "-m", "cllm", "serve", "--port", "0", "--config"]
    process = subprocess.Popen([*command, tmp_path / "c.yaml"], stderr=subprocess.PIPE, text=True)
    log = ""
    while "m0 is loaded" not in log:
        log += process.stderr.readline()
        assert process.poll() is None, log
    process.terminate()
    log += process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, log
    assert "Traceback" not in log
