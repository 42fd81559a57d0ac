"""Files and batches with OpenAI's own client: results, stored files, and recovery after crashes."""

import io
import json
import os
import signal
import time
from collections import Counter

import msgspec
import openai
import pydantic
import pytest
from conftest import PATIENCE
from openai.types import Batch, FileObject

from cllm.store.batches import FINAL, BatchRecord
from cllm.store.files import StoredFile

pytestmark = pytest.mark.slow

FAKE = ("--backend.name", "fake", "--max-num-seqs", "4", "--context", "512")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once(
        *FAKE,
        "--server.max-body-mb",
        "1",
        "--storage.max-file-mb",
        "1",
        "--storage.max-files",
        "50",
    )


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(custom_id, url=COMPLETIONS, **body):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"prompt": "ab", "temperature": 0, **body},
    }


def upload(client, lines, **more):
    data = "\n".join(
        entry if isinstance(entry, str) else json.dumps(entry) for entry in lines
    ).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch", **more)


def begin(client, lines, endpoint=COMPLETIONS, **more):
    file = upload(client, lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def wait(client, batch, statuses=("completed", "failed", "expired", "cancelled"), timeout=PATIENCE):
    end = time.monotonic() + timeout
    while (batch := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def answers(client, file_id):
    """Return the lines of a file by custom_id, and check that no custom_id occurs twice."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    found = {entry["custom_id"]: entry for entry in lines}
    assert len(found) == len(lines), Counter(entry["custom_id"] for entry in lines).most_common(3)
    assert len({entry["id"] for entry in lines}) == len(lines)
    return found


def test_file_is_uploaded_listed_read_and_deleted(client):
    """The answers are valid values of the client's own types."""
    data = json.dumps(line("ä")).encode() + b"\r\n\r\n--boundary\r\n\x00\xff"
    name = "../../etc/päss wd"
    file = client.files.create(file=(name, data), purpose="batch")
    pydantic.TypeAdapter(FileObject).validate_python(file.to_dict())
    assert (file.bytes, file.filename, file.purpose) == (len(data), name, "batch")
    assert client.files.content(file.id).read() == data
    assert client.files.retrieve(file.id) == file
    assert file.id in [entry.id for entry in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert file.id not in [entry.id for entry in client.files.list()]


def test_files_are_listed_in_pages(client):
    files = [upload(client, [line(str(i))]) for i in range(3)]
    first = client.files.list(limit=2, order="asc")
    assert first.has_more
    assert len(first.data) == 2
    assert {file.id for file in first} >= {file.id for file in files}, (
        "the client asks for the other pages itself"
    )
    for file in files:
        client.files.delete(file.id)


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"data": {"purpose": "assistants"}, "files": {"file": ("a", b"x")}}, 400, "purpose"),
        ({"data": {}, "files": {"file": ("a", b"x")}}, 400, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * 1_100_000)}}, 413, "file"),
        (
            {
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "1",
                },
                "files": {"file": ("a", b"x")},
            },
            400,
            "expires_after.seconds",
        ),
        ({"data": {"purpose": "batch", "file[a]": "1"}, "files": {"file": ("a", b"x")}}, 200, None),
        ({"json": {"purpose": "batch"}}, 415, None),
        (
            {
                "content": b"--x\r\nbroken",
                "headers": {"content-type": "multipart/form-data; boundary=x"},
            },
            400,
            "file",
        ),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, 400, None),
    ],
)
def test_invalid_upload_is_rejected(server, form, status, param):
    """In OpenAI's form, with the name of the field."""
    answer = server.client.post("/v1/files", **form)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["param"] == param


