"""The llama-server API: /infill, /props, timings, and its name of reasoning."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.core.params import SamplingParams
from cllm.server.llama_server.routes import InfillBody, PlainEvents, collect
from cllm.serving.answer import Generation
from cllm.text.output_reader import Delta

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "What is 27 plus 45?"}]
LIMIT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
TIMINGS = {
    f"{part}_{name}"
    for part in ("prompt", "predicted")
    for name in ("n", "ms", "per_token_ms", "per_second")
} | {"cache_n"}
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [{"filename": "b.py", "text": "b = 1\n", "time": [1, 2]}],
    "prompt": "    return ",
    "n_predict": 8,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}


@pytest.fixture(scope="module")
def filling(start_server_once, tiny_model):
    """A server whose model has infill tokens and writes random text."""
    return start_server_once(str(tiny_model("gemma3")))


def events_of(answer):
    lines = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.llama
def test_infill_answer_has_llama_servers_fields(filling):
    answer = filling.client.post("/infill", json={**VIM, "ignore_eos": True}).json()
    assert answer["stop"] is True
    assert (answer["stop_type"], answer["tokens_predicted"], answer["truncated"]) == (
        "limit",
        8,
        False,
    )
    assert (
        answer["generation_settings"]["n_ctx"]
        == filling.client.get("/model/info").json()["context_length"]
    )
    assert answer["timings"].keys() == TIMINGS
    assert (answer["timings"]["predicted_n"], answer["timings"]["prompt_n"] > 20) == (8, True)
    assert answer["timings"]["predicted_per_second"] > 0
    encode = filling.client.post(
        "/encode", json={"text": VIM["input_prefix"] + VIM["prompt"]}
    ).json()["tokens"]
    bare = filling.client.post(
        "/infill",
        json={"input_prefix": VIM["input_prefix"], "prompt": VIM["prompt"], "n_predict": 1},
    )
    assert bare.json()["tokens_evaluated"] == len(encode) + 3


@pytest.mark.llama
def test_streamed_infill_equals_the_whole_answer(filling):
    body: dict[str, Any] = {**VIM, "temperature": 0, "ignore_eos": True}
    whole = filling.client.post("/infill", json=body).json()
    events = events_of(filling.client.post("/infill", json={**body, "stream": True}))
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"].keys() == TIMINGS


@pytest.mark.llama
def test_infill_follows_json_schema(filling):
    """The header names the keywords that cannot be enforced."""
    body = {**VIM, "json_schema": {"type": "integer", "not": {"const": 4}}, "n_predict": 3}
    answer = filling.client.post("/infill", json=body)
    assert answer.json()["content"].strip().lstrip("-").isdigit()
    assert answer.headers["x-cllm-unenforced-keywords"] == "not"


@pytest.mark.llama
def test_infill_returns_only_the_requested_fields(filling):
    fields = [
        "content",
        "timings/prompt_n",
        "timings/predicted_per_second",
        "truncated",
        "nothing",
        "content/a",
    ]
    answer = filling.client.post("/infill", json={**VIM, "response_fields": fields}).json()
    assert answer.keys() == {
        "content",
        "timings/prompt_n",
        "timings/predicted_per_second",
        "truncated",
    }
    answer = filling.client.post("/infill", json={**VIM, "n_predict": 0, "response_fields": [""]})
    assert (answer.status_code, answer.json()) == (200, {}), "as editors warm up the cache"


@pytest.mark.llama
def test_infill_keeps_its_prompt_in_the_cache(filling):
    body = {"input_prefix": "cache " * 30, "input_suffix": "end", "temperature": 0}
    filling.client.post("/infill", json={**body, "n_predict": 0})
    filling.wait_until_idle()
    timings = filling.client.post("/infill", json={**body, "n_predict": 1}).json()["timings"]
    assert timings["cache_n"] > timings["prompt_n"]


@pytest.mark.llama
def test_infill_truncates_a_too_long_prompt(filling):
    body = {**VIM, "input_prefix": "x = 1\n" * 20_000, "input_suffix": "y = 2\n" * 20_000}
    answer = filling.client.post("/infill", json={**body, "ignore_eos": True})
    assert answer.status_code == 200
    assert (answer.json()["truncated"], answer.json()["tokens_predicted"]) == (True, 8)


@pytest.mark.llama
def test_completion_continues_a_prompt(builtin_server):
    """As Continue's llama.cpp provider sends it."""
    body = {"prompt": "27 plus 45 is", "n_predict": 8, "temperature": 0, "cache_prompt": True}
    whole = builtin_server.client.post("/completion", json=body).json()
    assert (whole["stop"], whole["truncated"], whole["tokens_predicted"] <= 8) == (
        True,
        False,
        True,
    )
    expected = builtin_server.client.post("/v1/completions", json={**body, "max_tokens": 8}).json()
    assert whole["content"] == expected["choices"][0]["text"]
    events = events_of(builtin_server.client.post("/completion", json={**body, "stream": True}))
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    tokens = builtin_server.client.post("/tokenize", json={"content": body["prompt"]}).json()[
        "tokens"
    ]
    again = builtin_server.client.post("/completion", json={**body, "prompt": tokens}).json()
    assert again["content"] == whole["content"]
    several = [body["prompt"], "def add(a, b):"]
    answers = builtin_server.client.post("/completion", json={**body, "prompt": several}).json()
    assert [answer["stop"] for answer in answers] == [True, True]
    assert answers[0]["content"] == whole["content"] != answers[1]["content"]
    assert answers[0]["tokens_evaluated"] == whole["tokens_evaluated"]
    alone = builtin_server.client.post("/completion", json={**body, "prompt": several[:1]}).json()
    assert alone["content"] == whole["content"]


