"""The page of load runs at /bench, on the fake backend."""

import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from server.conftest import Server
from ui.conftest import Visit

pytestmark = [pytest.mark.slow, pytest.mark.llama]

FAKE = ("--backend.name", "fake", "--server.benchmark")
SMALL = {"Clients": "2", "Requests": "8", "Words of a prompt": "4", "Tokens of an answer": "4"}
ENDLESS = {**SMALL, "Requests": "5000", "Tokens of an answer": "64"}


@pytest.fixture
def open_bench(chromium, start_server):
    """Yield a function that opens /bench of a server. At the end, its console must be without
    errors, and all requests must have been to the server.
    """
    visits = []

    def open_page(server: Server, **options: object) -> Visit:
        made = Visit(chromium.new_context(**options), server.url)
        visits.append(made)
        made.page.goto(f"{server.url}/bench")
        return made

    yield open_page
    for made in visits:
        made.context.close()
        made.check()


def fill(page, **fields):
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)


def state(page):
    return page.locator(".run").get_by_role("status")


def do_run(page, note=""):
    """Do a small run, and wait until its report is shown."""
    fill(page, **SMALL, Note=note)
    page.get_by_role("button", name="Start").click()
    report = page.get_by_role("region", name="Report", exact=True)
    expect(report.get_by_role("heading", name=note)).to_be_visible()
    expect(state(page)).to_have_text("completed")


def test_run_is_started_followed_and_its_report_shown(open_bench, start_server):
    page = open_bench(start_server(*FAKE)).page
    expect(page.get_by_text("There is no report yet.")).to_be_visible()
    page.get_by_label("Workload").select_option("chat")
    expect(page.get_by_text("with lengths that vary")).to_be_visible()
    do_run(page, "the first")
    report = page.get_by_role("region", name="Report", exact=True)
    expect(report).to_contain_text("8 of 8 requests succeeded")
    expect(report.get_by_role("img", name="TTFT. the first: half within")).to_be_visible()
    expect(report.get_by_role("img", name="ITL. the first")).to_be_visible()
    expect(report.get_by_role("row", name="E2E")).to_be_visible()
    report.get_by_text("Settings").click()
    expect(report).to_contain_text("workloadchat")
    entry = page.get_by_role("checkbox", name="the first")
    entry.uncheck()
    expect(report).to_be_hidden()
    page.reload()
    expect(entry).not_to_be_checked()
    expect(state(page)).to_have_text("completed")


def test_running_run_is_shown_after_a_reload_and_can_be_cancelled(open_bench, start_server):
    visit = open_bench(start_server(*FAKE))
    page = visit.page
    fill(page, **ENDLESS)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("of 5002 requests, with the warm-up")).to_be_visible()
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    page.reload()
    expect(page.get_by_role("img", name="output tokens per second")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(state(page)).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    expect(page.get_by_text("There is no report yet.")).to_be_visible()


def test_faults_are_shown(open_bench, start_server):
    """A run that another page has started meanwhile, and one that fails."""
    server = start_server(*FAKE, "--context", "256")
    visit = open_bench(server)
    visit.expected_fault = "409"
    page = visit.page
    body = {"requests": 5000, "prompt_words": 4, "max_tokens": 64}

    others = []

    def start_before(route):
        if route.request.method == "POST" and not others:
            others.append(server.client.post("/bench/run", json=body).status_code)
        route.continue_()

    expect(page.get_by_text("There is no report yet.")).to_be_visible()
    fill(page, **ENDLESS)
    page.route("**/bench/run", start_before)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("alert")).to_contain_text("Another load run is running")
    assert others == [200]
    page.get_by_role("button", name="Cancel").click()
    expect(state(page)).to_have_text("cancelled")
    fill(page, **{**SMALL, "Words of a prompt": "8000"})
    page.get_by_role("button", name="Start").click()
    expect(state(page)).to_have_text("failed")
    expect(page.locator(".run")).to_contain_text("maximum context length")


def test_reports_are_compared_downloaded_uploaded_and_deleted(open_bench, start_server, tmp_path):
    page = open_bench(start_server(*FAKE)).page
    do_run(page, "one")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download one").click()
    report = json.loads(download.value.path().read_text())
    report["note"] = "slow"
    report["percentiles_ms"]["ttft"] = [1000 * ms for ms in report["percentiles_ms"]["ttft"]]
    for name in report["ttft_ms"]:
        report["ttft_ms"][name] *= 1000
    (tmp_path / "slow.json").write_text(json.dumps(report, indent=2))
    page.get_by_label("Report to upload").set_input_files(tmp_path / "slow.json")
    expect(page.get_by_role("checkbox", name="slow")).to_be_checked()
    page.get_by_role("checkbox", name="one").check()
    compared = page.get_by_role("region", name="Comparison")
    expect(compared).to_contain_text("before: one")
    expect(compared).to_contain_text("after: slow")
    row = compared.get_by_role("row", name="TTFT p50 ms")
    expect(row).to_contain_text("1000.000")
    expect(row).to_contain_text("yes")
    expect(compared.get_by_role("row", name="E2E p50 ms")).to_contain_text("no")
    expect(compared.get_by_role("img", name="TTFT. before: one")).to_be_visible()
    page.get_by_role("button", name="Delete slow").click()
    expect(page.get_by_role("checkbox")).to_have_count(1)
    expect(page.get_by_role("region", name="Report", exact=True)).to_be_visible()


