"""The names of prefixes that a front finds in request bodies."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster.body import read_fields
from cllm.cluster.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    list_parts,
    make_routing_request,
    write_parts,
)
from cllm.routing.router import RoutingRequest


def ask(model: str = "m", tenant: str = "", **body: Any) -> RoutingRequest:
    return read_request(json.dumps(body).encode(), model, tenant)


def read_request(body: bytes, model: str = "m", tenant: str = "") -> RoutingRequest:
    fields = read_fields(body)
    return make_routing_request(fields, list_parts(fields), model, tenant, "a")


def count_common(first: RoutingRequest, second: RoutingRequest) -> int:
    pairs = zip(first.blocks, second.blocks, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.blocks), len(second.blocks))
    )


SYSTEM, USER = "Be brief. " * 300, "What is 2 + 2? " * 100


def test_same_conversation_has_the_same_names_in_all_dialects():
    message = {"role": "user", "content": USER}
    chat = ask(messages=[{"role": "system", "content": SYSTEM}, message])
    parts = [{"type": "text", "text": USER, "cache_control": {"type": "ephemeral"}}]
    others = [
        ask(system=SYSTEM, messages=[message]),
        ask(system=[{"type": "text", "text": SYSTEM}], messages=[{**message, "content": parts}]),
        ask(instructions=SYSTEM, input=USER),
        ask(instructions=SYSTEM, input=[{"type": "message", **message}]),
        ask(
            instructions=SYSTEM,
            input=[{**message, "content": [{"type": "input_text", "text": USER}]}],
        ),
    ]
    for other in others:
        assert other.blocks == chat.blocks
        assert other.ends == chat.ends
    assert chat.num_tokens * 4 == pytest.approx(len(SYSTEM) + len(USER), rel=0.01)


def test_next_turn_continues_the_names_of_the_last_one():
    messages = [{"role": "user", "content": USER}]
    first = ask(messages=messages)
    messages += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Why?"}]
    second = ask(messages=messages)
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(second.blocks) > len(first.blocks)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "system", "content": USER}]},
        {"model": "other"},
        {"tenant": "other"},
    ],
    ids=str,
)
def test_what_cannot_share_a_cache_shares_no_name(change):
    usual = {"messages": [{"role": "user", "content": USER}]}
    assert count_common(ask(**usual), ask(**{**usual, **change})) == 0


def test_order_of_keys_in_tools_does_not_matter():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}]
    turned = [{"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}]
    assert ask(tools=tools, input="x").blocks == ask(tools=turned, input="x").blocks


def test_long_prompts_have_a_limited_number_of_names():
    long = ask(prompt="x" * (2 * MAX_BLOCKS * BLOCK_BYTES))
    assert len(long.blocks) == len(long.ends) == MAX_BLOCKS
    assert long.num_tokens == 2 * MAX_BLOCKS * BLOCK_BYTES // 4


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"{",
            b'{"model": 3}',
            b'{"messages": 3}',
            b"\xff{}",
            b'{"n": 1e99}',
        ),
        *(b'{"messages": ' + b"[" * 100_000, b'{"prompt": [[1, 2], "a"]}', b'{"model": ""}'),
        *(b'{"messages": [null, 1, {"content": [1, {"text": 2}]}]}', b'{"prompt": "\\ud800"}'),
    ],
)
def test_bodies_that_are_not_valid_have_no_model(body):
    assert read_fields(body).find_model_name() is None
    request = read_request(body)
    assert len(request.blocks) == len(request.ends)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["model", "cache_salt", "tools", "system", "instructions", "messages", "input", "prompt", "n"]
)


@given(st.dictionaries(FIELDS, VALUES))
def test_any_json_is_read(body):
    request = ask(**{"messages": None, **body} if "model" not in body else {"prompt": body})
    assert len(request.blocks) == len(request.ends)
    assert [*request.ends] == sorted(request.ends)


def test_reading_200_kb_takes_little_time():
    messages = [{"role": "user", "content": f"{i} " + "abcdefgh " * 1000} for i in range(22)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    times = []
    for _ in range(20):
        begun = time.process_time()
        read_request(body)
        times.append(time.process_time() - begun)
    assert min(times) < 0.003  # usually 0.0004; a busy machine measures more


@pytest.mark.parametrize("entry", [{}, 0, "", [], {"content": "x"}])
def test_messages_beyond_the_last_name_are_written_together(entry):
    """One by one, the millions that fit into a body would hold up all other requests."""
    body = json.dumps({"messages": [entry] * 40_000}).encode()
    assert len([*write_parts(read_fields(body))]) == MAX_BLOCKS + 1
    assert len(body) / 8 < ask(messages=[entry] * 40_000).num_tokens * 4 <= len(body)
