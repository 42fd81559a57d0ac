"""Message batches with Anthropic's own client: results, errors, cancellation, and recovery."""

import contextlib
import io
import json
import signal
import sqlite3
import time

import anthropic
import openai
import pydantic
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from conftest import PATIENCE
from store_parts import OWN, opened, put

from cllm.errors import BadRequest
from cllm.server.batches import open_all, read_all
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

pytestmark = pytest.mark.slow

FAKE = ("--backend.name", "fake", "--max-num-seqs", "4", "--context", "512")
PATH = "/v1/messages/batches"
KEY = {"x-api-key": "none"}
ENDLESS = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once(*FAKE)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def client_of(server, key="none"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def params(text="ab", **more):
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "max_tokens": 4, "messages": messages, **more}


def request(custom_id, **more):
    return {"custom_id": custom_id, "params": params(**more)}


def begin(client, *requests):
    return client.messages.batches.create(requests=requests)


def wait(client, batch, is_so=lambda batch: batch.processing_status == "ended"):
    end = time.monotonic() + PATIENCE
    while not is_so(batch := client.messages.batches.retrieve(batch.id)):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def results_of(client, batch):
    return {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}


def refusal(status, call, *args, **kwargs):
    with pytest.raises(anthropic.APIStatusError) as raised:
        call(*args, **kwargs)
    assert raised.value.status_code == status
    body = raised.value.body
    assert body["type"] == "error"
    assert body.keys() == {"type", "error", "request_id"}
    return body["error"]["message"]


def move_back(path, batch_id, seconds):
    """Change the database of a server that has ended as if the batch had been created earlier."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        query = "SELECT record FROM batches WHERE id = ?"
        record = json.loads(database.execute(query, (batch_id,)).fetchone()[0])
        for name in ("created_at", "expires_at"):
            record[name] -= seconds
        values = json.dumps(record).encode(), batch_id
        database.execute("UPDATE batches SET record = ? WHERE id = ?", values)


def test_results_are_the_messages_that_single_requests_get(client):
    """They are valid values of the client's own types. Usage is that of a single request too."""
    texts = {f"r{i}": chr(65 + i) * 3 for i in range(12)}
    batch = begin(client, *(request(name, text=text) for name, text in texts.items()))
    assert batch.type == "message_batch"
    assert (batch.processing_status, batch.results_url, batch.ended_at) == (
        "in_progress",
        None,
        None,
    )
    assert sum(batch.request_counts.to_dict().values()) == 12
    batch = wait(client, batch)
    pydantic.TypeAdapter(MessageBatch).validate_python(batch.to_dict())
    counts = {"processing": 0, "succeeded": 12, "errored": 0, "canceled": 0, "expired": 0}
    assert batch.request_counts.to_dict() == counts
    assert batch.created_at <= batch.ended_at < batch.expires_at
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    results = results_of(client, batch)
    assert results.keys() == texts.keys()
    for name, text in texts.items():
        alone = client.messages.create(**params(text))
        assert results[name].type == "succeeded"
        message = results[name].message
        assert message.content == alone.content
        assert message.stop_reason == alone.stop_reason
        assert message.usage.output_tokens == alone.usage.output_tokens


def test_invalid_requests_get_errors_and_the_others_messages(client, server):
    batch = begin(
        client,
        request("good"),
        request("negative", max_tokens=-1),
        request("streamed", stream=True),
        request("unknown", model="other"),
        request("long", text="a" * 600),
        request("image", text=[{"type": "image", "source": {}}]),
        {"custom_id": "empty", "params": {}},
        {"custom_id": "list", "params": []},
        {"custom_id": "null", "params": None},
    )
    batch = wait(client, batch)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 8)
    results = results_of(client, batch)
    assert results.pop("good").type == "succeeded"
    kinds = {name: result.error.error.type for name, result in results.items()}
    assert kinds.pop("unknown") == "not_found_error"
    assert set(kinds.values()) == {"invalid_request_error"}
    errors = {name: result.error.error.message for name, result in results.items()}
    assert "max_tokens" in errors["negative"]
    assert "streamed" in errors["streamed"]
    assert errors["long"].startswith("prompt is too long: ")
    lines = server.client.get(batch.results_url, headers=KEY).text.splitlines()
    for line in map(json.loads, lines):
        pydantic.TypeAdapter(MessageBatchIndividualResponse).validate_python(line)


