"""The answers of several replicas become the answer of one server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from cllm.cluster.merge import merge_health, merge_metrics, merge_named
from cllm.observe.exposition import render


def make_page(count):
    registry = CollectorRegistry()
    Counter("cllm:prompt_tokens", "tokens", ["model_name"], registry=registry).labels("m").inc(
        count
    )
    Gauge("cllm:engines", "engines", registry=registry).set(1)
    Histogram("cllm:ttft", "seconds", registry=registry, buckets=(1,)).observe(0.5)
    Counter("cllm:account_tokens", "of accounts", ["account"], registry=registry).labels("a").inc(9)
    return render([registry]).decode()


def read_samples(page):
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def test_metrics_of_replicas_keep_their_sum_and_name_the_replica():
    own = CollectorRegistry()
    Counter("cllm:account_tokens", "of accounts", ["account"], registry=own).labels("a").inc(5)
    page = merge_metrics([own], {"one": make_page(3), "two": make_page(4)}).decode()
    samples = read_samples(page)
    tokens = [one for one in samples if one.name == "cllm:prompt_tokens_total"]
    assert {one.labels["replica"]: one.value for one in tokens} == {"one": 3, "two": 4}
    assert all(one.labels["model_name"] == "m" for one in tokens)
    assert sum(one.value for one in samples if one.name == "cllm:ttft_count") == 2
    [usage] = [one for one in samples if one.name == "cllm:account_tokens_total"]
    assert (usage.value, usage.labels) == (5, {"account": "a"})
    assert page.count("# TYPE cllm:prompt_tokens_total counter") == 1


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
