"""Errors of Anthropic's and Ollama's routes, in each dialect's form and as the real clients'
exceptions.
"""

import contextlib
import http.client
import json
import re
import signal
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2
import ollama
import pytest
from conftest import PATIENCE

pytestmark = pytest.mark.server  # all of them, so that `make check` need not load the clients

MESSAGES = [{"role": "user", "content": "hi"}]
ANTHROPIC = {"model": "fake", "messages": MESSAGES, "max_tokens": 4}
OLLAMA = {"model": "fake", "messages": MESSAGES, "stream": False}
ENDLESS = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
ROUTES = [("/v1/messages", ANTHROPIC), ("/api/chat", OLLAMA)]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}


def check_anthropic(answer, status, kind):
    """Check that the error has exactly the form that Anthropic's clients read."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert content.keys() == {"type", "error", "request_id"}
    assert content["type"] == "error"
    assert content["error"].keys() == {"type", "message"}
    assert content["error"]["type"] == kind
    assert content["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return content["error"]["message"]


def check_ollama(answer, status):
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert content.keys() == {"error"}
    assert answer.headers["x-request-id"].startswith("req_")
    return content["error"]


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "system", "content": "x"}, *MESSAGES]}, "messages[0].role"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "The "}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}
                ]
            },
            ".input",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
        ({"stop_sequences": ["x" * 10**5]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"metadata": {"user_id": "u" * 257}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0]"),
        ({"tools": [TOOL, {**TOOL, "input_schema": 5}]}, "tools[1].input_schema"),
        ({"tools": [{**TOOL, "name": "f\n"}]}, "tools[0]"),
        ({"tools": [TOOL] * 10_000}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"priority": "high"}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
    ],
)
def test_invalid_anthropic_request_gets_400_with_the_field(fake_server, patch, named):
    """A stream is rejected before its first byte."""
    for stream in (False, True):
        body = {**ANTHROPIC, "stream": stream, **patch}
        body = {name: value for name, value in body.items() if value is not None}
        answer = fake_server.client.post("/v1/messages", json=body)
        assert named in check_anthropic(answer, 400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_rejected_thread_has_the_code_that_makes_clients_continue_without_it(
    fake_server, path, thread
):
    answer = fake_server.client.post(path, json={**ANTHROPIC, "thread": thread})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("path", "patch", "named"),
    [
        ("chat", {"model": None}, "model"),
        ("chat", {"model": ""}, "model"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [1]}, "messages[0]"),
        ("chat", {"messages": [{}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images",
        ),
        ("chat", {"tools": "x"}, "tools"),
        ("chat", {"tools": [5]}, "tools[0]"),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "a"}}]},
            "tools[0].function.parameters",
        ),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"format": 5}, "format"),
        ("chat", {"think": True}, "thinking"),
        ("chat", {"think": "hard"}, "think"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"options": 5}, "options"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("chat", {"options": {"num_predict": True}}, "options.num_predict"),
        ("chat", {"options": {"top_p": 2}}, "options.top_p"),
        ("chat", {"options": {"min_p": 2}}, "options.min_p"),
        ("chat", {"options": {"top_k": -5}}, "options.top_k"),
        ("chat", {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("chat", {"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ("chat", {"options": {"presence_penalty": 3}}, "options.presence_penalty"),
        ("chat", {"options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
        ("chat", {"options": {"seed": "1"}}, "options.seed"),
        ("chat", {"options": {"num_predict": -3.0}}, "options.num_predict"),
        ("chat", {"options": {"seed": 2**63}}, "options.seed"),
        ("chat", {"options": {"stop": ["x"] * 1000}}, "options.stop"),
        ("chat", {"options": {"stop": [""]}}, "options.stop"),
        ("chat", {"options": {"stop": [5]}}, "options.stop"),
        ("chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("chat", {"options": {"typical_p": 2}}, "options.typical_p"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ("chat", {"deadline_ms": 0}, "deadline_ms"),
        ("generate", {"prompt": "a", "suffix": "b"}, "does not support infill"),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": ["a"]}, "prompt"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "a", "raw": True, "system": "s"}, "raw"),
        ("generate", {"prompt": "a", "raw": "yes"}, "raw"),
        ("embed", {"input": 5}, "input"),
        ("embed", {"input": [5]}, "input"),
        ("embed", {"input": [""]}, "input"),
        ("embed", {"input": ["a"] * 2049}, "input"),
        ("embed", {"input": "a", "dimensions": 33}, "dimensions"),
        ("embeddings", {}, "prompt"),
        ("show", {"model": None}, "model"),
    ],
)
def test_invalid_ollama_request_gets_400_with_the_field(fake_server, path, patch, named):
    body = {"model": "fake", **(OLLAMA if path == "chat" else {}), **patch}
    body = {name: value for name, value in body.items() if value is not None}
    assert named in check_ollama(fake_server.client.post(f"/api/{path}", json=body), 400)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"max_tokens": NaN}',
        b'{"model": "\\ud800"}',
        b"\xff\xfe",
        b'{"a": ' + b"[" * 100_000,
        b'{"max_tokens": 1e999}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_body_other_than_a_json_object_gets_400(fake_server, data):
    headers = {"content-type": "application/json"}
    post = fake_server.client.post
    check_anthropic(
        post("/v1/messages", content=data, headers=headers), 400, "invalid_request_error"
    )
    check_ollama(post("/api/chat", content=data, headers=headers), 400)


def test_other_invalid_requests_have_the_dialects_form(fake_server):
    """The body is too large, or the content type, method, route, model or version is wrong."""
    client = fake_server.client
    large = {**ANTHROPIC, "messages": [{"role": "user", "content": "a" * 1_000_001}]}
    check_anthropic(client.post("/v1/messages", json=large), 413, "request_too_large")
    check_ollama(client.post("/api/chat", json=large), 413)
    check_anthropic(client.post("/v1/messages", content=b"{}"), 415, "invalid_request_error")
    check_ollama(
        client.post("/api/chat", content=b"{}", headers={"origin": "http://elsewhere"}), 415
    )
    check_anthropic(client.get("/v1/messages"), 405, "invalid_request_error")
    check_ollama(client.get("/api/chat"), 405)
    check_anthropic(client.post("/v1/messages/batches", json={}), 400, "invalid_request_error")
    check_anthropic(client.get("/v1/messages/batches/x/y"), 404, "not_found_error")
    check_anthropic(
        client.get("/v1/nope", headers={"anthropic-version": "2023-06-01"}), 404, "not_found_error"
    )
    for path in ("push", "blobs/sha256:x", "me"):
        check_ollama(client.post(f"/api/{path}", json={}), 404)
    for path in ("create", "copy"):  # not allowed here
        check_ollama(client.post(f"/api/{path}", json={}), 403)
    check_ollama(client.request("DELETE", "/api/delete", json={"model": "fake"}), 403)
    assert client.get("/apix").json()["error"]["code"] == "not_found"
    for name in ("../../etc/passwd", "http://x/y", "a\0b", "x" * 100_000, "other", "fake:8b"):
        message = check_anthropic(
            client.post("/v1/messages", json={**ANTHROPIC, "model": name}), 404, "not_found_error"
        )
        assert len(message) < 400
        assert (
            len(check_ollama(client.post("/api/chat", json={**OLLAMA, "model": name}), 404)) < 400
        )
        check_ollama(client.post("/api/show", json={"name": name}), 404)
    for version in ("1", "2023-06", "latest", "2023-06-01 "):
        answer = client.post(
            "/v1/messages", json=ANTHROPIC, headers={"anthropic-version": version + "x"}
        )
        assert "anthropic-version" in check_anthropic(answer, 400, "invalid_request_error")
    answer = client.get("/v1/models?limit=0", headers={"anthropic-version": "2023-06-01"})
    assert "limit" in check_anthropic(answer, 400, "invalid_request_error")


def test_prompt_of_the_whole_context_is_too_long_and_one_less_is_answered(fake_server):
    """max_tokens beyond the context only ends the answer there."""

    def ask(count):
        body = {**ANTHROPIC, "messages": [{"role": "user", "content": "a" * count}]}
        return fake_server.client.post("/v1/messages", json={**body, "max_tokens": 10_000})

    count = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    answer = fake_server.client.post("/v1/messages/count_tokens", json=count)
    room = 512 - answer.json()["input_tokens"]
    message = check_anthropic(ask(room + 1), 400, "invalid_request_error")
    assert message == "prompt is too long: 512 tokens > 511 maximum"
    answer = ask(room).json()
    usage = answer["usage"]
    num_tokens = usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0)
    assert (num_tokens, usage["output_tokens"]) == (511, 1)
    assert answer["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("length", [600, 900_000])
def test_too_long_prompt_gets_400_with_its_length_and_the_limit(fake_server, length):
    """Streams are rejected before the first byte."""
    messages = [{"role": "user", "content": "a" * length}]
    for stream in (False, True):
        answer = fake_server.client.post(
            "/v1/messages", json={**ANTHROPIC, "messages": messages, "stream": stream}
        )
        message = check_anthropic(answer, 400, "invalid_request_error")
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        assert found, message
        assert int(found[1]) > int(found[2]) == 511
        answer = fake_server.client.post(
            "/api/chat", json={**OLLAMA, "messages": messages, "stream": stream}
        )
        assert "512" in check_ollama(answer, 400)
    assert "512" in check_ollama(
        fake_server.client.post("/api/generate", json={"model": "fake", "prompt": "a" * length}),
        400,
    )


@pytest.mark.parametrize("text", ["a" * 600, "a" * 900_000, "<|im_end|>" * 600])
def test_tokens_of_a_prompt_beyond_the_context_are_counted(fake_server, text):
    messages = [{"role": "user", "content": text}]
    counted = {
        path: fake_server.client.post(path, json={"model": "fake", **body}).json()
        for path, body in (
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses/input_tokens", {"input": text}),
        )
    }
    first, second = (answer["input_tokens"] for answer in counted.values())
    assert len(text) < first == second < len(text) + 100


def test_counting_so_many_control_tokens_that_it_takes_long_is_rejected(fake_server):
    messages = [{"role": "user", "content": "<|im_end|>" * 20_000}]
    answer = fake_server.client.post(
        "/v1/messages/count_tokens", json={"model": "fake", "messages": messages}
    )
    message = check_anthropic(answer, 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")


def test_very_many_messages_are_rejected_in_linear_time(fake_server):
    """Messages of one role, calls, and their results."""
    calls = [{"function": {"name": "f"}}] * 10_000
    results = [{"role": "tool", "content": ""}] * 10_000
    bodies = {
        "/v1/messages": {**ANTHROPIC, "messages": [{"role": "user", "content": "a"}] * 25_000},
        "/api/chat": {
            **OLLAMA,
            "messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *results],
        },
    }
    for path, body in bodies.items():
        before = fake_server.cpu_seconds()
        assert fake_server.client.post(path, json=body).status_code == 400
        assert fake_server.cpu_seconds() - before < 5


def test_unknown_and_ineffective_parameters_are_ignored(fake_server):
    """New parameters, and those of a server that loads models for its clients."""
    body = {
        **ANTHROPIC,
        "zzz": 1,
        "service_tier": "auto",
        "context_management": {"edits": []},
        "speed": "fast",
    }
    body |= {
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "disabled", "display": "omitted"},
    }
    assert fake_server.client.post("/v1/messages", json=body).status_code == 200
    options = {
        "num_ctx": 10**9,
        "num_gpu": 1,
        "num_thread": 2,
        "low_vram": True,
        "numa": False,
        "new": 1,
    }
    body = {
        **OLLAMA,
        "options": options,
        "keep_alive": "5m",
        "format": "",
        "think": False,
        "truncate": True,
    }
    assert fake_server.client.post("/api/chat", json=body).status_code == 200
    body = {
        "model": "fake",
        "prompt": "a",
        "template": "",
        "system": "",
        "suffix": "",
        "context": [],
        "images": [],
    }
    assert (
        fake_server.client.post("/api/generate", json={**body, "stream": False}).status_code == 200
    )


def test_pull_is_rejected_by_default(fake_server):
    """A server downloads models only if its operator allows it."""
    for stream in (False, True):
        answer = fake_server.client.post("/api/pull", json={"model": "hf.co/a/b", "stream": stream})
        assert "server.allow_pull" in check_ollama(answer, 403)


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def crowd(server, count, key="x"):
    """Start ``count`` endless streams in OpenAI's dialect, all of one account."""
    headers = {"authorization": f"Bearer {key}"}
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            answer = stack.enter_context(
                server.client.stream("POST", "/v1/completions", json=ENDLESS, headers=headers)
            )
            assert answer.status_code == 200
        yield


