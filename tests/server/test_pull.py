"""POST /api/pull with the real ``ollama`` client and a local hub."""

import time

import ollama
import pytest
from conftest import PATIENCE
from fake_hub import LARGE, FakeHub

FAKE = ("--backend.name", "fake", "--server.allow-pull", "--server.allow-model-changes")


@pytest.fixture(scope="module")
def hub():
    server = FakeHub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def client(hub, start_server_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder),
        "HF_TOKEN": "",
        "HF_HUB_OFFLINE": "0",
    }
    server = start_server_once(*FAKE, **environment)
    with ollama.Client(server.url) as client:
        client.folder = folder
        yield client


def test_pull_streams_progress_and_caches_the_file(client):
    """Afterwards the model is found in the cache by its name."""
    lines = list(client.pull("hf.co/o/models:Q8_0", stream=True))
    assert lines[0].status == "pulling manifest"
    assert lines[-1].status == "success"
    progress = [line for line in lines if line.completed]
    assert progress[-1].completed == progress[-1].total == len(LARGE)
    assert "m-Q8_0.gguf" in progress[-1].status
    (file,) = client.folder.rglob("snapshots/*/m-Q8_0.gguf")
    assert file.read_bytes() == LARGE


def test_pull_without_stream_gets_one_answer(client):
    assert client.pull("hf.co/o/models").status == "success"
    assert list(client.folder.rglob("snapshots/*/m-Q4_0.gguf"))


def test_pulled_checkpoint_is_listed_and_deleted(client):
    """It is a folder in the cache; its files are removed together."""
    lines = list(client.pull("hf.co/o/tuned", stream=True))
    assert lines[-1].status == "success"
    assert {"model.safetensors", "config.json"} <= {line.status.split()[-1] for line in lines}
    (folder,) = {file.parent for file in client.folder.rglob("models--o--tuned/snapshots/*/*")}
    assert not (folder / "pytorch_model.bin").exists()
    (model,) = [one for one in client.list().models if one.model == "o/tuned:latest"]
    assert model.details.format == "safetensors"
    assert client.delete("hf.co/o/tuned").status == "success"
    assert not folder.exists()


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "llama3.2", "../x.gguf", "http://evil.example/o/models", "o/models"]
)
def test_pull_rejects_other_sources_than_the_hub(client, name):
    """Local files and other servers are rejected."""
    with pytest.raises(ollama.ResponseError, match=r"hf\.co/owner/repo") as raised:
        client.pull(name)
    assert raised.value.status_code == 400


def test_missing_model_is_reported(client):
    """The answer has an error status or, once the stream has begun, an error line."""
    with pytest.raises(ollama.ResponseError, match="There is no model o/missing") as raised:
        client.pull("hf.co/o/missing")
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="There is no model o/missing"):
        list(client.pull("hf.co/o/missing", stream=True))


def test_one_pull_runs_at_a_time_until_its_client_disconnects(client, hub):
    """A second pull is rejected while the first one runs."""
    hub.pause = 0.1
    lines = client.pull("hf.co/o/gated", stream=True)
    with pytest.raises(ollama.ResponseError):
        list(lines)
    lines = client.pull("hf.co/o/models:F16", stream=True)
    assert next(lines).status == "pulling manifest"
    with pytest.raises(ollama.ResponseError, match="Another model") as raised:
        client.pull("hf.co/o/models")
    assert raised.value.status_code == 409
    lines.close()
    hub.pause = 0
    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert client.pull("hf.co/o/models").status == "success"
            break
        except ollama.ResponseError as error:
            assert error.status_code == 409
            assert time.monotonic() < end
            time.sleep(0.05)


def test_pulled_model_is_served(client):
    client.pull("hf.co/o/models:Q8_0")
    assert "o/models:Q8_0" in {model.model for model in client.list().models}
    answer = client.chat("hf.co/o/models:Q8_0", [{"role": "user", "content": "Hi"}])
    assert answer.model == "hf.co/o/models:Q8_0"
    assert answer.message.content
