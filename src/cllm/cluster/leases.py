"""What a front knows of its replicas: leases, which it pulls every second.

A replica without a fresh lease gets no further requests. The lease of a replica that cannot be
reached, that ends a connection, or that drains, ends at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count
from urllib.parse import urlencode

import msgspec

from cllm.cluster.prefixes import BLOCK_BYTES, BYTES_PER_TOKEN
from cllm.errors import StartupError
from cllm.http_connection import CannotConnect, Connection, HTTPClient, reason
from cllm.routing.router import Candidate, Router
from cllm.server.cluster.key import KEY_HEADER, ClusterKey
from cllm.server.cluster.lease import LEASE_PATH, MAX_NAME, Lease, ModelLease

PULL_SECONDS = 1.0
MAX_IDLE_SECONDS = 30.0  # of a connection; servers close them after 75
LEAST_TIMEOUT = 0.5  # seconds for the answer, however long the last lease is still valid
MAX_LEASE_BYTES = 4_000_000
LOST_AFTER = 3  # times the lease's seconds of silence, after which running requests are given up
GONE_SECONDS = 60.0  # without a lease, after which what a replica stores counts as gone
# Limits of the table of prefixes, which has as many as replicas can keep: CACHE_FACTOR times the
# cells of their KV caches, because they save prefixes in RAM and in files too.
MIN_BLOCKS, MAX_BLOCKS = 10_000, 1_000_000
CACHE_FACTOR = 4
MAX_NAMES = 1000  # names of models from requests that are remembered

log = logging.getLogger("cllm.cluster")


class BadLease(Exception):
    """The answer of a replica is no lease that can be used."""


@dataclass(eq=False)
class Replica:
    """A replica at a fixed address.

    ``lease`` is its last one, and stays when it has expired. While ``is_listed``, it gets requests;
    it gets none if it ``is_leaving``: it will drain soon.
    ``numbers`` has a number for the router for each of its ``models`` that computes, by name.
    ``running`` has the connections on which it answers, ``trouble`` the reason why it has no fresh
    lease, ``report_trouble`` why its reports of usage cannot be read. The accounts
    ``batch_accounts`` have unfinished batches there.
    """

    url: str
    client: HTTPClient
    lease: Lease | None = None
    is_listed: bool = False
    is_leaving: bool = False
    received: float = -math.inf  # when the lease was received
    heard: float = -math.inf  # when the replica or, in its place, its machine last answered
    numbers: dict[str, int] = field(default_factory=dict)
    models: dict[str, ModelLease] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    running: set[Connection] = field(default_factory=set)
    trouble: str = "it has not answered yet"
    report_trouble: str = ""
    batch_accounts: list[str] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Its name, which stays the same when it is restarted; its address until it is known."""
        return self.url if self.lease is None else self.lease.name


class Choice(msgspec.Struct, frozen=True):
    """A replica that may answer a request, with its model ``name``, which ``origin`` computes."""

    replica: Replica
    name: str
    origin: str

    @property
    def candidate(self) -> Candidate:
        """The router's view of it."""
        return self.replica.candidates[self.origin]

    @property
    def is_loaded(self) -> bool:
        """Whether the replica has loaded the model."""
        return self.replica.models[self.origin].is_loaded

    @property
    def waiting_seconds(self) -> float:
        """How long a request would wait there, according to the last lease."""
        return self.replica.models[self.origin].waiting_seconds


class Found(msgspec.Struct, frozen=True):
    """The choices for the requests that name a model, and those of them that have loaded it."""

    choices: list[Choice]
    loaded: list[Choice]


