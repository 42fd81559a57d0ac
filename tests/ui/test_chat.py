"""The chat in a browser, with real servers."""

import json
import re

import pytest
from playwright.sync_api import expect

from cllm.models.builtin.questions import TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.llama]

SUM = "What is 27 plus 45?"
STORY = "Tell me a story about a fox."


def test_answer_has_its_text_and_figures(visit, server):
    chat = visit(server)
    chat.ask(SUM)
    expect(chat.answers()).to_have_text("72")
    stats = chat.page.locator(".stats")
    expect(stats).to_have_text(
        re.compile(r"first token after [\d.]+ m?s · 3 tokens · prompt \d+, \d+ cached")
    )
    expect(chat.page).to_have_title(f"{SUM} · cLLM")


def test_longer_answer_has_its_tokens_per_second(visit, server):
    chat = visit(server)
    chat.ask(STORY)
    chat.wait_until_answered()
    expect(chat.page.locator(".stats")).to_have_text(
        re.compile(r" · [\d.]+ tokens/s · \d+ tokens · ")
    )


def test_example_is_asked_with_a_click(visit, server):
    chat = visit(server)
    expect(chat.page.get_by_role("heading", name="Ask cllm-builtin")).to_be_visible()
    chat.page.get_by_role("button", name=SUM).click()
    expect(chat.answers()).to_have_text("72")


def test_second_turn_reuses_the_prefix(visit, server):
    chat = visit(server)
    chat.set(System_prompt="You are a helpful assistant who answers short questions about numbers.")
    chat.ask(SUM)
    chat.wait_until_answered()
    chat.ask("What is 31 plus 12?")
    expect(chat.answers().last).to_have_text("43")
    expect(chat.page.locator(".stats").last).to_have_text(re.compile(r", [1-9]\d* cached"))


def test_stop_frees_the_sequence_and_keeps_the_text(visit, endless_server):
    chat = visit(endless_server)
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    assert endless_server.stats()["num_running"] == 1
    chat.page.get_by_role("button", name="Stop").click()
    endless_server.wait_until_idle()
    chat.wait_until_answered()
    expect(chat.page.locator(".stats")).to_have_text(
        re.compile(r"^first token after .* · \d+ tokens · prompt \d+, \d+ cached · stopped$")
    )
    expect(chat.answers()).to_have_text(re.compile("abc"))


def test_closing_the_tab_frees_the_sequence(visit, endless_server):
    chat = visit(endless_server)
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    chat.page.close()
    endless_server.wait_until_idle()


def test_stopped_answer_is_continued(visit, server):
    chat = visit(server)
    chat.set(Max_tokens="9", Temperature="0")
    chat.ask(STORY)
    chat.wait_until_answered()
    expect(chat.page.locator(".stats")).to_contain_text("reached the token limit")
    begun = chat.answers().inner_text()
    chat.set(Max_tokens="")
    chat.page.get_by_role("button", name="Continue").click()
    chat.wait_until_answered()
    whole = chat.answers().inner_text()
    assert whole.startswith(begun)
    assert whole.endswith("The end.")


def test_edit_adds_a_branch_and_keeps_the_old_one(visit, server):
    chat = visit(server)
    chat.ask(SUM)
    expect(chat.answers()).to_have_text("72")
    chat.ask("What is 31 plus 12?")
    expect(chat.answers()).to_have_text(["72", "43"])
    chat.page.get_by_role("button", name="Edit").first.click()
    chat.page.get_by_label("Edit the message").fill("What is 20 plus 33?")
    chat.page.keyboard.press("Enter")
    expect(chat.answers()).to_have_text(["53"])
    expect(chat.page.locator(".versions")).to_have_text(re.compile(r"2 of 2"))
    chat.page.get_by_role("button", name="Earlier version").click()
    expect(chat.answers()).to_have_text(["72", "43"])
    chat.page.get_by_role("button", name="Later version").click()
    expect(chat.answers()).to_have_text(["53"])
    chat.wait_until_answered()
    chat.page.reload()
    expect(chat.answers()).to_have_text(["53"])


