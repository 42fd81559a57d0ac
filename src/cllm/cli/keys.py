"""``cllm keys``: creates, lists and revokes the API keys of a server."""

from __future__ import annotations

import getpass
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm.cli.settings_flags import ConfigFlag
from cllm.cli.table import format_table
from cllm.config.settings import Settings
from cllm.config.sources import load_settings
from cllm.core.request import PriorityName
from cllm.errors import StartupError
from cllm.store.audit import write_audit
from cllm.store.keys import (
    AccountRecord,
    Key,
    check_name,
    check_texts,
    edit_key_file,
    hash_key,
    make_key,
    read_key_file,
)
from cllm.store.open_servers import list_open_servers

USUAL = AccountRecord()

app = App(name="keys", help="Create, list and revoke the API keys of a server.")

Name = Annotated[str, Parameter(help="The account that the key names.")]
FileFlag = Annotated[
    Path | None,
    Parameter(name="--file", help="The file of keys. [default: server.keys_file]"),
]
Count = Annotated[
    int | None,
    Parameter(
        help="A limit of the account; a request above it gets 429. [default: none]",
        validator=Number(gte=1),
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccountOptions:
    """The fields of an account."""

    tenant: Annotated[
        str | None,
        Parameter(
            help="Accounts of one tenant share cached prefixes and results. "
            "[default: the account's name]"
        ),
    ] = None
    priority: Annotated[
        PriorityName | None,
        Parameter(help="The highest class of its requests. [default: any]"),
    ] = None
    weight: Annotated[
        float, Parameter(help="Its share of the server.", validator=Number(gte=0.001, lte=1000))
    ] = 1.0
    models: Annotated[
        str,
        Parameter(
            help="Names or patterns of the models that it may use, with commas. [default: all]",
            show_default=False,
        ),
    ] = ""
    routes: Annotated[
        str,
        Parameter(
            help="Paths that it may use, such as /v1/*, with commas. [default: all]",
            show_default=False,
        ),
    ] = ""
    admin: Annotated[
        bool,
        Parameter(help="It may see the scheduler and other accounts' usage, and manage models."),
    ] = False
    requests_per_minute: Count = None
    tokens_per_minute: Count = None
    concurrent_requests: Count = None
    tokens_per_month: Count = None

    def make_record(self) -> AccountRecord:
        """Return the account without a key. Raises StartupError for a text of several lines."""
        names = {"models": split(self.models), "routes": split(self.routes)}
        record = AccountRecord(**{**vars(self), **names})
        check_texts(record)
        return record


@app.command
def add(
    name: Name,
    /,
    *,
    options: AccountOptions = AccountOptions(),
    file: FileFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Create an account and print its API key, which is not stored and cannot be shown again."""
    check_name(name)
    record = options.make_record()
    path, _ = find_file(file, config)
    if is_new(path):
        confirm_lock(path)
    with edit(file, config, "add", name) as accounts:
        if name in accounts:
            raise StartupError(
                f"the account {name} exists; cllm keys rotate {name} gives it another key"
            )
        key = make_key()
        accounts[name] = msgspec.structs.replace(record, keys=(new_record(key),))
    print_key(key)


@app.command
def rotate(
    name: Name,
    /,
    *,
    keep: Annotated[
        int,
        Parameter(
            help="Seconds for which the old keys stay valid.", validator=Number(gte=0, lte=10**9)
        ),
    ] = 0,
    file: FileFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Give an account a new API key and print it. The old keys expire after --keep seconds."""
    with edit(file, config, "rotate", name) as accounts:
        record = find(accounts, name)
        key, end = make_key(), int(time.time()) + keep
        old = [
            msgspec.structs.replace(one, expires=min(end, one.expires or end))
            for one in record.valid_keys(time.time())
            if keep
        ]
        accounts[name] = msgspec.structs.replace(record, keys=(*old, new_record(key)))
    print_key(key)


@app.command
def revoke(name: Name, /, *, file: FileFlag = None, config: ConfigFlag = None) -> None:
    """Revoke all keys of an account. A running server notices within a second."""
    with edit(file, config, "revoke", name) as accounts:
        accounts[name] = msgspec.structs.replace(find(accounts, name), keys=())
    print(f"cllm: {name} has no valid key", file=sys.stderr)


@app.command(name="list")
def list_keys(
    *,
    file: FileFlag = None,
    config: ConfigFlag = None,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print a list of JSON objects.")
    ] = False,
) -> None:
    """List the accounts, their keys' ages and their limits. Keys themselves are not stored."""
    path, _ = find_file(file, config)
    accounts = read_key_file(path).accounts if path.exists() else {}
    rows = [describe(name, record) for name, record in sorted(accounts.items())]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print(f"cllm: there are no accounts in {path}", file=sys.stderr)
        return
    print(format_table([(row["name"], summarize(row)) for row in rows]))


def summarize(row: dict[str, Any]) -> str:
    """Return the number of keys of an account, and its fields that differ from the defaults."""
    others = (
        f"{key.replace('_', ' ')} {' '.join(value) if isinstance(value, tuple) else value}"
        for key, value in row.items()
        if key not in ("name", "keys") and value != getattr(USUAL, key)
    )
    keys = f"{len(row['keys'])} valid key{'s' * (len(row['keys']) != 1)}"
    return ", ".join([keys, *others])


def describe(name: str, record: AccountRecord) -> dict[str, Any]:
    """Return the fields of an account, without the hashes of its keys."""
    content = msgspec.to_builtins(record)
    keys = [
        {"created": when(key.created), "expires": key.expires and when(key.expires)}
        for key in record.valid_keys(time.time())
    ]
    return {"name": name, **content, "keys": keys}


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def split(names: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, names.split(","))))