def test_upload_without_content_length_is_limited(server):
    """The server rejects it as soon as it exceeds the limit."""
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    parts = (part for part in [head, *[b"y" * 100_000] * 50])
    answer = server.client.post(
        "/v1/files", content=parts, headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert answer.status_code == 413


def test_batch_computes_answers_and_reports_errors(client):
    """Errors are in a file of their own. The answers are valid values of the client's own types."""
    lines = [line(f"r{i}", prompt=chr(65 + i)) for i in range(20)] + [line("bad", temperature=-1)]
    batch = begin(client, lines, metadata={"a": "b"})
    assert batch.status in ("validating", "in_progress")
    batch = wait(client, batch)
    pydantic.TypeAdapter(Batch).validate_python(batch.to_dict())
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 21, 20, 1)
    assert batch.metadata == {"a": "b"}
    assert (
        batch.created_at
        <= batch.in_progress_at
        <= batch.finalizing_at
        <= batch.completed_at
        < batch.expires_at
    )
    found = answers(client, batch.output_file_id)
    assert set(found) == {f"r{i}" for i in range(20)}
    for i in range(20):
        response = found[f"r{i}"]["response"]
        direct = client.completions.create(model=None, prompt=chr(65 + i), temperature=0)
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"]["choices"][0]["text"] == direct.choices[0].text
    used = [found[f"r{i}"]["response"]["body"]["usage"] for i in range(20)]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used) > 0
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    errors = answers(client, batch.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in [entry.id for entry in client.batches.list()]


# differ from one request to the next; and responses of batches are not stored
VOLATILE = {"id", "created", "created_at", "completed_at", "timings", "cached_tokens", "store"}


def stripped(value):
    if isinstance(value, dict):
        return {name: stripped(part) for name, part in value.items() if name not in VOLATILE}
    return [stripped(part) for part in value] if isinstance(value, list) else value


MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    CHAT: [
        {"messages": MESSAGES, "temperature": 0, "logprobs": True},
        {"messages": [], "n": 2},
        {"messages": "a"},
        {"messages": MESSAGES, "model": "another"},
    ],
    COMPLETIONS: [
        {"prompt": ["ab", "c"], "temperature": 0, "echo": True, "logprobs": 1},
        {"prompt": "", "top_p": 2},
        {"prompt": "a" * 10_000},
    ],
    "/v1/responses": [
        {"input": "a", "temperature": 0, "metadata": {"a": "b"}},
        {"input": "a", "previous_response_id": "resp_1"},
    ],
    "/v1/embeddings": [
        {"input": ["a", "b"], "dimensions": 2},
        {"input": "a", "dimensions": 100_000},
        {"input": []},
    ],
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_batch_gives_the_same_answer_as_the_route(server, client, endpoint):
    """The first body of each route is answered, and the others are rejected."""
    entries = [
        {"custom_id": str(i), "method": "POST", "url": endpoint, "body": body}
        for i, body in enumerate(BODIES[endpoint])
    ]
    batch = wait(client, begin(client, entries, endpoint))
    done, failed = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert (set(done), len(failed)) == ({"0"}, len(entries) - 1)
    for entry in entries:
        answer = server.client.post(endpoint, json=entry["body"])
        response = (done | failed)[entry["custom_id"]]["response"]
        assert response["status_code"] == answer.status_code
        assert stripped(response["body"]) == stripped(answer.json())
    assert batch.usage.total_tokens == done["0"]["response"]["body"]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        (["{"], "invalid_json_line", 1),
        ([line("a"), {"custom_id": "b"}], "invalid_request", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a", url=CHAT)], "mismatched_endpoint", 1),
        ([{**line("a"), "method": "GET"}], "invalid_method", 1),
        ([line("a", stream=True)], "unsupported_parameter", 1),
        ([line("a"), "", "[1]"], "invalid_request", 3),
    ],
)
def test_batch_with_an_invalid_line_fails_before_it_starts(client, lines, code, number):
    """The batch reports the line and its error."""
    batch = wait(client, begin(client, lines))
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.output_file_id is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "../lock"}, "input_file_id"),
    ],
)
def test_invalid_batch_is_rejected(client, server, body, param):
    file = upload(client, [line("a")])
    content = {
        "input_file_id": file.id,
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
        **body,
    }
    answer = server.client.post(
        "/v1/batches", json=content, headers={"authorization": "Bearer none"}
    )
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_files_and_batches_are_visible_to_their_account_only(client, server):
    """A client with another token cannot see them."""
    file = upload(client, [line("a")])
    batch = wait(client, begin(client, [line("a")]))
    with client_of(server, "another") as other:
        assert list(other.files.list()) == list(other.batches.list()) == []
        for call in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


