"""Stores for tests without a server, and a disk that is full."""

import contextlib
import io

import pytest

from cllm.core.account import Account
from cllm.core.stored_ids import make_id
from cllm.store.files import new_file
from cllm.store.store import Store

OWN = Account("o")


@contextlib.contextmanager
def opened(folder, max_files=10, max_bytes=10_000):
    """A store, as a server finds it after a start."""
    store = Store(folder, max_files, max_bytes)
    store._open()
    try:
        yield store
    finally:
        store._close_and_unlock()


def put(store, content, expires_after=None):
    """Upload a file."""
    file = new_file("o", "name", "batch", len(content), expires_after, make_id("file-"))
    store.room.take(len(content), 1)
    store.files.write(file, io.BytesIO(content))
    store.files.add(file)
    return file


def names(folder):
    return {path.name for path in folder.iterdir()}


@contextlib.contextmanager
def failing_deletion(store, table):
    """Let the database fail when it deletes a row of ``table``."""
    trigger = f"fail BEFORE DELETE ON {table} BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
    store._database.rows(f"CREATE TRIGGER {trigger}")
    try:
        yield
    finally:
        store._database.rows("DROP TRIGGER fail")


@contextlib.contextmanager
def full_disk(size):
    """Cut off writes that would make a file larger than ``size``, as a full disk does."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