@pytest.mark.parametrize(
    ("body", "sign"),
    [
        ({}, "requests"),
        ({"requests": []}, "1 to 100000"),
        ({"requests": "x"}, "requests"),
        ({"requests": [5]}, "requests"),
        ({"requests": [{"params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        ({"requests": [{"custom_id": 5, "params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "", "params": {}}]}, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a" * 65, "params": {}}]}, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a", "params": {}}] * 2}, "requests[1].custom_id"),
        (b"{", "JSON"),
        (b'{"requests":[{"custom_id":"a","params":' + b"[" * 5000 + b"]" * 5000 + b"}]}", "JSON"),
        (b'{"requests":[{"custom_id":"a","params":{"a":"\xff"}}]}', "JSON"),
    ],
)
def test_malformed_batch_is_rejected(server, body, sign):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post(PATH, content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert sign in answer.json()["error"]["message"]


def test_body_may_have_line_breaks_and_a_byte_order_mark(server, client):
    data = "\ufeff" + json.dumps({"requests": [request("a", text="x\ny")]}, indent=2)
    answer = server.client.post(
        PATH,
        content=data.replace("\n", "\r\n").encode(),
        headers={**KEY, "content-type": "application/json"},
    )
    batch = wait(client, MessageBatch.model_validate(answer.json()))
    assert (
        results_of(client, batch)["a"].message.content
        == client.messages.create(**params("x\ny")).content
    )


def test_large_batch_is_accepted(client):
    """Its body has more values than that of any single request may have, and more bytes."""
    user = {"user_id": "u" * 256}
    batch = begin(client, *(request(f"r{i}", metadata=user, max_tokens=1) for i in range(12_000)))
    assert sum(batch.request_counts.to_dict().values()) == 12_000
    client.messages.batches.cancel(batch.id)
    counts = wait(client, batch).request_counts
    assert counts.succeeded + counts.canceled == 12_000


def test_cancelled_batch_keeps_its_results_and_can_be_deleted(client, server):
    quick = [request(f"q{i}", text=f"{i}") for i in range(2)]
    batch = begin(client, *quick, *(request(f"s{i}", **ENDLESS) for i in range(40)))
    batch = wait(client, batch, lambda batch: batch.request_counts.succeeded >= 2)
    message = refusal(400, client.messages.batches.delete, batch.id)
    assert "cancel" in message
    assert server.client.get(f"{PATH}/{batch.id}/results", headers=KEY).status_code == 400
    cancelled = client.messages.batches.cancel(batch.id)
    assert cancelled.processing_status in ("canceling", "ended")
    assert cancelled.cancel_initiated_at is not None
    batch = wait(client, batch)
    counts = batch.request_counts
    assert counts.processing == counts.errored == counts.expired == 0
    assert counts.canceled > 0
    results = results_of(client, batch)
    assert len(results) == counts.succeeded + counts.canceled == 42
    kinds = [result.type for result in results.values()]
    assert kinds.count("canceled") == counts.canceled
    refusal(400, client.messages.batches.cancel, batch.id)
    deleted = client.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    refusal(404, client.messages.batches.retrieve, batch.id)
    refusal(404, client.messages.batches.delete, batch.id)
    assert batch.id not in [one.id for one in client.messages.batches.list()]


def test_list_is_paged_in_both_directions(start_server):
    server = start_server(*FAKE)
    with client_of(server) as client:
        assert client.messages.batches.list().to_dict() == {
            "data": [],
            "has_more": False,
            "first_id": None,
            "last_id": None,
        }
        ids = [begin(client, request("a")).id for _ in range(5)][::-1]
        assert [one.id for one in client.messages.batches.list(limit=2)] == ids
        page = client.messages.batches.list(limit=2, after_id=ids[0])
        assert [one.id for one in page.data] == ids[1:3]
        assert (page.has_more, page.first_id, page.last_id) == (True, ids[1], ids[2])
        page = client.messages.batches.list(limit=2, before_id=ids[3])
        assert ([one.id for one in page.data], page.has_more) == (ids[1:3], True)
        page = client.messages.batches.list(limit=2, before_id=ids[1])
        assert ([one.id for one in page.data], page.has_more) == (ids[:1], False)
        assert "after_id" in refusal(400, client.messages.batches.list, after_id="x")
        refusal(400, client.messages.batches.list, limit=0)


def test_each_dialect_has_only_its_own_batches_and_files(server, client):
    """Their files are no files of OpenAI's API either."""
    batch = wait(client, begin(client, request("a")))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
        body = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a"},
        }
        file = other.files.create(file=("a.jsonl", json.dumps(body).encode()), purpose="batch")
        theirs = other.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert {one.endpoint for one in other.batches.list()} == {"/v1/completions"}
        assert {one.purpose for one in other.files.list()} <= {"batch", "batch_output"}
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
    assert theirs.id not in [one.id for one in client.messages.batches.list()]
    for call in ("retrieve", "cancel", "delete"):
        refusal(404, getattr(client.messages.batches, call), theirs.id)
    assert server.client.get(f"{PATH}/{theirs.id}/results", headers=KEY).status_code == 404
    paths = server.client.get("/openapi.json").json()["paths"]
    assert f"{PATH}/{{batch_id}}/results" in paths


