"""The live view at /live, on the fake backend."""

import contextlib
import json
import os
import signal
import threading
import time

import httpx2
import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import PATIENCE
from playwright.sync_api import expect
from ui.conftest import Visit

from cllm.scheduler.trace import SequenceState
from cllm.server.live.schema import EngineState, Latencies, ModelState, QueueEntry, Snapshot
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

pytestmark = [pytest.mark.slow, pytest.mark.llama]

SMALL = ("--backend.name", "fake", "--max-num-seqs", "2", "--context", "32768")
# the built-in model with cells for about four texts as long as the context
SMALL_POOL = ("--kv.layout", "unified", "--kv.max-memory-mb", "1", "--context", "256")
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture
def watch(chromium, start_server):
    """Yield a function that opens the live view of a server. At the end, its console must be
    without errors, and all requests must have been to the server.
    """
    visits = []

    def open_view(server, **options):
        made = Visit(chromium.new_context(**options), server.url)
        visits.append(made)
        made.page.goto(f"{server.url}/live")
        return made

    yield open_view
    for made in visits:
        made.context.close()
        made.check()


@contextlib.contextmanager
def requests(server, count, **body):
    """Let ``count`` requests be computed, or wait, meanwhile."""
    limits = httpx2.Limits(max_connections=None)
    with (
        httpx2.Client(base_url=server.url, timeout=PATIENCE, limits=limits) as client,
        contextlib.ExitStack() as stack,
    ):
        for number in range(count):
            own = {"prompt": f"{number} private text", "user": f"u{number}", **ENDLESS, **body}
            stack.enter_context(client.stream("POST", "/v1/completions", json=own))
        yield


def rows(view):
    return view.page.locator("#names button")


def test_waiting_request_shows_its_reason_and_prompts_are_not_shown(watch, start_server):
    server = start_server(*SMALL)
    view = watch(server)
    expect(view.page.get_by_role("status")).to_contain_text("Ready")
    expect(view.page.get_by_text("No request is being computed.")).to_be_visible()
    with requests(server, 3):
        expect(rows(view)).to_have_count(3)
        waiting = rows(view).filter(has_text="waits")
        expect(waiting).to_have_count(1)
        expect(waiting).to_contain_text("all 2 places are in use (scheduler.max_num_seqs)")
        waiting.click()
        detail = view.page.get_by_role("region", name="Request", exact=True)
        expect(detail).to_contain_text("because all 2 places are in use")
        expect(detail).to_contain_text("Timelinequeued")
        expect(view.page.locator("#queue")).to_contain_text("user-u2")
        assert "private" not in view.page.content()
    expect(view.page.get_by_text("No request is being computed.")).to_be_visible()


def test_parked_request_is_shown_when_the_pool_is_small(watch, start_server, builtin_path):
    server = start_server(*SMALL_POOL, "--max-num-seqs", "8", "--server.enable-faults")
    slow = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.04}
    server.client.post("/faults", json={"faults": [slow]})
    view = watch(server)
    with requests(server, 8, max_tokens=230):
        parked = rows(view).filter(has_text="parked for").first
        parked.click()
        detail = view.page.get_by_role("region", name="Request", exact=True)
        expect(detail).to_contain_text("Parkedonce")
        expect(detail).to_contain_text("parked")


def test_two_engines_are_shown_and_the_restart_of_one(watch, start_server):
    server = start_server(*SMALL, "--engine.count", "2")
    view = watch(server)
    engines = view.page.locator(".engine")
    expect(engines).to_have_count(2)
    for number in range(2):
        expect(engines.nth(number)).to_contain_text(f"engine {number}: ready")
    with requests(server, 2):
        for number in range(2):
            expect(engines.nth(number)).to_contain_text("1 running")
        os.kill(server.children("cllm.process.child")[0], signal.SIGKILL)
        expect(view.page.locator(".engine", has_text="restarts: 1")).to_have_count(1)
        expect(view.page.locator(".engine", has_text="not ready")).to_have_count(0)


def test_pause_keeps_the_past_which_can_be_exported(watch, start_server):
    server = start_server(*SMALL)
    view = watch(server)
    with requests(server, 1):
        expect(rows(view)).to_have_count(1)
        view.page.get_by_role("button", name="Pause").click()
        expect(view.page.locator("#when")).to_contain_text("s ago")
    server.wait_until_idle()
    expect(rows(view)).to_have_count(1)
    with view.page.expect_download() as download:
        view.page.get_by_role("button", name="Export").click()
    content = json.loads(download.value.path().read_text())
    assert content["format"] == "cllm-live"
    assert any(one["models"][0]["num_requests"] for one in content["snapshots"])
    view.page.get_by_role("button", name="Continue").click()
    expect(rows(view)).to_have_count(0)
    slider = view.page.get_by_label("Seconds back")
    slider.fill("-300")  # as far as it goes
    expect(view.page.get_by_role("button", name="Continue")).to_be_visible()


