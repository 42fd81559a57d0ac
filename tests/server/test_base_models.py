"""Base models, which continue texts, beside models that chat."""

from __future__ import annotations

import preloaded
import pytest
from tiny_models import write_tiny_model

PLAIN = {"default": "{{ messages[0].content }}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model before a chat model, by alphabet."""
    path = tmp_path_factory.mktemp("models")
    write_tiny_model("gemma3", path / "a-base.gguf")
    write_tiny_model("gemma3", path / "b-chat.gguf", PLAIN)
    return path


def test_base_model_is_not_the_default_of_a_folder(start_server, folder):
    """It is known before it is loaded, and is chatted with only on request."""
    server = start_server("--models-dir", str(folder))
    models = server.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["task"], one["loaded"]) for one in models] == [
        ("b-chat", "chat", False),
        ("a-base", "completion", False),
    ]
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert server.client.post("/v1/chat/completions", json=ask).json()["model"] == "b-chat"
    answer = server.client.post("/v1/chat/completions", json={**ask, "model": "a-base"})
    assert answer.json()["model"] == "a-base"
    server.wait_for_log("a-base has no chat template")
    models = server.client.get("/v1/models").json()["data"]
    assert {one["id"]: one["task"] for one in models} == {"b-chat": "chat", "a-base": "completion"}


def test_base_model_is_the_default_if_it_is_named(start_server, folder):
    """Then the start shows how to complete a text."""
    server = start_server("--model", str(folder / "a-base.gguf"))
    server.wait_for_log("/v1/completions")
    server.wait_for_log("to continue texts")
    server = start_server("--models-dir", str(folder), "--models.default", "a-base")
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "a-base"


@pytest.mark.slow
def test_chat_in_the_terminal_says_what_a_base_model_is_for(folder):
    """Before it is loaded; generate, which completes texts, does not."""
    path = str(folder / "a-base.gguf")
    said, _, _ = run("chat", path, "--max-tokens", "1").partition("loading the model")
    assert "cllm generate" in said
    assert "chat template" not in run("generate", "a", "--model", path, "--max-tokens", "1")


def run(*arguments: str) -> str:
    """Return what a command says on stderr."""
    done = preloaded.run(*arguments, text="a\n")
    assert done.returncode == 0, done.stderr
    return done.stderr
