"""Servers with checkpoints instead of GGUF files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import convert_model, write_checkpoint
from conftest import PATIENCE

from cllm.models.catalog import BUILTIN

pytestmark = pytest.mark.slow  # each test starts processes

QUESTION = [{"role": "user", "content": "What is 27 plus 45?"}]


@pytest.fixture(scope="module")
def checkpoint(builtin_checkpoint: Path, tmp_path_factory) -> Path:
    """A folder of models with a checkpoint of the built-in model in it."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(builtin_checkpoint, folder / "tuned")
    return folder / "tuned"


@pytest.fixture(scope="module")
def server(checkpoint: Path, start_server_once):
    return start_server_once("--model", str(checkpoint), "--context", "512")


@pytest.mark.torch
def test_checkpoint_is_served_under_its_folder_s_name(server):
    models = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tuned"]
    body = {"model": "tuned", "messages": QUESTION, "temperature": 0}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "72"


@pytest.mark.torch
def test_stream_continues_after_the_engine_was_killed(server):
    body = {"prompt": "Once", "max_tokens": 150, "seed": 3, "temperature": 1, "ignore_eos": True}

    def read(kill_after: int = -1) -> str:
        text, num_chunks = "", 0
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as got:
            for line in got.iter_lines():
                if "{" in line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    num_chunks += 1
                    if num_chunks == kill_after:
                        os.kill(server.engine_pid(), signal.SIGKILL)
        return text

    calm = read()
    assert read(kill_after=20) == calm
    assert server.metric("engine_restarts_total") == 1


@pytest.mark.torch
def test_ctrl_c_while_loading_exits_with_130(checkpoint):
    command = [sys.executable, "-m", "cllm", "serve", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "cllm: loading tuned\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == ""


@pytest.mark.torch
def test_checkpoint_is_described_to_clients_of_ollama(server, checkpoint):
    (model,) = server.client.get("/api/tags").json()["models"]
    assert model["size"] >= (checkpoint / "model.safetensors").stat().st_size
    assert model["details"]["format"] == "safetensors"
    shown = server.client.post("/api/show", json={"model": "tuned"}).json()
    assert shown["details"]["family"] == shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["details"]["quantization_level"] == "F32"
    assert shown["model_info"]["config.hidden_size"] > 0
    assert "tools" in shown["capabilities"]
    assert "messages" in shown["template"]


@pytest.mark.torch
def test_checkpoint_beside_a_gguf_file_in_a_folder_of_models(
    checkpoint, start_server, builtin_path
):
    """Each gets its own backend."""
    folder = checkpoint.parent
    shutil.copy(builtin_path, folder / "plain.gguf")
    server = start_server("--models.folder", str(folder), "--context", "512")
    models = server.client.get("/v1/models").json()["data"]
    assert {model["id"] for model in models} == {"tuned", "plain"}
    answers = {
        name: server.client.post(
            "/v1/chat/completions", json={"model": name, "messages": QUESTION, "temperature": 0}
        ).json()["choices"][0]["message"]["content"]
        for name in ("tuned", "plain")
    }
    assert answers == {"tuned": "72", "plain": "72"}


def run_cllm(*arguments: object, **environment: str) -> str:
    """Return the only line of an error at the start."""
    done = subprocess.run(
        [sys.executable, "-m", "cllm", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_server_without_torch_says_how_to_install_it(tmp_path):
    folder = convert_model(BUILTIN, tmp_path / "model")
    for name in ("torch", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(name='torch')\n")
    line = run_cllm("generate", "x", "--model", folder, PYTHONPATH=str(tmp_path))
    assert 'pip install "cllm[torch]"' in line
    assert "CUDA" in line


@pytest.mark.parametrize(
    "command", [("serve", "--port", "0", "--model"), ("generate", "x", "--model")]
)
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", b"{", "is not valid JSON"),
        ("model.safetensors", b"version https://git-lfs", "git lfs pull"),
        ("model.safetensors", b"\x10" + bytes(7) + b'{"a"', "the download is incomplete"),
    ],
)
def test_damaged_checkpoint_is_one_line(tmp_path, command, name, content, reason):
    folder = write_checkpoint(tmp_path / "model")
    (folder / name).write_bytes(content)
    assert reason in run_cllm(*command, folder, CLLM_STORAGE_FOLDER=str(tmp_path / "state"))


def test_checkpoint_with_the_other_backend_is_one_line(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    line = run_cllm("generate", "x", "--model", folder, "--backend.name", "llama_cpp")
    assert "is a checkpoint, which llama.cpp cannot read: use backend.name torch" in line
