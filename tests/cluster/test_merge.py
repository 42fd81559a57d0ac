"""The answers of several replicas become the answer of one server."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from cllm.cluster.merge import merge_health, merge_metrics, merge_named
from cllm.observe.exposition import render


def make_page(count, replica):
    registry = CollectorRegistry()
    Counter("cllm:prompt_tokens", "tokens", ["model_name"], registry=registry).labels("m").inc(
        count
    )
    Gauge("cllm:engines", "engines", registry=registry).set(1)
    Histogram("cllm:ttft", "seconds", registry=registry, buckets=(1,)).observe(0.5)
    Counter("cllm:account_tokens", "of accounts", ["account"], registry=registry).labels("a").inc(9)
    Counter("cllm:http_requests", "requests", ["route"], registry=registry).labels("/").inc(7)
    return render([registry], replica=replica)


def read_samples(page):
    families = text_string_to_metric_families(page.decode())
    return [sample for family in families for sample in family.samples]


def test_metrics_of_replicas_keep_their_sum_and_name_the_replica():
    own = CollectorRegistry()
    Counter("cllm:account_tokens", "of accounts", ["account"], registry=own).labels("a").inc(5)
    Counter("cllm:http_requests", "requests", ["route"], registry=own).labels("/").inc(2)
    Gauge("process_threads", "of the front", registry=own).set(1)
    pages = [make_page(3, "one"), make_page(4, "two"), b"this is no page", b""]
    page = merge_metrics(render([own]), pages)
    samples = read_samples(page)
    tokens = [one for one in samples if one.name == "cllm:prompt_tokens_total"]
    assert {one.labels["replica"]: one.value for one in tokens} == {"one": 3, "two": 4}
    assert all(one.labels["model_name"] == "m" for one in tokens)
    assert sum(one.value for one in samples if one.name == "cllm:ttft_count") == 2
    [usage] = [one for one in samples if one.name == "cllm:account_tokens_total"]
    assert (usage.value, usage.labels) == (5, {"account": "a"})
    assert page.count(b"# TYPE cllm:prompt_tokens_total counter") == 1
    # requests of clients count once, at the front, whose metrics have no label ``replica``
    [requests] = [one for one in samples if one.name == "cllm:http_requests_total"]
    assert (requests.value, requests.labels) == (2, {"route": "/"})
    [threads] = [one for one in samples if one.name == "process_threads"]
    assert threads.labels == {}


HOSTILE = ('a"} 7', "a\\", "{b}", 'x="y"} ', "line\nend", "# HELP a b", "")


def test_label_of_the_replica_leaves_others_as_they_are():
    registry = CollectorRegistry()
    counter = Counter("c", "text {a} b", ["first", "second"], registry=registry)
    for number, value in enumerate(HOSTILE):
        counter.labels(value, HOSTILE[-number]).inc(number)
    Gauge("g", "text", registry=registry).set(1)
    before = read_samples(render([registry]))
    merged = read_samples(merge_metrics(b"", [render([registry], replica='r"1')]))
    assert len(merged) == len(before) > len(HOSTILE)
    for one, other in zip(merged, before, strict=True):
        assert (one.name, one.value) == (other.name, other.value)
        assert one.labels == {**other.labels, "replica": 'r"1'}


def test_page_that_ends_early_leaves_those_of_others_readable():
    """A family without a name is left out."""
    broken = b"# HELP  text\n# TYPE  gauge\n 1\n# HELP a text\n# TYPE a gauge\na 1"
    page = b"# HELP b text\n# TYPE b gauge\nb 2\n"
    samples = read_samples(merge_metrics(b"", [broken, page, broken.replace(b" 1", b" 3")]))
    assert sorted((one.name, one.value) for one in samples) == [("a", 1), ("a", 3), ("b", 2)]


def test_families_of_8_pages_are_merged_within_milliseconds():
    """Each has 250 KB, as one of 8 models and 100 accounts."""
    labels = 'label_0="a value of some length",label_1="a value of some length",replica="12345678"'
    page = "".join(
        f"# HELP cllm:metric_{number} what it measures\n# TYPE cllm:metric_{number} histogram\n"
        + "".join(f'cllm:metric_{number}_bucket{{le="{i}",{labels}}} 17\n' for i in range(16))
        for number in range(130)
    ).encode()
    assert 250_000 < len(page) < 280_000
    seconds = []
    for _ in range(20):
        begun = time.thread_time()
        merged = merge_metrics(b"", [page] * 8)
        seconds.append(time.thread_time() - begun)
    assert merged.count(b"\n") == 130 * (2 + 8 * 16)
    assert min(seconds) < 0.01, seconds  # 3 to 4 ms were measured


def test_lists_become_their_union():
    one = {"object": "list", "data": [{"id": "a", "from": 1}, {"id": "b"}]}
    two = {"object": "list", "data": [{"id": "a", "from": 2}, {"id": "c"}]}
    merged = merge_named([one, two], "data", "id")
    assert [entry["id"] for entry in merged["data"]] == ["a", "b", "c"]
    assert merged["data"][0]["from"] == 1
    assert merged["object"] == "list"


def test_cluster_is_healthy_if_one_replica_is():
    ill = {"status": "degraded", "model_loaded": False, "models": []}
    well = {"status": "healthy", "model_loaded": True, "models": [{"name": "m"}]}
    troubles = {"one": "", "two": "", "three": "it does not answer"}
    merged = merge_health({"one": ill, "two": well, "three": None}, troubles)
    assert (merged["status"], merged["model_loaded"]) == ("healthy", True)
    assert merged["models"] == [{"name": "m", "replica": "two"}]
    assert [one["status"] for one in merged["replicas"]] == ["degraded", "healthy", "unreachable"]
    assert [one.get("trouble") for one in merged["replicas"]] == [None, None, "it does not answer"]
    assert merge_health({"one": None})["status"] == "degraded"
    assert "models" not in merge_health({"one": {"status": "healthy", "model_loaded": True}})