def test_regenerate_adds_a_version(visit, server):
    chat = visit(server)
    chat.ask(SUM)
    chat.wait_until_answered()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.wait_until_answered()
    expect(chat.answers()).to_have_text(["72"])
    expect(chat.page.locator(".message.assistant .versions")).to_have_text(re.compile("2 of 2"))


def test_json_schema_binds_the_answer(visit, server):
    chat = visit(server)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    chat.set(Answer_format="JSON with this schema", JSON_schema=json.dumps(schema))
    chat.ask("As JSON: name Anna, age 30.")
    chat.wait_until_answered()
    shown = json.loads(chat.page.locator(".message.assistant pre").inner_text())
    assert set(shown) == {"name", "age"}
    assert isinstance(shown["age"], int)


def test_wrong_settings_are_named(visit, server):
    chat = visit(server)
    chat.set(Answer_format="JSON with this schema", JSON_schema="{")
    chat.ask(SUM)
    expect(chat.page.get_by_role("alert")).to_contain_text("JSON schema: this is not JSON.")
    chat.set(Answer_format="Text", Top_P="7")
    chat.expected_fault = "400"
    expect(chat.page.get_by_label("Message", exact=True)).to_have_value(SUM)
    chat.page.get_by_role("button", name="Send").click()
    expect(chat.page.locator(".message.assistant .fault")).to_contain_text("'top_p'")


def test_tool_call_is_shown_and_its_result_answered(visit, server):
    chat = visit(server)
    tools = [TOOLS["multiply"].declare("multiply")]
    chat.set(Tools=json.dumps(tools), Temperature="0")
    chat.ask("Multiply 12 by 31.")
    expect(chat.page.locator(".call")).to_contain_text("multiply")
    expect(chat.page.locator(".call pre")).to_contain_text("31")
    chat.page.get_by_label("Result of multiply").fill('{"product": 372}')
    chat.page.get_by_role("button", name="Send result").click()
    expect(chat.answers().last).to_contain_text("372")


def test_reasoning_ends_with_a_click(visit, start_server):
    server = start_server("--server.enable-faults")
    chat = visit(server)
    chat.set(Reasoning="Long", Max_tokens="400")
    slow = {"kind": "slow", "seconds": 1.0, "num_steps": 100_000}
    assert server.client.post("/faults", json={"faults": [slow]}).status_code == 200
    chat.ask(SUM)
    button = chat.page.get_by_role("button", name="Answer now")
    button.click()
    expect(button).to_be_disabled()
    assert server.client.post("/faults", json={"faults": []}).status_code == 200
    chat.wait_until_answered()
    expect(button).to_have_count(0)
    expect(chat.answers().last).to_have_text(re.compile("."))
    assert server.metric("reasoning_ended_total") == 1


def test_reasoning_is_folded(visit, server):
    chat = visit(server)
    chat.set(Reasoning="Long", Max_tokens="60")
    chat.ask(SUM)
    chat.wait_until_answered()
    reasoning = chat.page.locator("details.reasoning")
    expect(reasoning).to_be_visible()
    assert reasoning.get_attribute("open") is None


def test_keyboard_alone_is_enough(visit, server):
    """Ask, edit, go back to the first version, change a setting, and start another conversation."""
    chat = visit(server)
    keys = chat.page.keyboard

    def tab_to(name, back=False):
        for _ in range(60):
            keys.press("Shift+Tab" if back else "Tab")
            focused = chat.page.evaluate(
                "(e => e.ariaLabel ?? e.textContent.trim())(document.activeElement)"
            )
            if focused == name:
                return
        raise AssertionError(f"{name!r} cannot be reached")

    keys.type(SUM)
    keys.press("Shift+Enter")
    keys.press("Backspace")
    keys.press("Enter")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    keys.press("ArrowUp")
    expect(chat.page.get_by_label("Edit the message")).to_be_focused()
    keys.press("ControlOrMeta+A")
    keys.type("What is 20 plus 33?")
    keys.press("Enter")
    expect(chat.answers()).to_have_text("53")
    chat.wait_until_answered()
    tab_to("Earlier version", back=True)
    keys.press("Enter")
    expect(chat.answers()).to_have_text("72")
    tab_to("Settings", back=True)
    keys.press("Enter")
    expect(chat.page.get_by_role("dialog")).to_be_visible()
    keys.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    expect(chat.page.get_by_role("button", name="Settings")).to_be_focused()
    tab_to("New conversation")
    keys.press("Enter")
    expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
    expect(chat.answers()).to_have_count(0)


