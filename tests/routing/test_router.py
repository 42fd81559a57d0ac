"""Which replica gets a request: each rule, and random requests."""

from __future__ import annotations

import random
import time
from array import array
from collections import defaultdict
from itertools import takewhile
from typing import get_args

import pytest
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cllm.bench.simulation.baselines import ROUTERS, Routing
from cllm.routing.prefix_table import MAX_CLOSED, PrefixTable, choose_landmarks, name_prefixes
from cllm.routing.router import (
    AHEAD,
    COPY_TOKENS,
    CROWDED,
    SLACK,
    WINDOW,
    Booking,
    Candidate,
    Router,
    RoutingRequest,
)

ROUTINGS = get_args(Routing)


SIZE = 4096  # tokens of a block; so many that few requests do not pay for a copy


def request(*blocks: int, account: str = "", size: int = SIZE) -> RoutingRequest:
    """Return a request with ``size`` tokens in each block."""
    ends = range(size, size * len(blocks) + 1, size)
    return RoutingRequest(blocks, ends, size * len(blocks), account)


def candidates(num: int, max_num_seqs: int = 8, **fields: float) -> list[Candidate]:
    return [Candidate(i, max_num_seqs, **fields) for i in range(num)]


def fill(router: Router, number: int, num_requests: int, account: str = "") -> list[Booking]:
    """Book requests without a prefix on one replica."""
    only = [Candidate(number, 1000)]
    return [router.choose(request(account=account), only) for _ in range(num_requests)]


# --- random requests ----------------------------------------------------------------------------


