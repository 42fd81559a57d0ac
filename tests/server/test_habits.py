"""Names, routes and bodies that clients use because they were written for other servers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.dialect

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "What is 27 plus 45?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
LIMIT = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def fake(fake_server):
    return fake_server.client


def message(answer) -> str:
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
@pytest.mark.parametrize(
    ("path", "body"), [("chat", {"messages": ASK}), ("generate", {"prompt": "a"}), ("show", {})]
)
def test_ollama_routes_accept_any_content_type(fake, path, body, headers):
    """``curl -d`` and LiteLLM send others. Requests of web pages have an Origin header and must
    send JSON.
    """
    data = json.dumps(
        {"model": "fake", "stream": False, "options": {"num_predict": 3}, **body}
    ).encode()
    assert fake.post(f"/api/{path}", content=data, headers=headers).status_code == 200
    for mark in ({"origin": "http://elsewhere"}, {"sec-fetch-site": "cross-site"}):
        answer = fake.post(f"/api/{path}", content=data, headers={**headers, **mark})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ping", "/ready", "/v1/models", "/api/tags", "/api/version"]
)
def test_head_gets_the_headers_of_get_without_a_body(fake, path):
    head, get = fake.head(path), fake.get(path)
    assert (head.status_code, get.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    assert head.headers["content-type"] == get.headers["content-type"]


def test_wrong_method_gets_405_with_the_allowed_methods(fake):
    answer = fake.options("/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert fake.head(CHAT).status_code == 405


TURN = {"model": "fake", "messages": ASK, "max_tokens": 4}
RANK = {"query": "a", "documents": ["a"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", TURN),
        ("/v1/v1/chat/completions", TURN),
        ("/completions", {"prompt": "a"}),
        ("/embeddings", {"input": "a"}),
        ("/responses", {"input": "a", "max_output_tokens": 2}),
        ("/responses/input_tokens", {"input": "a"}),
        ("/messages", TURN),
        ("/v1/v1/messages", TURN),
        ("/v1/api/chat", {**TURN, "stream": False}),
        ("/v1/tokenize", {"content": "a"}),
        ("/rerank", RANK),
        ("/reranking", RANK),
        ("/v1/reranking", RANK),
        ("/v1/v2/rerank", RANK),
        ("/models", None),
        ("/models/fake", None),
        ("/v1/v1/models", None),
        ("/v1/health", None),
        ("/files", None),
    ],
)
def test_paths_with_missing_or_repeated_v1_are_served(fake, path, body):
    answer = fake.get(path) if body is None else fake.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/metrics",
        "/v1/scheduler",
        "/v1/benchmark",
        "/v1/v1/v1/models",
        "/v1",
        "/nothing",
        "/v1/nothing",
    ],
)
def test_other_paths_are_not_found(fake, path):
    answer = fake.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"GET {path}: Not Found"


def test_errors_of_a_rewritten_path_have_the_form_of_its_dialect(fake):
    assert fake.post("/messages", json={}).json()["type"] == "error"
    assert fake.post("/v1/api/chat", json={}).json().keys() == {"error"}
    assert fake.post("/chat/completions", json={}).json()["error"]["param"] == "messages"
    answer = fake.get("/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_openapi_document_lists_each_route_once(fake):
    paths = fake.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    assert {
        "/chat/completions",
        "/models",
        "/v1/health",
        "/rerank",
        "/reranking",
    } & paths.keys() == set()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": ASK, "max_tokens": -1}),
        (CHAT, {"messages": ASK, "max_completion_tokens": -1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": -1}),
    ],
)
def test_token_limit_of_minus_one_means_no_limit(fake, path, asked):
    """The answer ends at the end of the context. 0 and -2 are still rejected where an answer is
    requested.
    """
    answer = fake.post(path, json={**asked, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == 512
    (limit,) = (name for name in asked if "tokens" in name)
    for wrong in (-2, -1.0, 0 if "prompt" not in asked else -3):
        assert fake.post(path, json={**asked, limit: wrong}).json()["error"]["param"] == limit


def test_tools_with_long_names_or_without_type_are_accepted(fake):
    function = {**TOOL["function"], "name": "a" * 65}
    body: dict[str, Any] = {"messages": ASK, "tools": [{"function": function}], **LIMIT}
    assert fake.post(CHAT, json=body).status_code == 200
    body["tools"][0] = {"function": {**function, "name": "a" * 257}}
    assert fake.post(CHAT, json=body).json()["error"]["param"] == "tools[0].function.name"


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled", "interleaved"])
def test_every_thinking_type_is_accepted(fake, kind):
    body = {
        "model": "fake",
        "max_tokens": 4,
        "messages": ASK,
        "thinking": {"type": kind, "budget_tokens": 2},
    }
    assert fake.post("/v1/messages", json=body).status_code == 200


def test_responses_truncation_auto_is_accepted_and_shown_as_disabled(fake):
    answer = fake.post(
        "/v1/responses", json={"input": "a", "max_output_tokens": 2, "truncation": "auto"}
    ).json()
    assert answer["truncation"] == "disabled"
    answer = fake.post("/v1/responses", json={"input": "a" * 600, "truncation": "auto"})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("nothing", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_response_continues_a_previous_one_without_input(fake, nothing):
    first = fake.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()
    then = fake.post(
        "/v1/responses",
        json={**nothing, "previous_response_id": first["id"], "max_output_tokens": 2},
    )
    assert then.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    items = fake.get(f"/v1/responses/{then.json()['id']}/input_items").json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"]


def test_empty_after_lists_from_the_beginning(fake):
    name = fake.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()["id"]
    for path in (f"/v1/responses/{name}/input_items", "/v1/files", "/v1/batches"):
        first, whole = fake.get(f"{path}?after="), fake.get(path)
        assert (first.status_code, first.json()) == (200, whole.json())


def test_model_object_has_its_context_length_and_accepts_the_tag_latest(fake):
    model = fake.get("/v1/models/fake:latest").json()
    assert model["id"] == "fake"
    assert model["max_model_len"] == model["context_length"] == 512
    assert (
        fake.post(CHAT, json={"model": "fake:latest", "messages": ASK, **LIMIT}).status_code == 200
    )
    assert (
        fake.post(CHAT, json={"model": "fake:other", "messages": ASK, **LIMIT}).status_code == 404
    )


NAMED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, TURN),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", RANK),
    ("/v1/messages", TURN),
    ("/tokenize", {"content": "a"}),
    ("/api/chat", {**TURN, "stream": False}),
]


def test_empty_model_name_means_the_served_model(fake):
    for path, body in NAMED[:-1]:  # Ollama wants a name, as it always did
        assert fake.post(path, json={**body, "model": ""}).status_code == 200, path
    assert fake.post(CHAT, json={**TURN, "model": "gpt-4o"}).status_code == 404


def test_aliases_are_served_and_listed(start_server):
    """Aliases that are patterns are served but not listed. Answers have the model's own name."""
    server = start_server("--backend.name", "fake", "--model.aliases", "gpt-4o, claude-*, org/m")
    get, post = server.client.get, server.client.post
    for path, body in NAMED:
        for name in ("gpt-4o", "claude-opus-4-1", "org/m"):
            assert post(path, json={**body, "model": name}).status_code == 200, (path, name)
        for name in ("gpt-4", "gpt-4o-mini", "opus", "CLAUDE-a", "claude-" + "a" * 300):
            assert post(path, json={**body, "model": name}).status_code == 404, (path, name)
    assert post(CHAT, json={**TURN, "model": "gpt-4o"}).json()["model"] == "fake"
    listed = get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("fake", "fake"),
        ("gpt-4o", "fake"),
        ("org/m", "fake"),
    ]
    assert get("/v1/models/org/m").json()["id"] == "org/m"
    assert get("/v1/models/claude-x").json()["root"] == "fake"
    assert get("/v1/models/gpt-4").status_code == 404


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
@pytest.mark.parametrize("path", ["/v1/models/", "/models/"])
def test_models_path_with_trailing_slash_is_the_list(fake, path, headers):
    assert fake.get(path, headers=headers).json() == fake.get("/v1/models", headers=headers).json()


