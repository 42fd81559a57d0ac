"""``return_progress``: streams that tell how far the prompt is, as llama-server's."""

from __future__ import annotations

import itertools
import json

import pytest

PROMPTS = itertools.count()
ROUTES = ("/v1/chat/completions", "/v1/completions", "/completion", "/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def server(start_server_once):
    """A server that computes at most 64 prompt tokens in a step."""
    options = ("--context", "2048", "--scheduler.max-num-batched-tokens", "64")
    return start_server_once("--backend.name", "fake", *options)


@pytest.fixture
def body(server):
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    text = f"{next(PROMPTS)} is a number " * 20
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    return {"model": model, "prompt": text, "stream": True, "return_progress": True, **chat}


def read_objects(server, route, body):
    """Return the objects of a stream."""
    field = "messages" if "chat" in route else "prompt"
    known = {key: value for key, value in body.items() if key not in ("prompt", "messages")}
    if route.startswith("/api"):
        del known["max_tokens"]
        known["options"] = {"num_predict": 5}
    answer = server.client.post(route, json=known | {field: body[field]})
    assert answer.status_code == 200, answer.text
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def has_text(one):
    choice = one["choices"][0] if one.get("choices") else {}
    texts = (choice.get("text"), choice.get("delta", {}).get("content"))
    own = (one.get("content"), one.get("response"), one.get("message", {}).get("content"))
    return any((*texts, *own))


@pytest.mark.parametrize("route", ROUTES)
def test_stream_tells_the_progress_of_its_prompt_before_the_text(server, body, route):
    first = read_objects(server, route, body)
    second = read_objects(server, route, body)
    for objects, is_cached in ((first, False), (second, True)):
        reports = [one["prompt_progress"] for one in objects if "prompt_progress" in one]
        kinds = ["prompt_progress" in one for one in objects]
        assert kinds[: len(reports)] == [True] * len(reports)
        assert not any(map(has_text, objects[: len(reports)]))
        assert any(map(has_text, objects[len(reports) :]))
        assert len({(one["total"], one["cache"]) for one in reports}) == 1
        done = [one["processed"] for one in reports]
        assert done == sorted(set(done))
        assert (done[0], done[-1]) == (reports[0]["cache"], reports[0]["total"])
        assert (reports[0]["cache"] > 0) == is_cached
        times = [one["time_ms"] for one in reports]
        assert times == sorted(times)
        assert (len(reports) > 3) != is_cached


@pytest.mark.parametrize("route", ROUTES)
def test_progress_is_off_by_default(server, body, route):
    del body["return_progress"]
    assert not any("prompt_progress" in one for one in read_objects(server, route, body))


def test_answer_that_is_no_stream_has_no_progress(server, body):
    body["stream"] = False
    (answer,) = read_objects(server, ROUTES[0], body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "prompt_progress" not in answer
