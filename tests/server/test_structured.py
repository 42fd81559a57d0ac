"""Structured output with the openai package: with the built-in model, and with the fake one, which
cannot write JSON by itself.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

MODEL = "cllm-builtin"
ASK = [{"role": "user", "content": "As JSON: name Anna, age 30."}]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    name: str | None


class Person(pydantic.BaseModel):
    name: str
    age: int
    pets: list[Pet] = pydantic.Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def json_schema(schema: dict) -> dict:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


@pytest.fixture(scope="module")
def fake(fake_server):
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        messages=ASK, model=client.models.list().data[0].id, **options
    )


def texts(completion) -> list[str]:
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    return [choice.message.content for choice in completion.choices]


def refusal(client: openai.OpenAI, **options) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    return caught.value


@pytest.mark.llama
def test_client_parses_a_structured_answer(client):
    completion = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, temperature=0, max_tokens=300
    )
    parsed = completion.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert parsed.name == "Anna"


@pytest.mark.llama
def test_client_parses_a_structured_stream(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Person, temperature=0, max_tokens=300
    ) as stream:
        kinds = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Person)
    assert kinds.count("content.delta") > 3
    whole = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, temperature=0, max_tokens=300
    )
    assert whole.choices[0].message.content == completion.choices[0].message.content


@pytest.mark.llama
def test_built_in_model_follows_a_schema(client):
    """Sampled at a temperature at which the model writes random text."""
    completion = chat(
        client, response_format=json_schema(SCHEMA), n=8, temperature=2.0, seed=1, max_tokens=400
    )
    for text in texts(completion):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_fake_model_follows_a_schema(fake):
    """The answers are valid and have no extra whitespace."""
    completion = chat(
        fake, response_format=json_schema(SCHEMA), n=4, temperature=60.0, seed=1, max_tokens=400
    )
    for text in texts(completion):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert re.search(r"\s\s|\n", text) is None


def test_json_object_format_enforces_an_object(fake):
    completion = chat(
        fake, response_format={"type": "json_object"}, temperature=90.0, seed=5, max_tokens=400
    )
    assert isinstance(json.loads(texts(completion)[0]), dict)
    with_schema = {
        "type": "json_object",
        "schema": {"properties": {"a": {"const": 1}}, "required": ["a"], **CLOSED},
    }
    assert json.loads(texts(chat(fake, response_format=with_schema))[0]) == {"a": 1}


CLOSED = {"type": "object", "additionalProperties": False}


def test_text_format_constrains_nothing(fake):
    assert texts(chat(fake, response_format={"type": "text"})) == texts(chat(fake))


@pytest.mark.parametrize("style", ["structured_outputs", "guided"])
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("json", {"type": "integer", "minimum": 10, "maximum": 99}, r"\d\d"),
        ("json", json.dumps({"enum": ["x", 1]}), r'"x"|1'),
        ("regex", "[a-f]{4}", "[a-f]{4}"),
        ("choice", ["yes", "no"], "yes|no"),
        ("grammar", 'root ::= "<" [0-9] ">"', r"<\d>"),
        ("grammar", 'start: "<" /[0-9]/ ">"', r"<\d>"),
    ],
)
def test_vllm_constraints_are_enforced(fake, style, kind, value, pattern):
    """This holds for chats and completions."""
    body = {f"guided_{kind}": value} if style == "guided" else {style: {kind: value}}
    for text in texts(chat(fake, extra_body=body, temperature=50.0, n=3)):
        assert re.fullmatch(pattern, text)
    completion = fake.completions.create(
        model="fake", prompt="x", extra_body=body, temperature=50.0
    )
    assert re.fullmatch(pattern, completion.choices[0].text)
    assert completion.choices[0].finish_reason == "stop"


def test_stream_follows_a_constraint(fake):
    chunks = [*chat(fake, stream=True, extra_body={"structured_outputs": {"choice": ["abcdef"]}})]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == "abcdef"
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_two_constraints_are_rejected(fake):
    error = refusal(fake, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"})
    assert "cannot be combined" in error.message
    error = refusal(fake, extra_body={"structured_outputs": {"regex": "a", "choice": ["b"]}})
    assert error.param == "structured_outputs.choice"


@pytest.mark.parametrize(
    ("body", "param", "sign"),
    [
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "sound"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "Missing"),
        ({"response_format": json_schema({}) | {"json_schema": {"name": "x y", "schema": {}}}},
         "response_format.json_schema.name", "pattern"),
        ({"response_format": json_schema({"properties": {"a": {"type": "array", "uniqueItems": True}}})},
         "response_format", "'uniqueItems'"),
        ({"response_format": json_schema({"$ref": "http://127.0.0.1:1/x"})}, "response_format", "not in it"),
        ({"guided_json": {"type": "string", "minLength": 10**9}}, "guided_json", "more than 10000"),
        ({"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}}, "structured_outputs.regex", "multiply"),
        ({"grammar": "root ::= "}, "grammar", "empty text"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"rexeg": "a"}}, "structured_outputs.rexeg", "not permitted"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar", "string"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_unenforceable_constraint_is_rejected_with_the_field(fake, body, param, sign, stream):
    """The error comes before the first byte; the answer is never free text."""
    error = refusal(fake, extra_body=body, stream=stream)
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert sign in error.message


HARD = {
    "type": "object",
    "properties": {
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 2},
            "uniqueItems": True,
            "maxItems": 10**6,
        },
        "day": {"type": "string", "format": "day-of-the-week", "maxLength": 3},
        "n": {"type": "integer", "not": {"const": 0}, "maximum": 50},
    },
    "required": ["tags", "day", "n"],
}
LEFT_OUT = "format, not, uniqueItems"


def softened(schema: dict) -> dict:
    """Return ``HARD`` without the keywords in LEFT_OUT."""
    properties = {
        name: {
            keyword: value
            for keyword, value in inner.items()
            if keyword not in LEFT_OUT.split(", ")
        }
        for name, inner in schema["properties"].items()
    }
    return schema | {"properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": HARD}}},
         lambda answer: answer["choices"][0]["message"]["content"]),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": HARD}},
         lambda answer: answer["choices"][0]["message"]["content"]),
        ("/v1/completions", {"prompt": "x", "guided_json": HARD}, lambda answer: answer["choices"][0]["text"]),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": HARD}}},
         lambda answer: answer["output"][0]["content"][0]["text"]),
        ("/api/chat", {"format": HARD, "stream": False}, lambda answer: answer["message"]["content"]),
        ("/api/generate", {"prompt": "x", "format": HARD, "stream": False}, lambda answer: answer["response"]),
    ],
)  # fmt: skip
def test_unenforced_keywords_are_named_in_a_header(fake_server, path, body, text_of):
    """In every dialect, for schemas that are not strict. A metric counts them."""
    before = fake_server.metric("unenforced_keywords_total", 'keyword="uniqueItems"')
    asked = {"model": "fake", "messages": ASK, "temperature": 60.0, "seed": 3, "max_tokens": 800}
    if path.startswith("/api"):
        asked |= {"options": {"temperature": 60.0, "seed": 3, "num_predict": 800}}
        del asked["max_tokens"], asked["temperature"], asked["seed"]
    if "messages" not in path and "chat" not in path:
        del asked["messages"]
    answer = fake_server.client.post(path, json=asked | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-cllm-unenforced-keywords"] == LEFT_OUT
    jsonschema.validate(json.loads(text_of(answer.json())), softened(HARD))
    assert fake_server.metric("unenforced_keywords_total", 'keyword="uniqueItems"') == before + 1


def test_strict_schema_is_enforced_in_full_or_rejected(fake, fake_server):
    error = refusal(fake, response_format=json_schema(HARD))
    assert "'uniqueItems' can be enforced only" in error.message
    format_ = {"type": "json_schema", "name": "a", "schema": HARD, "strict": True}
    answer = fake_server.client.post(
        "/v1/responses", json={"model": "fake", "input": "x", "text": {"format": format_}}
    )
    assert answer.status_code == 400
    answer = fake_server.client.post(
        "/v1/messages",
        json={"model": "fake", "messages": ASK, "max_tokens": 9,
              "output_config": {"format": {"type": "json_schema", "schema": HARD}}},
        headers={"anthropic-version": "2023-06-01"},
    )  # fmt: skip
    assert answer.status_code == 400  # its schemas are always strict
    answer = fake_server.client.post(
        "/v1/chat/completions", json={"model": "fake", "messages": ASK, "max_tokens": 3}
    )
    assert "x-cllm-unenforced-keywords" not in answer.headers


def test_objects_have_only_declared_properties(fake):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"enum": [1, 2]}},
        "required": ["a"],
    }
    completion = chat(
        fake,
        response_format={"type": "json_object", "schema": schema},
        n=8,
        temperature=80.0,
        seed=5,
    )
    assert {*map(json.dumps, map(json.loads, texts(completion)))} <= {
        '{"a": 1}',
        '{"a": 1, "b": 1}',
        '{"a": 1, "b": 2}',
    }


def test_numbers_have_a_limited_length(fake):
    """The model would write digits forever."""
    bias = {str(ord(digit)): 100 for digit in "123456789"}
    schema = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    (text,) = texts(
        chat(
            fake, extra_body={"guided_json": schema}, logit_bias=bias, max_tokens=200, temperature=0
        )
    )
    assert max(map(len, re.findall(r"\d+", text))) == 20
    assert len(json.loads(text)) == 2


def test_grammar_checks_and_cache_hits_are_counted(fake, fake_server):
    before = (
        fake_server.metric("grammar_check_seconds_count"),
        fake_server.metric("grammar_cache_hits_total"),
    )
    for _ in range(3):
        chat(fake, extra_body={"structured_outputs": {"regex": "counted[0-9]"}})
    after = (
        fake_server.metric("grammar_check_seconds_count"),
        fake_server.metric("grammar_cache_hits_total"),
    )
    assert (after[0] - before[0], after[1] - before[1]) == (1, 2)


def test_concurrent_requests_follow_their_own_constraints(fake):
    """A third of the requests has no constraint."""

    def one(i: int) -> None:
        if i % 3:
            (text,) = texts(
                chat(
                    fake,
                    extra_body={"structured_outputs": {"regex": f"{i}[a-c]{{9}}"}},
                    temperature=9.0,
                )
            )
            assert re.fullmatch(f"{i}[a-c]{{9}}", text)
        else:
            assert len(texts(chat(fake))[0]) > 5

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(48)))


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "schema": {"const": 4}}},
        {"response_format": {"type": "json_object", "schema": {"const": 4}}},
        {
            "structured_outputs": {
                "json": {"const": 4},
                "whitespace_pattern": None,
                "disable_additional_properties": False,
                "structural_tag": None,
            }
        },
    ],
)
def test_forms_of_other_servers_are_enforced(fake_server, body):
    body |= {"messages": [{"role": "user", "content": "a"}]}
    answer = fake_server.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"].strip() == "4"


def test_strict_schema_outside_of_json_schema_is_strict(fake_server):
    form = {"type": "json_schema", "schema": HARD, "strict": True}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": form}
    answer = fake_server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
