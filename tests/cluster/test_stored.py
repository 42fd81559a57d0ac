"""Which replica a request must reach, because it names something stored there."""

import json

import pytest

from cllm.cluster.body import NOTHING, read_fields
from cllm.cluster.stored import find_stored
from cllm.core.stored_ids import derive_id, find_replica, make_id


@pytest.mark.parametrize("kind", ["resp_", "file-", "batch_", "msgbatch_"])
def test_id_names_its_replica(kind):
    assert find_replica(make_id(kind, "r1a2b")) == "r1a2b"
    assert find_replica(make_id(kind)) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("", "file-", "resp__00", "resp_r1_", "resp_R1_00", "call_r1_00", "resp_../x_00"),
        *("file-r1_0g", "resp_r1_" + 65 * "0"),
    ],
)
def test_other_ids_name_no_replica(name):
    assert find_replica(name) == ""


def test_items_of_a_response_have_the_same_ids_on_every_replica():
    response = make_id("resp_", "a", 16)
    assert derive_id("msg_", response, 0) == derive_id("msg_", response, 0)
    assert derive_id("msg_", response, 0) != derive_id("msg_", response, 1)
    assert find_replica(derive_id("msg_", response, 0)) == "a"
    assert find_replica(derive_id("call_", response, 0)) == ""


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/responses/resp_a_00", "response_id"),
        ("/v1/responses/resp_a_00/input_items", "response_id"),
        ("/v1/files/file-a_00", "file_id"),
        ("/v1/files/file-a_00/content", "file_id"),
        ("/v1/batches/batch_a_00/cancel", "batch_id"),
        ("/v1/messages/batches/msgbatch_a_00/results", "batch_id"),
    ],
)
def test_path_names_a_replica(path, param):
    found = find_stored(path, NOTHING)
    assert found.replica == "a"
    assert found.gone().status == 404
    assert found.gone().param == param
    assert "'a', which is not running" in str(found.gone())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"previous_response_id": "resp_a_00", "input": "hi"}),
        ("/v1/responses/input_tokens", {"previous_response_id": "resp_a_00"}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_a_00"}]}),
        ("/v1/batches", {"input_file_id": "file-a_00"}),
    ],
)
def test_body_names_a_replica(path, body):
    assert find_stored(path, read_fields(json.dumps(body).encode())).replica == "a"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"previous_response_id": 7}'),
        ("/v1/responses", b'{"previous_response_id": "resp_00"}'),
        ("/v1/responses", b'{"previous_response_id'),
        ("/v1/responses", b'{"input": "\\"previous_response_id\\""}'),
        ("/v1/responses", b'"item_reference"' + b"[" * 100_000),
        ("/v1/batches", b"\xff"),
        ("/v1/files", b""),
        ("/v1/chat/completions", b'{"previous_response_id": "resp_a_00"}'),
    ],
)
def test_other_requests_name_none(path, body):
    assert find_stored(path, read_fields(body)) is None
