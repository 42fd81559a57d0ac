"""No request, however large, keeps the event loop from serving others.

watched_serve.py measures what each callback takes while the largest inputs that the limits permit
go to every route with a body.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.reliability import watched_serve
from cllm.server.app import routes
from cllm.server.openapi import find_type

LIMIT = 0.2  # seconds of CPU time
# A little less than a body may have: bytes, objects and members, values, messages and parts.
SIZE, STRUCTURE, VALUES, PARTS = 3_900_000, 95_000, 480_000, 9_900
NOT_JSON = {"/v1/files"}
# off unless the operator allows them: refused before the body is read
COSTLY = {"/benchmark", "/bench/run", "/bench/reports", "/api/pull"}


@pytest.fixture(scope="module")
def start_watched(start_server_once, tmp_path_factory):
    """Start a server with a watched event loop. ``check()`` fails if a callback took too long since
    the last check.
    """

    def start(*arguments):
        report = tmp_path_factory.mktemp("watched") / "report"
        report.touch()
        server = start_server_once(*arguments, program=(watched_serve.__file__, str(report)))
        seen = 0

        def check():
            nonlocal seen
            server.client.get("/health")
            lines = report.read_text()[seen:]
            seen += len(lines)
            worst = max(lines.splitlines(), key=lambda line: float(line.split()[0]), default="0")
            assert float(worst.split()[0]) < LIMIT, worst

        server.wait_until_idle()
        seen = len(report.read_text())  # what the start has taken is nobody's
        return SimpleNamespace(client=server.client, check=check)

    return start


@pytest.fixture(scope="module")
def fake(start_watched):
    return start_watched(
        "--backend.name", "fake", "--context", "20000", "--sampling.max-tokens", "5"
    )


@pytest.fixture(scope="module")
def builtin(start_watched):
    return start_watched("--sampling.max-tokens", "5")


def send(watched, path, body, **headers):
    """Return the answer, whatever its status, and check that the event loop was not blocked
    meanwhile.
    """
    content = (
        body
        if isinstance(body, bytes)
        else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    )
    answer = watched.client.post(
        path, content=content, headers={"content-type": "application/json", **headers}
    )
    watched.check()
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 413
    return answer


def bodies():
    """Return an example body for each route that takes JSON."""
    for route in routes():
        model = (route.openapi_extra or {}).get("x-models", {}).get("body")
        if model is not None and route.path not in NOT_JSON | COSTLY:
            extra: Any = find_type(model).model_config["json_schema_extra"]
            (example,) = extra["examples"]
            yield pytest.param(route.path, example, id=route.path[1:])


GENERIC = {
    "lists": [[]] * STRUCTURE,
    "objects": [{"a": 1}] * (STRUCTURE // 2),
    "members": {f"k{i}": 1 for i in range(STRUCTURE)},
    "numbers": [1.5] * VALUES,
    "texts": ["a"] * VALUES,
    "text": "\u00e9{[:," * (SIZE // 6),
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "example"), [*bodies()])
def test_large_body_does_not_block_the_loop_on_any_route(fake, path, example):
    if isinstance(example, list):
        send(fake, path, example * (STRUCTURE // 4))
        return
    model = {"model": ""} if "model" in example else {}
    send(fake, path, {**example, **model, "unknown": GENERIC["members"]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERIC)
def test_large_bodies_of_every_kind_do_not_block_the_loop(fake, kind):
    send(fake, CHAT, {"messages": [user()], "unknown": GENERIC[kind]})


def user(content="a"):
    return {"role": "user", "content": content}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x" * 300}
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(STRUCTURE // 4)},
}
DEEP = {"type": "object", "anyOf": [{}] * STRUCTURE}
TEXTS = {
    "a": "a" * SIZE,
    "words": "ab c" * (SIZE // 4),
    "marks": "<|im_end|>" * (SIZE // 10),
    "blanks": " " * SIZE,
}
CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens"


def tools(schema):
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def conversation(*turns):
    return [*turns] * (PARTS // len(turns))


CASES = {
    "messages": (CHAT, {"messages": conversation(user("ab " * 100))}),
    "parts": (CHAT, {"messages": [user([{"type": "text", "text": "a"}] * (PARTS - 1))]}),
    "calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * (PARTS - 1)}]}),
    "results": (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                *[{"role": "tool", "tool_call_id": "c", "content": "x" * 300}] * (PARTS - 2),
            ],
        },
    ),
    "wide tool": (CHAT, {"messages": [user()], "tools": tools(WIDE)}),
    "deep tool": (CHAT, {"messages": [user()], "tools": tools(DEEP)}),
    "required tool": (
        CHAT,
        {"messages": [user()], "tools": tools(WIDE), "tool_choice": "required"},
    ),
    "schema": (
        CHAT,
        {
            "messages": [user()],
            "response_format": {"type": "json_schema", "json_schema": {"schema": WIDE}},
        },
    ),
    "schema as text": (CHAT, {"messages": [user()], "guided_json": json.dumps(WIDE)}),
    "choice": (CHAT, {"messages": [user()], "guided_choice": ["a"] * VALUES}),
    "stop": (CHAT, {"messages": [user()], "stop": ["a"] * VALUES}),
    "breakers": (CHAT, {"messages": [user()], "dry_sequence_breakers": ["a"] * VALUES}),
    "Anthropic's messages": (
        COUNT,
        {"model": "", "messages": conversation(user(), {**user(), "role": "assistant"})},
    ),
    "Anthropic's blocks": (
        COUNT,
        {
            "model": "",
            "messages": [
                {"role": "assistant", "content": [USE] * (PARTS // 2)},
                user([RESULT] * (PARTS // 2 - 2)),
            ],
        },
    ),
    "Ollama's calls": (
        "/api/chat",
        {
            "model": "",
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}] * PARTS,
                }
            ],
        },
    ),
    "Responses' items": (
        RESPONSES,
        {"input": conversation({"role": "developer", "content": "x" * 300})},
    ),
    "Responses' first items": (
        RESPONSES,
        {"input": conversation({"role": "system", "content": "x" * 300})},
    ),
    "Responses' calls": (
        RESPONSES,
        {
            "input": conversation(
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            )
        },
    ),
    "Responses' references": (
        RESPONSES,
        {
            "input": conversation(
                {"type": "item_reference", "id": "x"}, {"role": "user", "content": "a" * 300}
            )
        },
    ),
    "prompts": ("/generate", {"prompts": ["ab " * 10_000] * 120, "max_tokens": 1}),
    "token ids": ("/v1/completions", {"prompt": [1] * VALUES}),
    "lists of token ids": ("/v1/completions", {"prompt": [[1]] * STRUCTURE}),
    "texts to embed": ("/v1/embeddings", {"input": ["a"] * VALUES}),
    "documents": ("/v1/rerank", {"query": "a", "documents": ["a"] * VALUES}),
    "large documents": ("/v1/rerank", {"query": "a", "documents": ["ab " * 600] * 2000}),
    "pieces": (
        "/tokenize",
        {"content": "\u00e9" * 49_000, "with_pieces": True, "return_token_strs": True},
    ),
    "too many pieces": ("/tokenize", {"content": "a" * SIZE, "with_pieces": True}),
    "detokenize": ("/detokenize", {"tokens": [72] * VALUES}),
    "decode": ("/decode", {"tokens": [72] * VALUES}),
    "template": ("/apply-template", {"messages": conversation(user("<|im_end|>" * 30))}),
    **{
        f"{path} {name}": (path, body)
        for name, text in TEXTS.items()
        for path, body in {
            "/tokenize": {"content": text},
            "/apply-template": {"messages": [user(text)]},
            "/encode": {"text": text},
            CHAT: {"messages": [user(text)]},
            "/v1/completions": {"prompt": text},
            "/v1/embeddings": {"input": text},
            COUNT: {"model": "", "messages": [user(text)]},
            "/api/generate": {"model": "", "prompt": text},
            "/api/embed": {"model": "", "input": [text]},
            RESPONSES: {"input": text, "instructions": "a"},
        }.items()
    },
}

OF_TOKENS = {*TEXTS, "pieces", "detokenize", "decode", "ids", "prompts"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_large_requests_do_not_block_the_loop(fake, case):
    path, body = CASES[case]
    version = {"anthropic-version": "2023-06-01"} if path == COUNT else {}
    assert send(fake, path, body, **version).status_code != 404


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.split()[-1] in OF_TOKENS])
def test_large_texts_do_not_block_the_loop_with_a_real_vocabulary(builtin, case):
    assert send(builtin, *CASES[case]).status_code != 404


@pytest.mark.slow
def test_long_conversation_of_responses_does_not_block_the_loop(fake):
    """Each request reads the stored responses before it again."""
    body = {"input": [user("x" * 9)] * 100}
    previous = None
    for _ in range(12):
        answer = send(fake, RESPONSES, {**body, "previous_response_id": previous})
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
    assert fake.client.get(f"{RESPONSES}/{previous}/input_items").status_code == 200
    fake.check()


@pytest.mark.slow
@pytest.mark.parametrize("filling", [b"\0", b"\r", b"\r\n--x", b"--limit"])
def test_upload_does_not_block_the_loop(fake, filling):
    head = b'--limit\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    data = head % (b"purpose", b"") + b"batch\r\n" + head % (b"file", b'; filename="a"')
    data += filling * (20_000_000 // len(filling)) + b"\r\n--limit--\r\n"
    send(fake, "/v1/files", data, **{"content-type": "multipart/form-data; boundary=limit"})
