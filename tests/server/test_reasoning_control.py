"""Reasoning that ends with a message, on a budget or at the client's request, over HTTP."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx2
import pytest
from client_ledger import write_accounts

from cllm.models import builtin

CONTROL = "/v1/chat/completions/control"
CHAT = "/v1/chat/completions"
END = {"action": "reasoning_end"}
MESSAGE = "\nTime is up."
ASK = {
    "messages": [{"role": "user", "content": "What is 27 plus 45?"}],
    "chat_template_kwargs": {"enable_thinking": True},
    "temperature": 0,
    "reasoning_budget_message": MESSAGE,
}


@pytest.fixture(scope="module")
def endless(builtin_server) -> dict:
    """A request whose reasoning goes on until something ends it."""
    [close] = post(builtin_server, "/tokenize", content="</think>", parse_special=True)["tokens"]
    return {**ASK, "reasoning_control": True, "logit_bias": {close: -100}, "ignore_eos": True}


def post(server, path, **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Stream:
    """The chunks of a chat, joined to texts of its choices."""

    def __init__(self, server, body, **headers) -> None:
        self._client = httpx2.Client(base_url=server.url, timeout=60, headers=headers)
        self._request = self._client.stream("POST", CHAT, json={**body, "stream": True})
        response = self._request.__enter__()
        self._lines = response.iter_lines()
        self.id = response.headers["x-request-id"]
        self.reasoning, self.content, self.finish = {}, {}, {}
        self.usage: dict = {}

    def read(self, count: int | None = None) -> None:
        """Read some events, by default all."""
        for line in self._lines:
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert chunk["id"] == self.id
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                at, delta = choice["index"], choice["delta"]
                thought, text = delta.get("reasoning_content"), delta.get("content")
                self.reasoning[at] = self.reasoning.get(at, "") + (thought or "")
                self.content[at] = self.content.get(at, "") + (text or "")
                self.finish[at] = choice["finish_reason"]
            count = None if count is None else count - 1
            if count == 0:
                return
        self.close()

    def close(self) -> None:
        self._request.__exit__(None, None, None)
        self._client.close()


@pytest.mark.parametrize(
    "budget",
    [
        {"thinking_token_budget": 5},
        {"reasoning_budget_tokens": 5},
        {"thinking_budget_tokens": 5, "reasoning_budget_tokens": None},
        {"thinking_token_budget": 5, "reasoning_budget_tokens": 9},
    ],
)
def test_budget_ends_with_a_message(builtin_server, budget) -> None:
    answer = post(builtin_server, CHAT, **ASK, **budget)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"].endswith(MESSAGE)
    assert len(message["reasoning_content"]) < 10 + len(MESSAGE)
    assert message["content"]
    free = post(builtin_server, CHAT, **{**ASK, "reasoning_budget_message": ""}, **budget)
    assert MESSAGE not in free["choices"][0]["message"]["reasoning_content"]
    plain = post(builtin_server, CHAT, **ASK, reasoning_budget_tokens=-1)
    assert MESSAGE not in plain["choices"][0]["message"]["reasoning_content"]


def test_budget_of_0_leaves_the_message(builtin_server) -> None:
    answer = post(builtin_server, CHAT, **ASK, thinking_token_budget=0)
    assert answer["choices"][0]["message"]["reasoning_content"] == MESSAGE.strip()


def test_message_is_text(builtin_server) -> None:
    """Control tokens in it are none."""
    body = {**ASK, "reasoning_budget_message": "<|im_end|><think> so"}
    message = post(builtin_server, CHAT, **body, thinking_token_budget=5)["choices"][0]["message"]
    assert message["reasoning_content"].endswith("<|im_end|><think> so")
    assert message["content"]


def test_response_has_the_message(builtin_server) -> None:
    body = {"input": "What is 27 plus 45?", "reasoning": {"effort": "high"}, "temperature": 0}
    fields = {"reasoning_budget_tokens": 5, "reasoning_budget_message": MESSAGE}
    answer = post(builtin_server, "/v1/responses", **body, **fields)
    assert answer["output"][0]["content"][0]["text"].endswith(MESSAGE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_budget_message": "so</think>"}, "reasoning_budget_message"),
        ({"reasoning_budget_message": "x" * 4097}, "reasoning_budget_message"),
        ({"reasoning_budget_message": 7}, "reasoning_budget_message"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"reasoning_control": "yes"}, "reasoning_control"),
    ],
)
def test_invalid_fields_are_named(builtin_server, fields, param) -> None:
    answer = builtin_server.client.post(CHAT, json={**ASK, "thinking_token_budget": 5, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.slow
def test_budget_that_cannot_be_enforced_names_its_field(start_server, tmp_path) -> None:
    """The fake model has no token that ends reasoning. Without a budget, it is no error."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[-1].content }}<think></think>{% if false %}<think>{% endif %}a")
    fake = ("--backend.name", "fake", "--chat-template-file", str(path))
    server = start_server(*fake)
    ask = {"messages": ASK["messages"], "max_tokens": 40, "model": "fake"}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 20}}
    for url, fields, param in (
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
        ("/v1/messages", thinking, "thinking.budget_tokens"),
    ):
        answer = server.client.post(url, json={**ask, **fields})
        assert answer.status_code == 400, answer.text
        assert param in answer.text
    free = {**ask, "reasoning_control": True, "reasoning_budget_message": MESSAGE}
    assert post(server, CHAT, **free)["choices"]


