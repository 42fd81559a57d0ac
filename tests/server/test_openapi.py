"""The OpenAPI document and its page; random requests made from the document get the answers it
describes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re

import jsonschema
import pytest
import schemathesis
from conftest import repeat
from schemathesis import checks

from benchmarks.reliability.hostile import try_out

pytestmark = pytest.mark.server  # all of them, so that `make check` need not load schemathesis

TIMEOUT = 20  # seconds for one answer
DEADLINES = {"deadline_ms", "queue_timeout_ms"}


@pytest.fixture(scope="module")
def document(fake_server) -> dict:
    return fake_server.client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def api(fake_server):
    return schemathesis.openapi.from_url(f"{fake_server.url}/openapi.json")


def operations(document):
    return [
        (path, verb, entry)
        for path, verbs in document["paths"].items()
        for verb, entry in verbs.items()
    ]


def test_every_route_documents_its_bodies_and_answers(document) -> None:
    for path, verb, entry in operations(document):
        assert entry["tags"], path
        assert entry.get("description"), path
        assert {"200", "4XX", "5XX"} <= entry["responses"].keys(), path
        assert "422" not in entry["responses"], path
        content = entry["responses"]["200"]["content"]
        assert all(
            kind["schema"] for name, kind in content.items() if name == "application/json"
        ), path
        assert verb != "post" or path.endswith("/cancel") or entry["requestBody"]["content"], path


def test_examples_are_valid(document) -> None:
    """Bodies and answers are checked. Every request body has an example."""
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        for shown in schema.get("examples", []):
            jsonschema.validate(
                shown, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
            )
    for path, _, entry in operations(document):
        for content in entry.get("requestBody", {}).get("content", {}).values():
            if "$ref" in content["schema"]:
                assert schemas[content["schema"]["$ref"].rpartition("/")[2]].get("examples"), path


def test_uploaded_file_has_no_length_limit_in_the_document(document) -> None:
    """Its limit is the option storage.max_file_mb."""
    file = document["components"]["schemas"]["UploadBody"]["properties"]["file"]
    assert file["format"] == "binary"
    assert "maxLength" not in file


def test_every_reference_resolves(document) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names
    assert names <= document["components"]["schemas"].keys()


def test_page_loads_nothing_from_other_servers(fake_server) -> None:
    answer = fake_server.client.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)=\"(?!openapi\.json)", answer.text)
    assert (
        "//" not in re.sub(r"//[^\n]*|https?://www\.w3\.org", "", answer.text)
        or "http" not in answer.text
    )
    for tag in ("script", "style"):
        text = re.search(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode() in policy
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", answer.text), (
        "the policy would not run it"
    )


def check(case, document) -> None:
    if case.operation.path == "/debug/trace" and "seconds" in case.query:
        case.query["seconds"] /= 1000  # it takes that long to answer
    answer = case.call(timeout=TIMEOUT)
    asked = case.body if isinstance(case.body, dict) else {}
    if answer.status_code != 504 or not DEADLINES & asked.keys():
        assert answer.status_code < 500, answer.text[:500]
    if answer.status_code >= 400:
        entry = document["paths"][case.operation.path][case.method.lower()]
        form = entry["responses"][f"{answer.status_code // 100}XX"]["content"]["application/json"][
            "schema"
        ]
        jsonschema.validate(answer.json(), {**form, "components": document["components"]})
    case.validate_response(
        answer,
        checks=[
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_generated_requests_get_documented_answers(api, document, mode) -> None:
    """Valid and invalid requests: no 5xx except for requested deadlines, every answer in its
    dialect's form, and in time.
    """
    tried, faults = 0, []
    for result in api.get_all_operations():
        operation = result.ok()
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue
        tried += 1
        try:
            cases = operation.as_strategy(generation_mode=mode)
            try_out(cases, 0, lambda case: check(case, document), count=repeat(15, 2))
        except (Exception, BaseExceptionGroup) as fault:  # noqa: BLE001  # all of them are told at the end
            faults.append(f"{operation.label}: {fault}")
    assert tried > 10
    assert not faults, "\n\n".join(faults)
