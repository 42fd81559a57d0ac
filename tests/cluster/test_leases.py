"""The choice of replicas inside a front, without sockets."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

import msgspec
import pytest
from fake_replica import make_lease
from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster.leases import MAX_BLOCKS, MIN_BLOCKS, Replicas, find_model, make_client
from cllm.config.settings import Settings
from cllm.errors import StartupError
from cllm.routing.router import Router, RoutingRequest
from cllm.server.cluster.key import ClusterKey
from cllm.server.cluster.lease import MAX_NAME, Lease


def lease_of(name: str, model: str = "m", **fields: object) -> Lease:
    return msgspec.convert(make_lease(name, model, **fields), Lease)


def front_of(count: int, seed: int = 0, order: int = 1) -> tuple[Router, Replicas]:
    """Return what a front has of ``count`` replicas, whose addresses are in some order."""
    router = Router(10_000, seed)
    urls = [f"http://10.0.0.{number}:8000" for number in range(count)][::order]
    replicas = Replicas(urls, ClusterKey(Settings()), router, 3.0)
    for replica in replicas.all:
        number = replica.url.removeprefix("http://10.0.0.").removesuffix(":8000")
        replicas.take(replica, lease_of(f"r{number}"))
    return router, replicas


def choose(router: Router, replicas: Replicas, block: int) -> str:
    """Return the name of the replica that gets a request, which then ends."""
    candidates = [one.candidate for one in replicas.find("m")]
    booking = router.choose(RoutingRequest([block], [100], 100), candidates)
    booking.release()
    return replicas.by_number[booking.number].name


def test_fronts_that_do_not_talk_choose_the_same_replicas():
    fronts = [front_of(8, seed, order) for seed in range(3) for order in (1, -1)]
    blocks = [hash((number, "block")) & (1 << 63) - 1 for number in range(300)]
    chosen = [[choose(*front, block) for block in blocks] for front in fronts]
    agreed = sum(len({*names}) == 1 for names in zip(*chosen, strict=True))
    assert agreed >= 0.95 * len(blocks)
    assert len({*chosen[0]}) == 8


@pytest.mark.parametrize("number", range(4))
def test_front_learns_where_other_fronts_have_sent_prefixes(number):
    """So the next turn of a conversation finds its replica through any front."""
    router, replicas = front_of(4)
    home = replicas.all[number]
    lease = msgspec.structs.replace(lease_of(home.name), prefixes=[[5, 6], [7]])
    replicas.take(home, lease)
    assert [choose(router, replicas, block) for block in (6, 7)] == [home.name] * 2


def test_front_asks_for_what_it_has_not_learned_yet():
    _, replicas = front_of(1)
    replica = replicas.all[0]
    lease = msgspec.structs.replace(lease_of(replica.name), num_noted=12)
    replicas.take(replica, lease)
    query = dict(parse_qsl(replicas._write_query(replica).removeprefix("?")))
    assert query == {"epoch": lease.epoch, "after": "12"}


def test_model_is_found_by_name_alias_and_as_the_default():
    lease = lease_of("a", "small", aliases=["gpt-*"])
    for name in (None, "small", "small:latest", "gpt-4"):
        found = find_model(lease, name)
        assert found is not None
        assert found.name == "small"
    assert find_model(lease, "other") is None


def test_long_names_of_models_are_not_remembered():
    _, replicas = front_of(1)
    name = "x" * (MAX_NAME + 1)
    found = replicas.find(name)
    assert [one.name for one in found] == ["m"]
    assert replicas.find(name) is not found


def test_replica_that_must_load_the_model_gets_requests_only_when_others_are_full():
    router, replicas = front_of(2)
    replicas.take(replicas.all[0], lease_of("r0", is_loaded=False))
    bookings = []
    for _ in range(4):
        (only,) = replicas.find("m")
        assert only.replica.name == "r1"
        request = RoutingRequest([], [], 10)
        bookings.append(router.choose(request, [only.candidate]))
    assert len(replicas.find("m")) == 2
    bookings.pop().release()
    assert len(replicas.find("m")) == 1
    replicas.lose(replicas.all[1], "it is gone")
    assert [one.replica.name for one in replicas.find("m")] == ["r0"]


def test_table_of_prefixes_grows_with_the_caches_of_replicas():
    router, replicas = front_of(2)
    assert router.prefixes.max_blocks == MIN_BLOCKS
    for replica in replicas.all:
        replicas.take(replica, lease_of(replica.name, num_cells=5_000_000))
    assert router.prefixes.max_blocks == 4 * 10_000_000 * 4 // 1024
    replicas.take(replicas.all[0], lease_of("r0", num_cells=10**9))
    assert router.prefixes.max_blocks == MAX_BLOCKS


def test_caches_of_forgotten_replicas_do_not_count():
    async def forget() -> int:
        router, replicas = front_of(0)
        replicas.set_urls({"http://10.0.0.1:8000": True, "http://10.0.0.2:8000": True})
        for number, replica in enumerate([*replicas.all]):
            replicas.take(replica, lease_of(f"r{number}", num_cells=10**9))
        gone, left = replicas.all
        replicas.lose(gone, "it is gone")
        replicas.set_urls({left.url: True})
        replicas.take(left, lease_of("r1", num_cells=0))
        await replicas.close()
        return router.prefixes.max_blocks

    assert asyncio.run(forget()) == MIN_BLOCKS


def test_replica_that_will_drain_gets_no_requests_although_its_lease_is_fresh():
    _, replicas = front_of(2)
    leaving, stays = replicas.all
    replicas.set_urls({leaving.url: False, stays.url: True})
    replicas.take(leaving, lease_of("r0"))
    assert [*replicas.listed()] == [stays]


def test_numbers_of_models_that_are_gone_are_used_again():
    router, replicas = front_of(3)
    assert {*replicas.by_number} == {0, 1, 2}
    choose(router, replicas, 7)
    replicas.take(replicas.all[0], lease_of("r0", "another"))
    assert {*replicas.by_number} == {0, 1, 2}
    assert [one.replica.name for one in replicas.find("another")] == ["r0"]
    assert [one.replica.name for one in replicas.find("m")] == ["r1", "r2"]


def test_replica_that_restarts_is_not_expected_to_have_its_prefixes():
    router, replicas = front_of(2)
    home = choose(router, replicas, 7)
    replica = next(one for one in replicas.all if one.name == home)
    request = RoutingRequest([7], [100], 100)
    assert router.choose(request, [*replica.candidates.values()]).num_tokens == 0
    replicas.take(replica, msgspec.structs.replace(lease_of(home), epoch="2"))
    assert router.choose(request, [*replica.candidates.values()]).num_tokens == 100


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["ready", "loading", "draining", "gone"]))
    )
)
def test_only_listed_replicas_are_found_and_ready_ones_first(changes):
    _, replicas = front_of(3)
    states = ["ready"] * 3
    for number, state in changes:
        replica = replicas.all[number]
        if state == "gone":
            replicas.lose(replica, "it is gone")
        else:
            replicas.take(replica, msgspec.structs.replace(lease_of(replica.name), status=state))
        states[number] = state
        wanted = "ready" if "ready" in states else "loading"
        found = {one.replica.name for one in replicas.find("m")}
        assert found == {f"r{i}" for i, state in enumerate(states) if state == wanted}
        assert replicas.ready == ("ready" in states)


@pytest.mark.parametrize("url", ["http://ann:secret@10.0.0.5:8000", "http://ann:secret@[", "a@b"])
def test_address_with_a_password_is_refused_without_showing_it(url):
    with pytest.raises(StartupError) as error:
        make_client(url)
    assert "must not have a user or a password" in str(error.value)
    assert "secret" not in str(error.value)
