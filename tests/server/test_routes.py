"""What holds for every route: the form of errors, the methods that a 405 names, and other ways to
write its path.
"""

import json
import re
from collections import defaultdict

import pytest

from cllm.server.app import routes

PLACES = re.compile(r"\{\w+(:\w+)?\}")
METHODS: dict[str, set[str]] = defaultdict(set)
for path in {PLACES.sub("x", route.path) for route in routes()} | {"/v1/models/"}:
    if path.startswith("/internal/"):  # tests/server/test_cluster.py has those
        continue
    for route in routes():
        METHODS[path] |= route.methods if route.path_regex.match(path) else set()
VERSION = {"anthropic-version": "2023-06-01"}
KEYS = [{}, {"authorization": "Bearer k"}, {"x-api-key": "k"}, {"api-key": "k"}, VERSION]
JSON = {"content-type": "application/json"}
PROMPT = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def form_of(content):
    """Return the dialect of an error."""
    if content.keys() == {"type", "error", "request_id"}:
        return "anthropic"
    if isinstance(content["error"], str):
        return "ollama"
    assert content["error"].keys() == {"message", "type", "param", "code"}
    return "openai"


def dialect_of(path, headers):
    if path.startswith("/v1/models"):  # two dialects have these paths
        return "anthropic" if {"anthropic-version", "x-api-key"} & headers.keys() else "openai"
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


@pytest.mark.parametrize("headers", KEYS, ids=str)
def test_error_has_the_form_of_its_route_whatever_header_has_the_key(fake_server, headers):
    """The method, the type or the size of the body is wrong, or it is not JSON."""
    large = b'{"a":"%s"}' % (b"a" * 1_000_001)
    for path, methods in METHODS.items():
        answers = [(405, fake_server.client.patch(path, headers=headers))]
        if "POST" in methods and path not in (
            "/v1/files",
            "/v1/batches/x/cancel",
            "/v1/messages/batches",  # takes larger bodies
            "/v1/messages/batches/x/cancel",
            "/v1/responses/x/cancel",
        ):
            admits_all = path.startswith("/api/")
            for status, data, more in ((413, large, JSON), (400, b"[", JSON), (415, b"{}", {})):
                page = {"origin": "http://elsewhere"} if status == 415 and admits_all else {}
                sent = {**headers, **more, **page}
                answers.append((status, fake_server.client.post(path, content=data, headers=sent)))
        for status, answer in answers:
            assert answer.status_code in (status, 403), (path, answer.text)
            assert form_of(answer.json()) == dialect_of(path, headers), (path, status)


@pytest.mark.parametrize(
    ("path", "forms"),
    [
        ("/v1/nothing", "ooooa"),
        ("/nothing", "ooooo"),
        ("/v1/messages/nothing", "aaaaa"),
        ("/v1/chat/nothing", "ooooa"),
        ("/api/nothing", "lllll"),
        ("/api", "lllll"),
        ("/v1/api/nothing", "ooooa"),
    ],
)
def test_error_of_an_unknown_path_has_the_form_of_its_folder(fake_server, path, forms):
    """Below /v1, anthropic-version decides."""
    names = {"o": "openai", "a": "anthropic", "l": "ollama"}
    for headers, form in zip(KEYS, forms, strict=True):
        answer = fake_server.client.get(path, headers=headers)
        assert (answer.status_code, form_of(answer.json())) == (404, names[form])


@pytest.mark.parametrize("headers", [{}, VERSION], ids=str)
def test_405_names_all_methods_that_the_path_answers(fake_server, headers):
    """HEAD is answered wherever GET is; OPTIONS is not, outside of CORS."""
    for path, methods in METHODS.items():
        expected = methods | ({"HEAD"} if "GET" in methods else set())
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - expected:
            answer = fake_server.client.request(method, path, headers=headers)
            assert answer.status_code == 405, (method, path)
            assert answer.headers["allow"] == ", ".join(sorted(expected)), (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/completions",
        "/v1//completions",
        "///v1///completions",
        "//completions",
        "/v1//v1/completions",
        "/v1%2F%2Fcompletions",
        "/v1/completions/",
        "//v1/completions//",
        "/completions/",
    ],
)
def test_repeated_and_last_slashes_in_a_path_do_not_count(fake_server, path):
    url = f"{fake_server.url}{path}"
    answer = fake_server.client.post(url, content=PROMPT, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert fake_server.client.get(url).headers["allow"] == "POST"


def test_operators_pages_have_one_path(fake_server):
    """A proxy that hides them does not know other ways to write them."""
    for path in ("//metrics", "/v1//metrics", "//scheduler", "///v1/metrics", "/metrics/"):
        assert fake_server.client.get(f"{fake_server.url}{path}").status_code == 404, path


def test_slashes_in_the_name_of_a_model_stay(start_server):
    server = start_server("--backend.name", "fake", "--model.aliases", "a//b")
    for path in ("/v1/models/a//b", "//v1/models"):
        assert "a//b" in server.client.get(f"{server.url}{path}").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate", "/generate"])
def test_body_may_begin_with_a_byte_order_mark(fake_server, path):
    body = {"prompt": "a", "max_tokens": 1}
    body |= (
        {"model": "fake", "messages": [{"role": "user", "content": "a"}]} if "mess" in path else {}
    )
    body |= {"model": "fake", "stream": False} if "api" in path else {}
    data = b"\xef\xbb\xbf" + json.dumps(body).encode()
    answer = fake_server.client.post(path, content=data, headers=JSON)
    assert answer.status_code == 200, answer.text
    twice = fake_server.client.post(path, content=data[:3] + data, headers=JSON)
    assert twice.status_code == 400