def new_record(key: str) -> Key:
    return Key(hash_key(key), int(time.time()))


def print_key(key: str) -> None:
    print("cllm: this is the only time that the key is shown", file=sys.stderr)
    print(key)


def find(accounts: dict[str, AccountRecord], name: str) -> AccountRecord:
    if name not in accounts:
        raise StartupError(f"there is no account {name!r}; cllm keys list shows them")
    return accounts[name]


def find_file(file: Path | None, config: Path | None) -> tuple[Path, Settings]:
    """Return the file of keys that the flag or the settings name, and the settings."""
    flags = {} if file is None else {"server.keys_file": str(file)}
    settings = load_settings(config, os.environ, flags).settings
    return Path(settings.server.keys_file).expanduser(), settings


def is_new(path: Path) -> bool:
    """Return whether there is no file yet, but its folder exists or can be created.

    Raises StartupError if the file cannot be written, before the user is asked a useless question.
    """
    folder = next((one for one in path.parents if os.path.lexists(one)), path.parent)
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise StartupError(f"{path} cannot be written: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StartupError(f"{path} cannot be written: {folder} may not be written to")
        return not path.exists()
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from None


def confirm_lock(path: Path) -> None:
    """Say which servers need keys once ``path`` exists, and ask on a terminal.

    Raises StartupError if the answer is not yes.
    """
    urls = list_open_servers(path)
    if not urls:
        print(f"cllm: servers that use {path} need a key from now on", file=sys.stderr)
        return
    print(
        f"cllm: {path} is new, so every request to {', '.join(urls)} will need a key within a "
        "second",
        file=sys.stderr,
    )
    if sys.stdin.isatty() and sys.stderr.isatty():
        print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise StartupError("nothing was changed")


@contextmanager
def edit(
    file: Path | None, config: Path | None, what: str, name: str
) -> Iterator[dict[str, AccountRecord]]:
    """Yield the accounts to change. The change is recorded in the audit log."""
    path, settings = find_file(file, config)
    with edit_key_file(path) as accounts:
        yield accounts
    folder = settings.storage.folder
    where = path.parent if folder is None else Path(folder).expanduser()
    write_audit(where, user_name(), f"keys {what}", account=name, file=str(path))


def user_name() -> str:
    """Return the name of the user who runs the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a user may have no name
        return f"uid {os.getuid()}"
