"""``cllm run`` and ``cllm create``, for people who know Ollama."""

from __future__ import annotations

import json

import pytest
from openai_server import Reasoning, openai_server

from cllm.cli import run as run_module


@pytest.fixture
def server():
    with openai_server([Reasoning("Hm."), "Yes."]) as server:
        yield server


def test_stdin_precedes_the_prompt(cllm, server) -> None:
    assert (
        cllm("run", "m", "Sum", "it", "up.", "--url", server.url, text="A text.\n").out == "Yes.\n"
    )
    assert cllm("run", "m", "-p", "Why?", "--url", server.url).out == "Yes.\n"
    assert cllm("run", "m", "--url", server.url, text="Why?\nHow?\n").out == "Yes.\n"
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert contents == ["A text.\n\nSum it up.", "Why?", "Why?\nHow?"]


def test_reasoning_and_timings_go_to_stderr(cllm, server) -> None:
    done = cllm("run", "m", "Why?", "--url", server.url, "--verbose")
    reasoning, timings = done.err.splitlines()
    assert (done.out, reasoning) == ("Yes.\n", "Hm.")
    assert timings.endswith("4 tokens, 5 of 9 prompt tokens cached")
    assert cllm("run", "m", "Why?", "--url", server.url, "--hidethinking").err == ""


def test_options_become_fields_of_the_request(cllm, server, tmp_path) -> None:
    schema = {"type": "object"}
    (tmp_path / "s.json").write_text(json.dumps(schema), encoding="utf-8-sig")
    for words, fields in (
        (("--format", "json"), {"response_format": {"type": "json_object"}}),
        (
            ("--format", str(tmp_path / "s.json")),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema},
                }
            },
        ),
        (("--think",), {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (("--think=false",), {"reasoning_effort": "none"}),
        (("--no-think",), {"reasoning_effort": "none"}),
        (("--think=high",), {"reasoning_effort": "high"}),
        (("--temp", "0", "-n", "9"), {"temperature": 0.0, "max_tokens": 9}),
    ):
        assert cllm("run", "m", *words, "Why?", "--url", server.url).out == "Yes.\n"
        body = server.bodies[-1]
        assert {name: body.get(name) for name in fields} == fields
    cllm("run", "m", "Why?", "--system", "Be brief.", "--url", server.url)
    assert server.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "nothing.json"), "cannot read nothing.json"),
        (("--format", "{"), "not valid JSON"),
        ((), "there is no prompt"),
    ],
)
def test_what_cannot_be_asked_is_one_line(cllm, server, words, message) -> None:
    done = cllm("run", "m", *words, "--url", server.url)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err


def test_keep_alive_is_sent_before_the_question(cllm, server) -> None:
    assert cllm("run", "m", "Why?", "--keepalive", "5m", "--url", server.url).code == 0
    assert server.paths == ["/api/generate", "/v1/chat/completions"]
    assert server.bodies[0] == {"model": "m", "keep_alive": "5m", "stream": False}


def test_server_pulls_a_model_of_the_hub(cllm, server) -> None:
    assert cllm("run", "hf:o/models:Q8_0", "Why?", "--url", server.url).code == 0
    assert server.paths == ["/api/pull", "/v1/chat/completions"]
    assert server.bodies[1]["model"] == "o/models:Q8_0"


@pytest.mark.llama
def test_model_is_loaded_here_without_a_server(cllm, builtin_path, monkeypatch, server) -> None:
    """So is a model that the server at the default address does not have."""
    words = ("What is 27 plus 45?", "--temperature", "0")
    monkeypatch.setattr(run_module, "LOCAL", "http://127.0.0.1:9")
    done = cllm("run", "cllm-builtin", *words)
    assert (done.code, done.out) == (0, "72\n")
    assert "because there is no server at http://127.0.0.1:9" in done.err
    assert "needs a server" in cllm("run", "cllm-builtin", *words, "--keepalive", "5m").err
    monkeypatch.setattr(run_module, "LOCAL", server.url)
    done = cllm("run", str(builtin_path), *words)
    assert (done.code, done.out) == (0, "72\n")
    assert "does not have it" in done.err
    assert cllm("run", "m", *words).out == "Yes.\n"
    assert "Unknown model 'nothing'" in cllm("run", "nothing", *words).err


@pytest.mark.llama
def test_copied_model_keeps_its_name_and_format_is_enforced(
    cllm, builtin_path, monkeypatch
) -> None:
    monkeypatch.setattr(run_module, "LOCAL", "http://127.0.0.1:9")
    assert cllm("cp", "cllm-builtin", "mine").code == 0
    schema = '{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}'
    done = cllm("run", "mine", "As JSON, please.", "--format", schema, "--temperature", "0")
    assert isinstance(json.loads(done.out)["x"], bool)


def test_create_sends_the_modelfile(cllm, server, tmp_path) -> None:
    (tmp_path / "Modelfile").write_text("FROM m\nSYSTEM Be brief.\n")
    done = cllm("create", "brief", "-f", tmp_path / "Modelfile", "--url", server.url)
    assert (done.code, done.out) == (0, "brief is created\n")
    assert server.paths == ["/api/create"]
    assert server.bodies[0]["modelfile"] == "FROM m\nSYSTEM Be brief.\n"
    assert "cannot read nothing" in cllm("create", "x", "-f", "nothing", "--url", server.url).err