LONG = {"max_tokens": 400, "ignore_eos": True}


def test_cancelled_batch_keeps_its_answers(client):
    """Lines without an answer get an error. The input file cannot be deleted while the batch reads
    it.
    """
    lines = [line(f"r{i}", prompt=f"{i:04}", **LONG) for i in range(400)]
    batch = wait(client, begin(client, lines), ["in_progress"])
    with pytest.raises(openai.BadRequestError, match="still reads"):
        client.files.delete(batch.input_file_id)
    while not (batch := client.batches.retrieve(batch.id)).request_counts.completed:
        assert batch.status == "in_progress"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    done, missing = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert set(done) | set(missing) == {entry["custom_id"] for entry in lines}
    assert not set(done) & set(missing)
    assert len(done) == batch.request_counts.completed > 0
    assert {entry["error"]["code"] for entry in missing.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_batch_resumes_after_the_server_is_killed_or_stopped(start_server, tmp_path, how):
    """After two interruptions, every line has exactly one answer, and the answers are right."""
    environment = {"CLLM_STORAGE_FOLDER": str(tmp_path / "write_earlier_records")}
    lines = [line(f"r{i}", prompt=f"{i:04}", max_tokens=16, ignore_eos=True) for i in range(160)]
    server = start_server(*FAKE, **environment)
    with client_of(server) as client:
        batch = begin(client, lines)
    for part in (20, 60):
        with client_of(server) as client:
            end = time.monotonic() + PATIENCE
            while (counts := client.batches.retrieve(batch.id).request_counts).completed < part:
                assert time.monotonic() < end, counts
                time.sleep(0.01)
            assert counts.completed < 160, "it was to be killed in the middle"
        code = server.stop(how)
        assert code == (0 if how == signal.SIGTERM else -how)
        server = start_server(*FAKE, **environment)
    with client_of(server) as client:
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed",
            160,
            0,
        )
        found = answers(client, batch.output_file_id)
        assert set(found) == {entry["custom_id"] for entry in lines}
        for entry in lines[::40]:
            body = dict(entry["body"])
            direct = client.completions.create(
                model=None, extra_body={"ignore_eos": body.pop("ignore_eos")}, **body
            )
            answer = found[entry["custom_id"]]["response"]["body"]
            assert answer["choices"][0]["text"] == direct.choices[0].text
        assert client.files.retrieve(batch.input_file_id).bytes
    assert not list((tmp_path / "write_earlier_records" / "batches").glob("*.output"))


def test_batch_recomputes_lines_after_an_engine_crash(start_server):
    """Lines that were lost with it are computed again."""
    server = start_server(*FAKE)
    lines = [line(f"r{i}", prompt=f"{i:04}", max_tokens=16, ignore_eos=True) for i in range(60)]
    with client_of(server) as client:
        batch = begin(client, lines)
        while client.batches.retrieve(batch.id).request_counts.completed < 8:
            time.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert len(answers(client, batch.output_file_id)) == 60


def write_earlier_records(folder, record, **contents):
    """Write the files of an earlier version: the record of a batch, its input file, and other
    files.
    """
    record = BatchRecord(
        id="batch_1",
        account="",
        endpoint=COMPLETIONS,
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        **{"model": "fake", "expires_at": 2_000_000_000, "total": 4, **record},
    )
    for name in ("files", "batches"):
        (folder / name).mkdir(parents=True)
    write(folder / "batches" / "batch_1.json", record)
    lines = "".join(json.dumps(line(f"r{i}")) + "\n" for i in range(4))
    for file_id, content in {"file-1": lines, **contents}.items():
        file = StoredFile(file_id, "", "name", "batch", len(content), 1)
        write(folder / "files" / f"{file_id}.json", file)
        (folder / "files" / f"{file_id}.data").write_text(content)


def write(path, record):
    fields = msgspec.to_builtins(record)
    path.write_text(json.dumps({**fields, "owner": fields.pop("account")}))


def wait_for_end(start_server, folder):
    """Start a server and return it with the batch when that has wait_for_end."""
    server = start_server(*FAKE, CLLM_STORAGE_FOLDER=str(folder))
    end = time.monotonic() + PATIENCE
    while (batch := server.client.get("/v1/batches/batch_1").json())["status"] not in FINAL:
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return server, batch


