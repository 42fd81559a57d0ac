"""Files of clients: limits, expiry, crashes, and a full disk."""

import stat

import pytest
from store_parts import OWN, failing_deletion, full_disk, names, opened, put

from cllm.core.account import Account
from cllm.core.stored_ids import make_id
from cllm.errors import BadRequest
from cllm.store.batches import BatchRecord
from cllm.store.files import new_file


def test_file_is_found_by_its_account_only(store):
    file = put(store, b"content")
    assert store.files.get(file.id, OWN) == file
    assert store.files.list_for(OWN) == [file]
    found, content = store.files.open(file.id, OWN)
    with content:
        assert (found, content.read()) == (file, b"content")
    other = Account("another")
    assert store.files.list_for(other) == []
    for call in (store.files.get, store.files.open, store.files.delete):
        with pytest.raises(BadRequest, match="no file") as caught:
            call(file.id, other)
        assert caught.value.status == 404


def test_files_are_listed_in_creation_order(store):
    files = [put(store, b"x") for _ in range(5)]
    assert store.files.list_for(OWN) == files


def test_incomplete_files_are_deleted_at_the_start(tmp_path):
    """The crash happens between any two steps of creating a file. Files of other programs stay."""
    folder = tmp_path / "files"
    with opened(tmp_path) as store:
        file = put(store, b"content")
        without_content = put(store, b"lost")
    (folder / f"{without_content.id}.data").unlink()
    (folder / "mine.txt").write_bytes(b"of another program")
    (folder / "file-4.data").mkdir()
    (folder / "file-1.part").write_bytes(b"cut off")
    (folder / "file-2.data").write_bytes(b"has no record")
    with opened(tmp_path) as store:
        assert store.files.list_for(OWN) == [file]
        assert store.files.path(file.id).read_bytes() == b"content"
        assert (store.room._num_files, store.room._num_bytes) == (1, len(b"content"))
    assert names(folder) == {f"{file.id}.data", "mine.txt", "file-4.data"}


def test_files_are_limited_in_number_and_bytes(tmp_path):
    with opened(tmp_path, max_files=3, max_bytes=100) as store:
        first, second = put(store, b"x" * 50), put(store, b"x" * 40)
        with pytest.raises(BadRequest, match="100 bytes"):
            put(store, b"x" * 11)
        put(store, b"x" * 10)
        with pytest.raises(BadRequest, match="No more than 3 files"):
            put(store, b"")
        store.files.delete(first.id, OWN)
        put(store, b"x" * 50)
    with opened(tmp_path, max_files=3, max_bytes=100) as store:
        with pytest.raises(BadRequest):
            store.room.take(1)
        assert second in store.files.list_for(OWN)


def batch_of(file):
    return BatchRecord("batch_1", "o", "m", "/v1/completions", file.id, "24h", 1, 2)


def test_file_expires_unless_a_batch_reads_it(store):
    file = put(store, b"x", expires_after=3600)
    record = batch_of(file)
    store.batches.add(record, OWN)
    put_back(store, file, expires_at=1)
    assert store.files.get(file.id, OWN).id == file.id
    with pytest.raises(BadRequest, match="batch_1 still reads"):
        store.files.delete(file.id, OWN)
    record.status = "failed"
    store.batches.save(record)
    with pytest.raises(BadRequest, match="no file"):
        store.files.get(file.id, OWN)
    assert names(store.folder / "files") == set()
    assert (store.room._num_files, store.room._num_bytes) == (0, 0)


def test_expired_file_that_cannot_be_deleted_is_hidden(store):
    """Other files can be read, and the next call tries again."""
    expired, kept = put(store, b"x"), put(store, b"content")
    put_back(store, expired, expires_at=1)
    with failing_deletion(store, "files"):
        for call in (store.files.get, store.files.delete):
            with pytest.raises(BadRequest, match="no file"):
                call(expired.id, OWN)
        assert store.files.list_for(OWN) == [kept]
        assert store.files.get(kept.id, OWN) == kept
        store.files.open(kept.id, OWN)[1].close()
        assert store.room._num_files == 2
    store.files.delete(kept.id, OWN)
    assert names(store.folder / "files") == set()
    assert (store.room._num_files, store.room._num_bytes) == (0, 0)


def test_file_whose_record_cannot_be_deleted_has_no_content(store):
    """The client can repeat its request."""
    file = put(store, b"content")
    with failing_deletion(store, "files"):
        with pytest.raises(BadRequest, match="disk"):
            store.files.delete(file.id, OWN)
        with pytest.raises(BadRequest, match="no file") as caught:
            store.files.open(file.id, OWN)
        assert caught.value.status == 404
    store.files.delete(file.id, OWN)
    assert (store.room._num_files, store.room._num_bytes) == (0, 0)


def put_back(store, file, expires_at):
    """Change when ``file`` expires."""
    with store._database.transaction() as connection:
        connection.execute("UPDATE files SET expires_at = ? WHERE id = ?", (expires_at, file.id))


def test_upload_rejected_by_a_full_disk_leaves_nothing(store):
    with full_disk(1000), pytest.raises(BadRequest, match="disk") as caught:
        put(store, b"x" * 5000)
    assert caught.value.status == 507
    assert names(store.folder / "files") == set()


def test_record_rejected_by_a_full_disk_leaves_no_content(store):
    """The store works again when the disk has room, and a file can be deleted once its content is
    gone.
    """
    kept = put(store, b"x")
    with full_disk(1000):
        with pytest.raises(BadRequest, match="disk"):
            put(store, b"y")
        assert store.files.list_for(OWN) == [kept]
    assert names(store.folder / "files") == {f"{kept.id}.data"}
    again = put(store, b"z")
    assert store.files.list_for(OWN) == [kept, again]
    store.files.delete(kept.id, OWN)
    assert store.files.list_for(OWN) == [again]


def test_other_users_of_the_machine_cannot_read_the_records(store):
    assert stat.S_IMODE((store.folder / "store.db").stat().st_mode) == 0o600


def test_name_of_a_file_is_not_used_as_a_path(store):
    file = new_file("o", "../../etc/passwd", "batch", 0, None, make_id("file-"))
    assert store.files.path(file.id).parent == store.folder / "files"
