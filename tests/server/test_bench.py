"""Load runs on a server, their reports and their comparison, on the fake backend."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import httpx2
import msgspec
import pytest
from conftest import PATIENCE
from starlette.responses import Response

from cllm.bench.load.client import Outcome
from cllm.bench.load.report import read_report, summarize
from cllm.config.settings import Settings
from cllm.core.request import Priority
from cllm.errors import StartupError
from cllm.server.access import LOAD_ACCOUNT, Access
from cllm.server.auth import ACCOUNT, Guard
from cllm.server.bench.messages import LoadPlan
from cllm.server.bench.runs import LoadRuns
from cllm.store.keys import AccountRecord, Key, KeyFile, check_name, hash_key, write_key_file
from cllm.store.reports import MAX_REPORTS, KeptReports

pytestmark = pytest.mark.slow

FAKE = ("--backend.name", "fake", "--server.benchmark", "--context", "8192")
WORKER = "cllm.cli.bench.worker"
SMALL = {"requests": 8, "concurrency": 2, "max_tokens": 4, "prompt_words": 4}
NOTHING = msgspec.to_builtins(summarize(Outcome([], 1.0, 0.1), url="u", model="m", settings={}))
ENDLESS = {"requests": 5000, "concurrency": 2, "max_tokens": 64, "prompt_words": 4}


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once(*FAKE)


@contextlib.contextmanager
def events(server):
    """Yield the states of the load run as they change."""
    with server.client.stream("GET", "/bench/run/events") as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def start(server, **body):
    answer = server.client.post("/bench/run", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run(server, **body):
    """Do a run, and return its last state."""
    start(server, **body)
    return wait(server)


def wait(server):
    with events(server) as states:
        *_, last = states
    return last


def wait_until_measuring(server):
    with events(server) as states:
        next(state for state in states if state["progress"]["output_tokens"])


def error(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# --- runs ----------------------------------------------------------------------------------------


def test_run_is_followed_and_its_report_kept(server, tmp_path):
    """The requests have the account and the class of load runs, and the report is what cllm bench
    load writes.
    """
    last = run(server, **SMALL, workload="chat", note="the first")
    assert (last["status"], last["reason"]) == ("completed", "")
    progress = last["progress"]
    assert (progress["num_done"], progress["num_planned"], progress["num_running"]) == (10, 10, 0)
    assert progress["num_succeeded"] == 8
    answer = server.client.get(f"/bench/reports/{last['report']}")
    (tmp_path / "report").write_bytes(answer.content)
    report = read_report(tmp_path / "report")
    assert (report.num_succeeded, report.note, report.model) == (8, "the first", "fake")
    assert report.settings["workload"] == "chat"
    latest = server.client.get("/bench/reports").json()["data"][0]
    assert latest["id"] == last["report"]
    assert latest["head"]["note"] == "the first"
    assert server.client.get("/bench/run").json()["run"] == last
    (usage,) = [
        day
        for day in server.client.get("/usage").json()["days"]
        if (day["account"], day["model"]) == ("(bench)", "fake")
    ]
    assert usage["requests"] >= 8
    server.wait_for_log("account=(bench) priority=batch")


def test_run_is_shown_by_the_live_view(server):
    start(server, **ENDLESS)
    with server.client.stream("GET", "/live/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and '"key":"(bench)"' in line:
                break
    server.client.delete("/bench/run")


def test_one_of_two_starts_is_refused(server):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        answers = list(
            threads.map(lambda _: server.client.post("/bench/run", json=ENDLESS), range(4))
        )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert len(server.children(WORKER)) <= 1
    server.client.delete("/bench/run")
    assert server.children(WORKER) == []


@pytest.mark.parametrize("waits", [False, True])
def test_cancelled_run_ends_its_process_and_its_requests(server, waits):
    before = len(server.client.get("/bench/reports").json()["data"])
    start(server, **ENDLESS)
    if waits:
        wait_until_measuring(server)
    cancelled = server.client.delete("/bench/run").json()["run"]
    assert (cancelled["status"], cancelled["reason"]) == ("cancelled", "It was cancelled.")
    assert server.children(WORKER) == []
    server.wait_until_idle()
    assert len(server.client.get("/bench/reports").json()["data"]) == before
    assert server.client.delete("/bench/run").json()["run"] == cancelled
    assert run(server, **SMALL)["status"] == "completed"


def test_run_cancelled_in_the_round_of_its_start_sends_nothing(tmp_path, monkeypatch):
    """Otherwise the cancellation would wait for the end of the whole run."""
    settings = Settings.model_validate({"storage": {"folder": str(tmp_path)}})
    registry = SimpleNamespace(metrics=MagicMock(), loaded=SimpleNamespace(draining=False))
    model = SimpleNamespace(name="m", is_loaded=True, origin=SimpleNamespace(num_loads=1))
    sent = AsyncMock(return_value=b"{}")
    monkeypatch.setattr("cllm.server.bench.runs.carry_out", sent)

    async def main():
        runs = LoadRuns(settings, registry, Access(settings), None)
        runs.start(model, LoadPlan(seconds=1.0))
        assert (await runs.cancel()).status == "cancelled"
        sent.assert_not_called()

    asyncio.run(main())


def test_run_ends_after_its_seconds(server):
    """Requests that have begun are answered, and count."""
    last = run(server, seconds=0.5, concurrency=2, max_tokens=8, prompt_words=4)
    assert last["status"] == "completed"
    report = server.client.get(f"/bench/reports/{last['report']}").json()
    assert 0 < report["num_succeeded"] == report["num_requests"] < 5000


def test_other_clients_are_served_first(start_server):
    """With one place, a client waits for one answer of the run, and not for those that wait."""
    server = start_server(*FAKE, "--max-num-seqs", "1")
    start(server, **{**ENDLESS, "concurrency": 64})
    wait_until_measuring(server)
    before = server.client.get("/bench/run").json()["run"]["progress"]["num_done"]
    body = {"prompt": "a", "max_tokens": 1}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    after = server.client.get("/bench/run").json()["run"]["progress"]["num_done"]
    assert after - before < 32
    server.client.delete("/bench/run")


def test_run_whose_requests_would_all_fail_says_why(server):
    last = run(server, prompt_words=8000, requests=10)
    assert last["status"] == "failed"
    assert "maximum context length" in last["reason"]
    assert last["report"] is None


def test_run_ends_with_the_model(start_server):
    server = start_server(*FAKE, "--server.allow-model-changes")
    start(server, **ENDLESS)
    wait_until_measuring(server)
    answer = server.client.post("/models/unload", json={"model": "fake"})
    assert answer.status_code == 200
    last = wait(server)
    assert (last["status"], last["reason"]) == ("failed", "The model fake has been unloaded.")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_process_ends_with_the_server(start_server, how):
    server = start_server(*FAKE)
    start(server, **ENDLESS)
    wait_until_measuring(server)
    (pid,) = server.children(WORKER)
    with events(server) as states:
        next(states)
        server.process.send_signal(how)
        if how == signal.SIGTERM:
            *_, last = states
            assert last["reason"] == "The server is shutting down."
    server.process.wait(PATIENCE)
    end = time.monotonic() + PATIENCE
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_killed_process_ends_the_run(server):
    start(server, **ENDLESS)
    wait_until_measuring(server)
    os.kill(server.children(WORKER)[0], signal.SIGKILL)
    last = wait(server)
    assert (last["status"], last["report"]) == ("failed", None)
    assert last["reason"].startswith("Its process has ended early")


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"requests": 0}, "requests", "greater than or equal to 1"),
        ({"requests": 10**30}, "requests", "5000"),
        ({"requests": 5000, "prompt_words": 8192}, "requests", "at most 122 requests"),
        ({"seconds": 0}, "seconds", "greater than 0"),
        ({"seconds": 1e308}, "seconds", "600"),
        ({"concurrency": 65}, "concurrency", "64"),
        ({"prompt_words": 100_000}, "prompt_words", "8192"),
        ({"max_tokens": -1}, "max_tokens", "1"),
        ({"scale": 2}, "scale", "1"),
        ({"seed": -1}, "seed", "0"),
        ({"workload": "overload"}, "workload", "'words'"),
        ({"note": "a\nb"}, "note", "pattern"),
        ({"note": "a" * 101}, "note", "100"),
        ({"model": "nothing"}, "model", "does not exist"),
    ],
)
def test_bounds_of_a_run(server, body, param, word):
    status = 404 if param == "model" else 400
    refused = error(server.client.post("/bench/run", json=body), status)
    assert refused["param"] == param
    assert word in refused["message"]


def test_workloads_of_users_run_on_small_models(server):
    sizes = {"scale": 0.01, "requests": 6, "concurrency": 2, "max_tokens": 2}
    last = run(server, workload="agents", **sizes)
    assert last["status"] == "completed", last["reason"]
    report = server.client.get(f"/bench/reports/{last['report']}").json()
    assert report["parts"].keys() == {"first turns", "later turns"}


# --- access --------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/bench/run"),
    ("POST", "/bench/run"),
    ("DELETE", "/bench/run"),
    ("GET", "/bench/run/events"),
    ("GET", "/bench/reports"),
    ("POST", "/bench/reports"),
    ("GET", "/bench/reports/x"),
    ("DELETE", "/bench/reports/x"),
    ("GET", "/bench/reports/x/compare/y"),
]


def test_load_runs_are_off_by_default(fake_server):
    for method, path in ROUTES:
        refused = error(fake_server.client.request(method, path), 403)
        assert refused["code"] == "bench_disabled"
        assert "server.benchmark" in refused["message"]


def test_load_runs_need_an_administrators_key_and_have_a_key_of_their_own(start_server, tmp_path):
    accounts = {
        name: AccountRecord(keys=(Key(hash_key(name), 0),), admin=name == "root")
        for name in ("root", "ann")
    }
    keys = tmp_path / "keys.json"
    write_key_file(keys, KeyFile(accounts=accounts))
    # hosts are checked, and only others than this machine's are allowed
    hosts = ("--server.allowed-hosts", "example.com")
    server = start_server(*FAKE, *hosts, CLLM_SERVER_KEYS_FILE=str(keys))
    server.client.headers["host"] = "example.com"
    assert server.client.get("/bench").status_code == 200
    for method, path in ROUTES:
        assert error(server.client.request(method, path), 401)
        ann = server.client.request(method, path, headers={"authorization": "Bearer ann"})
        assert error(ann, 403)["code"] == "admin_required"
        assert server.client.request(method, f"/v1{path}").status_code in (401, 404)
    server.client.headers["authorization"] = "Bearer root"
    last = run(server, **SMALL)
    assert last["status"] == "completed", last["reason"]
    start(server, **ENDLESS)
    wait_until_measuring(server)
    (pid,) = server.children(WORKER)
    command = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert b"sk-cllm" not in command
    assert "sk-cllm" not in server.log
    server.client.delete("/bench/run")


def test_key_of_a_run_is_for_its_requests_only():
    """Neither other routes nor other runs accept it."""

    async def ask(access, path, key):
        """Return the status of a request, and its account."""
        seen = []

        async def app(scope, receive, send):
            seen.append(scope.get(ACCOUNT))

        def answer(request, error):
            seen.append(type(error).__name__)
            return Response()

        headers = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"elsewhere")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {}}
        guard = Guard(app, access, settings, answer)
        await guard({**scope, "query_string": b""}, None, AsyncMock())
        return seen[0]

    settings = Settings.model_validate({"server": {"api_key": "operator"}})
    access = Access(settings)

    async def main():
        access.load_key = "sk-cllm-run"
        assert await ask(access, "/v1/chat/completions", "sk-cllm-run") is LOAD_ACCOUNT
        assert await ask(access, "/v1/models", "sk-cllm-run") is LOAD_ACCOUNT
        for path in ("/bench/run", "/usage", "/v1/completions", "/models/unload"):
            assert await ask(access, path, "sk-cllm-run") == "BadRequest"
        for key in ("sk-cllm-rum", "", "\u00e9"):
            assert await ask(access, "/v1/models", key) == "Unauthorized"
        access.load_key = ""
        for key in ("sk-cllm-run", ""):
            assert await ask(access, "/v1/models", key) == "Unauthorized"

    asyncio.run(main())
    assert (LOAD_ACCOUNT.priority, LOAD_ACCOUNT.is_admin) == (Priority.BATCH, False)
    with pytest.raises(StartupError):
        check_name(LOAD_ACCOUNT.name)


def test_server_with_tls_and_another_name(start_server, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    chain, key = str(tmp_path / "chain"), str(tmp_path / "key")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command = [*words.split(), "-subj", "/CN=example.com", "-out", chain, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    server = start_server(*FAKE, "--server.tls-certificate", chain, "--server.tls-key", key)
    server.client = httpx2.Client(
        base_url=server.url, timeout=PATIENCE, verify=False
    )  # not of an authority
    assert run(server, **SMALL)["status"] == "completed"


# --- reports -------------------------------------------------------------------------------------


def test_reports_are_uploaded_compared_and_deleted(server):
    first = run(server, **SMALL)["report"]
    content = server.client.get(f"/bench/reports/{first}").json()
    slow = {
        **content,
        "ttft_ms": {name: 1000 * ms for name, ms in content["ttft_ms"].items()},
        "percentiles_ms": {
            **content["percentiles_ms"],
            "ttft": [1000 * ms for ms in content["percentiles_ms"]["ttft"]],
        },
        "settings": {**content["settings"], "seed": -5},
    }
    formatted = json.dumps(slow, indent=2)
    headers = {"content-type": "application/json"}
    other = server.client.post("/bench/reports", content=formatted, headers=headers).json()["id"]
    assert server.client.get(f"/bench/reports/{other}").json() == slow
    compared = server.client.get(f"/bench/reports/{first}/compare/{other}").json()
    seed = content["settings"]["seed"]
    assert compared["settings"] == [f"seed: {seed} before, -5 after"]
    figures = {one["name"]: one for one in compared["figures"]}
    assert figures["TTFT p50 ms"]["ratio"] == pytest.approx(1000)
    assert figures["TTFT p50 ms"]["differ"] is True
    assert figures["E2E p50 ms"]["differ"] is False
    assert server.client.delete(f"/bench/reports/{other}").json() == {"id": other, "deleted": True}
    for method, path in (
        ("GET", f"/bench/reports/{other}"),
        ("DELETE", f"/bench/reports/{other}"),
        ("GET", f"/bench/reports/{first}/compare/{other}"),
    ):
        assert error(server.client.request(method, path), 404)["code"] == "report_not_found"


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff", 400, "JSON"),
        (b"[" * 100_000, 400, "JSON"),
        (b"[]", 400, "not a report"),
        (b'{"model": "m"}', 400, "missing required field"),
        (b'"' + b"a" * 1_000_001 + b'"', 413, "larger than"),
        (json.dumps(NOTHING | {"note": "a" * 200_000}).encode(), 413, "200000 bytes"),
        (json.dumps(NOTHING | {"settings": {"workload": ["a"]}}).encode(), 400, "workload"),
    ],
)
def test_only_reports_can_be_uploaded(server, content, status, word):
    headers = {"content-type": "application/json"}
    answer = server.client.post("/bench/reports", content=content, headers=headers)
    assert word in error(answer, status)["message"]


@pytest.mark.parametrize("name", ["x", "..%2f..%2fkeys", "20261129-061234-0000000g", "a" * 5000])
def test_other_names_are_no_reports(server, name):
    for method in ("GET", "DELETE"):
        assert error(server.client.request(method, f"/bench/reports/{name}"), 404)


def test_damaged_files_do_no_harm(start_server, tmp_path):
    """A server shows the others, says which ones are damaged, and lets them be deleted."""
    folder = tmp_path / "bench"
    folder.mkdir()
    damaged = {
        "20260101-000000-00000001": b"",
        "20260101-000000-00000002": b"\x00\xff",
        "20260101-000000-00000003": b"[" * 100_000,
        "20260101-000000-00000004": b"{}",
        "20260101-000000-00000005": b" " * 2_000_000,
    }
    for name, content in damaged.items():
        (folder / f"{name}.json").write_bytes(content)
    for other in ("notes.txt", "a.json", "99999999-000000-00000000.json"):
        (folder / other).write_text("{}")
    server = start_server(*FAKE, CLLM_STORAGE_FOLDER=str(tmp_path))
    report = run(server, **SMALL)["report"]
    listed = server.client.get("/bench/reports").json()["data"]
    assert [one["id"] for one in listed] == [report, *sorted(damaged, reverse=True)]
    assert [one["head"] is None for one in listed] == [False] + [True] * len(damaged)
    for name in damaged:
        for path in (f"/bench/reports/{name}", f"/bench/reports/{report}/compare/{name}"):
            assert error(server.client.get(path), 409)["code"] == "report_damaged"
        assert server.client.delete(f"/bench/reports/{name}").status_code == 200
    server.stop()
    again = start_server(*FAKE, CLLM_STORAGE_FOLDER=str(tmp_path))
    assert [one["id"] for one in again.client.get("/bench/reports").json()["data"]] == [report]


def test_folder_that_cannot_be_used(start_server, tmp_path):
    """Lists say so, and a run ends with the reason."""
    (tmp_path / "bench").write_text("not a folder")
    server = start_server(*FAKE, CLLM_STORAGE_FOLDER=str(tmp_path))
    for path in ("/bench/reports", "/bench/reports/20260101-000000-00000001"):
        answer = server.client.get(path)
        assert answer.status_code in (200, 503), answer.text
        assert answer.status_code == 503 or answer.json()["data"] == []
    last = run(server, **SMALL)
    assert (last["status"], last["report"]) == ("failed", None)
    assert last["reason"].startswith("Its report was not stored: ")


def test_run_that_sends_nothing_and_watchers_that_leave(server):
    last = run(server, **SMALL, seconds=1e-9)
    assert last["status"] == "completed"
    report = server.client.get(f"/bench/reports/{last['report']}").json()
    assert report["num_requests"] == 0
    start(server, **ENDLESS)
    for _ in range(50):
        with events(server) as states:
            next(states)
    assert server.client.delete("/bench/run").json()["run"]["status"] == "cancelled"


def test_server_without_a_folder_has_no_load_runs(start_server, tmp_path):
    (tmp_path / "settings.yaml").write_text("storage: {folder: null}\n")
    server = start_server(
        *FAKE, "--config", str(tmp_path / "settings.yaml"), CLLM_STORAGE_FOLDER="null"
    )
    assert error(server.client.post("/bench/run", json={}), 404)["code"] == "storage_off"


def test_oldest_reports_are_removed(tmp_path):
    reports = KeptReports(tmp_path)
    content = b'{"model":"m","settings":{},"num_requests":1,"num_succeeded":1,"wall_s":1,"output_tokens_per_s":1}'
    old = tmp_path / "20200101-000000-00000000.json"
    old.write_bytes(content)
    for _ in range(MAX_REPORTS):
        reports.add(content)
    assert len(reports.list_all()) == MAX_REPORTS
    assert not old.exists()


def test_help_of_the_option_names_the_page():
    field = type(Settings().server).model_fields["benchmark"]
    assert "/bench" in (field.description or "")