class Replicas:
    """The replicas of a front."""

    def __init__(
        self,
        urls: list[str],
        key: ClusterKey,
        router: Router,
        lease_seconds: float,
        front: str = "",
    ) -> None:
        """``front`` is the front's name. Raises StartupError for an address that cannot be used."""
        self._front = front
        self._key = key
        self._router = router
        self._lease_seconds = lease_seconds
        self._found: dict[str | None, Found] = {}  # by the name in the request
        self._num_cells = 0  # of the KV caches of all replicas
        self.by_number: dict[int, Replica] = {}  # by a number of ``Replica.numbers``
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self.all = [Replica(url, make_client(url)) for url in dict.fromkeys(urls)]
        # called with a replica whose lease is new, has expired, or has another epoch
        self.on_change: Callable[[Replica], None] = lambda _: None
        # returns the address that a replica hands its prefixes over to, or ""
        self.find_heir: Callable[[Replica], str] = lambda _: ""

    # --- choice ----------------------------------------------------------------------------------

    def find(self, model: str | None) -> list[Choice]:
        """Return the replicas that may answer a request for ``model``, None for the default one.

        Those that would have to load the model are left out while others have places. If no replica
        has the model, return all of them: they explain that in the words of the request's dialect,
        or find a file that is new.
        """
        found = self._found.get(model)
        if found is None:
            if len(self._found) >= MAX_NAMES:
                self._found.clear()
            choices = self._find(model) or self._find(None)
            loaded = [one for one in choices if one.is_loaded]
            found = Found(choices, loaded)
            if model is None or len(model) <= MAX_NAME:
                self._found[model] = found
        if len(found.loaded) < len(found.choices) and any(map(self._has_place, found.loaded)):
            return found.loaded
        return found.choices

    def _has_place(self, choice: Choice) -> bool:
        candidate = choice.candidate
        return self._router.booked(candidate.number).num_seqs < candidate.max_num_seqs

    def _find(self, model: str | None) -> list[Choice]:
        for status in ("ready", "loading"):
            choices = [
                Choice(replica, found.name, found.origin)
                for replica in self.listed()
                if replica.lease is not None and replica.lease.status == status
                if (found := find_model(replica.lease, model)) is not None
            ]
            if choices:
                return choices
        return []

    def listed(self) -> Iterator[Replica]:
        """Yield the replicas that get requests."""
        return (replica for replica in self.all if replica.is_listed)

    def get(self, name: str) -> Replica | None:
        """Return the replica ``name`` if it gets requests."""
        return next((one for one in self.listed() if one.name == name), None)

    def is_expected(self, name: str) -> bool:
        """Return whether the replica ``name`` has been lost so recently that it may come back."""
        now = asyncio.get_running_loop().time()
        return any(one.name == name and now < one.received + GONE_SECONDS for one in self.all)

    @property
    def ready(self) -> bool:
        """Whether a replica computes requests."""
        return any(one.lease is not None and one.lease.status == "ready" for one in self.listed())

    # --- leases ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Pull all leases once, and begin to pull them every second."""
        await asyncio.gather(*map(self.pull, self.all))
        for replica in self.all:
            self._tasks[replica] = asyncio.create_task(self._follow(replica))

    def set_urls(self, urls: Mapping[str, bool]) -> None:
        """Follow the replicas at new addresses too. Those whose address has False will drain soon,
        and get no requests. Forget those at other addresses unless they get requests: the source of
        the addresses may have lost one that still works.
        """
        for url in urls.keys() - {one.url for one in self.all}:
            replica = Replica(url, make_client(url))
            self.all.append(replica)
            self._tasks[replica] = asyncio.create_task(self._follow(replica))
            replica.wake.set()
        for replica in [*self.all]:
            if not urls.get(replica.url, True) and not replica.is_leaving:
                replica.is_leaving = True
                self.lose(replica, "it will drain")
            if replica.url not in urls and not replica.is_listed and not replica.running:
                self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        self.all.remove(replica)
        self._num_cells -= count_cells(replica.models)
        self._tasks.pop(replica).cancel()
        replica.client.close()
        for number in replica.numbers.values():
            self._router.forget(number)
            del self.by_number[number]
        self._found.clear()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for replica in self.all:
            replica.client.close()

    async def _follow(self, replica: Replica) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                async with asyncio.timeout(PULL_SECONDS):
                    await replica.wake.wait()
            except TimeoutError:
                pass
            replica.wake.clear()
            try:
                await self.pull(replica)
            except Exception:  # it must not end the pulls
                log.exception("the lease of %s could not be read", replica.url)
            await asyncio.sleep(max(0.0, begun + PULL_SECONDS / 10 - clock()))

    async def pull(self, replica: Replica) -> None:
        """Ask a replica for its lease."""
        clock = asyncio.get_running_loop().time
        left = replica.received + self._lease_seconds - clock()
        replica.client.close_idle(MAX_IDLE_SECONDS)
        try:
            if replica.lease is None:
                left = self._lease_seconds
            async with asyncio.timeout(max(LEAST_TIMEOUT, left)):
                lease = await self._read_lease(replica)
            self._check_name(replica, lease)
        except TimeoutError:
            self.lose(replica, "it does not answer")
        except (OSError, BadLease) as error:
            text = str(error) if isinstance(error, (BadLease, CannotConnect)) else reason(error)
            self.lose(replica, text)
            # A replica that drains accepts no connections, and ends its requests. If it has died
            # instead, the system closes their connections.
            if isinstance(error, BadLease) or getattr(error, "is_refused", False):
                replica.heard = clock()
        else:
            replica.received = replica.heard = clock()
            self.take(replica, lease)
        if self.is_given_up(replica):
            for connection in [*replica.running]:
                connection.close()

    def is_given_up(self, replica: Replica) -> bool:
        """Return whether a replica has been silent for so long that its requests are given up."""
        now = asyncio.get_running_loop().time()
        return now > replica.heard + LOST_AFTER * self._lease_seconds

    async def _read_lease(self, replica: Replica) -> Lease:
        """Raises BadLease, OSError and TimeoutError."""
        data = bytearray()

        def feed(part: bytes, _: float) -> bool:
            data.extend(part)
            return len(data) > MAX_LEASE_BYTES

        fields = [(KEY_HEADER.encode(), self._key.find().encode())]
        head = replica.client.write_head("GET", LEASE_PATH + self._write_query(replica), fields)
        connection = await replica.client.take()
        try:
            response = await connection.exchange(head, feed, lambda _: None)
        finally:
            replica.client.release(connection)
        if response.status in (401, 403, 404):
            raise BadLease("it does not accept the cluster key")
        if response.status != 200:
            raise BadLease(f"it answers with status {response.status}")
        try:
            return msgspec.json.decode(bytes(data), type=Lease)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLease(f"its lease is not valid: {str(error)[:200]}") from None

    def _write_query(self, replica: Replica) -> str:
        """Return what the request for a lease says to a replica: its heir, and the last lease."""
        query = {"front": self._front, "heir": self.find_heir(replica)}
        if (lease := replica.lease) is not None:
            query |= {"epoch": lease.epoch, "after": str(lease.num_noted)}
        return "?" + urlencode({name: value for name, value in query.items() if value})

    def _check_name(self, replica: Replica, lease: Lease) -> None:
        """Raise BadLease if another address has the same name now."""
        for other in self.listed():
            if other is not replica and other.name == lease.name:
                raise BadLease(f"it has the same name as {other.url}")

    def take(self, replica: Replica, lease: Lease) -> None:
        """Use a lease from now on."""
        before = replica.lease
        if before is None or before.epoch != lease.epoch or before.name != lease.name:
            for number in replica.numbers.values():  # its caches are empty
                self._router.prefixes.forget(number)
        replica.lease = lease
        self._update_candidates(replica, lease)
        for prefixes in lease.prefixes:
            for number in replica.numbers.values():
                self._router.prefixes.add(prefixes, number)
        is_listed = lease.status != "draining" and bool(lease.models) and not replica.is_leaving
        if is_listed and not replica.is_listed:
            log.info("the replica %s at %s gets requests", lease.name, replica.url)
        elif replica.is_listed and not is_listed:
            log.info("the replica %s at %s gets no further requests", lease.name, replica.url)
        is_changed = is_listed != replica.is_listed or describe(before) != describe(lease)
        if not replica.is_leaving:
            replica.trouble = "" if is_listed else f"it is {lease.status}"
        replica.is_listed = is_listed
        if is_changed:
            self._found.clear()
            self.on_change(replica)

    def _update_candidates(self, replica: Replica, lease: Lease) -> None:
        origins = {model.origin: model for model in lease.models}
        self._num_cells += count_cells(origins) - count_cells(replica.models)
        blocks = CACHE_FACTOR * self._num_cells * BYTES_PER_TOKEN // BLOCK_BYTES
        self._router.prefixes.max_blocks = min(max(blocks, MIN_BLOCKS), MAX_BLOCKS)
        replica.models = origins
        for name in replica.numbers.keys() - origins.keys():
            number = replica.numbers.pop(name)
            self._router.forget(number)
            del self.by_number[number]
        for name in origins.keys() - replica.numbers.keys():
            number = next(one for one in count() if one not in self.by_number)
            replica.numbers[name] = number
            self.by_number[number] = replica
        # fronts number their replicas differently, and must choose the same one all the same
        identity = int.from_bytes(hashlib.blake2b(lease.name.encode(), digest_size=8).digest())
        replica.candidates = {
            name: self._make_candidate(replica.numbers[name], model, identity)
            for name, model in origins.items()
        }

    def _make_candidate(self, number: int, model: ModelLease, identity: int) -> Candidate:
        """Return the router's view of a model, and correct what the router has booked there. Of its
        waiting time, the share that is due to requests of others counts.
        """
        num_here = model.num_running + model.num_waiting
        self._router.correct(number, num_here)
        num_others = max(0, num_here - self._router.booked(number).num_seqs)
        share = num_others / num_here if num_here else 0.0
        return Candidate(
            number,
            model.max_num_seqs,
            share * model.waiting_seconds,
            model.prompt_token_seconds,
            identity,
        )

    def lose(self, replica: Replica, trouble: str) -> None:
        """Note that a replica cannot be used until its next lease."""
        if replica.is_listed or trouble != replica.trouble:
            log.warning("the replica at %s gets no requests: %s", replica.url, trouble)
        replica.trouble = trouble
        if replica.is_listed:
            replica.is_listed = False
            self._found.clear()
            self.on_change(replica)


