"""/tokenize, /detokenize and /apply-template, with the bodies of llama-server and of vLLM."""

from __future__ import annotations

import pytest

MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"


def post(server, route: str, **body):
    return server.client.post(route, json=body)


@pytest.mark.parametrize("field", ["content", "prompt"])
def test_detokenize_reverses_tokenize(fake_server, field) -> None:
    answer = post(fake_server, "/tokenize", **{field: "Hé<|im_end|>"}).json()
    assert answer == {
        "tokens": [*"Hé".encode(), 258],
        "count": 4,
        "max_model_len": 512,
        "token_strs": None,
    }
    back = post(fake_server, "/detokenize", tokens=answer["tokens"]).json()
    assert back == {"content": "Hé<|im_end|>", "prompt": "Hé<|im_end|>"}


def test_parse_special_false_keeps_special_tokens_as_text(fake_server) -> None:
    answer = post(fake_server, "/tokenize", content="<|im_end|>", parse_special=False).json()
    assert answer["tokens"] == list(b"<|im_end|>")


def test_pieces_are_texts_or_bytes(fake_server) -> None:
    """Bytes if a token is not valid UTF-8 by itself."""
    answer = post(
        fake_server, "/tokenize", content="aé<|im_end|>", with_pieces=True, return_token_strs=True
    ).json()
    assert [item["piece"] for item in answer["tokens"]] == ["a", [0xC3], [0xA9], "<|im_end|>"]
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd", "<|im_end|>"]


def test_messages_are_rendered_and_tokenized(fake_server) -> None:
    assert post(fake_server, "/apply-template", messages=MESSAGES).json() == {"prompt": PROMPT}
    tokens = post(fake_server, "/tokenize", messages=MESSAGES).json()["tokens"]
    assert post(fake_server, "/detokenize", tokens=tokens).json()["content"] == PROMPT
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    assert post(fake_server, "/apply-template", **body).json()["prompt"] == PROMPT.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_control_tokens_in_a_message_are_plain_text(fake_server) -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    assert (
        post(fake_server, "/apply-template", messages=messages).json()["prompt"].count("<|im_end|>")
        == 2
    )
    assert post(fake_server, "/tokenize", messages=messages).json()["tokens"].count(258) == 1


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [1, 260]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/apply-template", {"messages": [{"role": "alien", "content": "a"}]}, "messages[0].role"),
        ("/apply-template", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (
            "/apply-template",
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs.tools",
        ),
    ],
)
def test_invalid_request_names_the_field(fake_server, route, body, param) -> None:
    answer = post(fake_server, route, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.llama
def test_token_count_equals_the_prompt_tokens_of_a_chat(builtin_server) -> None:
    count = post(builtin_server, "/tokenize", messages=MESSAGES).json()["count"]
    answer = post(builtin_server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == count
    tokens = post(builtin_server, "/tokenize", content="What is 27 plus 45?").json()["tokens"]
    assert (
        post(builtin_server, "/detokenize", tokens=tokens).json()["content"]
        == "What is 27 plus 45?"
    )