def test_alias_star_matches_any_name(start_server):
    server = start_server("--backend.name", "fake", CLLM_MODEL_ALIASES="*")
    assert server.client.post(CHAT, json={**TURN, "model": "whatever/it:is"}).status_code == 200
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["fake"]


def test_version_route_matches_the_root(fake):
    assert fake.get("/version").json()["version"] == fake.get("/").json()["version"]


def test_v2_rerank_gives_the_results_of_v1(fake):
    body = {"query": "a", "documents": ["b", "a"]}
    assert (
        fake.post("/v2/rerank", json=body).json()["results"]
        == fake.post("/v1/rerank", json=body).json()["results"]
    )


@pytest.mark.parametrize("chat", [True, False])
def test_continuous_usage_stats_put_usage_into_every_chunk(fake_server, chat):
    """Each chunk has the usage so far; the last one has the final usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none") as client:
        create = client.chat.completions.create if chat else client.completions.create
        asked = {"messages": ASK} if chat else {"prompt": "a"}
        chunks = list(create(model="fake", stream=True, stream_options=options, **asked, **LIMIT))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3, 4}
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    assert chunks[-1].choices == []


def test_stream_options_need_a_stream(fake):
    for path, asked in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "a"})):
        answer = fake.post(path, json={**asked, "stream_options": {"include_usage": True}})
        assert answer.status_code == 400
        assert "'stream'" in message(answer)
        for quiet in ({"stream": None, "stream_options": None}, {"stream_options": {}}):
            assert fake.post(path, json={**asked, **LIMIT, **quiet}).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "Hi"},
        {"type": "output_text", "text": "Hi"},
        {"type": "refusal", "refusal": "Hi"},
    ],
)
def test_content_parts_of_the_responses_api_are_text_in_a_chat(fake, part):
    """They give the same prompt as text parts."""

    def prompt(part):
        turns = [*ASK, {"role": "assistant", "content": [part]}, *ASK]
        return fake.post("/apply-template", json={"messages": turns}).json()["prompt"]

    assert prompt(part) == prompt({"type": "text", "text": "Hi"})
    turn = {"role": "user", "content": [{"type": part["type"]}]}
    assert "content[0]" in message(fake.post(CHAT, json={"messages": [turn]}))


@pytest.mark.llama
@pytest.mark.parametrize("value", [True, False, 3, 0.5, "a", None, [1, "a", None], {"a": 1}, []])
def test_unknown_template_variables_do_not_change_the_prompt(builtin_server, value):
    kwargs = {"a_new_variable": value, "enable_thinking": False}
    post = builtin_server.client.post
    prompts = [
        post("/apply-template", json={"messages": ASK, "chat_template_kwargs": asked}).json()[
            "prompt"
        ]
        for asked in (kwargs, {"enable_thinking": False})
    ]
    assert prompts[0] == prompts[1]
    assert (
        post(CHAT, json={"messages": ASK, "chat_template_kwargs": kwargs, **LIMIT}).status_code
        == 200
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"tools": [], "tool_choice": "auto"},
    ],
)
def test_parameters_at_their_neutral_values_are_accepted(fake, harmless):
    assert fake.post(CHAT, json={"messages": ASK, **LIMIT, **harmless}).status_code == 200


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt_logprobs": 1}, "/v1/completions"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_unsupported_parameters_are_rejected_not_ignored(fake, wish, named):
    answer = fake.post(CHAT, json={"messages": ASK, **wish})
    assert answer.status_code == 400
    assert named in message(answer)


def test_null_means_unset_for_ollama(fake):
    body = {
        "model": "fake",
        "stream": False,
        "options": {"num_predict": 3},
        "raw": None,
        "logprobs": None,
    }
    assert fake.post("/api/generate", json={**body, "prompt": "a"}).status_code == 200
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": None}}]}
    turns = [*ASK, called, {"role": "tool", "content": "1", "tool_name": "add"}]
    assert fake.post("/api/chat", json={**body, "messages": turns}).status_code == 200


def test_later_system_messages_of_anthropic_are_rendered_in_place(fake):
    body = {"model": "fake", "max_tokens": 4}
    turns = [
        *ASK,
        {"role": "assistant", "content": "72"},
        {"role": "system", "content": "Be brief."},
    ]

    def count(turns):
        return fake.post(
            "/v1/messages/count_tokens", json={"model": "fake", "messages": turns}
        ).json()["input_tokens"]

    assert fake.post("/v1/messages", json={**body, "messages": [*turns, *ASK]}).status_code == 200
    # the fake one has a token a byte
    assert count([*turns, *ASK]) > count([*turns[:2], *ASK]) + len("Be brief.")
    answer = fake.post("/v1/messages", json={**body, "messages": [turns[-1], *ASK]})
    assert answer.status_code == 400
    assert "messages[0].role" in message(answer)
    image = {"role": "system", "content": [{"type": "image", "source": {}}]}
    assert "messages[1].content[0]" in message(
        fake.post("/v1/messages", json={**body, "messages": [*ASK, image]})
    )


def test_strict_mode_checks_the_fields_of_every_tool_choice(start_server):
    """The field has several object types; names are compared with those of the type that was sent."""
    post = start_server("--backend.name", "fake", "--server.strict").client.post
    name = {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [name]}}
    for choice in (name, allowed):
        body = {"messages": ASK, "tools": [TOOL], "tool_choice": choice, **LIMIT}
        assert post(CHAT, json=body).status_code == 200
        answer = post(CHAT, json={**body, "tool_choice": {**choice, "zzz": 1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice.zzz")


@pytest.mark.llama
@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        ({"grammar": 'root ::= "aaa"'}, "aaa"),
        ({"ebnf": 'root ::= "bbb"'}, "bbb"),
        ({"regex": "a{3}"}, "aaa"),
        ({"json_schema": {"const": "x"}}, '"x"'),
        ({"json_schema": '{"const": 7}'}, "7"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
            "5",
        ),
        ({"structured_outputs": {"json": {"const": 6}}}, "6"),
    ],
)
def test_constraints_in_other_servers_forms_are_enforced(builtin_server, wish, answer):
    """OpenAI's three routes enforce them; no constraint is silently ignored."""
    post = builtin_server.client.post
    assert (
        post(CHAT, json={"messages": ASK, **wish}).json()["choices"][0]["message"]["content"]
        == answer
    )
    assert (
        post("/v1/completions", json={"prompt": "a", **wish}).json()["choices"][0]["text"] == answer
    )
    output = post("/v1/responses", json={"input": "a", **wish}).json()["output"]
    assert output[-1]["content"][0]["text"] == answer
    refused = post(CHAT, json={"messages": ASK, "guided_regex": "a", **wish})
    assert refused.status_code == 400
    assert "cannot be combined" in message(refused)


