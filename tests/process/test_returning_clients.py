"""A crowd ten times the server's capacity: rejected clients are served when they retry after
Retry-After.

The engine, its scheduler, the queue and the sharing of results are the real ones. The model (whose
steps take as long as its cost model says), the clients and the clock are simulated.
"""

import functools
import heapq
import random
from dataclasses import dataclass

import pytest
from conftest import repeat

from cllm.backends.fake.backend import Costs
from cllm.bench.simulation.replica import NEVER, Timekeeper
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add
from cllm.engine.params import EngineParams
from cllm.process.backlog import NO_CLAIM, Backlog, QueueFull, QueueLimits
from cllm.process.in_flight import InFlightRequests
from cllm.process.queue_load import QueueLoad
from cllm.process.reservations import Claim, Reservations, describe_newcomer
from cllm.process.results import ResultCache
from cllm.scheduler.policy import Fair
from cllm.scheduler.report import collect_stats

pytestmark = pytest.mark.slow  # each starts processes

CAPACITY, MAX_WAITING = 4, 8
CROWD = 10 * (CAPACITY + MAX_WAITING)
COSTS = Costs(step=0.12, row=0.0075, token=0.003)  # a request takes about three seconds


@dataclass
class Client:
    """Sends a request, and retries once after Retry-After if ``returns``.

    ended: the time of its complete answer.
    """

    number: int
    account: str
    num_tokens: int
    returns: bool
    claim: Claim
    num_tries: int = 0
    ended: float | None = None


