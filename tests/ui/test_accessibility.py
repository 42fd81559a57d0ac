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

The sum $a + b$ and

$$\\int_0^1 x^2 dx = \\frac{1}{3}$$
"""
DESK = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


def show_rich_answer(chat) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat.stream(
        {"content": RICH, "reasoning_content": "Because `it` is."},
        {"tool_calls": [call]},
    )
    chat.ask("Show me everything.")
    chat.wait_until_answered()
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(chat.page.locator(".versions")).to_be_visible()
    chat.page.locator("details.reasoning summary").click()
    expect(chat.page.locator(".katex")).to_have_count(2)


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
    chat.set(Answer_format="JSON with this schema", JSON_schema="{")
    chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_text("More parameters").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    chat.page.keyboard.press("ControlOrMeta+k")
    expect(chat.page.get_by_label("Search in conversations")).to_be_focused()
    chat.page.keyboard.type("everything")
    expect(chat.page.locator("dialog [role=option]")).to_have_count(1)
    check(chat)
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    chat.page.locator("input.attach").set_input_files(
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"some notes"}
    )
    expect(chat.page.locator(".attachments")).to_be_visible()
    check(chat)
    open_list(chat)
    check(chat)
    chat.page.get_by_role("button", name="Actions for").click()
    check(chat)
    chat.page.get_by_role("menuitem", name="Rename").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    chat.page.get_by_role("button", name="API key").click()
    check(chat)
    chat.page.keyboard.press("Escape")
    chat.page.get_by_role("link", name="Models").click()
    chat.page.get_by_text("Chat template").click()
    chat.page.get_by_text("Metadata of the file").click()
    expect(chat.page.get_by_text("general.parameter_count")).to_be_visible()
    check(chat)


def open_list(chat) -> None:
    """Show the list of conversations, which is hidden on phones."""
    button = chat.page.get_by_role("button", name="Conversations", exact=True)
    if button.is_visible():
        button.click()
    expect(chat.page.get_by_role("navigation")).to_be_visible()


def test_phone_has_one_row_at_the_top_and_the_list_over_the_page(visit, server):
    chat = visit(server, viewport=PHONE)
    row = chat.page.locator(".top")
    tops = row.locator(":scope > :visible").evaluate_all(
        "all => all.map(one => { const box = one.getBoundingClientRect(); "
        "return Math.round(box.top + box.height / 2) })"
    )
    assert len(tops) >= 4
    assert max(tops) - min(tops) <= 1
    assert row.bounding_box()["height"] < 60
    sidebar = chat.page.get_by_role("navigation")
    expect(sidebar).to_be_hidden()
    open_list(chat)
    chat.page.keyboard.press("Escape")
    expect(sidebar).to_be_hidden()
    open_list(chat)
    chat.page.locator(".shade").click(position={"x": 380, "y": 400})
    expect(sidebar).to_be_hidden()


def test_long_names_are_shortened_and_have_a_tooltip(visit, server):
    chat = visit(server)
    title = "What is 27 plus 45? " * 5
    chat.import_conversations({"title": title, "messages": []})
    entry = chat.page.locator(".sidebar .title")
    expect(entry).to_have_attribute("title", title)
    assert entry.evaluate("one => one.scrollWidth > one.clientWidth")
    assert entry.evaluate("one => getComputedStyle(one).textOverflow") == "ellipsis"


def test_nothing_moves_for_those_who_want_no_motion(visit, server):
    durations = (
        "all => all.map(one => getComputedStyle(one))"
        ".flatMap(style => [style.transitionDuration, style.animationName])"
    )
    for wanted, moves in (("reduce", False), ("no-preference", True)):
        chat = visit(server, reduced_motion=wanted)
        chat.page.keyboard.press("ControlOrMeta+k")
        expect(chat.page.get_by_role("dialog")).to_be_visible()
        found = set(chat.page.locator("button, nav, dialog").evaluate_all(durations))
        assert (found != {"0s", "none"}) == moves


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
    open_list(chat)
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


def test_progress_of_a_load_is_shown(visit, start_server, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("models: {one: {preload: true}, two: {}}\n")
    chat = visit(start_server("--config", str(config), "--context", "1024"))
    progress = {"status": "loading", "progress": {"value": 0.42}}
    events = [
        {"model": "one", "event": "model_status", "data": {"status": "loaded"}},
        {"model": "two", "event": "model_status", "data": progress},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    chat.page.route(
        "**/models/sse", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    held = []

    def hold(route):
        held.append(route)

    chat.page.route("**/v1/chat/completions", hold)
    chat.page.route("**/api/generate", hold)
    chat.page.get_by_label("Model", exact=True).select_option("two")
    chat.ask("What is 27 plus 45?")
    expect(chat.page.locator(".message .status")).to_contain_text("Loading the model 42 %")
    chat.page.get_by_role("link", name="Models").click()
    chat.page.get_by_text("two", exact=True).last.click()
    chat.page.get_by_role("button", name="Load", exact=True).click()
    view = chat.page.get_by_role("region", name="Models")
    expect(view.get_by_text("Loading the model 42 %")).to_be_visible()
    for route in held:
        route.continue_()
    expect(view.locator(".badge")).to_have_text(["loaded", "loaded"])
    expect(view.get_by_text("Loading the model")).to_have_count(0)
    expect(chat.page.get_by_text("Parallel sequences")).to_have_count(2)
    chat.page.locator(".sidebar .title").click()
    expect(chat.answers()).to_have_text("72")
    chat.page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("may_change", [True, False])
def test_model_is_loaded_and_unloaded(visit, start_server, tmp_path, may_change):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"models: {{one: {{preload: true}}, two: {{}}}}\nserver: {{allow_model_changes: {may_change}}}\n"
    )
    chat = visit(start_server("--config", str(config), "--context", "1024"))
    chat.page.get_by_role("link", name="Models").click()
    states = chat.page.locator(".models .badge")
    expect(states).to_have_text(["loaded", re.compile("not loaded|unloaded")])
    chat.page.get_by_text("two", exact=True).last.click()
    chat.page.get_by_role("button", name="Load", exact=True).click()
    expect(states).to_have_text(["loaded", "loaded"])
    expect(chat.page.get_by_text("Parallel sequences")).to_have_count(2)
    if not may_change:
        chat.expected_fault = "Failed to load resource"
    chat.page.get_by_role("button", name="Unload").last.click()
    if may_change:
        expect(states).to_have_text(["loaded", re.compile("not loaded|unloaded")])
        expect(chat.page.get_by_text("Parallel sequences")).to_have_count(1)
    else:
        expect(chat.page.get_by_role("alert")).to_contain_text("allow_model_changes")
        expect(states).to_have_text(["loaded", "loaded"])


def test_code_can_be_copied(visit, server):
    chat = visit(server, permissions=["clipboard-read", "clipboard-write"])
    show_rich_answer(chat)
    chat.page.locator("button.copy").first.click()
    expect(chat.page.locator("button.copy").first).to_have_text("Copied")
    copied = chat.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("@cache\ndef add(")
