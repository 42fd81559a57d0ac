"""The file of accounts and their API keys. It has hashes of keys, never the keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from cllm.core.account import Account, AccountLimits
from cllm.core.request import Priority, PriorityName
from cllm.errors import StartupError
from cllm.input_files import read_input
from cllm.private_files import lock, open_private, replace_private

FORMAT = 1  # format of the file; newer versions write higher ones
MAX_BYTES = 50_000_000  # of the file
PREFIX = "sk-cllm-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
OPERATOR = "operator"  # the account of the key in server.api_key
THE_OPERATOR = Account(OPERATOR, tenant=OPERATOR, is_admin=True, has_key=True)

log = logging.getLogger("cllm.access")

Count = Annotated[int, msgspec.Meta(ge=1)]
UnixTime = Annotated[int, msgspec.Meta(ge=0, le=10**11)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The SHA-256 of a key in hex, and the Unix times at which it was created and expires."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    created: UnixTime
    expires: UnixTime | None = None


class AccountRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An account in the file; see Account and AccountLimits. By default its tenant is its name."""

    keys: tuple[Key, ...] = ()
    tenant: Text | None = None
    priority: PriorityName | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    models: tuple[Text, ...] = ()
    routes: tuple[Text, ...] = ()
    admin: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    tokens_per_month: Count | None = None

    def valid_keys(self, now: float) -> list[Key]:
        return [key for key in self.keys if key.expires is None or key.expires > now]

    def make_account(self, name: str) -> Account:
        return Account(
            name,
            None if self.priority is None else Priority[self.priority.upper()],
            name if self.tenant is None else self.tenant,
            self.models,
            self.routes,
            AccountLimits(
                self.requests_per_minute,
                self.tokens_per_minute,
                self.concurrent_requests,
                self.tokens_per_month,
            ),
            is_admin=self.admin,
            has_key=True,
        )


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int = FORMAT
    accounts: dict[str, AccountRecord] = {}


def read_key_file(path: Path) -> KeyFile:
    """Return the content of the file. Raises StartupError, with one line that names the file."""
    try:
        data = read_input(path)
        version = msgspec.json.decode(data, type=FileVersion).format
        if version > FORMAT:
            raise StartupError(f"{path} was written by a newer version of cLLM (format {version})")
        content = msgspec.json.decode(data, type=KeyFile)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{path} is not a valid file of keys: {error}") from None
    for name, record in content.accounts.items():
        check_name(name)
        check_texts(record)
    return content


def check_texts(record: AccountRecord) -> None:
    """Raise StartupError for a tenant, model or route that is empty or not one line of text."""
    tenant = () if record.tenant is None else (record.tenant,)
    for text in (*tenant, *record.models, *record.routes):
        if not text or not text.isprintable():
            raise StartupError(f"{text!r} must be one line of text")


class FileVersion(msgspec.Struct):
    format: int


def check_name(name: str) -> None:
    """Raise StartupError unless ``name`` can be the name of an account."""
    if not NAME.fullmatch(name) or name == OPERATOR:
        raise StartupError(
            f"{name!r} cannot be the name of an account: it must have up to 64 letters, digits or "
            f". _ @ -, begin with a letter or a digit, and not be {OPERATOR!r}"
        )


def write_key_file(path: Path, content: KeyFile) -> None:
    """Replace the file. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(content), indent=2)
    replace_private(path, data + b"\n")


@contextmanager
def edit_key_file(path: Path) -> Iterator[dict[str, AccountRecord]]:
    """Yield the accounts of the file, and write them back unless the context raises.

    Only one process edits at a time. Raises StartupError, also if the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_private(path.with_name(f"{path.name}.lock"), "ab") as file:
            lock(file, waits=True)  # on Windows, two commands must not run at the same time
            accounts = dict(read_key_file(path).accounts) if path.exists() else {}
            yield accounts
            write_key_file(path, KeyFile(FORMAT, accounts))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"{path} cannot be written: {reason}") from None


def make_key() -> str:
    """Return a new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex. Keys are random, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    """The accounts that may use the server, by their keys. The keys come from a file, which is read
    again when it changes, and from the settings, which may have one key.

    ``weights`` has the shares of the accounts whose share is not 1.
    """

    def __init__(self, path: Path, api_key: str | None = None) -> None:
        """Raises StartupError if there is a file that cannot be used."""
        self._path = path
        self._operator = None if api_key is None else hash_key(api_key)
        self._accounts: dict[str, Account] = {}
        self._by_hash: dict[str, tuple[str, float]] = {}  # the account, and when the key expires
        self.weights: dict[str, float] = {}
        self._valid_until: dict[str, float] = {}  # by account: when its last key expires
        self._has_file = False
        self._problem = ""  # what has been logged about the file
        self._seen = self._look()
        if self._seen is not None:
            self._load()

    @property
    def is_required(self) -> bool:
        """Whether requests need a key. They do from the first file of keys on, even without it."""
        return self._has_file or self._operator is not None

    def _look(self) -> tuple[int, ...] | None:
        """Return values that change with the file, its owner or its mode; None without a file."""
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StartupError(f"{self._path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise StartupError(f"{self._path} is not a file, or larger than {MAX_BYTES} bytes")
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

    def _load(self) -> None:
        content = read_key_file(self._path)
        self._has_file = True
        self._accounts = {
            name: record.make_account(name) for name, record in content.accounts.items()
        }
        self._by_hash = {
            key.sha256: (name, float("inf") if key.expires is None else key.expires)
            for name, record in content.accounts.items()
            for key in record.keys
        }
        self._valid_until = {}
        for name, expires in self._by_hash.values():
            self._valid_until[name] = max(expires, self._valid_until.get(name, 0.0))
        self.weights = {
            name: record.weight for name, record in content.accounts.items() if record.weight != 1
        }

    def reload(self) -> bool:
        """Read the file again if it has changed, and return whether it has. If the file cannot be
        used, log that and change nothing.
        """
        try:
            seen = self._look()
            if seen == self._seen:
                return False
            if seen is None:
                raise StartupError(f"{self._path} is gone")
            self._load()
        except StartupError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("%s; the keys stay as they were", error)
            return False
        self._seen, self._problem = seen, ""
        log.info("%s: %d accounts", self._path, len(self._accounts))
        return True

    def find(self, key: str) -> Account | None:
        """Return the account of ``key``, or None if the key is not valid.

        All wrong keys take the same time, because hashes are compared, which no client can choose.
        """
        hashed = hash_key(key)
        name, expires = self._by_hash.get(hashed, ("", 0.0))
        if time.time() < expires:
            return self._accounts[name]
        if self._operator is not None and hmac.compare_digest(hashed, self._operator):
            return THE_OPERATOR
        return None

    def get(self, name: str) -> Account | None:
        """Return the account ``name`` if it has a valid key, else None."""
        if name == OPERATOR and self._operator is not None:
            return THE_OPERATOR
        is_valid = time.time() < self._valid_until.get(name, 0.0)
        return self._accounts[name] if is_valid else None

    @property
    def accounts(self) -> Mapping[str, Account]:
        """All accounts in the file, also those without a valid key."""
        return self._accounts

    def names(self) -> set[str]:
        """Return the names of all accounts with a valid key."""
        now = time.time()
        names = {name for name, expires in self._valid_until.items() if now < expires}
        return names | ({OPERATOR} if self._operator is not None else set())
