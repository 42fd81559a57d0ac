"""The folder of a server, and the thread that works on it."""

import asyncio
import errno
import sqlite3
import threading
from contextlib import closing

import pytest
from store_parts import OWN, put

from cllm.core.account import Account
from cllm.errors import BadRequest, EngineError
from cllm.store import imports
from cllm.store.batches import BatchRecord
from cllm.store.database import STORE_SCHEMA, VERSION
from cllm.store.imports import place
from cllm.store.store import Store


def test_folder_belongs_to_one_server(tmp_path):
    """It is free again when that server ends, normally or not."""

    async def main():
        first, second = Store(tmp_path, 1, 1), Store(tmp_path, 1, 1)
        await first.open()
        with pytest.raises(BadRequest, match="another server") as caught:
            await second.open()
        assert caught.value.status == 503
        await first.close()
        await second.open()
        await second.close()

    asyncio.run(main())


def make_store(folder, port):
    store = Store(folder, 9, 1000)
    store.port = port
    return store


async def add_file(store):
    return await store.run(put, store, b"{}")


def test_second_server_has_a_folder_of_its_own_while_another_one_runs(tmp_path):
    """It keeps it as long as the first one starts before it."""

    async def main():
        for round_ in range(2):
            first, second = make_store(tmp_path, 8000), make_store(tmp_path, 8001)
            await first.open()
            await second.open()
            assert (first.folder, second.folder) == (tmp_path, tmp_path / "port-8001")
            assert len(await second.run(second.files.list_for, OWN)) == round_
            await add_file(second)
            await first.close()
            await second.close()

    asyncio.run(main())


def test_single_later_server_has_the_files_and_batches_of_both_folders(tmp_path):
    async def main():
        first, second = make_store(tmp_path, 8000), make_store(tmp_path, 8001)
        await first.open()
        await second.open()
        added = [await add_file(store) for store in (first, second)]
        batch = BatchRecord("batch_1", "o", "m", "/v1/completions", added[1].id, "24h", 1, 2)
        await second.run(second.batches.add, batch, OWN)
        second.batches.answers(batch.id).add(b"{}\n", succeeded=True)
        second.batches.answers(batch.id).flush()
        await first.close()
        waiting = make_store(tmp_path, 8001)
        with pytest.raises(BadRequest, match="another server"):  # the earlier one is still there
            await waiting.open()
        await second.close()
        await waiting.open()
        assert waiting.folder == tmp_path
        found = await waiting.run(waiting.files.list_for, OWN)
        assert {file.id for file in found} == {file.id for file in added}
        for file in added:
            _, content = await waiting.run(waiting.files.open, file.id, OWN)
            with content:
                assert content.read() == b"{}"
        assert await waiting.run(waiting.batches.get, batch.id, OWN) == batch
        assert (tmp_path / "batches" / f"{batch.id}.output").read_bytes() == b"{}\n"
        assert not (tmp_path / "port-8001").exists()
        await waiting.close()

    asyncio.run(main())


def test_interrupted_move_of_files_is_finished_later(tmp_path, monkeypatch, caplog):
    """The folder works meanwhile."""

    async def main():
        first, second = make_store(tmp_path, 8000), make_store(tmp_path, 8001)
        await first.open()
        await second.open()
        added = [await add_file(second) for _ in range(3)]
        await first.close()
        await second.close()
        with monkeypatch.context() as patch:
            contents = []

            def fail(content, target):
                contents.append(content)
                if len(contents) == 2:
                    raise OSError(errno.EIO, "broken")
                place(content, target)

            patch.setattr(imports, "place", fail)
            third = make_store(tmp_path, 8001)
            await third.open()
            assert f"files and batches stay in {tmp_path / 'port-8001'}: broken" in caplog.text
            assert await third.run(third.files.list_for, OWN) == []
            await third.close()
        fourth = make_store(tmp_path, 8001)
        await fourth.open()
        found = await fourth.run(fourth.files.list_for, OWN)
        assert {file.id for file in found} == {file.id for file in added}
        await fourth.close()

    asyncio.run(main())


def test_restarted_server_waits_for_its_folder(tmp_path):
    """The earlier one may still be finishing its requests, on the same port."""

    async def main():
        stores = [Store(tmp_path, 1, 1), Store(tmp_path, 1, 1)]
        for store in stores:
            store.port = 8000
        await stores[0].open()
        with pytest.raises(BadRequest, match="another server"):
            await stores[1].open()
        await stores[0].close()
        await stores[1].open()
        assert stores[1].folder == tmp_path
        await stores[1].close()

    asyncio.run(main())


def test_store_is_opened_once(tmp_path):
    async def main():
        store = Store(tmp_path, 1, 1)
        await asyncio.gather(*(store.open() for _ in range(3)))
        files = store.files
        await store.open()
        assert store.files is files
        await store.close()

    asyncio.run(main())


def test_invalid_database_turns_the_store_off(tmp_path):
    """The file is not changed, and another server can use the folder."""
    (tmp_path / "store.db").write_bytes(b"not a database" * 100)

    async def main():
        store = Store(tmp_path, 1, 1)
        for _ in range(2):
            with pytest.raises(BadRequest, match="off: their folder fails: file is not a database"):
                await store.open()
        await store.close()

    asyncio.run(main())
    assert (tmp_path / "store.db").read_bytes() == b"not a database" * 100


def test_folder_of_version_0_1_is_used_and_marked(tmp_path):
    """It had the same tables, without a version."""
    with closing(sqlite3.connect(tmp_path / "store.db")) as old:
        old.executescript(STORE_SCHEMA)
        old.execute("INSERT INTO files VALUES ('file-1', 'a', 'n', 'batch', 2, 0, NULL)")
        old.commit()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1.data").write_bytes(b"{}")

    async def main():
        store = Store(tmp_path, 1, 10)
        await store.open()
        assert (await store.run(store.files.get, "file-1", Account("a"))).filename == "n"
        await store.close()

    asyncio.run(main())
    with closing(sqlite3.connect(tmp_path / "store.db")) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_folder_of_a_newer_version_is_refused_and_unchanged(tmp_path, caplog):
    with closing(sqlite3.connect(tmp_path / "store.db")) as newer:
        newer.execute("CREATE TABLE other (a)")
        newer.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = (tmp_path / "store.db").read_bytes()

    async def main():
        store = Store(tmp_path, 1, 1)
        with pytest.raises(BadRequest, match="written by a newer version"):
            await store.open()
        await store.close()

    asyncio.run(main())
    assert (tmp_path / "store.db").read_bytes() == before
    assert caplog.text.count("newer version") == 1


def test_work_runs_in_order_in_another_thread(tmp_path):
    async def main():
        store, done, go_on = Store(tmp_path, 1, 1), [], threading.Event()
        first = asyncio.create_task(store.run(go_on.wait, 30))
        others = [asyncio.create_task(store.run(done.append, i)) for i in range(5)]
        await asyncio.sleep(0.05)
        assert done == [], "the event loop goes on while the store works"
        go_on.set()
        await asyncio.gather(first, *others)
        assert done == [*range(5)]
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="shutting down"):
            await store.run(done.append, 5)
        await closing

    asyncio.run(main())