def answer(custom_id):
    return json.dumps({"custom_id": custom_id, "response": {"body": {}}}) + "\n"


def test_batch_finishes_after_a_crash_between_its_output_files(start_server, tmp_path):
    """After a crash between the two files, nothing is counted again and no line has two answers."""
    known = {"completed": 3, "failed": 1, "output_file_id": "file-2", "error_file_id": "file-3"}
    record = {"status": "cancelling", "ending": "cancelled", **known}
    write_earlier_records(tmp_path, record, **{"file-2": "".join(map(answer, ("r0", "r1", "r2")))})
    (tmp_path / "batches" / "batch_1.errors").write_text(answer("r3"))
    server, batch = wait_for_end(start_server, tmp_path)
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert server.client.get("/v1/files/file-2/content").text.count("custom_id") == 3
    assert server.client.get("/v1/files/file-3/content").text == answer("r3")
    assert not list((tmp_path / "batches").glob("*.errors"))


@pytest.mark.parametrize("model", ["fake", "another"])
def test_expired_batch_keeps_its_answers(start_server, tmp_path, model):
    """This includes a batch for a model that the server does not have."""
    write_earlier_records(
        tmp_path, {"status": "in_progress", "expires_at": int(time.time()) - 1, "model": model}
    )
    (tmp_path / "batches" / "batch_1.output").write_text(answer("r1"))
    server, batch = wait_for_end(start_server, tmp_path)
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"]
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    errors = server.client.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    assert {(entry["custom_id"], entry["error"]["code"]) for entry in map(json.loads, errors)} == {
        (f"r{i}", "batch_expired") for i in (0, 2, 3)
    }


def test_batch_pauses_while_the_disk_is_full(start_server):
    """Uploads are rejected meanwhile. In the end every line has exactly one answer."""
    resource = pytest.importorskip("resource")
    server = start_server(*FAKE)
    lines = [line(f"r{i}", prompt=f"{i:04}", max_tokens=40, ignore_eos=True) for i in range(60)]
    with client_of(server) as client:
        batch = begin(client, lines)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        with pytest.raises(openai.APIStatusError, match="disk") as caught:
            upload(client, lines)
        assert caught.value.status_code == 507
        end = time.monotonic() + PATIENCE
        while "batches wait for the disk" not in server.log:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (
            client.completions.create(model=None, prompt="a", max_tokens=2).usage.completion_tokens
            == 2
        )
        assert client.batches.retrieve(batch.id).status == "in_progress"
        resource.prlimit(
            server.process.pid,
            resource.RLIMIT_FSIZE,
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert len(answers(client, batch.output_file_id)) == 60


def test_batch_requests_have_the_lowest_class(start_server):
    """The class in the lines is ignored: a request that arrives later is computed before them."""
    server = start_server("--backend.name", "fake", "--max-num-seqs", "1")
    lines = [
        line(f"r{i}", prompt=f"{i:04}", max_tokens=400, ignore_eos=True, priority="interactive")
        for i in range(30)
    ]
    with client_of(server) as client:
        batch = wait(client, begin(client, lines), ["in_progress", "completed"])
        client.completions.create(model=None, prompt="a", max_tokens=4)
        assert client.batches.retrieve(batch.id).request_counts.completed < 15
        client.batches.cancel(batch.id)


def test_files_are_off_without_a_folder(start_server):
    server = start_server(*FAKE, CLLM_STORAGE_FOLDER="null")
    for path in ("/v1/files", "/v1/batches"):
        answer = server.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "storage_off")


def test_second_server_on_a_folder_keeps_its_files_in_one_of_its_own(start_server, tmp_path):
    environment = {"CLLM_STORAGE_FOLDER": str(tmp_path)}
    first, second = start_server(*FAKE, **environment), start_server(*FAKE, **environment)
    assert first.client.get("/v1/files").status_code == 200
    assert second.client.get("/v1/files").status_code == 200
    port = second.client.base_url.port
    assert (tmp_path / f"port-{port}" / "files").is_dir()