def test_client_ends_the_reasoning(builtin_server, endless) -> None:
    """What it asks for afterwards changes nothing."""
    usage = {"stream_options": {"include_usage": True}}
    stream = Stream(builtin_server, {**endless, **usage, "n": 2, "seed": 3, "max_tokens": 1500})
    stream.read(50)
    before = builtin_server.metric("reasoning_ended_total")
    for _ in range(2):
        assert post(builtin_server, CONTROL, id=stream.id, **END) == {"success": True}
    while not all(stream.content.values()):
        stream.read(1)
    assert post(builtin_server, CONTROL, id=stream.id, **END) == {"success": True}
    stream.read()
    for index in range(2):
        assert stream.reasoning[index].endswith(MESSAGE)
        assert stream.finish[index] in ("stop", "length")
    details = stream.usage["completion_tokens_details"]
    assert 10 < details["reasoning_tokens"] < stream.usage["completion_tokens"]
    assert builtin_server.metric("reasoning_ended_total") == before + 2
    gone = {"success": False, "message": "no active completion for this id"}
    assert post(builtin_server, CONTROL, id=stream.id, **END) == gone


def test_structured_answer_follows_reasoning_that_the_client_has_ended(
    builtin_server, endless
) -> None:
    schema = {"type": "object", "properties": {"sum": {"enum": [71, 72]}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    stream = Stream(builtin_server, {**endless, "response_format": form})
    stream.read(20)
    assert post(builtin_server, CONTROL, id=stream.id, **END) == {"success": True}
    stream.read()
    assert stream.reasoning[0].endswith(MESSAGE)
    assert json.loads(stream.content[0])["sum"] in (71, 72)


def test_only_requests_that_ask_for_it_are_controlled(builtin_server, endless) -> None:
    stream = Stream(builtin_server, {**endless, "reasoning_control": False})
    refused = {"success": False, "message": "reasoning control not enabled for this completion"}
    assert post(builtin_server, CONTROL, id=stream.id, **END) == refused
    stream.close()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"id": "chatcmpl-0", **END}, 404, "id"),
        ({"id": "", **END}, 400, "id"),
        (END, 400, "id"),
        ({"id": "chatcmpl-0"}, 400, "action"),
        ({"id": "chatcmpl-0", "action": "stop"}, 400, "action"),
    ],
)
def test_invalid_orders_are_rejected(builtin_server, body, status, param) -> None:
    answer = builtin_server.client.post(CONTROL, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.slow
def test_waiting_request_answers_at_once(start_server, endless) -> None:
    """It has no place in the engine when its client asks for that."""
    server = start_server("--max-num-seqs", "1")
    first = Stream(server, endless)
    second = Stream(server, endless)
    assert post(server, CONTROL, id=second.id, **END) == {"success": True}
    reading = threading.Thread(target=second.read)
    reading.start()
    assert post(server, CONTROL, id=first.id, **END) == {"success": True}
    first.close()
    reading.join(60)
    assert second.reasoning[0] == MESSAGE.strip()
    assert second.content[0]


@pytest.mark.slow
def test_other_accounts_cannot_end_the_reasoning(start_server, endless, tmp_path) -> None:
    """They are told no more than that there is no such answer. Administrators can."""
    path = tmp_path / "keys.json"
    write_accounts(path)
    server = start_server(CLLM_SERVER_KEYS_FILE=str(path))
    stream = Stream(server, endless, authorization="Bearer key of ann")

    def order(name: str) -> tuple[int, object]:
        answer = httpx2.post(
            server.url + CONTROL,
            json={"id": stream.id, **END},
            headers={"authorization": f"Bearer key of {name}"},
        )
        return answer.status_code, answer.json().get("success")

    assert order("bob") == (404, None)
    assert order("nobody") == (401, None)
    stream.read(20)
    assert not stream.content[0]
    assert order("ann") == order("root") == (200, True)
    stream.read()
    assert stream.content[0]
    assert order("bob") == (404, None)
    assert order("ann") == order("root") == (200, False)


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_that_resumes_is_separated_and_has_a_budget(
    start_server, tmp_path, streams
) -> None:
    """The prompt has closed the reasoning. The bias makes the model open it again and again."""
    template = (Path(builtin.__file__).parent / "chat_template.jinja").read_text()
    opening = "{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    assert opening in template
    path = tmp_path / "template.jinja"
    path.write_text(template.replace(opening, "{{- '<think>\\n\\n</think>\\n\\n' }}"))
    server = start_server("--chat-template-file", str(path))
    [mark] = post(server, "/tokenize", content="<think>", parse_special=True)["tokens"]
    usage = {"stream_options": {"include_usage": True}} if streams else {}
    body = {"messages": ASK["messages"], "temperature": 0, "logit_bias": {mark: 100}, **usage}

    def ask(**fields) -> tuple[str, str, int]:
        if streams:
            stream = Stream(server, {**body, **fields})
            stream.read()
            message = {"reasoning_content": stream.reasoning[0], "content": stream.content[0]}
            counts = stream.usage
        else:
            answer = post(server, CHAT, **body, **fields)
            message, counts = answer["choices"][0]["message"], answer["usage"]
        num_tokens = counts["completion_tokens_details"]["reasoning_tokens"]
        return message["reasoning_content"], message["content"] or "", num_tokens

    assert ask(max_tokens=5) == ("<think>" * 4, "", 4)
    reasoning, content, num_tokens = ask(max_tokens=40, thinking_token_budget=2)
    assert reasoning == "<think>" * 2
    assert not content.startswith("<think>"), "it cannot begin with reasoning again"
    assert "7<think>" in content, "within a line it is text"
    assert num_tokens == 4  # with the two that end it
