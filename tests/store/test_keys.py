"""The file of API keys: what it has, who can read it, and how a running server follows it."""

import os
import stat
import time
from unittest.mock import Mock

import pytest

from cllm.core.account import AccountLimits
from cllm.core.request import Priority
from cllm.errors import StartupError
from cllm.store import keys
from cllm.store.keys import (
    OPERATOR,
    AccountRecord,
    Key,
    KeyFile,
    Keyring,
    edit_key_file,
    hash_key,
    make_key,
    read_key_file,
    write_key_file,
)


def record(*keys, expires=None, **more):
    return AccountRecord(keys=tuple(Key(hash_key(key), 0, expires) for key in keys), **more)


def store(path, **accounts):
    write_key_file(path, KeyFile(accounts=accounts))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "keys.json"


def test_file_has_no_key_and_only_its_owner_can_read_it(path):
    key = make_key()
    store(path, ann=record(key))
    assert key not in path.read_text()
    assert key.removeprefix("sk-cllm-") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["keys.json"]


def test_keys_are_long_and_different():
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 45 and key.startswith("sk-cllm-") for key in keys)


def test_account_is_found_by_its_key(path):
    store(
        path,
        ann=record("a", "b", tenant="team", priority="batch", requests_per_minute=3, admin=True),
        bob=record("c"),
    )
    keyring = Keyring(path)
    ann = keyring.find("b")
    assert ann == keyring.find("a") == keyring.get("ann")
    assert (ann.name, ann.tenant, ann.priority, ann.is_admin) == (
        "ann",
        "team",
        Priority.BATCH,
        True,
    )
    assert ann.limits == AccountLimits(requests_per_minute=3)
    bob = keyring.find("c")
    assert (bob.name, bob.tenant, bob.is_admin, bob.has_key) == ("bob", "bob", False, True)
    assert keyring.find("d") is keyring.find("") is keyring.get("eve") is None
    assert keyring.find(hash_key("a")) is None  # the hash is no key


def test_key_is_not_valid_after_its_end(path):
    store(path, ann=record("old", expires=int(time.time()) - 1), bob=record("new"))
    keyring = Keyring(path)
    assert keyring.find("old") is keyring.get("ann") is None
    assert keyring.names() == {"bob"}


def test_key_in_the_settings_is_an_administrator(path):
    keyring = Keyring(path, "one key")
    assert keyring.is_required
    assert keyring.find("one key").is_admin
    assert keyring.find("other") is None
    assert keyring.names() == {OPERATOR}


def test_without_file_and_key_none_is_required(path):
    assert not Keyring(path).is_required


def test_changes_of_the_file_are_followed(path, caplog):
    keyring = Keyring(path)
    assert not keyring.reload()
    store(path, ann=record("a", weight=3.0))
    assert keyring.reload()
    assert keyring.is_required
    assert keyring.weights == {"ann": 3.0}
    store(path, ann=record())
    assert keyring.reload()
    assert keyring.find("a") is None
    assert not keyring.reload()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"format": 1, "accounts": {"ann": {"key": []}}}',
        b'{"format": 1, "accounts": {"ann": {"keys": [{"sha256": "x", "created": 0}]}}}',
        b'{"format": 1, "accounts": {"ann": {"requests_per_minute": 0}}}',
        b'{"format": 1, "accounts": {"../x": {}}}',
        b'{"format": 1, "accounts": {"operator": {}}}',
        b'{"format": 1, "accounts": {"ann": {"tenant": ""}}}',
        b'{"format": 1, "accounts": {"ann": {"models": ["a\\nb"]}}}',
        b'{"format": 1, "x":' + b"[" * 200_000,
    ],
)
def test_file_with_errors_stops_the_start_but_not_a_running_server(path, content, caplog):
    store(path, ann=record("a"))
    keyring = Keyring(path)
    path.write_bytes(content)
    with pytest.raises(StartupError):
        Keyring(path)
    assert not keyring.reload()
    assert keyring.find("a").name == "ann"
    assert "the keys stay as they were" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file_is_not_read(path, kind, caplog):
    """Reading a pipe would block the server."""
    store(path, ann=record("a"))
    keyring = Keyring(path)
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert not keyring.reload()
    assert "is not a file" in caplog.text
    assert keyring.find("a") is not None
    with pytest.raises(StartupError, match="is not a file"):
        Keyring(path)


def test_running_server_keeps_its_keys_when_the_file_is_gone(path, caplog):
    """It must not become open."""
    store(path, ann=record("a"))
    keyring = Keyring(path)
    path.unlink()
    assert not keyring.reload()
    assert keyring.is_required
    assert keyring.find("a") is not None
    assert "is gone" in caplog.text


def test_file_of_a_newer_version_is_refused_and_unchanged(path):
    path.parent.mkdir()
    path.write_bytes(content := b'{"format": 2, "accounts": [], "new": 1}')
    with pytest.raises(StartupError, match="newer version"):
        Keyring(path)
    with pytest.raises(StartupError, match="newer version"), edit_key_file(path):
        pass
    assert path.read_bytes() == content


def test_file_may_begin_with_a_byte_order_mark(path):
    store(path, ann=record("a"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert set(read_key_file(path).accounts) == {"ann"}


def test_edit_writes_nothing_after_an_error(path):
    store(path, ann=record("a"))
    before = path.read_bytes()
    with pytest.raises(KeyError), edit_key_file(path) as accounts:
        accounts.pop("ann"), accounts.pop("eve")
    assert path.read_bytes() == before
    with edit_key_file(path) as accounts:
        accounts["bob"] = record("b")
    assert set(read_key_file(path).accounts) == {"ann", "bob"}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_one_line(path):
    path.parent.mkdir(mode=0o500)
    with pytest.raises(StartupError, match="cannot be written"), edit_key_file(path):
        pass


def test_file_that_becomes_readable_again_is_followed(path, monkeypatch, caplog):
    """Its content has changed while it could not be read: a revocation must not be lost."""
    store(path, ann=record("a"))
    keyring = Keyring(path)
    store(path, ann=record())
    with monkeypatch.context() as patched:
        patched.setattr(keys, "read_input", Mock(side_effect=PermissionError))
        for _ in range(5):
            assert not keyring.reload()
    assert keyring.find("a") is not None
    assert caplog.text.count("cannot be read") == 1
    assert keyring.reload()
    assert keyring.find("a") is None


def test_key_in_the_settings_does_not_raise_the_rights_of_an_account(path):
    """The operator may have exported the key of an account as a client's."""
    store(path, ann=record("a"))
    assert not Keyring(path, "a").find("a").is_admin
