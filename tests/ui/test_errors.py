"""What the page shows when something fails."""

import json
import re
import signal

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]

SUM = "What is 27 plus 45?"
FAILED = "Failed to load resource"  # Chromium's line for each answer that is an error


def test_server_with_keys_asks_for_one(visit, start_server):
    server = start_server("--context", "1024", "--max-num-seqs", "2", "--api-key", "the-key")
    chat = visit(server)
    chat.expected_fault = FAILED
    dialog = chat.page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_role("alert")).to_contain_text("needs an API key")
    expect(dialog.get_by_label("Key")).to_be_focused()
    chat.page.keyboard.type("wrong")
    chat.page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("The API key is not valid.")
    expect(dialog.get_by_label("Key")).to_be_focused()
    dialog.get_by_label("Key").fill("the-key")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    expect(chat.page.get_by_label("Model", exact=True)).to_have_value("cllm-builtin")
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    chat.ask(SUM)
    expect(chat.answers()).to_have_text("72")
    assert "the-key" not in chat.page.evaluate("JSON.stringify(localStorage)")
    chat.page.get_by_role("link", name="API", exact=True).click()
    expect(chat.page.locator("summary").first).to_be_visible()  # the reference, with the key
    chat.page.go_back()
    chat.page.get_by_role("button", name="API key").click()
    dialog.get_by_label("Remember").check()
    dialog.get_by_role("button", name="Save").click()
    other = chat.context.new_page()
    other.goto(chat.url)
    expect(other.get_by_label("Model", exact=True)).to_have_value("cllm-builtin")


def test_request_is_repeated_when_the_queue_has_room(visit, server):
    chat = visit(server)
    chat.expected_fault = FAILED
    seen = []

    def refuse_once(route):
        seen.append((route.request.post_data, route.request.headers.get("x-cllm-retry-ticket")))
        if len(seen) > 1:
            route.continue_()
            return
        error = {"message": "The queue is full.", "type": "requests", "code": "queue_full"}
        route.fulfill(
            status=429,
            json={"error": error},
            headers={"retry-after": "2", "x-cllm-retry-ticket": "ticket-1"},
        )

    chat.page.route("**/v1/chat/completions", refuse_once)
    chat.ask(SUM)
    expect(chat.page.locator(".status")).to_have_text("The queue is full. Next try in 2 s.")
    expect(chat.answers()).to_have_text("72")
    (first, no_ticket), (second, ticket) = seen
    assert first == second
    assert (no_ticket, ticket) == (None, "ticket-1")


def test_stop_ends_the_wait_for_a_full_queue(visit, server):
    chat = visit(server)
    chat.expected_fault = FAILED
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=503,
            json={"error": {"message": "The model is loading."}},
            headers={"retry-after": "3000"},
        ),
    )
    chat.ask(SUM)
    expect(chat.page.locator(".status")).to_have_text("The model is loading. Next try in 3000 s.")
    chat.page.get_by_role("button", name="Stop").click()
    chat.wait_until_answered()
    expect(chat.page.locator(".stats")).to_have_text("stopped")


def test_place_in_the_queue_is_shown(visit, endless_server):
    """Four answers run; the fifth conversation waits."""
    chat = visit(endless_server)
    chat.make_answers_endless()
    for _ in range(5):
        chat.page.get_by_role("button", name="New conversation").click()
        chat.ask("a")
        expect(chat.page.get_by_role("button", name="Stop")).to_be_visible()
    expect(chat.page.locator(".status")).to_have_text(re.compile(r"^Number 1 in the queue"))
    chat.page.close()
    endless_server.wait_until_idle()


def test_model_that_does_not_exist_is_named(visit, server):
    chat = visit(server)
    chat.expected_fault = FAILED
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({**json.loads(route.request.post_data), "model": "nothing"})
        ),
    )
    chat.ask(SUM)
    fault = chat.page.locator(".message.assistant .fault")
    expect(fault).to_contain_text("The model 'nothing' does not exist")
    chat.page.unroute("**/v1/chat/completions")
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(chat.answers()).to_have_text("72")


def test_server_that_is_gone_is_reported(visit, start_server):
    server = start_server("--backend.name", "fake", "--context", "32768")
    chat = visit(server)
    chat.make_answers_endless()
    chat.expected_fault = "ERR_"
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    server.stop(signal.SIGKILL)
    fault = chat.page.locator(".message.assistant .fault")
    expect(fault).to_have_text("The connection ended before the answer was complete.")
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(fault).to_have_text("The server cannot be reached. Check that it is running.")


def test_prompt_that_is_too_long_is_explained(visit, server):
    chat = visit(server)
    chat.expected_fault = FAILED
    chat.ask("word " * 3000)
    expect(chat.page.locator(".message.assistant .fault")).to_contain_text("1024")


def test_page_works_in_a_browser_that_stores_nothing(visit, start_server):
    server = start_server("--context", "1024", "--max-num-seqs", "2", "--api-key", "the-key")
    chat = visit(server)
    chat.expected_fault = FAILED
    chat.context.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) "
        "Object.defineProperty(window, name, {get() { throw new Error('blocked') }})"
    )
    chat.page.reload()
    dialog = chat.page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key").fill("the-key")
    dialog.get_by_role("button", name="Save").click()
    chat.page.get_by_role("button", name="Theme: system").click()
    expect(chat.page.get_by_role("button", name="Theme: light")).to_be_visible()
    chat.ask(SUM)
    expect(chat.answers()).to_have_text("72")