@pytest.mark.slow
def test_full_queue_gets_529_or_503_with_retry_after(new_narrow_server):
    """529 for Anthropic's clients, 503 for Ollama's. x-api-key determines the account like a bearer
    token.
    """
    with anthropic.Anthropic(base_url=new_narrow_server.url, api_key="x", max_retries=0) as client:
        # what it imports late takes longer than the crowd stays
        client.messages.create(**ANTHROPIC)
        with crowd(new_narrow_server, 12):
            with pytest.raises(anthropic.APIStatusError) as raised:
                client.messages.create(**ANTHROPIC)
            headers = {"x-api-key": "x"}
            answers = [
                new_narrow_server.client.post(path, json=body, headers=headers)
                for path, body in ROUTES
            ]
    check_anthropic(answers[0], 529, "overloaded_error")
    assert raised.value.type == "overloaded_error"
    check_ollama(answers[1], 503)
    assert min(int(answer.headers["retry-after"]) for answer in answers) >= 1
    new_narrow_server.wait_until_idle()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_while_queued_frees_the_queue_position(narrow_server, path, body, stream):
    with crowd(narrow_server, 4):
        headers = {"content-type": "application/json"}
        connections = [
            http.client.HTTPConnection(urlsplit(narrow_server.url).netloc) for _ in range(4)
        ]
        for connection in connections:
            connection.request("POST", path, json.dumps({**body, "stream": stream}), headers)
        wait_for(lambda: narrow_server.stats()["num_waiting"] == 4)
        for connection in connections:
            connection.close()
        wait_for(lambda: narrow_server.stats()["num_waiting"] == 0)
        assert narrow_server.stats()["num_running"] == 4
    narrow_server.wait_until_idle()


