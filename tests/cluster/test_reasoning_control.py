"""A front passes the order to end a reasoning on to the replica that generates the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.conftest import start_front

pytestmark = [pytest.mark.slow, pytest.mark.llama]

CONTROL = "/v1/chat/completions/control"
ASK = {
    "messages": [{"role": "user", "content": "What is 27 plus 45?"}],
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_budget_message": "\nTime is up.",
    "reasoning_control": True,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def order(server: Any, answer_id: str) -> tuple[int, Any]:
    body = {"id": answer_id, "action": "reasoning_end"}
    answer = server.client.post(CONTROL, json=body)
    return answer.status_code, answer.json()


def test_front_finds_the_replica_of_an_answer(start_server) -> None:
    replicas = [start_server() for _ in range(2)]
    front = start_front(start_server, *(one.url for one in replicas))
    marks = {"content": "</think>", "parse_special": True}
    [close] = front.client.post("/tokenize", json=marks).json()["tokens"]
    for _ in range(3):  # whichever replica answers
        body = {**ASK, "logit_bias": {close: -100}}
        with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer_id, texts = answer.headers["x-request-id"], {"reasoning": "", "content": ""}
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for name in texts:
                        texts[name] += choice["delta"].get(name) or ""
                if len(texts["reasoning"]) > 40 and not texts["content"]:
                    assert order(front, answer_id) == (200, {"success": True})
        assert texts["reasoning"].endswith("\nTime is up.")
        assert texts["content"]
        gone = {"success": False, "message": "no active completion for this id"}
        assert order(front, answer_id) == (200, gone)
    status, error = order(front, "chatcmpl-0")
    assert (status, error["error"]["code"]) == (404, "completion_not_found")
    status, error = order(front, "")
    assert (status, error["error"]["param"]) == (400, "id")