@pytest.mark.llama
def test_repeat_penalty_is_an_alias_of_repetition_penalty(builtin_server):
    def text(**penalty):
        body = {"prompt": "Once there was a fox", **penalty, "temperature": 0, "max_tokens": 60}
        return builtin_server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    assert text(repeat_penalty=1.9) == text(repetition_penalty=1.9, repeat_penalty=1.0) != text()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "max"}),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": None}}),
        ("/v1/chat/completions", {"seed": -1, "logit_bias": [[5, 1.5], [6, False]]}),
        ("/v1/responses", {"reasoning": {"effort": "max"}, "text": {"format": None}}),
        ("/v1/responses", {"text": None}),
    ],
)
def test_nulls_and_names_of_other_servers_are_accepted(fake_server, path, body):
    text = {"input": "a"} if path == "/v1/responses" else {"messages": ASK}
    answer = fake_server.client.post(path, json={**text, **body})
    assert answer.status_code == 200, answer.text


def test_logit_bias_as_pairs_equals_an_object(builtin_server):
    ask = {"messages": ASK, "temperature": 0, "max_tokens": 1}
    texts = {
        builtin_server.client.post("/v1/chat/completions", json={**ask, "logit_bias": bias})
        .text.partition('"choices"')[2]
        .partition('"usage"')[0]
        for bias in ([[300, 100]], {"300": 100})
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("Paris", 100), ("Paris", 100.0), ("caf\u00e9 is", 3), ("\u0663", 1), ("", 1), ("1.5", 0)],
)
@pytest.mark.parametrize("form", ["object", "pairs"])
def test_logit_bias_with_a_text_biases_each_of_its_tokens(builtin_server, key, value, form):
    http = builtin_server.client
    ids = http.post("/tokenize", json={"content": key}).json()["tokens"] if key else []

    def answer(bias):
        ask = {"messages": ASK, "temperature": 0, "max_tokens": 4, "logit_bias": bias}
        found = http.post("/v1/chat/completions", json=ask)
        assert found.status_code == 200, found.text
        return found.json()["choices"]

    same = {str(token): value for token in ids}
    assert answer({key: value} if form == "object" else [[key, value]]) == answer(same)


