"""The list of conversations, which are in the browser."""

import json
import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]


def test_conversations_are_kept_renamed_found_and_deleted(visit, server):
    chat = visit(server)
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    chat.choose("Rename")
    chat.page.get_by_label("Title").fill("A sum")
    chat.page.keyboard.press("Enter")
    chat.page.get_by_role("button", name="New conversation").click()
    chat.ask("What is 31 plus 12?")
    expect(chat.answers()).to_have_text("43")
    chat.wait_until_answered()
    chat.reload()
    entries = chat.page.locator(".sidebar .title")
    expect(entries).to_have_text(["What is 31 plus 12?", "A sum"])
    entries.last.click()
    expect(chat.answers()).to_have_text("72")
    chat.page.go_back()
    expect(chat.answers()).to_have_text("43")
    chat.choose("Delete")
    expect(entries).to_have_text(["A sum"])
    chat.page.get_by_role("button", name="Undo").click()
    expect(entries).to_have_count(2)
    chat.reload()
    expect(entries).to_have_count(2)


SLOW_STORE = """
const getAll = IDBObjectStore.prototype.getAll;
const released = new Promise((resolve) => (window.releaseStore = resolve));
IDBObjectStore.prototype.getAll = function (...values) {
  const request = getAll.apply(this, values);
  const late = {};
  request.onsuccess = async () => {
    await released;
    late.result = request.result;
    late.onsuccess();
  };
  return late;
};
"""  # reads nothing until releaseStore is called


def test_message_may_be_sent_before_the_stored_conversations_are_read(visit, server):
    chat = visit(server)
    chat.ask("What is 31 plus 12?")
    expect(chat.answers()).to_have_text("43")
    chat.wait_until_answered()
    chat.context.add_init_script(SLOW_STORE)
    chat.page.goto(f"{server.url}/")
    expect(chat.page.get_by_role("heading", name="Ask")).to_be_visible()
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    chat.page.evaluate("releaseStore()")
    entries = chat.page.locator(".sidebar .title")
    expect(entries).to_have_text(["What is 27 plus 45?", "What is 31 plus 12?"])
    expect(chat.answers()).to_have_text("72")


def test_exported_conversations_can_be_imported(visit, server, tmp_path):
    chat = visit(server)
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    with chat.page.expect_download() as download:
        chat.export_all()
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    stored = json.loads(path.read_text())
    assert stored["format"] == "cllm-conversations"
    assert stored["conversations"][0]["messages"][1]["content"] == "72"
    other = visit(server)
    expect(other.page.locator(".sidebar .title")).to_have_count(0)
    other.page.locator(".sidebar input[type=file]").set_input_files(path)
    other.page.locator(".sidebar .title").click()
    expect(other.answers()).to_have_text("72")


def test_other_files_are_not_imported(visit, server):
    chat = visit(server)
    for text in ("[]", "no JSON", '{"format": "x"}'):
        file = {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
        chat.page.locator(".sidebar input[type=file]").set_input_files(file)
        expect(chat.page.get_by_role("alert")).to_contain_text("The file cannot be imported")
        expect(chat.page.locator(".sidebar .title")).to_have_count(0)
        chat.page.get_by_role("button", name="Dismiss").click()
        expect(chat.page.get_by_role("alert")).to_have_count(0)


def test_other_tabs_see_new_conversations(visit, server):
    chat = visit(server)
    other = chat.context.new_page()
    other.goto(chat.url)
    expect(other.get_by_label("Message", exact=True)).to_be_visible()
    chat.ask("What is 27 plus 45?")
    expect(other.locator(".sidebar .title")).to_have_text("What is 27 plus 45?")


def start_endless_answer(chat):
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))


def test_deleting_a_conversation_stops_its_answer_and_it_stays_deleted(visit, endless_server):
    chat = visit(endless_server)
    start_endless_answer(chat)
    chat.choose("Delete")
    endless_server.wait_until_idle()
    expect(chat.page.locator(".sidebar .title")).to_have_count(0)
    chat.ask("b")  # its own saves come after those of the deleted conversation
    expect(chat.answers()).to_have_text(re.compile("bcd"))
    chat.page.get_by_role("button", name="Stop").click()
    chat.wait_until_answered()
    chat.reload()
    expect(chat.page.locator(".sidebar .title")).to_have_text(["b"])


def test_conversation_that_was_empty_at_a_reload_is_found_again(visit, server):
    chat = visit(server)
    chat.page.get_by_role("button", name="New conversation").click()
    chat.reload()
    expect(chat.page.locator(".welcome button")).to_have_count(3)
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    chat.reload()
    expect(chat.answers()).to_have_text("72")
    chat.page.get_by_role("button", name="New conversation").click()
    chat.page.locator(".sidebar .title").click()
    expect(chat.answers()).to_have_text("72")
    chat.page.go_back()
    expect(chat.page.locator(".welcome")).to_be_visible()
    expect(chat.page.locator(".message")).to_have_count(0)


def test_messages_of_two_tabs_are_both_kept(visit, endless_server):
    chat = visit(endless_server)
    start_endless_answer(chat)
    other = chat.context.new_page()
    other.goto(chat.page.url)
    other.get_by_label("Message", exact=True).fill("second")
    other.locator(".composer").get_by_role("button", name="Send").click()
    expect(other.locator(".message.user .text")).to_have_text(["a", "second"])
    expect(other.locator(".message").last).to_have_text(re.compile("efg"))
    for page in (other, chat.page):
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".composer").get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator(".message").last).to_have_attribute("aria-busy", "false")
    with chat.page.expect_download() as download:
        chat.choose("Export as JSON")
    (stored,) = json.loads(download.value.path().read_text())["conversations"]
    texts = [one["content"] for one in stored["messages"] if one["role"] == "user"]
    assert texts == ["a", "second"]


def test_draft_is_kept_while_the_models_are_read(visit, server):
    chat = visit(server)
    box = chat.page.get_by_label("Message", exact=True)
    box.fill("half a question")
    chat.page.get_by_role("link", name="Models").click()
    expect(box).to_have_count(0)
    chat.page.go_back()
    expect(box).to_have_value("half a question")
