"""Chromium, and pages of it that fail their test if they report an error or call another server."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright
from server.conftest import Server, running, starter

expect.set_options(timeout=PATIENCE * 1000)


def find_chromium(fetched: str) -> str:
    """Return the path of Chromium: the system's, or the one that Playwright has ``fetched``.

    Without one, the test fails in CI and is skipped elsewhere, and also where .ci/run could not
    fetch it.
    """
    path = shutil.which("chromium") or (fetched if Path(fetched).exists() else "")
    if path:
        return path
    reason = "Chromium is not installed: make browser fetches it"
    if os.environ.get("CI") and not os.environ.get("CLLM_TESTS_WITHOUT_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # which it refuses to have for root
    with sync_playwright() as playwright:
        path = find_chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(builtin_path: Path) -> Iterator[Server]:
    """A server with the built-in model."""
    yield from running("--context", "1024", "--max-num-seqs", "8")


@pytest.fixture(scope="session")
def endless_server() -> Iterator[Server]:
    """A fake server, see make_answers_endless."""
    yield from running("--backend.name", "fake", "--max-num-seqs", "4", "--context", "400000")


start_server = pytest.fixture(starter)


# A transaction that writes begins when those before it have ended.
WAIT_FOR_STORE = """() => new Promise((resolve, reject) => {
  const opening = indexedDB.open("cllm");
  opening.onerror = reject;
  opening.onsuccess = () => {
    const transaction = opening.result.transaction("conversations", "readwrite");
    transaction.oncomplete = () => resolve(opening.result.close());
    transaction.objectStore("conversations").count();
  };
})"""


class Visit:
    """A page of a server in a browser profile of its own.

    faults: errors in its console, and requests to other servers. expected_fault: a text in the
    errors that the test causes.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url, self.context = url, context
        self.faults: list[str] = []
        self.expected_fault = ""
        context.set_default_timeout(PATIENCE * 1000)
        context.on("console", lambda message: self._note(message.type, message.text))
        context.on("weberror", lambda error: self._note("error", str(error.error)))
        context.on("request", lambda request: self._check(request.url))
        self.page: Page = context.new_page()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith((f"{self.url}/", "blob:")):
            self.faults.append(f"a request to {url}")

    def check(self) -> None:
        assert [one for one in self.faults if not self._is_expected(one)] == []

    def _is_expected(self, fault: str) -> bool:
        return bool(self.expected_fault) and self.expected_fault in fault

    def ask(self, text: str) -> None:
        """Send a message, once the answer before is complete."""
        self.page.get_by_label("Message", exact=True).fill(text)
        expect(self.page.locator(".composer").get_by_role("button", name="Send")).to_be_enabled()
        self.page.keyboard.press("Enter")

    def make_answers_endless(self) -> None:
        """Let further answers of a fake server go on until its context is full. It then counts
        through all characters.
        """

        def change(route: Route) -> None:
            body = {**json.loads(route.request.post_data or "{}"), "ignore_eos": True}
            route.continue_(post_data=json.dumps(body))

        self.context.route("**/v1/chat/completions", change)

    def choose(self, name: str) -> None:
        """Choose an action in the menu of the open conversation."""
        entry = self.page.locator(".sidebar li.current")
        entry.get_by_role("button", name="Actions for").click()
        self.page.get_by_role("menuitem", name=name).click()

    def export_all(self) -> None:
        self.page.get_by_role("button", name="Import and export").click()
        self.page.get_by_role("menuitem", name="Export all").click()

    def import_conversations(self, *conversations: Any) -> None:
        """Import conversations, and open the first one that is listed."""
        file = {"format": "cllm-conversations", "version": 1, "conversations": conversations}
        self.import_file(json.dumps(file).encode())
        self.page.locator(".sidebar .title").first.click()

    def import_file(self, content: bytes) -> None:
        file = {"name": "a.json", "mimeType": "application/json", "buffer": content}
        self.page.locator(".sidebar input[type=file]").set_input_files(file)

    def stream(self, *deltas: Any) -> None:
        """Answer the next requests of chats with these deltas instead of the server."""
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                body=f"{events}data: [DONE]\n\n", content_type="text/event-stream"
            ),
        )

    def answers(self) -> Any:
        """Locate the texts of the answers."""
        return self.page.locator(".message.assistant .markdown")

    def wait_until_answered(self) -> None:
        expect(self.page.locator(".message").last).to_have_attribute("aria-busy", "false")
        expect(self.page.locator(".composer").get_by_role("button", name="Send")).to_be_visible()

    def reload(self) -> None:
        """Load the page again once the browser has stored all conversations."""
        self.page.evaluate(WAIT_FOR_STORE)
        self.page.reload()

    def set(self, **values: str) -> None:
        """Fill in settings by their labels; of lists, choose an option."""
        self.page.get_by_role("button", name="Settings").click()
        for label, value in values.items():
            field = self.page.get_by_role("dialog").get_by_label(label.replace("_", " "))
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(label=value)
            else:
                field.fill(value)
        self.page.get_by_role("button", name="Close", exact=True).click()


@pytest.fixture
def visit(chromium: Browser, start_server: Callable[..., Server]) -> Iterator[Callable[..., Visit]]:
    """Yield a function that opens the page of a server. Keyword arguments are those of a browser
    context, such as color_scheme. The pages are closed before the servers of ``start_server`` end.
    """
    visits = []

    def open_page(server: Server, **options: Any) -> Visit:
        made = Visit(chromium.new_context(**{"reduced_motion": "reduce", **options}), server.url)
        visits.append(made)
        made.page.goto(f"{server.url}/")
        expect(made.page.locator("main textarea")).to_be_visible()
        return made

    yield open_page
    for made in visits:
        made.context.close()
    for made in visits:
        made.check()
