"""The live view of a cluster, on the fake backend."""

import contextlib
import json
import signal
import threading
import time

import httpx2
import pytest
from cluster.conftest import FAKE, start_front
from conftest import PATIENCE

from cllm.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.llama]

ENDLESS = {"max_tokens": 30_000, "ignore_eos": True, "stream": True}
SLOW = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.02}


@pytest.fixture
def start_cluster(start_server):
    """Return a function that starts replicas whose steps take a while, and their front."""

    def start(count, *options, **environment):
        replicas = [start_server(*FAKE, "--server.enable-faults") for _ in range(count)]
        for one in replicas:
            assert one.client.post("/faults", json={"faults": [SLOW]}).status_code == 200
        urls = (one.url for one in replicas)
        return start_front(start_server, *urls, options=options, **environment), replicas

    return start


@contextlib.contextmanager
def snapshots(front, **headers):
    """Yield a function that returns the next snapshot that meets a condition."""
    with front.client.stream("GET", "/live/events", headers=headers) as answer:
        assert answer.status_code == 200
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)

        def find(condition):
            end = time.monotonic() + PATIENCE
            for line in lines:
                snapshot = json.loads(line)
                if condition(snapshot):
                    return snapshot
                assert time.monotonic() < end, snapshot
            raise AssertionError("the stream has ended")

        yield find


