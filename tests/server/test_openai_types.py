"""Answers have all required fields of the types of OpenAI's own client, with values of the right
types.
"""

import json

import pydantic
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.dialect]

MESSAGES = [{"role": "user", "content": "What is 27 plus 45?"}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
]


def check(kind, value):
    return pydantic.TypeAdapter(kind).validate_python(value)


def post(server, path, **body):
    answer = server.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("chat/completions", ChatCompletion, {"messages": MESSAGES}),
        ("chat/completions", ChatCompletion, {"messages": MESSAGES, "tools": TOOLS}),
        ("chat/completions", ChatCompletion, {"messages": MESSAGES, "max_tokens": 1, "n": 2}),
        ("completions", Completion, {"prompt": "Once", "max_tokens": 4}),
        ("completions", Completion, {"prompt": ["Once", "There"], "n": 2, "max_tokens": 4}),
    ],
)
def test_chats_and_completions_match_the_clients_types(builtin_server, path, kind, body):
    """Streamed and whole."""
    check(kind, post(builtin_server, path, **body).json())
    text = post(
        builtin_server, path, **body, stream=True, stream_options={"include_usage": True}
    ).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 1
    for chunk in chunks:
        # whose type has no null for the reason, though OpenAI's own chunks have it too
        if kind is Completion:
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(ChatCompletionChunk if kind is ChatCompletion else Completion, chunk)


def test_models_and_embeddings_match_the_clients_types(builtin_server, fake_server):
    for entry in builtin_server.client.get("/v1/models").json()["data"]:
        check(Model, entry)
    check(CreateEmbeddingResponse, post(fake_server, "embeddings", input="a").json())


def test_errors_have_all_four_keys(builtin_server):
    """This holds for every kind of error, on every route."""
    client = builtin_server.client
    answers = [
        client.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": -1}),
        client.post(
            "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
        ),
        client.post("/v1/responses", json={}),
        client.get("/v1/responses/x"),
        client.get("/v1/files/x"),
        client.get("/v1/files?limit=0"),
        client.get("/v1/batches/x"),
        client.post(
            "/v1/batches",
            json={"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": ""},
        ),
        client.put("/v1/files"),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
