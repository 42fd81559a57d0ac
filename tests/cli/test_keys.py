"""``cllm keys``."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from cllm.store.keys import Keyring, read_key_file
from cllm.store.open_servers import announce_open_server, list_open_servers

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")


class Keys:
    """Calls the command, and knows its files."""

    def __init__(self, run, path, audit):
        self.run, self.path, self.audit = run, path, audit

    def __call__(self, *arguments, code=0):
        return self.run(*arguments, code=code)


@pytest.fixture
def keys(cllm, monkeypatch, tmp_path):
    path = tmp_path / "keys.json"
    monkeypatch.setenv("CLLM_STORAGE_FOLDER", str(tmp_path / "state"))

    def run(*arguments, code=0):
        file = () if "--file" in arguments else ("--file", path)
        result = cllm("keys", *arguments, *file)
        assert result.code == code, result.err
        assert "Traceback" not in result.err
        return result.out if code == 0 else result.err

    return Keys(run, path, tmp_path / "state" / "audit.log")


def test_add_prints_the_key_alone(keys):
    """So that a script can read it."""
    key = keys("add", "ann", "--tenant", "team", "--requests-per-minute", "60", "--admin")
    assert re.fullmatch(r"sk-cllm-[\w-]{43}\n", key)
    account = Keyring(keys.path).find(key.strip())
    assert (account.name, account.tenant, account.is_admin) == ("ann", "team", True)
    assert account.limits.requests_per_minute == 60
    assert key.strip() not in keys.path.read_text()


def test_add_below_a_file_says_only_that(keys):
    """Nothing about servers that need keys from now on, because none do."""
    keys.path.write_text("{}")
    for place in (keys.path / "keys.json", keys.path / "folder" / "keys.json"):
        message = keys("add", "ann", "--file", str(place), code=2)
        assert message == f"cllm: {place} cannot be written: {keys.path} is not a folder\n"


def test_list_shows_accounts_without_keys(keys):
    key = keys("add", "ann", "--priority", "batch", "--models", "a*, b").strip()
    keys("add", "bob")
    text = keys("list")
    assert text.splitlines()[0].startswith("ann  1 valid key, priority batch, models a* b")
    rows = json.loads(keys("list", "--json"))
    assert [row["name"] for row in rows] == ["ann", "bob"]
    for shown in (text, json.dumps(rows)):
        assert key not in shown
        assert "sha256" not in shown


def test_rotate_replaces_the_key_after_a_while(keys):
    old = keys("add", "ann", "--weight", "2").strip()
    new = keys("rotate", "ann", "--keep", "600").strip()
    keyring = Keyring(keys.path)
    assert keyring.find(old) == keyring.find(new)
    assert keyring.weights == {"ann": 2.0}
    newest = keys("rotate", "ann").strip()
    keyring = Keyring(keys.path)
    assert keyring.find(old) is keyring.find(new) is None
    assert keyring.find(newest).name == "ann"


def test_revoke_keeps_the_account_without_a_key(keys):
    key = keys("add", "ann").strip()
    keys("revoke", "ann")
    keyring = Keyring(keys.path)
    assert keyring.is_required
    assert keyring.find(key) is None
    assert "0 valid keys" in keys("list")
    new = keys("rotate", "ann").strip()
    assert Keyring(keys.path).find(new).name == "ann"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "ann"), "cllm keys rotate ann"),
        (("add", "../x"), "cannot be the name"),
        (("add", "operator"), "cannot be the name"),
        (("revoke", "bob"), "no account 'bob'"),
        (("rotate", "bob"), "no account 'bob'"),
        (("add", "bob", "--weight", "0"), "weight"),
        (("add", "bob", "--requests-per-minute", "0"), "requests-per-minute"),
        (("add", "bob", "--priority", "high"), "priority"),
        (("add",), "NAME"),
        (("add", "bob", "--tenant", ""), "one line of text"),
        (("add", "bob", "--tenant", "x\ny"), "one line of text"),
        (("add", "bob", "--models", "a\nb"), "one line of text"),
        (("add", "bob", "--tenant", "\udcff"), "one line of text"),
    ],
)
def test_mistakes_are_one_line(keys, arguments, message):
    keys("add", "ann")
    before = keys.path.read_bytes()
    error = keys(*arguments, code=2)
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert keys.path.read_bytes() == before


def test_changes_are_in_the_audit_log(keys):
    keys("add", "ann")
    keys("revoke", "ann")
    keys("revoke", "bob", code=2)
    lines = [json.loads(line) for line in keys.audit.read_text().splitlines()]
    assert [(line["what"], line["account"]) for line in lines] == [
        ("keys add", "ann"),
        ("keys revoke", "ann"),
    ]
    assert all(line["who"] and line["when"].endswith("Z") for line in lines)
    assert keys.audit.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_commands_at_the_same_time_lose_nothing(keys):
    command = [sys.executable, "-m", "cllm", "keys", "add", "--file", str(keys.path)]
    running = [
        subprocess.Popen([*command, f"user{i}"], stdout=subprocess.DEVNULL) for i in range(8)
    ]
    assert [process.wait() for process in running] == [0] * 8
    assert set(read_key_file(keys.path).accounts) == {f"user{i}" for i in range(8)}


def add_on_terminal(path, answer):
    """Return the exit code and what the terminal shows of ``cllm keys add ann``."""
    screen, inner = pty.openpty()
    os.write(screen, answer)
    command = [sys.executable, "-m", "cllm", "keys", "add", "ann", "--file", str(path)]
    code = subprocess.run(
        command, stdin=inner, stderr=inner, stdout=subprocess.DEVNULL, check=False
    )
    os.close(inner)
    shown = b""
    with suppress(OSError):
        while data := os.read(screen, 1 << 16):
            shown += data
    os.close(screen)
    return code.returncode, shown.decode()


@pytest.mark.slow
def test_first_key_names_the_servers_that_need_keys_from_then_on(keys):
    """On a terminal it asks before; a script gets its key."""
    with (
        announce_open_server(keys.path, "http://127.0.0.1:9"),
        announce_open_server(keys.path.with_name("other.json"), "http://127.0.0.1:8"),
    ):
        for answer in (b"n\n", b"\n", b"\x04"):
            code, shown = add_on_terminal(keys.path, answer)
            assert code == 2
            assert "every request to http://127.0.0.1:9 will need a key" in shown
            assert "nothing was changed" in shown
            assert not keys.path.exists()
        command = [sys.executable, "-m", "cllm", "keys", "add", "ann", "--file", str(keys.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "every request to http://127.0.0.1:9 will need a key" in done.stderr
        assert done.stdout.startswith("sk-cllm-")
        keys.path.unlink()
        assert add_on_terminal(keys.path, b"y\n")[0] == 0
        assert add_on_terminal(keys.path, b"")[0] == 2  # the account exists; nothing is asked


def test_server_that_was_killed_is_forgotten(keys):
    file = keys.path.parent / "servers" / "1.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"url": "http://127.0.0.1:7", "keys_file": str(keys.path)}))
    assert list_open_servers(keys.path) == []
    assert not file.exists()