@contextlib.contextmanager
def requests(front, count):
    """Let ``count`` streams be read meanwhile."""
    is_over = threading.Event()

    def read(number):
        body = {"prompt": f"{number} text", **ENDLESS}
        with (
            contextlib.suppress(httpx2.HTTPError),
            httpx2.Client(base_url=front.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for _ in answer.iter_lines():
                if is_over.is_set():
                    break

    threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def sequences(snapshot, replica=None):
    return {
        one["name"]: one
        for model in snapshot["models"]
        for engine in model["engines"]
        for one in engine["sequences"]
        if replica in (None, model["replica"])
    }


def states(snapshot):
    return {one["name"]: one for one in snapshot["replicas"]}


def find_replica(replicas, name):
    """Return the server of a replica."""
    return next(one for one in replicas if name_of(one) == name)


def name_of(replica):
    key = {"x-cllm-cluster-key": "the-key-of-the-test-cluster"}
    return replica.client.get("/internal/lease", headers=key).json()["name"]


def test_one_view_has_the_requests_of_both_replicas(start_cluster, capsys):
    front, replicas = start_cluster(2)
    names = {name_of(one) for one in replicas}
    with snapshots(front) as find, requests(front, 6):
        seen = find(lambda one: len(sequences(one)) == 6)
        assert states(seen).keys() == names
        assert {one["status"] for one in seen["replicas"]} == {"ready"}
        assert all(sequences(seen, name) for name in names)
        assert sum(one["num_requests"] for one in seen["replicas"]) == 6
        assert {len(model["engines"]) for model in seen["models"]} == {1}
        later = find(lambda one: all(model["output_tokens_per_s"] > 0 for model in one["models"]))
        assert all(model["engines"][0]["steps"] for model in later["models"])
        main(["top", "--url", front.url, "--once"])
    shown = capsys.readouterr().out
    assert all(
        f"replica {name}: ready" in shown and f"{name}: fake: loaded" in shown for name in names
    )
    with snapshots(front) as find:
        last = find(lambda one: one["last_minute"]["num_requests"] == 6 and not sequences(one))
        assert len(last["last_minute"]["ttft"]) == len(last["last_minute"]["itl"]) == 3


def test_request_of_a_killed_replica_goes_on_under_the_same_name(start_cluster):
    front, replicas = start_cluster(2)
    with snapshots(front) as find, requests(front, 1):
        seen = find(lambda one: any(s["phase"] == "decode" for s in sequences(one).values()))
        [name] = sequences(seen)
        [first] = [one for one in states(seen) if sequences(seen, one)]
        find_replica(replicas, first).stop(signal.SIGKILL)
        lost = find(lambda one: states(one)[first]["status"] == "lost")
        assert states(lost)[first]["trouble"]
        assert not sequences(lost, first)
        [other] = states(lost).keys() - {first}
        after = find(lambda one: name in sequences(one, other) and one.get("journeys"))
        before, now = after["journeys"][name.removesuffix("-0.0")]
        assert before.startswith(f"{first} ended in the middle of its answer")
        assert now.startswith(f"{other} has continued it for")
        assert states(after)[other]["status"] == "ready"


def test_request_that_no_replica_continues_yet_waits_at_the_front(start_cluster):
    front, [replica] = start_cluster(1, "--cluster.continue-seconds", "600")
    name = name_of(replica)
    with snapshots(front) as find, requests(front, 1):
        seen = find(lambda one: any(s["num_output_tokens"] for s in sequences(one).values()))
        replica.stop(signal.SIGKILL)
        waiting = find(lambda one: one.get("at_front") and states(one)[name]["status"] == "lost")
        [state] = waiting["at_front"]
        assert [state["name"]] == [*sequences(seen)]
        assert state["phase"] == "parked"
        assert state["reason"].startswith(
            f"{name} ended in the middle of its answer, and the front"
        )
        assert not waiting["is_ready"]
        front.process.send_signal(signal.SIGTERM)  # the view does not keep it from ending
        front.process.send_signal(signal.SIGTERM)
    assert front.process.wait(PATIENCE) == 0


def test_silent_replica_does_not_delay_the_others(start_cluster):
    front, replicas = start_cluster(2)
    silent, other = (name_of(one) for one in replicas)
    with snapshots(front) as find:
        find(lambda one: len(one["models"]) == 2)
        replicas[0].process.send_signal(signal.SIGSTOP)
        try:
            slow = find(lambda one: states(one)[silent]["status"] in ("slow", "lost"))
            assert states(slow)[silent]["trouble"]
            assert states(slow)[other]["status"] == "ready"
            for _ in range(3):
                assert states(find(lambda _: True))[other]["seconds_old"] < 3
            given_up = find(lambda one: states(one)[silent]["seconds_old"] is None)
            assert {model["replica"] for model in given_up["models"]} == {other}
        finally:
            replicas[0].process.send_signal(signal.SIGCONT)
        find(lambda one: states(one)[silent]["status"] == "ready" and len(one["models"]) == 2)


def test_draining_replica_is_shown_with_its_requests_until_they_have_ended(start_cluster):
    front, replicas = start_cluster(2)
    with snapshots(front) as find, requests(front, 1):
        seen = find(lambda one: any(s["phase"] == "decode" for s in sequences(one).values()))
        [name] = [one for one in states(seen) if sequences(seen, one)]
        leaving = find_replica(replicas, name)
        leaving.process.send_signal(signal.SIGTERM)
        draining = find(lambda one: states(one)[name]["status"] == "draining")
        for _ in range(3):
            assert sequences(draining, name)
            draining = find(lambda _: True)
            assert states(draining)[name]["status"] == "draining"
        leaving.process.send_signal(signal.SIGTERM)
        find(lambda one: states(one)[name]["status"] == "lost" and sequences(one))
    assert leaving.process.wait(PATIENCE) == 0


def test_view_of_a_front_needs_an_administrators_key_but_its_pages_need_none(start_cluster):
    front, [replica] = start_cluster(1, CLLM_API_KEY="secret")
    assert front.client.get("/live/events").status_code == 401
    with snapshots(front, authorization="Bearer secret") as find:
        find(lambda one: one["models"])
    replica.stop(signal.SIGKILL)
    for path in ("/live", "/ui/live/live.js"):  # also without replicas
        page = front.client.get(path)
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<title>cLLM" in front.client.get("/", headers={"accept": "text/html"}).text
    with snapshots(front, authorization="Bearer secret") as find:
        find(lambda one: one["replicas"][0]["status"] == "lost")


def test_front_that_everyone_can_reach_shows_no_prompts(start_server):
    """Its replica shows them to whoever uses its machine."""
    replica = start_server(*FAKE, "--server.enable-faults", "--server.live-prompts")
    assert replica.client.post("/faults", json={"faults": [SLOW]}).status_code == 200
    own = start_front(start_server, replica.url)
    public = start_front(start_server, replica.url, options=("--host", "0.0.0.0", "--insecure"))
    with requests(own, 1), snapshots(own) as find, snapshots(public) as find_public:

        def list_engines(snapshot):
            return [engine for model in snapshot["models"] for engine in model["engines"]]

        shown = find(lambda one: any(engine["prompts"] for engine in list_engines(one)))
        assert "0 text" in str(list_engines(shown))
        hidden = find_public(lambda one: any(engine["sequences"] for engine in list_engines(one)))
        assert [engine["prompts"] for engine in list_engines(hidden)] == [{}]