@pytest.mark.slow
def test_broken_stream_raises_the_clients_error(start_server):
    """The server shuts down while the stream is open and waiting."""
    server = start_server(
        "--backend.name", "fake", "--max-num-seqs", "1", "--server.drain-timeout", "0.3"
    )
    errors = []

    def read_message(client):
        with pytest.raises(anthropic.APIStatusError, match="shutting down") as raised, client:
            list(client.messages.create(**ANTHROPIC, stream=True))
        assert raised.value.type == "api_error"
        errors.append(raised.value)

    def read_chat(client):
        with pytest.raises(ollama.ResponseError, match="shutting down") as raised, client:
            list(client.chat("fake", MESSAGES, stream=True))
        errors.append(raised.value)

    clients = [
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0),
        ollama.Client(server.url),
    ]
    clients[0].messages.create(**ANTHROPIC)
    with contextlib.suppress(httpx2.HTTPError), crowd(server, 1):
        readers = zip((read_message, read_chat), clients, strict=True)
        threads = [threading.Thread(target=read, args=(client,)) for read, client in readers]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.stats()["num_waiting"] == 2)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
    assert len(errors) == 2
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_strict_mode_rejects_unknown_parameters(start_server):
    """Also in nested objects."""
    server = start_server("--backend.name", "fake", "--server.strict")
    faults: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"zzz": 1}, {"zzz": 1}, "zzz"),
        ({"thinking": {"type": "disabled", "zzz": 1}}, {"options": {"zzz": 1}}, ".zzz"),
    ]
    for patch, other, name in faults:
        answer = server.client.post("/v1/messages", json={**ANTHROPIC, **patch})
        assert name in check_anthropic(answer, 400, "invalid_request_error")
        assert name in check_ollama(server.client.post("/api/chat", json={**OLLAMA, **other}), 400)
    known = {**ANTHROPIC, "service_tier": "auto", "output_config": {"effort": "low"}}
    assert server.client.post("/v1/messages", json=known).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/nope", None),
        ("HEAD", "/", None),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
        ("POST", "/v1/messages", {**ANTHROPIC, "stream": True}),
        ("POST", "/api/chat", {**OLLAMA, "stream": True}),
    ],
)
def test_every_answer_has_a_request_id(fake_server, method, path, body):
    """In both headers that clients read. The id is new for each request and never the client's."""
    headers = {"x-request-id": "mine", "request-id": "mine"}
    answers = [
        fake_server.client.request(method, path, json=body, headers=headers) for _ in range(2)
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [answer.headers["request-id"] for answer in answers]
    assert ids[0] != ids[1]
    assert "mine" not in ids


def test_clients_raise_their_own_errors(fake_server):
    with anthropic.Anthropic(base_url=fake_server.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**{**ANTHROPIC, "messages": []})
        assert bad.value.request_id == json.loads(bad.value.response.text)["request_id"]
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ANTHROPIC, "model": "other"})
        with pytest.raises(anthropic.RequestTooLargeError):
            client.messages.create(**{**ANTHROPIC, "system": "a" * 1_000_001})
    with ollama.Client(fake_server.url) as client:
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError) as raised:
                list(client.chat("other", MESSAGES, stream=stream))
            assert raised.value.status_code == 404


def test_server_is_idle_and_serves_after_all_errors(fake_server):
    answer = fake_server.client.post("/v1/messages", json=ANTHROPIC)
    assert answer.json()["usage"]["output_tokens"] == 4
    answer = fake_server.client.post("/api/chat", json={**OLLAMA, "options": {"num_predict": 4}})
    assert answer.json()["eval_count"] == 4
    stats = fake_server.wait_until_idle()
    assert stats["num_seq_ids_in_use"] == stats["num_cells_held"] == 0