class RouterMachine(RuleBasedStateMachine):
    """Requests of three accounts that share prefixes arrive, end and lose their replicas.

    The machine keeps its own record of what is booked and of which prefixes each replica was given.
    """

    routing: Routing
    max_blocks = 1000

    @initialize(
        num_replicas=st.integers(1, 6), max_num_seqs=st.integers(1, 4), seed=st.integers(0, 3)
    )
    def start(self, num_replicas: int, max_num_seqs: int, seed: int) -> None:
        self.router = ROUTERS[self.routing](self.max_blocks, seed=seed)
        self.paid: defaultdict[int, float] = defaultdict(float)
        self.alive = {i: Candidate(i, max_num_seqs) for i in range(num_replicas)}
        self.open: list[tuple[Booking, str]] = []
        self.orphans: list[Booking] = []
        self.given: dict[int, set[int]] = {i: set() for i in self.alive}

    def load(self, one: Candidate) -> int:
        return sum(booking.number == one.number for booking, _ in self.open)

    def tokens(self, one: Candidate) -> int:
        return sum(booking.num_tokens for booking, _ in self.open if booking.number == one.number)

    def known(self, one: Candidate, asked: RoutingRequest) -> int:
        return len(list(takewhile(self.given[one.number].__contains__, asked.blocks)))

    @rule(
        conversation=st.integers(0, 3),
        num_blocks=st.integers(0, 5),
        account=st.sampled_from("abc"),
        data=st.data(),
    )
    def arrive(self, conversation: int, num_blocks: int, account: str, data: st.DataObject) -> None:
        asked = request(
            *(100 * conversation + i for i in range(num_blocks)), account=account, size=64
        )
        numbers = data.draw(st.sets(st.sampled_from(sorted(self.alive)), min_size=1))
        offered = [self.alive[number] for number in sorted(numbers)]
        booking = self.router.choose(asked, offered)
        assert booking.number in numbers, "only a candidate is chosen"
        chosen = self.alive[booking.number]
        assert booking.num_tokens == 64 * (num_blocks - self.known(chosen, asked))
        self.check_choice(asked, offered, chosen)
        self.open.append((booking, account))
        self.given[booking.number] |= set(asked.blocks)

    def check_choice(
        self, asked: RoutingRequest, offered: list[Candidate], chosen: Candidate
    ) -> None:
        """Check the rules of each routing."""
        least = min(map(self.load, offered))
        if self.routing == "least-loaded":
            assert self.load(chosen) == least
        if self.routing == "prefix":
            longest = max(self.known(one, asked) for one in offered)
            is_home = longest and self.known(chosen, asked) == longest
            assert self.load(chosen) == least or is_home
            assert self.load(chosen) <= CROWDED * max(least, 1)
        if self.routing == "prefix-window":
            self.check_window(asked, offered, chosen)

    def check_window(
        self, asked: RoutingRequest, offered: list[Candidate], chosen: Candidate
    ) -> None:
        least = min(map(self.load, offered))
        window = [
            one
            for one in offered
            if self.load(one) <= least + max(1, min(WINDOW, one.max_num_seqs // 2))
            or self.load(one) <= CROWDED * least
        ]
        longest = max((self.known(one, asked) for one in window), default=0)
        if longest:
            homes = [one for one in window if self.known(one, asked) == longest]
            load = min(map(self.load, homes))
            name = asked.blocks[longest - 1]
            places = min(one.max_num_seqs for one in offered)
            if load > least and least < places:
                ahead = min(self.tokens(one) for one in homes if self.load(one) == load) - min(
                    self.tokens(one) for one in offered if self.load(one) == least
                )
                tokens = COPY_TOKENS * (load - least) / (1 + least) + AHEAD * max(0, ahead)
                self.paid[name] += (1 - least / places) * tokens
            if load == least or least >= places or self.paid[name] < 64 * longest:
                assert chosen in homes, "the longest prefix"
                assert self.load(chosen) == load, "the least loaded home"
                return
            del self.paid[name]
        if least < min(one.max_num_seqs for one in offered):
            assert self.load(chosen) == least
        else:
            own = {
                one.number: self.count_own(one, asked.account)
                for one in offered
                if self.load(one) <= least + SLACK
            }
            assert own.get(chosen.number) == min(own.values()), "where the account waits least"

    def count_own(self, one: Candidate, account: str) -> int:
        return sum(booking.number == one.number and name == account for booking, name in self.open)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        booking, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        booking.release()
        with pytest.raises(RuntimeError):
            booking.release()

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), returns=st.booleans())
    def die(self, data: st.DataObject, returns: bool) -> None:
        """End a replica before its requests. With ``returns``, another one gets its number."""
        number = data.draw(st.sampled_from(sorted(self.alive)))
        self.router.forget(number)
        self.orphans += [booking for booking, _ in self.open if booking.number == number]
        self.open = [entry for entry in self.open if entry[0].number != number]
        self.given[number] = set()
        if not returns:
            del self.alive[number]

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def inherit(self, data: st.DataObject) -> None:
        """Give the prefixes of a replica to another one, too."""
        number, heir = data.draw(st.permutations(sorted(self.alive)))[:2]
        self.router.prefixes.inherit(number, heir)
        self.given[heir] |= self.given[number]

    @precondition(lambda self: self.orphans)
    @rule()
    def end_without_replica(self) -> None:
        self.orphans.pop().release()

    @invariant()
    def booked_is_the_sum_of_the_open_bookings(self) -> None:
        for number, one in getattr(self, "alive", {}).items():
            booked = self.router.booked(number)
            mine = [(booking, name) for booking, name in self.open if booking.number == number]
            assert booked.num_seqs == self.load(one)
            assert booked.num_tokens == sum(booking.num_tokens for booking, _ in mine)
            assert booked.accounts == {
                name: sum(other == name for _, other in mine) for _, name in mine
            }


@pytest.mark.parametrize("routing", ROUTINGS)
def test_random_requests_follow_the_rules(routing: Routing) -> None:
    machine = type("Machine", (RouterMachine,), {"routing": routing})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=repeat(40, 10), stateful_step_count=40)
    )


@given(st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=30), st.integers(0, 20))
def test_size_of_prefix_table_is_limited(prompts: list[list[int]], max_blocks: int) -> None:
    router = Router(max_blocks)
    for blocks in prompts:
        router.choose(request(*blocks), candidates(3))
        assert len(router.prefixes) <= max_blocks


def test_full_table_forgets_the_ends_of_prompts_first() -> None:
    router = Router(10)
    first, other = (router.choose(request(*blocks), candidates(1)) for blocks in (range(10), [99]))
    assert len(router.prefixes) == 10
    assert router.choose(request(99), candidates(1)).num_tokens < other.num_tokens, "the newest"
    again = router.choose(request(*range(10)), candidates(1))
    assert again.num_tokens < first.num_tokens


