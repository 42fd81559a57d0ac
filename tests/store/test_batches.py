"""Records of batches, and the files of their answers."""

import time

import msgspec
import pytest
from store_parts import OWN, failing_deletion, full_disk, names, opened, put

from cllm.core.account import Account
from cllm.errors import BadRequest
from cllm.store import batches
from cllm.store.batch_answers import BatchAnswers
from cllm.store.batches import BatchRecord
from cllm.store.files import insert_file, new_file


def record_of(file, batch_id="batch_1", **more):
    record = BatchRecord(batch_id, "o", "m", "/v1/completions", file.id, "24h", 1, 2)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def add(store, file, batch_id="batch_1", **more):
    record = record_of(file, batch_id, **more)
    store.batches.add(record, OWN)
    return record


def test_batch_is_found_by_its_account_only(store):
    record = add(store, put(store, b"x"), metadata={"a": "b"})
    assert store.batches.get("batch_1", OWN) == record
    assert store.batches.list_for(Account("another")) == []
    for batch_id, account in (("batch_1", Account("another")), ("batch_2", OWN)):
        with pytest.raises(BadRequest, match="no batch") as caught:
            store.batches.get(batch_id, account)
        assert caught.value.status == 404


def test_batch_needs_a_file_of_its_account(store):
    file = put(store, b"x")
    with pytest.raises(BadRequest, match="no file") as caught:
        store.batches.add(record_of(file), Account("another"))
    assert (caught.value.status, caught.value.param) == (404, "input_file_id")
    assert store.batches.list_for(OWN) == []


def test_newest_batches_come_first(store):
    file = put(store, b"x")
    for i, created_at in enumerate((5, 7, 7, 6)):
        add(store, file, f"batch_{i}", created_at=created_at)
    store.batches.save(record_of(file, "batch_1", created_at=7, status="in_progress"))
    found = [record.id for record in store.batches.list_for(OWN)]
    assert found == ["batch_2", "batch_1", "batch_3", "batch_0"]


