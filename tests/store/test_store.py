"""The folder of a server, and the thread that works on it."""

import asyncio
import threading

import pytest

from cllm.errors import BadRequest, EngineError
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