def test_batches_belong_to_their_account_and_its_rights(start_server, tmp_path):
    path = tmp_path / "keys.json"
    rights = {"ann": {}, "bob": {}, "narrow": {"routes": ("/v1/messages/batches*",)}}
    accounts = {
        name: AccountRecord(keys=(Key(hash_key(name), 0),), **more) for name, more in rights.items()
    }
    write_key_file(path, KeyFile(accounts=accounts))
    server = start_server(*FAKE, CLLM_SERVER_KEYS_FILE=str(path))
    with client_of(server, "ann") as ann, client_of(server, "bob") as bob:
        batch = wait(ann, begin(ann, request("a")))
        assert list(bob.messages.batches.list()) == []
        for call in ("retrieve", "cancel", "delete"):
            refusal(404, getattr(bob.messages.batches, call), batch.id)
        headers = {"x-api-key": "bob"}
        assert server.client.get(batch.results_url, headers=headers).status_code == 404
        assert results_of(ann, batch)["a"].type == "succeeded"
        usage = server.client.get("/usage", headers={"x-api-key": "ann"}).json()
        assert sum(day["requests"] for day in usage["days"]) == 1
    with client_of(server, "narrow") as narrow:
        refusal(403, begin, narrow, request("a"))
    with client_of(server, "wrong") as wrong:
        refusal(401, begin, wrong, request("a"))


def test_batch_continues_after_a_kill(start_server, tmp_path):
    """Each request has one result, and those from before are kept."""
    state = {"CLLM_STORAGE_FOLDER": str(tmp_path)}
    first = start_server(*FAKE, **state)
    with client_of(first) as client:
        names = [f"r{i}" for i in range(60)]
        batch = begin(client, *(request(name, text=name, **ENDLESS) for name in names))
        wait(client, batch, lambda batch: batch.request_counts.succeeded >= 2)
    first.stop(signal.SIGKILL)
    second = start_server(*FAKE, **state)
    with client_of(second) as client:
        batch = wait(client, batch)
        assert batch.request_counts.succeeded == 60
        lines = second.client.get(batch.results_url, headers=KEY).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(names)


def test_expired_requests_are_reported(start_server, tmp_path):
    """A batch that was left unfinished for a day."""
    state = {"CLLM_STORAGE_FOLDER": str(tmp_path)}
    first = start_server(*FAKE, **state)
    with client_of(first) as client:
        batch = begin(client, *(request(f"r{i}", **ENDLESS) for i in range(60)))
        wait(client, batch, lambda batch: batch.request_counts.succeeded >= 1)
    first.stop(signal.SIGKILL)
    move_back(tmp_path / "store.db", batch.id, 25 * 3600)
    second = start_server(*FAKE, **state)
    with client_of(second) as client:
        batch = wait(client, batch)
        counts = batch.request_counts
        assert counts.succeeded + counts.expired == 60
        assert counts.expired > 0
        kinds = [result.type for result in results_of(client, batch).values()]
        assert (kinds.count("succeeded"), kinds.count("expired")) == (
            counts.succeeded,
            counts.expired,
        )
        second.stop(signal.SIGTERM)
    move_back(tmp_path / "store.db", batch.id, 30 * 24 * 3600)
    third = start_server(*FAKE, **state)
    with client_of(third) as client:
        batch = client.messages.batches.retrieve(batch.id)
        assert batch.archived_at is not None
        assert batch.results_url is None
        assert third.client.get(f"{PATH}/{batch.id}/results", headers=KEY).status_code == 404


def test_no_file_of_results_stays_open_if_another_one_is_gone(tmp_path, monkeypatch):
    with opened(tmp_path) as store:
        file, contents, open_file = put(store, b"x"), [], store.files.open

        def spy(file_id, account):
            found = open_file(file_id, account)
            contents.append(found[1])
            return found

        monkeypatch.setattr(store.files, "open", spy)
        with pytest.raises(BadRequest, match="no file"):
            open_all(store.files, [file.id, "file-gone"], OWN)
        assert [content.closed for content in contents] == [True]


def test_files_of_results_are_closed_if_the_client_reads_no_further():
    contents = [io.BytesIO(b"ab"), io.BytesIO(b"cd")]
    chunks = read_all(contents)
    assert next(chunks) == b"ab"
    chunks.close()
    assert all(content.closed for content in contents)