def test_unfinished_batches_are_limited(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_UNFINISHED", 2)
    file = put(store, b"x")
    first = add(store, file, "batch_1")
    add(store, file, "batch_2")
    with pytest.raises(BadRequest, match="2 unfinished batches") as caught:
        add(store, file, "batch_3")
    assert caught.value.status == 429
    first.status = "cancelled"
    store.batches.save(first)
    add(store, file, "batch_3")
    assert [record.id for record in store.batches.unfinished()] == ["batch_2", "batch_3"]


def test_oldest_batches_that_have_ended_are_deleted_with_their_answers(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_RECORDS", 2)
    file = put(store, b"x")
    ended = add(store, file, "batch_1", status="failed")
    answers = store.batches.answers(ended.id)
    answers.add(b"{}\n", succeeded=True)
    answers.flush()
    store.room.take(3)
    add(store, file, "batch_2")
    add(store, file, "batch_3")
    assert {record.id for record in store.batches.list_for(OWN)} == {"batch_2", "batch_3"}
    assert names(store.folder / "batches") == set()
    assert store.room._num_bytes == 1


def test_batch_is_not_created_if_an_old_record_cannot_be_deleted(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_RECORDS", 1)
    file = put(store, b"x")
    add(store, file, "batch_1", status="failed")
    with failing_deletion(store, "batches"), pytest.raises(BadRequest, match="disk") as caught:
        add(store, file, "batch_2")
    assert caught.value.status == 507
    assert [record.id for record in store.batches.list_for(OWN)] == ["batch_1"]


def test_batch_is_created_if_old_answers_cannot_be_deleted(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_RECORDS", 1)

    def fail(answers):
        raise PermissionError("not permitted")

    monkeypatch.setattr(BatchAnswers, "delete", fail)
    file = put(store, b"x")
    add(store, file, "batch_1", status="failed")
    add(store, file, "batch_2")
    assert [record.id for record in store.batches.list_for(OWN)] == ["batch_2"]


def test_record_of_an_ended_batch_does_not_change(store):
    record = add(store, put(store, b"x"))
    record.status = "expired"
    store.batches.save(record)
    store.batches.save(record_of(store.files.list_for(OWN)[0], status="cancelling"))
    assert store.batches.get("batch_1", OWN).status == "expired"
    assert store.batches.unfinished() == []


@pytest.mark.parametrize("damage", [b"pausing", b"validatin\xff"])
def test_damaged_record_is_skipped_and_its_files_are_kept(tmp_path, caplog, damage):
    with opened(tmp_path) as store:
        file = put(store, b"x")
        record = add(store, file, output_file_id="file-2")
        intact = add(store, file, "batch_2")
        store.batches.answers(record.id).errors.write_bytes(b"{}\n")
        store.files.path("file-2").write_bytes(b"{}\n")
        with store._database.transaction() as connection:
            connection.execute(
                "UPDATE batches SET record = ? WHERE id = ?",
                (msgspec.json.encode(record).replace(b"validating", damage), record.id),
            )
    with opened(tmp_path) as store:
        assert store.batches.unfinished() == store.batches.list_for(OWN) == [intact]
        with pytest.raises(BadRequest, match="no batch"):
            store.batches.get(record.id, OWN)
        assert store.room._num_bytes == 7
        assert store._database.rows("SELECT id FROM batches WHERE has_ended") == [(record.id,)]
    assert "the record of batch_1 cannot be read" in caplog.text
    assert names(tmp_path / "batches") == {"batch_1.errors"}
    assert names(tmp_path / "files") == {f"{file.id}.data", "file-2.data"}


def test_batch_is_not_created_if_the_disk_is_full(store):
    file = put(store, b"x")
    with full_disk(1000), pytest.raises(BadRequest, match="disk") as caught:
        add(store, file)
    assert caught.value.status == 507
    assert store.batches.list_for(OWN) == []
    add(store, file)
    assert len(store.batches.list_for(OWN)) == 1


def make_answers(store, record):
    answers = store.batches.answers(record.id)
    for succeeded in (True, False):
        store.room.take(3)
        answers.add(b"{}\n", succeeded=succeeded)
    answers.flush()
    record.output_file_id, record.error_file_id, record.ending = "file-2", "file-3", "completed"
    store.batches.save(record)


def check_finished(store):
    found = store.batches.get("batch_1", OWN)
    files = {file.id: file for file in store.files.list_for(OWN)}
    assert (found.status, found.output_file_id, found.error_file_id) == (
        "completed",
        "file-2",
        "file-3",
    )
    for file_id, name in (("file-2", "batch_1.output.jsonl"), ("file-3", "batch_1.errors.jsonl")):
        assert (files[file_id].filename, files[file_id].bytes) == (name, 3)
        assert (files[file_id].purpose, files[file_id].account) == ("batch_output", "o")
        assert store.files.path(file_id).read_bytes() == b"{}\n"
    assert names(store.folder / "batches") == set()
    assert (store.room._num_files, store.room._num_bytes) == (3, 7)


def test_answers_become_files_when_a_batch_has_finished(store):
    record = add(store, put(store, b"x"), output_expires_after=3600)
    make_answers(store, record)
    record.status = "completed"
    store.batches.finish(record)
    check_finished(store)
    assert store.files.get("file-2", OWN).expires_at >= time.time() + 3500


def test_file_that_already_has_a_record_is_counted_once(tmp_path):
    """An earlier version recorded the files of a batch one at a time, and crashed in between."""
    with opened(tmp_path) as store:
        record = add(store, put(store, b"x"))
        make_answers(store, record)
        store.files.move_in(store.batches.answers(record.id).output, "file-2")
        file = new_file("o", "batch_1.output.jsonl", "batch_output", 3, None, "file-2")
        with store._database.transaction() as connection:
            insert_file(connection, file)
    with opened(tmp_path) as store:
        record.status = "completed"
        store.batches.finish(record)
        check_finished(store)


def test_answers_named_by_a_failed_batch_survive_the_start(tmp_path):
    with opened(tmp_path) as store:
        file = put(store, b"x")
        add(store, file, status="failed", output_file_id="file-2")
        store.files.path("file-2").write_bytes(b"{}\n")
    with opened(tmp_path) as store:
        assert store.files.path("file-2").read_bytes() == b"{}\n"
        assert store.files.list_for(OWN) == [file]
        assert (store.room._num_files, store.room._num_bytes) == (1, 4)


@pytest.mark.parametrize("num_moved", [0, 1, 2])
def test_finishing_is_repeated_after_a_crash(tmp_path, num_moved):
    """Answers that became files without a record stay with their batch."""
    with opened(tmp_path) as store:
        record = add(store, put(store, b"x"))
        make_answers(store, record)
        answers = store.batches.answers(record.id)
        for part, file_id in ((answers.output, "file-2"), (answers.errors, "file-3"))[:num_moved]:
            store.files.move_in(part, file_id)
    with opened(tmp_path) as store:
        assert len(store.files.list_for(OWN)) == 1, "only complete batches have files"
        assert store.room._num_bytes == 7
        (again,) = store.batches.unfinished()
        assert again == record
        again.status = "completed"
        store.batches.finish(again)
        check_finished(store)


def test_answers_without_a_batch_are_deleted_at_the_start(tmp_path):
    with opened(tmp_path) as store:
        record = add(store, put(store, b"x"))
        store.batches.answers(record.id).output.write_bytes(b"{}\n")
        (tmp_path / "batches" / "batch_9.output").write_bytes(b"{}\n")
        (tmp_path / "batches" / "notes.output").write_bytes(b"of another program")
    with opened(tmp_path) as store:
        assert names(tmp_path / "batches") == {"batch_1.output", "notes.output"}
        assert store.room._num_bytes == 4
