"""The accounts that may use a server, and the rules for who may reach it.

It imports little, because ``cllm serve`` needs it before everything else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers

from cllm.config.settings import Settings
from cllm.core.account import Account
from cllm.core.carried import Carried
from cllm.core.request import Priority
from cllm.errors import StartupError, Unauthorized
from cllm.server.addresses import check_host, is_loopback, is_network
from cllm.server.cluster.key import ClusterKey
from cllm.server.cluster.recent_prefixes import RecentPrefixes
from cllm.store.keys import Keyring
from cllm.store.usage import UsageLedger
from cllm.store.usage_reports import UsageReports

if TYPE_CHECKING:
    from cllm.serving.service import Service

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
MAX_CARRIED_WEIGHTS = 10_000
# of the requests of load runs; no account in the file of keys can have its name
LOAD_ACCOUNT = Account(
    "(bench)",
    Priority.BATCH,
    "(bench)",
    routes=("/v1/chat/completions", "/v1/models"),
    has_key=True,
)
CHECKS_PER_SAVE = 2  # few enough that a crash loses less than a second of usage
RETRY_SECONDS = 30.0  # between attempts to open the database of the usage

log = logging.getLogger("cllm.access")


class Access:
    """The accounts of a server, and their usage.

    On a server without API keys, every request is served. The name of its account then comes from
    its key, its user or its address. If other machines can reach a replica, it serves only fronts,
    unless it has API keys of its own.
    """

    def __init__(self, settings: Settings, *, is_of_front: bool = False) -> None:
        """``is_of_front`` says that these are the accounts of a front, and not of a replica.

        Raises StartupError if the file of keys or the cluster key cannot be used.
        """
        server = settings.server
        self.keyring = Keyring(Path(server.keys_file).expanduser(), server.api_key)
        self.ledger = UsageLedger()
        self.cluster_key = ClusterKey(settings)
        self._settings = settings
        self._is_of_front = is_of_front
        self._valid: set[str] = set()  # names of accounts that had a valid key at the last check
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_checks = 0
        self.reports = UsageReports()
        self.recent_prefixes = RecentPrefixes()
        self._carried_weights: dict[str, float] = {}
        self._retry_at = 0.0  # time to open the database again; 0 unless that has failed
        self.load_key = ""  # the key of the load run, if there is one
        self.ledger.is_valid = lambda name: (
            name == LOAD_ACCOUNT.name or self.keyring.get(name) is not None
        )

    def use(self, settings: Settings) -> None:
        """Use the accounts' shares, classes and tenants of new settings from now on."""
        self._settings = settings

    def is_front(self, headers: Headers) -> bool:
        """Return whether a request comes from a front of the cluster."""
        return self.cluster_key.is_sent_in(headers)

    def is_load_key(self, key: str) -> bool:
        """Return whether ``key`` is that of the load run, whose account is LOAD_ACCOUNT."""
        return bool(self.load_key) and hmac.compare_digest(key.encode(), self.load_key.encode())

    @property
    def is_required(self) -> bool:
        """Whether requests need a key."""
        return self.keyring.is_required or self.is_for_fronts

    @property
    def is_for_fronts(self) -> bool:
        """Whether only fronts may use the server: other machines can reach it, and it has a cluster
        key, but no API keys.
        """
        server = self._settings.server
        if self._is_of_front or self.keyring.is_required or server.insecure:
            return False
        return not is_loopback(server.host) and bool(self.cluster_key.find())

    @property
    def may_show_prompts(self) -> bool:
        """Whether only administrators or users of this machine can watch the live view."""
        return is_loopback(self._settings.server.host) or self.is_required

    def account(self, name: str) -> Account:
        """Return the account ``name`` with its settings, for stored work such as batches.

        Raises Unauthorized if accounts need keys and it has none.
        """
        if not self.is_required:
            return self._with_priority(Account(name, is_admin=True))
        account = self.keyring.get(name)
        if account is None:
            raise Unauthorized(f"The account {name!r} has no valid API key.")
        return self._with_priority(account)

    def account_for_key(self, key: str) -> Account | None:
        """Return the account of ``key``, or None if the key is not valid."""
        account = self.keyring.find(key)
        return None if account is None else self._with_priority(account)

    def _with_priority(self, account: Account) -> Account:
        """Return ``account`` with the class that the setting scheduler.priorities gives it."""
        priority = self._settings.scheduler.priorities.get(account.name)
        if priority is None or account.priority is not None:
            return account
        return msgspec.structs.replace(account, priority=Priority[priority.upper()])

    def salt(self, account: Account, salt: str) -> str:
        """Return the cache salt of a request of ``account`` that asks for ``salt``.

        Tenants share no cached prefixes unless server.shared_tenants lists them.
        """
        if not account.has_key:
            return salt
        if account.is_carried:  # the front has applied the setting
            return f"{account.tenant}\0{salt}"
        return f"{self.choose_tenant(account)}\0{salt}"

    def choose_tenant(self, account: Account) -> str:
        """Return the tenant whose cached prefixes an account uses, "" for the shared ones."""
        shared = self._settings.server.shared_tenants
        return "" if account.tenant in shared or "*" in shared else account.tenant

    def note_carried(self, carried: Carried) -> None:
        """Use the weight that a front gives an account, from the next check on, and note the
        prefixes of its request.
        """
        self.recent_prefixes.note(carried)
        name = carried.scheduled.name
        self._carried_weights.pop(name, None)
        if name and carried.weight != self.find_weight(name):
            self._carried_weights[name] = carried.weight
            if len(self._carried_weights) > MAX_CARRIED_WEIGHTS:
                del self._carried_weights[next(iter(self._carried_weights))]

    async def open(self) -> None:
        """Read the usage of the accounts. Without a folder, usage is kept in memory only."""
        folder = self._settings.storage.folder
        if not self.is_required or folder is None:
            return
        try:
            await self.ledger.open(Path(folder))
        except OSError as error:
            if not self._retry_at:
                reason = error.strerror or error
                log.error("the usage of accounts is in memory only: %s: %s", folder, reason)
            self._retry_at = time.monotonic() + RETRY_SECONDS

    def find_weight(self, name: str) -> float:
        """Return the share of an account for fair scheduling."""
        weight = self.keyring.weights.get(name)
        return self._settings.scheduler.weights.get(name, 1.0) if weight is None else weight

    def check(self, services: Iterable[Service]) -> None:
        """Apply changes of the file of keys, and begin to write the usage of accounts. Call this
        every 0.4 seconds.
        """
        try:
            self._check(services)
        except Exception:  # it must not end the server
            log.exception("the accounts could not be checked")

    def _check(self, services: Iterable[Service]) -> None:
        weights = self._settings.scheduler.weights | self.keyring.weights | self._carried_weights
        for service in services:
            service.engine.set_weights(weights)
        is_due = 0 < self._retry_at <= time.monotonic() and not self.ledger.is_open
        if self.keyring.reload() or is_due:
            self._tasks.add(asyncio.create_task(self.open()))
        names = self.keyring.names()
        if self._settings.server.revoked_streams == "end":
            for name in self._valid - names:
                self.ledger.end_all(name, Unauthorized("The API key has been revoked."))
        self._valid = names
        self._num_checks += 1
        is_turn = self._num_checks % CHECKS_PER_SAVE == 0
        if is_turn and self.ledger.is_dirty() and not self.ledger.is_saving():
            self._tasks.add(asyncio.create_task(self.ledger.save()))
        self._tasks = {task for task in self._tasks if not task.done()}

    async def close(self) -> None:
        """Write the usage that has not been written yet."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ledger.close()


def check_access(settings: Settings, access: Access) -> None:
    """Raise StartupError if other machines could use the server without keys and the settings do
    not allow that, or if the settings contradict each other.
    """
    server = settings.server
    check_host(server.host)
    if server.enable_faults and not is_loopback(server.host):
        raise StartupError(
            f"server.enable_faults needs a loopback address as server.host, not {server.host}"
        )
    if server.enable_faults and access.is_required:
        raise StartupError("server.enable_faults cannot be used with API keys")
    if server.live_prompts and not access.may_show_prompts:
        raise StartupError(
            f"server.live_prompts on {server.host} would show everyone what others ask: create API "
            "keys with `cllm keys add NAME`"
        )
    for proxy in server.trusted_proxies:
        if proxy != "*" and not is_network(proxy):
            raise StartupError(f"server.trusted_proxies: {proxy} is not an address or a network")
    for origin in server.cors_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise StartupError(
                f"server.cors_origins: {origin} is not an origin such as https://chat.example.com"
            )
    check_certificate(expand(server.tls_certificate), expand(server.tls_key))
    if not is_loopback(server.host) and not access.is_required and not server.insecure:
        raise StartupError(
            f"{server.host} can be reached from other machines, so requests need API keys: create "
            "one with `cllm keys add NAME`, or serve everyone with --insecure; a replica needs "
            "none if it has its front's cluster key"
        )


def expand(path: str | None) -> str | None:
    """Return ``path`` with ~ replaced by the user's folder."""
    return None if path is None else str(Path(path).expanduser())


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise StartupError unless the two files can be used together, or neither is named."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise StartupError("server.tls_certificate and server.tls_key need each other")
    for path in (certificate, key):
        if Path(path).is_fifo():
            raise StartupError(f"{path} is a pipe; certificates and keys are read from files")
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise StartupError(
            f"server.tls_certificate {certificate} and server.tls_key {key} do not work: {reason}"
        ) from None
