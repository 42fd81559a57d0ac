"""The files of a batch, without a server: what a crash leaves, and which inputs are batches."""

import contextlib
import io
import json

import pytest

from cllm.errors import BadRequest
from cllm.server.openai.batch_record import (
    MAX_LINES,
    BatchFiles,
    BatchRecord,
    check_lines,
    load_records,
)
from cllm.server.openai.file_store import FileStore, StateFolder, new_file


def line(custom_id):
    return json.dumps({"custom_id": custom_id}).encode() + b"\n"


def test_a_line_that_a_crash_has_cut_off_is_taken_away(tmp_path):
    """So it is computed again, and is there once."""
    files = BatchFiles(tmp_path, "batch_1")
    files.add(line("a"), succeeded=True)
    files.add(line("b"), succeeded=True)
    files.add(line("c"), succeeded=False)
    files.flush()
    whole = files.output.read_bytes()
    for cut in range(len(line("a")), len(whole)):
        files.output.write_bytes(whole[:cut])
        assert BatchFiles(tmp_path, "batch_1").answered() == ({"a"}, {"c"}, {})
        assert files.output.read_bytes() == line("a")
    files.add(line("b"), succeeded=True)
    assert files.answered() == ({"a", "b"}, {"c"}, {}), (
        "what was added is brought to the disk first"
    )
    assert files.output.read_bytes() == whole


@contextlib.contextmanager
def full_disk(size):
    """Where no file can grow beyond ``size``; writes are cut off there, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_full_disk_did_not_take_is_written_later(tmp_path):
    """Nobody is told that his line is there before it is, and none is there twice or in part."""
    files = BatchFiles(tmp_path, "batch_1")
    files.add(line("a"), succeeded=True)
    files.add(line("b"), succeeded=False)
    files.add(line("c"), succeeded=True)
    with full_disk(len(line("a")) + 3):
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                files.flush()
        assert files.output.read_bytes() == b""
    files.flush()
    assert files.output.read_bytes() == line("a") + line("c")
    assert files.errors.read_bytes() == line("b")


def test_an_upload_that_a_full_disk_did_not_take_leaves_nothing(folder):
    store = FileStore(folder, 10, 10_000)
    with full_disk(1000), pytest.raises(BadRequest, match="disk") as caught:
        put(store, b"x" * 5000)
    assert caught.value.status == 507
    assert list(folder.iterdir()) == []


def test_records_are_whole_or_not_there(tmp_path):
    """One that is half written is not the record's name, and one that is damaged is no reason not
    to start.
    """
    record = BatchRecord(
        "batch_1", "", "m", "/v1/completions", "file-1", "24h", 1, 2, status="in_progress"
    )
    BatchFiles(tmp_path, record.id).save(record)
    (tmp_path / "batch_2.new").write_bytes(b'{"id":')
    (tmp_path / "batch_3.json").write_bytes(b'{"id":')
    assert list(load_records(tmp_path)) == [record]


def test_a_batch_has_a_limit_of_lines(tmp_path):
    path = tmp_path / "input"
    body = {"method": "POST", "url": "/v1/completions", "body": {}}
    path.write_text(
        "".join(json.dumps({"custom_id": str(i), **body}) + "\n" for i in range(MAX_LINES + 5))
    )
    assert check_lines(path, "/v1/completions", 1000)[1][0]["code"] == "too_many_requests"
    path.write_text(json.dumps({"custom_id": "a", **body}) + "\n" + "x" * 2000)
    _, (error,) = check_lines(path, "/v1/completions", 1000)
    assert (error["code"], error["line"]) == ("line_too_long", 2)


def put(store, content, **more):
    file = new_file("o", "name", "batch", len(content), more.pop("expires_after", None))
    store.take_room(len(content), 1)
    store.write(file, io.BytesIO(content))
    store.keep(file, num_pending=1)
    return file


@pytest.fixture
def folder(tmp_path):
    state = StateFolder(tmp_path / "state")
    state.open()
    yield state.path / "files"
    state.close()


def test_files_are_found_again_and_what_is_not_whole_goes(folder):
    """After a crash between any two of the steps that make a file."""
    store = FileStore(folder, 10, 1000)
    file = put(store, b"content")
    (folder / "mine.txt").write_bytes(b"of somebody who chose this folder for his own things too")
    (folder / "file-4.data").mkdir()
    (folder / "file-1.part").write_bytes(b"cut off")
    (folder / "file-2.data").write_bytes(b"has no record")
    (folder / "file-3.json").write_bytes(
        (folder / f"{file.id}.json").read_bytes().replace(file.id.encode(), b"file-3")
    )
    again = FileStore(folder, 10, 1000)
    again.load()
    assert again.owned_by("o") == [file]
    assert again.path(file.id).read_bytes() == b"content"
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{file.id}.data", f"{file.id}.json", "mine.txt", "file-4.data"}


def test_files_are_bounded_in_number_and_bytes(folder):
    store = FileStore(folder, 3, 100)
    first, second = put(store, b"x" * 50), put(store, b"x" * 40)
    with pytest.raises(BadRequest, match="100 bytes"):
        put(store, b"x" * 11)
    put(store, b"x" * 10)
    with pytest.raises(BadRequest, match="No more than 3 files"):
        put(store, b"")
    store.delete(first)
    put(store, b"x" * 50)
    again = FileStore(folder, 3, 100)
    again.load()
    with pytest.raises(BadRequest):
        again.take_room(1)
    assert second in again.owned_by("o")


def test_a_file_expires_unless_it_is_read(folder):
    store = FileStore(folder, 10, 1000)
    file = put(store, b"x", expires_after=-1)
    store.is_read = lambda file_id: file_id == file.id
    assert store.get(file.id, "o") == file
    store.is_read = lambda _: False
    with pytest.raises(BadRequest, match="no file"):
        store.get(file.id, "o")
    assert list(folder.iterdir()) == []


def test_a_folder_is_one_servers(tmp_path):
    """Until that ends, however it does."""
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    first.open()
    with pytest.raises(BadRequest, match="another server"):
        second.open()
    first.close()
    second.open()
    second.close()