@pytest.mark.llama
def test_completion_says_whether_there_is_a_new_line(builtin_server):
    body = {"prompt": "a", "n_predict": 2, "temperature": 0}
    for text, stream in (("\n", False), ("\n", True), ("x", False), ("x", True)):
        constrained = {**body, "grammar": f'root ::= "{text!r}"'.replace("'", ""), "stream": stream}
        answer = builtin_server.client.post("/completion", json=constrained)
        last = events_of(answer)[-1] if stream else answer.json()
        assert last["has_new_line"] == (text == "\n")


@pytest.mark.llama
def test_completion_without_a_prompt_is_refused(builtin_server):
    answer = builtin_server.client.post("/completion", json={"n_predict": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    several = {"prompt": ["a", "b"], "stream": True}
    answer = builtin_server.client.post("/completion", json=several)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    long = {"prompt": "a " * 100_000, "n_predict": 1}
    assert builtin_server.client.post("/completion", json=long).status_code == 400


class Endless:
    """An answer that goes on until it is stopped; its first token came ``seconds`` ago."""

    def __init__(self, seconds, *texts):
        self.generation = Generation("cmpl-1", [[1]], SamplingParams(max_tokens=99))
        self.generation.times.first = time.monotonic() - seconds
        self.texts, self.num_taken, self.stopped = texts, 0, False

    async def __aiter__(self):
        while True:
            self.num_taken += 1
            yield [Delta(0, self.texts[min(self.num_taken, len(self.texts)) - 1], 1)]

    def stop(self):
        self.stopped = True


def test_infill_time_limit_applies_after_the_first_line():
    answer = Endless(3600, "a", "b\n", "c")
    service = SimpleNamespace(model_name="m", info=SimpleNamespace(context_length=512))
    events = PlainEvents(service, answer.generation, InfillBody(), is_short=False)
    content = asyncio.run(collect(answer, events, 1000))
    assert (content["content"], content["stop_type"]) == ("ab\n", "limit")
    assert (answer.num_taken, answer.stopped) == (2, True)


def test_infill_without_infill_tokens_gets_400(fake_server):
    answer = fake_server.client.post("/infill", json=VIM)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input_suffix")
    assert "does not support infill" in error["message"]


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a"}] * 1001}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"t_max_predict_ms": -1}, "t_max_predict_ms"),
        ({"response_fields": "content"}, "response_fields"),
        ({"model": "another"}, "model"),
        ({"n": 2}, "n"),
    ],
)
def test_invalid_infill_request_names_the_field(fake_server, patch, param):
    assert (
        fake_server.client.post("/infill", json={**VIM, **patch}).json()["error"]["param"] == param
    )