def test_key_is_asked_for(watch, start_server):
    server = start_server(*SMALL, CLLM_API_KEY="secret")
    view = watch(server)
    view.expected_fault = "401"
    field = view.page.get_by_label("Key of an administrator")
    field.fill("secret")
    view.page.get_by_role("button", name="Watch").click()
    expect(view.page.get_by_role("status")).to_contain_text("Ready")
    expect(field).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_view_has_no_accessibility_faults_and_fits_the_screen(watch, start_server, scheme, width):
    server = start_server(*SMALL)
    view = watch(server, color_scheme=scheme, viewport={"width": width, "height": 844})
    with requests(server, 3):
        waiting = rows(view).filter(has_text="waits")
        expect(waiting).to_have_count(1)
        waiting.click()
        expect(view.page.get_by_role("region", name="Request", exact=True)).to_be_visible()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        results = Axe().run(view.page)
        assert results.violations_count == 0, results.generate_report()


COUNT_DRAWINGS = """() => {
  window.numDrawings = 0;
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    window.numDrawings += this.canvas.id === "bars";
    return clear.apply(this, box);
  };
}"""


def test_64_sequences_move_smoothly(watch, start_server):
    """At least 25 drawings in a second, unless the machine is busy with something else."""
    server = start_server(
        *("--backend.name", "fake", "--max-num-seqs", "64", "--context", "4096"),
        "--server.enable-faults",
    )
    slow = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.1}
    server.client.post("/faults", json={"faults": [slow]})
    view = watch(server, viewport={"width": 1280, "height": 800})
    view.page.evaluate(COUNT_DRAWINGS)
    with requests(server, 64, max_tokens=4000):
        expect(rows(view)).to_have_count(64)
        expect(rows(view).filter(has_text="tokens/s")).to_have_count(64)
        end, rates = time.monotonic() + PATIENCE, []
        while not rates or (rates[-1] < 25 and time.monotonic() < end):
            rates.append(
                view.page.evaluate(
                    """async () => {
                        const [before, begun] = [window.numDrawings, performance.now()];
                        await new Promise((resolve) => setTimeout(resolve, 1000));
                        return (1000 * (window.numDrawings - before)) / (performance.now() - begun);
                    }"""
                )
            )
        assert rates[-1] >= 25, rates


@pytest.fixture
def start_cluster(start_server, monkeypatch):
    """Return a function that starts two replicas whose steps take a while, and their front."""
    monkeypatch.setenv("CLLM_CLUSTER_KEY", "the-key-of-the-test-cluster")

    def start():
        replicas = [start_server(*SMALL, "--server.enable-faults") for _ in range(2)]
        slow = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.05}
        for one in replicas:
            one.client.post("/faults", json={"faults": [slow]})
        urls = ",".join(one.url for one in replicas)
        return start_server("--urls", urls, command=("cluster", "front")), replicas

    return start


