"""Content blocks of Anthropic conversations: text of every block type is read; other content is
left out and counted.
"""

from typing import Any

import pytest

USER = {"role": "user", "content": "Where is Paris?"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"what": "Paris"}}
SEARCH = {
    "type": "server_tool_use",
    "id": "srvtoolu_1",
    "name": "web_search",
    "input": {"query": "Paris"},
}
PAGE = {
    "type": "web_search_result",
    "title": "Paris",
    "url": "http://a.example",
    "encrypted_content": "Eo8B" * 50,
}
FETCHED: dict[str, Any] = {
    "type": "web_fetch_result",
    "url": "http://a.example",
    "content": {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "In France."},
    },
}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
}


def told(*blocks):
    return [
        USER,
        {"role": "assistant", "content": [*blocks, {"type": "text", "text": "In France."}]},
        USER,
    ]


def asked(*blocks):
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "Where is Paris?"}]}]


def found(*parts):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*parts]}
    return [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]


def text(*lines):
    return {"type": "text", "text": "\n".join(lines)}


def result_of(kind, content):
    return {"type": f"{kind}_tool_result", "tool_use_id": "srvtoolu_1", "content": content}


@pytest.fixture
def count(fake_server):
    def count(messages):
        answer = fake_server.client.post(
            "/v1/messages/count_tokens", json={"model": "fake", "messages": messages}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["input_tokens"]

    return count


@pytest.mark.parametrize(
    ("place", "block", "lines"),
    [
        (told, SEARCH, []),
        (told, result_of("web_search", [PAGE]), ["Paris", "http://a.example"]),
        (
            told,
            result_of(
                "web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}
            ),
            [],
        ),
        (told, result_of("web_fetch", FETCHED), ["http://a.example", "In France."]),
        (
            told,
            result_of("bash_code_execution", {"stdout": "4", "stderr": "", "return_code": 0}),
            ["4"],
        ),
        (told, result_of("tool_search", {"tool_references": [{"tool_name": "find"}]}), ["find"]),
        (
            told,
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("In France.")]},
            ["In France."],
        ),
        (told, {"type": "compaction", "content": "They spoke of Rome."}, ["They spoke of Rome."]),
        (told, {"type": "alien", "title": 5, "content": {"deep": [1, None]}, "text": False}, []),
        (asked, {"type": "container_upload", "file_id": "f"}, []),
        (
            asked,
            {
                "type": "search_result",
                "title": "Paris",
                "source": "a",
                "content": [text("In France.")],
            },
            ["Paris", "a", "In France."],
        ),
        (
            asked,
            {**FETCHED["content"], "title": "Cities", "citations": {"enabled": True}},
            ["Cities", "In France."],
        ),
        (
            asked,
            {"type": "document", "source": {"type": "content", "content": [text("In France.")]}},
            ["In France."],
        ),
        (found, {"type": "tool_reference", "tool_name": "find"}, ["find"]),
        (found, {"type": "browser_state", "tabs": []}, []),
    ],
)
def test_text_of_every_block_type_is_read(count, place, block, lines):
    assert count(place(block)) == count(place(*([text(*lines)] if lines else [])))


def test_skipped_blocks_are_counted_and_named(fake_server):
    before = [
        fake_server.metric("skipped_parts_total", f'type="{name}"')
        for name in ("server_tool_use", "other")
    ]
    messages = [
        *told(SEARCH, result_of("web_search", [PAGE])),
        *found({"type": "alien"}, {"type": "tool_reference", "tool_name": "find"}),
    ]
    body = {
        "model": "fake",
        "max_tokens": 4,
        "system": [{"type": "alien"}, text("Be brief.")],
        "messages": messages,
    }
    answer = fake_server.client.post("/v1/messages", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-cllm-skipped"] == "other, server_tool_use"
    after = [
        fake_server.metric("skipped_parts_total", f'type="{name}"')
        for name in ("server_tool_use", "other")
    ]
    assert [after[0] - before[0], after[1] - before[1]] == [1, 2]


@pytest.mark.parametrize(
    "block", [PDF, {"type": "image", "source": {"type": "url", "url": "http://a.example"}}]
)
@pytest.mark.parametrize("place", [told, asked, found])
def test_images_and_scanned_documents_are_rejected(fake_server, place, block):
    """Otherwise the model would answer without having seen them."""
    answer = fake_server.client.post(
        "/v1/messages", json={"model": "fake", "max_tokens": 4, "messages": place(block)}
    )
    assert answer.status_code == 400
    assert f"'{block['type']}'" in answer.json()["error"]["message"]


def test_billing_header_of_the_system_prompt_is_left_out(fake_server):
    """It differs in every session and comes first, so no session could reuse the cached prefix of
    another.
    """
    body = {"model": "fake", "messages": [USER]}
    count = [
        fake_server.client.post("/v1/messages/count_tokens", json={**body, "system": system}).json()
        for system in (
            [text("Be brief.")],
            [
                text("x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli;"),
                text("Be brief."),
            ],
        )
    ]
    assert count[0] == count[1]
