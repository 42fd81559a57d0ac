"""When a replica leaves, its prefixes and the requests for them go to its heir."""

import time
import weakref

import pytest
from conftest import PATIENCE

from cllm.cluster.heirs import Heirs
from cllm.cluster.leases import Replicas
from cllm.config.settings import Settings
from cllm.routing.router import Candidate, Router, RoutingRequest
from cllm.server.cluster.key import ClusterKey
from cllm.server.cluster.lease import Lease, ModelLease

from .conftest import start_front

URLS = [f"http://127.0.0.1:{port}" for port in range(1, 9)]
FACTS = " ".join(f"Item {i} costs {3 * i + 7} coins." for i in range(30))


def make_lease(name: str, fingerprint: str = "f") -> Lease:
    sizes = dict.fromkeys(("num_cells", "num_running", "num_waiting"), 0)
    seconds = dict.fromkeys(("waiting_seconds", "prompt_token_seconds"), 0.0)
    model = ModelLease("m", [], "chat", "m", fingerprint, True, 4, **sizes, **seconds)
    return Lease(name, "e", "1", "ready", [model])


@pytest.fixture
def router() -> Router:
    return Router(100)


@pytest.fixture
def known(router: Router) -> Replicas:
    """Eight listed replicas that share a model."""
    known = Replicas(URLS, ClusterKey(Settings()), router, 3.0)
    for number, replica in enumerate(known.all):
        replica.lease, replica.is_listed = make_lease(f"{number:x}"), True
        replica.numbers = {"m": number}
    return known


@pytest.fixture
def heirs(known: Replicas, router: Router) -> Heirs:
    heirs = Heirs(known, router)
    known.find_heir, known.on_change = heirs.find_url, heirs.note_change
    return heirs


def test_heirs_are_spread_and_stay_when_others_leave(known: Replicas, heirs: Heirs) -> None:
    before = {replica.name: heirs.find(replica) for replica in known.all}
    assert all(heir is not None and heir.name != name for name, heir in before.items())
    assert len({heir.name for heir in before.values()}) >= 3
    gone = known.all[0]
    gone.is_listed = False
    for replica in known.all[1:]:
        if before[replica.name] is not gone:
            assert heirs.find(replica) is before[replica.name]
        assert heirs.find(replica) is not gone


def test_heir_has_the_same_file_of_the_model(known: Replicas, heirs: Heirs) -> None:
    leaver, *others = known.all
    for replica in others:
        replica.lease = make_lease(replica.name, "other")
    assert heirs.find(leaver) is None
    assert known.find_heir(leaver) == ""
    others[2].lease = make_lease(others[2].name)
    known.on_change(others[2])
    assert heirs.find(leaver) is others[2]
    assert known.find_heir(leaver) == others[2].url
    for replica in known.all:  # not loaded
        replica.lease = make_lease(replica.name, "")
    assert heirs.find(leaver) is None


def test_heirs_are_found_again_only_after_a_change(
    known: Replicas, heirs: Heirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 replicas, finding all heirs takes longer than the time between two leases."""
    urls = [known.find_heir(replica) for replica in known.all]
    with monkeypatch.context() as patch:
        patch.setattr(heirs, "find", None)
        assert [known.find_heir(replica) for replica in known.all] == urls
    known.lose(known.all[0], "it has ended")
    assert known.find_heir(known.all[1]) != known.all[0].url


def test_front_forgets_the_heirs_of_replicas_that_have_left(known: Replicas, heirs: Heirs) -> None:
    """Replicas that drain are still asked for leases, and so are told their heirs."""
    left = [weakref.ref(replica) for replica in known.all[1:]]
    assert all(known.find_heir(replica) for replica in known.all)
    while len(known.all) > 1:
        leaver = known.all.pop()
        known.lose(leaver, "it drains")
        assert known.find_heir(leaver)
        known.find_heir(known.all[0])
    del leaver
    assert [reference() for reference in left] == [None] * 7


def test_requests_follow_the_prefixes_to_the_heir(
    known: Replicas, heirs: Heirs, router: Router
) -> None:
    leaver = known.all[0]
    known.find_heir(leaver)
    heir = heirs.find(leaver)
    wanted = RoutingRequest([1, 2], [16, 32], 40)
    router.choose(wanted, [Candidate(0, 4)]).release()
    known.lose(leaver, "it has ended")
    others = [Candidate(number, 4) for number in range(1, 8)]
    assert router.choose(wanted, others).number == heir.numbers["m"]


@pytest.mark.llama
def test_request_is_cached_after_its_replica_has_left(start_server, tmp_path) -> None:
    options = ["--context", "1024", "--max-num-seqs", "4", "--cluster.hand-over", "60"]
    replicas = [
        start_server(
            *options, "--log.level", "info", "--kv.disk-cache", str(tmp_path / str(number))
        )
        for number in range(3)
    ]
    front = start_front(
        start_server, *(one.url for one in replicas), options=("--cluster.hand-over", "60")
    )
    text, cached, num_tokens = ask(front)
    assert cached < 50
    (home,) = [one for one in replicas if one.metric("prompt_tokens_total") >= num_tokens]
    end = time.monotonic() + PATIENCE
    while "will hand its prefixes over to" not in home.log:  # with the front's second lease
        assert time.monotonic() < end
        time.sleep(0.05)
    assert home.stop() == 0
    home.wait_for_log("handed 1 prefixes over to")
    assert ask(front) == (text, num_tokens - 1, num_tokens)


def ask(server) -> tuple[str, int, int]:
    """Return the text, how many tokens of the prompt were cached, and how many it has."""
    body = {
        "messages": [{"role": "user", "content": f"{FACTS} What is 27 plus 45?"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    answer = server.client.post("/v1/chat/completions", json=body).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached, usage["prompt_tokens"]
