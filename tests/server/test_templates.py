"""Chat templates: of the model's file, of a file that the settings name, and none."""

from __future__ import annotations

import preloaded
import pytest
from tiny_models import write_tiny_model

from cllm import LLM

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FAKE = ["--backend.name", "fake"]


def apply(server, **more) -> str:
    answer = server.client.post("/apply-template", json={"messages": ASK, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


def test_template_for_tools_in_the_file_is_used_with_tools(start_server, tmp_path):
    path = tmp_path / "a.gguf"
    templates = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}",
    }
    write_tiny_model("gemma3", path, {**templates, "rag": "never"})
    server = start_server("--model", str(path))
    assert (apply(server), apply(server, tools=TOOLS)) == ("plain hi", "f")
    with LLM(str(path)) as llm:
        assert llm.detokenize(llm.encode_chat(ASK, TOOLS)) == "f"
        assert llm.detokenize(llm.encode_chat(ASK)) == "plain hi"


def test_model_without_a_template_is_chatted_with_in_chatml_after_a_warning(start_server, tmp_path):
    """Its log says so at the start, and how to complete texts instead."""
    path = tmp_path / "a.gguf"
    write_tiny_model("gemma3", path)
    server = start_server("--model", str(path))
    server.wait_for_log("has no chat template")
    server.wait_for_log("cllm generate")
    assert apply(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    limits = {"messages": ASK, "max_tokens": 2, "ignore_eos": True}
    for route in ("/v1/chat/completions", "/v1/messages"):
        answer = server.client.post(route, json={"model": "a", **limits})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["model", "other"])
def test_template_file_replaces_the_models_own(start_server, tmp_path, name):
    """By the flag, and for one of several models by the settings."""
    (tmp_path / "t.jinja").write_text("\ufeff[{{ messages[0].content }}]")
    file, config = tmp_path / "t.jinja", tmp_path / "c.yaml"
    flags = ["--chat-template-file", str(file)]
    if name == "other":
        config.write_text(f"models: {{other: {{chat_template_file: {file}}}, plain: {{}}}}")
        flags = ["--config", str(config)]
    server = start_server(*FAKE, *flags)
    assert apply(server, model="other" if name == "other" else None) == "[hi]"
    if name == "other":
        assert "<|im_start|>" in apply(server, model="plain")


def test_python_uses_a_template_file(tmp_path, builtin_path):
    (tmp_path / "t.jinja").write_text("[{{ messages[0].content }}]")
    path = str(tmp_path / "t.jinja")
    with LLM(str(builtin_path), model_chat_template_file=path) as llm:
        assert llm.detokenize(llm.encode_chat(ASK)) == "[hi]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfea", "is not UTF-8 text"),
        (b" \n", "is empty"),
        (b"a" * (1 << 21), "is longer than 1 MB"),
        (
            b"a\n{% if %}",
            "has a syntax error: Expected an expression, got 'end of statement block' (line 2)",
        ),
    ],
)
def test_template_file_that_cannot_be_used_ends_the_start_with_one_line(tmp_path, content, message):
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    done = preloaded.run("serve", *FAKE, "--port", "0", "--chat-template-file", path)
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
