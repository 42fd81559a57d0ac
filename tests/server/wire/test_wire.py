"""Requests of well-known clients as they go over the wire, sent to real servers.

Every JSON file beside this one is one request and its expected answer:

    client    who sends it, and in which situation
    request   method, path, headers and body; "{model}" is replaced by the name of the served model
    expected  status
              headers   those named must be there, with a value that matches the regular expression
              answer    a part of the answer; of a stream, a part of its last event that is JSON
              events    of a stream: these types must come in this order, others may come between

The type of an event is its "type", else its "object", else, as in "data: [DONE]", its text. In
``answer`` an object may have more fields than are named, a list may not have more entries. A string
in slashes is a regular expression.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("*.json"))


@pytest.fixture(scope="module")
def fake(start_server_once):
    return start_server_once("--backend.name", "fake", "--context", "32768")


@pytest.fixture(scope="module")
def builtin(start_server_once, builtin_path):
    return start_server_once("--sampling.temperature", "0", "--sampling.max-tokens", "200")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize(
    "server", ["fake", pytest.param("builtin", marks=[pytest.mark.llama, pytest.mark.slow])]
)
def test_recorded_request_gets_the_answer_that_its_client_expects(server, file, request):
    server = request.getfixturevalue(server)
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    record = json.loads(file.read_text().replace("{model}", model))
    asked, expected = record["request"], record["expected"]
    answer = server.client.request(
        asked["method"], asked["path"], json=asked.get("body"), headers=asked.get("headers", {})
    )
    assert answer.status_code == expected["status"], answer.text[:500]
    for name, value in expected.get("headers", {}).items():
        assert re.fullmatch(value, answer.headers[name]), name
    if "events" in expected:
        events = [
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: ")
        ]
        types = [type_of(event) for event in events]
        remaining = iter(types)
        assert all(
            any(matches(kind, wanted) for kind in remaining) for wanted in expected["events"]
        ), types
        content = json.loads([event for event in events if event.startswith("{")][-1])
    else:
        content = answer.json()
    check(content, expected["answer"], "answer")


def type_of(event: str) -> str:
    if not event.startswith("{"):
        return event
    content = json.loads(event)
    return content.get("type") or content.get("object", "")


def check(found, expected, path: str) -> None:
    """Fail with the path of the first difference."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), path
        for name, value in expected.items():
            assert name in found, f"{path}.{name}"
            check(found[name], value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{path}: {found}"
        for i, value in enumerate(expected):
            check(found[i], value, f"{path}[{i}]")
    else:
        assert matches(found, expected), f"{path}: {found!r}"


def matches(found, expected) -> bool:
    if isinstance(expected, str) and re.fullmatch("/.+/", expected):
        return isinstance(found, str) and bool(re.fullmatch(expected[1:-1], found, re.DOTALL))
    return found == expected
