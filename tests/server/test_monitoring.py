"""The rules and the dashboard in ``deploy/``, by themselves and with a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import pytest
import yaml
from conftest import PATIENCE

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "cllm.rules.yml"
NAME = re.compile(r"\b(?:cllm:\w[\w:]*|process_\w+)")
NEED_MORE = ("Tokens by account", "GPUs")  # panels about what the test's server does not have
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def list_rules():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def list_panels():
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "cllm.json").read_text())
    targets = [(panel["title"], target) for panel in board["panels"] for target in panel["targets"]]
    return [(title, target["expr"].replace("$model", ".*")) for title, target in targets]


def list_expressions():
    return [rule["expr"] for rule in list_rules()] + [expr for _, expr in list_panels()]


@promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "cllm.rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "cllm.rules.test.yml"),
    ],
)
def test_promtool_accepts_the_files(arguments):
    done = subprocess.run(
        ["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once("--backend.name", "fake", "--context", "1024")


def use(server):
    body = {"prompt": "hello", "max_tokens": 8}
    assert server.client.post("/v1/completions", json=body).status_code == 200


def test_rules_and_dashboard_use_metrics_of_the_server(server):
    use(server)
    page = server.client.get("/metrics").text
    known = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    known |= {re.split(r"[{ ]", line)[0] for line in page.splitlines() if line[:1] != "#"}
    known |= {rule["record"] for rule in list_rules() if "record" in rule}
    known.add("cllm:account_tokens_total")  # of servers with accounts
    known |= {"cllm:gpu_busy_ratio", "cllm:gpu_memory_used_bytes", "cllm:gpu_memory_bytes"}
    used = {name for expression in list_expressions() for name in NAME.findall(expression)}
    assert len(used) > 20
    assert used <= known


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["monitoring"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            where = DEPLOY.parent / source
            assert where.exists() if source.startswith(".") else source in compose["volumes"]
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


@pytest.fixture
def prometheus(server, tmp_path):
    """The address of a Prometheus that scrapes the server every 200 ms, with the rules."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    config["global"]["scrape_timeout"] = "200ms"
    config["rule_files"] = [str(RULES)]
    target = server.url.removeprefix("http://")
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        binary,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(client, expression):
    """Return the values of an expression, which Prometheus must accept."""
    answer = client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    return [float(one["value"][1]) for one in answer.json()["data"]["result"]]


def test_prometheus_evaluates_all_expressions_of_a_server_under_load(server, prometheus):
    end = time.monotonic() + PATIENCE
    with httpx2.Client(base_url=prometheus, timeout=PATIENCE) as client:
        while True:
            assert time.monotonic() < end
            use(server)
            try:
                is_ready = client.get("/-/ready").status_code == 200
            except httpx2.TransportError:  # it has not started yet
                is_ready = False
            if is_ready and ask(client, "cllm:request_failures:ratio_rate5m") == [0.0]:
                break
            time.sleep(0.05)
        for expression in list_expressions():
            ask(client, expression)
        assert ask(client, 'up{job="cllm"}') == [1.0]
        for title, expression in list_panels():
            while title not in NEED_MORE and not ask(client, expression):
                assert time.monotonic() < end, title
                use(server)
        assert ask(client, "sum(rate(cllm:generation_tokens_total[1m]))")[0] > 0
        alerts = client.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in alerts for rule in group["rules"]]
        assert len(rules) == len(list_rules())
        assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