@pytest.mark.parametrize("routing", ROUTINGS)
def test_same_seed_gives_same_choices(routing: Routing) -> None:
    def numbers(seed: int) -> list[int]:
        rng = random.Random(1)
        router = ROUTERS[routing](100, seed=seed)
        return [
            router.choose(request(*range(rng.randrange(4))), candidates(8)).number
            for _ in range(50)
        ]

    assert numbers(3) == numbers(3)
    assert (numbers(3) != numbers(4)) == (routing != "round-robin")


# --- rules, one by one --------------------------------------------------------------------------


def test_round_robin_chooses_each_replica_in_turn() -> None:
    router = ROUTERS["round-robin"](100)
    assert [router.choose(request(1), candidates(3)).number for _ in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("routing", ["prefix", "prefix-window"])
def test_prefix_has_one_home_on_idle_replicas(routing: Routing) -> None:
    router = ROUTERS[routing](100)
    numbers = set()
    for last in range(20):
        booking = router.choose(request(1, 2, 100 + last), candidates(6))
        booking.release()
        numbers.add(booking.number)
    assert len(numbers) == 1


def test_known_blocks_are_not_booked() -> None:
    """Only blocks up to the longest known prefix save work; a last block may be partly filled."""
    router = Router(100)
    asked = RoutingRequest([1, 2, 3], [160, 320, 400], 400)
    bookings = [router.choose(asked, candidates(2)) for _ in range(2)]
    assert bookings[0].number == bookings[1].number
    assert [booking.num_tokens for booking in bookings] == [400, 0]
    assert router.choose(request(1, 9, 4), candidates(2)).num_tokens == 2 * SIZE


@pytest.mark.parametrize(
    ("least", "load", "stays"),
    [(0, 8, True), (0, 9, False), (5, 13, True), (9, 18, True), (9, 19, False)],
)
def test_request_leaves_crowded_home(least: int, load: int, stays: bool) -> None:
    router = Router(100)
    home, other = candidates(2, max_num_seqs=100)
    bookings = [router.choose(request(1, 2), [home]), *fill(router, 0, load - 1)]
    fill(router, 1, least)
    booking = router.choose(request(1, 2), [home, other])
    assert booking.number == (0 if stays else 1)
    for booking in bookings:
        booking.release()
    assert router.choose(request(1, 2), [other]).num_tokens == (2 * SIZE if stays else 0), (
        "the replica that got the request is a home now"
    )


@pytest.mark.parametrize(("max_num_seqs", "stay"), [(1, 2), (4, 3), (100, 9)])
def test_home_is_crowded_earlier_if_it_runs_few_sequences(max_num_seqs: int, stay: int) -> None:
    router = Router(100)
    both = candidates(2, max_num_seqs=max_num_seqs)
    numbers = []
    for _ in range(stay + 1):
        booking = router.choose(request(1), both)
        booking.finish_prompt()
        numbers.append(booking.number)
    assert len(set(numbers[:stay])) == 1
    assert numbers[stay] != numbers[0]


def test_shorter_prefix_counts_if_longest_is_crowded() -> None:
    router = Router(100)
    crowded, second, third = candidates(3, max_num_seqs=100)
    router.choose(request(1, 2, 3), [crowded])
    router.choose(request(1), [second])
    fill(router, 0, 20)
    assert router.choose(request(1, 2, 3), [crowded, second, third]).number == 1


def test_requests_of_an_account_are_spread_over_full_replicas() -> None:
    """Each replica serves its accounts alike, so an account gets its share of all of them."""
    router = Router(100)
    full = candidates(2, max_num_seqs=2)
    fill(router, 0, 4, "heavy")
    fill(router, 1, 3, "heavy")
    fill(router, 1, 1, "light")
    numbers = [router.choose(request(90 + i, account="light"), full).number for i in range(3)]
    assert numbers == [0, 1, 0]


def test_account_does_not_wait_in_a_much_longer_queue_to_get_its_share() -> None:
    for more in (SLACK, SLACK + 1):
        router = Router(100)
        full = candidates(2, max_num_seqs=2)
        fill(router, 0, 3, "light")
        fill(router, 1, 3 + more, "heavy")
        number = router.choose(request(99, account="light"), full).number
        assert number == (1 if more == SLACK else 0)


def test_unknown_prefix_goes_where_fewer_seconds_are_booked() -> None:
    """Of the replicas with the fewest requests."""
    router = Router(100)
    slow, fast = Candidate(0, 9, prompt_token_seconds=1.0), Candidate(1, 9, 0.0, 0.1)
    router.choose(request(1, 2), [slow])
    router.choose(request(3, 4, 5), [fast])
    assert router.choose(request(6), [slow, fast]).number == 1
    router.choose(request(7), [slow])
    late = Candidate(1, 9, 1e6, 0.1)
    assert router.choose(request(8), [slow, late]).number == 0


def test_crowded_prefix_gets_several_homes() -> None:
    router = Router(1000)
    replicas = candidates(8, max_num_seqs=4)
    bookings = []
    for i in range(9):
        bookings.append(router.choose(request(1, 2, 10 + i), replicas))
        bookings[-1].finish_prompt()
    assert len({booking.number for booking in bookings}) == 3
    for booking in bookings:
        booking.release()
    homes = {booking.number for booking in bookings}
    assert router.choose(request(1, 2, 99), replicas).number in homes


def test_idle_routers_agree_on_unknown_prefixes() -> None:
    """Five routers, which number the replicas differently, each get a request of 200 prefixes."""
    places: list[list[int]] = []
    for seed in range(5):
        router, order = Router(1000, seed=seed), list(range(40))
        random.Random(seed).shuffle(order)
        known = [Candidate(number, 8, identity=name) for number, name in enumerate(order)]
        rng = random.Random(1)
        chosen = []
        for _ in range(200):
            booking = router.choose(request(rng.getrandbits(64), rng.getrandbits(64)), known)
            chosen.append(order[booking.number])
            booking.release()
        places.append(chosen)
    assert all(chosen == places[0] for chosen in places)
    assert len({*places[0]}) > 30, "they are spread"


def test_few_prefixes_move_when_a_replica_leaves() -> None:
    blocks = [random.Random(seed).getrandbits(64) for seed in range(300)]
    homes = []
    for known in (candidates(10), candidates(9)):
        router = Router(10_000)
        homes.append([])
        for block in blocks:
            booking = router.choose(request(block), known)
            booking.release()
            homes[-1].append(booking.number)
    assert [a for a, b in zip(*homes, strict=True) if a != b] == [9] * homes[0].count(9)


@given(st.integers(0, 20), st.integers(0, 40))
def test_lease_corrects_load(num_booked: int, num_seqs: int) -> None:
    """What other fronts have sent counts; what has been booked is never counted less."""
    router = Router(100)
    bookings = fill(router, 0, num_booked)
    router.correct(0, num_seqs)
    assert router.booked(0).num_others == max(0, num_seqs - num_booked)
    load = max(num_booked, num_seqs)
    fill(router, 1, load + SLACK + 1)
    assert router.choose(request(5), candidates(2, 100)).number == 0
    fill(router, 0, 2 * SLACK + 2)
    assert router.choose(request(6), candidates(2, 100)).number == 1
    for booking in bookings:
        booking.release()
    router.correct(0, 0)
    assert router.booked(0).num_others == 0


def test_unknown_prefix_may_go_to_its_place_if_other_fronts_may_know_it() -> None:
    """Without other fronts, it goes to the least loaded replica."""
    for sends_others, least_stays in ((0, True), (20, False)):
        router = Router(1000)
        router.correct(0, sends_others)
        fill(router, 1, SLACK)
        numbers = set()
        for block in range(30):
            booking = router.choose(request(block + 1), candidates(3, 100))
            booking.release()
            numbers.add(booking.number)
        assert (1 not in numbers) == least_stays


def test_first_token_ends_booking_of_prompt() -> None:
    router = Router(100)
    booking = router.choose(request(1, 2), candidates(1))
    assert (booking.num_tokens, router.booked(0).num_tokens) == (2 * SIZE, 2 * SIZE)
    for _ in range(2):
        booking.finish_prompt()
        assert (booking.num_tokens, router.booked(0).num_tokens) == (0, 0)
    booking.release()
    booking.finish_prompt()
    assert (router.booked(0).num_seqs, router.booked(0).num_tokens) == (0, 0)


def test_slow_replica_gets_fewer_requests() -> None:
    """Each replica works on one request at a time; one of them takes three times as long."""
    router = Router(1000)
    replicas = [Candidate(i, 4, prompt_token_seconds=0.03 if i == 0 else 0.01) for i in range(4)]
    queues: dict[int, list[Booking]] = {i: [] for i in range(4)}
    counts = [0] * 4
    for now in range(900):
        if now % 2 == 0:
            booking = router.choose(request(1000 + now), replicas)
            counts[booking.number] += 1
            queues[booking.number].append(booking)
        for number, queue in queues.items():
            if queue and now % (18 if number == 0 else 6) == 0:
                queue.pop(0).release()
    assert counts[0] < 0.6 * min(counts[1:])


# --- copies -------------------------------------------------------------------------------------


def test_prefix_is_copied_when_its_requests_have_paid_for_it() -> None:
    """A request that goes to a replica with 4 requests, beside an empty one, pays 4 COPY_TOKENS."""
    num = 3 * 4 * COPY_TOKENS
    router = Router(100)
    both = candidates(2, 100)
    router.choose(request(1, size=num), both[:1]).release()
    fill(router, 0, 4)
    numbers = []
    for _ in range(4):
        booking = router.choose(request(1, size=num), both)
        booking.release()
        numbers.append(booking.number)
    assert numbers == [0, 0, 1, 1], "the third one is the last that pays"


def test_prefix_that_is_being_computed_is_copied_at_once() -> None:
    """Its requests would wait for the prompt tokens that are ahead of them."""
    router = Router(100)
    both = candidates(2, 100)
    first = router.choose(request(1), both[:1])
    fill(router, 0, 2)
    numbers = [router.choose(request(1), both).number for _ in range(2)]
    assert numbers == [0, 1]
    first.finish_prompt()
    assert router.booked(0).num_tokens == 0


def test_fewer_copies_are_made_the_fuller_the_replicas_are() -> None:
    paying = []
    for places in (100, 6):
        router = Router(100)
        both = candidates(2, max_num_seqs=places)
        router.choose(request(1, size=1000), both[:1]).release()
        fill(router, 0, 5)
        fill(router, 1, 3)
        numbers: list[int] = []
        while 1 not in numbers:
            booking = router.choose(request(1, size=1000), both)
            booking.release()
            numbers.append(booking.number)
        paying.append(len(numbers))
    assert paying[1] > 1.5 * paying[0]


def test_nothing_is_copied_while_all_replicas_are_full() -> None:
    router = Router(100)
    both = candidates(2, max_num_seqs=8)
    router.choose(request(1), both[:1])
    fill(router, 0, 11)
    fill(router, 1, 8)
    numbers = set()
    for _ in range(30):
        booking = router.choose(request(1), both)
        booking.release()
        numbers.add(booking.number)
    assert numbers == {0}


def test_equally_loaded_home_keeps_its_prefix() -> None:
    router = Router(100)
    both = candidates(2, 100)
    router.choose(request(1, size=1), both[:1]).release()
    fill(router, 0, 5)
    fill(router, 1, 5)
    for _ in range(20):
        booking = router.choose(request(1, size=1), both)
        assert booking.number == 0
        booking.release()


def test_requests_of_one_of_many_fronts_pay_for_all_of_them() -> None:
    """Each front sees its own requests only, so that none would ever pay for a copy."""
    paying = []
    for num_others in (0, 7):
        router = Router(100)
        both = candidates(2, 100)
        router.choose(request(1), both[:1]).release()
        fill(router, 0, 8 - num_others)
        router.correct(0, 8)
        numbers = []
        while 1 not in numbers:
            booking = router.choose(request(1), both)
            booking.release()
            numbers.append(booking.number)
        paying.append(len(numbers))
    assert paying[1] < paying[0] / 4


# --- what fronts tell each other ----------------------------------------------------------------


@given(st.integers(0, 300))
def test_longer_prompt_has_landmarks_of_a_known_one(num: int) -> None:
    blocks = list(range(1000, 1000 + num))
    landmarks = choose_landmarks(blocks)
    assert len(landmarks) <= 10
    assert landmarks == sorted(set(landmarks)), "shortest first"
    assert landmarks[-1:] == blocks[-1:]
    router = Router(1000)
    router.prefixes.add(landmarks, 1)
    if num:
        longer = request(*blocks, 1, 2)
        booking = router.choose(longer, candidates(3))
        assert booking.num_tokens == 2 * SIZE
        booking.release()
        branching = request(*blocks[: num // 2 + 1], 3)
        assert router.choose(branching, candidates(3)).number == 1


# --- names of prefixes --------------------------------------------------------------------------

TEXTS = st.lists(st.binary(max_size=12), max_size=5)


@given(TEXTS, TEXTS, st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]))
def test_names_are_equal_up_to_first_different_block(
    one: list[bytes], two: list[bytes], salt_one: bytes, salt_two: bytes
) -> None:
    def blocks(parts: list[bytes]) -> list[bytes]:
        return [part[i : i + 4] for part in parts for i in range(0, len(part), 4)]

    equal = 0
    while salt_one == salt_two and blocks(one)[: equal + 1] == blocks(two)[: equal + 1]:
        equal += 1
        if equal > max(len(blocks(one)), len(blocks(two))):
            break
    equal = min(equal, len(blocks(one)), len(blocks(two)))
    names = [name_prefixes(salt_one, one, 4), name_prefixes(salt_two, two, 4)]
    assert [len(name) for name in names] == [len(blocks(one)), len(blocks(two))]
    assert [a == b for a, b in zip(*names, strict=False)] == [
        i < equal for i in range(min(map(len, names)))
    ]


def test_longer_prompt_has_names_of_its_prefix() -> None:
    """Tokens are one part, so a prompt that continues another one has the names of all its full
    blocks.
    """
    first, longer = (array("i", range(n)).tobytes() for n in (40, 100))
    assert name_prefixes(b"", [first], 64)[:2] == name_prefixes(b"", [longer], 64)[:2]
    assert name_prefixes(b"", [first], 64)[2] != name_prefixes(b"", [longer], 64)[2]


def test_names_are_limited_and_equal_in_every_process() -> None:
    assert len(name_prefixes(b"", [b"x" * 1000, b"y" * 1000], 2, most=30)) == 30
    assert name_prefixes(b"model", [b"Hello", b"World"], 4) == [
        3460412513920352606,
        12878854522399442841,
        12708375530026083444,
        5006563560519853767,
    ]


def test_table_lists_each_replica_once_with_the_longest_prefix_that_it_has() -> None:
    table = PrefixTable(100)
    table.add([1, 2, 3], 0)
    table.add([1], 1)
    table.add([1, 2], 2)
    assert [*table.list_holders([1, 2, 3, 4])] == [(0b001, 2), (0b100, 1), (0b010, 0)]


def test_heir_gets_the_requests_for_the_prefixes_of_a_replica():
    """Of no others, and the replica keeps them if it comes back."""
    router = Router(100)
    both = candidates(3)
    for number, blocks in enumerate([(1, 2), (1, 3), (4,)]):
        router.choose(request(*blocks), [both[number]]).release()
    router.prefixes.inherit(0, 2)
    for blocks, number in (((1, 2, 5), 2), ((1, 3, 6), 1), ((4, 7), 2)):
        booking = router.choose(request(*blocks), both[1:])
        booking.release()
        assert booking.number == number
    booking = router.choose(request(1, 2), both[:2])
    assert booking.number == 0


# --- large tables -------------------------------------------------------------------------------


def test_forgetting_and_inheriting_take_no_time_in_a_large_table() -> None:
    """Fronts do it on the event loop; to visit each prefix would take 100 ms here."""
    router = Router(300_000)
    both = candidates(2)
    for start in range(0, 300_000, 1000):
        router.choose(request(*range(start, start + 1000)), both[:1]).release()
    assert len(router.prefixes) == 300_000
    began = time.thread_time()
    router.prefixes.inherit(0, 1)
    router.prefixes.forget(0)
    router.forget(1)
    assert time.thread_time() - began < 0.01


def test_replica_that_comes_and_goes_costs_no_memory_and_no_prefixes_in_use() -> None:
    """The other prefixes of the table are forgotten at last, and numbers stay small."""
    router = Router(100_000)
    steady, restarting = candidates(2)
    router.choose(request(*range(1000, 5000)), [steady]).release()
    for turn in range(20 * MAX_CLOSED):
        router.choose(request(1, 2, 3), [restarting]).release()
        router.prefixes.inherit(restarting.number, steady.number)
        if turn % 2:
            router.prefixes.forget(restarting.number)
            assert router.choose(request(*range(10, 20)), [restarting]).num_tokens == 10 * SIZE
        booking = router.choose(request(7, 8, 9), [steady])
        booking.release()
    assert booking.num_tokens == 0
    assert router.choose(request(1, 2, 3), [steady]).num_tokens == 0
    assert len(router.prefixes) == 16
    assert len(router.prefixes._meanings) < 2 * MAX_CLOSED
