"""The search in conversations."""

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]


def make_conversation(title: str, *texts: str) -> dict:
    """Return a conversation of the user with an assistant, in the form of an exported file."""
    messages = [
        {
            "id": f"{title}-{number}",
            "parent": f"{title}-{number - 1}" if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": text,
        }
        for number, text in enumerate(texts)
    ]
    return {"title": title, "messages": messages}


def test_search_finds_messages_and_opens_them(visit, server):
    chat = visit(server)
    chat.import_conversations(
        make_conversation(
            "Rome", *[f"line {number}" for number in range(300)], "the Tiber (river)"
        ),
        make_conversation("Cooking", "How long do eggs boil?", "Eight minutes."),
        make_conversation("Needle", *["hay"] * 150, "the needle <b>", *["hay"] * 150),
    )
    expect(chat.page.locator(".sidebar .title")).to_have_count(3)
    chat.page.keyboard.press("ControlOrMeta+k")
    box = chat.page.get_by_role("combobox", name="Search in conversations")
    expect(box).to_be_focused()
    results = chat.page.locator("dialog [role=option]")
    expect(results).to_have_count(3)
    box.fill("river) TIBER")
    expect(results).to_have_count(1)
    expect(results.locator("mark")).to_have_text("river)")
    box.fill("nothing like this")
    expect(chat.page.get_by_text("Nothing was found.")).to_be_visible()
    box.fill("needle <b>")
    expect(results).to_have_count(1)
    chat.page.keyboard.press("Enter")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    found = chat.page.locator(".message.found")
    expect(found.locator(".text")).to_have_text("the needle <b>")
    expect(found).to_be_in_viewport()
    chat.page.get_by_role("button", name="Jump to the latest message").click()
    expect(chat.page.locator(".message").last).to_be_in_viewport()
    expect(chat.page.get_by_role("button", name="Jump to the latest message")).to_have_count(0)


def test_results_are_chosen_with_the_arrow_keys(visit, server):
    chat = visit(server)
    chat.import_conversations(make_conversation("One", "same"), make_conversation("Two", "same"))
    chat.page.keyboard.press("ControlOrMeta+k")
    chat.page.keyboard.type("same")
    results = chat.page.locator("dialog [role=option]")
    expect(results).to_have_count(2)
    expect(results.first).to_have_attribute("aria-selected", "true")
    chat.page.keyboard.press("ArrowDown")
    expect(results.last).to_have_attribute("aria-selected", "true")
    title = results.last.locator("strong").inner_text()
    chat.page.keyboard.press("Enter")
    expect(chat.page).to_have_title(f"{title} · cLLM")


def test_search_shows_the_version_that_has_the_message(visit, server):
    chat = visit(server)
    conversation = make_conversation("Versions", "question", "first answer")
    other = {**conversation["messages"][1], "id": "other", "content": "second answer"}
    conversation["messages"].append(other)
    chat.import_conversations(conversation)
    expect(chat.answers()).to_have_text("second answer")
    chat.page.get_by_role("button", name="Search").click()
    chat.page.keyboard.type("first")
    expect(chat.page.locator("dialog [role=option]")).to_have_count(1)
    chat.page.keyboard.press("Enter")
    expect(chat.answers()).to_have_text("first answer")
