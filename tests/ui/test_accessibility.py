"""axe-core finds no violation in any view, and phones need not scroll sideways."""

import json
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]

RICH = """# A heading
Some *text* with `code` and a [link](https://example.com/).

## Another

```python
@cache
def add(a: int, b: int = 1) -> str:  # comment
    return f"{a + b}" * 2  # a line that is so long that a phone cannot show it without scrolling it
```

| number | square |
|-------:|--------|
| 1 | 1 |

> quoted

1. one
2. two
"""
DESK = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


def show_rich_answer(chat) -> None:
    delta = {"content": RICH, "reasoning_content": "Because `it` is."}
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chunks = [{"choices": [{"delta": delta}]}, {"choices": [{"delta": {"tool_calls": [call]}}]}]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks]) + "data: [DONE]\n\n"
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=events, content_type="text/event-stream"),
    )
    chat.ask("Show me everything.")
    chat.wait_until_answered()
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(chat.page.locator(".versions")).to_be_visible()
    chat.page.locator("details.reasoning summary").click()


def check(chat) -> None:
    results = Axe().run(chat.page)
    assert results.violations_count == 0, results.generate_report()
    width = chat.page.viewport_size["width"]
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
    overflow = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    assert chat.page.locator(".log, .models, .sidebar, dialog").evaluate_all(overflow) == 0


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("light", DESK, id="light-desk"),
        pytest.param("dark", PHONE, id="dark-phone"),
        pytest.param("dark", DESK, id="dark-desk", marks=pytest.mark.full),
        pytest.param("light", PHONE, id="light-phone", marks=pytest.mark.full),
    ],
)
def test_no_view_has_violations(visit, server, scheme, size):
    chat = visit(server, color_scheme=scheme, viewport=size)
    check(chat)
    show_rich_answer(chat)
    check(chat)
    chat.page.get_by_role("button", name="Edit").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    chat.set(Answer="JSON with this schema", JSON_schema="{")
    chat.page.get_by_role("button", name="Settings").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    chat.page.get_by_role("button", name="API key").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    if size == PHONE:
        chat.page.get_by_role("button", name="Conversations").click()
        expect(chat.page.get_by_role("navigation")).to_be_visible()
    check(chat)
    chat.page.get_by_role("button", name="Rename").click()
    check(chat)
    chat.page.get_by_role("link", name="Models").click()
    chat.page.get_by_text("Chat template").click()
    chat.page.get_by_text("Metadata of the file").click()
    expect(chat.page.get_by_text("general.parameter_count")).to_be_visible()
    check(chat)


def test_long_words_do_not_make_a_phone_scroll_sideways(visit, server):
    chat = visit(server, viewport=PHONE)
    chat.expected_fault = "Failed to load resource"
    chat.page.route(
        "**/v1/models",
        lambda route: route.fulfill(json={"data": [{"id": "M" * 300, "root": "constructor"}]}),
    )
    chat.page.reload()
    expect(chat.page.get_by_role("heading", name="MMM")).to_be_visible()
    check(chat)
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": {"message": "E" * 500}}),
    )
    chat.ask("w" * 500)
    expect(chat.page.locator(".fault")).to_be_visible()
    expect(chat.page.locator(".message.assistant .stats")).to_have_text("")
    check(chat)
    chat.page.get_by_role("link", name="Models").click()
    expect(chat.page.locator(".models summary")).to_be_visible()
    check(chat)


def test_colours_are_switched_and_remembered(visit, server):
    chat = visit(server, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = chat.page.evaluate(ground)
    for name in ("light", "dark"):
        chat.page.get_by_role("button", name="Theme").click()
        expect(chat.page.get_by_role("button", name=f"Theme: {name}")).to_be_visible()
    assert chat.page.evaluate(ground) != light
    check(chat)
    chat.page.reload()
    expect(chat.page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert chat.page.evaluate(ground) != light


def test_models_view_shows_what_the_server_knows(visit, server):
    chat = visit(server)
    chat.page.get_by_role("link", name="Models").click()
    view = chat.page.get_by_role("region", name="Models")
    for text in ("cllm-builtin", "loaded", "qwen3", "Q8_0", "1024 tokens, trained with", "tools"):
        expect(view.get_by_text(text).first).to_be_visible()
    expect(view.get_by_text("im_start").first).to_be_hidden()
    chat.page.get_by_role("button", name="Chat with it").click()
    expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()


def test_model_that_is_not_loaded_is_described_and_not_loaded(visit, start_server, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("models: {one: {preload: true}, two: {}}\n")
    server = start_server("--config", str(config))
    chat = visit(server)
    expect(chat.page.get_by_label("Model", exact=True)).to_have_text(
        re.compile(r"^one\s*two \(not loaded\)\s*$")
    )
    chat.page.get_by_role("link", name="Models").click()
    chat.page.get_by_text("two", exact=True).last.click()
    expect(chat.page.get_by_text("Capabilities")).to_have_count(2)
    assert len(server.client.get("/api/ps").json()["models"]) == 1
    chat.page.get_by_role("button", name="Chat with it").last.click()
    expect(
        chat.page.get_by_text("The server loads this model with your first message.")
    ).to_be_visible()
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    expect(chat.page.locator(".message.assistant h2")).to_have_text("two")
    expect(chat.page.get_by_label("Model", exact=True)).not_to_contain_text("not loaded")


def test_code_can_be_copied(visit, server):
    chat = visit(server, permissions=["clipboard-read", "clipboard-write"])
    show_rich_answer(chat)
    chat.page.locator("button.copy").first.click()
    expect(chat.page.locator("button.copy").first).to_have_text("Copied")
    copied = chat.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("@cache\ndef add(")