@contextlib.contextmanager
def reading(server, count):
    """Let ``count`` streams be read meanwhile."""
    is_over = threading.Event()

    def read(number):
        body = {"prompt": f"{number} private text", **ENDLESS}
        with (
            contextlib.suppress(httpx2.HTTPError),
            httpx2.Client(base_url=server.url, timeout=PATIENCE) as client,
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


def find_names(replicas):
    key = {"x-cllm-cluster-key": "the-key-of-the-test-cluster"}
    leases = [one.client.get("/internal/lease", headers=key).json() for one in replicas]
    return [lease["name"] for lease in leases]


@pytest.mark.parametrize("width", [390, 1280])
def test_front_shows_all_replicas_and_what_becomes_of_one_that_is_killed(
    watch, start_cluster, width
):
    front, replicas = start_cluster()
    first, second = find_names(replicas)
    view = watch(front, viewport={"width": width, "height": 844})
    table = view.page.locator("#replicas tbody tr")
    expect(table).to_have_count(2)
    for name in (first, second):
        expect(table.filter(has_text=name)).to_contain_text("ready")
        expect(view.page.locator(".engine", has_text=name)).to_contain_text("engine 0: ready")
        expect(view.page.locator("#models")).to_contain_text(f"{name}: fake")
    with reading(front, 4):
        expect(rows(view)).to_have_count(4)
        moving = rows(view).filter(has_text=first).first
        expect(rows(view).filter(has_text=second).first).to_be_visible()
        expect(moving).to_contain_text("tokens/s")
        moving.click()
        detail = view.page.get_by_role("region", name="Request", exact=True)
        expect(detail).to_contain_text(f"Replica{first}")
        replicas[0].stop(signal.SIGKILL)
        expect(table.filter(has_text=first)).to_contain_text("lost: cannot connect")
        expect(detail).to_contain_text(f"Replica{second}")
        expect(detail).to_contain_text(f"{first} ended in the middle of its answer")
        expect(detail).to_contain_text(f"{second} has continued it for")
        expect(rows(view).filter(has_text=first)).to_have_count(0)
        expect(rows(view).filter(has_text=second)).to_have_count(4)
        assert "private" not in view.page.content()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        results = Axe().run(view.page)
        assert results.violations_count == 0, results.generate_report()


def test_loading_model_shows_its_progress_and_names_cannot_run_scripts(watch, start_server):
    hostile = "<img src=x onerror='window.hacked = 1'>"
    model = ModelState(hostile, "loading", 0.4, 0, 1, 0.0, 0.0, [], [])
    queued = QueueEntry("normal", hostile, 1, 7)
    waiting = SequenceState("a.0", hostile, "normal", "queued", 1.0, 1.0, 7, reason=hostile)
    zeros = dict.fromkeys(EngineState.__struct_fields__, 0)
    engine = EngineState(**zeros | {"stage_ms": {}, "steps": [], "sequences": [waiting]})
    model = msgspec.structs.replace(model, engines=[engine], queue=[queued])
    event = msgspec.json.encode(Snapshot(time.time(), "0", False, [model], Latencies()))
    server = start_server(*SMALL)
    view = watch(server)
    view.page.route(
        "**/live/events",
        lambda route: route.fulfill(
            body=b"data: " + event + b"\n\n", content_type="text/event-stream"
        ),
    )
    view.page.reload()
    expect(view.page.locator("#models tbody")).to_contain_text("loading, 40 %")
    expect(view.page.get_by_role("status")).to_contain_text("Connecting again")
    expect(view.page.locator(".engine")).to_contain_text("not ready")
    rows(view).click()
    expect(view.page.get_by_role("region", name="Request", exact=True)).to_contain_text(hostile)
    assert view.page.locator("main img").count() == 0
    assert view.page.evaluate("window.hacked") is None


def test_page_and_live_view_lead_to_each_other(visit, server):
    chat = visit(server)
    with chat.context.expect_page() as opened:
        chat.page.get_by_role("link", name="Live view").click()
    live = opened.value
    expect(live.get_by_role("status")).to_contain_text("Ready")
    live.get_by_role("link", name="Chat").click()
    expect(live.get_by_label("Message", exact=True)).to_be_visible()


def test_live_view_gets_the_key_of_the_page_and_only_administrators_see_the_link(
    visit, start_server, tmp_path
):
    records = {
        name: AccountRecord(keys=(Key(hash_key(f"{name}-key"), 0),), admin=name == "root")
        for name in ("root", "ann")
    }
    write_key_file(tmp_path / "keys.json", KeyFile(accounts=records))
    keys = str(tmp_path / "keys.json")
    chat = visit(start_server(*SMALL, CLLM_SERVER_KEYS_FILE=keys))
    chat.expected_fault = "Failed to load resource"  # before the key is known
    link = chat.page.get_by_role("link", name="Live view")
    for name in ("ann", "root"):
        if name == "root":
            chat.page.get_by_role("button", name="API key").click()
        chat.page.locator("input[name=key]").fill(f"{name}-key")
        chat.page.get_by_role("button", name="Save").click()
        expect(chat.page.get_by_label("Model", exact=True)).to_be_enabled()
        expect(link).to_have_count(int(name == "root"))
    with chat.context.expect_page() as opened:
        link.click()
    expect(opened.value.get_by_role("status")).to_contain_text("Ready")


def test_prompt_is_shown_if_an_administrator_wants_that(watch, start_server):
    server = start_server(*SMALL, "--server.live-prompts")
    view = watch(server)
    with requests(server, 1):
        rows(view).first.click()
        detail = view.page.get_by_role("region", name="Request", exact=True)
        expect(detail).to_contain_text("End of the prompt0 private text")