def test_escape_stops(visit, endless_server):
    chat = visit(endless_server)
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    chat.page.keyboard.press("Escape")
    chat.wait_until_answered()
    endless_server.wait_until_idle()


def test_escape_stops_wherever_the_focus_is(visit, endless_server):
    chat = visit(endless_server)
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    chat.page.evaluate("document.activeElement.blur()")
    chat.page.keyboard.press("Escape")
    endless_server.wait_until_idle()
    chat.wait_until_answered()


def test_enter_in_an_input_method_does_not_send(visit, server):
    """Enter chooses a word there. Safari has only the key code as a sign of it."""
    chat = visit(server)
    box = chat.page.get_by_label("Message", exact=True)
    box.fill("今日")
    key = (
        '(box) => box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true%s}))'
    )
    for sign in ("isComposing: true", "keyCode: 229"):
        box.evaluate(key % f", {sign}")
        expect(box).to_have_value("今日")
        expect(chat.page.locator(".message")).to_have_count(0)
    box.evaluate(key % "")
    expect(chat.page.locator(".message.user .text")).to_have_text("今日")
    chat.wait_until_answered()


def test_answer_continues_while_another_conversation_is_read(visit, endless_server):
    chat = visit(endless_server)
    chat.make_answers_endless()
    chat.ask("a")
    expect(chat.answers()).to_have_text(re.compile("abc"))
    chat.page.get_by_role("button", name="New conversation").click()
    expect(chat.answers()).to_have_count(0)
    assert endless_server.stats()["num_running"] == 1
    chat.page.get_by_role("button", name="a …").click()
    chat.page.get_by_role("button", name="Stop").click()
    endless_server.wait_until_idle()


def test_page_works_under_a_path_of_a_proxy(visit, server):
    """A proxy that removes /llm: no address in the page begins with a slash."""
    chat = visit(server)
    asked = []

    def forward(route):
        route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/")))

    chat.page.close()
    chat.page = chat.context.new_page()
    chat.page.on("request", lambda request: asked.append(request.url))
    chat.context.route("**/llm/**", forward)
    chat.page.goto(f"{server.url}/llm/")
    chat.ask(SUM)
    expect(chat.answers()).to_have_text("72")
    chat.page.get_by_role("link", name="Models").click()
    expect(chat.page.get_by_text("Capabilities")).to_be_visible()
    chat.page.get_by_role("link", name="API", exact=True).click()
    expect(chat.page.locator("summary").first).to_be_visible()
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith(f"{server.url}/llm/")] == []


def test_model_is_switched_within_a_conversation(visit, start_server, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("models: {one: {preload: true}, two: {preload: true}}\n")
    chat = visit(start_server("--config", str(config), "--context", "1024"))
    chat.ask(SUM)
    chat.wait_until_answered()
    chat.page.get_by_label("Model", exact=True).select_option("two")
    chat.ask("What is 31 plus 12?")
    chat.wait_until_answered()
    expect(chat.page.locator(".message.assistant h2")).to_have_text(["one", "two"])
    expect(chat.answers()).to_have_text(["72", "43"])
    chat.reload()
    expect(chat.page.get_by_label("Model", exact=True)).to_have_value("two")
    chat.page.get_by_label("Model", exact=True).select_option("one")
    chat.page.locator(".message.assistant").last.get_by_role("button", name="Regenerate").click()
    expect(chat.page.locator(".message.assistant h2")).to_have_text(["one", "one"])
    chat.wait_until_answered()


def test_shortcut_starts_a_conversation(visit, server):
    chat = visit(server)
    chat.ask(SUM)
    chat.wait_until_answered()
    chat.page.keyboard.press("ControlOrMeta+Shift+O")
    expect(chat.page.locator(".welcome")).to_be_visible()
    expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()


def test_used_context_is_shown(visit, server):
    chat = visit(server)
    expect(chat.page.locator(".figures")).to_have_text("")
    chat.ask(SUM)
    expect(chat.page.locator(".figures")).to_have_text(re.compile(r"^\d+ of 1,024 tokens$"))