@pytest.mark.parametrize("path", ["/props", "/v1/props", "/props?model=fake&autoload=false"])
def test_props_have_the_context_length_and_the_template(fake_server, path):
    props = fake_server.client.get(path).json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert "messages" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}
    assert (props["total_slots"], props["model_alias"]) == (4, "fake")
    assert fake_server.client.get("/props?model=another").status_code == 404


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "abc"})]
)
def test_answers_have_timings(fake_server, path, asked):
    """In a stream the last chunk has them: the chunk with the usage, or else the one that ends the
    last choice.
    """
    post = fake_server.client.post
    body = {**asked, **LIMIT, "n": 2}
    timings = post(path, json=body).json()["timings"]
    assert timings.keys() == TIMINGS
    assert timings["predicted_n"] == 8
    for options in (None, {"include_usage": True}):
        chunks = events_of(post(path, json={**body, "stream": True, "stream_options": options}))
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["timings"].keys() == TIMINGS
        assert chunks[-1]["timings"]["predicted_n"] == 8


def test_timings_count_draft_tokens(fake_server):
    """The fake model counts on, so this text repeats its prompt."""
    body = {"prompt": [*range(40, 90), *range(40, 44)], **LIMIT, "max_tokens": 40}
    timings = fake_server.client.post("/v1/completions", json=body).json()["timings"]
    assert 10 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_n"] == 40


def test_timings_count_cached_tokens(fake_server):
    body = {"messages": [{"role": "user", "content": "timings " * 20}], **LIMIT}
    first = fake_server.client.post(CHAT, json=body).json()
    fake_server.wait_until_idle()
    then = fake_server.client.post(CHAT, json=body).json()
    for answer in (first, then):
        timings, usage = answer["timings"], answer["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert then["timings"]["cache_n"] > first["timings"]["cache_n"]


def test_n_predict_is_an_alias_of_max_tokens(fake_server):
    """llama.vim sends 0 to fill the prefix cache."""
    post = fake_server.client.post
    for number in (0, 3):
        body: dict[str, Any] = {"messages": ASK, "n_predict": number, "ignore_eos": True}
        assert post(CHAT, json=body).json()["usage"]["completion_tokens"] == number
        body = {"prompt": "a", "n_predict": number, "ignore_eos": True}
        assert post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == number
    assert (
        post(CHAT, json={**body, "messages": ASK, "max_tokens": 5}).json()["usage"][
            "completion_tokens"
        ]
        == 5
    )


def test_model_object_has_a_root(fake_server):
    assert fake_server.client.get("/v1/models").json()["data"][0]["root"] == "fake"


@pytest.mark.llama
def test_reasoning_is_returned_under_both_names(builtin_server):
    body = {"messages": ASK, "temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
    post = builtin_server.client.post
    message = post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    chunks = events_of(post(CHAT, json={**body, "stream": True}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message["reasoning"]
    turns = [*ASK, {"role": "assistant", "content": "72"}, *ASK]
    lengths = set()
    for name in ("reasoning", "reasoning_content"):
        turns[1] = {"role": "assistant", "content": "72", name: message["reasoning"]}
        lengths.add(len(post("/apply-template", json={"messages": turns}).json()["prompt"]))
    assert len(lengths) == 1


@pytest.mark.parametrize("length", [512, 900_000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completion"])
def test_completion_beyond_the_context_gets_llama_servers_error(fake_server, path, stream, length):
    answer = fake_server.client.post(path, json={"prompt": "a" * length, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    count = error["n_prompt_tokens"]
    assert count == length if length < 10_000 else count > 10_000
    assert error == {
        "code": 400,
        "type": "exceed_context_size_error",
        "message": f"request ({count} tokens) exceeds the available context size (512 tokens), "
        "try increasing it",
        "n_prompt_tokens": count,
        "n_ctx": 512,
    }


def test_other_errors_of_completion_name_the_field(fake_server):
    error = fake_server.client.post("/completion", json={"prompt": 5}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_type")