class World:
    """A server and its clients."""

    def __init__(
        self,
        seed: int,
        max_waiting: int | None = MAX_WAITING,
        *,
        sends_ticket: bool = True,
        one_body: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.now = self._engine_now = 0.0  # clients arrive while the engine computes a step
        backend = Timekeeper(
            context_length=512, max_num_seqs=CAPACITY, length=NEVER, costs=COSTS, sleep=self._sleep
        )
        self.engine = build_engine(
            backend, EngineParams(speculation="off"), lambda: self._engine_now
        )
        self.backlog = Backlog(QueueLimits(requests=max_waiting), Fair({}), {}, lambda: self.now)
        self.backlog.observe(collect_stats(self.engine.scheduler))
        self.in_flight = InFlightRequests(self.backlog, ResultCache())
        self.sends_ticket = sends_ticket
        self.one_body = one_body  # of all clients
        self.clients: list[Client] = []
        self._arrivals: list[tuple[float, int]] = []
        self._streams = {}

    def _sleep(self, seconds: float) -> None:
        self._engine_now += seconds

    def add(self, at: float, account: str = "", *, returns: float = 1.0, ticket: str = "") -> None:
        """Add a client that sends its first request at the time ``at`` and returns with the
        probability ``returns``.
        """
        number = len(self.clients)
        returns_too = self.random.random() < returns
        claim = Claim(ticket, 0 if self.one_body else number)
        account = account or f"account {number}"
        self.clients.append(
            Client(number, account, self.random.randint(10, 30), returns_too, claim)
        )
        heapq.heappush(self._arrivals, (at, number))

    def run(self) -> None:
        """Run until all clients have gone."""
        while self._arrivals or self.engine.scheduler.sequences.has_work():
            if not self.engine.scheduler.sequences.has_work():
                self._engine_now = self._arrivals[0][0]
                self._admit_until(self._engine_now)
                continue
            outputs = self.engine.step()
            self._admit_until(self._engine_now)
            self.now = self._engine_now
            self.backlog.observe(collect_stats(self.engine.scheduler))
            self.in_flight.put(outputs)
            for output in outputs:
                if output.finish:
                    client, stream = self._streams.pop(output.request_id)
                    client.ended = self.now
                    self.in_flight.leave(stream)

    def _admit_until(self, end: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= end:
            self.now, number = heapq.heappop(self._arrivals)
            self._send(self.clients[number])

    def _send(self, client: Client) -> None:
        client.num_tries += 1
        params = SamplingParams(max_tokens=client.num_tokens, ignore_eos=True)
        name = str(client.number)
        try:
            stream, new = self.in_flight.submit(
                [Request(name, [*name.encode()], params, client.account)], client.claim
            )
        except QueueFull as error:
            if client.num_tries == 1 and client.returns:
                client.claim = Claim(error.ticket if self.sends_ticket else "", client.claim.body)
                again = self.now + error.retry_after * self.random.uniform(1.0, 1.1)
                heapq.heappush(self._arrivals, (again, client.number))
            return
        self._streams[name] = client, stream
        for request in new:
            self.engine.handle(Add(request))

    def tokens(self, begin: float, end: float) -> int:
        """Return the tokens of the answers completed between ``begin`` and ``end``."""
        return sum(
            c.num_tokens for c in self.clients if c.ended is not None and begin <= c.ended <= end
        )


@functools.cache
def measure_ideal(seed: int) -> tuple[float, float]:
    """Return the seconds that the crowd takes if no client is rejected, and the tokens/s."""
    world = World(seed, max_waiting=None)
    for _ in range(CROWD):
        world.add(0.0)
    world.run()
    seconds = max(client.ended for client in world.clients)
    return seconds, world.tokens(0.0, seconds) / seconds


def measure(
    seed: int,
    fresh: float = 0.0,
    *,
    account: str = "",
    returns: float = 1.0,
    ticket: str = "",
    **options,
):
    """Send a crowd at once, and then ``fresh`` times as many clients as the server can serve while
    it serves the crowd.

    Returns the world, the share of retries that were served, and the goodput: the tokens/s of
    complete answers, until the last client has gone or while fresh clients arrive, divided by those
    of a server that is never idle.
    """
    seconds, rate = measure_ideal(seed)
    world = World(seed, **options)
    for _ in range(3 * (CAPACITY + MAX_WAITING)):  # the server measures its speed with these
        world.add(0.0, returns=0.0)
    world.run()
    begin = world.now + 1000.0
    world.clients.clear()
    for _ in range(CROWD):
        world.add(begin + 0.1 * world.random.random(), account, returns=returns)
    at = begin
    while fresh and at < begin + seconds:
        at += world.random.expovariate(fresh * CROWD / seconds)
        world.add(at, account, returns=returns, ticket=ticket)
    world.run()
    end = (
        begin + seconds if fresh else max(client.ended for client in world.clients if client.ended)
    )
    came_back = [client for client in world.clients if client.num_tries > 1]
    served = sum(client.ended is not None for client in came_back) / max(1, len(came_back))
    return world, served, world.tokens(begin, end) / (end - begin) / rate


@pytest.mark.parametrize("seed", range(repeat(3, 1)))
def test_rejected_clients_are_served_at_next_try(seed):
    world, served, goodput = measure(seed)
    assert sum(client.num_tries > 1 for client in world.clients) >= CROWD - CAPACITY - MAX_WAITING
    assert served >= 0.8
    assert goodput >= 0.95


@pytest.mark.parametrize("seed", range(repeat(3, 1)))
def test_returning_clients_are_served_before_newcomers(seed):
    """This holds while twice as many newcomers arrive as can be served."""
    world, served, goodput = measure(seed, fresh=2.0)
    assert sum(client.num_tries > 1 for client in world.clients) > 2 * CROWD
    assert served >= 0.8
    assert goodput >= 0.9


@pytest.mark.parametrize("account", ["", "shared"])
def test_clients_without_tickets_are_recognized(account):
    """They are recognized by their accounts or, if all have the same account, by the body that they
    send again.
    """
    _, served, goodput = measure(0, fresh=2.0, account=account, sends_ticket=False)
    assert served >= 0.8
    assert goodput >= 0.9


def test_newcomers_with_equal_body_cannot_take_reserved_places():
    """All clients have the same account, too."""
    _, served, goodput = measure(0, fresh=2.0, account="shared", one_body=True)
    assert served >= 0.8
    assert goodput >= 0.9


def test_clients_are_rejected_again_without_reservations(monkeypatch):
    """This shows that the tests above measure the effect of reservations."""
    monkeypatch.setattr(Reservations, "sum_load_within", lambda *_: QueueLoad())
    monkeypatch.setattr(Reservations, "find", lambda *_: None)
    assert measure(0)[1] < 0.1
    assert measure(0, fresh=2.0)[1] < 0.5


@pytest.mark.parametrize("returns", [0.5, 0.0])
def test_no_capacity_is_lost_to_clients_that_never_return(returns):
    """Newcomers get their places, and the reservations expire."""
    world, served, goodput = measure(0, fresh=2.0, returns=returns)
    assert served >= 0.8 or not returns
    assert goodput >= 0.9
    world.now += 10_000.0
    request = Request("", [0], SamplingParams())
    assert world.backlog.reservations.find(describe_newcomer(request), NO_CLAIM) is None
    assert len(world.backlog.reservations) == 0


def test_forged_tickets_gain_nothing():
    """The same newcomers are served as without tickets."""
    ends = [
        [client.ended for client in measure(0, fresh=2.0, ticket=t)[0].clients]
        for t in ("", "forged")
    ]
    assert ends[0] == ends[1]