def test_false_in_logit_bias_forbids_the_tokens(builtin_server):
    story = [{"role": "user", "content": "Tell a story about a fox named Ida in the forest."}]
    ask = {"messages": story, "temperature": 0, "max_tokens": 1}
    post = builtin_server.client.post
    said = post(CHAT, json=ask).json()["choices"][0]["message"]["content"]
    for bias in ({said: False}, [[said, False]]):
        answer = post(CHAT, json={**ask, "logit_bias": bias}).json()
        assert answer["choices"][0]["message"]["content"] != said


@pytest.mark.parametrize("key", ["-5", "+5", "123456789012", "99999999"])
def test_token_id_that_does_not_exist_is_rejected_in_logit_bias(builtin_server, key):
    body = {"messages": ASK, "logit_bias": {key: 1}}
    answer = builtin_server.client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"


def test_lone_surrogate_in_the_arguments_of_a_call_is_no_server_error(builtin_server):
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "72"},
    ]
    for path in (CHAT, "/apply-template"):
        answer = builtin_server.client.post(path, json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("arguments", [{}, {"a": 27, "b": "é"}])
def test_arguments_of_an_earlier_call_may_be_an_object(builtin_server, arguments):
    def render(given):
        call = {"id": "c", "function": {"name": "add", **given}}
        turns = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        turns.append({"role": "tool", "tool_call_id": "c", "content": "72"})
        return builtin_server.client.post("/apply-template", json={"messages": turns}).json()

    as_text = render({"arguments": json.dumps(arguments, ensure_ascii=False)})
    assert render({"arguments": arguments}) == as_text
    assert '"name"' in as_text["prompt"]
    if not arguments:
        assert render({}) == as_text