def describe(lease: Lease | None) -> tuple[object, ...]:
    """Return what of a lease matters for ``find``."""
    if lease is None:
        return ()
    models = [(model.name, model.origin, model.is_loaded, *model.aliases) for model in lease.models]
    return lease.name, lease.epoch, lease.status, models


def count_cells(models: Mapping[str, ModelLease]) -> int:
    """Return the number of cells in the KV caches of models."""
    return sum(model.num_cells for model in models.values())


def find_model(lease: Lease, name: str | None) -> ModelLease | None:
    """Return the model of a replica that a request names, as ``Registry.find`` does."""
    if not name:
        return lease.models[0]
    plain = name.removesuffix(":latest")
    for model in lease.models:
        if model.name.removesuffix(":latest") == plain:
            return model
    for model in lease.models:
        if any(fnmatchcase(name, alias) for alias in model.aliases):
            return model
    return None


def make_choice(replica: Replica, model: str | None) -> Choice:
    """Return the choice of a replica that must answer a request for ``model``."""
    assert replica.lease is not None
    found = find_model(replica.lease, model) or replica.lease.models[0]
    return Choice(replica, found.name, found.origin)


def make_client(url: str) -> HTTPClient:
    """Return the client of a replica. Raises StartupError for an address that cannot be used."""
    if "@" in url:  # the text must not show the password
        raise StartupError(
            "cluster.urls: an address must not have a user or a password; replicas ask only for "
            "the cluster key"
        )
    try:
        return HTTPClient(url.rstrip("/"), {})
    except ValueError as error:
        raise StartupError(f"cluster.urls: {url!r} cannot be used: {error}") from None