def test_wrong_upload_says_why(open_bench, start_server):
    visit = open_bench(start_server(*FAKE))
    visit.expected_fault = "400"
    page = visit.page
    for content, word in ((b"{", "no valid JSON"), (b"{}", "missing required field")):
        file = {"name": "x.json", "mimeType": "application/json", "buffer": content}
        page.get_by_label("Report to upload").set_input_files(file)
        expect(page.get_by_role("alert")).to_contain_text(word)


def test_texts_of_reports_cannot_run_as_scripts_and_damaged_ones_can_be_deleted(
    open_bench, start_server, tmp_path
):
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "20260101-000000-00000001.json").write_text("{")
    evil = "<img src=x onerror=alert(1)>"
    head = {"model": evil, "note": evil, "settings": {"workload": evil, "a": {"b": [1]}}}
    numbers = dict.fromkeys(("num_requests", "num_succeeded", "wall_s", "output_tokens_per_s"), 1)
    wrong = {"percentiles_ms": {"ttft": ["a"] * 101, "itl": 5}, "failures": {evil: 1}}
    content = json.dumps({**head, **numbers, **wrong})
    (folder / "20260101-000000-00000002.json").write_text(content)
    page = open_bench(start_server(*FAKE, CLLM_STORAGE_FOLDER=str(tmp_path))).page
    expect(page.get_by_text("The file is damaged.")).to_be_visible()
    expect(page.get_by_role("checkbox").last).to_be_disabled()
    page.get_by_role("checkbox").first.check()
    expect(page.get_by_role("region", name="Report", exact=True)).to_contain_text(evil)
    page.get_by_role("button", name="Delete").last.click()
    expect(page.get_by_role("checkbox")).to_have_count(1)


def test_connection_that_is_lost_is_found_again(open_bench, start_server):
    server = start_server(*FAKE)
    visit = open_bench(server)
    visit.expected_fault = "net::ERR"
    page = visit.page
    fill(page, **ENDLESS)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("of 5002 requests")).to_be_visible()
    server.stop()
    expect(state(page)).to_have_text("failed")
    expect(page.locator(".run")).to_contain_text("The server is shutting down.")


def test_key_is_asked_for(open_bench, start_server):
    visit = open_bench(start_server(*FAKE, CLLM_API_KEY="secret"))
    visit.expected_fault = "401"
    page = visit.page
    field = page.get_by_label("Key of an administrator")
    field.fill("secret")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_text("There is no report yet.")).to_be_visible()
    expect(field).to_be_hidden()


def test_page_of_a_server_without_load_runs_says_so(open_bench, start_server):
    visit = open_bench(start_server("--backend.name", "fake"))
    visit.expected_fault = "403"
    expect(visit.page.get_by_role("alert")).to_contain_text("server.benchmark")
    expect(visit.page.get_by_role("button")).to_have_count(0)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_links_are_shown_if_load_runs_are_enabled(visit, start_server, is_enabled):
    server = start_server(*FAKE[: None if is_enabled else 2])
    chat = visit(server)
    chat.expected_fault = "ERR_INCOMPLETE_CHUNKED_ENCODING"  # the server ends before the page
    page = chat.page
    expect(page.get_by_role("link", name="Load runs")).to_have_count(int(is_enabled))
    page.goto(f"{server.url}/live")
    expect(page.get_by_role("status")).to_contain_text("Ready")
    expect(page.get_by_role("link", name="Load runs")).to_have_count(int(is_enabled))


def test_keyboard_reaches_everything(open_bench, start_server):
    page = open_bench(start_server(*FAKE)).page
    do_run(page, "one")
    page.get_by_role("checkbox", name="one").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("region", name="Report", exact=True)).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Download one")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("checkbox")).to_have_count(0)
    page.get_by_label("Note").focus()
    page.keyboard.press("Enter")
    expect(state(page)).to_have_text("completed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_has_no_accessibility_faults_and_fits_the_screen(
    open_bench, start_server, scheme, width, tmp_path
):
    view = {"width": width, "height": 844}
    page = open_bench(start_server(*FAKE), color_scheme=scheme, viewport=view).page

    def check():
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()

    do_run(page, "a note that is rather long, so that it needs more than one line on a phone")
    check()
    do_run(page, "two")
    page.get_by_role("checkbox", name="a note").check()
    expect(page.get_by_role("region", name="Comparison")).to_be_visible()
    check()
    fill(page, **ENDLESS)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("img", name="output tokens per second")).to_be_visible()
    check()
