"""Tools and items of the Responses API other than functions: served where possible, otherwise left
out.
"""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/v1/responses"
LIMIT = {"max_output_tokens": 3}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__docs__",
    "description": "The docs.",
    "tools": [{**FUNCTION, "name": "find"}, {**CUSTOM, "name": "write"}, {"type": "web_search"}],
}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:9"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {
        "type": "computer_use_preview",
        "display_width": 1,
        "display_height": 1,
        "environment": "linux",
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "a",
        "parameters": {"type": "object"},
    },
]


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once("--backend.name", "fake", "--context", "8192")


def prompt_length(server, **body):
    """Return the bytes of the prompt: the fake model has one token per byte."""
    answer = server.client.post(f"{PATH}/input_tokens", json={"input": "a", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_built_in_tool_is_left_out(server, tool):
    before = server.metric("skipped_parts_total", f'type="{tool["type"]}"')
    answer = server.client.post(PATH, json={"input": "a", "tools": [FUNCTION, tool], **LIMIT})
    assert answer.status_code == 200
    assert answer.headers["x-cllm-skipped"] == tool["type"]
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    assert server.metric("skipped_parts_total", f'type="{tool["type"]}"') == before + 1
    assert prompt_length(server, tools=[FUNCTION, tool]) == prompt_length(server, tools=[FUNCTION])


def test_each_skipped_type_is_logged_once(server):
    for _ in range(2):
        server.client.post(
            PATH,
            json={"input": "a", "tools": [{"type": "web_search_2025_08_26"}, {"type": "x\ny"}]},
        )
    assert server.log.count("requests contain web_search") == 1
    assert server.log.count("requests contain other") == 1


def test_no_header_if_nothing_is_left_out(server):
    answer = server.client.post(PATH, json={"input": "a", "tools": [FUNCTION, CUSTOM], **LIMIT})
    assert "x-cllm-skipped" not in answer.headers
    assert answer.json()["tools"][1] == CUSTOM


def test_tools_in_namespaces_and_custom_tools_are_served(server):
    answer = server.client.post(
        PATH, json={"input": "a", "tools": [FUNCTION, CUSTOM, NAMESPACE], **LIMIT}
    )
    assert answer.headers["x-cllm-skipped"] == "web_search"
    assert answer.json()["tools"] == [
        {"strict": None, **FUNCTION},
        CUSTOM,
        {**NAMESPACE, "tools": [{"strict": None, **NAMESPACE["tools"][0]}, NAMESPACE["tools"][1]]},
    ]
    assert "Warning" not in server.log, "it would quote what the client has sent"
    alone = prompt_length(server, tools=[FUNCTION])
    assert prompt_length(server, tools=[FUNCTION, CUSTOM]) > alone + len("apply_patch") + len(
        GRAMMAR["definition"]
    )
    assert prompt_length(server, tools=[FUNCTION, NAMESPACE]) > alone + len(
        "mcp__docs__find"
    ) + len("mcp__docs__write")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "custom", "name": "nobody"}, "tool_choice"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            "tool_choice",
        ),
    ],
)
def test_skipped_tool_cannot_be_forced(server, choice, param):
    body = {"input": "a", "tools": [FUNCTION, {"type": "web_search"}], "tool_choice": choice}
    answer = server.client.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_skipped_tool_may_be_among_the_allowed_tools(server):
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "mcp"}],
    }
    body = {
        "input": "a",
        "tools": [FUNCTION, {"type": "web_search"}],
        "tool_choice": choice,
        **LIMIT,
    }
    assert server.client.post(PATH, json=body).status_code == 200


CALL = {"call_id": "c1", "id": "x_1", "status": "completed"}
RENDERED = [
    [
        {
            **CALL,
            "type": "function_call",
            "namespace": "mcp__docs__",
            "name": "find",
            "arguments": '{"a":1}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ],
    [
        {**CALL, "type": "custom_tool_call", "name": "apply_patch", "input": "a\n"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "found"}],
        },
    ],
    [
        {
            **CALL,
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "found"},
    ],
    [
        {
            **CALL,
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ],
]
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "items", RENDERED, ids=lambda items: f"{items[0]['type']}, {items[1]['type']}"
)
def test_calls_and_results_of_every_kind_reach_the_prompt(server, items):
    plain = prompt_length(server, input=[USER, USER], tools=[FUNCTION])
    answer = server.client.post(
        PATH, json={"input": [USER, *items, USER], "tools": [FUNCTION], **LIMIT}
    )
    assert "x-cllm-skipped" not in answer.headers
    assert answer.json()["usage"]["input_tokens"] > plain + len("found")
    listed = server.client.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed[1:3]] == [item["type"] for item in items]
    again = {"input": "a", "previous_response_id": answer.json()["id"]}
    assert server.client.post(PATH, json=again).status_code == 200


LEFT_OUT = [
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "a"},
    },
    {"type": "item_reference", "id": "msg_unknown"},
    {"id": "msg_unknown"},
    {"type": "compaction", "encrypted_content": "abc"},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AAAA"},
    {"type": "a_new_kind", "anything": [1]},
]


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item.get("type", "reference"))
def test_items_without_text_are_left_out(server, item):
    answer = server.client.post(PATH, json={"input": [USER, item, USER], **LIMIT})
    assert answer.status_code == 200
    assert answer.headers["x-cllm-skipped"] in (item.get("type", "item_reference"), "other")
    assert answer.json()["usage"]["input_tokens"] == prompt_length(server, input=[USER, USER])
    listed = server.client.get(f"{PATH}/{answer.json()['id']}/input_items").json()["data"]
    assert [entry["type"] for entry in listed] == ["message", "message"]


def test_encrypted_reasoning_is_left_out(server):
    item = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": None,
        "encrypted_content": "abc",
    }
    assert prompt_length(server, input=[USER, item, USER]) == prompt_length(
        server, input=[USER, USER]
    )


def test_item_reference_resolves_to_a_stored_item(server):
    first = server.client.post(PATH, json={"input": "a", "max_output_tokens": 9}).json()
    (item,) = first["output"]
    said = {"role": "assistant", "content": item["content"][0]["text"]}
    by_text = prompt_length(server, input=[USER, said, USER])
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        assert prompt_length(server, input=[USER, reference, USER]) == by_text
        once = [USER, reference, reference, USER]
        assert prompt_length(server, input=once) == by_text, (
            "an item is read once, however often it is named"
        )
    other = server.client.post(
        f"{PATH}/input_tokens", json={"input": [USER, reference, USER]}, headers={"x-api-key": "b"}
    )
    assert other.headers["x-cllm-skipped"] == "item_reference", (
        "it is seen with its own token alone"
    )
    server.client.delete(f"{PATH}/{first['id']}")
    assert prompt_length(server, input=[USER, reference, USER]) == prompt_length(
        server, input=[USER, USER]
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": ["web_search"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}] * 513}, "tools"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0].input"),
        ({"input": [{"type": 5}]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
    ],
)
def test_invalid_tools_and_items_are_rejected_with_the_field(server, body, param):
    answer = server.client.post(PATH, json={"input": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
